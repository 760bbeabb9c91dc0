"""The neighbors of every query, from which most of the diagnosis follows."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int, Integer

from dmljax import retrieval
from dmljax.metrics.sides import Sides, sides, turns
from dmljax.retrieval import Embeddings, Labels, SimilarityFn

__all__ = ["Neighborhoods", "neighborhoods", "worst_queries"]

_BLOCK = 1 << 22  # similarities of one class in memory at once


class Neighborhoods(NamedTuple):
    """The neighbors of each query in the gallery; -1 and NaN where there is none.

    `nearest` are the k nearest items, best first, with their similarities. `own` is
    the nearest item of the query's class, `other` the nearest of another class. `positives` is the
    number of items of the query's class. An unreadable query has no neighbors and no positives.
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
    """The k nearest items of every query, the nearest of its class and the nearest of another.

    Items of the query's own group (not -1) are ignored, and so are rows that hold a NaN. `gallery`,
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
    n, available = len(np.asarray(labels)), len(search.gallery.rows) - search.within
    near = Neighborhoods(
        nearest=np.full((n, k), -1),
        similarities=np.full((n, k), np.nan, np.float32),
        own=np.full(n, -1),
        own_similarity=np.full(n, np.nan, np.float32),
        other=np.full(n, -1),
        other_similarity=np.full(n, np.nan, np.float32),
        positives=np.zeros(n, np.int64),
    )
    if not len(search.queries.rows) or available < 1:
        return near
    nearest_fn = partial(retrieval.nearest, similarity_fn=similarity_fn, tile=tile, devices=devices)
    indices, similarities = counted_nearest(search, nearest_fn, k=min(k, available))
    _fill(near.nearest, near.similarities, search, indices, similarities)
    others = _nearest_other(search, nearest_fn, indices, similarities)
    _fill(near.other[:, None], near.other_similarity[:, None], search, *others)
    own, own_similarities, positives = _nearest_own(search, similarity_fn)
    _fill(near.own[:, None], near.own_similarity[:, None], search, own, own_similarities)
    near.positives[search.queries.rows] = positives
    return near


def worst_queries(
    first: Integer[np.ndarray, "q"],
    map_at_r: Float[np.ndarray, "q"],
    labels: Labels,
    *,
    per_class: int | None = 3,
) -> Int[np.ndarray, "m"]:
    """Queries, worst first: by the rank of the first positive, then by MAP@R.

    `first` is the rank of the first positive, from 1; 0 is a query without a positive, which is
    left out. At most `per_class` queries of a label come, or all with None.

    >>> first, map_at_r = np.array([1, 9, 9, 0]), np.array([1.0, 0.1, 0.0, np.nan])
    >>> metrics.worst_queries(first, map_at_r, np.array([0, 0, 0, 1]), per_class=2)
    array([2, 1])
    """
    first, codes = np.asarray(first), np.unique(np.asarray(labels), return_inverse=True)[1]
    order = np.lexsort((np.arange(len(first)), map_at_r, -first.astype(np.int64)))
    order = order[first[order] > 0]
    if per_class is None:
        return order
    return order[turns(codes[order]) < per_class]


def counted_nearest(
    search: Sides, nearest_fn: Callable, *, k: int
) -> tuple[np.ndarray, np.ndarray]:
    """The k nearest items of every query among those that the protocol counts."""
    queries, items = search.queries, search.gallery
    options: dict[str, Any] = {"k": k}
    if (queries.groups >= 0).any():
        options["groups"] = queries.groups
        if not search.within:
            options["gallery_groups"] = items.groups
    return nearest_fn(queries.vectors, None if search.within else items.vectors, **options)


def _nearest_other(
    search: Sides, nearest_fn: Callable, indices: np.ndarray, similarities: np.ndarray
) -> tuple[Int[np.ndarray, "q 1"], Float[np.ndarray, "q 1"]]:
    """The nearest item of another class: the first among the nearest, or else by a search."""
    queries, items = search.queries, search.gallery
    is_other = (indices >= 0) & (items.codes[indices] != queries.codes[:, None])
    place = np.argmax(is_other, axis=1)[:, None]
    others = np.take_along_axis(indices, place, axis=1)
    other_similarities = np.take_along_axis(similarities, place, axis=1)
    others[~is_other.any(axis=1)] = -1
    is_complete = (indices[:, -1] < 0) | (indices.shape[1] >= len(items.rows) - search.within)
    rows = np.flatnonzero((others[:, 0] < 0) & ~is_complete)
    if len(rows):
        # A query has the class of its own entry in the gallery, which is so left out.
        others[rows], other_similarities[rows] = nearest_fn(
            queries.vectors[rows],
            items.vectors,
            k=1,
            groups=np.stack([queries.codes[rows], queries.groups[rows]], axis=1),
            gallery_groups=np.stack([items.codes, items.groups], axis=1),
        )
    return others, other_similarities


def _nearest_own(
    search: Sides, similarity_fn: SimilarityFn
) -> tuple[Int[np.ndarray, "q 1"], Float[np.ndarray, "q 1"], Int[np.ndarray, "q"]]:
    """The nearest item of the query's class, its similarity, and the number of such items."""
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
        counts = counted(search, rows, columns)
        products[~counts] = -np.inf
        best = np.argmax(products, axis=1)
        indices[rows, 0] = np.where(counts.any(axis=1), columns[best], -1)
        similarities[rows, 0] = products[np.arange(len(rows)), best]
        positives[rows] = counts.sum(axis=1)
    return indices, similarities, positives


def class_blocks(
    query_codes: Int[np.ndarray, "q"], item_codes: Int[np.ndarray, "n"]
) -> Iterator[tuple[Int[np.ndarray, "r"], Int[np.ndarray, "m"]]]:
    """Queries and items of each class, ascending; a large class comes in several blocks."""
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


def counted(
    search: Sides, rows: Int[np.ndarray, "r"], columns: Int[np.ndarray, "m"]
) -> Bool[np.ndarray, "r m"]:
    """Which pairs of these queries and items the protocol counts."""
    own, others = search.queries.groups[rows], search.gallery.groups[columns]
    counts = (own[:, None] != others[None]) | (own < 0)[:, None]
    if search.within:
        counts &= rows[:, None] != columns[None]
    return counts


def _fill(
    items: Int[np.ndarray, "q k"],
    values: Float[np.ndarray, "q k"],
    search: Sides,
    indices: Integer[np.ndarray, "r j"],
    similarities: Float[np.ndarray, "r j"],
) -> None:
    """Writes neighbors of readable items under the numbers of the input."""
    rows, columns = np.nonzero(indices >= 0)
    places = search.queries.rows[rows]
    items[places, columns] = search.gallery.rows[indices[rows, columns]]
    values[places, columns] = similarities[rows, columns]
