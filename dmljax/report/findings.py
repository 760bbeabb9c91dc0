"""Findings about classes and items, as numbers: `diagnosis` turns them into sections of a page."""

from collections.abc import Callable, Sequence
from functools import partial
from statistics import NormalDist
from typing import Any

import numpy as np
from jaxtyping import Float, Int, Integer

from dmljax import retrieval
from dmljax.metrics.neighbors import Neighborhoods, class_blocks, counted_nearest
from dmljax.metrics.pair_similarity import SimilarityHistograms, similarity_at_share
from dmljax.metrics.ranking import divide
from dmljax.metrics.sides import Side, counted, sides
from dmljax.metrics.significance import LEVEL
from dmljax.metrics.spread import class_sums
from dmljax.retrieval.inputs import Embeddings, Labels

_CHANCE, _ORDINARY = 0.05, 0.25  # the fractions of the rule of `suspected_labels`
_LOWEST_RECALL, _LARGEST_FRACTION = 0.5, 0.05
FLAT = 3  # dimensions up to which closeness says little about images
_SAME_PIXELS = 0.9  # least correlation of two gray images of the same picture

GrayFn = Callable[[np.ndarray], np.ndarray]  # items [m] -> small gray images [m h w]


def class_table(
    embeddings: Embeddings,
    labels: Labels,
    recall_at_1: Float[np.ndarray, "q"],
    map_at_r: Float[np.ndarray, "q"],
    *,
    count: int,
    devices: Sequence[Any] | None = None,
    **search: Any,
) -> dict[str, np.ndarray]:
    """Computes the scores, the tightness and the nearest other class of the classes 0 to `count`.

    `recall_at_1` and `map_at_r` are the values of `per_query`, and `search` its gallery and groups.
    With a gallery, `inside` is over pairs of a query and an item, and queries and items have
    separate class means. Pairs of one group (not -1) are ignored, and so are rows with a NaN.

    Each array has one row per class; NaN where a class has too few items:

    * `queries`: the number of scored queries; `recall`, `map_at_r`: their scores
    * `upper`: the Wilson upper limit of `recall`; `order` sorts the classes by it, worst first
    * `inside`: the mean cosine of the pairs of the class
    * `next`: the other class with the nearest mean, or `count`; `next_similarity`: their cosine
    """
    queries, items, _, all_labels = sides(embeddings, labels, **search)
    queries, items = (side._replace(codes=all_labels[side.codes]) for side in (queries, items))
    recalls, scores = (np.asarray(x, np.float64)[queries.rows] for x in (recall_at_1, map_at_r))
    is_scored = ~np.isnan(recalls)
    codes = queries.codes[is_scored]
    sizes = np.bincount(codes, minlength=count)
    recall, precision = (
        divide(np.bincount(codes, x[is_scored], minlength=count), sizes) for x in (recalls, scores)
    )
    upper = wilson_upper(np.nan_to_num(recall * sizes), sizes)
    next_class, next_similarity = _next_classes(queries, items, count, devices)
    return {
        "queries": sizes,
        "recall": recall,
        "map_at_r": precision,
        "upper": upper,
        "order": np.lexsort((np.arange(count), recall, upper)),
        "inside": _inside(queries, items, count),
        "next": next_class,
        "next_similarity": next_similarity,
    }


def wilson_upper(
    successes: Float[np.ndarray, "..."] | Integer[np.ndarray, "..."],
    trials: Integer[np.ndarray, "..."],
) -> Float[np.ndarray, "..."]:
    """Computes the upper limit of Wilson's interval (1927) of a fraction; NaN without trials.

    (p + z^2/2n + z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n), with p = successes / n and z the
    normal quantile of `LEVEL`. Few trials give a high limit, so a list that is sorted by it starts
    with fractions that are surely low.
    """
    z = NormalDist().inv_cdf((1 + LEVEL) / 2)
    n = np.asarray(trials, np.float64)
    fraction = divide(np.asarray(successes, np.float64), n)
    n = np.where(n > 0, n, np.nan)
    spread = z * np.sqrt(fraction * (1 - fraction) / n + z * z / (4 * n * n))
    return (fraction + z * z / (2 * n) + spread) / (1 + z * z / n)


