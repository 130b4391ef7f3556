"""The documents say what is there: names, links, commands, presets and keys that they mention exist, and examples run."""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import models
import pytest
import torch
from documents import (
    CHECKED,
    CODE,
    DOCS,
    FENCE,
    PAGES,
    ROOT,
    SPAN,
    blocks,
    command_problem,
    commands,
    config_keys,
    generator,
    in_module,
    load_file,
    own_module,
    problem,
    spans,
    text_of,
)
from toys import run_chain

from stages.frame.contract import Outputs
from stages.frame.types import Outcome
from stages.play.transitions import episode_rows
from stages.store.execute import execute
from stages.store.workspace import Workspace
from stages.train.rows import TrainRow


def test_the_generated_pages_are_what_the_code_says() -> None:
    assert generator().main(["--check"]) == 0, "run: make docs"


@pytest.mark.parametrize("page", CHECKED)
def test_what_stands_in_backticks_exists(page: str) -> None:
    text = text_of(DOCS / page)
    wrong = {span: said for span in spans(DOCS / page) if (said := problem(span, text))}
    assert not wrong


def test_the_check_of_backticks_finds_what_is_not_there() -> None:
    for span in (
        "stages/nothing.py",
        "tests/test_docs.py::test_nothing",
        "targets.nothing",
        "critic.nothing",
        "critic.lr=fast",
        "--nothing",
    ):
        assert problem(span), span
    for span in (
        "turnwise run no_such_preset",
        "turnwise nothing RUN",
        "make nothing",
        "NoSuchClass",
        "Outcome.NOTHING",
        "x + y",
    ):
        assert problem(span), span


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", text_of(page))):
        if re.match(r"[a-z]+:", target):
            continue  # the web
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), f"{page.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", text_of(file), re.MULTILINE)
            slugs = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
            assert anchor in slugs, f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_presets_are_ones_that_there_are(page: Path) -> None:
    from flows import parts

    text = text_of(page)
    wrong = {line: said for line in commands(page) if (said := command_problem(line))}
    assert not wrong
    named = re.findall(r"presets?(?: |/)`?([a-z]\w*)(?:`|\.toml)", text)
    assert not [name for name in named if name not in parts.kinds() and name == parts.current(name)]


def test_commands_in_docstrings_are_ones_that_there_are() -> None:
    for path in CODE:
        lines = re.findall(
            r"^\s*(turnwise [a-z]+(?: .*)?)$", ast.get_docstring(ast.parse(text_of(path))) or "", re.MULTILINE
        )
        wrong = {line: said for line in lines if (said := command_problem(line.partition("  ")[0]))}
        assert not wrong, path.name


def test_every_room_has_a_phrase_for_every_file_and_is_in_the_page() -> None:
    page = text_of(DOCS / "reference/rooms.md")
    for path in CODE:
        room = page.partition(f"## {path.parent.relative_to(ROOT)}/\n")[2].partition("\n## ")[0]
        assert path.name == "__init__.py" or re.search(rf"^\| `{path.name}` \| \S", room, re.MULTILINE), path
        assert room, path


def test_every_row_of_the_paper_map_has_code_and_a_test() -> None:
    for line in text_of(DOCS / "reference/paper-map.md").splitlines():
        if (
            line.startswith("| ")
            and not re.match(r"\| (?:what|key|--)", line)
            and len(re.findall(r"(?<!\\)\|", line)) == 5
        ):
            assert "`tests/" in line, f"no test: {line}"
            assert any(in_module(span) or (ROOT / span).exists() for span in SPAN.findall(line) if "::" not in span), (
                f"no code: {line}"
            )


