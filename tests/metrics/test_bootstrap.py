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


def test_interval_against_a_loop():
    values = np.random.default_rng(0).random(7)
    rng = np.random.default_rng(5)
    means = sorted(np.mean([values[i] for i in rng.integers(7, size=7)]) for _ in range(101))
    # 101 means: the quantiles 0.1 and 0.9 are the means at places 10 and 90.
    limits = metrics.interval(values, level=0.8, samples=101, seed=5)
    np.testing.assert_allclose(limits, [means[10], means[90]])


def test_interval_of_nothing_is_nan():
    assert np.isnan(metrics.interval(np.full(3, np.nan))).all()


def test_level_is_checked():
    with pytest.raises(ValueError, match="level=95 must lie between 0 and 1"):
        metrics.interval(np.ones(3), level=95)
