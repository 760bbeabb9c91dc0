"""How similar two vectors are: functions that turn similarity into a product plus two offsets.

A `similarity_fn(vectors, center)` returns vectors and offsets, and the similarity of a query q and
an item g is then q'g + offset(q) + offset(g). So one matrix product serves every similarity.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float

__all__ = ["SimilarityFn", "cosine", "euclidean"]

SimilarityFn = Callable[[Array, Array], tuple[Array, Array]]


def euclidean(
    vectors: Float[Array, "n d"], center: Float[Array, "d"]
) -> tuple[Float[Array, "n d"], Float[Array, "n"]]:
    """-|q - g|^2 / 2 = q'g - |q|^2 / 2 - |g|^2 / 2, with vectors measured from `center`.

    It orders items as the distance |q - g| does. `center` lies near the mean of the gallery, so
    that vectors far from the origin do not cancel.

    >>> vectors, offsets = retrieval.euclidean(jnp.array([[3.0, 4.0]]), jnp.zeros(2))
    >>> vectors, offsets
    (Array([[3., 4.]], dtype=float32), Array([-12.5], dtype=float32))
    """
    vectors = vectors - center[None]
    return vectors, -0.5 * jnp.sum(vectors * vectors, axis=-1)


def cosine(
    vectors: Float[Array, "n d"], center: Float[Array, "d"]
) -> tuple[Float[Array, "n d"], Float[Array, "n"]]:
    """q'g / |q||g|; a zero vector has similarity 0 to everything.

    >>> vectors, offsets = retrieval.cosine(jnp.array([[3.0, 4.0], [0.0, 0.0]]), jnp.zeros(2))
    >>> vectors.tolist() == [[np.float32(0.6), np.float32(0.8)], [0, 0]], offsets.tolist()
    (True, [0.0, 0.0])
    """
    del center  # angles are measured at the origin
    norms = jnp.sqrt(jnp.sum(vectors * vectors, axis=-1, keepdims=True))
    return vectors / jnp.where(norms > 0, norms, 1), jnp.zeros_like(norms[:, 0])
