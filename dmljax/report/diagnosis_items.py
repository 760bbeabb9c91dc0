"""Items to look at: worst queries, hubs, labels that are perhaps wrong, and near duplicates."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int, Integer

from dmljax import retrieval
from dmljax.metrics.neighbors import Neighborhoods, counted_nearest
from dmljax.metrics.pair_similarity import SimilarityHistograms, similarity_at_share
from dmljax.metrics.sides import sides
from dmljax.retrieval import Embeddings, Labels

_CHANCE, _ORDINARY = 0.05, 0.25  # the fractions of the rule of `suspected_labels`
_LOWEST_RECALL, _LARGEST_FRACTION = 0.5, 0.05
_FLAT = 3  # dimensions up to which closeness says little about images
_SAME_PIXELS = 0.9  # least correlation of two gray images of the same picture

GrayFn = Callable[[np.ndarray], np.ndarray]


def worst_queries(
    first: Integer[np.ndarray, "q"], map_at_r: Float[np.ndarray, "q"]
) -> Int[np.ndarray, "m"]:
    """Sorts queries, worst first: by the rank of the first positive, then by MAP@R.

    `first` is the rank of the first positive, from 1; queries without a positive have 0 and are
    left out.
    """
    order = np.lexsort((np.arange(len(first)), map_at_r, -first.astype(np.int64)))
    return order[first[order] > 0]


class Hubs(NamedTuple):
    """Counts of the queries that find each item among their nearest.

    `counts` are the queries that find an item; `wrong` counts only queries of another class.
    `skewness` describes the counts, and `never_found` the fraction of items that no query finds.
    `order` lists the items that some query finds, those that are found wrongly most often first.
    """

    counts: Int[np.ndarray, "n"]
    wrong: Int[np.ndarray, "n"]
    skewness: float
    never_found: float
    order: Int[np.ndarray, "m"]


def hubs(
    nearest: Int[np.ndarray, "q k"],
    labels: Labels,
    *,
    gallery_labels: Labels | None = None,
) -> Hubs:
    """Counts N_k(j) = #{i: j is among the k nearest of i} (Radovanovic et al., 2010).

    `nearest` is the table of `neighborhoods`, -1 for no item. The skewness is E[(N - mean)^3] /
    std^3: 0 for even counts, large if few items are found everywhere.
    """
    labels = np.asarray(labels)
    item_labels = labels if gallery_labels is None else np.asarray(gallery_labels)
    queries, columns = np.nonzero(nearest >= 0)
    items = nearest[queries, columns]
    is_wrong = labels[queries] != item_labels[items]
    counts = np.bincount(items, minlength=len(item_labels))
    wrong = np.bincount(items[is_wrong], minlength=len(item_labels))
    skewness = never_found = float("nan")
    if len(counts):
        never_found = float(np.mean(counts == 0))
        deviations = counts - counts.mean()
        spread = np.sqrt(np.mean(deviations**2))
        skewness = float(np.mean(deviations**3) / spread**3) if spread > 0 else 0.0
    order = np.lexsort((np.arange(len(counts)), -counts, -wrong))
    return Hubs(counts, wrong, skewness, never_found, order[counts[order] > 0])


class SuspectedLabels(NamedTuple):
    """Items whose label is perhaps wrong, the most suspicious first.

    `refusal` gives the reason why items were not judged; it is empty if they were.
    """

    items: Int[np.ndarray, "m"]
    refusal: str


def suspected_labels(
    near: Neighborhoods,
    histograms: SimilarityHistograms,
    recall_at_1: Float[np.ndarray, "q"],
    *,
    dimension: int,
) -> SuspectedLabels:
    """Finds items with p_i < t(0.05 / R_i) and o_i > the 25 % quantile of all p, by o_i - p_i.

    p_i and o_i are the cosines of the nearest item of its class and of another, R_i the count of
    its positives, and t(f) the cosine that a fraction f of the pairs of different classes reaches.
    Such an item is not nearer to its class than a stranger would be by luck in R_i tries, and as
    near to another class as real members are. A swap between two classes that look alike is mostly
    not found.

    Items are not judged if R@1 is below 0.5, if more than 5 % of them would be listed, or if the
    embeddings have at most 3 dimensions: then the embedding, not the labels, is at fault.
    """

    def refused(reason: str) -> SuspectedLabels:
        return SuspectedLabels(np.zeros(0, np.int64), reason)

    if dimension <= _FLAT:
        return refused(f"embeddings of {dimension} dimensions are too crowded to judge labels")
    has_own = near.own >= 0
    if not has_own.any():
        return refused("no item has another one of its class")
    recall = float(np.nanmean(recall_at_1)) if not np.isnan(recall_at_1).all() else 0.0
    if recall < _LOWEST_RECALL:
        return refused(f"R@1 is {100 * recall:.1f}, too low to judge labels: 50 is needed")
    own, other = near.own_similarity, near.other_similarity
    chance = similarity_at_share(histograms, _CHANCE / np.maximum(near.positives, 1))
    ordinary = np.quantile(own[has_own], _ORDINARY)
    items = np.flatnonzero(has_own & (near.other >= 0) & (own < chance) & (other > ordinary))
    fraction = len(items) / has_own.sum()
    if fraction > _LARGEST_FRACTION:
        percent = f"{100 * fraction:.0f} %"
        return refused(f"{percent} of the items are flagged: too early to judge labels")
    margins = (other - own)[items].astype(np.float64)
    return SuspectedLabels(items[np.lexsort((items, -margins))], "")


class NearDuplicates(NamedTuple):
    """Pairs of a query and an item of different classes, the most similar first."""

    queries: Int[np.ndarray, "m"]
    items: Int[np.ndarray, "m"]
    similarities: Float[np.ndarray, "m"]


def near_duplicates(
    embeddings: Embeddings,
    labels: Labels,
    *,
    threshold: float,
    gray_fn: GrayFn | None = None,
    gallery_gray_fn: GrayFn | None = None,
    devices: Sequence[Any] | None = None,
    **search: Any,
) -> NearDuplicates:
    """Finds mutual nearest neighbors of different classes with a cosine of `threshold` or more.

    A good threshold is the 99 % quantile of `neighborhoods(...).own_similarity`: nearer than
    almost all pairs of one class. `gray_fn(items)` gives the pixels `[m h w]` of these items as
    small gray images, 16 x 16; a pair is then kept if the correlation of its pixels is at least
    0.9. Embeddings of at most 3 dimensions have no pairs without it. `search` has the gallery and
    the groups. With the training images as the gallery, whose classes have other labels, the pairs
    are leaks between the splits.
    """
    both = sides(embeddings, labels, **search)
    assert both.within or (gray_fn is None) == (gallery_gray_fn is None)
    queries, items = both.queries, both.gallery
    is_flat = queries.vectors.shape[1] <= _FLAT and gray_fn is None
    if is_flat or not len(queries.rows) or len(items.rows) - both.within < 1:
        return NearDuplicates(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0))
    nearest_fn = partial(retrieval.nearest, similarity_fn=retrieval.cosine, devices=devices)
    indices, similarities = counted_nearest(both, nearest_fn, k=1)
    back = indices
    if not both.within:
        swapped = both._replace(queries=items, gallery=queries)
        back, _ = counted_nearest(swapped, nearest_fn, k=1)
    rows, nearest = np.arange(len(indices)), indices[:, 0]
    is_pair = (nearest >= 0) & (back[nearest, 0] == rows) & (similarities[:, 0] >= threshold)
    is_pair &= queries.codes != items.codes[nearest]
    if both.within:
        is_pair &= rows < nearest
    pairs = np.flatnonzero(is_pair)
    pairs = pairs[np.lexsort((pairs, -similarities[pairs, 0]))]
    left, right = queries.rows[pairs], items.rows[nearest[pairs]]
    cosines = similarities[pairs, 0].astype(np.float64)
    if gray_fn is not None and len(pairs):
        correlations = gray_correlation(gray_fn(left), (gallery_gray_fn or gray_fn)(right))
        kept = correlations >= _SAME_PIXELS
        left, right, cosines = left[kept], right[kept], cosines[kept]
    return NearDuplicates(left, right, cosines)


def gray_correlation(a: np.ndarray, b: np.ndarray) -> Float[np.ndarray, "m"]:
    """Computes Pearson's correlation of the pixels of image a_i and image b_i, `[m h w]` each.

    Images of one gray level have none: 1 if both are such images, 0 if one is.
    """
    a, b = (np.asarray(x, np.float64).reshape(len(x), -1) for x in (a, b))
    if a.shape != b.shape:
        raise ValueError(f"images of {a.shape} and {b.shape} pixels cannot be compared")
    a, b = (x - x.mean(axis=1, keepdims=True) for x in (a, b))
    squares = np.vecdot(a, a), np.vecdot(b, b)
    # Rounding of the mean leaves about 1e-26 per pixel of an even image.
    is_even = [x <= 1e-12 * a.shape[1] for x in squares]
    products = np.sqrt(squares[0] * squares[1])
    correlations = np.vecdot(a, b) / np.where(products > 0, products, 1)
    return np.where(is_even[0] | is_even[1], (is_even[0] & is_even[1]) * 1.0, correlations)
