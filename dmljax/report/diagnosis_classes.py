"""Classes, worst first, and which class is taken for which."""

from collections.abc import Sequence
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int, Integer

from dmljax import retrieval
from dmljax.metrics.neighbors import class_blocks
from dmljax.metrics.ranking import divide
from dmljax.metrics.sides import Side, counted, sides
from dmljax.metrics.significance import LEVEL
from dmljax.metrics.spread import class_sums
from dmljax.retrieval import Embeddings, Labels


class ClassTable(NamedTuple):
    """One row per class, ascending by label; NaN where a class has too few items.

    `queries` counts scored queries, `items` readable items of the gallery. `inside` is the mean
    cosine of the pairs of the class, `next_similarity` the largest cosine of its mean with the mean
    of another class, whose row is `next_class`, or -1. `order` sorts the rows, worst first: by
    `upper`, the Wilson upper limit of R@1.
    """

    labels: Integer[np.ndarray, "c"]
    queries: Int[np.ndarray, "c"]
    items: Int[np.ndarray, "c"]
    recall_at_1: Float[np.ndarray, "c"]
    map_at_r: Float[np.ndarray, "c"]
    upper: Float[np.ndarray, "c"]
    inside: Float[np.ndarray, "c"]
    next_similarity: Float[np.ndarray, "c"]
    next_class: Int[np.ndarray, "c"]
    order: Int[np.ndarray, "c"]


def class_table(
    embeddings: Embeddings,
    labels: Labels,
    recall_at_1: Float[np.ndarray, "q"],
    map_at_r: Float[np.ndarray, "q"],
    *,
    devices: Sequence[Any] | None = None,
    **search: Any,
) -> ClassTable:
    """Computes the scores, the tightness and the nearest other class of every class.

    `recall_at_1` and `map_at_r` are the values of `per_query`, and `search` its gallery and groups.
    With a gallery, `inside` is over pairs of a query and an item, and queries and items have
    separate class means. Pairs of one group (not -1) are ignored, and so are rows with a NaN.
    """
    queries, items, _, all_labels = sides(embeddings, labels, **search)
    classes = np.unique(np.concatenate([queries.codes, items.codes]))
    queries, items = (
        side._replace(codes=np.searchsorted(classes, side.codes)) for side in (queries, items)
    )
    count, recalls = len(classes), np.asarray(recall_at_1, np.float64)[queries.rows]
    is_scored = ~np.isnan(recalls)
    codes, scores = queries.codes[is_scored], np.asarray(map_at_r, np.float64)[queries.rows]
    sizes = np.bincount(codes, minlength=count)
    recall, precision = (
        divide(np.bincount(codes, x[is_scored], minlength=count), sizes) for x in (recalls, scores)
    )
    upper = wilson_upper(np.nan_to_num(recall * sizes), sizes)
    inside = _inside(queries, items, count)
    next_class, next_similarity = _next_classes(queries, items, count, devices)
    return ClassTable(
        labels=all_labels[classes],
        queries=sizes,
        items=np.bincount(items.codes, minlength=count),
        recall_at_1=recall,
        map_at_r=precision,
        upper=upper,
        inside=inside,
        next_similarity=next_similarity,
        next_class=next_class,
        order=np.lexsort((np.arange(count), recall, upper)),
    )


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


class Confusions(NamedTuple):
    """One row per pair of confused classes, most frequent first.

    `counts` are the queries of class `labels` whose nearest item is of class `taken_for`, and
    `reverse` counts the opposite direction. `queries` is the number of scored queries of the class.
    `examples` are indices of queries, -1 behind the last; such a query is confused with
    its nearest item of another class.
    """

    labels: Integer[np.ndarray, "m"]
    taken_for: Integer[np.ndarray, "m"]
    counts: Int[np.ndarray, "m"]
    reverse: Int[np.ndarray, "m"]
    queries: Int[np.ndarray, "m"]
    examples: Int[np.ndarray, "m e"]


def confusions(
    labels: Labels,
    recall_at_1: Float[np.ndarray, "q"],
    other: Int[np.ndarray, "q"],
    *,
    gallery_labels: Labels | None = None,
    fewest: int = 2,
    examples: int = 6,
) -> Confusions:
    """Finds pairs of classes (A, B) with `fewest` or more queries of A whose nearest item is of B.

    `recall_at_1` are the values of `per_query`, and `other` the nearest item of another class of
    every query, as `neighborhoods` gives it. Only queries with R@1 = 0 count.
    """
    labels, recalls = np.asarray(labels), np.asarray(recall_at_1, np.float64)
    others = labels if gallery_labels is None else np.asarray(gallery_labels)
    classes, codes = np.unique(np.concatenate([labels, others]), return_inverse=True)
    codes, other_codes = codes[: len(labels)], codes[len(codes) - len(others) :]
    count = len(classes)
    wrong_queries = np.flatnonzero((recalls == 0) & (other >= 0))
    # One code for each pair of classes: a table of all pairs would be 1 GB for 11,316 classes.
    pairs = codes[wrong_queries] * count + other_codes[other[wrong_queries]]
    wrong, counts = np.unique(pairs, return_counts=True)
    a, b = wrong // count, wrong % count
    reverse = _count_of(wrong, counts, b * count + a)
    order = np.lexsort((b, a, -reverse, -counts))
    order = order[counts[order] >= fewest]
    by_pair = np.argsort(pairs, kind="stable")
    firsts = np.searchsorted(pairs[by_pair], wrong[order])
    rows = np.full((len(order), examples), -1)
    for row, first, size in zip(rows, firsts, counts[order], strict=True):
        shown = wrong_queries[by_pair[first : first + min(size, examples)]]
        row[: len(shown)] = shown
    sizes = np.bincount(codes[~np.isnan(recalls)], minlength=count)
    return Confusions(
        labels=classes[a[order]],
        taken_for=classes[b[order]],
        counts=counts[order],
        reverse=reverse[order],
        queries=sizes[a[order]],
        examples=rows,
    )


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
    next_class, next_similarity = np.full(count, -1), np.full(count, np.nan)
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


def _count_of(keys: np.ndarray, counts: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Returns the counts of the targets among the sorted `keys`, 0 for a missing one."""
    if not len(keys):
        return np.zeros(len(targets), np.int64)
    rows = np.minimum(np.searchsorted(keys, targets), len(keys) - 1)
    return np.where(keys[rows] == targets, counts[rows], 0)
