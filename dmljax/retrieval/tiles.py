"""Vectors on the device in tiles of one shape, and what is alike in them."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Integer

Embeddings = Float[Array, "b d"] | np.ndarray
Labels = Integer[Array, "b"] | np.ndarray
SimilarityFn = Callable[[Array, Array], tuple[Array, Array]]

SLICES = 16  # a tile is folded into this many slices, so that sums run over whole vectors
_LEAST = 128  # the smallest tile: data smaller than this is padded


class Tile(NamedTuple):
    """Items as the kernels see them. Padding has zero vectors and offset -inf: it never ranks."""

    vectors: Float[Array, "n d"]
    offsets: Float[Array, "n"]
    groups: Int[Array, "n"]


def euclidean(
    vectors: Float[Array, "n d"], centre: Float[Array, "d"]
) -> tuple[Float[Array, "n d"], Float[Array, "n"]]:
    """-|q - g|^2 / 2 = q'g - |q|^2 / 2 - |g|^2 / 2, measured from the gallery's centre."""
    vectors = vectors - centre[None]
    return vectors, -0.5 * jnp.sum(vectors * vectors, axis=-1)


def cosine(
    vectors: Float[Array, "n d"], centre: Float[Array, "d"]
) -> tuple[Float[Array, "n d"], Float[Array, "n"]]:
    """q'g / |q||g|; a zero vector has similarity 0 to everything."""
    del centre  # angles are seen from the origin
    norms = jnp.sqrt(jnp.sum(vectors * vectors, axis=-1, keepdims=True))
    return vectors / jnp.where(norms > 0, norms, 1), jnp.zeros_like(norms[:, 0])


@jax.jit
def similarities(rows: Tile, columns: Tile) -> Float[Array, "b n"]:
    products = jnp.matmul(rows.vectors, columns.vectors.T, precision=jax.lax.Precision.HIGHEST)
    return products + (rows.offsets[:, None] + columns.offsets[None])


def prepare(
    embeddings: Embeddings, gallery: Embeddings | None, tile: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    if tile < _LEAST or tile % _LEAST:
        raise ValueError(f"tile={tile} must be a positive multiple of {_LEAST}")
    embeddings, centre = _checked(embeddings, "embeddings")
    if gallery is None:
        gallery = embeddings
    else:
        gallery, centre = _checked(gallery, "gallery")
        if gallery.shape[1] != embeddings.shape[1]:
            raise ValueError(
                f"embeddings have {embeddings.shape[1]} dimensions and the gallery has "
                f"{gallery.shape[1]}: embed both with the same net"
            )
    return embeddings, gallery, centre, side_of(max(len(embeddings), len(gallery)), tile)


def _checked(vectors: Embeddings, name: str) -> tuple[np.ndarray, Float[np.ndarray, "d"]]:
    """The array and, rounded, its mean. Subtracting that keeps far-off data from cancelling."""
    vectors = np.asarray(vectors)
    if vectors.ndim != 2 or 0 in vectors.shape:
        raise ValueError(
            f"{name} have shape {vectors.shape}: give an array [items, dimensions], not empty"
        )
    dtype = dtype_of(vectors)
    total, squares = np.zeros(vectors.shape[1]), 0.0
    for i in range(0, len(vectors), 4096):
        part = vectors[i : i + 4096].astype(dtype)
        with np.errstate(over="ignore", invalid="ignore"):
            bad = np.flatnonzero(~np.isfinite(np.vecdot(part, part)))
        if len(bad):
            raise ValueError(
                f"{name}[{i + bad[0]}] is not finite, or its norm is not: a NaN, an infinity or an "
                f"overflow of {dtype.name}. Find where the net diverged, or scale the embeddings"
            )
        total += part.sum(axis=0, dtype=np.float64)
        squares += float(np.vecdot(part, part).sum(dtype=np.float64))
    mean = total / len(vectors)
    spread = np.sqrt(max(squares / len(vectors) - float(mean @ mean), 0.0) / len(mean))
    # On a grid of a power of two, whole numbers stay whole, and exact ties stay exact.
    grid = 2.0 ** np.ceil(np.log2(spread)) if spread > 0 else 0.0
    return vectors, np.round(mean / grid) * grid if grid else np.zeros_like(mean)


def dtype_of(vectors: np.ndarray) -> np.dtype:
    dtype = jnp.promote_types(jax.dtypes.canonicalize_dtype(vectors.dtype), jnp.float32)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"embeddings are {vectors.dtype}: give real numbers")
    return np.dtype(dtype)


def side_of(n: int, tile: int) -> int:
    """Small data get small tiles, of few different sizes, since each size is compiled."""
    return min(tile, max(_LEAST, 1 << (n - 1).bit_length()))


def padded(items: Int[np.ndarray, "n"], side: int) -> Int[np.ndarray, "m"]:
    return np.pad(items, (0, -len(items) % side), constant_values=-1)


def tiles_of(
    vectors: np.ndarray,
    items: Int[np.ndarray, "m"],
    groups: Int[np.ndarray, "m"],
    *,
    centre: np.ndarray,
    similarity_fn: SimilarityFn,
    side: int,
) -> list[Tile]:
    """`vectors[items]` on the device, in tiles; an item of -1 is padding."""
    dtype = dtype_of(vectors)
    middle = jnp.asarray(centre.astype(dtype))
    prepare = jax.jit(similarity_fn)
    out = []
    for i in range(0, len(items), side):
        real = items[i : i + side] >= 0
        part = np.zeros((side, vectors.shape[1]), dtype)
        part[real] = vectors[items[i : i + side][real]]
        seen, offsets = prepare(jnp.asarray(part), middle)
        seen = jnp.where(real[:, None], seen, 0)
        offsets = jnp.where(real, offsets, -jnp.inf)
        out.append(Tile(seen, offsets, jnp.asarray(groups[i : i + side], jnp.int32)))
    return out


def plain(vectors: np.ndarray, side: int) -> list[Tile]:
    items = padded(np.arange(len(vectors)), side)
    centre = np.zeros(vectors.shape[1])
    return tiles_of(vectors, items, items, centre=centre, similarity_fn=euclidean, side=side)