def confusions(
    labels: Labels,
    recall_at_1: Float[np.ndarray, "q"],
    other: Int[np.ndarray, "q"],
    *,
    gallery_labels: Labels | None = None,
) -> dict[tuple[int, int], list[int]]:
    """Finds pairs of classes (A, B) with queries of A whose nearest item is of B.

    Returns these queries for each pair, the most frequent pair first. `recall_at_1` are the values
    of `per_query`, and `other` the nearest item of another class of every query, as `neighborhoods`
    gives it. Only queries with R@1 = 0 count.
    """
    item_labels = labels if gallery_labels is None else gallery_labels
    queries: dict[tuple[int, int], list[int]] = {}
    for query in np.flatnonzero((np.asarray(recall_at_1) == 0) & (other >= 0)).tolist():
        pair = int(labels[query]), int(item_labels[other[query]])
        queries.setdefault(pair, []).append(query)
    count = {pair: len(rows) for pair, rows in queries.items()}
    pairs = sorted(queries, key=lambda pair: (-count[pair], -count.get(pair[::-1], 0), pair))
    return {pair: queries[pair] for pair in pairs}


def _inside(queries: Side, items: Side, count: int) -> Float[np.ndarray, "c"]:
    """Returns the mean cosine of the counted pairs of each class."""
    totals, pairs = np.zeros(count), np.zeros(count, np.int64)
    for rows, columns in class_blocks(queries.codes, items.codes):
        left, right = queries.take(rows), items.take(columns)
        cosines, where = left.vectors.astype(np.float64) @ right.vectors.T, counted(left, right)
        totals[left.codes[0]] += cosines.sum(where=where)
        pairs[left.codes[0]] += where.sum()
    return divide(totals, pairs)


def _next_classes(
    queries: Side, items: Side, count: int, devices: Sequence[Any] | None
) -> tuple[Int[np.ndarray, "c"], Float[np.ndarray, "c"]]:
    """Finds the other class with the nearest mean for each class with queries, and the cosine."""
    next_class, next_similarity = np.full(count, count), np.full(count, np.nan)
    left, right = np.unique(queries.codes), np.unique(items.codes)
    if len(left) and len(right):
        means = [class_sums(side.vectors, side.codes, count) for side in (queries, items)]
        indices, similarities = retrieval.nearest(
            means[0][left].astype(np.float32),
            means[1][right].astype(np.float32),
            k=1,
            groups=left,
            gallery_groups=right,
            similarity_fn=retrieval.cosine,
            devices=devices,
        )
        has_next = indices[:, 0] >= 0
        next_class[left[has_next]] = right[indices[has_next, 0]]
        next_similarity[left[has_next]] = similarities[has_next, 0]
    return next_class, next_similarity


def worst_queries(
    first: Integer[np.ndarray, "q"], map_at_r: Float[np.ndarray, "q"]
) -> Int[np.ndarray, "m"]:
    """Sorts queries, worst first: by the rank of the first positive, then by MAP@R.

    `first` is the rank of the first positive, from 1; queries without a positive have 0 and are
    left out.
    """
    order = np.lexsort((np.arange(len(first)), map_at_r, -first.astype(np.int64)))
    return order[first[order] > 0]


def hub_counts(
    nearest: Int[np.ndarray, "q k"],
    labels: Labels,
    *,
    gallery_labels: Labels | None = None,
) -> tuple[Int[np.ndarray, "n"], Int[np.ndarray, "n"]]:
    """Counts N_k(j) = #{i: j is among the k nearest of i} (Radovanovic et al., 2010).

    `nearest` is the table of `neighborhoods`, -1 for no item. The second array counts only queries
    of another class.
    """
    labels = np.asarray(labels)
    item_labels = labels if gallery_labels is None else np.asarray(gallery_labels)
    queries, columns = np.nonzero(nearest >= 0)
    items = nearest[queries, columns]
    is_wrong = labels[queries] != item_labels[items]
    count = len(item_labels)
    return np.bincount(items, minlength=count), np.bincount(items[is_wrong], minlength=count)


