"""How much a mean over queries would vary with other queries."""

import numpy as np
from jaxtyping import Float

__all__ = ["interval"]


def interval(
    values: Float[np.ndarray, "q"],
    *,
    level: float = 0.95,
    samples: int = 1000,
    seed: int = 0,
) -> tuple[float, float]:
    """Bootstrap percentile interval of the mean of `values` (Efron, 1979), such as `per_query`'s.

    Draws n of the n values with replacement, `samples` times, and returns the quantiles of the
    means between which the share `level` of them lies. NaN (a query without a positive) is dropped.

    >>> low, high = metrics.interval(np.array([0.0, 1.0, 1.0, 1.0]))
    >>> low, high
    (0.25, 1.0)
    """
    if not 0 < level < 1:
        raise ValueError(f"level={level} must lie between 0 and 1, such as 0.95")
    values = np.asarray(values, np.float64)
    values = values[~np.isnan(values)]
    if not len(values):
        return float("nan"), float("nan")
    rng = np.random.default_rng(seed)
    means = [values[rng.integers(len(values), size=len(values))].mean() for _ in range(samples)]
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
