"""Intervals and tests over runs: against scipy, published tables, and simulated type-I errors."""

import numpy as np
import pytest
import scipy.stats

from dmljax import metrics

# Simulated studies: a quick number, and one that shows a wrong formula of a percent.
counts = pytest.mark.parametrize("count", [1200, pytest.param(20_000, marks=pytest.mark.slow)])


def _simulate(seed, count, *shape):
    return np.random.default_rng(seed).normal(size=(count, *shape))


def test_interval_is_that_of_scipy():
    values = [68.9, 69.4, 70.2, 66.0]
    estimate = metrics.student_interval(values, level=0.9)
    expected = scipy.stats.t.interval(0.9, 3, np.mean(values), scipy.stats.sem(values))
    np.testing.assert_allclose([estimate.low, estimate.high], expected)
    assert estimate.n == 4 and np.isclose(estimate.deviation, np.std(values, ddof=1))


@pytest.mark.parametrize(("n", "half"), [(3, 2.48), (4, 1.59), (5, 1.24), (8, 0.84), (10, 0.72)])
def test_half_width_in_deviations(n, half):
    estimate = metrics.student_interval(_simulate(0, 1, n)[0])
    assert round((estimate.high - estimate.mean) / estimate.deviation, 2) == half


def test_one_run_has_no_interval():
    estimate = metrics.student_interval([69.4])
    assert estimate.mean == 69.4 and estimate.n == 1
    assert np.isnan([estimate.deviation, estimate.low, estimate.high]).all()


def test_differences_are_those_of_scipy():
    a, b = _simulate(1, 2, 6) * 0.8 + 70
    paired, welch = metrics.paired_difference(a, b), metrics.welch_difference(a, b[:4])
    by_scipy = scipy.stats.ttest_rel(a, b)
    assert np.isclose(paired.p, by_scipy.pvalue) and paired.degrees == by_scipy.df
    np.testing.assert_allclose([paired.low, paired.high], by_scipy.confidence_interval())
    by_scipy = scipy.stats.ttest_ind(a, b[:4], equal_var=False)
    assert np.isclose(welch.p, by_scipy.pvalue) and np.isclose(welch.degrees, by_scipy.df)
    np.testing.assert_allclose([welch.low, welch.high], by_scipy.confidence_interval())
    squares = sum(len(x) * np.var(x) for x in (a, b[:4]))
    assert welch.n == 4 and np.isclose(welch.deviation, np.sqrt(squares / (6 + 4 - 2)))


def _with_moments(mean, deviation, n=5):
    x = _simulate(2, 1, n)[0]
    return (x - x.mean()) / x.std(ddof=1) * deviation + mean


@pytest.mark.parametrize(
    ("dot", "gatv2", "p"),
    [
        ((87.48, 0.37), (87.23, 0.38), 0.32),
        ((25.87, 0.98), (26.86, 0.50), 0.09),
        ((69.05, 1.04), (69.24, 0.30), 0.71),
        ((72.51, 0.92), (72.52, 0.74), 0.99),
    ],
)
def test_slides_of_the_graph_study_resolve_nothing(dot, gatv2, p):
    difference = metrics.welch_difference(_with_moments(*gatv2), _with_moments(*dot))
    assert round(difference.p, 2) == p and difference.low < 0 < difference.high


@pytest.mark.parametrize("gain", [0.0, 100 / 44])
def test_runs_without_spread_have_no_test(gain):
    """Also where only rounding differs: these differences have a deviation of 7e-15."""
    a = [70.1, 73.3, 69.7, 71.9, 70.3]
    b = [x - gain for x in a]
    fold = metrics.fold_difference(a, b, test_per_train=0.5)
    constant = metrics.welch_difference([b[0]] * 5, [b[0] - gain] * 5)
    for difference in (metrics.paired_difference(a, b), fold, constant):
        assert difference.mean == pytest.approx(gain) and difference.deviation == 0
        assert np.isnan([difference.low, difference.high, difference.p]).all()
    one_of_many = metrics.paired_difference(a, [x - gain - 1e-4 * (x == a[0]) for x in a])
    assert 0 < one_of_many.p <= 1  # one of a million queries is a spread


