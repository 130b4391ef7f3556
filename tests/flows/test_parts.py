"""Presets by parts: what a name stands for, what it is called, and how a wrong one is told."""

from __future__ import annotations

import json
import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from flows import parts, presets
from stages.frame.types import UsageError
from turnwise import cli, completion
from turnwise.commands.presets import about


def test_a_name_is_in_one_list_alone_and_each_part_says_what_it_is() -> None:
    names = [name for kind in parts.KINDS for name in parts.files(kind)]
    assert len(names) == len(set(names)) == len(parts.kinds())
    assert not set(names) & set(parts.SHORT)
    for kind in parts.KINDS:
        assert all(about(path) for path in parts.files(kind).values())


def test_every_task_goes_with_every_model_and_the_methods_that_its_prompts_serve() -> None:
    """Nothing has to be tuned for a pair: without a section of its own it has what the method has for all."""
    refused = list[tuple[str, str]]()
    for task in parts.files("task"):
        for method in parts.files("method"):
            for model in ("", *parts.files("model")):
                name = "+".join(filter(None, (task, method, model)))
                try:
                    assert presets.load(name).preset == parts.current(name)
                except UsageError as error:
                    refused.append((task, str(error)))
    alone = ("math", "tau_retail", "tau_airline", "math_cot", "game24", "wiki_search")
    assert {task for task, _ in refused} == set(alone)
    sentence = (
        r"roles.prompts: method|task.agent: method|Preset .* has no (model of its own|values for a small model like)"
    )
    assert not [said for _, said in refused if not re.match(sentence, said)]


@pytest.mark.parametrize(
    ("name", "called"),
    [
        ("demo", "desk"),
        ("demo+grpo", "desk+grpo"),
        ("grpo+demo", "desk+grpo"),
        ("desk+nlac", "desk"),
        ("qwen7b+nlac+tau_retail", "tau_retail+qwen7b"),
        ("game24+self_ac", "game24"),
        ("game24+grpo", "game24+grpo"),
        ("demo_grpo", "desk+grpo"),
        ("ladder", "desk+nlac_gated"),
        ("nightly", "nightly"),
    ],
)
def test_a_run_remembers_the_shortest_name_in_one_order(name: str, called: str) -> None:
    assert parts.current(name) == called
    if name != "nightly":
        assert presets.load(name).preset == called
        assert presets.load(name) == presets.load(called)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("dseks", "There is no preset 'dseks'; did you mean 'desk'? See: turnwise presets"),
        ("desk+gpro", "There is no task, method or model 'gpro'; did you mean 'grpo'? See: turnwise presets"),
        ("desk+", "There is no task, method or model ''. See: turnwise presets"),
        ("_paper", "There is no preset '_paper': such files are gone. Extend a combination, such as tau_retail+qwen7b."),
        ("desk+grpo+ppo", "Preset 'desk+grpo+ppo' names two methods, grpo and ppo. Leave one of them out."),
        ("desk+sums", "Preset 'desk+sums' names two tasks, desk and sums. Leave one of them out."),
        ("hindsight", "Preset 'hindsight' names no task. Put one before it, as in desk+hindsight."),
        ("qwq32b", "Preset 'qwq32b' names no task. Put one before it, as in 20q+qwq32b."),
        ("math+grpo", "the task math has no model of its own. Name one, as in math+grpo+qwen7b."),
        ("game24+nlac", "roles.prompts: method nlac asks combine, corrector, evaluator, refiner, successor, thinker, but the prompts game24"),
        ("math_cot+nlac", "task.agent: method nlac needs react, but found 'cot'. Set this value, or choose another method."),
        ("q" * 300, f"There is no preset '{'q' * 80}...'. See: turnwise presets"),
    ],
)  # fmt: skip
def test_a_name_that_is_none_is_told_in_one_sentence(name: str, said: str) -> None:
    with pytest.raises(UsageError) as error:
        presets.load(name)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_what_was_tuned_with_a_small_model_does_not_reach_a_large_one() -> None:
    small, large, other = (presets.load(name).model_dump() for name in ("desk", "desk+qwen7b", "20q+qwen7b"))
    assert (small["critic"]["lr"], small["roles"]["frozen"]) == (2e-3, "base")
    assert (large["critic"], large["distill"], large["model"]) == (other["critic"], other["distill"], other["model"])
    assert (large["task"], large["roles"]["frozen"]) == (small["task"], "adapter")


def test_a_task_that_extends_another_has_what_was_tuned_for_that_one() -> None:
    easy, desk = (presets.load(name).model_dump() for name in ("desk_easy+grpo", "desk+grpo"))
    assert easy["grpo"] == desk["grpo"] and easy["collect"] == desk["collect"]
    assert (easy["task"]["options"], desk["task"]["options"]) == ({"give_by": "request"}, {})


def test_a_file_extends_a_combination_a_name_of_before_or_both(tmp_path: Path) -> None:
    for name in ("desk+grpo", "demo_grpo", "grpo+demo"):
        (tmp_path / "mine.toml").write_text(f'extends = "{name}"\niterations = 3\n')
        run = presets.load(str(tmp_path / "mine.toml"))
        assert run == presets.load("desk+grpo", ["iterations=3"]).model_copy(update={"preset": "mine"})


def test_a_name_of_before_is_told_of_once(capsys: pytest.CaptureFixture[str]) -> None:
    parts._tell_once.cache_clear()
    for _ in range(2):
        assert cli.main(["presets", "demo_grpo", "demo"]) == 0
    out, err = capsys.readouterr()
    assert err == "Preset 'demo_grpo' is now 'desk+grpo'; the old name works until 0.3.\n"
    assert out.splitlines()[0].startswith("desk+grpo  A service desk")


def test_names_of_before_lead_to_tested_combinations_and_are_none_of_today() -> None:
    assert set(parts.names_of_before().values()) <= set(presets.names())
    assert not set(parts.names_of_before()) & (set(presets.names()) | set(parts.files("task")))
    assert parts.before("desk") == ["demo"]
    assert parts.before("desk+grpo") == ["demo_grpo"]


def test_the_three_lists_are_printed_with_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["presets"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if re.fullmatch("tasks|methods|models", line)] == ["tasks", "methods", "models"]
    assert any(re.match(r"  grpo +GRPO: ", line) for line in lines)
    assert cli.main(["presets", "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in found["models"]] == ["qwen05b", "qwen7b", "qwq32b", "smol"]
    assert "desk+grpo" in found["tested"]
    presets.load(found["example"].split()[-1])


def test_a_shell_completes_tasks_and_after_a_plus_what_may_be_added() -> None:
    offered = completion._names(Namespace(metavar="PRESET"))  # type: ignore[arg-type]
    assert {"demo", "desk", "tau_retail"} <= set(offered(prefix="d")) and "grpo" not in offered(prefix="")
    first = set(offered(prefix="desk+g"))
    assert {"desk+grpo", "desk+qwen7b"} <= first and not any("sums" in one for one in first)
    assert set(offered(prefix="desk+grpo+")) == {
        f"desk+grpo+{model}" for model in ("qwen05b", "qwen7b", "qwq32b", "smol")
    }
    assert "qwen7b+desk" in offered(prefix="qwen7b+")
