"""Points of a search, as overrides of rows: random ones by a seed, and grids. Imports no jax.

A study file makes a row of every point, and a row that takes the best of them:

    trials = points.random({"optimizer.rate": ("log", 1e-5, 1e-3)}, count=30)
    rows = {**trials, "best": {"best_of": list(trials), "by": "val/R@1"}}

A space is a dict of fields of the config. A range is a tuple:

    ("uniform", low, high)    ("log", low, high)    numbers
    ("int", low, high)                              whole numbers, both ends included
    ("choice", a, b, ...)                           any values
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Points = dict[str, dict[str, Any]]


def random(space: Mapping[str, tuple], count: int, *, seed: int = 0, **fields: Any) -> Points:
    """Draws `count` named points with further `fields`.

    Point i depends on the seed and on i only, so a larger `count` begins with the same points.
    """
    draws = (np.random.default_rng([seed, i]).random(len(space)) for i in range(count))
    values = ([_value(*x) for x in zip(space.values(), draw, strict=True)] for draw in draws)
    return _named(space, values, fields)


def grid(space: Mapping[str, Sequence[Any]], **fields: Any) -> Points:
    """Returns all combinations of values with further `fields`; the last field changes fastest."""
    return _named(space, itertools.product(*space.values()), fields)


def _named(space: Mapping[str, Any], values: Any, fields: Mapping[str, Any]) -> Points:
    points = (dict(zip(space, x, strict=True)) for x in values)
    return {f"trial {i:04}": {**fields, **point} for i, point in enumerate(points)}


def _value(range_: tuple, u: float) -> Any:
    """Returns the value of a range at the fraction `u` of [0, 1)."""
    kind, *values = range_
    u = float(u)
    if kind == "choice":
        return values[min(int(u * len(values)), len(values) - 1)]
    low, high = values
    if kind == "uniform":
        return low + u * (high - low)
    if kind == "log":
        return math.exp(math.log(low) + u * (math.log(high) - math.log(low)))
    if kind == "int":
        return min(low + int(u * (high - low + 1)), high)
    raise ValueError(f"a range must be uniform, log, int or choice, got {range_}")