def test_holm_is_the_step_down_rule():
    """Rejects p_(i) while p_(i) <= level / (m - i + 1), by a loop."""
    for p in np.random.default_rng(3).uniform(0, 0.05, (200, 5)):
        rejected, order = np.zeros(5, bool), np.argsort(p)
        for i, at in enumerate(order):
            if p[at] > 0.05 / (5 - i):
                break
            rejected[at] = True
        np.testing.assert_array_equal(np.array(metrics.holm(p)) <= 0.05, rejected)
    assert metrics.holm([0.9, 0.8]) == [1.0, 1.0] and metrics.holm([]) == []
    one, missing, two = metrics.holm([0.01, np.nan, 0.03])  # no test, so it does not count
    assert np.isnan(missing) and [one, two] == [0.02, 0.03]


# Differences detected with power 0.8 in units of the deviation: independent runs, pairs of
# correlation 0.5, and the first of eight rows of such pairs.
VISIBLE = {3: (3.1, 3.3, 9.3), 5: (2.0, 1.7, 3.0), 10: (1.3, 1.0, 1.4), 20: (0.91, 0.66, 0.89)}


@pytest.mark.parametrize("n", VISIBLE)
def test_visible_differences(n):
    unpaired, paired, first_of_eight = VISIBLE[n]
    slack = 0.006 if n == 20 else 0.06
    assert abs(metrics.visible_difference(1.0, n=n) - unpaired) < slack
    # The deviation of differences of correlation 0.5 is that of one run.
    assert abs(metrics.visible_paired_difference(1.0, n=n) - paired) < slack
    first = metrics.visible_paired_difference(1.0, n=n, comparisons=8)
    assert abs(first - first_of_eight) < slack


def test_a_visible_difference_is_seen_in_four_of_five_studies():
    shift = metrics.visible_difference(0.9, n=5)
    assert round(shift, 1) == 1.8
    runs = _simulate(4, 1200, 2, 5) * 0.9
    p = [metrics.welch_difference(a + shift, b).p for a, b in runs]
    assert abs(np.mean(np.array(p) < 0.05) - 0.8) < 0.035
    first = metrics.visible_paired_difference(1.0, n=3, comparisons=8)
    runs = _simulate(5, 1200, 3) + first
    p = [metrics.paired_difference(d, np.zeros(3)).p for d in runs]
    assert abs(np.mean(np.array(p) < 0.05 / 8) - 0.8) < 0.035


@pytest.mark.parametrize(("k", "gain"), [(1, 0), (5, 1.16), (10, 1.54), (30, 2.04), (70, 2.38)])
def test_expected_best_of_equal_evaluations(k, gain):
    assert abs(metrics.expected_best(k) - gain) < 0.01


def _correlated(seed, count, n, correlation):
    """Runs of two equal rows whose seeds are correlated."""
    common, own = _simulate(seed, count, 1, n), _simulate(seed + 1, count, 2, n)
    return correlation**0.5 * common + (1 - correlation) ** 0.5 * own


def _rejections(difference_fn, runs, **options):
    return np.mean([difference_fn(a, b, **options).p < 0.05 for a, b in runs])


@counts
@pytest.mark.parametrize("n", [3, 5])
def test_type_1_error_of_paired_and_welch(n, count):
    """At 5 %, within three standard errors of the simulation; Welch may reject less often."""
    slack = 3 * (0.05 * 0.95 / count) ** 0.5
    for correlation in (0.0, 0.5):
        runs = _correlated(5, count, n, correlation)
        assert abs(_rejections(metrics.paired_difference, runs) - 0.05) < slack
        welch = _rejections(metrics.welch_difference, runs)
        assert (0.025 if correlation == 0 else 0.004) < welch < 0.05 + slack
    unequal = _correlated(6, count, n, 0.0) * np.array([[1.0], [0.3]])
    assert _rejections(metrics.welch_difference, unequal) < 0.06 + slack


