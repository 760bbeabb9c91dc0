"""Whether one set of values is better than another on the same queries."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Integer

from dmljax.metrics.bootstrap import average, bootstrap_means, limits
from dmljax.metrics.statistics import LEVEL, check_level

__all__ = ["Comparison", "McNemar", "compare", "mcnemar"]


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
    the labels of the queries (`average`). The interval is the `interval` over `groups`. The
    verdict says whether it contains 0. The p-value is twice the smaller share of the bootstrap
    means on one side of 0 (Efron & Tibshirani, 1993), for `holm` if several runs are compared.
    Queries with a NaN in either run are left out. With fewer than 8 groups, interval and p-value
    are NaN, and the difference is not resolved. It compares two trained nets, not two methods: the
    interval does not contain the spread over training seeds.

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
    """How many queries only the first run has right, how many only the second, and the p-value."""

    only_first: int
    only_second: int
    p: float


def mcnemar(right: Bool[np.ndarray, "q"], others: Bool[np.ndarray, "q"]) -> McNemar:
    """The exact two-sided test of McNemar (1947): binomial of min(b, c) of b + c at 1/2.

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
