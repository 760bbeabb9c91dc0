"""Exact ranks of every query's positives.

The similarities of a query's positives are thresholds. Every tile of similarities is compared with
them and dropped: how many negatives are at least as similar as a positive? So no row of
similarities is ever complete in memory. `filtering` decides most comparisons in bfloat16. Where a
query has many positives, its row is sorted instead, on the host.

A slot is an index into the padded gallery. Items of one class lie in neighboring slots.
"""

import concurrent.futures
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from dmljax import ops
from dmljax.files import machine
from dmljax.retrieval import filtering, inputs, rules, tiles
from dmljax.retrieval.inputs import Embeddings, Groups, Labels
from dmljax.retrieval.rules import SimilarityFn, count_ahead, euclidean, mask, precedes
from dmljax.retrieval.tiles import REPLICATED, SHARDED, Tile, Tiles

__all__ = ["Ranks", "mean_distance_ranks", "ranks"]

_SORTED_FROM = 64  # from this many positives on, sorting a row is faster than counting for each
_CHUNK = 8  # thresholds of a query that one pass over a tile counts
_PAIRS = 1 << 22  # pairs of a query and an item of its class in memory at once


class Ranks(NamedTuple):
    """`ranks[i, j]` is the rank of the j-th best positive of query `queries[i]`; 0 is padding."""

    queries: Int[np.ndarray, "q"]
    ranks: Int[np.ndarray, "q r"]


