"""What a config names is part of the fingerprint: an environment by its code, files by their content."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from toys import ToyConfig, ToyRun

from flows import presets, registry
from stages import envs
from stages.frame.contract import Config, FromPath, Outputs, Stage
from stages.frame.sections import TaskConfig
from stages.frame.types import UsageError
from stages.store import contents as named
from stages.store.contents import code_hash, contents, path_hash
from stages.store.execute import stage_fingerprint
from stages.store.workspace import Workspace

STAGE = Stage("source", 1, ToyConfig, inputs=(), roles=(), run=lambda context: Outputs({}), shared=("task", "model"))
MODEL_ONLY = replace(STAGE, shared=("model",))

SOURCES = {
    "game/__init__.py": "",
    "game/play.py": "from game.rules import wins\nfrom game import words as told\n\ndef step():\n    return wins(told.hint)\n",
    "game/rules.py": "from .numbers import one\n\ndef wins(x):\n    return x == one\n",
    "game/numbers.py": "one = 1\n",
    "game/words.py": "hint = 'higher'\n",
    "game/other.py": "unused = 1\n",
    "game/data/rules.toml": "limit = 7\n",
    "game/data/other.toml": "limit = 7\n",
}


@pytest.fixture
def game(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package of environments of its own."""
    for name, text in SOURCES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "game"]:  # of another test's folder
        del sys.modules[name]
    yield tmp_path
    code_hash.cache_clear()


def code(module: str = "game.play") -> str:
    """As a new process would find it."""
    code_hash.cache_clear()
    return code_hash(module)


@pytest.mark.parametrize(
    "name", ["game/play.py", "game/rules.py", "game/numbers.py", "game/words.py", "game/data/rules.toml"]
)
def test_what_an_environment_is_made_of_changes_its_hash(name: str, game: Path) -> None:
    before = code()
    (game / name).write_text(SOURCES[name] + "more = 2\n")
    assert code() != before
    (game / name).write_text(SOURCES[name])
    assert code() == before


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("game/other.py", "unused = 2\n"),
        ("game/data/other.toml", "limit = 8\n"),
        ("game/rules.py", "from .numbers import one\n\n\n# Equal is enough.\ndef wins(x):\n    return (x == one)\n"),
    ],
)
def test_what_an_environment_does_not_import_and_comments_leave_its_hash(name: str, text: str, game: Path) -> None:
    before = code()
    (game / name).write_text(text)
    assert code() == before


def test_every_environment_is_hashed_with_the_modules_that_it_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = {name: code(envs.module_name(name)) for name in envs.environments()}
    assert len(set(hashes.values())) == len(hashes) > 5
    unparse = ast.unparse
    # as if splits.py had been edited
    monkeypatch.setattr(ast, "unparse", lambda tree: unparse(tree).replace("def deal(", "def dealt("))
    changed = {name for name in hashes if code(envs.module_name(name)) != hashes[name]}
    code_hash.cache_clear()
    assert {"game24", "math", "twenty_questions", "wiki_search"} <= changed
    assert "service_desk" not in changed


