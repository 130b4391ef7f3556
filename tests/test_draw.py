"""Which transitions are backed up, and how much of a target could only be known from what came after: by hand and by
counting.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from models import make_backup
from pydantic import ValidationError

from stages.frame.types import Completion
from stages.judge.backup import Backup
from stages.llm.roles import load_roles
from stages.play.chains import draw
from stages.play.drawing import by_priority
from stages.play.transitions import Transition
from stages.targets import TargetsConfig, leaks


def test_leak_measure_on_planted_leaks_by_hand() -> None:
    """Four targets. Before: two name the auditor, three say a word of s' that x lacks. After correction: none and one."""
    roles = load_roles("service_desk")
    texts = [
        ("Future: phone then Mia says fail.", "Future: phone then fail."),  # "fail" stays: it is what is to be learned
        ("Future: phone then Mia audits.", "Future: phone then end."),
        ("Future: phone then audits.", "Future: phone then end."),
        ("Future: phone then end.", "Future: phone then end."),
    ]
    rows = [
        make_backup(combined=Completion(a, (1,), (0.0,), "stop"), target=Completion(b, (1,), (0.0,), "stop"))
        for a, b in texts
    ]
    found = leaks(roles, rows)
    assert found["targets/leak_before"] == 3 / 4
    assert found["targets/leak_after"] == 1 / 4
    assert found["targets/leak_name_before"] == 2 / 4
    assert found["targets/leak_name_after"] == 0
    assert leaks(roles, []) == {}


def test_leak_against_other_rows_is_the_chance_level() -> None:
    """Each target names its own auditor: 1 against its own s', 0 against the s' of another row."""
    rows = []
    for name in ("Mia", "Omar", "Lena"):
        b = make_backup(target=Completion(f"Future: then {name} says so.", (1,), (0.0,), "stop"))
        rows.append(Backup((replace(b.t, observation=f"{name} audits."),), 1.0, combined=b.target, target=b.target))
    found = leaks(load_roles("service_desk"), rows)
    assert (found["targets/leak_after"], found["targets/leak_shuffled"]) == (1.0, 0.0)


def test_what_any_merged_step_told_is_a_leak() -> None:
    """The audit came two real steps after the action: a target that names the auditor leaks it all the same."""
    b = make_backup(target=Completion("Future: then Mia says fail.", (1,), (0.0,), "stop"))
    first = replace(b.t, observation="photo done.", terminal=False)
    assert leaks(load_roles("service_desk"), [replace(b, chain=(first, b.t))])["targets/leak_name_after"] == 1.0
    assert leaks(load_roles("service_desk"), [replace(b, chain=(first,))])["targets/leak_name_after"] == 0.0


def pool(n: int, terminal: int = 0) -> list[Transition]:
    t = make_backup().t
    return [replace(t, episode_id=f"e{i}", terminal=i < terminal) for i in range(n)]


def test_the_draw_follows_priorities() -> None:
    """One of four, 8,000 times: shares within 5 standard errors of (loss + eps)^alpha; uniform would be 2,000 each."""
    config = TargetsConfig(transitions=1, alpha=0.6, eps=0.01)
    losses = {("e0", 0): 0.1, ("e1", 0): 1.0, ("e2", 0): 4.0}  # e3 is new: it counts with the largest
    weights = [(loss + 0.01) ** 0.6 for loss in (0.1, 1.0, 4.0, 4.0)]
    n, rng = 8000, np.random.default_rng(0)
    counts = Counter(draw(pool(4), losses, config, rng)[0].t.episode_id for _ in range(n))
    for i, weight in enumerate(weights):
        p = weight / sum(weights)
        assert abs(counts[f"e{i}"] - n * p) < 5 * math.sqrt(n * p * (1 - p))


def test_alpha_0_draws_uniformly_and_no_transition_comes_twice() -> None:
    losses = {(f"e{i}", 0): 10.0**i for i in range(6)}
    rng = np.random.default_rng(0)
    counts: Counter[str] = Counter()
    for _ in range(2000):
        ids = [b.t.episode_id for b in draw(pool(6), losses, TargetsConfig(transitions=3, alpha=0.0), rng)]
        assert len(set(ids)) == 3
        counts.update(ids)
    assert all(abs(count - 1000) < 5 * math.sqrt(2000 * 0.25) for count in counts.values())
    assert len(draw(pool(6), losses, TargetsConfig(transitions=50), rng)) == 6


