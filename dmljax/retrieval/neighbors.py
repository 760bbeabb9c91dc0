"""Exact nearest neighbors: the best k of every query, merged tile by tile."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dmljax.retrieval import inputs, sharding, tiles
from dmljax.retrieval.inputs import Embeddings
from dmljax.retrieval.sharding import REPLICATED, SHARDED
from dmljax.retrieval.similarity import SimilarityFn, euclidean
from dmljax.retrieval.tiles import Tile, Tiles

__all__ = ["nearest"]


def nearest(
    queries: Embeddings,
    gallery: Embeddings | None = None,
    *,
    k: int,
    similarity_fn: SimilarityFn = euclidean,
    tile: int = 1024,
    devices: Sequence[jax.Device] | None = None,
) -> tuple[Int[np.ndarray, "q k"], Float[np.ndarray, "q k"]]:
    """Indices and similarities of the k most similar items, best first, ties by index.

    >>> queries, gallery = np.array([[0.0], [10.0]]), np.array([[1.0], [3.0], [8.0]])
    >>> indices, similarities = retrieval.nearest(queries, gallery, k=2)
    >>> indices.tolist(), similarities.tolist()  # a similarity is -|q - g|^2 / 2
    ([[0, 1], [2, 1]], [[-0.5, -4.5], [-2.0, -24.5]])
    """
    tiles.check_side(tile)
    vectors, items, center = inputs.check_vectors(queries, gallery)
    available = len(items) - (gallery is None)
    if not 1 <= k <= available:
        raise ValueError(
            f"k={k}, but there are {available} items to find: choose k from 1 to {available}"
        )
    side = tiles.choose_side(max(len(vectors), len(items)), tile)
    mesh = sharding.choose_mesh(devices, tiles=-(-len(vectors) // side))
    block_size = side if mesh is None else side * mesh.size
    make_tiles = partial(Tiles, center=center, similarity_fn=similarity_fn, mesh=mesh)
    slots = tiles.pad_items(np.arange(len(items)), side)
    column_tiles = make_tiles(items, slots, slots, side=side, spec=REPLICATED)
    rows = tiles.pad_items(np.arange(len(vectors)), block_size)
    # Every item is a group of its own, which keeps it from finding itself; no item is -2.
    groups = rows if gallery is None else np.full(len(rows), -2)
    row_tiles = make_tiles(vectors, rows, groups, side=block_size)
    merge = sharding.on_mesh(mesh, _merge, SHARDED, SHARDED, SHARDED, REPLICATED, REPLICATED)
    results = []
    for first in range(0, len(row_tiles), tiles.BLOCKS_PER_PASS):
        numbers = range(first, min(first + tiles.BLOCKS_PER_PASS, len(row_tiles)))
        blocks = [row_tiles[i] for i in numbers]
        dtype = blocks[0].vectors.dtype
        nothing = np.full((block_size, k), -np.inf, dtype), np.zeros((block_size, k), np.int32)
        best = [sharding.put(nothing, mesh) for _ in blocks]
        for j in range(len(column_tiles)):
            columns, start = column_tiles[j], np.int32(j * side)
            best = [merge(*b, block, columns, start) for b, block in zip(best, blocks, strict=True)]
            jax.block_until_ready(best)
        results += [[np.asarray(a) for a in b] for b in best]
    similarities, indices = (
        np.concatenate(arrays)[: len(vectors)] for arrays in zip(*results, strict=True)
    )
    return indices, similarities


@jax.jit
def _merge(
    best: Float[Array, "b k"],
    indices: Int[Array, "b k"],
    rows: Tile,
    columns: Tile,
    start: Int[Array, ""],
) -> tuple[Float[Array, "b k"], Int[Array, "b k"]]:
    """The best k of those so far and a tile of columns, whose first item is number `start`."""
    similarities = tiles.negatives(rows, columns)
    numbers = start + jnp.arange(similarities.shape[1], dtype=jnp.int32)[None]
    numbers = jnp.broadcast_to(numbers, similarities.shape)
    # Among equal values `top_k` takes the first: earlier tiles have lower indices, and stay ahead.
    similarities = jnp.concatenate([best, similarities], axis=1)
    best, order = jax.lax.top_k(similarities, best.shape[1])
    return best, jnp.take_along_axis(jnp.concatenate([indices, numbers], axis=1), order, axis=1)
