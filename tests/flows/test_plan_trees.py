"""`turnwise plan` counts the rows of training in trees: against trees over episodes of the plan's own lengths."""

from __future__ import annotations

import random

import pytest

from flows import presets
from flows.cost.lengths import assumed
from flows.cost.workload import workload
from stages.play.drawing import Draw
from stages.train.passes import mixed_batches
from stages.train.rows import TrainRow


@pytest.mark.parametrize("pass_tokens", [0, 1200])
@pytest.mark.parametrize("draw", ["turn", "episode"])
@pytest.mark.parametrize(("episodes", "beside", "system"), [(320, 2, 300), (24, 8, 110)])
def test_tokens_of_a_critic_s_steps_are_those_of_trees_over_such_episodes(
    episodes: int, beside: int, system: int, draw: Draw, pass_tokens: int
) -> None:
    """Episodes of the plan's lengths, drawn at random, all priorities alike: steps of 8 futures, and actions beside.
    Of few episodes, both kinds often have rows of the same one.
    """
    sets = [f"critic.draw={draw}", f"critic.pass_tokens={pass_tokens}", "critic.general_rows=0", "iterations=1"]
    epochs = 320 // episodes
    sets += [
        f"critic.epochs={epochs}",
        f"critic.policy_rows={beside}",
        "targets.transitions=1920",
        f"collect.first_episodes={episodes}",
    ]
    run = presets.load("tau_retail+qwen7b", sets)
    told = {
        "turns": 6, "system": system, "first": 10, "action": 12, "observation": 20, "act": 5, "template": 30, "future": 9,
    }  # fmt: skip
    size = assumed(run, [f"{name}={value}" for name, value in told.items()])
    (planned,) = (work for work in workload(run, size) if work.stage == "critic")

    rng = random.Random(0)

    def some(n: float) -> tuple[int, ...]:
        return tuple(rng.randrange(10**6) for _ in range(int(n)))

    start, futures, actions = some(system), [], []
    for episode in range(episodes):
        line = (*start, *some(10 + 6 * 32))
        for k in range(6):
            state, key = line[: int(size.state(k))], (f"{episode:03}", k)
            futures.append(TrainRow((*state, *some(30 + 5)), some(9), key=key))
            actions.append(TrainRow(state, some(12), key=key))
    kinds = {"main": (futures, 8), "beside": (actions, beside)}
    steps = mixed_batches(kinds, main="main", epochs=epochs, rng=rng, device="cpu", pass_tokens=pass_tokens, draw=draw)
    counted = sum(len(one.tree.ids) for step in steps for one in step)
    assert planned.steps == epochs * episodes * 6 / 8
    assert planned.trained_tokens == pytest.approx(counted, rel=0.05)
