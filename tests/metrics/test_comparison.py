"""Two runs on the same queries: differences by loops, verdicts on planted effects."""

import math

import numpy as np
import pytest

from dmljax import metrics


def _runs(effect, *, seed=0, classes=60, queries=20):
    """Right and wrong queries of two runs: classes differ, and so does the effect in them."""
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(classes), queries)
    base = rng.uniform(0.4, 0.9, classes)
    shift = effect + 0.06 * rng.standard_normal(classes)
    draws = rng.random(len(labels))
    a = (draws < np.clip(base + shift, 0, 1)[labels]).astype(float)
    b = (rng.random(len(labels)) < base[labels]).astype(float)
    a[::17] = np.nan
    b[5] = np.nan
    return a, b, labels


def test_verdicts():
    a, b, labels = _runs(0.15)
    comparison = metrics.compare(a, b, groups=labels)
    assert comparison.verdict == "better" and 0 < comparison.low < comparison.high
    assert comparison.difference == pytest.approx(np.nanmean(a - b))
    assert comparison.p == pytest.approx(2 / 10_001)
    worse = metrics.compare(b, a, groups=labels)
    assert worse.verdict == "worse" and worse.high < 0
    np.testing.assert_allclose([worse.low, worse.high], [-comparison.high, -comparison.low])
    assert metrics.compare(a, b, groups=labels).low == comparison.low  # the same draws


def test_over_classes_every_class_weighs_the_same():
    a, b, labels = _runs(0.15)
    kept = np.arange(len(labels)) % 20 <= labels % 7 + 1  # 2 to 8 queries of a class
    a, b, labels = a[kept], b[kept], labels[kept]
    of_classes = [np.nanmean((a - b)[labels == c]) for c in np.unique(labels)]
    over_classes = metrics.compare(a, b, groups=labels, over="classes")
    assert over_classes.difference == pytest.approx(np.mean(of_classes))
    assert over_classes.difference != pytest.approx(np.nanmean(a - b))
    interval = metrics.interval(a - b, groups=labels, over="classes", samples=10_000)
    assert (over_classes.low, over_classes.high) == interval


def test_the_difference_of_equal_runs_is_not_resolved():
    a, _, labels = _runs(0)
    assert metrics.compare(a, a, groups=labels) == (0, 0, 0, 1, "not resolved")


def test_level_of_the_verdict():
    """Without an effect on average, 5 % of the verdicts are wrong; over queries, many more."""
    wrong = np.zeros(2)
    for seed in range(100):
        a, b, labels = _runs(0, seed=seed)
        rng = np.random.default_rng(1000 + seed)
        a = a + 0.5 * rng.standard_normal(60)[labels]  # the effect differs between classes
        for i, options in enumerate(({"groups": labels}, {})):
            comparison = metrics.compare(a, b, samples=300, seed=seed, **options)
            wrong[i] += comparison.verdict != "not resolved"
    assert wrong[0] / 100 < 0.12 < 0.3 < wrong[1] / 100


def test_p_value_against_a_loop():
    a, b, labels = _runs(0.02, seed=3)
    means = metrics.bootstrap_means(a - b, groups=labels, samples=200, seed=4)
    below = sum(m <= 0 for m in means) + 1
    above = sum(m >= 0 for m in means) + 1
    comparison = metrics.compare(a, b, groups=labels, samples=200, seed=4)
    assert comparison.p == pytest.approx(min(1, 2 * min(below, above) / 201))


def test_few_classes():
    comparison = metrics.compare(np.ones(14), np.zeros(14), groups=np.arange(14) // 2)
    assert comparison.difference == 1 and comparison.verdict == "not resolved"
    assert math.isnan(comparison.low) and math.isnan(comparison.p)


def test_nothing_to_compare():
    comparison = metrics.compare(np.full(9, np.nan), np.ones(9), groups=np.arange(9))
    assert math.isnan(comparison.difference) and comparison.verdict == "not resolved"


@pytest.mark.parametrize(("b", "c"), [(0, 0), (3, 0), (5, 9), (889, 112), (6, 6)])
def test_mcnemar_against_the_binomial_sum(b, c):
    first = np.r_[np.ones(b, bool), np.zeros(c, bool), np.ones(4, bool), np.zeros(3, bool)]
    second = np.r_[np.zeros(b, bool), np.ones(c, bool), np.ones(4, bool), np.zeros(3, bool)]
    n, k = b + c, min(b, c)
    tail = sum(math.comb(n, i) for i in range(k + 1)) / 2**n
    result = metrics.mcnemar(first, second)
    assert (result.only_first, result.only_second) == (b, c)
    assert result.p == pytest.approx(min(1, 2 * tail))


def test_another_seed_gives_almost_the_same_p():
    """With 1,000 draws, this p-value has a deviation of 0.0065 over seeds."""
    a, b, labels = _runs(0.05)
    p = [metrics.compare(a, b, groups=labels, seed=seed).p for seed in range(10)]
    assert 0.01 < np.mean(p) < 0.03 and np.std(p) < 0.003
