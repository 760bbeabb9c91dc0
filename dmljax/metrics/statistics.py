"""Intervals, tests and detectable differences of the scores of several runs.

`values` are one score of several runs, such as R@1 of five seeds. Two rows of a table are compared
by one test that is chosen before the runs: `paired_difference` (the same seeds in both rows),
`welch_difference` (independent runs), or `fold_difference` (the folds of a cross-validation). Where
several rows are compared with one baseline, `holm` adjusts their p-values.

Functions import scipy themselves, so that other programs do not wait half a second for it.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

__all__ = [
    "Difference",
    "Estimate",
    "expected_best",
    "fold_difference",
    "holm",
    "paired_difference",
    "student_interval",
    "visible_difference",
    "visible_paired_difference",
    "welch_difference",
]

LEVEL = 0.95  # of intervals; a difference with p <= 1 - LEVEL is resolved

# A deviation below this share of the values is rounding: one of a million queries is more.
_ROUNDING = 1e-9

Values = Sequence[float] | np.ndarray


class Estimate(NamedTuple):
    """A mean over runs: `deviation` divides by n - 1; `low` and `high` bound its interval."""

    mean: float
    deviation: float
    low: float
    high: float
    n: int


class Difference(NamedTuple):
    """A mean difference, its interval, its two-sided p-value and its degrees of freedom.

    `deviation` is the deviation of the differences if runs are paired. Otherwise it is the pooled
    deviation of one run. If it is 0 or rounding, there is no test: it is 0, and the interval and
    the p-value are NaN. Equal values do not say how much other runs would vary.
    """

    mean: float
    low: float
    high: float
    p: float
    degrees: float
    deviation: float
    n: int


def student_interval(values: Values, *, level: float = LEVEL) -> Estimate:
    """Mean, deviation and Student's interval of the mean: m +- t(n - 1) s / sqrt(n).

    One value has no deviation and no interval: they are NaN.

    >>> estimate = metrics.student_interval([68.9, 69.4, 70.2])
    >>> [round(float(x), 2) for x in (estimate.mean, estimate.deviation, estimate.low)]
    [69.5, 0.66, 67.87]
    """
    x = _finite("values", values, at_least=1)
    check_level(level)
    mean, n = float(x.mean()), len(x)
    if n == 1:
        return Estimate(mean, math.nan, math.nan, math.nan, 1)
    deviation = float(x.std(ddof=1))
    half = _t(level, n - 1) * deviation / math.sqrt(n)
    return Estimate(mean, deviation, mean - half, mean + half, n)


def paired_difference(a: Values, b: Values, *, level: float = LEVEL) -> Difference:
    """Mean of a_i - b_i with Student's interval and p-value; runs a_i and b_i have the same seed.

    Pairing helps if runs with the same seed are correlated between the rows. It detects more than
    `welch_difference` from a correlation of 0.56 on for 3 runs, 0.28 for 5, and 0.12 for 10.

    >>> round(metrics.paired_difference([3.0, 5.0, 4.0], [2.0, 3.0, 3.5]).p, 3)
    0.118
    """
    mean, deviation, n = _paired("pairs", a, b)
    return _difference(mean, deviation / math.sqrt(n), n - 1, deviation, n, level)


def welch_difference(a: Values, b: Values, *, level: float = LEVEL) -> Difference:
    """Mean of a - mean of b with the interval and p-value of Welch (1947): independent runs.

    The deviations of `a` and `b` may differ, and so may their numbers of runs.

    >>> round(metrics.welch_difference([3.0, 5.0, 4.0], [2.0, 3.0, 3.5]).p, 3)
    0.188
    """
    x, y = _finite("a", a), _finite("b", b)
    var_x, var_y = _deviation(x, x) ** 2, _deviation(y, y) ** 2
    of_x, of_y = var_x / len(x), var_y / len(y)
    error = math.sqrt(of_x + of_y)
    degrees = float(len(x) + len(y) - 2)
    if error > 0:
        degrees = (of_x + of_y) ** 2 / (of_x**2 / (len(x) - 1) + of_y**2 / (len(y) - 1))
    pooled = ((len(x) - 1) * var_x + (len(y) - 1) * var_y) / (len(x) + len(y) - 2)
    n = min(len(x), len(y))
    return _difference(float(x.mean() - y.mean()), error, float(degrees), pooled**0.5, n, level)


def fold_difference(
    a: Values, b: Values, *, test_per_train: float, level: float = LEVEL
) -> Difference:
    """Mean of a_i - b_i over folds, with the corrected t of Nadeau and Bengio (2003).

    The training sets of folds overlap, so their scores are correlated, and the plain paired test
    rejects a true null too often. The corrected error is s_d sqrt(1 / k + test_per_train) with
    k - 1 degrees of freedom. `test_per_train` is the size of the held-out fold divided by the size
    of the training folds: 1/3 for four equal folds. For r repetitions of k folds, give all r k
    values (Bouckaert and Frank, 2004): repetitions do not shrink the second term.

    >>> a, b = [71.0, 69.5, 70.4, 72.2], [70.1, 69.0, 69.2, 70.9]
    >>> round(metrics.fold_difference(a, b, test_per_train=1 / 3).p, 3)
    0.038
    """
    if not test_per_train > 0:
        raise ValueError(f"test_per_train={test_per_train} must be positive: 1/3 for four folds")
    mean, deviation, n = _paired("folds", a, b)
    error = deviation * math.sqrt(1 / n + test_per_train)
    return _difference(mean, error, n - 1, deviation, n, level)


def holm(p_values: Values) -> list[float]:
    """P-values adjusted for the number of comparisons (Holm, 1979).

    The i-th smallest of m values is multiplied by m - i + 1. Adjusted values are in the same order
    as the given ones. A difference is significant if its adjusted value is below the level. NaN is
    a comparison without a test: it stays NaN and does not count.

    >>> metrics.holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    p = np.asarray(p_values, np.float64)
    if ((p < 0) | (p > 1)).any():
        raise ValueError(f"p-values lie between 0 and 1, not {list(p_values)}")
    m = int((~np.isnan(p)).sum())
    order = np.argsort(p, kind="stable")[:m]  # NaN come last
    adjusted = np.full(len(p), np.nan)
    adjusted[order] = np.maximum.accumulate(p[order] * np.arange(m, 0, -1))
    return [float(value) for value in np.minimum(adjusted, 1)]


