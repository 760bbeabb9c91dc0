"""The neighbors of every query, from which most of the diagnosis follows."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, Integer

from dmljax import retrieval
from dmljax.metrics.sides import Sides, counted, sides
from dmljax.retrieval import SimilarityFn, rules
from dmljax.retrieval.inputs import Embeddings, Labels

__all__ = ["Neighborhoods", "neighborhoods"]

_BLOCK = 1 << 22  # similarities of one class in memory at once


class Neighborhoods(NamedTuple):
    """The neighbors of each query in the gallery; -1 and NaN where there is none.

    `nearest` are the k nearest items, best first, with their similarities. `own` is
    the nearest item of the query's class, `other` the nearest of another class. `positives` is the
    count of items of the query's class. An unreadable query has neither neighbors nor positives.
    """

    nearest: Int[np.ndarray, "q k"]
    similarities: Float[np.ndarray, "q k"]
    own: Int[np.ndarray, "q"]
    own_similarity: Float[np.ndarray, "q"]
    other: Int[np.ndarray, "q"]
    other_similarity: Float[np.ndarray, "q"]
    positives: Int[np.ndarray, "q"]


def neighborhoods(
    embeddings: Embeddings,
    labels: Labels,
    *,
    gallery: Embeddings | None = None,
    gallery_labels: Labels | None = None,
    groups: Integer[np.ndarray, "q"] | None = None,
    gallery_groups: Integer[np.ndarray, "n"] | None = None,
    k: int = 10,
    similarity_fn: SimilarityFn = retrieval.cosine,
    tile: int | None = None,
    devices: Sequence[Any] | None = None,
) -> Neighborhoods:
    """Finds the k nearest items of every query, the nearest of its class and that of another.

    Items of the query's group (not -1) are ignored, and so are rows that hold a NaN. `gallery`,
    `similarity_fn`, `tile` and `devices` are as in `dmljax.retrieval`; the functions that
    compare similarities with `similarity_histograms` need the cosine. There are two searches at
    most: the nearest item of another class is searched where the k nearest hold none.

    >>> embeddings = np.array([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [1.0, 0.2]])
    >>> near = metrics.neighborhoods(embeddings, np.array([0, 1, 1, 0]), k=1)
    >>> near.nearest[:, 0].tolist(), near.own.tolist(), near.other.tolist()
    ([1, 3, 3, 1], [3, 2, 1, 0], [1, 3, 3, 1])
    """
    if k < 1:
        raise ValueError(f"k={k} must be at least 1")
    search = sides(
        embeddings,
        labels,
        gallery,
        gallery_labels,
        groups,
        gallery_groups,
        prepare_fn=lambda x: x.astype(np.float32),
    )
    queries, available = search.queries, len(search.gallery.rows) - search.within
    positives = np.zeros(len(np.asarray(labels)), np.int64)
    nothing = np.zeros((len(queries.rows), 0), np.int64)
    nearest: tuple[np.ndarray, np.ndarray] = (nothing, nothing)
    own = other = nearest
    if len(queries.rows) and available > 0:
        nearest_fn = partial(
            retrieval.nearest, similarity_fn=similarity_fn, tile=tile, devices=devices
        )
        nearest = counted_nearest(search, nearest_fn, k=min(k, available))
        other = _nearest_other(search, nearest_fn, *nearest)
        own, positives[queries.rows] = _nearest_own(search, similarity_fn)

    def expanded(
        indices: np.ndarray, values: np.ndarray, width: int
    ) -> tuple[Int[np.ndarray, "q w"], Float[np.ndarray, "q w"]]:
        """Returns items and similarities for all rows of the input, padded to `width` columns."""
        items, is_item = np.full((len(positives), width), -1), indices >= 0
        similarities = np.full(items.shape, np.nan, np.float32)
        columns = slice(0, indices.shape[1])
        items[queries.rows, columns] = np.where(is_item, search.gallery.rows[indices], -1)
        similarities[queries.rows, columns] = np.where(is_item, values, np.nan)
        return items, similarities

    (own_items, own_values), (others, other_values) = expanded(*own, 1), expanded(*other, 1)
    of_class = own_items[:, 0], own_values[:, 0], others[:, 0], other_values[:, 0]
    return Neighborhoods(*expanded(*nearest, k), *of_class, positives)


def counted_nearest(
    search: Sides, nearest_fn: Callable, *, k: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the k nearest items of every query among those that the protocol counts."""
    queries, items = search.queries, search.gallery
    if search.within:
        return nearest_fn(queries.vectors, k=k, groups=queries.groups)
    groups = {"groups": queries.groups, "gallery_groups": items.groups}
    return nearest_fn(queries.vectors, items.vectors, k=k, **groups)


