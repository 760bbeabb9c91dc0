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

Groups = np.ndarray  # integers [n], or [n g]


def nearest(
    queries: Embeddings,
    gallery: Embeddings | None = None,
    *,
    k: int,
    groups: Groups | None = None,
    gallery_groups: Groups | None = None,
    similarity_fn: SimilarityFn = euclidean,
    tile: int = 1024,
    devices: Sequence[jax.Device] | None = None,
) -> tuple[Int[np.ndarray, "q k"], Float[np.ndarray, "q k"]]:
    """Indices and similarities of the k most similar items, best first, ties by index.

    With `groups` (and `gallery_groups`), items of the query's own group are left out; -1 is no
    group. With labels as groups, these are the nearest items of other classes. Several columns,
    `[n g]`, leave out an item that shares a group in any of them. Where fewer than k items remain,
    the last indices are -1, and their similarities -inf.

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
    row_groups, column_groups = _group_codes(groups, gallery_groups, vectors, items, gallery)
    side = tiles.choose_side(max(len(vectors), len(items)), tile)
    mesh = sharding.choose_mesh(devices, tiles=-(-len(vectors) // side))
    block_size = side if mesh is None else side * mesh.size
    make_tiles = partial(Tiles, center=center, similarity_fn=similarity_fn, mesh=mesh)
    slots = tiles.pad_items(np.arange(len(items)), side)
    column_tiles = make_tiles(items, slots, slots, side=side, spec=REPLICATED)
    rows = tiles.pad_items(np.arange(len(vectors)), block_size)
    # Every item is a group of its own, which keeps it from finding itself; no item is -2.
    own_items = rows if gallery is None else np.full(len(rows), -2)
    row_tiles = make_tiles(vectors, rows, own_items, side=block_size)
    row_groups = np.pad(row_groups, ((0, len(rows) - len(vectors)), (0, 0)), constant_values=-1)
    column_groups = np.pad(
        column_groups, ((0, len(slots) - len(items)), (0, 0)), constant_values=-1
    )
    specs = SHARDED, SHARDED, SHARDED, REPLICATED, REPLICATED, SHARDED, REPLICATED
    merge = sharding.on_mesh(mesh, _merge, *specs)
    results = []
    for first in range(0, len(row_tiles), tiles.BLOCKS_PER_PASS):
        numbers = range(first, min(first + tiles.BLOCKS_PER_PASS, len(row_tiles)))
        blocks = [row_tiles[i] for i in numbers]
        dtype = blocks[0].vectors.dtype
        nothing = np.full((block_size, k), -np.inf, dtype), np.zeros((block_size, k), np.int32)
        best = [sharding.put(nothing, mesh) for _ in blocks]
        block_groups = [
            sharding.put(row_groups[i * block_size : (i + 1) * block_size], mesh) for i in numbers
        ]
        for j in range(len(column_tiles)):
            columns, start = column_tiles[j], np.int32(j * side)
            tile_groups = column_groups[j * side : (j + 1) * side]
            best = [
                merge(*b, block, columns, start, own, tile_groups)
                for b, block, own in zip(best, blocks, block_groups, strict=True)
            ]
            jax.block_until_ready(best)
        results += [[np.asarray(a) for a in b] for b in best]
    similarities, indices = (
        np.concatenate(arrays)[: len(vectors)] for arrays in zip(*results, strict=True)
    )
    return np.where(np.isneginf(similarities), -1, indices), similarities


def _group_codes(
    groups: Groups | None,
    gallery_groups: Groups | None,
    vectors: np.ndarray,
    items: np.ndarray,
    gallery: Embeddings | None,
) -> tuple[Int[np.ndarray, "q g"], Int[np.ndarray, "n g"]]:
    """The groups of queries and items as small numbers, -1 for none; without groups no column."""
    if groups is None and gallery_groups is None:
        return np.zeros((len(vectors), 0), np.int32), np.zeros((len(items), 0), np.int32)
    if groups is None or (gallery_groups is None) != (gallery is None):
        raise ValueError(
            "groups are for queries and gallery_groups for the gallery: give both, or only groups "
            "without a gallery"
        )
    own, others = np.asarray(groups), np.asarray(groups if gallery is None else gallery_groups)
    for name, array, rows in (("groups", own, vectors), ("gallery_groups", others, items)):
        if array.ndim not in (1, 2) or len(array) != len(rows) or array.dtype.kind not in "iu":
            raise ValueError(
                f"{name} are {array.dtype} of shape {array.shape}: give integers, one or one row "
                f"for each of the {len(rows)} embeddings"
            )
    own, others = own.reshape(len(own), -1), others.reshape(len(others), -1)
    if own.shape[1] != others.shape[1]:
        raise ValueError(
            f"groups have {own.shape[1]} columns and gallery_groups {others.shape[1]}: give as many"
        )
    codes = [
        np.unique(np.append(-1, np.append(a, b)), return_inverse=True)
        for a, b in zip(own.T, others.T, strict=True)
    ]
    # A code is the place among the sorted values: 0 for -1, unless a smaller value is a group.
    table = np.stack([np.where(values[c] == -1, -1, c)[1:] for values, c in codes], axis=1)
    return table[: len(own)].astype(np.int32), table[len(own) :].astype(np.int32)


@jax.jit
def _merge(
    best: Float[Array, "b k"],
    indices: Int[Array, "b k"],
    rows: Tile,
    columns: Tile,
    start: Int[Array, ""],
    row_groups: Int[Array, "b g"],
    column_groups: Int[Array, "n g"],
) -> tuple[Float[Array, "b k"], Int[Array, "b k"]]:
    """The best k of those so far and a tile of columns, whose first item is number `start`."""
    similarities = tiles.negatives(rows, columns)
    for own, others in zip(row_groups.T, column_groups.T, strict=True):
        same = (own[:, None] == others[None]) & (own >= 0)[:, None]
        similarities = jnp.where(same, -jnp.inf, similarities)
    numbers = start + jnp.arange(similarities.shape[1], dtype=jnp.int32)[None]
    numbers = jnp.broadcast_to(numbers, similarities.shape)
    # Among equal values `top_k` takes the first: earlier tiles have lower indices, and stay ahead.
    similarities = jnp.concatenate([best, similarities], axis=1)
    best, order = jax.lax.top_k(similarities, best.shape[1])
    return best, jnp.take_along_axis(jnp.concatenate([indices, numbers], axis=1), order, axis=1)