def skewness(counts: Int[np.ndarray, "n"]) -> float:
    """Computes E[(N - mean)^3] / std^3: 0 for even counts, large if few items are found always."""
    if not len(counts):
        return float("nan")
    deviations = counts - counts.mean()
    spread = np.sqrt(np.mean(deviations**2))
    return float(np.mean(deviations**3) / spread**3) if spread > 0 else 0.0


def suspected_labels(
    near: Neighborhoods,
    histograms: SimilarityHistograms,
    recall_at_1: Float[np.ndarray, "q"],
    *,
    dimension: int,
) -> tuple[Int[np.ndarray, "m"], str]:
    """Finds items with p_i < t(0.05 / R_i) and o_i > the 25 % quantile of all p, by o_i - p_i.

    p_i and o_i are the cosines of the nearest item of its class and of another, R_i the count of
    its positives, and t(f) the cosine that a fraction f of the pairs of different classes reaches.
    Such an item is not nearer to its class than a stranger would be by luck in R_i tries, and as
    near to another class as real members are. A swap between two classes that look alike is mostly
    not found.

    Items are not judged if R@1 is below 0.5, if more than 5 % of them would be listed, or if the
    embeddings have at most 3 dimensions: then the embedding, not the labels, is at fault.

    Returns the items, the most suspicious first, and the reason why none were judged, or "".
    """
    nothing = np.zeros(0, np.int64)
    if dimension <= FLAT:
        return nothing, f"embeddings of {dimension} dimensions are too crowded to judge labels"
    has_own = near.own >= 0
    if not has_own.any():
        return nothing, "no item has another one of its class"
    recall = float(np.nanmean(recall_at_1)) if not np.isnan(recall_at_1).all() else 0.0
    if recall < _LOWEST_RECALL:
        needed = f"{100 * _LOWEST_RECALL:g}"
        return nothing, f"R@1 is {100 * recall:.1f}, too low to judge labels: {needed} is needed"
    own, other = near.own_similarity, near.other_similarity
    chance = similarity_at_share(histograms, _CHANCE / np.maximum(near.positives, 1))
    ordinary = np.quantile(own[has_own], _ORDINARY)
    items = np.flatnonzero(has_own & (near.other >= 0) & (own < chance) & (other > ordinary))
    fraction = len(items) / has_own.sum()
    if fraction > _LARGEST_FRACTION:
        percent = f"{100 * fraction:.0f} %"
        return nothing, f"{percent} of the items are flagged: too early to judge labels"
    margins = (other - own)[items].astype(np.float64)
    return items[np.lexsort((items, -margins))], ""


def near_duplicates(
    embeddings: Embeddings,
    labels: Labels,
    *,
    threshold: float,
    gray_fn: GrayFn | None = None,
    gallery_gray_fn: GrayFn | None = None,
    devices: Sequence[Any] | None = None,
    **search: Any,
) -> tuple[Int[np.ndarray, "m"], Int[np.ndarray, "m"], Float[np.ndarray, "m"]]:
    """Finds mutual nearest neighbors of different classes with a cosine of `threshold` or more.

    Returns the queries, the items and the cosines of the pairs, the most similar first.

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
    is_flat = queries.vectors.shape[1] <= FLAT and gray_fn is None
    if is_flat or not len(queries.rows) or len(items.rows) - both.within < 1:
        return np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0)
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
    return left, right, cosines


def gray_correlation(a: np.ndarray, b: np.ndarray) -> Float[np.ndarray, "m"]:
    """Computes Pearson's correlation of the pixels of image a_i and image b_i, `[m h w]` each.

    Images of one gray level have none: 1 if both are such images, 0 if one is.
    """
    a, b = (np.asarray(x, np.float64).reshape(len(x), -1) for x in (a, b))
    a, b = (x - x.mean(axis=1, keepdims=True) for x in (a, b))
    squares = np.vecdot(a, a), np.vecdot(b, b)
    # Rounding of the mean leaves about 1e-26 per pixel of an even image.
    is_even = [x <= 1e-12 * a.shape[1] for x in squares]
    products = np.sqrt(squares[0] * squares[1])
    correlations = np.vecdot(a, b) / np.where(products > 0, products, 1)
    return np.where(is_even[0] | is_even[1], (is_even[0] & is_even[1]) * 1.0, correlations)
