"""Ranks by sorting, on the host: for queries with many positives, where counting is slower."""

import concurrent.futures
from collections.abc import Callable, Iterator

import numpy as np
from jaxtyping import Int

from dmljax.files import cores
from dmljax.retrieval import tiles
from dmljax.retrieval.layout import QueryBlock, Ranks, ranks_of
from dmljax.retrieval.tiles import Tiles


def sort_ranks(
    block: QueryBlock,
    make_tiles: Callable[..., Tiles],
    column_tiles: Tiles,
    slot_groups: Int[np.ndarray, "m"],
) -> Iterator[Ranks]:
    """Ranks of all queries of `block`. `make_tiles(items, groups, side=...)` are their vectors.

    Uses one device: sorting takes most of the time. Threads of the host share a strip of rows.
    """
    side = column_tiles.side
    width = side * len(column_tiles)
    height = tiles.choose_side(len(block.items), side)
    while height > 8 and height * width > tiles.STRIP_SIZE:
        height //= 2
    items = tiles.pad_items(block.items, height)
    row_tiles = make_tiles(items, np.where(items < 0, -2, 0)[:, None], side=height)
    with concurrent.futures.ThreadPoolExecutor(cores.count()) as pool:
        for i in range(len(row_tiles)):
            queries = block.rows(slice(i * height, (i + 1) * height))
            strip = np.empty((height, width), row_tiles[i].vectors.dtype)
            for j in range(len(column_tiles)):
                columns = slice(j * side, (j + 1) * side)
                strip[:, columns] = tiles.similarities(row_tiles[i], column_tiles[j])
            negatives_ahead = np.zeros((len(queries.items), queries.positives.max()), np.int64)

            def sort_row(row: int, queries=queries, strip=strip, ahead=negatives_ahead) -> None:
                similarities = strip[row]
                start, end = queries.starts[row], queries.starts[row] + queries.sizes[row]
                similarities[slot_groups == queries.groups[row]] = -np.inf
                count = queries.positives[row]
                positives = np.sort(similarities[start:end])[::-1][:count]
                similarities[start:end] = -np.inf
                similarities.sort()
                ahead[row, :count] = width - np.searchsorted(similarities, positives)

            list(pool.map(sort_row, range(len(queries.items))))
            yield from ranks_of(queries.items, queries.positives, negatives_ahead)