def _nearest_other(
    search: Sides, nearest_fn: Callable, indices: np.ndarray, similarities: np.ndarray
) -> tuple[Int[np.ndarray, "q 1"], Float[np.ndarray, "q 1"]]:
    """Finds the nearest item of another class among the nearest items, or else by a search."""
    queries, items = search.queries, search.gallery
    is_other = (indices >= 0) & (items.codes[indices] != queries.codes[:, None])
    first = np.argmax(is_other, axis=1)[:, None]
    others = np.take_along_axis(indices, first, axis=1)
    other_similarities = np.take_along_axis(similarities, first, axis=1)
    others[~is_other.any(axis=1)] = -1
    is_complete = (indices[:, -1] < 0) | (indices.shape[1] >= len(items.rows) - search.within)
    rows = np.flatnonzero((others[:, 0] < 0) & ~is_complete)
    if len(rows):
        # The query itself, an item of the gallery, is of its class, and so it is left out.
        others[rows], other_similarities[rows] = nearest_fn(
            queries.vectors[rows],
            items.vectors,
            k=1,
            groups=rules.leave_out_classes(queries.groups, queries.codes)[rows],
            gallery_groups=rules.leave_out_classes(items.groups, items.codes),
        )
    return others, other_similarities


def _nearest_own(
    search: Sides, similarity_fn: SimilarityFn
) -> tuple[tuple[np.ndarray, np.ndarray], Int[np.ndarray, "q"]]:
    """Finds the nearest item of the query's class and its similarity, and counts such items."""
    queries, items = search.queries, search.gallery
    center = jnp.asarray(items.vectors.mean(axis=0))
    vectors, offsets = map(np.asarray, similarity_fn(jnp.asarray(queries.vectors), center))
    others, other_offsets = vectors, offsets
    if not search.within:
        others, other_offsets = map(np.asarray, similarity_fn(jnp.asarray(items.vectors), center))
    indices = np.full((len(queries.rows), 1), -1)
    similarities = np.full((len(queries.rows), 1), np.nan, np.float32)
    positives = np.zeros(len(queries.rows), np.int64)
    for rows, columns in class_blocks(queries.codes, items.codes):
        products = vectors[rows] @ others[columns].T
        products += offsets[rows, None] + other_offsets[columns]
        counts = counted(queries.take(rows), items.take(columns))
        products[~counts] = -np.inf
        best = np.argmax(products, axis=1)
        indices[rows, 0] = np.where(counts.any(axis=1), columns[best], -1)
        similarities[rows, 0] = products[np.arange(len(rows)), best]
        positives[rows] = counts.sum(axis=1)
    return (indices, similarities), positives


def class_blocks(
    query_codes: Int[np.ndarray, "q"], item_codes: Int[np.ndarray, "n"]
) -> Iterator[tuple[Int[np.ndarray, "r"], Int[np.ndarray, "m"]]]:
    """Yields queries and items of each class, ascending; a large class comes in several blocks."""
    query_order = np.argsort(query_codes, kind="stable")
    item_order = np.argsort(item_codes, kind="stable")
    classes = np.intersect1d(query_codes, item_codes)
    limits = (
        np.searchsorted(codes[order], classes, side=side)
        for codes, order in ((query_codes, query_order), (item_codes, item_order))
        for side in ("left", "right")
    )
    for first, last, item_first, item_last in zip(*limits, strict=True):
        columns = item_order[item_first:item_last]
        height = max(1, _BLOCK // len(columns))
        for start in range(first, last, height):
            yield query_order[start : min(start + height, last)], columns
