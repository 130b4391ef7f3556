"""What a study's rows come to, against the slow way to work it out."""

from __future__ import annotations

import math
import random
import statistics
from typing import Any

import pytest
from scipy.stats import ttest_1samp, ttest_ind

from flows.study import page
from flows.study.figures import at, band, checkpoints, differences, median_cost, reached, stratified_mean, students_mean
from flows.study.rows import Row

EASY, HARD = [0.8, 0.9, 1.0, 0.7, 0.95], [0.1, 0.4, 0.2]


def curve(*rates: float, each: float = 100.0) -> list[dict[str, Any]]:
    return [{"iteration": i - 1, "win_rate": rate, "episodes": i * each} for i, rate in enumerate(rates)]


def row(*rates: float, each: float = 100.0, **more: Any) -> Row:
    return {"task": "desk", "seed": 0, "final": rates[-1], "curve": curve(*rates, each=each), **more}


def drawn_by_hand(strata: list[list[float]], n: int = 20_000) -> tuple[float, float]:
    """A stratified bootstrap in plain loops: 2.5 % of the draws lie below, 2.5 % above."""
    rng = random.Random(0)
    means = sorted(statistics.mean(statistics.mean(rng.choices(one, k=len(one))) for one in strata) for _ in range(n))
    return means[int(0.025 * n)], means[int(0.975 * n)]


@pytest.mark.parametrize("strata", [[EASY], [HARD], [EASY, HARD]])
def test_the_interval_is_that_of_draws_by_hand(strata: list[list[float]]) -> None:
    found, (low, high) = stratified_mean(strata), drawn_by_hand(strata)
    assert found.value == pytest.approx(statistics.mean(map(statistics.mean, strata)))
    # Both are percentiles of random draws; means of five seeds come in steps of .01 and more.
    assert [found.low, found.high] == pytest.approx([low, high], abs=0.02)


def test_tasks_are_not_drawn_anew_so_their_difference_widens_nothing() -> None:
    apart = stratified_mean([[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
    assert (apart.low, apart.value, apart.high) == (0.5, 0.5, 0.5)


def test_one_seed_has_a_mean_and_no_interval() -> None:
    one = stratified_mean([[0.7]])
    assert one.value == 0.7
    assert math.isnan(one.low)
    assert math.isnan(one.high)


def test_students_interval_is_that_of_the_tests_of_scipy() -> None:
    one, two = students_mean([EASY]), students_mean([EASY, HARD])
    assert [one.low, one.high] == pytest.approx([*ttest_1samp(EASY, 0).confidence_interval()])
    # The mean of two means is half of what the one has over the negative of the other.
    welch = ttest_ind(EASY, [-x for x in HARD], equal_var=False).confidence_interval()
    assert [2 * two.low, 2 * two.high] == pytest.approx([*welch])
    assert two.value == stratified_mean([EASY, HARD]).value


def test_students_interval_of_one_seed_and_of_equal_ones() -> None:
    assert math.isnan(students_mean([EASY, [0.7]]).low)
    same = students_mean([[0.7, 0.7]])
    assert (same.low, same.value, same.high) == (0.7, 0.7, 0.7)


def test_the_band_at_an_evaluation_is_the_interval_of_the_rates_there() -> None:
    curves = [curve(0.0, first, first) for first in EASY]
    xs, mean, low, high = band(curves, "episodes")
    there = stratified_mean([EASY])
    assert (xs[0], xs[-1]) == (0.0, 200.0)
    assert mean[-1] == pytest.approx(there.value)
    assert [low[-1], high[-1]] == pytest.approx([there.low, there.high], abs=0.02)
    assert low[0] == high[0] == 0.0


def test_a_band_ends_where_the_first_of_its_runs_does() -> None:
    xs, *_ = band([curve(0.0, 1.0), curve(0.0, 0.5, 1.0)], "episodes")
    assert xs[-1] == 100.0


def test_a_rate_between_evaluations_is_on_their_line_and_beyond_the_end_is_not_known() -> None:
    points = curve(0.1, 0.5, 0.3)
    assert at(points, "episodes", 0.0) == 0.1
    assert at(points, "episodes", 25.0) == pytest.approx(0.1 + 0.25 * 0.4)
    assert at(points, "episodes", 200.0) == pytest.approx(0.3)
    assert math.isnan(at(points, "episodes", 200.1))


def test_checkpoints_go_from_a_quarter_of_the_shortest_run_to_the_longest_by_doubling() -> None:
    rows = [row(0.0, 0.5, each=100.0), row(0.0, 0.5, each=450.0)]
    assert checkpoints(rows, "episodes") == [25.0, 50.0, 100.0, 200.0, 400.0]
    assert checkpoints(rows[:1], "episodes") == [25.0, 50.0, 100.0]


def test_the_base_model_reaches_no_level() -> None:
    assert reached(curve(0.9, 0.2, 0.7), 0.6) == {"iteration": 1, "win_rate": 0.7, "episodes": 200.0}
    assert reached(curve(0.9, 0.2, 0.5), 0.6) is None


def test_a_run_that_never_reached_it_is_later_than_all_others_and_not_left_out() -> None:
    early, late, never = row(0.0, 0.7), row(0.0, 0.1, 0.7), row(0.0, 0.1, 0.2)
    assert median_cost([early, late, late], 0.6, "episodes") == 200.0
    assert median_cost([early, late, never], 0.6, "episodes") == 200.0  # 150 if it were left out
    assert median_cost([early, never, never], 0.6, "episodes") == math.inf


def test_differences_are_those_of_one_task_and_seed() -> None:
    mine = [row(0.0, 0.9, seed=1), row(0.0, 0.5, seed=2), row(0.0, 0.4, seed=1, task="hard")]
    controls = [row(0.0, 0.1, seed=2), row(0.0, 0.6, seed=1), row(0.0, 0.6, seed=3)]
    found = differences(mine, controls)
    assert found == {"desk": [pytest.approx(0.3), pytest.approx(0.4)]}


def test_pairs_that_move_together_have_a_narrower_interval_than_their_arms() -> None:
    controls = [row(0.0, rate - 0.1, seed=i) for i, rate in enumerate(EASY)]
    mine = [row(0.0, rate, seed=i) for i, rate in enumerate(EASY)]
    paired, alone = stratified_mean(list(differences(mine, controls).values())), stratified_mean([EASY])
    assert paired.high - paired.low < 1e-9 < 0.1 < alone.high - alone.low


@pytest.mark.parametrize(("dear", "scale"), [(100.0, "linear"), (1000.0, "log")])
def test_costs_that_are_far_apart_are_drawn_by_doublings(dear: float, scale: str) -> None:
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    page._scale(axes, "episodes", [curve(0.0, 0.5, 0.9), curve(0.0, 0.5, 0.9, each=dear)])
    assert axes.get_xscale() == scale
    assert axes.get_xlim()[0] == (100.0 if scale == "log" else 0.0)