@pytest.mark.parametrize(("frac", "terminal"), [(0.05, 1), (0.25, 5), (0.5, 10), (1.0, 12)])
def test_terminal_share_is_what_the_config_says_as_far_as_there_are_any(frac: float, terminal: int) -> None:
    drawn = draw(pool(60, terminal=12), {}, TargetsConfig(transitions=20, terminal_frac=frac), np.random.default_rng(0))
    assert sum(b.t.terminal for b in drawn) == terminal
    assert len(drawn) == 20


def test_all_terminal_is_drawn_whatever_the_share() -> None:
    """Single-step tasks have no other transitions."""
    drawn = draw(pool(30, terminal=30), {}, TargetsConfig(transitions=20, terminal_frac=0.5), np.random.default_rng(0))
    assert len(drawn) == 20


def test_importance_weights_undo_the_preference() -> None:
    """beta = 1: the weighted mean of draws of one is 1.5, the uniform mean, within 5 standard errors; else 2.6."""
    losses = {(f"e{i}", 0): float(i) ** 2 for i in range(4)}
    rng = np.random.default_rng(0)
    values = []
    for _ in range(6000):
        (b,) = draw(pool(4), losses, TargetsConfig(transitions=1, alpha=1.0, eps=0.1, beta=1.0), rng)
        values.append(b.weight * int(b.t.episode_id[1:]))
    assert abs(np.mean(values) - 1.5) < 5 * np.std(values) / math.sqrt(len(values))
    assert {b.weight for b in draw(pool(4), losses, TargetsConfig(transitions=4, beta=0.0), rng)} == {1.0}


def episodes(*turns: int) -> list[Transition]:
    """Transitions of episodes e0, e1, .. with so many turns each, shuffled."""
    t = make_backup().t
    found = [replace(t, episode_id=f"e{e}", turn=k, terminal=k == n - 1) for e, n in enumerate(turns) for k in range(n)]
    return [found[i] for i in np.random.default_rng(0).permutation(len(found))]


def test_an_episode_is_drawn_by_the_sum_of_its_turns_with_all_of_them_in_turn() -> None:
    """First of three, 8,000 times, against (loss + eps)^alpha added up by hand."""
    config = TargetsConfig(transitions=3, alpha=0.6, eps=0.01, draw="episode")
    losses = {("e0", 0): 0.1, ("e0", 1): 2.0, ("e1", 0): 1.0, ("e2", 0): 3.0, ("e2", 1): 0.5, ("e2", 2): 0.0}
    weights = [sum((v + 0.01) ** 0.6 for (e, _), v in losses.items() if e == f"e{i}") for i in range(3)]
    n, rng = 8000, np.random.default_rng(0)
    counts: Counter[str] = Counter()
    for _ in range(n):
        drawn = [one.t.key for one in draw(episodes(2, 1, 3), losses, config, rng)]
        assert len(drawn) == 3
        counts[drawn[0][0]] += 1
        for episode in {episode for episode, _ in drawn}:
            mine = [turn for e, turn in drawn if e == episode]
            assert mine == list(range(len(mine)))  # of the last one perhaps not all
    for i, weight in enumerate(weights):
        p = weight / sum(weights)
        assert abs(counts[f"e{i}"] - n * p) < 5 * math.sqrt(n * p * (1 - p))


def test_all_is_drawn_where_there_is_no_more_and_weights_are_an_episode_s() -> None:
    config = TargetsConfig(transitions=100, alpha=1.0, eps=1e-9, beta=1.0, draw="episode")
    found = draw(episodes(2, 1), {("e0", 0): 1.0, ("e0", 1): 2.0, ("e1", 0): 1.0}, config, np.random.default_rng(0))
    assert {one.t.key: one.weight for one in found} == pytest.approx(
        {("e0", 0): 1 / (2 * 3 / 4), ("e0", 1): 1 / (2 * 3 / 4), ("e1", 0): 1 / (2 / 4)}
    )


def test_kinds_of_turns_and_episodes_exclude_each_other() -> None:
    with pytest.raises(ValidationError, match='set it to 0 with draw = "episode"'):
        TargetsConfig(draw="episode", terminal_frac=0.5)


def test_states_come_episode_by_episode_each_from_its_first_turn_on() -> None:
    pool = episodes(3, 2, 4)
    order = [t.key for t in by_priority(pool, {}, 0.6, 0.01, np.random.default_rng(1), "episode")]
    assert sorted(order) == sorted(t.key for t in pool)
    heads = [episode for i, (episode, _) in enumerate(order) if i == 0 or order[i - 1][0] != episode]
    assert len(heads) == 3 and all(
        [turn for e, turn in order if e == episode] == list(range(n))
        for episode, n in (("e0", 3), ("e1", 2), ("e2", 4))
    )
