"""Report statistics against published values, loop twins and planted cases."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from stages.learn.statistics import (
    auroc,
    bootstrap_interval,
    calibration,
    cluster_draws,
    leak_rate,
    pass_hat,
    share_interval,
    spearman,
    wilson,
)


def test_wilson_equals_published_intervals() -> None:
    """Newcombe 1998, table I, method 3: 81/263, 15/148, 0/20, 1/29 at 95 %."""
    published = {
        (81, 263): (0.2553, 0.3662),
        (15, 148): (0.0624, 0.1605),
        (0, 20): (0.0, 0.1611),
        (1, 29): (0.0061, 0.1718),
    }
    for (wins, n), (low, high) in published.items():
        assert wilson(wins, n) == pytest.approx((low, high), abs=5e-5)


def test_wilson_covers_the_truth_about_as_often_as_it_says() -> None:
    """Exact coverage at n = 50, mean over p: 0.95 expected; z = 0 (no interval) would give 0."""
    n, rates = 50, np.linspace(0.02, 0.98, 97)
    chance = np.array([math.comb(n, k) * rates**k * (1 - rates) ** (n - k) for k in range(n + 1)])
    ends = np.array([wilson(k, n) for k in range(n + 1)])
    covered = (chance * ((ends[:, :1] <= rates) & (rates <= ends[:, 1:]))).sum(axis=0)
    assert covered.mean() == pytest.approx(0.95, abs=0.01)


def test_wilson_at_the_edges() -> None:
    assert wilson(0, 0) == (0.0, 1.0)
    assert wilson(0, 10)[0] == 0.0
    assert wilson(10, 10)[1] == 1.0
    with pytest.raises(ValueError, match="wins must be"):
        wilson(3, 2)


def test_spearman_equals_scipy_with_ties() -> None:
    from scipy.stats import spearmanr  # type: ignore[import-untyped,unused-ignore]

    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 5, 40).astype(float), rng.integers(0, 5, 40).astype(float)
    assert spearman(x, y) == pytest.approx(float(spearmanr(x, y).statistic), abs=1e-12)
    assert spearman([1, 2, 3], [10, 20, 90]) == pytest.approx(1.0)


def test_spearman_is_nan_where_undefined_and_skips_nan_pairs() -> None:
    assert math.isnan(spearman([1, 1, 1], [1, 2, 3]))
    assert math.isnan(spearman([], []))
    assert math.isnan(spearman([1.0, math.nan], [1.0, 2.0]))
    assert spearman([1, math.nan, 3, 2], [1, 0, 3, 2]) == pytest.approx(1.0)
    with pytest.raises(ValueError, match="one length"):
        spearman([1, 2], [1])


def test_auroc_equals_the_loop_over_pairs() -> None:
    rng = np.random.default_rng(1)
    scores, labels = rng.integers(0, 6, 60), rng.integers(0, 2, 60)
    pairs = [(p > q) + 0.5 * (p == q) for p in scores[labels == 1] for q in scores[labels == 0]]
    assert auroc(scores, labels) == pytest.approx(float(np.mean(pairs)), abs=1e-12)


def test_auroc_of_perfect_reversed_constant_and_one_class() -> None:
    assert auroc([1, 2, 3, 4], [0, 0, 1, 1]) == 1.0
    assert auroc([4, 3, 2, 1], [0, 0, 1, 1]) == 0.0
    assert auroc([1, 1, 1, 1], [0, 0, 1, 1]) == 0.5
    assert math.isnan(auroc([1, 2], [1, 1]))
    with pytest.raises(ValueError, match="must not be NaN"):
        auroc([1.0, math.nan], [0, 1])


def test_calibration_table_by_hand() -> None:
    rows = calibration([0.0, 0.05, 0.5, 1.0, 0.95], [0, 1, 1, 1, 1], bins=10, clusters=range(5))
    assert [(row["low"], row["high"], row["n"], row["rate"]) for row in rows] == [
        (0.0, 0.1, 2, 0.5),
        (0.5, 0.6, 1, 1.0),
        (0.9, 1.0, 2, 1.0),
    ]
    assert rows[0]["mean_score"] == pytest.approx(0.025)
    assert (rows[0]["rate_low"], rows[0]["rate_high"]) == wilson(0.5, 1)  # two episodes, of which the rate uses one up
    with pytest.raises(ValueError, match=r"in \[0, 1\]"):
        calibration([1.1], [1], bins=10, clusters=[0])


def test_planted_leak_is_found_and_its_share_counted() -> None:
    """One of two rows says 2 privileged words of its 5: 0.5 of the rows. Corrected: 0."""
    known = ["The customer wants a refund for order 17.", "The customer asks for a mug."]
    privileged = ["Observation: the item was damaged. reward 1", "Observation: refused, reward 0"]
    leaking = ["Future: the item was damaged, refund order.", "Future: the customer gets the mug."]
    corrected = ["Future: if it is broken, refund order.", "Future: the customer gets the mug."]
    # content words of the first target: future, item, damaged, refund, order; item and damaged are in s' alone
    rows, share = leak_rate(leaking, privileged, known)
    assert (rows, share) == pytest.approx((0.5, 0.5 * 2 / 5))
    assert leak_rate(corrected, privileged, known) == (0.0, 0.0)


def test_words_of_the_student_prompt_and_function_words_are_no_leak() -> None:
    assert leak_rate(["the refund is for the order"], ["the refund of the order"], ["refund my order"]) == (0.0, 0.0)
    assert leak_rate(["it will be what it was"], ["it was what it will be"], [""]) == (0.0, 0.0)


def test_an_answer_of_one_word_and_a_number_can_leak() -> None:
    assert leak_rate(["Yes."], ["yes"], ["Is it alive?"]) == (1.0, 1.0)
    assert leak_rate(["code 4821-b"], ["4821-B"], ["code"]) == (1.0, 0.5)


def test_a_planted_share_of_rows_is_measured_exactly() -> None:
    """Secrets planted in 30 of 200 rows: 0.15 with them, 0 against privileged texts of other rows."""
    secrets = [f"object{i}" for i in range(200)]
    targets = [f"the thing is {secrets[i]}" if i < 30 else "the thing is unknown" for i in range(200)]
    known = ["what is the thing"] * 200
    assert leak_rate(targets, secrets, known) == pytest.approx((0.15, 0.15 / 2))
    assert leak_rate(targets, secrets[1:] + secrets[:1], known) == (0.0, 0.0)


def test_longer_runs_find_copied_phrases_not_single_words() -> None:
    target, privileged, known = "send the red mug today", "they sent the red mug", "red paint, a mug"
    assert leak_rate([target], [privileged], [known])[0] == 0.0  # both words are known
    # runs of 2 in the target: send the, the red, red mug, mug today; "the red" and "red mug" stand in s' alone
    assert leak_rate([target], [privileged], [known], n=2) == (1.0, 0.5)


def test_rows_without_words_and_without_rows() -> None:
    assert leak_rate([""], ["x"], ["y"]) == (0.0, 0.0)
    assert leak_rate([], [], []) == (0.0, 0.0)
    with pytest.raises(ValueError, match="one text a row"):
        leak_rate(["a"], [], ["b"])
    with pytest.raises(ValueError, match="n must be"):
        leak_rate(["a"], ["a"], ["b"], n=0)


def clustered(rng: np.random.Generator, n_clusters: int = 32, n_rows: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Turns of episodes: an episode's own rate is 0.05 or 0.95, so its turns are mostly alike; the share is .5."""
    rates = np.repeat(rng.choice([0.05, 0.95], n_clusters), n_rows)
    return (rng.random(rates.size) < rates).astype(float), np.repeat(np.arange(n_clusters), n_rows)


