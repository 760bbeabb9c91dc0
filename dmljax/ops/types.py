"""The types that losses, miners and `ops` share."""

from collections.abc import Callable
from typing import Any, NamedTuple

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
    "Scalar",
    "Triplets",
]

Array = jax.Array | np.ndarray


class Pairs(NamedTuple):
    """Masks of the positives and the negatives of `b` anchors among `n` references.

    A pair that is neither is ignored.
    """

    positives: Bool[Array, "b n"]
    negatives: Bool[Array, "b n"]


class Triplets(NamedTuple):
    """The triplets (anchor, positive, negative) of `pairs` for which `select_fn` is True.

    `select_fn(d_ap, d_an, d_pn) -> bool` works element by element on `distances`, so the b n n
    choices are never stored. `d_pn` is None unless the batch is compared with itself.
    """

    pairs: Pairs
    distances: Float[Array, "b n"]
    select_fn: Callable


Scalar = float | Float[Array, ""]  # a number, or an array if it is learned or scheduled
Labels = Integer[Array, "b"] | Bool[Array, "b c"] | Pairs
ReferenceLabels = Integer[Array, "n"] | Bool[Array, "n c"]
DistanceFn = Callable[[Array, Array], Array]
MineFn = Callable[[Array, Pairs], Pairs | Triplets]
ReduceFn = Callable[[Array, Array], tuple[Array, Array]]


def check_function(name: str, value: Any, example: str) -> None:
    """Raises for a value of an argument that must be a function, such as the name of one."""
    if not callable(value):
        raise TypeError(f"{name} must be a function, such as {example}, not {value!r}")


def add_arguments(fn: Callable, check_fn: Callable) -> None:
    """Appends what the docstring of `check_fn` says after its first line to that of `fn`."""
    if fn.__doc__ and check_fn.__doc__:  # python -OO drops them
        arguments = check_fn.__doc__.partition("\n\n")[2]
        fn.__doc__ = f"{fn.__doc__.rstrip()}\n\n{arguments}"
