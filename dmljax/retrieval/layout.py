"""The slots of a gallery in its tiles, and the slots that hold the positives of a query.

A slot is an index into the padded gallery. Items of one class lie in neighboring slots.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from dmljax.retrieval.rules import mask
from dmljax.retrieval.tiles import Tiles

CHUNK = 8  # thresholds of a query that one pass over a tile counts
_PAIRS = 1 << 22  # pairs of a query and an item of its class in memory at once


class Ranks(NamedTuple):
    """`ranks[i, j]` is the rank of the j-th best positive of query `queries[i]`; 0 is padding."""

    queries: Int[np.ndarray, "q"]
    ranks: Int[np.ndarray, "q r"]


class QueryBlock(NamedTuple):
    """A block of queries, and the slots of the gallery that hold the items of their classes."""

    items: Int[np.ndarray, "n"]  # -1 is padding
    starts: Int[np.ndarray, "n"]  # the first slot of the query's class
    sizes: Int[np.ndarray, "n"]  # items of the query's class in the gallery, 0 for padding
    groups: Int[np.ndarray, "n g"]  # the groups that the query leaves out
    positives: Int[np.ndarray, "n"]  # the count of its positives
    is_counted: Bool[np.ndarray, "n"]  # whether its ranks are counted, not sorted

    def rows(self, index: slice | np.ndarray) -> "QueryBlock":
        return QueryBlock(*(array[index] for array in self))


class Problem(NamedTuple):
    """Blocks of queries by index, and the gallery; `blocks` holds those with counted queries."""

    blocks: Mapping[int, QueryBlock]
    row_tiles: Tiles
    column_tiles: Tiles
    slot_groups: Int[np.ndarray, "m g"]

    def positive_pairs(self, b: int) -> tuple[Int[np.ndarray, "m"], ...]:
        """Returns the positives of the queries of block `b`."""
        return positive_pairs(self.blocks[b], self.slot_groups)


def class_slots(
    query_codes: Int[np.ndarray, "q"], gallery_codes: Int[np.ndarray, "n"], side: int
) -> tuple[Int[np.ndarray, "m"], Int[np.ndarray, "c"], Int[np.ndarray, "c"]]:
    """Returns the item in each slot (-1 is padding), and each class's first slot and item count.

    Small classes come first: a tile of queries then finds its positives in few tiles, and its
    queries have similar counts of positives. Classes without a query come before all others.
    """
    classes = max(query_codes.max(), gallery_codes.max()) + 1
    sizes = np.bincount(gallery_codes, minlength=classes)
    has_query = np.bincount(query_codes, minlength=classes) > 0
    order = np.lexsort((np.arange(classes), sizes, has_query))
    starts = np.zeros(classes, np.int64)
    end = 0
    for label in order:
        size = int(sizes[label])
        if end % side + size > side >= size:  # a class that fits into one tile is not cut
            end += -end % side
        starts[label] = end
        end += size
    slots = np.full(end + -end % side, -1)
    items = np.argsort(starts[gallery_codes], kind="stable")
    labels = gallery_codes[items]
    firsts = np.empty(classes, np.int64)  # index of each class among the sorted items
    firsts[order] = np.cumsum(sizes[order]) - sizes[order]
    slots[starts[labels] + np.arange(len(items)) - firsts[labels]] = items
    return slots, starts, sizes


def positive_pairs(
    block: QueryBlock, slot_groups: Int[np.ndarray, "n g"]
) -> tuple[Int[np.ndarray, "m"], Int[np.ndarray, "m"], Int[np.ndarray, "m"]]:
    """Returns the positives of the queries: the query, the number within its class, the slot."""
    numbers = np.arange(block.sizes.max(initial=0))
    queries, numbers = np.nonzero(numbers < block.sizes[:, None])
    slots = block.starts[queries] + numbers
    is_positive = ~mask(block.groups[queries], slot_groups[slots])
    return queries[is_positive], numbers[is_positive], slots[is_positive]


def count_positives(block: QueryBlock, slot_groups: Int[np.ndarray, "n g"]) -> Int[np.ndarray, "q"]:
    """Counts the positives of each query."""
    height = max(1, _PAIRS // max(1, block.sizes.max(initial=0)))
    counts = [np.zeros(0, np.int64)]
    for first in range(0, len(block.items), height):
        rows = block.rows(slice(first, first + height))
        queries, _, _ = positive_pairs(rows, slot_groups)
        counts.append(np.bincount(queries, minlength=len(rows.items)))
    return np.concatenate(counts)


def sorted_thresholds(
    block: QueryBlock,
    queries: Int[np.ndarray, "m"],
    numbers: Int[np.ndarray, "m"],
    similarities: Float[np.ndarray, "m"],
) -> Float[np.ndarray, "n r"]:
    """Returns similarities of `positive_pairs` by query, best first, padded with inf to chunks."""
    most = block.positives.max()
    thresholds = np.full((len(block.items), numbers.max() + 1), np.inf, similarities.dtype)
    thresholds[queries, numbers] = -similarities
    thresholds = -np.sort(thresholds, axis=1)[:, :most]
    thresholds[np.isneginf(thresholds)] = np.inf
    return np.pad(thresholds, ((0, 0), (0, -most % CHUNK)), constant_values=np.inf)


def ranks_of(
    queries: Int[np.ndarray, "n"],
    positives: Int[np.ndarray, "n"],
    negatives_ahead: Int[np.ndarray, "n r"],
) -> Iterator[Ranks]:
    """Yields rank_j = j + count of negatives ahead, for queries with positives.

    `positives` counts the positives of each query, 0 for queries to leave out.
    """
    numbers = np.arange(1, negatives_ahead.shape[1] + 1)
    is_rank = numbers <= positives[:, None]
    rows = np.flatnonzero(is_rank[:, 0])
    yield Ranks(queries[rows], np.where(is_rank, negatives_ahead + numbers, 0)[rows])
