"""Intervals, paired tests and detectable differences, of the queries of a run and of several runs.

* Queries of one run: `interval` resamples classes, `compare` and `mcnemar` compare two runs on the
  same queries. These intervals do not contain the spread over training seeds.
* Several runs: `values` are one score of each run, such as R@1 of five seeds. Two rows of a table
  are compared by one test that is chosen before the runs: `paired_difference` (both rows have the
  same seeds), `welch_difference` (independent runs), or `fold_difference` (the folds of a
  cross-validation). Where several rows are compared with one baseline, `holm` adjusts the p-values.

`LEVEL` is the level of every interval and test; texts take it from `level_text()`.

Functions import scipy themselves, so that other programs do not wait half a second for it.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Integer

__all__ = [
    "average",
    "compare",
    "expected_best",
    "fold_difference",
    "holm",
    "interval",
    "interval_note",
    "level_text",
    "mcnemar",
    "paired_difference",
    "student_interval",
    "visible_difference",
    "welch_difference",
]

LEVEL = 0.95  # of intervals; a difference with p <= 1 - LEVEL is resolved
FEWEST_CLASSES, ROUGH_BELOW = 8, 20  # below the first no interval is given, below the second a note

# A standard deviation below this fraction of the values is rounding: one of a million queries is
# more.
_ROUNDING = 1e-9
_CHUNK = 1 << 20  # classes drawn at once: 11,316 classes x 1,000 draws would take 90 MB

Values = Sequence[float] | np.ndarray


def level_text(level: float = LEVEL) -> str:
    """Returns the level in percent, as texts show it."""
    return f"{100 * level:.4g} %"


def average(
    values: Float[np.ndarray, "q"], labels: Integer[np.ndarray, "q"], *, over: str = "queries"
) -> float:
    """Computes the mean of `values` over the queries, or over classes the mean of class means.

    NaN (a query without a positive) is dropped. With `over="classes"`, a large class weighs as much
    as a small one.

    >>> values, labels = np.array([1.0, 1.0, 1.0, 0.0]), np.array([0, 0, 0, 1])
    >>> metrics.average(values, labels), metrics.average(values, labels, over="classes")
    (0.75, 0.5)
    """
    check_average(over)
    values, labels = np.asarray(values, np.float64), np.asarray(labels)
    is_value = ~np.isnan(values)
    values = values[is_value]
    if not len(values):
        return float("nan")
    if over == "classes":
        _, codes = np.unique(labels[is_value], return_inverse=True)
        values = np.bincount(codes, values) / np.bincount(codes)
    return float(values.mean())


def check_average(over: str, *, has_labels: bool = True) -> None:
    """Raises unless a mean over queries, or over classes whose labels are given, is asked for."""
    if over not in ("queries", "classes") or (over == "classes" and not has_labels):
        raise ValueError(
            f"the average {over!r} is not known: give 'queries', or 'classes' and their labels"
        )


def interval(
    values: Float[np.ndarray, "q"],
    *,
    groups: Integer[np.ndarray, "n"] | None = None,
    over: str = "queries",
    level: float = LEVEL,
    samples: int = 1000,
    seed: int = 0,
) -> tuple[float, float]:
    """Computes the bootstrap percentile interval of the mean of `values` (Efron, 1979).

    Draws n of the n values with replacement, `samples` times, and returns the quantiles of the
    means between which the fraction `level` of them lies. NaN (a query without a positive) is
    dropped.

    With `groups`, such as the labels of the queries, whole groups are drawn (Field & Welsh, 2007):
    theta = sum_c w_c S_c / sum_c w_c n_c, w ~ Multinomial(C; 1/C, ..., 1/C), where S_c is the sum
    and n_c the number of the values of group c. A score on new classes needs this: queries of one
    class share their positives, and drawing single queries gives too narrow an interval. With
    `over="classes"`, it is the interval of `average(..., over="classes")`. Fewer than 8 groups give
    (NaN, NaN); from fewer than 20 the interval is rough (`interval_note` says so). No such interval
    contains the spread over training seeds.

    >>> low, high = metrics.interval(np.array([0.0, 1.0, 1.0, 1.0]))
    >>> low, high
    (0.25, 1.0)
    """
    check_level(level)
    means = bootstrap_means(values, groups=groups, over=over, samples=samples, seed=seed)
    return limits(means, level)


def limits(means: Float[np.ndarray, "samples"], level: float) -> tuple[float, float]:
    """Returns the quantiles that bound the fraction `level` of the means; NaN without means."""
    if not len(means):
        return float("nan"), float("nan")
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def bootstrap_means(
    values: Float[np.ndarray, "q"],
    *,
    groups: Integer[np.ndarray, "n"] | None = None,
    over: str = "queries",
    samples: int = 1000,
    seed: int = 0,
) -> Float[np.ndarray, "samples"]:
    """Draws the means whose quantiles `interval` returns; none where it returns NaN.

    The draws depend only on `seed`, `samples` and the groups, so two scores of the same queries get
    the same draws.
    """
    if samples < 1:
        raise ValueError(f"samples={samples} must be at least 1, such as 1000")
    check_average(over, has_labels=groups is not None)
    values = np.asarray(values, np.float64)
    codes = np.arange(len(values)) if groups is None else np.asarray(groups)
    if codes.shape != values.shape:
        raise ValueError(f"groups have shape {codes.shape}, but values have {values.shape}")
    is_value = ~np.isnan(values)
    _, codes = np.unique(codes[is_value], return_inverse=True)
    sizes = np.bincount(codes)
    if len(sizes) < (1 if groups is None else FEWEST_CLASSES):
        return np.zeros(0)
    sums: np.ndarray = np.bincount(codes, values[is_value])
    if over == "classes":
        sums, sizes = sums / sizes, np.ones_like(sizes)
    rng, chunk, means = np.random.default_rng(seed), max(1, _CHUNK // len(sizes)), []
    for first in range(0, samples, chunk):
        shape = min(chunk, samples - first), len(sizes)
        drawn = rng.integers(len(sizes), size=shape)
        means.append(sums[drawn].sum(axis=1) / sizes[drawn].sum(axis=1))
    return np.concatenate(means)


def interval_note(groups: Integer[np.ndarray, "n"]) -> str:
    """Returns a note about an interval over these groups; empty if there are enough."""
    classes = len(np.unique(groups))
    if classes < FEWEST_CLASSES:
        plural = "" if classes == 1 else "es"
        return f"no range: {classes} class{plural}, and it needs {FEWEST_CLASSES}"
    return f"only {classes} classes: the range is rough" if classes < ROUGH_BELOW else ""


class Comparison(NamedTuple):
    """A mean difference, its interval over classes, its two-sided p-value and the verdict.

    The verdict is 'better', 'worse' or 'not resolved'.
    """

    difference: float
    low: float
    high: float
    p: float
    verdict: str


def compare(
    values: Float[np.ndarray, "q"],
    others: Float[np.ndarray, "q"],
    *,
    groups: Integer[np.ndarray, "n"] | None = None,
    over: str = "queries",
    level: float = LEVEL,
    samples: int = 10_000,
    seed: int = 0,
) -> Comparison:
    """Compares two runs by the differences v_i - v'_i of their values on the same queries.

    The difference is the mean over the queries, or with `over="classes"` the mean over `groups`,
    the labels of the queries (`average`). The interval is the `interval` over `groups`. The verdict
    says whether it contains 0. The p-value is twice the smaller fraction of the bootstrap means on
    one side of 0 (Efron & Tibshirani, 1993), for `holm` if several runs are compared. Queries with
    a NaN in either run are left out. With fewer than 8 groups, interval and p-value are NaN, and
    the difference is not resolved. It compares two trained nets, not two methods: the interval does
    not contain the spread over training seeds.

    >>> values, labels = np.tile([1.0, 1.0, 0.0, 1.0], 10), np.arange(40) // 4
    >>> metrics.compare(values, values, groups=labels)
    Comparison(difference=0.0, low=0.0, high=0.0, p=1.0, verdict='not resolved')
    """
    check_level(level)
    differences = np.asarray(values, np.float64) - np.asarray(others, np.float64)
    means = bootstrap_means(differences, groups=groups, over=over, samples=samples, seed=seed)
    labels = np.zeros(len(differences), int) if groups is None else groups
    difference = average(differences, labels, over=over)
    low, high = limits(means, level)
    if not len(means):
        return Comparison(difference, low, high, float("nan"), "not resolved")
    # One more mean on either side: 10,000 draws cannot show a p-value below 2 / 10,001.
    below, above = (1 + int((means <= 0).sum())), (1 + int((means >= 0).sum()))
    p = min(1.0, 2 * min(below, above) / (len(means) + 1))
    verdict = "better" if low > 0 else "worse" if high < 0 else "not resolved"
    return Comparison(difference, low, high, p, verdict)


class McNemar(NamedTuple):
    """Counts of queries that only the first or only the second run has right, and the p-value."""

    only_first: int
    only_second: int
    p: float


def mcnemar(right: Bool[np.ndarray, "q"], others: Bool[np.ndarray, "q"]) -> McNemar:
    """Runs the exact two-sided test of McNemar (1947): binomial of min(b, c) of b + c at 1/2.

    b queries are right only in the first run and c only in the second. It takes the queries as
    independent, although queries of one class are not: `compare` gives the verdict.

    >>> right = np.array([True, True, True, False])
    >>> metrics.mcnemar(right, np.array([True, False, False, False]))
    McNemar(only_first=2, only_second=0, p=0.5)
    """
    from scipy import stats  # takes half a second, which other programs need not wait

    right, others = np.asarray(right, bool), np.asarray(others, bool)
    b, c = int((right & ~others).sum()), int((~right & others).sum())
    p = float(stats.binomtest(min(b, c), b + c, 0.5).pvalue) if b + c else 1.0
    return McNemar(b, c, p)


class Estimate(NamedTuple):
    """A mean over runs: the std `deviation` divides by n - 1; `low` and `high` bound the mean."""

    mean: float
    deviation: float
    low: float
    high: float
    n: int


class Difference(NamedTuple):
    """A mean difference, its interval, its two-sided p-value and its degrees of freedom.

    `deviation` is the standard deviation of the differences if runs are paired. Otherwise it is the
    pooled one of a run. If it is a rounding error, nothing is tested: it is 0, and the interval and
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
    """Computes mean, standard deviation and Student's interval: m +- t(n - 1) s / sqrt(n).

    For one value, standard deviation and interval are NaN.
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
    """Tests the mean of a_i - b_i by Student; the runs a_i and b_i have the same seed.

    Pairing helps if runs with the same seed are correlated between the rows. It detects more than
    `welch_difference` from a correlation of 0.56 on for 3 runs, 0.28 for 5, and 0.12 for 10.
    """
    mean, deviation, n = _paired("pairs", a, b)
    return _difference(mean, deviation / math.sqrt(n), n - 1, deviation, n, level)


def welch_difference(a: Values, b: Values, *, level: float = LEVEL) -> Difference:
    """Tests the mean of a minus the mean of b by Welch (1947); the runs are independent.

    The standard deviations of `a` and `b` may differ, and so may their counts of runs.
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
    """Tests the mean of a_i - b_i over folds by the corrected t of Nadeau and Bengio (2003).

    The training sets of folds overlap, so their scores are correlated, and the plain paired test
    rejects a true null too often. The corrected error is s_d sqrt(1 / k + test_per_train) with
    k - 1 degrees of freedom. `test_per_train` is the size of the held-out fold divided by the size
    of the training folds: 1/3 for four equal folds. For r repetitions of k folds, give all r k
    values (Bouckaert and Frank, 2004): repetitions do not shrink the second term.
    """
    if not test_per_train > 0:
        raise ValueError(f"test_per_train={test_per_train} must be positive: 1/3 for four folds")
    mean, deviation, n = _paired("folds", a, b)
    error = deviation * math.sqrt(1 / n + test_per_train)
    return _difference(mean, error, n - 1, deviation, n, level)