def ranks(
    embeddings: Embeddings,
    labels: Labels,
    *,
    gallery: Embeddings | None = None,
    gallery_labels: Labels | None = None,
    groups: Groups | None = None,
    gallery_groups: Groups | None = None,
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
    which are decided in float32 (`retrieval.filtering`). Equal similarities stay ties. With None,
    products in full precision decide all comparisons. 'auto' is bfloat16 on accelerators, and None
    on CPUs, for float64, and where a trial shows that the device is less precise than expected.

    With `groups` (and `gallery_groups`), a query ranks the items outside of its group, as in
    `nearest`: in re-identification, the images of the same person from the same camera are ignored.

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
    slots, starts, sizes = _class_slots(query_codes, item_codes, side)
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
    # Negatives are of another class. A query and its own item have the same label, so without
    # `groups` the labels are enough.
    query_columns, item_columns = query_codes[:, None], item_codes[:, None]
    if groups is not None:
        query_columns = rules.leave_out_classes(query_groups, query_codes)
        item_columns = rules.leave_out_classes(item_groups, item_codes)
    make_tiles = partial(Tiles, center=center, similarity_fn=similarity_fn)
    make_rows = partial(make_tiles, queries, groups=query_columns)
    make_columns = partial(make_tiles, items, slots, item_columns, side=side)
    columns = make_columns(mesh=mesh, spec=REPLICATED)
    rows = columns
    if gallery is not None or mesh is not None or share is not None:
        rows = make_rows(order, side=side, mesh=mesh)
    block = _query_block(rows.items, query_codes, query_groups, starts, sizes, item_groups[slots])
    counted = block.keep(block.positives < _SORTED_FROM)
    parts = [slice(start, start + rows.side) for start in range(0, len(rows.items), rows.side)]
    blocks = {b: counted.rows(part) for b, part in enumerate(parts)}
    blocks = {b: part for b, part in blocks.items() if part.positives.any()}
    if blocks:
        is_filtered = _is_filtered(filter_dtype, queries, items, devices)
        negatives = _count_negatives(blocks, rows, columns, is_filtered=is_filtered)
        yield from (blocks[b].ranks(counts) for b, counts in negatives.items())
    is_sorted = block.positives >= _SORTED_FROM
    if is_sorted.any():
        columns = columns if mesh is None else make_columns()
        yield from _sort_ranks(block.rows(is_sorted), make_rows, columns)


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
    counts = inputs.counts_of(learners, gallery)
    query_codes, item_codes = inputs.integer_labels(labels, gallery_labels, counts)
    query_groups, item_groups = inputs.exclusion_codes(None, None, counts)
    slots, starts, sizes = _class_slots(query_codes, item_codes, 1)
    slot_groups, on_device = item_groups[slots], jnp.asarray(items[slots], jnp.float32)
    for start in range(0, len(learners), rows):
        tiles.check_stop()
        queries = np.arange(start, min(start + rows, len(learners)))
        # The last block is filled up, so that the distances compile once.
        filled = learners[np.resize(queries, min(rows, len(learners)))]
        strip = np.array(_similarities(jnp.asarray(filled, jnp.float32), on_device))
        block = _query_block(queries, query_codes, query_groups, starts, sizes, slot_groups)
        if block.positives.any():
            yield _sort(block, strip)


@jax.jit
def _similarities(x: jax.Array, y: jax.Array) -> jax.Array:
    def one_learner(total, pair):
        return total - ops.euclidean(*pair), None

    zeros = jnp.zeros((len(x), len(y)), jnp.float32)
    return jax.lax.scan(one_learner, zeros, (x.swapaxes(0, 1), y.swapaxes(0, 1)))[0]


class _Queries(NamedTuple):
    """A block of queries, and the slots of the gallery that hold the items of their classes."""

    items: Int[np.ndarray, "n"]  # -1 is padding
    starts: Int[np.ndarray, "n"]  # the first slot of the query's class
    sizes: Int[np.ndarray, "n"]  # items of the query's class in the gallery, 0 for padding
    groups: Int[np.ndarray, "n g"]  # the groups that the query leaves out
    positives: Int[np.ndarray, "n"]  # the count of its positives
    slot_groups: Int[np.ndarray, "m g"]  # the groups of all slots

    def rows(self, index: slice | np.ndarray) -> "_Queries":
        items, starts, sizes, groups, positives = (array[index] for array in self[:-1])
        return _Queries(items, starts, sizes, groups, positives, self.slot_groups)

    def keep(self, where: Bool[np.ndarray, "n"]) -> "_Queries":
        """Returns the same rows, in which the other queries have no positives."""
        sizes, positives = (np.where(where, x, 0) for x in (self.sizes, self.positives))
        return self._replace(sizes=sizes, positives=positives)

    @property
    def slots(self) -> Int[np.ndarray, "n r"]:
        """The slots of each query's positives; -1 is another item, or padding."""
        numbers = np.arange(self.sizes.max(initial=0))
        slots = np.minimum(self.starts[:, None] + numbers, len(self.slot_groups) - 1)
        is_left_out = mask(self.groups[:, None], self.slot_groups[slots])
        return np.where((numbers < self.sizes[:, None]) & ~is_left_out, slots, -1)

    def ranks(self, negatives_ahead: Int[np.ndarray, "n r"]) -> Ranks:
        """Returns rank_j = j + count of negatives ahead, of the queries with positives."""
        numbers = np.arange(1, negatives_ahead.shape[1] + 1)
        is_rank = numbers <= self.positives[:, None]
        rows = np.flatnonzero(self.positives)
        return Ranks(self.items[rows], np.where(is_rank, negatives_ahead + numbers, 0)[rows])


def _class_slots(
    query_codes: Int[np.ndarray, "q"], gallery_codes: Int[np.ndarray, "n"], side: int
) -> tuple[Int[np.ndarray, "m"], Int[np.ndarray, "c"], Int[np.ndarray, "c"]]:
    """Returns the item in each slot (-1 is padding), and each class's first slot and item count.

    Small classes come first: a tile of queries then finds its positives in few tiles, and its
    queries have similar counts of positives. Classes without a query come before all others.
    """
    classes = max(query_codes.max(), gallery_codes.max()) + 1
    sizes = np.bincount(gallery_codes, minlength=classes)
    has_query = np.bincount(query_codes, minlength=classes) > 0
    starts = np.zeros(classes, np.int64)
    end = 0
    for label in np.lexsort((np.arange(classes), sizes, has_query)):
        size = int(sizes[label])
        if end % side + size > side >= size:  # a class that fits into one tile is not cut
            end += -end % side
        starts[label] = end
        end += size
    items = np.argsort(starts[gallery_codes], kind="stable")  # by class
    firsts = starts[gallery_codes[items]]
    slots = np.full(end + -end % side, -1)
    slots[firsts + np.arange(len(items)) - np.searchsorted(firsts, firsts)] = items
    return slots, starts, sizes


def _query_block(
    items: Int[np.ndarray, "n"],
    codes: Int[np.ndarray, "q"],
    groups: Int[np.ndarray, "q g"],
    starts: Int[np.ndarray, "c"],
    sizes: Int[np.ndarray, "c"],
    slot_groups: Int[np.ndarray, "m g"],
) -> _Queries:
    """Returns the queries `items` (-1 is padding) with their counts of positives."""
    sizes = np.where(items < 0, 0, sizes[codes[items]])
    block = _Queries(items, starts[codes[items]], sizes, groups[items], sizes, slot_groups)
    height = max(1, _PAIRS // max(1, sizes.max(initial=0)))
    parts = [block.rows(slice(first, first + height)) for first in range(0, len(items), height)]
    counts = [(part.slots >= 0).sum(axis=1) for part in parts]
    return block._replace(positives=np.concatenate([np.zeros(0, np.int64), *counts]))


def _count_negatives(
    blocks: Mapping[int, _Queries], rows: Tiles, columns: Tiles, *, is_filtered: bool
) -> dict[int, Int[np.ndarray, "n r"]]:
    """Counts the negatives ahead of each positive of the queries of some blocks.

    Without the filter, products are in full precision. If rows and columns are the same tiles, a
    product above the diagonal is computed once, and counted both along its rows and along its
    columns.
    """
    mesh = rows.mesh
    is_mirrored = rows is columns and not is_filtered and is_symmetric(rows[0])
    negatives_fn = tiles.on_mesh(mesh, tiles.negatives, SHARDED, REPLICATED)
    count_fn = tiles.on_mesh(mesh, _count_rows, SHARDED, SHARDED, SHARDED)
    if is_filtered:
        count_fn = tiles.on_mesh(mesh, filtering.count_rows, SHARDED, SHARDED, SHARDED, REPLICATED)
    thresholds, counts = {}, {}
    for b, block in blocks.items():
        limits = _thresholds(block, b, rows, columns, is_filtered)
        chunks = [limits] if is_filtered else np.split(limits, limits.shape[1] // _CHUNK, axis=1)
        zeros = [np.zeros(chunk.shape, np.int32) for chunk in chunks]
        thresholds[b], counts[b] = tiles.put((chunks, zeros), mesh)

    def add(count_fn: Any, b: int, *compared: Any) -> None:
        pairs = zip(counts[b], thresholds[b], strict=True)
        counts[b] = [count_fn(count, limits, *compared) for count, limits in pairs]

    visited = range(len(rows)) if is_mirrored else list(blocks)
    pairs = tiles.sweep(rows, columns, counts, blocks=visited, is_upper=is_mirrored)
    for b, row_tile, j, column_tile in pairs:
        is_above = is_mirrored and j > b and j in blocks
        if is_filtered:
            add(count_fn, b, row_tile, column_tile)
        elif b in blocks or is_above:
            negatives = negatives_fn(row_tile, column_tile)
            if b in blocks:
                add(count_fn, b, negatives)
            if is_above:
                add(_count_columns, j, negatives)
    return {b: np.concatenate(counts[b], axis=1) for b in blocks}


def is_symmetric(tile: Tile) -> bool:
    """Returns whether this backend's product gives x'y and y'x the same bits, tried on a tile.

    Some backends do not, and a mirrored product would then break exact ties.
    """
    x = tiles.similarities(tile, tile)
    return bool(jnp.all(x == x.T))


def _thresholds(
    block: _Queries, b: int, rows: Tiles, columns: Tiles, is_filtered: bool
) -> Float[np.ndarray, "n r"]:
    """Returns the similarities of each query's positives, best first, padded with inf to chunks.

    They are taken from the products in which negatives are counted. Another kernel might round
    differently, and a negative equal to a positive would not be tied with it.
    """
    mesh, side = columns.mesh, columns.side
    similarities_fn = tiles.on_mesh(mesh, tiles.similarities, SHARDED, REPLICATED)
    pairs_fn = tiles.on_mesh(mesh, filtering.similarities_at, SHARDED, REPLICATED, SHARDED)
    slots = -np.sort(-block.slots, axis=1)[:, : block.positives.max()]
    slots = np.pad(slots, ((0, 0), (0, -slots.shape[1] % _CHUNK)), constant_values=-1)
    row_tile = rows[b]
    thresholds = np.full(slots.shape, np.inf, row_tile.vectors.dtype)
    for j in np.unique(slots[slots >= 0] // side).tolist():
        is_here = slots // side == j
        indices = np.where(is_here, slots - j * side, 0).astype(np.int32)
        if is_filtered:
            x = np.asarray(pairs_fn(row_tile, columns[j], tiles.put(indices, mesh)))
        else:
            x = np.asarray(similarities_fn(row_tile, columns[j]))
            x = np.take_along_axis(x, indices, axis=1)
        thresholds = np.where(is_here, -x, thresholds)
    thresholds = -np.sort(thresholds, axis=1)
    return np.where(np.isneginf(thresholds), np.inf, thresholds)


# On CPUs, XLA's reductions along rows and columns run element by element and cost more than the
# product before them. So a tile is folded into slices that are added as whole vectors, and four
# counts share a word: only the short sums at the end are reductions.


@jax.jit
def _count_rows(
    counts: Int[Array, "b r"], thresholds: Float[Array, "b r"], negatives: Float[Array, "b n"]
) -> Int[Array, "b r"]:
    """Adds, for every row, how many of its similarities precede each threshold."""
    slices = jnp.split(negatives, tiles.SLICES, axis=1)
    words = _pack_counts(slices, [thresholds[:, j, None] for j in range(_CHUNK)])
    return counts + _sum_counts(words, axis=3)


@jax.jit
def _count_columns(
    counts: Int[Array, "n r"], thresholds: Float[Array, "n r"], negatives: Float[Array, "b n"]
) -> Int[Array, "n r"]:
    """Adds the same for every column."""
    slices = jnp.split(negatives, tiles.SLICES, axis=0)
    words = _pack_counts(slices, [thresholds.T[j, None] for j in range(_CHUNK)])
    return counts + _sum_counts(words, axis=2)


def _pack_counts(slices: list[Array], thresholds: list[Array]) -> Array:
    """Counts over the slices, four thresholds to a word: [2 ...]. A byte is at most `SLICES`."""
    words = []
    for first in range(0, _CHUNK, 4):
        word = jnp.zeros(slices[0].shape, jnp.uint32)
        for similarities in slices:
            for byte in range(4):
                is_ahead = precedes(similarities, thresholds[first + byte])
                word += jnp.where(is_ahead, jnp.uint32(1 << 8 * byte), jnp.uint32(0))
        words.append(word)
    return jnp.stack(words)


def _sum_counts(words: Array, *, axis: int) -> Int[Array, "b r"]:
    """Sums the bytes of `words` along `axis`: one column for each threshold."""
    counts = jnp.stack([(words >> 8 * byte) & 255 for byte in range(4)], axis=1)  # [2 4 ...]
    return jnp.sum(counts.astype(jnp.int32), axis=axis).reshape(_CHUNK, -1).T


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


def _sort_ranks(
    block: _Queries, make_rows: Callable[..., Tiles], columns: Tiles
) -> Iterator[Ranks]:
    """Yields the ranks of all queries of `block`, whose tiles `make_rows` makes.

    Uses one device: sorting takes most of the time.
    """
    side, width = columns.side, len(columns.items)
    height = tiles.choose_side(len(block.items), side)
    while height > 8 and height * width > tiles.STRIP_SIZE:
        height //= 2
    rows = make_rows(block.items, side=height)
    for i, row_tile, j, column_tile in tiles.sweep(rows, columns, {}, together=1):
        if j == 0:
            strip = np.empty((height, width), row_tile.vectors.dtype)
        strip[:, j * side : (j + 1) * side] = tiles.similarities(row_tile, column_tile)
        if j == len(columns) - 1:
            yield _sort(block.rows(slice(i * height, (i + 1) * height)), strip)


def _sort(block: _Queries, strip: Float[np.ndarray, "b m"]) -> Ranks:
    """Returns the ranks by similarities of queries to slots, which it overwrites, in threads."""
    strip = strip[: len(block.items)]  # without padding
    counts = np.zeros((len(strip), block.positives.max()), np.int64)

    def sort_rows(start: int) -> None:
        rows = slice(start, start + height)
        part, similarities = block.rows(rows), strip[rows]
        similarities[mask(part.groups[:, None], part.slot_groups)] = -np.inf
        best_first = []
        for row, first, size, count in zip(
            similarities, part.starts, part.sizes, part.positives, strict=True
        ):
            best_first.append(np.sort(row[first : first + size])[::-1][:count])
            row[first : first + size] = -np.inf
        similarities.sort(axis=1)
        for row, positives, ahead in zip(similarities, best_first, counts[rows], strict=True):
            ahead[: len(positives)] = count_ahead(row, positives)

    cores = machine.core_count()
    height = -(-len(strip) // cores)
    with concurrent.futures.ThreadPoolExecutor(cores) as pool:
        list(pool.map(sort_rows, range(0, len(strip), height)))
    return block.ranks(counts)