def visible_difference(
    deviation: float, *, n: int, level: float = LEVEL, power: float = 0.8, comparisons: int = 1
) -> float:
    """The difference that a test of n against n independent runs detects with this power.

    `deviation` is the deviation of one run. The test is two-sided and resolves a difference with
    p <= (1 - `level`) / `comparisons` (Bonferroni). The value comes from the non-central t
    distribution.

    >>> round(metrics.visible_difference(1.0, n=5), 2)
    2.02
    """
    _check_runs(n)
    error = deviation * math.sqrt(2 / n)
    return error * _detected(2 * n - 2, level, power, comparisons)


def visible_paired_difference(
    deviation: float, *, n: int, level: float = LEVEL, power: float = 0.8, comparisons: int = 1
) -> float:
    """The difference that a test of n pairs of runs detects with this power.

    `deviation` is the deviation of the differences. If one run has the deviation s, and runs of a
    pair have the correlation r, it is s sqrt(2 (1 - r)).

    >>> round(metrics.visible_paired_difference(1.0, n=5), 2)
    1.68
    """
    _check_runs(n)
    error = deviation / math.sqrt(n)
    return error * _detected(n - 1, level, power, comparisons)


def expected_best(k: int) -> float:
    """Expected maximum of k independent normal values, in deviations above their mean.

    The best of k equally good evaluations looks better by this amount, because it was chosen.
    Evaluations of one run are correlated, so they gain less.

    >>> round(metrics.expected_best(10), 2)
    1.54
    """
    if k < 1:
        raise ValueError(f"k={k} must be 1 or more")
    from scipy import integrate, stats

    normal = stats.norm

    def density(x: float) -> float:
        return x * k * normal.pdf(x) * normal.cdf(x) ** (k - 1)

    return float(integrate.quad(density, -10, 10, points=[0, 2, 4])[0])


def _paired(noun: str, a: Values, b: Values) -> tuple[float, float, int]:
    """The mean of a_i - b_i, the deviation of these differences, and their number."""
    x, y = _finite("a", a), _finite("b", b)
    if len(x) != len(y):
        raise ValueError(f"a has {len(x)} values and b has {len(y)}: {noun} need a value of each")
    return float((x - y).mean()), _deviation(x - y, x, y), len(x)


def _deviation(x: np.ndarray, *values: np.ndarray) -> float:
    """The deviation of `x`; 0 if it is rounding of the `values` that `x` comes from."""
    deviation = float(x.std(ddof=1))
    return deviation if deviation > _ROUNDING * max(np.abs(v).max() for v in values) else 0.0


def _difference(
    mean: float, error: float, degrees: float, deviation: float, n: int, level: float
) -> Difference:
    from scipy import stats

    check_level(level)
    if error == 0:
        return Difference(mean, math.nan, math.nan, math.nan, degrees, 0.0, n)
    half = _t(level, degrees) * error
    p = 2 * float(stats.t.sf(abs(mean) / error, degrees))
    return Difference(mean, mean - half, mean + half, p, degrees, float(deviation), n)


def _detected(degrees: int, level: float, power: float, comparisons: int) -> float:
    """The non-centrality at which a two-sided t test of this level has this power."""
    from scipy import optimize, stats

    check_level(level)
    if comparisons < 1:
        raise ValueError(f"comparisons={comparisons} must be 1 or more")
    alpha = (1 - level) / comparisons
    if not alpha < power < 1:
        raise ValueError(
            f"power={power} must lie between {alpha:.3g}, the p-value that counts, and 1"
        )

    # Averages over the distribution of the measured deviation: scipy's own non-central t gives NaN
    # for some arguments.
    shares = (np.arange(4096) + 0.5) / 4096
    spread = np.sqrt(stats.chi2.ppf(shares, degrees) / degrees)
    critical = _t(1 - alpha, degrees) * spread

    def excess(shift: float) -> float:
        normal = stats.norm
        return float(np.mean(normal.sf(critical - shift) + normal.cdf(-critical - shift))) - power

    upper = 1.0
    while excess(upper) < 0:
        upper *= 2
    return float(optimize.brentq(excess, 0, upper))


def _t(level: float, degrees: float) -> float:
    """Student's quantile t: the share `level` of the distribution lies between -t and t."""
    from scipy import stats

    return float(stats.t.ppf((1 + level) / 2, degrees))


def _finite(name: str, values: Values, *, at_least: int = 2) -> np.ndarray:
    x = np.asarray(values, np.float64)
    if x.ndim != 1 or len(x) < at_least:
        raise ValueError(f"{name} needs {at_least} values or more, and has {x.size}")
    if not np.isfinite(x).all():
        raise ValueError(f"{name} has values that are not finite: {list(values)}")
    return x


def check_level(level: float) -> None:
    if not 0 < level < 1:
        raise ValueError(f"level={level} must lie between 0 and 1, such as 0.95")


def _check_runs(n: int) -> None:
    if n < 2:
        raise ValueError(f"n={n}: a difference needs two runs or more of each row")
