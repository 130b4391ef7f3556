"""Every large preset, end to end in miniature: models shaped, named and templated like the real ones, told what to
reply, on the tasks' own data.

What a run on a GPU meets for the first time otherwise: the chat templates, byte pairs, long prompts, bfloat16,
thoughts, a customer on a server.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tau_small
from commands import stage_runs
from engines import served
from openai_stub import Answer, Stub
from qwens import POSITIONS, Prompted, save_qwen
from shared_data import DATA, needs

from flows import presets, workspace
from flows.registry import METHODS
from stages.frame.types import Engine
from stages.llm.tokens import load_tokenizer
from stages.store.replay import Replay
from turnwise import cli

SMALL = {
    "iterations": 1, "model.lora_rank": 4, "collect.first_episodes": 4, "evaluate.episodes": 1, "evaluate.trials": 2, "evaluate.audit_turns": 2, "targets.transitions": 6,
    "refine.states": 12, "rft.rows": 16, "roles.max_action_tokens": 48, "roles.max_future_tokens": 48, "task.max_turns": 4,
}  # fmt: skip
THOUGHT = "hm secret hm"
MATH = ("First.\n\nSecond.\n\nSo \\boxed{4}.", "So.\n\n\\boxed{4}.", "It is \\boxed{\\frac{1}{2}}.")
TAU = (
    '{"name": "get_order_details", "arguments": {"order_id": "#W1"}}', '{"name": "respond", "arguments": {"content": "Who are you?"}}',
    '{"name": "respond", "arguments": {"content": "bye"}}', '{"name": ',
)  # fmt: skip
ACTIONS: dict[str, Sequence[str]] = {
    "twenty_questions": ("Is it alive?", "Is it a dog?", "Is it bigger than a car?"),
    "math": MATH,
    "tau_bench": TAU,
    "game24": ("expand 0: 1 + 2 = 3", "expand 0: 4 * 6 = 24", "submit 0", "submit 1"),
    "wiki_search": ("NAVIGATE(France)", "FIND(born)", "SAVE_LINE_IDS(1)", "SUBMIT(Paris)"),
}
PATHS: dict[str, tuple[str, Path]] = {
    "twenty_questions": ("objects", DATA / "twenty_questions" / "things_objects.csv"),
    "math": ("path", DATA / "math500"),
    "tau_bench": ("path", DATA / "tau_bench"),
    "game24": ("path", DATA / "game24" / "24.csv"),
    "wiki_search": ("path", DATA / "wiki"),
}
# A long one is that of as many episodes as NLAC's for longer.
REHEARSED = [name for name in presets.names() if name.endswith(("+qwen7b", "+qwq32b")) and "_long" not in name]


@pytest.fixture(scope="module")
def qwens(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], str]:
    """Folder of the model that thinks, or of the one that does not."""
    root = tmp_path_factory.mktemp("qwens")
    folders = {thinks: str(save_qwen(root / name, thinks=thinks)) for thinks, name in ((False, "qwen"), (True, "qwq"))}
    return folders.__getitem__


@pytest.fixture(autouse=True)
def general(home: Path) -> None:
    """A file of general rows where the presets of NLAC look for it."""
    (home / "data").mkdir(exist_ok=True)
    row = {"role": "general", "messages": [{"role": "user", "content": "Name a colour."}], "reply": "Blue."}
    (home / "data" / "general.jsonl").write_text((json.dumps(row) + "\n") * 3)


def script(env: str, agent: str, thinks: bool) -> Callable[[str, str, random.Random], str]:
    """Readable replies of every role for the most part; of twenty one is none, and of twenty thoughts one has no end."""

    def said(role: str, prompt: str, chance: random.Random) -> str:
        if chance.random() < 0.05:
            return "knives con neither"
        if role in ("policy", "refiner"):
            action = chance.choice(ACTIONS[env])
            return action if agent == "cot" else f"Thought: let us see.\nAction: {action}"
        if role == "evaluator":
            return "Optimality: Yes. It is fine." if chance.random() < 0.25 else "Optimality: No. Do something else."
        if role == "corrector":
            return prompt.rpartition("Text:\n")[2].partition("<|im_end|>")[0]
        return chance.choice(["Future: no, and it is lost.", "Future: yes, and it is won."])

    def reply(role: str, prompt: str, chance: random.Random) -> str:
        text = said(role, prompt, chance)
        if not thinks:
            return text
        return f"{THOUGHT}\n</think>\n\n{text}" if chance.random() > 0.05 else f"{THOUGHT} " * 40

    return reply


def simulator(path: str, body: dict[str, Any]) -> Answer:
    """The customer of tau_bench, or the oracle of 20 Questions."""
    said = str(body["messages"][-1]["content"])
    if "YES" in said or "yes or no" in said.lower():
        text = random.Random(said).choice(["Yes.", "No."])
    else:
        text = tau_small.customer(body["messages"])
    return 200, {"choices": [{"message": {"content": text}}]}


@contextmanager
def engine_of(run: Any, answers: Stub) -> Iterator[Engine]:
    """As the preset names it: in process, or behind a server that loads adapters."""
    env, agent = run.task.env, run.task.agent
    inner = Prompted(run.model.path, script(env, agent, "qwq" in run.preset), dtype=run.model.dtype)
    if run.model.engine != "openai":
        yield inner
        return
    with served(inner, run.model.path, POSITIONS) as url:
        yield workspace.make_engine(presets.change(run, "model", url=url))


@pytest.mark.slow
@pytest.mark.parametrize("preset", REHEARSED)
def test_a_large_preset_runs_from_end_to_end(
    preset: str,
    home: Path,
    qwens: Callable[[bool], str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    thinks = "qwq" in preset
    task = presets.load(preset).task
    key, path = PATHS[task.env]
    if task.env == "tau_bench" and preset != "tau_retail+qwen7b":
        path = Path(tau_small.write(home / "tau"))
    if not path.exists():
        pytest.skip(f"{path} is not there; TURNWISE_DATA names the folder of the task data")
    stub = Stub()
    stub.answer = simulator
    sets = {**SMALL, "model.path": qwens(thinks), f"task.options.{key}": path, "task.oracle_url": stub.url}
    if task.env == "tau_bench" and preset != "tau_retail+qwen7b":
        sets["task.options.validation_tasks"] = 1  # of the miniature's two
    if thinks:
        sets["roles.max_thought_tokens"] = 48
    arguments = [part for name, value in sets.items() for part in ("--set", f"{name}={value}")]
    run = presets.load(preset, arguments[1::2])
    monkeypatch.chdir(home)
    with engine_of(run, stub) as engine:
        monkeypatch.setattr(workspace, "make_engine", lambda run: engine)
        assert cli.main(["run", preset, "--plain", "--json", *arguments]) == 0
    out, err = capsys.readouterr()
    summary = json.loads(out.strip().splitlines()[-1])
    check_metrics(summary, run)
    check_rows(summary, home, thinks, engine, load_tokenizer(qwens(thinks)).eos_token_id)
    assert not re.search("warn|sequence length|deprecat", err, re.IGNORECASE), err
    asked = {body["model"] for _, body, _ in stub.asked}
    assert asked == ({task.oracle_model} if task.oracle == "openai" else set())


def check_metrics(summary: dict[str, Any], run: Any) -> None:
    (_, row) = summary["iterations"]
    found = row["metrics"]
    assert summary["status"] == "FINISHED" and set(row["runs"]) == {*METHODS[run.method], "evaluate"}
    assert all(math.isfinite(value) for value in found.values())
    shares = {name: value for name, value in found.items() if re.search("_rate$|_frac$|/leak", name)}
    assert shares and all(0 <= value <= 1 for value in shares.values()), shares
    assert found["collect/malformed_frac"] < 0.6
    assert found["collect/simulator_failed"] == found["collect/env_failed"] == 0
    if run.method == "nlac":
        assert found["targets/rows"] > 0 and found["refine/rows"] > 0 and found["distill/rows"] > 0
        assert found["critic/nll/general"] > 0 and found["distill/nll/general"] > 0
    elif run.method == "self_ac":
        assert found["self_ac/rows"] == 4 and found["self_ac/split"] == found["self_ac/dropped"] == 0
        assert found["self_ac/gap_max_first"] < 0.1  # of a bfloat16 model's log-probs, around -7
    if run.task.agent == "cot":
        assert found["collect/turns"] > 1


def check_rows(summary: dict[str, Any], home: Path, thinks: bool, engine: Engine, end_of_turn: int) -> None:
    """What is trained on ends where a reply ends, and holds no thought but the policy's, or one thought anew."""
    replay, runs = Replay(home / "data" / "turnwise.duckdb"), stage_runs(summary)
    turns = replay.rows("turns", [runs["collect 0"]])
    assert all(thinks == (THOUGHT in engine.decode(turn["action_ids"])) for turn in turns if not turn["malformed"])
    assert not any(THOUGHT in turn["action"] + turn["observation"] for turn in turns)
    for title in ("targets 0", "refine 0"):
        for row in replay.rows("targets", [runs[title]]) if title in runs else ():
            assert row["completion_ids"][-1] == end_of_turn
            assert (THOUGHT in engine.decode(row["completion_ids"])) == (thinks and title == "refine 0")


@pytest.mark.slow
@needs(DATA / "math500")
def test_a_model_whose_words_nobody_can_read_is_told_what_to_change(
    home: Path, qwens: Callable[[bool], str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Random weights that say what they like, ids that are no token among it: collected, and then one sentence."""
    monkeypatch.chdir(home)
    sets = {
        **SMALL,
        "model.path": qwens(True),
        "model.engine": "hf",
        "task.options.path": DATA / "math500",
        "roles.max_thought_tokens": 8,
    }
    assert (
        cli.main(
            [
                "run",
                "math+qwq32b",
                "--plain",
                "--quiet",
                *(part for name, value in sets.items() for part in ("--set", f"{name}={value}")),
            ]
        )
        == 1
    )
    (told,) = capsys.readouterr().err.strip().splitlines()
    assert re.search(
        r"no reply could be read .* of them were cut at their limit: raise roles.max_future_tokens, or roles.max_thought_tokens",
        told,
    )
