"""Ranks by counting, on the devices: how many negatives are at least as similar as a positive?

The similarities of a query's positives are thresholds. Every tile of similarities is compared with
them and dropped, so no row of similarities is ever complete in memory.
"""

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from dmljax.retrieval import sharding, tiles
from dmljax.retrieval.layout import QueryBlock, Ranks, ranks_of
from dmljax.retrieval.sharding import REPLICATED, SHARDED
from dmljax.retrieval.tiles import Tile, Tiles

_CHUNK = 8  # thresholds of a query that one pass over a tile counts
_QUEUED = 4  # tiles of similarities that may wait for the devices, each with its memory


def count_ranks(
    blocks: list[QueryBlock],
    row_tiles: Tiles,
    column_tiles: Tiles,
    slot_groups: Int[np.ndarray, "m"],
    *,
    mirrored: bool,
) -> Iterator[Ranks]:
    """Ranks of the queries of `blocks` with `is_counted`. `slot_groups` are of the gallery's slots.

    With `mirrored`, queries and gallery are the same items. Then a product above the diagonal is
    computed once, and counted both along its rows and along its columns.
    """
    mesh, side = row_tiles.mesh, column_tiles.side
    tiles_per_block = row_tiles.side // side  # one for each device
    negatives_fn = sharding.on_mesh(mesh, tiles.negatives, SHARDED, REPLICATED)
    count_rows = sharding.on_mesh(mesh, _count_rows, SHARDED, SHARDED, SHARDED)
    count_columns = sharding.on_mesh(mesh, _count_columns, SHARDED, SHARDED, REPLICATED)
    counted = {b: block for b, block in enumerate(blocks) if block.is_counted.any()}
    limits = {}
    for b, block in counted.items():
        queries, places, slots = positive_pairs(block, slot_groups)
        similarities = _of_products(row_tiles[b], mesh, column_tiles, queries, slots)
        limits[b] = thresholds(block, queries, places, similarities)

    def chunks(b: int, rows: slice = slice(None), spec: PartitionSpec = SHARDED) -> list[Array]:
        starts = range(0, limits[b].shape[1], _CHUNK)
        return sharding.put([limits[b][rows, i : i + _CHUNK] for i in starts], mesh, spec)

    def zeros(b: int) -> list[Array]:
        counts = np.zeros((row_tiles.side, _CHUNK), np.int32)
        return sharding.put([counts] * (limits[b].shape[1] // _CHUNK), mesh)

    # By block of queries as rows, and by tile of queries as columns.
    row_limits = {b: chunks(b) for b in counted}
    row_counts = {b: zeros(b) for b in counted}
    column_limits: dict[int, list[Array]] = {}
    column_counts: dict[int, list[Array]] = {}
    if mirrored:
        for b, block in counted.items():
            for t in range(tiles_per_block):
                rows = slice(t * side, (t + 1) * side)
                if block.is_counted[rows].any():
                    j = b * tiles_per_block + t
                    alone = tiles_per_block == 1  # then the block's rows are the tile's columns
                    column_limits[j] = row_limits[b] if alone else chunks(b, rows, REPLICATED)
                    column_counts[j] = zeros(b)
    queued = 0
    for first in range(0, len(blocks), tiles.BLOCKS_PER_PASS):
        pass_blocks = range(first, min(first + tiles.BLOCKS_PER_PASS, len(blocks)))
        rows_of: dict[int, Tile] = {}
        for j in range(first * tiles_per_block if mirrored else 0, len(column_tiles)):
            columns = None
            for b in pass_blocks:
                above = mirrored and j >= (b + 1) * tiles_per_block and j in column_counts
                below = mirrored and j < b * tiles_per_block  # its mirror image is counted
                if below or not (above or b in counted):
                    continue
                columns = column_tiles[j] if columns is None else columns
                rows_of[b] = rows_of.get(b) or row_tiles[b]
                negatives = negatives_fn(rows_of[b], columns)
                if b in counted:
                    row_counts[b] = _count(count_rows, row_counts[b], negatives, row_limits[b])
                if above:
                    column_counts[j] = _count(
                        count_columns, column_counts[j], negatives, column_limits[j]
                    )
                queued += 1
                if queued % _QUEUED == 0:
                    jax.block_until_ready((row_counts.get(b), column_counts.get(j)))
    for b, block in counted.items():
        negatives_ahead = np.concatenate([np.asarray(c) for c in row_counts[b]], axis=1)
        for t in range(tiles_per_block):
            if (j := b * tiles_per_block + t) in column_counts:
                counts = np.concatenate([np.asarray(c) for c in column_counts[j]], axis=1)
                # Each device has counted along the columns of its own rows.
                counts = counts.reshape(-1, side, counts.shape[1]).sum(axis=0)
                negatives_ahead[t * side : (t + 1) * side] += counts
        counts = np.where(block.is_counted, block.positives, 0)
        yield from ranks_of(block.items, counts, negatives_ahead)


def is_symmetric(tile: Tile, side: int) -> bool:
    """Whether this backend's product gives x'y and y'x the same bits, tried on `side` rows.

    Some backends do not, and a mirrored product would then break exact ties.
    """
    tile = jax.tree.map(lambda a: np.asarray(a)[:side], tile)
    tile = sharding.put(tile, None)
    x = tiles.similarities(tile, tile)
    return bool(jnp.all(x == x.T))


def positive_pairs(
    block: QueryBlock, slot_groups: Int[np.ndarray, "n"]
) -> tuple[Int[np.ndarray, "m"], Int[np.ndarray, "m"], Int[np.ndarray, "m"]]:
    """The queries that are counted, with each item of their class: query, its number, its slot."""
    places = np.arange(block.sizes[block.is_counted].max())
    slots = block.starts[:, None] + places
    is_positive = block.is_counted[:, None] & (places < block.sizes[:, None])
    is_positive &= slot_groups[slots % len(slot_groups)] != block.groups[:, None]
    queries, places = np.nonzero(is_positive)
    return queries, places, slots[queries, places]


def thresholds(
    block: QueryBlock,
    queries: Int[np.ndarray, "m"],
    places: Int[np.ndarray, "m"],
    similarities: Float[np.ndarray, "m"],
) -> Float[np.ndarray, "n r"]:
    """Similarities of `positive_pairs` by query, best first, padded with inf to whole chunks."""
    most = block.positives[block.is_counted].max()
    shape = len(block.items), block.sizes[block.is_counted].max()
    limits = np.full(shape, np.inf, similarities.dtype)
    limits[queries, places] = -similarities
    limits = -np.sort(limits, axis=1)[:, :most]
    limits[np.isneginf(limits)] = np.inf
    return np.pad(limits, ((0, 0), (0, -most % _CHUNK)), constant_values=np.inf)


def _of_products(
    rows: Tile,
    mesh: Mesh | None,
    column_tiles: Tiles,
    queries: Int[np.ndarray, "m"],
    slots: Int[np.ndarray, "m"],
) -> Float[np.ndarray, "m"]:
    """Similarities of queries of the block `rows` to slots of the gallery.

    They are taken from the products in which negatives are counted. Another kernel might round
    differently, and a negative equal to a positive would not be tied with it.
    """
    side = column_tiles.side
    similarities_fn = sharding.on_mesh(mesh, tiles.similarities, SHARDED, REPLICATED)
    results = np.empty(len(queries), rows.vectors.dtype)
    order = np.argsort(slots // side, kind="stable")
    tile_numbers, starts = np.unique(slots[order] // side, return_index=True)
    for j, pairs in zip(tile_numbers, np.split(order, starts[1:]), strict=True):
        x = np.asarray(similarities_fn(rows, column_tiles[int(j)]))
        results[pairs] = x[queries[pairs], slots[pairs] - j * side]
    return results


def _count(
    kernel: Callable, counts: list[Array], negatives: Array, thresholds: list[Array]
) -> list[Array]:
    """Adds a tile to the counts of every chunk of thresholds."""
    return [kernel(c, negatives, t) for c, t in zip(counts, thresholds, strict=True)]


# Two kernels. On CPUs, XLA's reductions along rows and columns run element by element and cost more
# than the product before them. So a tile is folded into slices that are added as whole vectors, and
# four counts share a word: only the short sums at the end are reductions.


@jax.jit
def _count_rows(
    counts: Int[Array, "b r"], negatives: Float[Array, "b n"], thresholds: Float[Array, "b r"]
) -> Int[Array, "b r"]:
    """Adds, for every row, how many of its similarities reach each threshold."""
    slices = jnp.split(negatives, tiles.SLICES, axis=1)
    words = _pack_counts(slices, [thresholds[:, j, None] for j in range(_CHUNK)])
    return counts + _sum_counts(words, axis=3)


@jax.jit
def _count_columns(
    counts: Int[Array, "n r"], negatives: Float[Array, "b n"], thresholds: Float[Array, "n r"]
) -> Int[Array, "n r"]:
    """The same for every column."""
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
                reached = similarities >= thresholds[first + byte]
                word += jnp.where(reached, jnp.uint32(1 << 8 * byte), jnp.uint32(0))
        words.append(word)
    return jnp.stack(words)


def _sum_counts(words: Array, *, axis: int) -> Int[Array, "b r"]:
    """The bytes of `words`, summed along `axis`: one column for each threshold."""
    counts = jnp.stack([(words >> 8 * byte) & 255 for byte in range(4)], axis=1)  # [2 4 ...]
    return jnp.sum(counts.astype(jnp.int32), axis=axis).reshape(_CHUNK, -1).T