def test_only_stages_that_read_the_task_are_run_again_after_an_edit_of_its_environment(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(stage: Stage) -> str:
        return stage_fingerprint(stage, run=ToyRun(), inputs={}, iteration=0, workspace=workspace)

    reading, other = made(STAGE), made(MODEL_ONLY)
    monkeypatch.setattr(named, "code_hash", lambda module: f"{module}, edited")
    assert made(STAGE) != reading
    assert made(MODEL_ONLY) == other


def test_a_file_is_told_by_its_content_and_a_folder_by_all_of_its_files(tmp_path: Path) -> None:
    file, folder = tmp_path / "a.csv", tmp_path / "folder"
    (folder / "deep").mkdir(parents=True)
    for path in (file, folder / "deep" / "b.jsonl"):
        path.write_text("one")
    before = {path: path_hash(str(path)) for path in (file, folder)}
    for path in (file, folder / "deep" / "b.jsonl"):
        path.write_text("two!")
    after = {path: path_hash(str(path)) for path in (file, folder)}
    assert all(before[path] != after[path] for path in before)
    (folder / "deep" / "b.jsonl").rename(folder / "deep" / "c.jsonl")
    assert path_hash(str(folder)) != after[folder]
    copy = tmp_path / "copy.csv"
    copy.write_text("two!")
    os.utime(copy, ns=(1, 1))
    assert path_hash(str(copy)) == after[file] != path_hash(str(tmp_path / "nowhere")) == ""


def test_a_file_is_read_again_only_when_its_size_or_time_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, read = tmp_path / "a.csv", []
    file.write_text("one")
    digest = hashlib.file_digest

    def counted(*arguments: Any) -> Any:
        read.append(1)
        return digest(*arguments)

    monkeypatch.setattr(hashlib, "file_digest", counted)
    for _ in range(3):
        path_hash(str(file))
    assert len(read) == 1
    os.utime(file, ns=(2, 2))
    path_hash(str(file))
    assert len(read) == 2


def named_by(env: str, options: dict[str, Any]) -> dict[str, str]:
    found = contents(STAGE, ToyRun(task=TaskConfig(env=env, options=options)))
    return {key: value for key, value in found.items() if key != "task.env"}


@pytest.mark.parametrize(
    ("env", "option", "changed"),
    [
        ("twenty_questions", "objects=objects.csv", "objects.csv"),
        ("math", "path=math", "math/test.jsonl"),
        ("tau_bench", "path=tau", "tau/retail/tools.json"),
        ("game24", "path=24.csv", "24.csv"),
        ("wiki_search", "path=wiki", "wiki/pages.jsonl"),
        ("wiki_search", "path=wiki/pages.jsonl", "wiki/questions.jsonl"),  # read although nothing names it
    ],
)
def test_a_file_of_a_task_is_in_the_fingerprint_by_its_content(
    env: str, option: str, changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    key, _, path = option.partition("=")
    (tmp_path / changed).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    for file in (path, changed):
        if Path(file).suffix:
            Path(file).write_text("one")
    before = named_by(env, {key: path})
    assert before.keys() == {f"task.options.{key}"}
    (tmp_path / changed).write_text("two!")
    assert named_by(env, {key: path}) != before


def test_a_file_that_only_the_test_split_reads_is_in_the_fingerprint_of_evaluate_alone(tmp_path: Path) -> None:
    file = tmp_path / "objects.csv"
    run = presets.load("twenty_questions", [f"evaluate.test_options.objects='{file}'"])
    found = []
    for text in ("one", "two!"):
        file.write_text(text)
        found.append({name: contents(registry.load_stage(name), run) for name in ("evaluate", "collect")})
    assert found[0]["evaluate"] != found[1]["evaluate"]
    assert found[0]["collect"] == found[1]["collect"]


def test_general_rows_are_in_the_fingerprint_by_their_content_where_any_are_mixed_in(tmp_path: Path) -> None:
    file = tmp_path / "general.jsonl"

    def found(*sets: str) -> Iterator[dict[str, str]]:
        run = presets.load("tiny", [f"{name}.general_path='{file}'" for name in ("critic", "distill")] + list(sets))
        for text in ("one", "two!"):
            file.write_text(text)
            yield {
                name: contents(registry.load_stage(name), run).get(f"{name}.general_path", "")
                for name in ("critic", "distill")
            }

    assert list(found()) == [{"critic": "", "distill": ""}] * 2
    before, after = found("critic.general_rows=1", "distill.general_rows=1")
    assert all(before[name] and before[name] != after[name] for name in before)


def configs() -> Iterator[tuple[str, type[Config]]]:
    for name in registry.STAGES:
        yield name, registry.load_stage(name).config
    for name in envs.environments():
        yield name, envs._module(name).OPTIONS


def test_no_config_field_names_a_file_without_saying_so() -> None:
    """A new one would be read, and a change of its content not seen."""
    words = ("file", "folder", "path")
    for where, config in configs():
        for key, info in config.model_fields.items():
            text = f"{key} {info.description}".lower().split(" of ")[0]
            if info.annotation is str and any(word in text for word in words):
                assert any(isinstance(marker, FromPath) for marker in info.metadata), f"{where}.{key}"


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ({"env": "service_dsek"}, "task.env: there is no environment 'service_dsek'; did you mean 'service_desk'"),
        ({"options": {"tier": 2}}, "task.options: service_desk has no option 'tier'; did you mean 'tiers'"),
    ],
)
def test_a_task_that_there_is_not_has_no_fingerprint(task: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        contents(STAGE, ToyRun(task=TaskConfig(**task)))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("task.env=service_dsek", "task.env: there is no environment 'service_dsek'"),
        ("task.options.tier=2", "task.options: service_desk has no option 'tier'"),
        ("evaluate.test_options.tier=2", "task.options: service_desk has no option 'tier'"),
        ("collect.split=trian", "there is no split 'trian'"),
    ],
)
def test_a_dry_run_checks_the_task_as_the_run_does(
    change: str, said: str, command: Callable[..., Any], fresh: Path
) -> None:
    done = [command(fresh, "run", "tiny", "--plain", "--set", change, *more) for more in ((), ("--dry-run",))]
    assert [(one.status, one.out) for one in done] == [(2, "")] * 2
    assert all(said in one.err for one in done)
    assert done[0].err == done[1].err


def test_after_an_edit_of_a_file_that_it_names_a_stage_is_run_again(command: Callable[..., Any], fresh: Path) -> None:
    sets = (
        "model.engine=scripted",
        "model.lora_rank=2",
        "iterations=0",
        "evaluate.episodes=2",
        "evaluate.probe_path=probe.jsonl",
    )
    run = ("run", "tiny", "--plain", "--json", *(part for one in sets for part in ("--set", one)))
    ran = []
    for reply in ("yes", "yes", "no"):
        row = {"role": "policy", "messages": [{"role": "user", "content": "Mia"}], "reply": reply}
        (fresh / "probe.jsonl").write_text(json.dumps(row) + "\n")
        done = command(fresh, *run)
        assert done.status == 0, done.err
        ran.append(done.ran)
    assert ran == [["evaluate base", "evaluate start"], [], ["evaluate base", "evaluate start"]]
