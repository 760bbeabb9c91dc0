"""Ranks by counting, on the devices: how many negatives are at least as similar as a positive?

The similarities of a query's positives are thresholds. Every tile of similarities is compared with
them and dropped, so no row of similarities is ever complete in memory. `filtering` compares most
pairs in bfloat16 first.
"""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dmljax.retrieval import layout, tiles
from dmljax.retrieval.layout import CHUNK, QueryBlock
from dmljax.retrieval.rules import precedes
from dmljax.retrieval.tiles import REPLICATED, SHARDED, Tile, Tiles

_QUEUED = 4  # tiles of similarities that may wait for the devices, each with its memory


def product_counts(
    blocks: Mapping[int, QueryBlock],
    row_tiles: Tiles,
    column_tiles: Tiles,
    slot_groups: Int[np.ndarray, "m g"],
) -> dict[int, Int[np.ndarray, "n r"]]:
    """Counts the negatives ahead of each positive of the queries of some blocks.

    Products are in full precision. `slot_groups` are of the gallery's slots. If the tiles of rows
    and columns are the same, a product above the diagonal is computed once, and counted both along
    its rows and along its columns.
    """
    is_mirrored = row_tiles is column_tiles and is_symmetric(row_tiles[0])
    mesh = row_tiles.mesh
    negatives_fn = tiles.on_mesh(mesh, tiles.negatives, SHARDED, REPLICATED)
    count_rows = tiles.on_mesh(mesh, _count_rows, SHARDED, SHARDED, SHARDED)
    thresholds, counts = {}, {}
    for b, block in blocks.items():
        queries, numbers, slots = block.positive_pairs(slot_groups)
        similarities = _of_products(row_tiles[b], column_tiles, queries, slots)
        limits = layout.sorted_thresholds(block, queries, numbers, similarities)
        chunks = np.split(limits, limits.shape[1] // CHUNK, axis=1)
        zeros = np.zeros((row_tiles.side, CHUNK), np.int32)
        thresholds[b], counts[b] = tiles.put((chunks, [zeros] * len(chunks)), mesh)
    queued = 0
    for indices in tiles.passes(len(row_tiles)):
        rows_of: dict[int, Tile] = {}
        for j in range(indices[0] if is_mirrored else 0, len(column_tiles)):
            columns = None
            for b in indices:
                is_above = is_mirrored and j > b and j in blocks
                is_below = is_mirrored and j < b  # its mirror image is counted
                if is_below or not (is_above or b in blocks):
                    continue
                columns = column_tiles[j] if columns is None else columns
                rows_of[b] = rows_of.get(b) or row_tiles[b]
                negatives = negatives_fn(rows_of[b], columns)
                if b in blocks:
                    counts[b] = _add(count_rows, counts[b], negatives, thresholds[b])
                if is_above:
                    counts[j] = _add(_count_columns, counts[j], negatives, thresholds[j])
                queued += 1
                if queued % _QUEUED == 0:
                    jax.block_until_ready((counts.get(b), counts.get(j)))
    return {b: np.concatenate([np.asarray(c) for c in counts[b]], axis=1) for b in blocks}


def is_symmetric(tile: Tile) -> bool:
    """Returns whether this backend's product gives x'y and y'x the same bits, tried on a tile.

    Some backends do not, and a mirrored product would then break exact ties.
    """
    x = tiles.similarities(tile, tile)
    return bool(jnp.all(x == x.T))


def _of_products(
    rows: Tile, column_tiles: Tiles, queries: Int[np.ndarray, "m"], slots: Int[np.ndarray, "m"]
) -> Float[np.ndarray, "m"]:
    """Returns the similarities of queries of the block `rows` to slots of the gallery.

    They are taken from the products in which negatives are counted. Another kernel might round
    differently, and a negative equal to a positive would not be tied with it.
    """
    side = column_tiles.side
    similarities_fn = tiles.on_mesh(column_tiles.mesh, tiles.similarities, SHARDED, REPLICATED)
    results = np.empty(len(queries), rows.vectors.dtype)
    order = np.argsort(slots // side, kind="stable")
    tile_numbers, starts = np.unique(slots[order] // side, return_index=True)
    for j, pairs in zip(tile_numbers, np.split(order, starts[1:]), strict=True):
        x = np.asarray(similarities_fn(rows, column_tiles[int(j)]))
        results[pairs] = x[queries[pairs], slots[pairs] - j * side]
    return results


def _add(
    kernel: Callable, counts: list[Array], negatives: Array, thresholds: list[Array]
) -> list[Array]:
    """Adds a tile to the counts of every chunk of thresholds."""
    return [kernel(c, negatives, t) for c, t in zip(counts, thresholds, strict=True)]


# On CPUs, XLA's reductions along rows and columns run element by element and cost more than the
# product before them. So a tile is folded into slices that are added as whole vectors, and four
# counts share a word: only the short sums at the end are reductions.


@jax.jit
def _count_rows(
    counts: Int[Array, "b r"], negatives: Float[Array, "b n"], thresholds: Float[Array, "b r"]
) -> Int[Array, "b r"]:
    """Adds, for every row, how many of its similarities precede each threshold."""
    slices = jnp.split(negatives, tiles.SLICES, axis=1)
    words = _pack_counts(slices, [thresholds[:, j, None] for j in range(CHUNK)])
    return counts + _sum_counts(words, axis=3)


@jax.jit
def _count_columns(
    counts: Int[Array, "n r"], negatives: Float[Array, "b n"], thresholds: Float[Array, "n r"]
) -> Int[Array, "n r"]:
    """Adds the same for every column."""
    slices = jnp.split(negatives, tiles.SLICES, axis=0)
    words = _pack_counts(slices, [thresholds.T[j, None] for j in range(CHUNK)])
    return counts + _sum_counts(words, axis=2)


def _pack_counts(slices: list[Array], thresholds: list[Array]) -> Array:
    """Counts over the slices, four thresholds to a word: [2 ...]. A byte is at most `SLICES`."""
    words = []
    for first in range(0, CHUNK, 4):
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
    return jnp.sum(counts.astype(jnp.int32), axis=axis).reshape(CHUNK, -1).T