def test_every_default_of_the_paper_is_in_the_paper_map() -> None:
    named = set(spans(DOCS / "reference/paper-map.md"))
    stated = [
        key
        for key, field in config_keys().items()
        if re.search(r"\[[^\]]*(?:paper|slides)[^\]]*\]", field.description or "")
    ]
    assert stated
    assert not [key for key in stated if key not in named]


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The environment of the tutorial, in a project folder of its own, and its name."""
    with own_module(tmp_path, "my.crossing", blocks("tutorial/environment.md", "python")[0], monkeypatch) as name:
        yield name


def test_the_environment_of_the_page_keeps_the_contract(example: str, monkeypatch: pytest.MonkeyPatch) -> None:
    contract = load_file(ROOT / "tests" / "envs" / "test_contract.py", "contract_of_the_example")
    monkeypatch.setitem(contract.REPLIES, example, ["stop"])
    contract.MADE[example], contract.FIRST[example] = contract.maker(example)(), contract.subject(example).first
    tests = [test for name, test in vars(contract).items() if name.startswith("test_")]
    of_each = [test for test in tests if [*inspect.signature(test).parameters] == ["name"]]
    for test in of_each:
        test(example)
    assert len(of_each) >= 7


def test_the_environment_of_the_page_is_won_by_its_rules_and_by_nobody_who_always_stops(example: str) -> None:
    from stages import envs
    from stages.frame.types import Request
    from stages.llm.roles import load_roles
    from stages.llm.scripted import ScriptedEngine
    from stages.play.rollout import RolloutSettings, rollout
    from stages.play.tally import summary

    rules = {
        "red": "stop", "yellow": "wait", "green": "go", "tram": "wait", "bike": "go", "bus": "stop", "lorry": "wait",
    }  # fmt: skip

    def by_rules(prompt: str, request: Request) -> str:
        seen = re.findall(r"You see a (\w+)", prompt)[-1]
        return f"Thought: a rule.\nAction: {rules[seen]}"

    scenarios = envs.scenarios(example, {}, "train", 80, 0)
    settings = RolloutSettings(None, 1.0, 100, 3, 0, 16, 1, 0)
    rates = []
    for reply in (by_rules, lambda prompt, request: "Action: stop"):
        episodes = rollout(
            ScriptedEngine(reply), envs.make_env(example, {}), scenarios, load_roles("service_desk"), settings
        )
        rates.append(summary(episodes, "x")["x/win_rate"])
    assert rates[0] == 1.0
    assert rates[1] < 0.2  # a red light and a bus: one drive in twelve


def test_the_presets_of_the_page_are_read(tmp_path: Path) -> None:
    from flows import presets

    game, ablation, small = (tmp_path / f"{name}.toml" for name in ("game", "ablation", "small"))
    texts = [*blocks("how-to/preset.md", "toml"), *blocks("tutorial/environment.md", "toml")]
    for file, text in zip((game, ablation, small), texts, strict=True):
        file.write_text(text, encoding="utf-8")
    assert presets.load(str(game)).task.env == presets.load(str(small)).task.env == "my.crossing"
    demo = presets.load("demo").model_dump()
    assert presets.load(str(ablation)).model_dump() == demo | {
        "preset": "ablation",
        "refine": demo["refine"] | {"critique": "none"},
    }


def commands_of(page: str, home: Path) -> list[Any]:
    """What the commands of a page that name files of my/ print as JSON, in the order of the page."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    found = []
    for line in (line for line in commands(DOCS / page) if re.search(r"[= ]my[./]\w+ ?", line)):
        plain = ["--plain"] if line.startswith("turnwise run") else []
        words = [*shlex.split(line, comments=True)[1:], "--json", "--quiet", *plain]
        done = subprocess.run(
            [sys.executable, "-m", "turnwise", *words], cwd=home, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout))
    return found


@pytest.mark.slow
def test_the_tutorial_checks_its_environment_makes_a_model_and_learns(home: Path) -> None:
    """The page's own commands in a project folder with the page's own files.

    Actions at random win one drive in 9, and the base model knows no rule.
    """
    (home / "my").mkdir()
    texts = [*blocks("tutorial/environment.md", "python"), *blocks("tutorial/environment.md", "toml")]
    for name, text in zip(("crossing.py", "words.py", "game.toml"), texts, strict=True):
        (home / "my" / name).write_text(text, encoding="utf-8")
    checked, made, run = commands_of("tutorial/environment.md", home)
    assert not any(one["status"] == "broken" for one in checked["findings"])
    assert made["metrics"]["pretrain/policy"] > 0.95
    rates = [one["win_rate"] for one in run["iterations"]]
    assert run["iterations"][0]["metrics"]["evaluate/malformed_frac"] < 0.1
    assert rates[0] < 0.2
    assert max(rates) > rates[0] + 0.1


@pytest.mark.slow
def test_the_small_model_of_the_page_can_be_read_in_every_role(home: Path) -> None:
    (home / "my").mkdir()
    (home / "my" / "crossing.py").write_text(blocks("tutorial/environment.md", "python")[0], encoding="utf-8")
    (home / "my" / "words.py").write_text(blocks("how-to/small-model.md", "python")[0], encoding="utf-8")
    (made,) = commands_of("how-to/small-model.md", home)
    assert all(made["metrics"][f"pretrain/{role}"] > 0.95 for role in ("policy", "successor", "evaluator", "refiner"))


