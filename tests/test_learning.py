"""Every method of the demo learns a world whose optimum is known: a desk of one step, on which the base model wins half of
the visits and the right option all of them.
"""

from __future__ import annotations

import json
import pkgutil
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from turnwise import cli

pytestmark = pytest.mark.slow

BASE = Path(__file__).parents[1] / "data" / "base"
SMALL = {
    "task.options.steps": 1, "task.options.rules_seed": 5, "seed": 3, "collect.first_episodes": 128, "collect.episodes": 64,
    "targets.transitions": 192, "q_critic.transitions": 192, "refine.states": 96, "pick.states": 96, "rft.epochs": 5,
    "evaluate.episodes": 64, "evaluate.audit_turns": 0, "evaluate.probe_path": '""',
}  # fmt: skip
ITERATIONS = {
    "demo": 3, "desk+rft_relabel": 3, "desk+rft": 3, "desk+grpo": 4, "desk+ppo": 3, "desk+sdpo": 3, "desk+hindsight": 3, "desk+nlrl": 3, "desk+nlql": 4, "desk+sac": 5,
}  # fmt: skip


@pytest.fixture
def learned(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[float, float]]:
    """Runs a preset with these settings: win rate of the base model and of the best adapter, on the test split."""
    (home / "data").mkdir(exist_ok=True)
    shutil.copytree(BASE, home / "data" / "base")
    monkeypatch.chdir(home)

    def run(preset: str, **sets: Any) -> tuple[float, float]:
        argv = [f"--set={key}={value}" for key, value in (SMALL | sets).items()]
        assert cli.main(["run", preset, "--plain", "--quiet", "--json", *argv]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found["base"]["win_rate"], found["final"]["win_rate"]

    return run


@pytest.mark.parametrize("preset", ITERATIONS)
def test_it_comes_to_the_optimum(preset: str, learned: Callable[..., tuple[float, float]]) -> None:
    """From half to .9 or more of 64 visits on the test split."""
    base, final = learned(preset, iterations=ITERATIONS[preset])
    assert 0.3 < base < 0.7 and final >= 0.9


def test_where_wins_are_rare_a_parser_learns_what_it_is_told_and_rft_has_nothing_to_learn_from(
    learned: Callable[..., tuple[float, float]],
) -> None:
    """Three steps, of which a random policy has 1 in 24 all right: told the right options the parser comes to the optimum,
    and from the few wins of as many visits RFT does not.
    """
    world = {"task.options.steps": 3, "collect.first_episodes": 256, "iterations": 3}
    base, told = learned("desk+rft_relabel", **world)
    _, rewarded = learned("desk+rft", **world)
    assert base < 0.15 and told >= 0.9
    assert rewarded < 0.6


def turned(name: str, change: Callable[[Any], Any]) -> tuple[str, Callable[[Any], Callable[..., Any]]]:
    """A function's name, and what makes of it one whose result is changed."""
    return name, lambda original: lambda *args, **options: change(original(*args, **options))


def other_verdicts(pick: Callable[..., Any]) -> Callable[..., Any]:
    """A pick that reads Yes for No."""

    def flipped(option: Any) -> Any:
        judgement = option.judgement
        said = {"yes": "no", "no": "yes"}.get(judgement and judgement.verdict)
        return replace(option, judgement=replace(judgement, verdict=said)) if said else option

    return lambda choices, judged: pick(choices, [flipped(one) for one in judged])


def other_option(known: dict[Any, str]) -> dict[Any, str]:
    """What was said at the end, with the other way of closing a visit named in place of each."""
    swapped = {"phone": "email", "email": "phone"}
    return {key: re.sub("phone|email", lambda found: swapped[found[0]], text) for key, text in known.items()}


SABOTAGE = {
    "desk+rft": turned("stages.rft.candidates", lambda lived: [replace(t, total_reward=1 - t.total_reward) for t in lived]),
    "desk+grpo": turned("stages.grpo.episode_advantages", lambda found: {key: -a for key, a in found.items()}),
    "desk+sdpo": turned("stages.sdpo.told", other_option),
    "desk+ppo": turned("stages.train.actor_critic.advantages", lambda found: -found),
    "desk+nlql": ("stages.pick.with_best_judged", other_verdicts),
    "desk+sac": turned("stages.pick.q_values", lambda values: [-v for v in values]),
}  # fmt: skip


@pytest.mark.parametrize("preset", SABOTAGE)
def test_with_its_signal_turned_round_it_does_not(
    preset: str, learned: Callable[..., tuple[float, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the tests above: two rounds of the same training, of what lost, was worse or was judged No."""
    name, changed = SABOTAGE[preset]
    monkeypatch.setattr(name, changed(pkgutil.resolve_name(name)))
    _, final = learned(preset, iterations=2)
    assert final < 0.7
