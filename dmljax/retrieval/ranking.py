"""Exact ranks of every query's positives."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from dmljax.retrieval import counting, filtering, inputs, layout, rules, sorting, tiles
from dmljax.retrieval.inputs import Embeddings, Labels
from dmljax.retrieval.layout import Ranks
from dmljax.retrieval.rules import SimilarityFn, euclidean
from dmljax.retrieval.tiles import REPLICATED, Tiles

__all__ = ["Ranks", "ranks"]

_SORTED_FROM = 64  # from this many positives on, sorting a row is faster than counting for each


def ranks(
    embeddings: Embeddings,
    labels: Labels,
    *,
    gallery: Embeddings | None = None,
    gallery_labels: Labels | None = None,
    groups: Int[np.ndarray, "q"] | None = None,
    gallery_groups: Int[np.ndarray, "n"] | None = None,
    similarity_fn: SimilarityFn = euclidean,
    tile: int | None = None,
    devices: Sequence[jax.Device] | None = None,
    share: tuple[int, int] | None = None,
    filter_dtype: Any = "auto",
) -> Iterator[Ranks]:
    """Yields the ranks of every query's positives, in blocks of queries.

    The rank of the j-th best positive is j + #{negatives at least as similar}, so a negative that
    is as similar as a positive ranks ahead of it. Blocks come in no particular order; queries
    without a positive are in no block. `share=(i, n)` is the i-th of n parts of the queries, so
    that n processes can rank together: their ranks are bitwise the ranks of one process.

    With `filter_dtype=jnp.bfloat16`, products in bfloat16 decide all comparisons but close ones,
    which are decided in float32 (`retrieval.filtering`): the ranks are the same. With None,
    products in full precision decide all comparisons. 'auto' is bfloat16 on accelerators, and None
    on CPUs, for float64, and where a trial shows that the device is less precise than expected.

    With `groups` (and `gallery_groups`), a query ranks the items outside of its group; -1 means no
    group. In re-identification, a query ignores the images of the same person from the same camera.

    >>> embeddings, labels = np.array([[0.0], [1.0], [2.5], [9.0]]), np.array([0, 0, 1, 1])
    >>> block = next(retrieval.ranks(embeddings, labels))
    >>> dict(sorted(zip(block.queries.tolist(), block.ranks[:, 0].tolist())))
    {0: 1, 1: 1, 2: 3, 3: 1}
    """
    tile = tiles.choose_tile(tile, devices)
    queries, items, center = inputs.check_vectors(embeddings, gallery)
    counts = inputs.counts_of(queries, gallery)
    query_codes, item_codes = inputs.integer_labels(labels, gallery_labels, counts)
    query_groups, item_groups = inputs.exclusion_codes(groups, gallery_groups, counts)
    side = tiles.choose_side(max(len(queries), len(items)), tile)
    slots, starts, sizes = layout.class_slots(query_codes, item_codes, side)
    if gallery is None:
        order = slots  # queries lie as the gallery does, so that their products are symmetric
    else:
        order = np.flatnonzero(sizes[query_codes] > 0)
        order = order[np.argsort(starts[query_codes[order]], kind="stable")]
    if share is not None:
        order = order[order >= 0]
        order = order[inputs.share_rows(len(order), share)]
    if not len(order):
        return
    mesh = tiles.choose_mesh(devices, count=-(-len(order) // side))
    block_size = side if mesh is None else side * mesh.size
    order, slot_groups = tiles.pad_items(order, block_size), item_groups[slots]
    block = layout.query_block(order, query_codes, query_groups, starts, sizes, slot_groups)
    # Negatives are of another class. A query and its own item have the same label, so without
    # `groups` the labels are enough.
    query_columns, item_columns = query_codes[:, None], item_codes[:, None]
    if groups is not None:
        query_columns = rules.leave_out_classes(query_groups, query_codes)
        item_columns = rules.leave_out_classes(item_groups, item_codes)
    make_tiles = partial(Tiles, center=center, similarity_fn=similarity_fn)
    make_columns = partial(make_tiles, items, slots, item_columns, side=side)
    column_tiles = make_columns(mesh=mesh, spec=REPLICATED)
    counted = block.keep(block.positives < _SORTED_FROM)
    if counted.positives.any():
        if gallery is None and mesh is None and share is None:
            row_tiles = column_tiles
        else:
            row_tiles = make_tiles(queries, order, query_columns, side=block_size, mesh=mesh)
        is_filtered = _is_filtered(filter_dtype, queries, items, devices)
        count_fn = filtering.filtered_counts if is_filtered else counting.product_counts
        blocks = {
            b: counted.rows(slice(b * block_size, (b + 1) * block_size))
            for b in range(len(row_tiles))
        }
        blocks = {b: part for b, part in blocks.items() if part.positives.any()}
        for b, negatives in count_fn(blocks, row_tiles, column_tiles, slot_groups).items():
            yield blocks[b].ranks(negatives)
    is_sorted = block.positives >= _SORTED_FROM
    if is_sorted.any():
        make_rows = partial(make_tiles, queries, groups=query_columns)
        columns = column_tiles if mesh is None else make_columns()
        yield from sorting.sort_ranks(block.rows(is_sorted), make_rows, columns, slot_groups)


def _is_filtered(
    dtype: Any, queries: np.ndarray, items: np.ndarray, devices: Sequence[jax.Device] | None
) -> bool:
    is_single = all(inputs.compute_dtype(x) == np.float32 for x in (queries, items))
    if dtype is None:
        return False
    if isinstance(dtype, str) and dtype == "auto":
        device = (devices or jax.local_devices())[0]
        return is_single and tiles.on_accelerator(devices) and filtering.keeps_radius(device)
    if getattr(dtype, "__name__", str(dtype)) != "bfloat16" or not is_single:
        raise ValueError(
            f"filter_dtype={dtype!r} with {queries.dtype} and {items.dtype}: give jnp.bfloat16 for "
            "embeddings of float32 or less, None, or 'auto'"
        )
    return True
