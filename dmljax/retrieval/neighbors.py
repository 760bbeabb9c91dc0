"""Exact nearest neighbors, and the k-reciprocal neighbors of Zhong et al. (2017)."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dmljax.retrieval import inputs, tiles
from dmljax.retrieval.inputs import Embeddings, Groups
from dmljax.retrieval.rules import SimilarityFn, euclidean
from dmljax.retrieval.tiles import REPLICATED, SHARDED, Tile, Tiles

__all__ = ["k_reciprocal", "nearest"]


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
    counts = inputs.counts_of(vectors, gallery)
    inputs.check_k(k, counts.candidates, of="items to find")
    row_groups, column_groups = inputs.exclusion_codes(groups, gallery_groups, counts)
    side = tiles.choose_side(max(len(vectors), len(items)), tile)
    mesh = tiles.choose_mesh(devices, count=-(-len(vectors) // side))
    make_tiles = partial(Tiles, center=center, similarity_fn=similarity_fn, side=side, mesh=mesh)
    rows = make_tiles(vectors, groups=row_groups)
    columns = make_tiles(items, groups=column_groups, spec=REPLICATED)
    similarities, indices = (x[: len(vectors)] for x in search(rows, columns, k=k))
    return np.where(np.isneginf(similarities), -1, indices), similarities


def search(
    rows: Tiles, columns: Tiles, *, k: int
) -> tuple[Float[np.ndarray, "m k"], Int[np.ndarray, "m k"]]:
    """Returns the k largest similarities of every row, and the first columns that reach them."""
    mesh, last = rows.mesh, len(columns) - 1
    kernel, width = (_merge, k) if k > 1 else (_update, columns.side // tiles.SLICES)
    update_fn = tiles.on_mesh(mesh, kernel, SHARDED, SHARDED, SHARDED, REPLICATED, REPLICATED)
    reduce_fn = tiles.on_mesh(mesh, _reduce, SHARDED, SHARDED)
    states: dict[int, Any] = {}
    shape, results = (rows.side, width), []
    for b, row_tile, j, column_tile in tiles.sweep(rows, columns, states):
        if j == 0:
            nothing = np.full(shape, -np.inf, row_tile.vectors.dtype), np.zeros(shape, np.int32)
            states[b] = tiles.put(nothing, mesh)
        start = np.int32(j * columns.side)
        states[b] = update_fn(*states[b], row_tile, column_tile, start)
        if j == last:
            state = states.pop(b)
            results.append(state if k > 1 else reduce_fn(*state))
    similarities, indices = (np.concatenate(arrays) for arrays in zip(*results, strict=True))
    return similarities, indices


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


# As in `ranking`, a tile is folded into slices, because reductions along rows are slow on CPUs.


@jax.jit
def _update(
    best: Float[Array, "b s"],
    indices: Int[Array, "b s"],
    rows: Tile,
    columns: Tile,
    start: Int[Array, ""],
) -> tuple[Float[Array, "b s"], Int[Array, "b s"]]:
    """Returns the best similarity in each column of the folded tile, and where its slice starts."""
    x = tiles.negatives(rows, columns)
    width = x.shape[1] // tiles.SLICES
    for s, similarities in enumerate(jnp.split(x, tiles.SLICES, axis=1)):
        is_better = similarities > best
        best = jnp.where(is_better, similarities, best)
        indices = jnp.where(is_better, start + s * width, indices)
    return best, indices


@jax.jit
def _reduce(
    best: Float[Array, "b s"], indices: Int[Array, "b s"]
) -> tuple[Float[Array, "b 1"], Int[Array, "b 1"]]:
    """Returns the best similarity of each row, and the first column that reaches it."""
    top = jnp.max(best, axis=1, keepdims=True)
    indices = indices + jnp.arange(indices.shape[1], dtype=indices.dtype)[None]
    largest = jnp.iinfo(indices.dtype).max
    return top, jnp.min(jnp.where(best == top, indices, largest), axis=1, keepdims=True)


def k_reciprocal(
    embeddings: Float[np.ndarray, "q d"],
    gallery: Float[np.ndarray, "n d"] | None = None,
    *,
    k: int = 30,
    batch_size: int | None = None,
) -> Int[np.ndarray, "q m"]:
    """Returns the batch of each image: itself, then its k-reciprocal neighbors.

    At test time, a net that attends over its batch gets these batches. Two items are k-reciprocal
    neighbors if each is among the k + 1 nearest of the other. They are expanded by neighborhoods of
    k / 2 + 1, if more than two thirds of a neighborhood are among them. If these are fewer than
    `batch_size` (7), the nearest images follow. Images are compared by Euclidean distance.

    With a `gallery`, as of In-Shop, neighbors of the queries are items of the gallery. Then the
    result is the `batch_size - 1` (3) neighbors of each query, without the query.

    Reference: Zhong et al., Re-ranking Person Re-identification with k-reciprocal Encoding, CVPR
    2017, arXiv:1701.08398; the batches are as in Seidenschwarz et al., ICML 2021.

    >>> x = np.array([[0.0], [0.1], [5.0], [5.1]])
    >>> retrieval.k_reciprocal(x, k=1, batch_size=2).tolist()
    [[0, 1], [1, 0], [2, 3], [3, 2]]
    """
    within, least = gallery is None, 1 if gallery is None else 2
    queries = np.asarray(embeddings, np.float64)
    items = queries if gallery is None else np.asarray(gallery, np.float64)
    batch_size = (7 if within else 4) if batch_size is None else batch_size
    if not least <= batch_size <= len(items) + least - 1:
        raise ValueError(
            f"`batch_size` must be between {least} and {len(items) + least - 1}, got {batch_size}"
        )
    size = batch_size + 1 - least

    def search(rows: np.ndarray, columns: np.ndarray, count: int) -> np.ndarray:
        return nearest(rows, columns, k=min(count, len(columns)))[0]

    ranking = search(queries, items, max(k + 1, size))
    near_count = round(k / 2) + 1
    back = ranking[:, : k + 1] if within else search(items, queries, k + 1)
    near = ranking[:, :near_count] if within else search(items, items, near_count)
    back_sets, near_sets = ([set(row) for row in x.tolist()] for x in (back, near))
    neighborhoods = [{j for j in row if i in near_sets[j]} for i, row in enumerate(near.tolist())]
    batches = []
    for i, row in enumerate(ranking.tolist()):
        tiles.check_stop()
        mutual = {c for c in row[: k + 1] if i in back_sets[c]}
        agreeing = (neighborhoods[c] for c in mutual)
        members = mutual.union(*(x for x in agreeing if len(x & mutual) > 2 / 3 * len(x)))
        first = [i] if within else []
        order = np.array(sorted(members - set(first)), np.int64)
        distances = np.square(items[order] - queries[i]).sum(axis=1)
        batch = first + order[np.argsort(distances, kind="stable")].tolist()
        batches.append([*dict.fromkeys(batch[:size] + row)][:size])
    return np.array(batches, np.int64)
