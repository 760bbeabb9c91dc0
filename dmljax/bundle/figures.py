"""Figures of a model for its card and manifest: scores, thresholds, costs of compression."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dmljax import metrics, vectors
from dmljax.bundle import compression
from dmljax.data.splits import Split
from dmljax.metrics.significance import FEWEST_CLASSES, LEVEL, limits

FMRS = (1e-2, 1e-3, 1e-4)
_NEIGHBORS = 10
_CANDIDATES = 10  # times as many candidates as neighbors are rescored
_BLOCK = 256  # queries at a time
_SAMPLES = 1000


class Labeled(NamedTuple):
    """Embeddings of readable images, and their labels."""

    embeddings: np.ndarray
    labels: np.ndarray


def scores(
    embeddings: np.ndarray, split: Split, *, average: str = "queries"
) -> dict[str, dict[str, Any]]:
    """R@1, R-precision and MAP@R by the split's protocol, each with its interval over classes.

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
    """`scores` of every prefix that is shorter than the embeddings, by its dimensions."""
    return {
        dim: scores(vectors.prefix(embeddings, dim), split, average=average)
        for dim in prefixes
        if dim < embeddings.shape[1]
    }


def _finite(interval: tuple[float, float]) -> list[float] | None:
    return None if math.isnan(interval[0]) else [float(x) for x in interval]


def halves(data: Labeled) -> tuple[Labeled, Labeled]:
    """The images of a random half of the classes, and the images of the other half."""
    classes = np.random.default_rng(0).permutation(np.unique(data.labels))
    first = np.isin(data.labels, classes[: len(classes) // 2])
    return tuple(Labeled(data.embeddings[x], data.labels[x]) for x in (first, ~first))


def thresholds(chosen_on: Labeled, test: Labeled, *, split: str) -> dict[str, dict[str, Any]]:
    """Cosines at which two images count as one class, by the rate of false matches.

    They are chosen on the pairs of `chosen_on`, the images of `split`, and measured on pairs of
    `test`, and on each image of `test` as a query among all others (`metrics.stranger_rates`). The
    net must have seen neither set, because false matches among the images of its training are rare.
    There are none for fewer than 8 classes. A rate needs 10 expected false matches, or it is left
    out.
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
        f"fmr={rate:.0e}".replace("e-0", "e-"): {
            "cosine": cosine,
            "chosen_on": split,
            "pairs": pairs,
            "test": measured[cosine] | _refused(near, cosine),
        }
        for rate, cosine in cosines.items()
    }


def _refused(near: metrics.Neighborhoods, cosine: float) -> dict[str, float | None]:
    rates = metrics.stranger_rates(near, cosine)._asdict()
    return {name: None if math.isnan(rate) else rate for name, rate in rates.items()}


def _pair_rates(data: Labeled, cosines: list[float]) -> dict[float, dict[str, Any]]:
    """FMR and FNMR at each cosine, with intervals: whole classes are drawn with replacement.

    Of classes a and b, M[a, b] pairs match out of N[a, b]. With weights w of the classes, FMR is
    sum_{a != b} w_a w_b M / sum_{a != b} w_a w_b N, and FNMR is the same over a = b with N - M for
    M.
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
        rates[f"{name}_interval"] = list(limits(draws, LEVEL)) if len(draws) else None
    rates["different_pairs"] = int((pairs.sum() - np.trace(pairs)) // 2)
    rates["same_pairs"] = int(np.trace(pairs) // 2)
    return rates


def compression_table(
    fitted: Mapping[str, np.ndarray], test: Labeled, prefixes: Sequence[int] = ()
) -> dict[str, dict[str, float]]:
    """R@1, MAP@R and recall@10 against float32 for every codec, on the images of `test`.

    Stored vectors are compressed and queries are float32. Every image searches all others.
    """
    codecs = compression.codecs(fitted)
    x = test.embeddings.astype(np.float32)
    codes = {name: codec.encode(x) for name, codec in codecs.items()}

    def similarities(name: str) -> Callable[[slice], np.ndarray]:
        return lambda rows: codecs[name].similarities(x[rows], codes[name])

    def rescored(rough_fn: Callable, exact_fn: Callable) -> Callable[[slice], np.ndarray]:
        def best_rescored(rows: slice) -> np.ndarray:
            rough, exact = rough_fn(rows), exact_fn(rows)
            rough[np.arange(len(rough)), np.arange(rows.start, rows.start + len(rough))] = -np.inf
            return compression.rescored(rough, exact, candidates=_CANDIDATES * _NEIGHBORS)

        return best_rescored

    functions = {name: similarities(name) for name in codecs}
    sizes = {name: codec.bytes_per_item for name, codec in codecs.items()}
    name = "binary, rescored by int8"
    functions[name] = rescored(similarities("binary"), similarities("int8"))
    sizes[name] = sizes["binary"] + sizes["int8"]
    exact = _nearest(functions["float32"], test.labels)
    table = {}
    for name, function in functions.items():
        near = exact if name == "float32" else _nearest(function, test.labels)
        table[name] = {"bytes": sizes[name], **_figures(near, exact, test.labels)}
    return table


def _nearest(function: Callable[[slice], np.ndarray], labels: np.ndarray) -> np.ndarray:
    """The nearest images of every image: enough for R-precision and recall@10."""
    n = len(labels)
    k = min(n - 1, max(_NEIGHBORS, int(np.bincount(labels).max()) - 1))
    rows = []
    for start in range(0, n, _BLOCK):
        values = function(slice(start, min(start + _BLOCK, n)))
        values[np.arange(len(values)), np.arange(start, start + len(values))] = -np.inf
        best = np.argpartition(-values, k - 1, axis=1)[:, :k]
        best.sort(axis=1)  # ties by index
        order = np.argsort(-np.take_along_axis(values, best, axis=1), axis=1, kind="stable")
        rows.append(np.take_along_axis(best, order, axis=1))
    return np.concatenate(rows)


def _figures(near: np.ndarray, exact: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    hits = labels[near] == labels[:, None]
    positives = np.bincount(labels)[labels] - 1
    where = (np.arange(near.shape[1])[None] < positives[:, None]) & (positives > 0)[:, None]
    precision = np.cumsum(hits, axis=1) / np.arange(1, near.shape[1] + 1)[None]
    scored = positives > 0
    maps = (precision * hits * where).sum(axis=1)[scored] / positives[scored]
    k = min(_NEIGHBORS, near.shape[1])
    common = [len(np.intersect1d(a[:k], b[:k])) / k for a, b in zip(near, exact, strict=True)]
    return {
        "R@1": float(hits[scored, 0].mean()) if scored.any() else math.nan,
        "MAP@R": float(maps.mean()) if scored.any() else math.nan,
        "recall@10": float(np.mean(common)),
    }
