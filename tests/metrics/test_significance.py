"""Intervals and tests: by loops, against scipy and published tables, and simulated errors."""

import math
import pathlib

import numpy as np
import pytest
import scipy.stats

import dmljax
from dmljax import metrics


@pytest.mark.parametrize("level", ["95 %", "95%", "95&nbsp;%"])
def test_no_text_repeats_the_level(level):
    """Texts take it from `level_text()`, and the page from its data."""
    assert metrics.level_text() == "95 %"
    package = pathlib.Path(dmljax.__file__).parent
    texts = (p for x in ("py", "js", "html", "css", "md") for p in package.rglob(f"*.{x}"))
    assert not [str(p) for p in texts if level in p.read_text(encoding="utf-8")]


def test_an_interval_has_the_quantiles_of_a_loop():
    values = np.random.default_rng(0).random(7)
    rng = np.random.default_rng(5)
    means = sorted(np.mean([values[i] for i in rng.integers(7, size=7)]) for _ in range(101))
    # 101 means: the quantiles 0.1 and 0.9 are the means at places 10 and 90.
    limits = metrics.interval(values, level=0.8, samples=101, seed=5)
    np.testing.assert_allclose(limits, [means[10], means[90]])
    assert np.isnan(metrics.interval(np.full(3, np.nan))).all()


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


def test_chunks_change_nothing(monkeypatch):
    from dmljax.metrics import significance

    values, groups = np.random.default_rng(0).random(90), np.arange(90) // 3
    limits = metrics.interval(values, groups=groups)
    monkeypatch.setattr(significance, "_CHUNK", 100)
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
    assert metrics.compare(a, a, groups=labels) == (0, 0, 0, 1, "not resolved")
    a, b, _ = _runs(0.02, seed=3)
    few = metrics.compare(a, b, groups=labels, samples=200, seed=4)
    means = metrics.significance.bootstrap_means(a - b, groups=labels, samples=200, seed=4)
    below, above = sum(m <= 0 for m in means) + 1, sum(m >= 0 for m in means) + 1
    assert few.p == pytest.approx(min(1, 2 * min(below, above) / 201))


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


def test_level_of_the_verdict():
    """Without an effect on average, 5 % of the verdicts are wrong; over queries, many more."""
    wrong = np.zeros(2)
    for seed in range(60):
        a, b, labels = _runs(0, seed=seed)
        rng = np.random.default_rng(1000 + seed)
        a = a + 0.5 * rng.standard_normal(60)[labels]  # the effect differs between classes
        for i, options in enumerate(({"groups": labels}, {})):
            comparison = metrics.compare(a, b, samples=300, seed=seed, **options)
            wrong[i] += comparison.verdict != "not resolved"
    assert wrong[0] / 60 < 0.12 < 0.3 < wrong[1] / 60


def test_few_classes():
    comparison = metrics.compare(np.ones(14), np.zeros(14), groups=np.arange(14) // 2)
    assert comparison.difference == 1 and comparison.verdict == "not resolved"
    assert math.isnan(comparison.low) and math.isnan(comparison.p)
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


def _simulate(seed, count, *shape):
    return np.random.default_rng(seed).normal(size=(count, *shape))


def test_interval_is_that_of_scipy():
    values = [68.9, 69.4, 70.2, 66.0]
    estimate = metrics.student_interval(values, level=0.9)
    expected = scipy.stats.t.interval(0.9, 3, np.mean(values), scipy.stats.sem(values))
    np.testing.assert_allclose([estimate.low, estimate.high], expected)
    assert estimate.n == 4 and np.isclose(estimate.deviation, np.std(values, ddof=1))
    one = metrics.student_interval([69.4])
    assert one.mean == 69.4 and one.n == 1 and np.isnan([one.deviation, one.low, one.high]).all()


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
    assert abs(metrics.visible_difference(1.0, n=n, paired=True) - paired) < slack
    first = metrics.visible_difference(1.0, n=n, paired=True, comparisons=8)
    assert abs(first - first_of_eight) < slack


@pytest.mark.parametrize(("k", "gain"), [(1, 0), (5, 1.16), (10, 1.54), (30, 2.04), (70, 2.38)])
def test_expected_best_of_equal_evaluations(k, gain):
    assert abs(metrics.expected_best(k) - gain) < 0.01


def _rejections(difference_fn, runs, **options):
    return np.mean([difference_fn(a, b, **options).p < 0.05 for a, b in runs])


def _correlated(seed, count, n, correlation):
    """Runs of two equal rows whose seeds are correlated."""
    common, own = _simulate(seed, count, 1, n), _simulate(seed + 1, count, 2, n)
    return correlation**0.5 * common + (1 - correlation) ** 0.5 * own


@pytest.mark.parametrize("n", [3, 5])
def test_type_1_error_of_paired_and_welch(n, count=800):
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


@pytest.mark.parametrize(
    ("correlation", "plain", "corrected"), [(0.0, 0.049, 0.016), (0.25, 0.130, 0.051)]
)
def test_type_1_error_over_folds(correlation, plain, corrected, count=800):
    runs = _folds(count, correlation)
    slack = 3 * (plain * (1 - plain) / count) ** 0.5
    assert abs(_rejections(metrics.paired_difference, runs) - plain) < slack
    rate = _rejections(metrics.fold_difference, runs, test_per_train=1 / 3)
    assert abs(rate - corrected) < max(3 * (corrected / count) ** 0.5, 0.003)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: metrics.paired_difference([1.0, 2.0], [1.0]), "b needs 2 values or more"),
        (lambda: metrics.paired_difference([1.0] * 3, [1.0] * 2), "pairs need a value of each"),
        (lambda: metrics.student_interval([]), "values needs 1 values or more"),
        (lambda: metrics.student_interval([1.0, np.nan]), "not finite"),
        (lambda: metrics.holm([0.2, 1.2]), "between 0 and 1"),
        (lambda: metrics.visible_difference(1.0, n=1), "two runs or more"),
        (lambda: metrics.visible_difference(1.0, n=1, paired=True), "two runs or more"),
        (lambda: metrics.visible_difference(1.0, n=5, level=0.05), "p-value that .*got 0.8"),
        (lambda: metrics.visible_difference(1.0, n=5, power=1), "and 1, got 1"),
        (lambda: metrics.visible_difference(1.0, n=5, comparisons=0), "from 1, got 0"),
        (lambda: metrics.fold_difference([1.0, 2], [1.0, 2], test_per_train=0), "1/3 for four"),
        (lambda: metrics.student_interval([1.0, 2.0], level=95), "level=95 must lie between"),
        (lambda: metrics.interval(np.ones(4), groups=np.arange(3)), r"groups have shape \(3,\)"),
        # Before values are drawn.
        (lambda: metrics.interval(np.ones(3), level=95, samples=10**12), "level=95 must lie"),
        (
            lambda: metrics.compare(np.ones(3), np.ones(3), level=95, samples=10**12),
            "level=95 must lie",
        ),
    ],
)
def test_wrong_input_is_one_line(call, message):
    with pytest.raises(ValueError, match=message):
        call()
