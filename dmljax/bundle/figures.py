"""Figures of a model for its card and manifest: scores and thresholds."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from dmljax import metrics, vectors
from dmljax.bundle import files
from dmljax.data.splits import Split
from dmljax.metrics.significance import FEWEST_CLASSES, LEVEL, limits

FMRS = (1e-2, 1e-3, 1e-4)
_BLOCK = 256  # queries
_SAMPLES = 1000


class Labeled(NamedTuple):
    """Embeddings of readable images, and their labels."""

    embeddings: np.ndarray
    labels: np.ndarray


def scores(
    embeddings: np.ndarray, split: Split, *, average: str = "queries"
) -> dict[str, dict[str, Any]]:
    """Computes R@1, R-precision and MAP@R by the split's protocol, with intervals over classes.

    `average` is as in `metrics.retrieval`.
    """
    search = split.search(embeddings)
    values = metrics.per_query(search.embeddings, search.labels, ks=(1,), **search.options)
    result = {}
    for name in ("R@1", "RP", "MAP@R"):
        counted = values[name][~np.isnan(values[name])]
        if not len(counted):
            continue
        interval = metrics.interval(values[name], groups=search.labels, over=average)
        result[name] = {
            "value": metrics.average(values[name], search.labels, over=average),
            "average": average,
            "interval": _finite(interval),
            "queries": len(counted),
        }
    return result


def by_prefix(
    embeddings: np.ndarray, split: Split, prefixes: Sequence[int], *, average: str = "queries"
) -> dict[int, dict[str, dict[str, Any]]]:
    """Computes `scores` of every prefix that is shorter than the embeddings, by dimension."""
    return {
        dim: scores(vectors.prefix(embeddings, dim), split, average=average)
        for dim in prefixes
        if dim < embeddings.shape[1]
    }


def _finite(interval: tuple[float, float]) -> list[float] | None:
    return None if math.isnan(interval[0]) else [float(x) for x in interval]


def halves(data: Labeled) -> tuple[Labeled, Labeled]:
    """Returns the images of a random half of the classes, and the images of the other half."""
    classes = np.random.default_rng(0).permutation(np.unique(data.labels))
    first = np.isin(data.labels, classes[: len(classes) // 2])
    one, other = (Labeled(data.embeddings[x], data.labels[x]) for x in (first, ~first))
    return one, other


def thresholds(chosen_on: Labeled, test: Labeled, *, split: str) -> dict[str, files.Threshold]:
    """Chooses cosines from which two images count as one class, by the rate of false matches.

    They are chosen on the pairs of `chosen_on`, the images of `split`, and measured on pairs of
    `test`, and on each image of `test` as a query among all others (`metrics.stranger_rates`). The
    net must have seen neither set, because false matches among its training images are rare. The
    result is empty for fewer than 8 classes, and leaves out rates with fewer than 10 expected false
    matches.
    """
    if len(np.unique(chosen_on.labels)) < FEWEST_CLASSES:
        return {}
    histograms = metrics.similarity_histograms(chosen_on.embeddings, chosen_on.labels)
    rates = metrics.offered_fmrs(histograms, FMRS)
    cosines = {rate: metrics.threshold_at_fmr(histograms, rate) for rate in rates}
    pairs = int(histograms.negatives.sum())
    measured = _pair_rates(test, list(cosines.values()))
    near = metrics.neighborhoods(test.embeddings, test.labels, k=1)
    return {
        f"fmr={rate:.0e}".replace("e-0", "e-"): files.Threshold(
            cosine, split, pairs, files.Rates(**measured[cosine], **_refused(near, cosine))
        )
        for rate, cosine in cosines.items()
    }


def _refused(near: metrics.Neighborhoods, cosine: float) -> dict[str, Any]:
    rates = metrics.stranger_rates(near, cosine)
    named = {"known_refused": rates.known_refused, "strangers_refused": rates.strangers_refused}
    return {name: None if math.isnan(rate) else rate for name, rate in named.items()}


def _pair_rates(data: Labeled, cosines: list[float]) -> dict[float, dict[str, Any]]:
    """Computes FMR and FNMR at each cosine; intervals draw whole classes with replacement.

    M[a, b] of the N[a, b] pairs of the classes a and b match. With weights w of the classes, FMR is
    sum_{a != b} w_a w_b M / sum_{a != b} w_a w_b N, and FNMR is the same over a = b with N - M in
    place of M.
    """
    classes, codes = np.unique(data.labels, return_inverse=True)
    order = np.argsort(codes, kind="stable")
    x, codes = data.embeddings[order].astype(np.float32), codes[order]
    starts = np.searchsorted(codes, np.arange(len(classes)))
    sizes = np.bincount(codes)
    pairs = np.outer(sizes, sizes) - np.diag(sizes)  # ordered, no image with itself
    rng = np.random.default_rng(0)
    weights = rng.multinomial(len(classes), np.full(len(classes), 1 / len(classes)), _SAMPLES)
    result = {}
    for cosine in cosines:
        matches = np.zeros((len(classes), len(classes)))
        for start in range(0, len(x), _BLOCK):
            rows = slice(start, start + _BLOCK)
            passing = x[rows] @ x.T >= cosine
            passing[np.arange(len(passing)), np.arange(start, start + len(passing))] = False
            by_class = np.add.reduceat(passing, starts, axis=1, dtype=np.int64)
            np.add.at(matches, codes[rows], by_class)
        result[cosine] = _rates(matches, pairs.astype(np.float64), weights.astype(np.float64))
    return result


def _rates(matches: np.ndarray, pairs: np.ndarray, weights: np.ndarray) -> dict[str, Any]:
    def fmr(w):
        same = np.sum(w * w * np.diag(matches), axis=-1), np.sum(w * w * np.diag(pairs), axis=-1)
        total = (np.sum((w @ matrix) * w, axis=-1) for matrix in (matches, pairs))
        passing, count = (a - b for a, b in zip(total, same, strict=True))
        return passing / np.where(count > 0, count, np.nan)

    def fnmr(w):  # w, not its square: a class drawn twice brings its pairs twice
        passing, count = (np.sum(w * np.diag(matrix), axis=-1) for matrix in (matches, pairs))
        return 1 - passing / np.where(count > 0, count, np.nan)

    rates: dict[str, Any] = {}
    ones = np.ones(len(pairs))
    enough = len(pairs) >= FEWEST_CLASSES
    for name, function in (("fmr", fmr), ("fnmr", fnmr)):
        value = float(function(ones))
        draws = function(weights) if enough else np.array([np.nan])
        draws = draws[~np.isnan(draws)]
        rates[name] = None if math.isnan(value) else value
        rates[f"{name}_interval"] = tuple(limits(draws, LEVEL)) if len(draws) else None
    rates["different_pairs"] = int((pairs.sum() - np.trace(pairs)) // 2)
    rates["same_pairs"] = int(np.trace(pairs) // 2)
    return rates
