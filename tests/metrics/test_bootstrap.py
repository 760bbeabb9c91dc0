"""The bootstrap interval covers the mean as often as it claims."""

import numpy as np
import pytest

from dmljax import metrics


def test_interval_covers_the_mean_as_often_as_it_claims():
    rng = np.random.default_rng(2)
    covered = 0
    for seed in range(200):
        values = rng.exponential(size=60)
        low, high = metrics.interval(np.append(values, np.nan), level=0.8, samples=200, seed=seed)
        covered += low <= 1 <= high
    assert 0.68 < covered / 200 < 0.88  # 0.8, less what a bootstrap of 60 skewed values loses
    assert metrics.interval(values, seed=3) == metrics.interval(values, seed=3)


def test_an_interval_has_the_quantiles_of_a_loop():
    values = np.random.default_rng(0).random(7)
    rng = np.random.default_rng(5)
    means = sorted(np.mean([values[i] for i in rng.integers(7, size=7)]) for _ in range(101))
    # 101 means: the quantiles 0.1 and 0.9 are the means at places 10 and 90.
    limits = metrics.interval(values, level=0.8, samples=101, seed=5)
    np.testing.assert_allclose(limits, [means[10], means[90]])


def test_the_interval_of_no_value_is_nan():
    assert np.isnan(metrics.interval(np.full(3, np.nan))).all()


def test_level_is_checked():
    with pytest.raises(ValueError, match="level=95 must lie between 0 and 1"):
        metrics.interval(np.ones(3), level=95)
    for function in (metrics.interval, lambda x, **k: metrics.compare(x, x, **k)):
        with pytest.raises(ValueError, match="level=95 must lie"):  # before values are drawn
            function(np.ones(3), level=95, samples=10**12)


@pytest.mark.parametrize("over", ["queries", "classes"])
def test_interval_over_groups_against_weights_of_the_groups(over):
    """The quantiles of sum(w S) / sum(w n) with w drawn as its multinomial, by a loop.

    Over classes, S is the mean of a group, and n is 1.
    """
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(30) * 7, rng.integers(1, 9, 30))
    values = rng.random(len(groups)) + rng.random(211 + 1)[groups]
    values[::11] = np.nan
    sums = [np.nansum(values[groups == g]) for g in np.unique(groups)]
    sizes = [np.sum(~np.isnan(values[groups == g])) for g in np.unique(groups)]
    if over == "classes":
        sums, sizes = np.divide(sums, sizes), np.ones(30)
    means = []
    for _ in range(20_000):
        weights = rng.multinomial(30, np.full(30, 1 / 30))
        means.append(sum(weights * sums) / sum(weights * sizes))
    expected = np.quantile(means, [0.025, 0.975])
    limits = metrics.interval(values, groups=groups, over=over, samples=20_000, seed=4)
    np.testing.assert_allclose(limits, expected, atol=0.01 * np.diff(expected)[0] + 0.004)


def test_interval_over_groups_covers_the_mean_of_new_groups():
    """Groups differ: drawing queries alone is too narrow, drawing groups holds its level."""
    rng = np.random.default_rng(1)
    groups = np.repeat(np.arange(40), 25)
    covered = np.zeros(2)
    for seed in range(200):
        values = rng.standard_normal(40)[groups] + rng.standard_normal(1000)
        for i, options in enumerate(({}, {"groups": groups})):
            low, high = metrics.interval(values, samples=200, seed=seed, level=0.9, **options)
            covered[i] += low <= 0 <= high
    over_queries, over_groups = covered / 200
    assert over_queries < 0.5 and 0.82 < over_groups < 0.96


def test_chunks_change_nothing(monkeypatch):
    from dmljax.metrics import bootstrap

    values, groups = np.random.default_rng(0).random(90), np.arange(90) // 3
    limits = metrics.interval(values, groups=groups)
    monkeypatch.setattr(bootstrap, "_CHUNK", 100)
    assert metrics.interval(values, groups=groups) == limits


@pytest.mark.parametrize(
    ("classes", "note"),
    [
        (1, "no range: 1 class, and it needs 8"),
        (7, "no range: 7 classes, and it needs 8"),
        (8, "only 8 classes: the range is rough"),
        (19, "only 19 classes"),
        (20, ""),
    ],
)
def test_few_groups(classes, note):
    groups = np.arange(60) % classes
    limits = metrics.interval(np.arange(60.0), groups=groups)
    assert np.isnan(limits).all() == (classes < 8)
    assert metrics.interval_note(groups).startswith(note) and bool(note) == (classes < 20)


def test_values_and_groups_have_one_length():
    with pytest.raises(ValueError, match=r"groups have shape \(3,\), but values have \(4,\)"):
        metrics.interval(np.ones(4), groups=np.arange(3))
