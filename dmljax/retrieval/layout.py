"""Where the items of a gallery lie in its tiles, and which slots hold the positives of a query.

A slot is a position in the padded gallery. Items of one class lie in neighboring slots.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int


class Ranks(NamedTuple):
    """`ranks[i, j]` is the rank of the j-th best positive of query `queries[i]`; 0 is padding."""

    queries: Int[np.ndarray, "q"]
    ranks: Int[np.ndarray, "q r"]


class QueryBlock(NamedTuple):
    """A block of queries, and the slots of the gallery that hold the items of their classes."""

    items: Int[np.ndarray, "n"]  # -1 is padding
    starts: Int[np.ndarray, "n"]  # the first slot of the query's class
    sizes: Int[np.ndarray, "n"]  # items of the query's class in the gallery, 0 for padding
    positives: Int[np.ndarray, "n"]  # items of its class that the query does not leave out
    groups: Int[np.ndarray, "n"]  # the group that the query leaves out: itself at least
    is_counted: Bool[np.ndarray, "n"]  # whether the ranks are found by counting, not by sorting

    def rows(self, index: slice | np.ndarray) -> "QueryBlock":
        return QueryBlock(*(array[index] for array in self))


def class_slots(
    query_codes: Int[np.ndarray, "q"], gallery_codes: Int[np.ndarray, "n"], side: int
) -> tuple[Int[np.ndarray, "m"], Int[np.ndarray, "c"], Int[np.ndarray, "c"]]:
    """The item in each slot (-1 is padding), and each class's first slot and number of items.

    Small classes come first: a tile of queries then finds its positives in few tiles, and its
    queries have about as many positives each. Classes without a query come before all others.
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
    first_places = np.empty(classes, np.int64)  # of each class among the sorted items
    first_places[order] = np.cumsum(sizes[order]) - sizes[order]
    slots[starts[labels] + np.arange(len(items)) - first_places[labels]] = items
    return slots, starts, sizes


def count_positives(
    sizes: Int[np.ndarray, "c"],
    labels: tuple[Int[np.ndarray, "q"], Int[np.ndarray, "n"]],
    groups: tuple[Int[np.ndarray, "q"], Int[np.ndarray, "n"]],
) -> Int[np.ndarray, "q"]:
    """The number of positives of each query: items of its class, of `sizes`, in other groups."""
    base = 1 + max(array.max() for array in groups)
    query_keys, item_keys = (x * base + y for x, y in zip(labels, groups, strict=True))
    sorted_keys = np.sort(item_keys)
    ends = (np.searchsorted(sorted_keys, query_keys, side) for side in ("right", "left"))
    return sizes[labels[0]] - np.subtract(*ends)


def ranks_of(
    queries: Int[np.ndarray, "n"],
    positives: Int[np.ndarray, "n"],
    negatives_ahead: Int[np.ndarray, "n r"],
) -> Iterator[Ranks]:
    """Rank of the j-th positive = j + number of negatives ahead of it, for queries with positives.

    `positives` is the number of positives of each query, 0 for queries to leave out.
    """
    places = np.arange(1, negatives_ahead.shape[1] + 1)
    is_rank = places <= positives[:, None]
    rows = np.flatnonzero(is_rank[:, 0])
    yield Ranks(queries[rows], np.where(is_rank, negatives_ahead + places, 0)[rows])
