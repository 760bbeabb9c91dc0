"""The types that losses, miners and distances share."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Float, Integer

__all__ = [
    "Array",
    "DistanceFn",
    "Labels",
    "MineFn",
    "Pairs",
    "ReduceFn",
    "ReferenceLabels",
    "Triplets",
]

Array = jax.Array | np.ndarray


class Pairs(NamedTuple):
    """Which of the `n` references are positives, and which negatives, of the `b` anchors."""

    positives: Bool[Array, "b n"]
    negatives: Bool[Array, "b n"]


class Triplets(NamedTuple):
    """Triplets (anchor, positive, negative) of `pairs` for which `select_fn` holds.

    `select_fn(d_ap, d_an, d_pn) -> bool` works element by element on `distances`, so the b n n
    choices are never stored. `d_pn` is None unless the batch is its own reference.
    """

    pairs: Pairs
    distances: Float[Array, "b n"]
    select_fn: Callable


Labels = Integer[Array, "b"] | Bool[Array, "b c"] | Pairs
ReferenceLabels = Integer[Array, "n"] | Bool[Array, "n c"]
DistanceFn = Callable[[Array, Array], Array]
MineFn = Callable[[Array, Pairs], Pairs | Triplets]
ReduceFn = Callable[[Array, Array], tuple[Array, Array]]