def test_an_interval_of_clusters_covers_the_truth_as_often_as_it_says_and_one_of_rows_does_not() -> None:
    """96 turns of 32 episodes, 1,000 times: 95 % wanted; row by row it is about 78 %."""
    rng = np.random.default_rng(0)
    hits = np.zeros(2)
    for _ in range(1000):
        y, clusters = clustered(rng)
        for i, (low, high) in enumerate((share_interval(y, clusters.tolist()), wilson(y.sum(), y.size))):
            hits[i] += low <= 0.5 <= high
    assert 0.93 <= hits[0] / 1000 <= 0.975
    assert hits[1] / 1000 < 0.85


def test_share_interval_equals_a_loop_and_its_edges() -> None:
    y, groups = [1, 1, 0, 1, 0, 0, 0, 1, 1], ["a", "a", "b", "c", "b", "b", "d", "c", "e"]
    p, n_groups = sum(y) / 9, 5
    v = (
        n_groups
        / (n_groups - 1)
        * sum(sum(b - p for b, g in zip(y, groups, strict=True) if g == name) ** 2 for name in "abcde")
        / 81
    )
    n = p * (1 - p) / v
    assert share_interval(y, groups) == pytest.approx(wilson(p * n, n))
    assert n < 5
    alone = [i % 3 == 0 for i in range(30)]
    assert share_interval(alone, range(30)) == pytest.approx(wilson(10 * 29 / 30, 29))
    assert share_interval([1, 1, 1, 1], ["a", "a", "b", "b"]) == wilson(2, 2)
    # each cluster tells the same: as good as its rows
    assert share_interval([1, 0, 1, 0], ["a", "a", "b", "b"]) == wilson(2, 4)
    assert share_interval([1, 0], ["a", "a"]) == wilson(0.5, 1)
    assert share_interval([], []) == (0.0, 1.0)
    with pytest.raises(ValueError, match="one cluster a row"):
        share_interval([1, 0], ["a"])


