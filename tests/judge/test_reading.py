"""Which roles a model can play: `turnwise doctor --model` before anything is trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import models
import pytest
from models import Bench, Recorder

from stages.collect import CollectConfig
from stages.frame.types import Request
from stages.judge.reading import Heard, hear, no
from stages.llm.roles import load_roles
from stages.llm.scripted import GARBAGE
from turnwise import cli
from turnwise.commands.roles import advise

ROLES = load_roles("service_desk")
ORDER = ["policy", "successor", "combine", "corrector", "evaluator", "refiner"]


def heard(tmp_path: Path, engine: Recorder) -> tuple[list[Any], dict[str, Heard]]:
    bench = Bench(models.save_base(tmp_path / "base"), tmp_path, engine=engine)
    episodes, found = hear(bench.context(CollectConfig(), {}), ROLES, 5)
    assert [one.role for one in found] == ORDER
    return episodes, {one.role: one for one in found}


def test_a_model_that_knows_its_roles_is_read_in_all_of_them(tmp_path: Path) -> None:
    episodes, found = heard(tmp_path, Recorder())
    assert len(episodes) == 5 and found["policy"].asked == sum(len(e.turns) for e in episodes)
    assert all(one.readable == one.asked and not one.wrong and one.reply for one in found.values())


@pytest.mark.parametrize(
    ("head", "role", "why"),
    [
        ("Predict.", "successor", "wanted 'Future: ...', found '%% ?? %%'"),
        ("Judge.", "evaluator", "wanted 'Optimality: Yes' or 'Optimality: No. <reason>', found '%% ?? %%'"),
        ("Improve.", "refiner", "no 'Action:' in the reply"),
    ],
)
def test_a_role_that_cannot_be_read_is_shown_with_what_it_said_and_why(
    tmp_path: Path, head: str, role: str, why: str
) -> None:
    own = Recorder()

    def reply(prompt: str, request: Request) -> str:
        return GARBAGE if models.words_of(prompt).startswith(head) else own._reply(prompt, request)

    _, found = heard(tmp_path, Recorder(reply))
    assert (found[role].readable, found[role].reply, found[role].wrong) == (0, GARBAGE, why)


def test_the_refiner_is_asked_of_refused_actions_alone() -> None:
    assert no("Optimality: Yes. It is right.") == "Optimality: No."
    assert no("Optimality: No. gold may need close phone.") == "Optimality: No. gold may need close phone."
    assert no(GARBAGE) == GARBAGE


def test_the_command_says_what_to_do_and_fails_where_a_role_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["doctor", "--task", "desk", "--set", "model.engine=scripted", "--home", str(tmp_path)]
    assert cli.main([*words, "--set", "roles.max_action_tokens=400", "--set", "roles.max_future_tokens=400"]) == 0
    said = capsys.readouterr().out
    assert "All roles can be read. Run it: turnwise run desk" in said and "ok evaluator  10 of 10" in said
    assert cli.main([*words, "--set", "roles.max_action_tokens=4", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert {one["role"]: one["readable"] for one in told["roles"]}["policy"] == 0
    assert any("turnwise pretrain --set pretrain.base=" in line for line in told["advice"])


def test_the_task_s_preset_and_the_model_are_those_that_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["doctor", "--task", "desk+qwen05b", "--model", "other", "--set", "model.engine=scripted"]
    cli.main([*words, "--home", str(tmp_path)])
    assert "other on desk+qwen05b, prompts service_desk_plain: " in capsys.readouterr().out


def test_a_cut_reply_is_told_apart(tmp_path: Path) -> None:
    run = models.Bench(tmp_path, tmp_path).context(CollectConfig(), {}).run
    lines = advise(run, [Heard("combine", 0, 10, "Future: a, b", "the future was cut at roles.max_future_tokens")])
    assert "- Give the replies more room: --set roles.max_future_tokens=800" in lines
