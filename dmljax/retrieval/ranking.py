"""Exact ranks of every query's positives."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from dmljax.retrieval import counting, filtering, inputs, layout, sharding, sorting, tiles
from dmljax.retrieval.inputs import Embeddings, Labels
from dmljax.retrieval.layout import QueryBlock, Ranks
from dmljax.retrieval.rules import SimilarityFn, euclidean
from dmljax.retrieval.sharding import REPLICATED
from dmljax.retrieval.tiles import Tiles

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

    `filter_dtype` is the type of the products that decide all comparisons but close ones, which
    are decided in float32 (`retrieval.filtering`): the ranks are the same for every type. 'auto' is
    bfloat16 on accelerators (float32 where a trial shows that bfloat16 is less precise there than
    the filter expects), and None on CPUs and for float64. With None, products in full
    precision decide all comparisons.

    With `groups` (and `gallery_groups`), a query ranks the items outside of its group; -1 means no
    group. In re-identification, a query ignores the images of the same person from the same camera.

    >>> embeddings, labels = np.array([[0.0], [1.0], [2.5], [9.0]]), np.array([0, 0, 1, 1])
    >>> block = next(retrieval.ranks(embeddings, labels))
    >>> dict(sorted(zip(block.queries.tolist(), block.ranks[:, 0].tolist())))
    {0: 1, 1: 1, 2: 3, 3: 1}
    """
    tile = tiles.choose_tile(tile, devices)
    queries, items, center = inputs.check_vectors(embeddings, gallery)
    counts = inputs.sizes_of(queries, gallery)
    query_codes, gallery_codes = inputs.integer_labels(labels, gallery_labels, counts)
    query_groups, item_groups = inputs.exclusion_codes(groups, gallery_groups, counts)
    side = tiles.choose_side(max(len(queries), len(items)), tile)
    slots, starts, sizes = layout.class_slots(query_codes, gallery_codes, side)
    make_tiles = partial(Tiles, center=center, similarity_fn=similarity_fn)
    if gallery is None:
        order = slots  # queries lie as the gallery does, so that their products are symmetric
    else:
        order = np.flatnonzero(sizes[query_codes] > 0)
        order = order[np.argsort(starts[query_codes[order]], kind="stable")]
    if share is not None:
        order = order[order >= 0]
        order = order[slice(*sharding.bounds(share, len(order)))]
    if not len(order):
        return
    mesh = sharding.choose_mesh(devices, tiles=-(-len(order) // side))
    block_size = side if mesh is None else side * mesh.size
    order = tiles.pad_items(order, block_size)
    slot_groups = item_groups[slots]
    # Negatives are of another class. A query and its own item have the same label, so without
    # `groups` the labels are enough.
    query_columns, item_columns = query_codes[:, None], gallery_codes[:, None]
    if groups is not None:
        query_columns = np.column_stack([query_columns, query_groups])
        item_columns = np.column_stack([item_columns, item_groups])
    column_tiles = make_tiles(items, slots, item_columns, side=side, mesh=mesh, spec=REPLICATED)
    if gallery is None and mesh is None and share is None:
        row_tiles = column_tiles
    else:
        row_tiles = make_tiles(queries, order, query_columns, side=block_size, mesh=mesh)
    class_sizes = np.where(order < 0, 0, sizes[query_codes[order]])
    nothing = np.zeros(len(order), np.int64)
    block = QueryBlock(
        order, starts[query_codes[order]], class_sizes, query_groups[order], nothing, nothing > 0
    )
    positives = layout.count_positives(block, slot_groups)
    is_counted = (positives > 0) & (positives < _SORTED_FROM)
    block = block._replace(positives=positives, is_counted=is_counted)
    if is_counted.any():
        dtype = _filter_dtype(filter_dtype, queries, items, devices)
        # Rows and columns of one product: only where the tiles of both are the same.
        is_mirrored = dtype is None and row_tiles is column_tiles
        yield from counting.count_ranks(
            block,
            row_tiles,
            column_tiles,
            slot_groups,
            is_mirrored=is_mirrored and counting.is_symmetric(row_tiles[0]),
            filter_dtype=dtype,
        )
    is_sorted = positives >= _SORTED_FROM
    if is_sorted.any():
        if mesh is not None:
            column_tiles = make_tiles(items, slots, item_columns, side=side)
        rows_fn = partial(make_tiles, queries, groups=query_columns)
        yield from sorting.sort_ranks(block.rows(is_sorted), rows_fn, column_tiles, slot_groups)


def _filter_dtype(
    dtype: Any, queries: np.ndarray, items: np.ndarray, devices: Sequence[jax.Device] | None
) -> np.dtype | None:
    is_single = all(inputs.compute_dtype(x) == np.float32 for x in (queries, items))
    if isinstance(dtype, str) and dtype == "auto":
        if not is_single or not tiles.on_accelerator(devices):
            return None
        half, device = np.dtype(jnp.bfloat16), (devices or jax.local_devices())[0]
        return half if filtering.keeps_radius(half, device) else np.dtype(np.float32)
    if dtype is None:
        return None
    if getattr(dtype, "__name__", str(dtype)) not in ("bfloat16", "float32"):
        raise ValueError(f"filter_dtype={dtype!r}: give jnp.bfloat16, jnp.float32, None or 'auto'")
    if not is_single:
        raise ValueError(
            f"filter_dtype={jnp.dtype(dtype).name} is for embeddings of float32 or less: with "
            f"{queries.dtype} and {items.dtype} leave it out"
        )
    return jnp.dtype(dtype)
