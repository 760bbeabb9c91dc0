"""The filter of `counting`: products in bfloat16 decide most comparisons, float32 the others.

Each vector is the sum of two in bfloat16 and a small rest, and three products of these parts are
added (`_terms`). Their sum differs from the similarity in float32 by no more than a radius
(`_approximate`). It decides whether a negative precedes a positive if both similarities are farther
apart than the radius. For every other pair, `_pair_similarities` computes the similarity in
float32, in the same way as that of the positive. So the ranks do not depend on the type of the
products, and exact ties stay ties.
"""

import collections
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from dmljax.retrieval import layout, tiles
from dmljax.retrieval.layout import QueryBlock
from dmljax.retrieval.rules import mask, precedes
from dmljax.retrieval.tiles import REPLICATED, SHARDED, Tile, Tiles

_HALF = jnp.finfo(jnp.bfloat16)
_PAIRS = 8192  # the fewest pairs that `_pair_similarities` computes at once
_OPEN = 8192  # the products are expected to leave one pair open of this many that they compare
_PAIR_BYTES = 1 << 29  # largest size of the vectors of these pairs, beyond `_PAIRS`
_SEGMENT = 128  # columns in which open pairs are counted together; divides the side of every tile
_TILES = 8  # tiles of the gallery in one program, which compares them with a block one by one
_SIMILARITIES = _TILES << 24  # most of one program: tiles of more than 4,096 rows are fewer
_QUEUED = 1  # programs whose open pairs wait on the devices, so that these never wait for the host


