"""The rules of every search: similarities, the pairs that it leaves out, and ties.

A `similarity_fn(vectors, center)` returns vectors and offsets, and the similarity of a query q and
an item g is then q'g + offset(q) + offset(g). So one matrix product serves every similarity.

`mask` and `precedes` take arrays of NumPy and of JAX. All kernels call them, and no other code
decides what is left out of a ranking or what a tie counts.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

__all__ = ["SimilarityFn", "cosine", "count_ahead", "euclidean", "mask", "precedes"]

Groups = Int[Array, "... g"] | Int[np.ndarray, "... g"]
SimilarityFn = Callable[[Array, Array], tuple[Array, Array]]


def euclidean(
    vectors: Float[Array, "n d"], center: Float[Array, "d"]
) -> tuple[Float[Array, "n d"], Float[Array, "n"]]:
    """Returns the terms of -|q - g|^2 / 2 = q'g - |q|^2 / 2 - |g|^2 / 2.

    It orders items as the distance |q - g| does. Vectors are measured from `center`, which lies
    near the mean of the gallery, so that vectors far from the origin do not cancel.

    >>> vectors, offsets = retrieval.euclidean(jnp.array([[3.0, 4.0]]), jnp.zeros(2))
    >>> vectors, offsets
    (Array([[3., 4.]], dtype=float32), Array([-12.5], dtype=float32))
    """
    vectors = vectors - center[None]
    return vectors, -0.5 * jnp.sum(vectors * vectors, axis=-1)


def cosine(
    vectors: Float[Array, "n d"], center: Float[Array, "d"]
) -> tuple[Float[Array, "n d"], Float[Array, "n"]]:
    """Returns the terms of q'g / |q||g|; a zero vector has similarity 0 to everything.

    >>> vectors, offsets = retrieval.cosine(jnp.array([[3.0, 4.0], [0.0, 0.0]]), jnp.zeros(2))
    >>> vectors.tolist() == [[np.float32(0.6), np.float32(0.8)], [0, 0]], offsets.tolist()
    (True, [0.0, 0.0])
    """
    del center  # angles are measured at the origin
    norms = jnp.sqrt(jnp.sum(vectors * vectors, axis=-1, keepdims=True))
    return vectors / jnp.where(norms > 0, norms, 1), jnp.zeros_like(norms[:, 0])


def product(
    vectors: Float[Array, "n d"], center: Float[Array, "d"]
) -> tuple[Float[Array, "n d"], Float[Array, "n"]]:
    """Returns the terms of q'g."""
    del center
    return vectors, jnp.zeros_like(vectors[:, 0])


def mask(rows: Groups, columns: Groups) -> Any:
    """Returns the pairs that a search leaves out: they share a group in some column.

    The groups are those of `inputs.exclusion_codes`, in which an item shares a group with itself.
    All axes but the last are broadcast. Without groups, `[n 0]`, no pair is left out.
    """
    pairs = (rows[..., i] == columns[..., i] for i in range(rows.shape[-1]))
    return functools.reduce(operator.or_, pairs, False)


def may_mask(rows: Groups, columns: Groups) -> bool:
    """Returns False only if `mask` leaves out no pair of these rows and columns."""
    return bool(len(np.intersect1d(rows, columns)))


def leave_out_classes(
    groups: Int[np.ndarray, "n g"], codes: Int[np.ndarray, "n"]
) -> Int[np.ndarray, "n c"]:
    """Returns groups by which `mask` also leaves out the items of the same class."""
    return np.column_stack([codes, groups])


def precedes(negative: Any, positive: Any) -> Any:
    """Returns whether a negative of this similarity ranks ahead of a positive: at a tie it does."""
    return negative >= positive


def count_ahead(
    negatives: Float[np.ndarray, "n"], positives: Float[np.ndarray, "r"]
) -> Int[np.ndarray, "r"]:
    """Counts the negatives, sorted in ascending order, that precede each positive."""
    side: Literal["left", "right"] = "left" if precedes(0.0, 0.0) else "right"
    return len(negatives) - np.searchsorted(negatives, positives, side)
