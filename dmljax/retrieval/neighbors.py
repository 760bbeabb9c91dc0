"""Exact nearest neighbors: the best k of every query, merged tile by tile."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dmljax.retrieval import inputs, sharding, tiles
from dmljax.retrieval.inputs import Embeddings
from dmljax.retrieval.rules import SimilarityFn, euclidean
from dmljax.retrieval.sharding import REPLICATED, SHARDED
from dmljax.retrieval.tiles import Tile, Tiles

__all__ = ["nearest"]

Groups = np.ndarray  # integers [n], or [n g]


def nearest(
    queries: Embeddings,
    gallery: Embeddings | None = None,
    *,
    k: int,
    groups: Groups | None = None,
    gallery_groups: Groups | None = None,
    similarity_fn: SimilarityFn = euclidean,
    tile: int | None = None,
    devices: Sequence[jax.Device] | None = None,
) -> tuple[Int[np.ndarray, "q k"], Float[np.ndarray, "q k"]]:
    """Returns indices and similarities of the k most similar items, best first, ties by index.

    With `groups` (and `gallery_groups`), items of the query's group are left out; -1 means no
    group. With labels as groups, these are the nearest items of other classes. Several columns,
    `[n g]`, leave out an item that shares a group in any of them. If fewer than k items remain,
    the last indices are -1, and their similarities -inf.

    >>> queries, gallery = np.array([[0.0], [10.0]]), np.array([[1.0], [3.0], [8.0]])
    >>> indices, similarities = retrieval.nearest(queries, gallery, k=2)
    >>> indices.tolist(), similarities.tolist()  # a similarity is -|q - g|^2 / 2
    ([[0, 1], [2, 1]], [[-0.5, -4.5], [-2.0, -24.5]])
    """
    tile = tiles.choose_tile(tile, devices)
    vectors, items, center = inputs.check_vectors(queries, gallery)
    available = inputs.items_to_find(vectors, gallery)
    inputs.check_k(k, available, noun="", of="items to find")
    row_groups, column_groups = inputs.exclusion_codes(
        groups, gallery_groups, inputs.sizes_of(vectors, gallery)
    )
    side = tiles.choose_side(max(len(vectors), len(items)), tile)
    mesh = sharding.choose_mesh(devices, tiles=-(-len(vectors) // side))
    block_size = side if mesh is None else side * mesh.size
    make_tiles = partial(Tiles, center=center, similarity_fn=similarity_fn, mesh=mesh)
    slots = tiles.pad_items(np.arange(len(items)), side)
    rows = tiles.pad_items(np.arange(len(vectors)), block_size)
    column_tiles = make_tiles(items, slots, column_groups, side=side, spec=REPLICATED)
    row_tiles = make_tiles(vectors, rows, row_groups, side=block_size)
    merge = sharding.on_mesh(mesh, _merge, SHARDED, SHARDED, SHARDED, REPLICATED, REPLICATED)
    results = []
    for block_indices in tiles.passes(len(row_tiles)):
        blocks = [row_tiles[i] for i in block_indices]
        dtype = blocks[0].vectors.dtype
        nothing = np.full((block_size, k), -np.inf, dtype), np.zeros((block_size, k), np.int32)
        best = [sharding.put(nothing, mesh) for _ in blocks]
        for j in range(len(column_tiles)):
            columns, start = column_tiles[j], np.int32(j * side)
            best = [merge(*b, x, columns, start) for b, x in zip(best, blocks, strict=True)]
            jax.block_until_ready(best)
        results += [[np.asarray(a) for a in b] for b in best]
    similarities, indices = (
        np.concatenate(arrays)[: len(vectors)] for arrays in zip(*results, strict=True)
    )
    return np.where(np.isneginf(similarities), -1, indices), similarities


@jax.jit
def _merge(
    best: Float[Array, "b k"],
    indices: Int[Array, "b k"],
    rows: Tile,
    columns: Tile,
    start: Int[Array, ""],
) -> tuple[Float[Array, "b k"], Int[Array, "b k"]]:
    """Merges the best k with a tile of columns, whose first item has the index `start`."""
    similarities = tiles.negatives(rows, columns)
    columns_of = start + jnp.arange(similarities.shape[1], dtype=jnp.int32)[None]
    columns_of = jnp.broadcast_to(columns_of, similarities.shape)
    # Among equal values `top_k` takes the first: earlier tiles have lower indices, and stay ahead.
    similarities = jnp.concatenate([best, similarities], axis=1)
    best, order = jax.lax.top_k(similarities, best.shape[1])
    return best, jnp.take_along_axis(jnp.concatenate([indices, columns_of], axis=1), order, axis=1)