def filtered_counts(
    blocks: Mapping[int, QueryBlock],
    row_tiles: Tiles,
    column_tiles: Tiles,
    slot_groups: Int[np.ndarray, "m g"],
) -> dict[int, Int[np.ndarray, "n r"]]:
    """Counts the negatives ahead of each positive, as `counting.product_counts` does."""
    mesh = row_tiles.mesh
    screen_fn = tiles.on_mesh(mesh, _screen, *[SHARDED] * 3, REPLICATED)
    most = max(1, min(_TILES, _SIMILARITIES // column_tiles.side**2))
    together = -(-len(column_tiles) // -(-len(column_tiles) // most))
    sizes = _round_sizes(column_tiles, together)
    pairs_fn = tiles.on_mesh(mesh, _pair_similarities, *[SHARDED] * 4)
    add_fn = tiles.on_mesh(mesh, _add_pairs, *[SHARDED] * 5)
    thresholds, counts = {}, {}

    def start(b: int) -> tuple:
        """Starts to compute the similarities of the positives of block `b` on the devices."""
        queries, numbers, slots = blocks[b].positive_pairs(slot_groups)
        rows = row_tiles[b]
        finish_fn = _start_pairs(rows, column_tiles, pairs_fn, sizes, queries, slots)
        return b, rows, queries, numbers, finish_fn

    def prepared(indices: list[int]) -> Iterator[tuple[int, Tile]]:
        """Yields blocks with their thresholds. While one is used, the next one has started."""
        blocks_and_end: Iterator[Any] = itertools.chain(map(start, indices), [None])
        for (b, rows, queries, numbers, finish_fn), _ in itertools.pairwise(blocks_and_end):
            limits = layout.sorted_thresholds(blocks[b], queries, numbers, finish_fn())
            arrays = limits, np.zeros(limits.shape, np.int32)
            thresholds[b], counts[b] = tiles.put(arrays, mesh)
            yield b, rows

    waiting: collections.deque[tuple] = collections.deque()

    def settle() -> None:
        """Adds the open pairs of the program that waits longest."""
        b, rows, columns, is_open, total = waiting.popleft()
        first, end = 0, int(np.max(total))
        while first < end:
            size = _round_size(end - first, sizes)
            pick_fn = tiles.on_mesh(mesh, _pick(size), SHARDED, SHARDED, REPLICATED, REPLICATED)
            *vectors, row, where = pick_fn(is_open, rows, columns, np.int32(first))
            counts[b] = add_fn(counts[b], thresholds[b], pairs_fn(*vectors), row, where)
            first += size

    for block_indices in tiles.passes(len(row_tiles)):
        indices = [b for b in block_indices if b in blocks]
        ready: list[tuple[int, Tile]] = []
        for j in range(0, len(column_tiles) if indices else 0, together):
            parts = [column_tiles[i] for i in range(j, min(j + together, len(column_tiles)))]
            columns = _joined(parts, together * column_tiles.side)
            for b, rows in ready or prepared(indices):
                counts[b], is_open, total = screen_fn(counts[b], thresholds[b], rows, columns)
                waiting.append((b, rows, columns, is_open, total))
                if len(waiting) > _QUEUED:
                    settle()
                if j == 0:
                    ready.append((b, rows))
    while waiting:
        settle()
    return {b: np.asarray(counts[b], np.int64) for b in blocks}


@functools.cache
def keeps_radius(device: jax.Device) -> bool:
    """Returns whether this device computes similarities as near as `_approximate` says, by a trial.

    A compiler that leaves out a rounding, or multiplies less precisely than it is asked to, would
    change ranks without a word.
    """
    x = np.random.default_rng(0).normal(size=(256, 64)).astype(np.float32)
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    arrays = x, np.zeros(len(x), np.float32), np.zeros((len(x), 1), np.int32)
    rows = Tile(*jax.device_put(arrays, device))

    similarities, radius = jax.jit(lambda x: _approximate(_terms(x.vectors)[0], x, x))(rows)
    exact = x.astype(np.float64) @ x.T.astype(np.float64)
    return bool((np.abs(np.asarray(similarities) - exact) <= np.asarray(radius)).all())


def _start_pairs(
    rows: Tile,
    column_tiles: Tiles,
    pairs_fn: Callable,
    sizes: tuple[int, int],
    queries: Int[np.ndarray, "m"],
    slots: Int[np.ndarray, "m"],
) -> Callable[[], Float[np.ndarray, "m"]]:
    """Starts to compute the similarities of queries to slots; the result waits for them.

    Each device computes the similarities of the rows that it holds, and is sent only indices.
    """
    side, mesh = column_tiles.side, column_tiles.mesh
    devices = 1 if mesh is None else mesh.size
    gather_fn = tiles.on_mesh(mesh, _gather, SHARDED, REPLICATED, SHARDED, SHARDED)
    owners, own_rows = np.divmod(queries, len(rows.vectors) // devices)
    tile_numbers, own_columns = np.divmod(slots, side)
    started = []
    for j in np.unique(tile_numbers).tolist():  # each tile is asked for once or twice
        columns = column_tiles[j]
        by_device = [np.flatnonzero((tile_numbers == j) & (owners == d)) for d in range(devices)]
        most = max(map(len, by_device))
        size = _round_size(most, sizes)
        for first in range(0, most, size):
            indices = np.zeros((2, devices, size), np.int32)
            parts = [pairs[first : first + size] for pairs in by_device]
            for d, pairs in enumerate(parts):
                indices[:, d, : len(pairs)] = own_rows[pairs], own_columns[pairs]
            arguments = tiles.put(tuple(indices.reshape(2, -1)), mesh)
            started.append((parts, pairs_fn(*gather_fn(rows, columns, *arguments))))

    def finish() -> Float[np.ndarray, "m"]:
        results = np.empty(len(queries), np.float32)
        for parts, similarities in started:
            by_device = np.asarray(similarities).reshape(devices, -1)
            for pairs, values in zip(parts, by_device, strict=True):
                results[pairs] = values[: len(pairs)]
        return results

    return finish


@jax.jit
def _gather(
    rows: Tile, columns: Tile, row: Int[Array, "m"], column: Int[Array, "m"]
) -> tuple[Array, ...]:
    """Returns the vectors and the offsets of pairs, as `_pair_similarities` takes them."""
    return rows.vectors[row], columns.vectors[column], rows.offsets[row], columns.offsets[column]


@jax.jit
def _screen(
    counts: Int[Array, "b r"], thresholds: Float[Array, "b r"], rows: Tile, columns: Tile
) -> tuple[Int[Array, "b r"], Bool[Array, "t b n"], Int[Array, "1"]]:
    """Adds the pairs that the products decide. Returns the open pairs and their count, too."""
    limits = [t[:, None] for t in thresholds.T]
    row_terms, _ = _terms(rows.vectors)

    def add_part(counts, tile):
        similarities, radius = _approximate(row_terms, rows, tile)
        is_left_out = mask(rows.groups[:, None], tile.groups[None])
        similarities = jnp.where(is_left_out, -jnp.inf, similarities)
        is_open = jnp.zeros(similarities.shape, bool)
        for t in limits:
            is_open |= ~precedes(similarities - radius, t) & precedes(similarities + radius, t)
        # A compiler may compute the similarities again for the counts and round them otherwise.
        # So they are compared here without the radius, and what is open is decided once.
        is_open = jax.lax.optimization_barrier(is_open)
        ahead = [
            jnp.sum(precedes(similarities, t) & ~is_open, axis=1, dtype=jnp.int32) for t in limits
        ]
        return counts + jnp.stack(ahead, axis=1), is_open

    side = len(rows.offsets)
    parts = jax.tree.map(lambda a: a.reshape(-1, side, *a.shape[1:]), columns)
    counts, is_open = jax.lax.scan(add_part, counts, parts)
    return counts, is_open, jnp.sum(is_open, dtype=jnp.int32)[None]


def _terms(x: Float[Array, "n d"]) -> tuple[Array, Array]:
    """Returns vectors as the rows, and as the columns, of the product that approximates x'y.

    x is `high`, its value rounded to bfloat16, plus `low`, the rounded rest, plus an error of at
    most u^2 |x|. The product adds high high', high low' and low high'.
    """
    # Not x.astype(half).astype(x.dtype): XLA leaves out such a pair on GPUs, and `low` would be 0.
    high = jax.lax.reduce_precision(x, exponent_bits=_HALF.nexp, mantissa_bits=_HALF.nmant)
    high, low = high.astype(_HALF.dtype), (x - high).astype(_HALF.dtype)
    rows, columns = (high, high, low), (high, low, high)
    return jnp.concatenate(rows, axis=1), jnp.concatenate(columns, axis=1)


def _approximate(
    row_terms: Float[Array, "b k"], rows: Tile, columns: Tile
) -> tuple[Float[Array, "b n"], Float[Array, "b n"]]:
    """Returns approximate similarities of rows to columns, and an upper bound on their error.

    From the true product p of two vectors, the product of their terms differs by at most
    (3 + 2 u + u^2) u^2 |q||g|, with the unit roundoff u of bfloat16: low low' and the errors of
    both vectors are missing (Cauchy-Schwarz). Sums of k terms in float32 in any order differ by at
    most k 2^-24 |q||g|, and adding the offsets by a few 2^-24 of their size. Devices that add in
    bfloat16 products cut digits off instead of rounding them, so four times that is taken, for the
    k terms of the filter and the d terms of `_pair_similarities`.
    """
    column_terms = _terms(columns.vectors)[1]
    products = jnp.matmul(row_terms, column_terms.T, preferred_element_type=jnp.float32)
    similarities = products + (rows.offsets[:, None] + columns.offsets[None])
    row_norm, column_norm = (jnp.sqrt(jnp.sum(t.vectors**2, axis=1)) for t in (rows, columns))
    row_offset, column_offset = (
        jnp.where(jnp.isfinite(t.offsets), jnp.abs(t.offsets), 0) for t in (rows, columns)
    )
    u, step = float(_HALF.eps) / 2, 2.0**-24
    terms = row_terms.shape[1] + rows.vectors.shape[1]
    of_products = 1.01 * (3.1 * u * u + 4 * (terms + 32) * step)
    radius = of_products * row_norm[:, None] * column_norm[None]
    radius += 32 * step * (row_offset[:, None] + column_offset[None]) + 1e-37
    return similarities, radius


@functools.partial(jax.jit, static_argnums=1)
def _joined(parts: list[Tile], rows: int) -> Tile:
    """Joins the tiles to one of `rows` rows, with padding at the end."""
    vectors, offsets, groups = (jnp.concatenate(arrays) for arrays in zip(*parts, strict=True))
    more = rows - len(offsets)
    return Tile(
        jnp.pad(vectors, ((0, more), (0, 0))),
        jnp.pad(offsets, (0, more), constant_values=-jnp.inf),
        jnp.pad(groups, ((0, more), (0, 0)), constant_values=-1),
    )


def _round_sizes(columns: Tiles, together: int) -> tuple[int, int]:
    """Returns two buffer sizes for open pairs: the usual one, and a larger fallback.

    A round of each size is compiled once for a search.
    """
    most = _PAIR_BYTES // (2 * 4 * columns.width)  # two vectors of each pair
    few, many = (together * columns.side**2 // pairs for pairs in (_OPEN, 256))
    return max(_PAIRS, min(few, most)), max(_PAIRS, min(many, most))


def _round_size(pairs: int, sizes: tuple[int, int]) -> int:
    """Returns the buffer size of the next round, where `pairs` are left."""
    few, many = sizes
    return many if pairs > 2 * few else few


@functools.cache
def _pick(size: int) -> Callable:
    @jax.jit
    def pick(
        is_open: Bool[Array, "t b n"], rows: Tile, columns: Tile, start: Int[Array, ""]
    ) -> tuple[Array, ...]:
        """Returns the open pairs from index `start`: vectors, offsets, rows, validity."""
        _, side, width = is_open.shape
        segments = is_open.reshape(-1, _SEGMENT)
        counts = jnp.sum(segments, axis=1, dtype=jnp.int32)
        ends = jnp.cumsum(counts)
        starts = ends - counts
        numbers = start + jnp.arange(size, dtype=jnp.int32)
        # Each segment with a pair writes its index where its pairs begin; later ones are larger.
        first = jnp.maximum(starts - start, 0)
        first = jnp.where((counts > 0) & (ends > start), first, size)
        segment = jnp.zeros(size, jnp.int32).at[first].set(jnp.arange(len(ends)), mode="drop")
        segment = jax.lax.cummax(segment)
        ranks = jnp.cumsum(segments[segment], axis=1, dtype=jnp.int32)
        within = jnp.argmax(ranks > (numbers - starts[segment])[:, None], axis=1)
        # The index of a pair among all may not fit into 32 bits; its index in a segment does.
        line, position = jnp.divmod(segment, width // _SEGMENT)
        part, row = jnp.divmod(line, side)
        column = part * width + position * _SEGMENT + within
        return (*_gather(rows, columns, row, column), row, numbers < ends[-1])

    return pick


@jax.jit
def _pair_similarities(
    x: Float[Array, "m d"], y: Float[Array, "m d"], of_x: Float[Array, "m"], of_y: Float[Array, "m"]
) -> Float[Array, "m"]:
    """Returns x'y plus the offsets of each pair, adding the halves of the terms until one is left.

    Every program of this function gives the same bits, whatever the number of pairs. A compiler may
    join a product and the sum that takes it to one operation, which rounds once instead of twice,
    in one program and not in another; a condition between them, here a NaN, prevents that.
    """
    terms = jnp.where(jnp.isnan(of_x)[:, None], jnp.nan, x * y)
    width = 1 << (terms.shape[1] - 1).bit_length()
    terms = jnp.pad(terms, ((0, 0), (0, width - terms.shape[1])))
    while width > 1:
        width //= 2
        terms = terms[:, :width] + terms[:, width:]
    return terms[:, 0] + (of_x + of_y)


@jax.jit
def _add_pairs(
    counts: Int[Array, "b r"],
    thresholds: Float[Array, "b r"],
    similarities: Float[Array, "m"],
    row: Int[Array, "m"],
    where: Bool[Array, "m"],
) -> Int[Array, "b r"]:
    is_ahead = precedes(similarities[:, None], thresholds[row]) & where[:, None]
    return counts.at[row].add(is_ahead.astype(jnp.int32))