def test_draws_are_of_whole_clusters_and_the_same_for_the_same_seed() -> None:
    clusters = ["a", "b", "a", "c", "b"]
    members = {"a": [0, 2], "b": [1, 4], "c": [3]}
    draws = cluster_draws(clusters, 50, 1)
    assert [d.tolist() for d in draws] == [d.tolist() for d in cluster_draws(clusters, 50, 1)]
    for rows in draws:
        counts = {name: [rows.tolist().count(i) for i in members[name]] for name in members}
        assert all(len(set(found)) == 1 for found in counts.values())
        assert sum(found[0] for found in counts.values()) == 3
    assert len({tuple(d.tolist()) for d in draws}) > 5
    assert cluster_draws([], 50, 1) == []


def test_a_bootstrap_over_clusters_covers_a_correlation_and_one_over_rows_does_not() -> None:
    """x and y are an episode's own, with little noise of the turn; Spearman's rho of the population by 50,000 episodes.
    200 times: 95 % wanted.
    """

    def pairs(rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray, list[int]]:
        x = rng.normal(size=n)
        y = 0.6 * x + 0.8 * rng.normal(size=n)
        rows = np.repeat(np.arange(n), 4)
        return x[rows] + 0.1 * rng.normal(size=4 * n), y[rows] + 0.1 * rng.normal(size=4 * n), rows.tolist()

    truth = spearman(*pairs(np.random.default_rng(1), 50_000)[:2])
    hits = np.zeros(2)
    for i in range(200):
        x, y, clusters = pairs(np.random.default_rng(100 + i), 32)
        for kind, groups in enumerate((clusters, range(len(x)))):
            draws = cluster_draws(groups, 150, i)
            low, high = bootstrap_interval(lambda rows, x=x, y=y: spearman(x[rows], y[rows]), draws)  # type: ignore[misc]
            hits[kind] += low <= truth <= high
    assert hits[0] / 200 >= 0.88
    assert hits[1] / 200 < 0.8


def test_a_statistic_that_is_mostly_not_defined_has_no_interval() -> None:
    draws = cluster_draws(range(4), 100, 0)
    assert all(math.isnan(end) for end in bootstrap_interval(lambda rows: math.nan if rows[0] < 3 else 1.0, draws))
    assert bootstrap_interval(lambda rows: math.nan if rows[0] > 2 else 1.0, draws) == (1.0, 1.0)
    assert all(math.isnan(end) for end in bootstrap_interval(lambda rows: 1.0, []))


def test_pass_hat_is_the_share_of_draws_of_k_trials_that_are_all_won() -> None:
    for trials in range(1, 7):
        for wins in range(trials + 1):
            played = [1] * wins + [0] * (trials - wins)
            for k in range(1, trials + 1):
                drawn = list(itertools.combinations(played, k))
                assert pass_hat(wins, trials, k) == pytest.approx(sum(map(all, drawn)) / len(drawn))
    for wins, trials, k in ((3, 2, 1), (-1, 2, 1), (1, 2, 3), (1, 2, 0)):
        with pytest.raises(ValueError, match="wanted 0 <= wins <= trials"):
            pass_hat(wins, trials, k)


def test_rows_of_one_cluster_that_are_alike_count_as_one() -> None:
    """Each scenario all won or all lost: four trials tell what one does, but for a degree of freedom."""
    won = [1] * 30 + [0] * 20
    once = wilson(30, 50)
    low, high = share_interval(np.repeat(won, 4), [i for i in range(50) for _ in range(4)])
    assert high - low == pytest.approx(once[1] - once[0], rel=0.02)
    apart = share_interval(np.repeat(won, 4), range(200))
    assert apart[1] - apart[0] == pytest.approx(wilson(120, 200)[1] - wilson(120, 200)[0], rel=0.01)
