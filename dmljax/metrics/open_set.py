"""One threshold for all classes: how well it suits each of them, and what it does to strangers.

A stranger is a query whose class has no image in the gallery.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int, Integer

from dmljax.metrics.neighbors import Neighborhoods
from dmljax.metrics.pair_similarity import (
    SimilarityHistograms,
    bins_of,
    check_bins,
    similarity_at_share,
    threshold_at_fmr,
)
from dmljax.metrics.sides import blocks, counted, sides
from dmljax.retrieval.inputs import Embeddings, Labels

__all__ = [
    "ClassHistograms",
    "class_histograms",
    "class_thresholds",
    "opis",
    "stranger_rates",
    "threshold_at_refusal",
]


class ClassHistograms(NamedTuple):
    """`SimilarityHistograms` of each class: of the pairs of its queries with the gallery.

    `labels` are the labels of the classes, in ascending order.
    """

    labels: Integer[np.ndarray, "c"]
    positives: Int[np.ndarray, "c bins"]
    negatives: Int[np.ndarray, "c bins"]

    @property
    def total(self) -> SimilarityHistograms:
        """The pairs of all classes. Without a gallery, it has each pair twice."""
        return SimilarityHistograms(self.positives.sum(axis=0), self.negatives.sum(axis=0))


def class_histograms(
    embeddings: Embeddings,
    labels: Labels,
    *,
    gallery: Embeddings | None = None,
    gallery_labels: Labels | None = None,
    groups: Integer[np.ndarray, "q"] | None = None,
    gallery_groups: Integer[np.ndarray, "n"] | None = None,
    bins: int = 1024,
    tile: int = 1024,
) -> ClassHistograms:
    """Counts the cosines of the pairs of each class, as `similarity_histograms` does for all.

    Without a gallery, each query is paired with every other one, so that a pair of two classes
    counts for both. Memory: two counts for each class and bin, and copies of the embeddings.

    >>> embeddings = np.array([[1.0, 0.0], [0.0, 1.0], [0.0, 2.0]])
    >>> histograms = metrics.class_histograms(embeddings, np.array([0, 1, 1]), bins=4)
    >>> histograms.positives.tolist(), histograms.negatives.tolist()
    ([[0, 0, 0, 0], [0, 0, 0, 2]], [[0, 0, 2, 0], [0, 0, 2, 0]])
    """
    check_bins(bins)
    search = sides(embeddings, labels, gallery, gallery_labels, groups, gallery_groups)
    counts = np.zeros((len(search.classes), 2, bins), np.int64)
    for rows, columns, similarities in blocks(search.queries, search.gallery, tile):
        where = counted(rows, columns)
        classes, of_rows = np.unique(rows.codes, return_inverse=True)
        different = rows.codes[:, None] != columns.codes[None]
        places = bins_of(similarities, bins) + bins * (2 * of_rows[:, None] + different)
        sizes = np.bincount(places[where], minlength=len(classes) * 2 * bins)
        counts[classes] += sizes.reshape(-1, 2, bins)
    present = np.unique(search.queries.codes)
    return ClassHistograms(search.classes[present], counts[present, 0], counts[present, 1])


def class_thresholds(histograms: ClassHistograms, fmr: float) -> Float[np.ndarray, "c"]:
    """Returns the cosine that the fraction `fmr` of a class's pairs with other classes reaches.

    It is exact to a bin; NaN for a class without such pairs.

    >>> negatives = np.array([[0, 10, 0, 0], [0, 0, 10, 0]])
    >>> histograms = metrics.ClassHistograms(np.arange(2), np.zeros((2, 4), int), negatives)
    >>> metrics.class_thresholds(histograms, 0.1).round(2).tolist()
    [-0.05, 0.45]
    """
    if not 0 < fmr <= 1:
        raise ValueError(f"fmr={fmr} must lie between 0 and 1, such as 1e-2")
    rows = zip(histograms.positives, histograms.negatives, strict=True)
    share = np.array([fmr])
    thresholds = [similarity_at_share(SimilarityHistograms(*row), share)[0] for row in rows]
    return np.array(thresholds, np.float64)


def opis(histograms: ClassHistograms, *, fmrs: tuple[float, float] = (1e-2, 1e-1)) -> float:
    """Computes how differently one threshold suits the classes, the operating-point inconsistency.

    OPIS = 1/(b - a) integral_a^b mean_i (U_i(d) - mean_j U_j(d))^2 dd over distances d of unit
    vectors (Zhang et al., "Threshold-Consistent Margin Loss for Open-World Deep Metric Learning",
    ICLR 2024), where U_i(d) is the harmonic mean of the fraction of pairs within the class that lie
    within d and the fraction of its pairs with other classes beyond d. From a to b, the fraction of
    all pairs of two classes within d grows from the first of `fmrs` to the second. It is 0 if a
    threshold suits all classes equally well. Classes without a pair of their own are left out.

    >>> positives, negatives = np.array([[0, 2], [2, 0]]), np.array([[90, 10], [90, 10]])
    >>> metrics.opis(metrics.ClassHistograms(np.arange(2), positives, negatives), fmrs=(0.1, 0.2))
    0.224...
    """
    if not 0 < fmrs[0] < fmrs[1] <= 1:
        raise ValueError(f"fmrs={fmrs} must be two rising rates between 0 and 1, such as 0.01, 0.1")
    has_pairs = (histograms.positives.sum(axis=1) > 0) & (histograms.negatives.sum(axis=1) > 0)
    if not has_pairs.any():
        return float("nan")
    total = histograms.total
    high, low = (threshold_at_fmr(total, fmr) for fmr in fmrs)
    edges = total.edges
    inside = np.flatnonzero((edges >= low) & (edges <= high))[::-1]  # from near to far
    same_class, other_classes = (
        np.append(np.cumsum(counts[:, ::-1], axis=1)[:, ::-1], np.zeros((len(counts), 1)), axis=1)
        for counts in (histograms.positives[has_pairs], histograms.negatives[has_pairs])
    )
    sensitivity = (same_class / same_class[:, :1])[:, inside]
    specificity = 1 - (other_classes / other_classes[:, :1])[:, inside]
    total_rate = sensitivity + specificity
    utilities = 2 * sensitivity * specificity / np.where(total_rate > 0, total_rate, 1)
    spread = np.var(utilities, axis=0)
    if len(inside) == 1:
        return float(spread[0])
    distances = np.sqrt(2 - 2 * edges[inside])
    return float(np.trapezoid(spread, distances) / (distances[-1] - distances[0]))


class StrangerRates(NamedTuple):
    """The effects of a threshold; `known` queries are those whose class is in the gallery.

    `known_found` is the fraction of the known queries that pass and whose nearest item is of their
    class.
    """

    known_refused: float
    strangers_refused: float
    known_found: float


def stranger_rates(near: Neighborhoods, threshold: float) -> StrangerRates:
    """Computes the fractions of known queries and of strangers that a threshold refuses.

    A query is refused if its nearest item is below the threshold: "not in the collection". The
    rates are those of open-set identification (ISO/IEC 19795-1: the false-positive identification
    rate is 1 - `strangers_refused`). Each query is also taken as a stranger: with its class taken
    out of the gallery, its nearest item is the nearest of another class. The rates hold for
    galleries of this size: among more items, strangers find more similar ones.

    >>> embeddings = np.array([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.5, 1.0]])
    >>> near = metrics.neighborhoods(embeddings, np.array([0, 0, 1, 1]))
    >>> metrics.stranger_rates(near, 0.95)
    StrangerRates(known_refused=0.5, strangers_refused=1.0, known_found=0.5)
    """
    is_known = near.positives > 0
    same_class, other_class = near.own_similarity[is_known], near.other_similarity[is_known]
    strangers = near.other_similarity[~np.isnan(near.other_similarity)]
    if not len(same_class) or not len(strangers):
        return StrangerRates(*[float("nan")] * 3)
    return StrangerRates(
        known_refused=float(np.mean(np.fmax(same_class, other_class) < threshold)),
        strangers_refused=float(np.mean(strangers < threshold)),
        known_found=float(np.mean((same_class >= threshold) & ~(other_class > same_class))),
    )


def threshold_at_refusal(near: Neighborhoods, known_refused: float) -> float:
    """Returns the largest threshold that refuses at most this fraction of the known queries.

    >>> embeddings = np.array([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.5, 1.0]])
    >>> near = metrics.neighborhoods(embeddings, np.array([0, 0, 1, 1]))
    >>> round(metrics.threshold_at_refusal(near, 0.5), 3)
    0.995
    """
    if not 0 <= known_refused < 1:
        raise ValueError(f"known_refused={known_refused} must be at least 0 and below 1")
    is_known = near.positives > 0
    nearest = np.fmax(near.own_similarity[is_known], near.other_similarity[is_known])
    return (
        float(np.sort(nearest)[int(known_refused * len(nearest))]) if len(nearest) else float("nan")
    )