def holm(p_values: Values) -> list[float]:
    """Adjusts p-values for the number of comparisons (Holm, 1979).

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
    deviation: float,
    *,
    n: int,
    paired: bool = False,
    level: float = LEVEL,
    power: float = 0.8,
    comparisons: int = 1,
) -> float:
    """Computes the difference that a test of n against n runs detects with probability `power`.

    `deviation` is the standard deviation of one run; if runs are `paired`, that of the differences.
    If it is s for one run, and runs of a pair have the correlation r, the latter is s sqrt(2 (1 -
    r)). The test is two-sided and resolves a difference with p <= (1 - `level`) / `comparisons`
    (Bonferroni). The value comes from the non-central t distribution.
    """
    from scipy import optimize, stats

    check_level(level)
    degrees = n - 1 if paired else 2 * n - 2
    alpha = (1 - level) / comparisons if comparisons >= 1 else 1.0
    if degrees < 1 or not alpha < power < 1:
        raise ValueError(
            f"a difference needs two runs or more of each row, `comparisons` from 1, got "
            f"{comparisons}, and a `power` between the p-value that counts and 1, got {power}"
        )

    # Averages over the distribution of the measured standard deviation: scipy's non-central t gives
    # NaN for some arguments.
    fractions = (np.arange(4096) + 0.5) / 4096
    spread = np.sqrt(stats.chi2.ppf(fractions, degrees) / degrees)
    critical = _t(1 - alpha, degrees) * spread

    def excess(shift: float) -> float:
        normal = stats.norm
        return float(np.mean(normal.sf(critical - shift) + normal.cdf(-critical - shift))) - power

    upper = 1.0
    while excess(upper) < 0:
        upper *= 2
    return (
        float(optimize.brentq(excess, 0, upper)) * deviation * math.sqrt((1 if paired else 2) / n)
    )


def expected_best(k: int) -> float:
    """Computes the expected maximum of k independent normal values, in std above their mean.

    The best of k equally good evaluations looks better by this amount, because it was chosen.
    Evaluations of one run are correlated, so they gain less.
    """
    if k < 1:
        raise ValueError(f"k={k} must be 1 or more")
    from scipy import integrate, stats

    normal = stats.norm

    def density(x: float) -> float:
        return x * k * normal.pdf(x) * normal.cdf(x) ** (k - 1)

    return float(integrate.quad(density, -10, 10, points=[0, 2, 4])[0])


def _paired(noun: str, a: Values, b: Values) -> tuple[float, float, int]:
    """Returns the mean, the standard deviation and the count of the differences a_i - b_i."""
    x, y = _finite("a", a), _finite("b", b)
    if len(x) != len(y):
        raise ValueError(f"a has {len(x)} values and b has {len(y)}: {noun} need a value of each")
    return float((x - y).mean()), _deviation(x - y, x, y), len(x)


def _deviation(x: np.ndarray, *values: np.ndarray) -> float:
    """Returns the standard deviation of `x`; 0 if it is a rounding error of `values`."""
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


def _t(level: float, degrees: float) -> float:
    """Returns Student's t: the fraction `level` of the distribution lies between -t and t."""
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
