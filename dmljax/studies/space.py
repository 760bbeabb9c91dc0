"""Search spaces: their ranges, and grids, random and Sobol points drawn in advance.

A space is a dict of fields of the config. A range is a tuple:

    ("uniform", low, high)    ("log", low, high)         numbers
    ("int", low, high)        ("log_int", low, high)     whole numbers, both ends included
    ("choice", a, b, ...)                                 any values
"""

import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from dmljax.hints import check_known

KINDS = ("uniform", "log", "int", "log_int", "choice")
Space = Mapping[str, tuple]


def checked(space: Any) -> dict[str, tuple]:
    """The space, with its ranges as tuples; raises for what is not a range."""
    if not isinstance(space, Mapping) or not space:
        raise ValueError("search.space is a dict such as {'optimizer.rate': ('log', 1e-5, 1e-3)}")
    return {field: _checked_range(field, tuple(r)) for field, r in space.items()}


def _checked_range(field: str, range_: tuple) -> tuple:
    kind, *values = range_ or ("",)
    check_known(f"search.space: {field} has no range", [kind], KINDS)
    if kind == "choice":
        if not values:
            raise ValueError(f"search.space: {field} offers no choice")
        return range_
    numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    if len(values) != 2 or len(numbers) != 2 or not values[0] < values[1]:
        raise ValueError(f"search.space: {field} needs ({kind!r}, low, high), not {range_}")
    if kind.startswith("log") and values[0] <= 0:
        raise ValueError(f"search.space: {field}: a logarithmic range begins above 0")
    if kind.endswith("int") and not all(isinstance(v, int) for v in values):
        raise ValueError(f"search.space: {field} needs whole numbers, not {range_}")
    return range_


def point(space: Space, shares: Any) -> dict[str, Any]:
    """The point of a space at `shares`, one number of [0, 1) for every field."""
    return {
        field: _value(range_, float(u))
        for (field, range_), u in zip(space.items(), shares, strict=True)
    }


def _value(range_: tuple, u: float) -> Any:
    kind, *values = range_
    if kind == "choice":
        return values[min(int(u * len(values)), len(values) - 1)]
    low, high = values
    if kind == "uniform":
        return low + u * (high - low)
    if kind == "log":
        return math.exp(math.log(low) + u * (math.log(high) - math.log(low)))
    if kind == "int":
        return min(low + int(u * (high - low + 1)), high)
    exponent = math.log(low) + u * (math.log(high + 1) - math.log(low))
    return min(int(math.exp(exponent)), high)


def points(space: Space, *, method: str, trials: int, seed: int) -> list[dict[str, Any]]:
    """The first `trials` points of a method: 'random', 'sobol' or 'grid'.

    Point i depends on the seed and on i alone, so that a search with more trials begins with the
    same points.
    """
    if method == "grid":
        return list(itertools.islice(grid(space), trials))
    if method == "sobol":
        from scipy.stats import qmc

        sampler = qmc.Sobol(len(space), scramble=True, rng=np.random.default_rng(seed))
        # A power of two, which keeps the points balanced: others warn.
        shares = sampler.random_base2(max(trials - 1, 0).bit_length())[:trials]
        return [point(space, u) for u in shares]
    return [
        point(space, np.random.default_rng([seed, i]).random(len(space))) for i in range(trials)
    ]


def grid(space: Space):
    """All combinations of choices and whole numbers; the last field changes fastest."""
    values = []
    for field, range_ in space.items():
        kind, *ends = range_
        if kind == "choice":
            values.append(ends)
        elif kind == "int":
            values.append(list(range(ends[0], ends[1] + 1)))
        else:
            raise ValueError(
                f"search.space: a grid needs ('choice', ...) for {field}, not {range_}"
            )
    for combination in itertools.product(*values):
        yield dict(zip(space, combination, strict=True))


def grid_size(space: Space) -> int:
    """The number of combinations of a grid."""
    return sum(1 for _ in grid(space))