def _folds(count, correlation):
    """Differences of four folds, correlated with each other, as two rows."""
    common, own = _simulate(7, count, 1), _simulate(8, count, 4)
    d = correlation**0.5 * common + (1 - correlation) ** 0.5 * own
    return np.stack([d, np.zeros_like(d)], axis=1)


@counts
@pytest.mark.parametrize(
    ("correlation", "plain", "corrected"),
    [(0.0, 0.049, 0.016), (0.1, 0.077, 0.027), (0.25, 0.130, 0.051), (0.4, 0.195, 0.084)],
)
def test_type_1_error_over_folds(correlation, plain, corrected, count):
    runs = _folds(count, correlation)
    slack = 3 * (plain * (1 - plain) / count) ** 0.5
    assert abs(_rejections(metrics.paired_difference, runs) - plain) < slack
    rate = _rejections(metrics.fold_difference, runs, test_per_train=1 / 3)
    assert abs(rate - corrected) < max(3 * (corrected / count) ** 0.5, 0.003)


def test_half_width_over_four_folds():
    d = [0.0, 1.0, 2.0, 4.0]
    corrected = metrics.fold_difference(d, [0.0] * 4, test_per_train=1 / 3)
    plain = metrics.paired_difference(d, [0.0] * 4)
    in_deviations = [(x.high - x.mean) / x.deviation for x in (corrected, plain)]
    np.testing.assert_allclose(in_deviations, [2.43, 1.59], atol=0.005)


def _eight_equal_rows(n, count):
    """Whether any of eight rows equal to the baseline is rejected: by its p-value, and by Holm."""
    rng, plain, adjusted = np.random.default_rng(9), [], []
    for _ in range(count):
        runs = rng.normal(size=(9, n)) * 0.5**0.5 + rng.normal(size=(1, n)) * 0.5**0.5
        p = [metrics.paired_difference(row, runs[0]).p for row in runs[1:]]
        plain.append(min(p) < 0.05)
        adjusted.append(min(metrics.holm(p)) < 0.05)
    return np.mean(plain), np.mean(adjusted)


def test_some_of_eight_equal_rows_differs_in_a_quarter_of_studies():
    plain, adjusted = _eight_equal_rows(5, 300)
    assert 0.18 < plain < 0.32 and adjusted < 0.05 + 0.03


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: metrics.paired_difference([1.0, 2.0], [1.0]), "b needs 2 values or more"),
        (lambda: metrics.paired_difference([1.0] * 3, [1.0] * 2), "pairs need a value of each"),
        (lambda: metrics.student_interval([]), "values needs 1 values or more"),
        (lambda: metrics.student_interval([1.0, np.nan]), "not finite"),
        (lambda: metrics.holm([0.2, 1.2]), "between 0 and 1"),
        (lambda: metrics.visible_difference(1.0, n=1), "two runs or more"),
        (
            lambda: metrics.visible_difference(1.0, n=5, level=0.05),
            "lie between 0.95",
        ),
        (lambda: metrics.visible_difference(1.0, n=5, power=1), "power=1 must lie between 0.05"),
        (lambda: metrics.visible_difference(1.0, n=5, comparisons=0), "comparisons=0 must be 1"),
        (lambda: metrics.fold_difference([1.0, 2], [1.0, 2], test_per_train=0), "1/3 for four"),
        (lambda: metrics.student_interval([1.0, 2.0], level=95), "level=95 must lie between"),
    ],
)
def test_wrong_input_is_one_line(call, message):
    with pytest.raises(ValueError, match=message):
        call()
