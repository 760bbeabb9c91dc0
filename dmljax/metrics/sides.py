"""The two sides of every search over pairs of items, checked, and their pairs in blocks."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int, Integer

from dmljax.retrieval import inputs, tiles
from dmljax.retrieval.inputs import Embeddings, Labels
from dmljax.retrieval.rules import mask, product
from dmljax.vectors import unit_vectors


class Side(NamedTuple):
    """The readable items of one side; `rows` are their indices in the input."""

    rows: Int[np.ndarray, "n"]
    vectors: Float[np.ndarray, "n d"]
    codes: Int[np.ndarray, "n"]  # labels as 0..c-1, the same on both sides
    groups: Int[np.ndarray, "n g"]  # of `retrieval.rules.mask`

    def take(self, order: Int[np.ndarray, "m"] | slice) -> "Side":
        return Side(*(array[order] for array in self))


class Sides(NamedTuple):
    """Queries and gallery. With `within` both are the same set; no item pairs with itself."""

    queries: Side
    gallery: Side
    within: bool
    classes: np.ndarray  # the label of each code


def sides(
    embeddings: Embeddings,
    labels: Labels,
    gallery: Embeddings | None = None,
    gallery_labels: Labels | None = None,
    groups: Integer[np.ndarray, "q"] | None = None,
    gallery_groups: Integer[np.ndarray, "n"] | None = None,
    *,
    prepare_fn: Callable[[np.ndarray], np.ndarray] = unit_vectors,
) -> Sides:
    """Returns the sides of a search, their vectors prepared by `prepare_fn`.

    Rows with a NaN or an infinity, images that could not be read, are left out.
    """
    arrays = [np.asarray(embeddings)] + ([] if gallery is None else [np.asarray(gallery)])
    inputs.check_shapes(arrays[0], arrays[-1])
    counts = inputs.counts_of(embeddings, gallery)
    codes = inputs.integer_labels(labels, gallery_labels, counts)
    exclusion = inputs.exclusion_codes(groups, gallery_groups, counts)
    all_labels = [np.asarray(x) for x in (labels, gallery_labels) if x is not None]
    checked = []
    for vectors, side_codes, side_groups in zip(arrays, codes, exclusion, strict=False):
        rows = np.flatnonzero(np.isfinite(vectors).all(axis=1))
        checked.append(Side(rows, prepare_fn(vectors[rows]), side_codes[rows], side_groups[rows]))
    classes = np.unique(np.concatenate(all_labels))
    return Sides(checked[0], checked[-1], gallery is None, classes)


def counted(rows: Side, columns: Side) -> Bool[np.ndarray, "r m"]:
    """Returns the pairs of these queries and items that the protocol counts."""
    return ~mask(rows.groups[:, None], columns.groups[None])


def blocks(
    queries: Side, gallery: Side, tile: int, *, upper: bool = False
) -> Iterator[tuple[Side, Side, Float[np.ndarray, "r m"]]]:
    """Yields blocks of queries and items with all scalar products of their vectors.

    With `upper`, for a gallery of the queries, it skips the blocks below the diagonal.
    """
    if tile < 1:
        raise ValueError(f"`tile` must be at least 1, got {tile}")
    size = tiles.choose_side(max(len(queries.rows), len(gallery.rows), 1), tile)
    make_tiles = partial(tiles.Tiles, side=size, similarity_fn=product)
    sides = make_tiles(queries.vectors), make_tiles(gallery.vectors)
    for i, row_tile, j, column_tile in tiles.sweep(*sides, {}, is_upper=upper):
        rows, columns = (
            side.take(slice(b * size, (b + 1) * size)) for side, b in ((queries, i), (gallery, j))
        )
        products = np.asarray(tiles.similarities(row_tile, column_tile))
        yield rows, columns, products[: len(rows.rows), : len(columns.rows)]


def turns(labels: Integer[np.ndarray, "n"]) -> Int[np.ndarray, "n"]:
    """Counts the items before each item that have its label."""
    order = np.argsort(labels, kind="stable")
    counts = np.empty(len(labels), np.int64)
    counts[order] = np.arange(len(labels)) - np.searchsorted(labels[order], labels[order])
    return counts


def in_turn(order: Int[np.ndarray, "m"], labels: np.ndarray) -> Int[np.ndarray, "m"]:
    """Returns the items of `order`: the first one of every class, then the second of each."""
    return order[np.lexsort((labels[order], turns(labels[order])))]
