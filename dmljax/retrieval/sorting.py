"""Ranks by sorting, on the host: for queries with many positives, and for ensembles."""

import concurrent.futures
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from dmljax import ops
from dmljax.files import machine
from dmljax.retrieval import inputs, tiles
from dmljax.retrieval.inputs import Labels
from dmljax.retrieval.layout import QueryBlock, Ranks, ranks_of
from dmljax.retrieval.rules import count_ahead, mask
from dmljax.retrieval.tiles import Tiles

__all__ = ["mean_distance_ranks"]


def sort_ranks(
    block: QueryBlock,
    make_tiles: Callable[..., Tiles],
    column_tiles: Tiles,
    slot_groups: Int[np.ndarray, "m g"],
) -> Iterator[Ranks]:
    """Yields the ranks of all queries of `block`, whose tiles `make_tiles` makes.

    Uses one device: sorting takes most of the time. Threads of the host share a strip of rows.
    """
    side = column_tiles.side
    width = side * len(column_tiles)
    height = tiles.choose_side(len(block.items), side)
    while height > 8 and height * width > tiles.STRIP_SIZE:
        height //= 2
    items = tiles.pad_items(block.items, height)
    row_tiles = make_tiles(items=items, side=height)
    with concurrent.futures.ThreadPoolExecutor(machine.core_count()) as pool:
        for i in range(len(row_tiles)):
            queries = block.rows(slice(i * height, (i + 1) * height))
            strip = np.empty((height, width), row_tiles[i].vectors.dtype)
            for j in range(len(column_tiles)):
                columns = slice(j * side, (j + 1) * side)
                strip[:, columns] = tiles.similarities(row_tiles[i], column_tiles[j])
            counts = np.zeros((len(queries.items), queries.positives.max()), np.int64)

            def sort_row(row: int, queries=queries, strip=strip, counts=counts) -> None:
                start, count = queries.starts[row], queries.positives[row]
                positives = slice(start, start + queries.sizes[row])
                is_left_out = mask(queries.groups[row], slot_groups)
                counts[row, :count] = _negatives_ahead(strip[row], positives, is_left_out)[:count]

            list(pool.map(sort_row, range(len(queries.items))))
            yield from ranks_of(queries.items, queries.positives, counts)


def _negatives_ahead(
    similarities: Float[np.ndarray, "n"],
    positives: slice | Bool[np.ndarray, "n"],
    is_left_out: Bool[np.ndarray, "n"],
) -> Int[np.ndarray, "r"]:
    """Counts the negatives ahead of each positive, best first; overwrites `similarities`."""
    similarities[is_left_out] = -np.inf
    best_first = np.sort(similarities[positives])[::-1]
    similarities[positives] = -np.inf
    similarities.sort()
    return count_ahead(similarities, best_first)


def mean_distance_ranks(
    learners: Float[np.ndarray, "q m d"],
    labels: Labels,
    *,
    gallery: Float[np.ndarray, "n ..."] | None = None,
    gallery_labels: Labels | None = None,
    rows: int = 256,
) -> Iterator[Ranks]:
    """Yields the ranks of every query's positives by sum_m |q_m - g_m|, in blocks of queries.

    (The distance of an ensemble in the text of Kim et al., ECCV 2018.) The concatenated vectors of
    an ensemble rank by the mean of the squared distances instead. As in `retrieval.ranks`, a
    negative that is as near as a positive ranks ahead of it, and queries without a positive are in
    no block. It sorts `rows` rows of distances at a time: for tens of thousands of images,
    `retrieval.ranks` is many times faster.

    >>> learners = np.array([[[0.0], [0.0]], [[3.0], [0.0]], [[2.0], [3.0]]])
    >>> block = next(retrieval.mean_distance_ranks(learners, np.array([0, 0, 1])))
    >>> block.queries.tolist(), block.ranks.tolist()
    ([0, 1], [[1], [1]])
    """
    items = learners if gallery is None else gallery
    if learners.ndim != 3 or items.shape[1:] != learners.shape[1:]:
        raise ValueError(
            f"learners are [q m d] and a gallery [n m d], not {learners.shape} and {items.shape}"
        )
    sizes = inputs.sizes_of(learners, gallery)
    query_codes, item_codes = inputs.integer_labels(labels, gallery_labels, sizes)
    query_groups, item_groups = inputs.exclusion_codes(None, None, sizes)
    on_device = jnp.asarray(items, jnp.float32)
    for start in range(0, len(learners), rows):
        tiles.check_stop()
        block = np.arange(start, min(start + rows, len(learners)))
        # The last block is filled up, so that the distances compile once.
        filled = learners[np.resize(block, min(rows, len(learners)))]
        similarities = np.array(_similarities(jnp.asarray(filled, jnp.float32), on_device))
        is_left_out = mask(query_groups[block, None], item_groups[None])
        is_same = query_codes[block, None] == item_codes[None]
        positives = (is_same & ~is_left_out).sum(axis=1)
        counts = np.zeros((len(block), max(1, positives.max())), np.int64)
        for i, count in enumerate(positives):
            ahead = _negatives_ahead(similarities[i], is_same[i], is_left_out[i])
            counts[i, :count] = ahead[:count]
        if positives.any():
            yield from ranks_of(block, positives, counts)


@jax.jit
def _similarities(x: jax.Array, y: jax.Array) -> jax.Array:
    def one_learner(total, pair):
        return total - ops.euclidean(*pair), None

    zeros = jnp.zeros((len(x), len(y)), jnp.float32)
    return jax.lax.scan(one_learner, zeros, (x.swapaxes(0, 1), y.swapaxes(0, 1)))[0]