def test_the_preset_of_operations_can_be_served_and_its_commands_run(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from flows.orchestration.deployments import deployments
    from turnwise import cli

    monkeypatch.chdir(home)
    (home / "my").mkdir()
    (home / "my" / "nightly.toml").write_text(blocks("how-to/schedule.md", "toml")[0], encoding="utf-8")
    shutil.copytree(ROOT / "data" / "base", home / "data" / "base")
    made, _ = deployments({"nightly": "my/nightly.toml"}, "desk")
    assert [one.schedule.timezone for one in made.schedules or []] == ["Europe/Berlin"]  # type: ignore[union-attr]
    lines = [line for line in commands(DOCS / "how-to/schedule.md") if line.startswith("turnwise run ")]
    assert lines
    for line in dict.fromkeys(lines):
        assert cli.main([*shlex.split(line)[1:], "--home", str(home), "--dry-run"]) == 0, capsys.readouterr().err


def test_the_stage_of_the_page_runs(workspace: Workspace, tmp_path: Path) -> None:
    file = tmp_path / "lengths.py"
    file.write_text(blocks("how-to/stage.md", "python")[0], encoding="utf-8")
    stage = load_file(file, "lengths").STAGE
    (turns, *_) = run_chain(workspace)
    run = SimpleNamespace(seed=0, lengths=stage.config(long=4))
    done = execute(stage, run=run, inputs={"collect": [turns.run_id]}, iteration=0, workspace=workspace)
    assert done.metrics == {"lengths/mean": 4.0, "lengths/long_frac": 1.0}


@pytest.mark.parametrize(("beta", "prefers"), [(0.05, True), (1e3, False)])
def test_the_baseline_of_the_page_clones_what_won_above_what_lost(
    base: Path, tmp_path: Path, beta: float, prefers: bool
) -> None:
    """A won episode and a lost one: weights that differ e^20 fold leave the lost one behind, equal ones do not."""
    file = tmp_path / "rwr.py"
    file.write_text(blocks("how-to/method.md", "python")[0], encoding="utf-8")
    stage = load_file(file, "rwr").STAGE
    bench = models.Bench(base, tmp_path)
    said = {"Ana": "Action: check photo", "Ben": "Action: check passport"}
    episodes = [
        models.make_episode(bench.engine, name, [(text, "pass.")], Outcome.SCORED, reward=float(name == "Ana"))
        for name, text in said.items()
    ]
    bench.memory.keep("collect0", Outputs({}, episode_rows(episodes, 0)))
    outputs = bench.run(stage, stage.config(beta=beta, epochs=50, lr=0.05), {"collect": ["collect0"]})
    rows = [TrainRow(turn.prompt_ids, turn.completion.token_ids) for e in episodes for turn in e.turns]
    (won, lost), (won_after, lost_after) = (
        [nll(base, adapter, row) for row in rows] for adapter in (None, outputs.files["adapter"])
    )
    assert won_after < 0.4 * won
    assert (lost_after / won_after > 2 * lost / won) == prefers


def test_the_first_change_of_the_page_passes_its_test_and_fails_without(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page's edit, done to a copy of stages/collect.py."""
    test, before, after = blocks("how-to/first-change.md", "python")
    (tmp_path / "test_collect.py").write_text(test, encoding="utf-8")
    source = text_of(ROOT / "stages/collect.py")
    assert source.count(before) == 1
    (tmp_path / "collect.py").write_text(source.replace(before, after), encoding="utf-8")
    written = load_file(tmp_path / "test_collect.py", "test_of_the_page")
    with pytest.raises(KeyError, match="collect/longest_reply"):
        written.test_the_longest_reply_is_counted(base, tmp_path / "before")
    monkeypatch.setattr(written, "collect", load_file(tmp_path / "collect.py", "changed_collect"))
    written.test_the_longest_reply_is_counted(base, tmp_path / "after")


def nll(base: Path, adapter: Path | None, row: TrainRow) -> float:
    """Of the row's completion, in nats."""
    from stages.learn.adapter import open_adapter
    from stages.llm.hf import load_base

    model: Any = load_base(str(base), "float32")[0]
    model = open_adapter(model, adapter) if adapter else model
    ids = torch.tensor([row.ids])
    with torch.no_grad():
        log_probs = model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])
    return -float(log_probs[-len(row.completion_ids) :].sum())


def test_the_fields_of_the_page_are_those_of_the_roles() -> None:
    from stages.llm.roles import FIELDS

    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| .* \|$", text_of(DOCS / "how-to/prompts.md"), re.MULTILINE)
    assert {role: frozenset(re.findall(r"`(\w+)`", fields)) for role, fields in rows} == FIELDS
