"""Exact ranks of every query's positives."""

from collections.abc import Iterator, Sequence
from functools import partial

import jax
import numpy as np

from dmljax.retrieval import counting, inputs, layout, sharding, sorting, tiles
from dmljax.retrieval.inputs import Embeddings, Labels
from dmljax.retrieval.layout import QueryBlock, Ranks
from dmljax.retrieval.sharding import REPLICATED
from dmljax.retrieval.similarity import SimilarityFn, euclidean
from dmljax.retrieval.tiles import Tiles

__all__ = ["Ranks", "ranks"]

_SORTED_FROM = 64  # from this many positives on, sorting a row is faster than counting for each


def ranks(
    embeddings: Embeddings,
    labels: Labels,
    *,
    gallery: Embeddings | None = None,
    gallery_labels: Labels | None = None,
    similarity_fn: SimilarityFn = euclidean,
    tile: int = 1024,
    devices: Sequence[jax.Device] | None = None,
    share: tuple[int, int] | None = None,
) -> Iterator[Ranks]:
    """The ranks of every query's positives, in blocks of queries.

    The rank of the j-th best positive is j + #{negatives at least as similar}, so a negative that
    is as similar as a positive ranks ahead of it. Blocks come in no particular order; queries
    without a positive are in no block. `share=(i, n)` is the i-th of n parts of the queries, so
    that n processes can rank together: their ranks are bitwise the ranks of one process.

    >>> embeddings, labels = np.array([[0.0], [1.0], [2.5], [9.0]]), np.array([0, 0, 1, 1])
    >>> block = next(retrieval.ranks(embeddings, labels))
    >>> dict(sorted(zip(block.queries.tolist(), block.ranks[:, 0].tolist())))
    {0: 1, 1: 1, 2: 3, 3: 1}
    """
    tiles.check_side(tile)
    queries, items, center = inputs.check_vectors(embeddings, gallery)
    query_codes, gallery_codes = inputs.integer_labels(
        labels, gallery_labels, queries=len(queries), items=len(items), within=gallery is None
    )
    side = tiles.choose_side(max(len(queries), len(items)), tile)
    slots, starts, sizes = layout.class_slots(query_codes, gallery_codes, side)
    make_tiles = partial(Tiles, center=center, similarity_fn=similarity_fn)
    if gallery is None:
        order = slots  # queries lie as the gallery does, so that their products are symmetric
    else:
        order = np.flatnonzero(sizes[query_codes] > 0)
        order = order[np.argsort(starts[query_codes[order]], kind="stable")]
    places = np.arange(len(order))
    if share is not None:
        places = np.flatnonzero(order >= 0)
        places = places[slice(*sharding.bounds(share, len(places)))]
        order = order[places]
    if not len(order):
        return
    mesh = sharding.choose_mesh(devices, tiles=-(-len(order) // side))
    block_size = side if mesh is None else side * mesh.size
    order = tiles.pad_items(order, block_size)
    is_padding = order < 0
    slot_groups = np.where(slots < 0, -1, gallery_codes[slots])
    column_tiles = make_tiles(items, slots, slot_groups, side=side, mesh=mesh, spec=REPLICATED)
    if gallery is None and mesh is None and share is None:
        row_tiles = column_tiles
    else:
        # No class is -2: padding of the queries is in no group with padding of the gallery.
        groups = np.where(is_padding, -2, query_codes[order])
        row_tiles = make_tiles(queries, order, groups, side=block_size, mesh=mesh)
    class_sizes = np.where(is_padding, 0, sizes[query_codes[order]])
    own_slots = np.full(len(order), -1)
    if gallery is None:
        own_slots = np.where(is_padding, -1, tiles.pad_items(places, block_size))
    block = QueryBlock(
        order, starts[query_codes[order]], class_sizes, own_slots, np.zeros(len(order), bool)
    )
    positives = block.positives
    block = block._replace(is_counted=(positives > 0) & (positives < _SORTED_FROM))
    if block.is_counted.any():
        blocks = [block.rows(slice(i, i + block_size)) for i in range(0, len(order), block_size)]
        mirrored = gallery is None and share is None and counting.is_symmetric(row_tiles[0], side)
        yield from counting.count_ranks(blocks, row_tiles, column_tiles, mirrored=mirrored)
    is_sorted = positives >= _SORTED_FROM
    if is_sorted.any():
        if mesh is not None:
            column_tiles = make_tiles(items, slots, slot_groups, side=side)
        yield from sorting.sort_ranks(
            block.rows(is_sorted), partial(make_tiles, queries), column_tiles
        )
