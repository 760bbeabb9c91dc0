"""The similarities of all pairs as two histograms, and what follows from them."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int, Integer

from dmljax.metrics.sides import blocks, counted, sides
from dmljax.retrieval.inputs import Embeddings, Labels
from dmljax.retrieval.rules import may_mask

__all__ = [
    "SimilarityHistograms",
    "alignment",
    "fmr_at",
    "fnmr_at",
    "offered_fmrs",
    "similarity_histograms",
    "threshold_at_fmr",
    "uniformity",
]

_FEWEST_PAIRS = 10  # pairs that must be expected to pass, or a rate is not offered


class SimilarityHistograms(NamedTuple):
    """How many pairs of one class, and of different classes, have a cosine in each bin.

    The bins divide [-1, 1] evenly. A pair counts in the bin whose lower edge it reaches.
    """

    positives: Int[np.ndarray, "bins"]
    negatives: Int[np.ndarray, "bins"]

    @property
    def edges(self) -> Float[np.ndarray, "edges"]:
        """The edges of the bins, from -1 to 1."""
        return np.linspace(-1, 1, len(self.positives) + 1)

    @property
    def centers(self) -> Float[np.ndarray, "bins"]:
        """The middle of every bin."""
        edges = self.edges
        return (edges[1:] + edges[:-1]) / 2


def similarity_histograms(
    embeddings: Embeddings,
    labels: Labels,
    *,
    gallery: Embeddings | None = None,
    gallery_labels: Labels | None = None,
    groups: Integer[np.ndarray, "q"] | None = None,
    gallery_groups: Integer[np.ndarray, "n"] | None = None,
    bins: int = 2048,
    tile: int = 1024,
) -> SimilarityHistograms:
    """Counts the cosines of all pairs, exactly: of one class, and of different classes.

    Without a gallery, the pairs are the unordered pairs of items; with one, each query is paired
    with each gallery item. A pair of one group (not -1) is ignored, and so is a row that holds a
    NaN. It needs memory for a copy of the embeddings and one block of `tile` x `tile` similarities.
    `bins` is a power of two, so that no rounding moves a pair over an edge.

    >>> embeddings = np.array([[1.0, 0.0], [0.0, 1.0], [0.0, 2.0]])
    >>> histograms = metrics.similarity_histograms(embeddings, np.array([0, 1, 1]), bins=4)
    >>> histograms.positives.tolist(), histograms.negatives.tolist()
    ([0, 0, 0, 1], [0, 0, 2, 0])
    """
    check_bins(bins)
    search = sides(embeddings, labels, gallery, gallery_labels, groups, gallery_groups)
    # Sorted by class, the positives lie in few blocks; all other blocks need no mask.
    queries = items = search.queries.take(np.argsort(search.queries.codes, kind="stable"))
    if not search.within:
        items = search.gallery.take(np.argsort(search.gallery.codes, kind="stable"))
    counts, positives = np.zeros(bins, np.int64), np.zeros(bins, np.int64)
    for rows, columns, similarities in blocks(queries, items, tile, upper=search.within):
        where = None  # all
        if may_mask(rows.groups, columns.groups):
            where = counted(rows, columns)
            if search.within and rows.rows[0] == columns.rows[0]:
                where = np.triu(where, 1)  # each unordered pair once
        counts += _count(similarities if where is None else similarities[where], bins)
        if rows.codes[-1] >= columns.codes[0] and columns.codes[-1] >= rows.codes[0]:
            same = rows.codes[:, None] == columns.codes[None]
            positives += _count(similarities[same if where is None else same & where], bins)
    return SimilarityHistograms(positives, counts - positives)


def check_bins(bins: int) -> None:
    """Raises unless a histogram of pairs may have this number of bins."""
    if bins < 2 or bins & (bins - 1):
        raise ValueError(f"`bins` must be a power of two, such as 2048, got {bins}")


def bins_of(similarities: np.ndarray, bins: int) -> Int[np.ndarray, "..."]:
    """Returns the bin of each cosine. A product with a power of two is exact, and so is floor."""
    scaled = np.multiply(similarities, np.float32(bins // 2))
    np.floor(scaled, out=scaled)
    places = scaled.astype(np.int64)
    places += bins // 2
    return np.clip(places, 0, bins - 1, out=places)


def _count(similarities: np.ndarray, bins: int) -> Int[np.ndarray, "bins"]:
    return np.bincount(bins_of(similarities, bins).ravel(), minlength=bins)


def fmr_at(histograms: SimilarityHistograms, threshold: float) -> float:
    """Computes FMR(t), the fraction of pairs of different classes with s >= t (ISO/IEC 19795-1).

    `threshold` is rounded up to the next edge of a bin. Large classes have more pairs, by the
    square of their size.

    >>> histograms = metrics.SimilarityHistograms(np.array([0, 1, 1, 2]), np.array([5, 3, 1, 1]))
    >>> metrics.fmr_at(histograms, 0.5), metrics.fnmr_at(histograms, 0.5)
    (0.1, 0.5)
    """
    return _share(histograms.negatives, _bin_from(histograms, threshold))


def fnmr_at(histograms: SimilarityHistograms, threshold: float) -> float:
    """Computes FNMR(t), the fraction of pairs of one class with s < t (ISO/IEC 19795-1).

    `threshold` is rounded up to the next edge of a bin.

    >>> histograms = metrics.SimilarityHistograms(np.array([0, 1, 1, 2]), np.array([5, 3, 1, 1]))
    >>> metrics.fnmr_at(histograms, 0.0)
    0.25
    """
    return 1 - _share(histograms.positives, _bin_from(histograms, threshold))


def threshold_at_fmr(histograms: SimilarityHistograms, fmr: float) -> float:
    """Returns the smallest edge of a bin with FMR <= `fmr`: accept a pair from this cosine on.

    >>> histograms = metrics.SimilarityHistograms(np.array([0, 9]), np.array([900, 100]))
    >>> metrics.threshold_at_fmr(histograms, 0.1)
    0.0
    """
    if not 0 < fmr <= 1:
        raise ValueError(f"fmr={fmr} must lie between 0 and 1, such as 1e-3")
    pairs = int(histograms.negatives.sum())
    if fmr * pairs < _FEWEST_PAIRS:
        raise ValueError(
            f"fmr={fmr:g} needs {_FEWEST_PAIRS / fmr:,.0f} pairs of different classes, but there "
            f"are {pairs:,}: choose one of offered_fmrs(histograms), or give more images"
        )
    passing = np.append(np.cumsum(histograms.negatives[::-1])[::-1], 0)
    first = int(np.argmax(passing <= fmr * pairs))
    if first == len(histograms.negatives):
        raise ValueError(
            f"{passing[-2] / pairs:.2g} of the pairs of different classes have a cosine of 1, so "
            f"that no threshold reaches fmr={fmr:g}: the embeddings have collapsed"
        )
    return float(histograms.edges[first])


def offered_fmrs(
    histograms: SimilarityHistograms,
    fmrs: Sequence[float] = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6),
) -> tuple[float, ...]:
    """Returns the `fmrs` that a threshold reaches and at which 10 or more pairs should pass.

    >>> histograms = metrics.SimilarityHistograms(np.array([0, 9]), np.array([995, 5]))
    >>> metrics.offered_fmrs(histograms)
    (0.1, 0.01)
    """
    pairs, most = int(histograms.negatives.sum()), int(histograms.negatives[-1])
    return tuple(fmr for fmr in fmrs if fmr * pairs >= max(_FEWEST_PAIRS, most))


def similarity_at_share(
    histograms: SimilarityHistograms, shares: Float[np.ndarray, "..."]
) -> Float[np.ndarray, "..."]:
    """Returns the cosine that a fraction of the pairs of different classes reaches, to a bin.

    Within a bin, pairs are taken as evenly spread. NaN without such pairs.
    """
    shares = np.asarray(shares, np.float64)
    counts = histograms.negatives[::-1]
    if not counts.any():
        return np.full(shares.shape, np.nan)
    filled = np.flatnonzero(counts)
    lower = histograms.edges[:-1][::-1][filled]
    width = 2 / len(counts)
    counts = counts[filled]
    passing = np.cumsum(counts)
    targets = np.clip(shares * passing[-1], 0, passing[-1])
    places = np.minimum(np.searchsorted(passing, targets), len(counts) - 1)
    inside = (passing[places] - targets) / counts[places]  # of the bin's pairs, how many lie below
    return lower[places] + width * inside


def alignment(histograms: SimilarityHistograms) -> float:
    """Computes mean |x - x'|^2 over the pairs of one class; smaller is closer.

    (Wang & Isola, 2020.) |x - x'|^2 = 2 - 2s for unit vectors, so that the mean is a sum over bins,
    exact to their width.

    >>> histograms = metrics.SimilarityHistograms(np.array([0, 0, 0, 8]), np.array([0, 4, 4, 0]))
    >>> metrics.alignment(histograms)
    0.5
    """
    _check_histograms(histograms)
    pairs = histograms.positives.sum()
    if not pairs:
        return float("nan")
    return float((histograms.positives * (2 - 2 * histograms.centers)).sum() / pairs)


def uniformity(histograms: SimilarityHistograms) -> float:
    """Computes log mean exp(-2 |x - x'|^2) over all pairs; smaller is more even.

    (Wang & Isola, 2020.) It is 0 if all embeddings are equal.

    >>> histograms = metrics.SimilarityHistograms(np.array([0, 0, 0, 8]), np.array([0, 4, 4, 0]))
    >>> round(metrics.uniformity(histograms), 2)
    -1.62
    """
    _check_histograms(histograms)
    counts = histograms.positives + histograms.negatives
    if not counts.any():
        return float("nan")
    terms = np.exp(-2 * (2 - 2 * histograms.centers))
    return float(np.log((counts * terms).sum() / counts.sum()))


def _check_histograms(histograms: SimilarityHistograms) -> None:
    if not isinstance(histograms, SimilarityHistograms):
        raise TypeError(
            f"this metric takes histograms, not {type(histograms).__name__}: give "
            "metrics.similarity_histograms(embeddings, labels)"
        )


def _bin_from(histograms: SimilarityHistograms, threshold: float) -> int:
    """Returns the first bin whose lower edge is at least `threshold`."""
    bins = len(histograms.positives)
    return int(np.clip(np.ceil((threshold + 1) / 2 * bins - 1e-9), 0, bins))


def _share(counts: Int[np.ndarray, "bins"], first: int) -> float:
    """Returns the fraction of pairs in the bins from `first` on; NaN without pairs."""
    pairs = counts.sum()
    return float(counts[first:].sum() / pairs) if pairs else float("nan")
