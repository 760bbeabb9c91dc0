"""How much a mean over queries would vary with other queries, or with other classes."""

import numpy as np
from jaxtyping import Float, Integer

from dmljax.metrics.statistics import LEVEL, check_level

__all__ = ["AVERAGES", "average", "bootstrap_means", "interval", "interval_note"]

AVERAGES = ("queries", "classes")

FEWEST_CLASSES, ROUGH_BELOW = 8, 20  # below the first no interval is given, below the second a note
_CHUNK = 1 << 20  # classes drawn at once: 11,316 classes x 1,000 draws would take 90 MB


def average(
    values: Float[np.ndarray, "q"], labels: Integer[np.ndarray, "q"], *, over: str = "queries"
) -> float:
    """The mean of `values` over the queries, or over classes the mean of each class's mean.

    NaN (a query without a positive) is dropped. With `over="classes"`, a large class weighs as much
    as a small one.

    >>> values, labels = np.array([1.0, 1.0, 1.0, 0.0]), np.array([0, 0, 0, 1])
    >>> metrics.average(values, labels), metrics.average(values, labels, over="classes")
    (0.75, 0.5)
    """
    if over not in AVERAGES:
        raise ValueError(f"over={over!r} is not known: {' or '.join(map(repr, AVERAGES))}")
    values, labels = np.asarray(values, np.float64), np.asarray(labels)
    is_value = ~np.isnan(values)
    values = values[is_value]
    if not len(values):
        return float("nan")
    if over == "classes":
        _, codes = np.unique(labels[is_value], return_inverse=True)
        values = np.bincount(codes, values) / np.bincount(codes)
    return float(values.mean())


def interval(
    values: Float[np.ndarray, "q"],
    *,
    groups: Integer[np.ndarray, "n"] | None = None,
    over: str = "queries",
    level: float = LEVEL,
    samples: int = 1000,
    seed: int = 0,
) -> tuple[float, float]:
    """Bootstrap percentile interval of the mean of `values` (Efron, 1979), such as `per_query`'s.

    Draws n of the n values with replacement, `samples` times, and returns the quantiles of the
    means between which the share `level` of them lies. NaN (a query without a positive) is dropped.

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
    """The quantiles between which the share `level` of the means lies; NaN without means."""
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
    """The means from which `interval` takes its quantiles, empty where it gives NaN.

    The draws depend only on `seed`, `samples` and the groups, so two scores of the same queries get
    the same draws.

    >>> metrics.bootstrap_means(np.array([0.0, 1.0, 1.0, 1.0]), samples=3)
    array([1.  , 0.25, 0.75])
    """
    if samples < 1:
        raise ValueError(f"samples={samples} must be at least 1, such as 1000")
    if over not in AVERAGES or (over == "classes" and groups is None):
        raise ValueError(f"over={over!r}: give 'queries', or 'classes' and their labels as groups")
    values = np.asarray(values, np.float64)
    is_value = ~np.isnan(values)
    rng = np.random.default_rng(seed)
    if groups is None:
        values = values[is_value]
        if not len(values):
            return np.zeros(0)
        draws = (rng.integers(len(values), size=len(values)) for _ in range(samples))
        return np.array([values[rows].mean() for rows in draws])
    groups = np.asarray(groups)
    if groups.shape != values.shape:
        raise ValueError(f"groups have shape {groups.shape}, but values have {values.shape}")
    _, codes = np.unique(groups[is_value], return_inverse=True)
    sizes = np.bincount(codes)
    if len(sizes) < FEWEST_CLASSES:
        return np.zeros(0)
    sums: np.ndarray = np.bincount(codes, values[is_value])
    if over == "classes":
        sums, sizes = sums / sizes, np.ones_like(sizes)
    chunk = max(1, _CHUNK // len(sizes))
    means = []
    for first in range(0, samples, chunk):
        shape = min(chunk, samples - first), len(sizes)
        drawn = rng.integers(len(sizes), size=shape)
        means.append(sums[drawn].sum(axis=1) / sizes[drawn].sum(axis=1))
    return np.concatenate(means)


def interval_note(groups: Integer[np.ndarray, "n"]) -> str:
    """A note to show beside an interval over these groups; empty where there are enough.

    >>> metrics.interval_note(np.arange(12))
    'only 12 classes: the range is rough'
    """
    classes = len(np.unique(groups))
    if classes < FEWEST_CLASSES:
        return f"no range: {classes} class{'es' if classes != 1 else ''}, and it needs 8"
    return f"only {classes} classes: the range is rough" if classes < ROUGH_BELOW else ""
