"""Figures of a model for its card and manifest: scores and thresholds."""

import math
from typing import Any, NamedTuple

import numpy as np

from dmljax import metrics
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
        if queries := int((~np.isnan(values[name])).sum()):
            interval = metrics.interval(values[name], groups=search.labels, over=average)
            result[name] = {
                "value": metrics.average(values[name], search.labels, over=average),
                "average": average,
                "interval": None if math.isnan(interval[0]) else [float(x) for x in interval],
                "queries": queries,
            }
    return result


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
    pairs = int(histograms.negatives.sum())
    near = metrics.neighborhoods(test.embeddings, test.labels, k=1)
    result = {}
    for rate in metrics.offered_fmrs(histograms, FMRS):
        cosine = metrics.threshold_at_fmr(histograms, rate)
        refused = metrics.stranger_rates(near, cosine)
        measured = files.Rates(
            **_pair_rates(test, cosine),
            known_refused=_none_if_nan(refused.known_refused),
            strangers_refused=_none_if_nan(refused.strangers_refused),
        )
        name = f"fmr={rate:.0e}".replace("e-0", "e-")
        result[name] = files.Threshold(cosine, split, pairs, measured)
    return result


def _none_if_nan(rate: float) -> float | None:
    return None if math.isnan(rate) else float(rate)


def _pair_rates(data: Labeled, cosine: float) -> dict[str, Any]:
    """Computes FMR and FNMR at a cosine; intervals draw whole classes with replacement.

    M[a, b] of the N[a, b] pairs of the classes a and b match. With weights w of the classes, FMR is
    sum_{a != b} w_a w_b M / sum_{a != b} w_a w_b N, and FNMR is the same over a = b with N - M in
    place of M, and w_a in place of its square: a class drawn twice brings its pairs twice.
    """
    classes, codes = np.unique(data.labels, return_inverse=True)
    order = np.argsort(codes, kind="stable")
    x, codes = data.embeddings[order].astype(np.float32), codes[order]
    starts, sizes = np.searchsorted(codes, np.arange(len(classes))), np.bincount(codes)
    pairs = (np.outer(sizes, sizes) - np.diag(sizes)).astype(float)  # ordered, none with itself
    matches = np.zeros_like(pairs)
    for start in range(0, len(x), _BLOCK):
        rows = slice(start, start + _BLOCK)
        passing = x[rows] @ x.T >= cosine
        passing[np.arange(len(passing)), np.arange(start, start + len(passing))] = False
        by_class = np.add.reduceat(passing, starts, axis=1, dtype=np.int64)
        np.add.at(matches, codes[rows], by_class)
    same_matches, same_pairs = np.diag(matches), np.diag(pairs)
    other_matches, other_pairs = matches - np.diag(same_matches), pairs - np.diag(same_pairs)

    def ratio(passing, count):
        return passing / np.where(count > 0, count, np.nan)

    def fmr(w):
        passing, count = (
            np.sum((w @ matrix) * w, axis=1) for matrix in (other_matches, other_pairs)
        )
        return ratio(passing, count)

    def fnmr(w):
        return 1 - ratio(w @ same_matches, w @ same_pairs)

    count = len(classes)
    draws = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), _SAMPLES)
    rates: dict[str, Any] = {}
    for name, rate_fn in (("fmr", fmr), ("fnmr", fnmr)):
        rates[name] = _none_if_nan(rate_fn(np.ones((1, count)))[0])
        drawn = rate_fn(draws.astype(float))
        drawn = drawn[~np.isnan(drawn)] if count >= FEWEST_CLASSES else drawn[:0]
        rates[f"{name}_interval"] = tuple(limits(drawn, LEVEL)) if len(drawn) else None
    rates["different_pairs"] = int(other_pairs.sum()) // 2
    rates["same_pairs"] = int(same_pairs.sum()) // 2
    return rates
