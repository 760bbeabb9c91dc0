"""The slots of a gallery in its tiles, and the slots that hold the positives of a query.

A slot is an index into the padded gallery. Items of one class lie in neighboring slots.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from dmljax.retrieval.rules import mask

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

    def rows(self, index: slice | np.ndarray) -> "QueryBlock":
        return QueryBlock(*(array[index] for array in self))

    def keep(self, where: Bool[np.ndarray, "n"]) -> "QueryBlock":
        """Returns the same rows, in which the other queries have no positives."""
        sizes, positives = (np.where(where, x, 0) for x in (self.sizes, self.positives))
        return self._replace(sizes=sizes, positives=positives)

    def positive_pairs(
        self, slot_groups: Int[np.ndarray, "m g"]
    ) -> tuple[Int[np.ndarray, "r"], Int[np.ndarray, "r"], Int[np.ndarray, "r"]]:
        """Returns all positives: the query, the number within its class, the slot."""
        numbers = np.arange(self.sizes.max(initial=0))
        queries, numbers = np.nonzero(numbers < self.sizes[:, None])
        slots = self.starts[queries] + numbers
        is_positive = ~mask(self.groups[queries], slot_groups[slots])
        return queries[is_positive], numbers[is_positive], slots[is_positive]

    def ranks(self, negatives_ahead: Int[np.ndarray, "n r"]) -> Ranks:
        """Returns rank_j = j + count of negatives ahead, of the queries with positives."""
        numbers = np.arange(1, negatives_ahead.shape[1] + 1)
        is_rank = numbers <= self.positives[:, None]
        rows = np.flatnonzero(self.positives)
        return Ranks(self.items[rows], np.where(is_rank, negatives_ahead + numbers, 0)[rows])


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


def query_block(
    items: Int[np.ndarray, "n"],
    codes: Int[np.ndarray, "q"],
    groups: Int[np.ndarray, "q g"],
    starts: Int[np.ndarray, "c"],
    sizes: Int[np.ndarray, "c"],
    slot_groups: Int[np.ndarray, "m g"],
) -> QueryBlock:
    """Returns the queries `items` (-1 is padding) with their counts of positives."""
    sizes = np.where(items < 0, 0, sizes[codes[items]])
    block = QueryBlock(items, starts[codes[items]], sizes, groups[items], sizes)
    height = max(1, _PAIRS // max(1, sizes.max(initial=0)))
    counts = [np.zeros(0, np.int64)]
    for first in range(0, len(items), height):
        part = block.rows(slice(first, first + height))
        queries, _, _ = part.positive_pairs(slot_groups)
        counts.append(np.bincount(queries, minlength=len(part.items)))
    return block._replace(positives=np.concatenate(counts))


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
