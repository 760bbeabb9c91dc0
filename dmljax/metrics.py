"""Retrieval and clustering scores of embeddings, in double precision.

A query without a positive is lone: it counts in no score. The arguments of a search (`gallery`,
`similarity_fn`, `tile`, `devices`) are explained in `retrieval`; `ks` are the K of R@K. Items of
the query's own one of `groups` (and `gallery_groups`; -1 is none) are left out of its ranking.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from dmljax import retrieval as _retrieval
from dmljax.retrieval import Embeddings, Labels, SimilarityFn

__all__ = ["agreement", "clustering", "interval", "per_query", "retrieval"]


def retrieval(
    embeddings: Embeddings,
    labels: Labels,
    *,
    gallery: Embeddings | None = None,
    gallery_labels: Labels | None = None,
    groups: Int[np.ndarray, "q"] | None = None,
    gallery_groups: Int[np.ndarray, "n"] | None = None,
    ks: Sequence[int] = (1, 2, 4, 8),
    similarity_fn: SimilarityFn = _retrieval.euclidean,
    tile: int = 1024,
    devices: Sequence[Any] | None = None,
    per_class: bool = False,
) -> dict[str, Any]:
    """The means of `per_query` over the queries that have a positive, and how many have none.

    `per_class` adds 'per_class': {score: {label: mean over the queries of that label}}.
    """
    values = per_query(
        embeddings,
        labels,
        gallery=gallery,
        gallery_labels=gallery_labels,
        groups=groups,
        gallery_groups=gallery_groups,
        ks=ks,
        similarity_fn=similarity_fn,
        tile=tile,
        devices=devices,
    )
    valid = ~np.isnan(values["P@1"])
    if not valid.any():
        warnings.warn(
            f"none of the {len(valid)} queries has an item of its label to find, so that every "
            "retrieval score is NaN: check the labels of the queries and of the gallery",
            stacklevel=2,
        )
    out: dict[str, Any] = {name: _mean(value[valid]) for name, value in values.items()}
    out["lone"] = int((~valid).sum())
    if per_class:
        names, codes = np.unique(np.asarray(labels)[valid], return_inverse=True)
        sizes = np.bincount(codes, minlength=len(names))
        out["per_class"] = {
            name: dict(
                zip(names.tolist(), (np.bincount(codes, v[valid]) / sizes).tolist(), strict=True)
            )
            for name, v in values.items()
        }
    return out


def per_query(
    embeddings: Embeddings,
    labels: Labels,
    *,
    gallery: Embeddings | None = None,
    gallery_labels: Labels | None = None,
    groups: Int[np.ndarray, "q"] | None = None,
    gallery_groups: Int[np.ndarray, "n"] | None = None,
    ks: Sequence[int] = (1, 2, 4, 8),
    similarity_fn: SimilarityFn = _retrieval.euclidean,
    tile: int = 1024,
    devices: Sequence[Any] | None = None,
) -> dict[str, Float[np.ndarray, "q"]]:
    """The retrieval scores of every query, NaN for a lone one.

    With rank_j the rank of the j-th of the query's R positives: R@K = [rank_1 <= K] (P@1 = R@1),
    MRR = 1 / rank_1, RP = #{rank_j <= R} / R, mAP = mean_j j / rank_j, and MAP@R the same with
    the positives ranked behind R counted as 0 (Musgrave et al., 2020).
    """
    items = len(embeddings) - 1 if gallery is None else len(gallery)
    for k in ks:
        if not 1 <= k <= items:
            raise ValueError(
                f"R@{k} of ks={tuple(ks)}, but a query has {items} items to find: drop it, or "
                f"choose K from 1 to {items}"
            )
    out: dict[str, np.ndarray] = {}
    where = {"gallery": gallery, "gallery_labels": gallery_labels, "similarity_fn": similarity_fn}
    if groups is None:
        blocks = _retrieval.ranks(embeddings, labels, tile=tile, devices=devices, **where)
    else:
        where["gallery_groups"] = gallery_groups
        blocks = _retrieval.ranks_apart(embeddings, labels, groups, **where)
    for block in blocks:
        for name, value in _scores(block.ranks, ks).items():
            out.setdefault(name, np.full(len(embeddings), np.nan))[block.queries] = value
    return out or {name: np.full(len(embeddings), np.nan) for name in _scores(np.ones((1, 1)), ks)}


def interval(
    values: Float[np.ndarray, "q"],
    *,
    level: float = 0.95,
    samples: int = 1000,
    seed: int = 0,
) -> tuple[float, float]:
    """Bootstrap percentile interval of the mean of `values`, such as those of `per_query`."""
    if not 0 < level < 1:
        raise ValueError(f"level={level} must lie between 0 and 1, such as 0.95")
    values = np.asarray(values, np.float64)
    values = values[~np.isnan(values)]
    if not len(values):
        return float("nan"), float("nan")
    rng = np.random.default_rng(seed)
    means = [values[rng.integers(len(values), size=len(values))].mean() for _ in range(samples)]
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def clustering(
    embeddings: Embeddings,
    labels: Labels,
    *,
    seeds: Sequence[int] = (0, 1, 2),
    iterations: int = 100,
    tile: int = 1024,
    devices: Sequence[Any] | None = None,
) -> dict[str, float]:
    """`agreement` of the labels with k-means, k = number of labels: mean and spread over seeds."""
    if not len(seeds):
        raise ValueError("seeds=() leaves nothing to average: give at least one")
    labels = np.asarray(labels)
    if labels.shape != (len(embeddings),):
        raise ValueError(
            f"labels have shape {labels.shape}, but there are {len(embeddings)} embeddings"
        )
    k = len(np.unique(labels))
    runs = []
    for seed in seeds:
        found = _retrieval.kmeans(
            embeddings, k=k, seed=seed, iterations=iterations, tile=tile, devices=devices
        )
        runs.append(agreement(labels, found.assignment))
    out = {}
    for name in runs[0]:
        values = np.array([run[name] for run in runs])
        out |= {name: float(values.mean()), f"{name}_std": float(values.std())}
    return out


def agreement(labels: Labels, assignment: Int[np.ndarray, "b"]) -> dict[str, float]:
    """Scores of an assignment to clusters, from the cells of the contingency table that are filled.

    NMI = 2 I / (H + H'); AMI = (I - E[I]) / ((H + H') / 2 - E[I]) (Vinh et al., 2010); ARI
    (Hubert & Arabie, 1985); F1 over pairs of items of which both, or one, are one class or cluster.
    """
    labels, assignment = np.asarray(labels), np.asarray(assignment)
    if labels.ndim != 1 or labels.shape != assignment.shape or not len(labels):
        raise ValueError(
            f"labels have shape {labels.shape} and the assignment {assignment.shape}: give one "
            "label and one cluster for each item"
        )
    n = len(labels)
    _, classes = np.unique(labels, return_inverse=True)
    _, clusters = np.unique(assignment, return_inverse=True)
    a, b = np.bincount(classes), np.bincount(clusters)
    cells, sizes = np.unique(classes * len(b) + clusters, return_counts=True)
    if len(cells) == len(a) == len(b):  # the same partition: where 0 / 0 means 1
        return {"NMI": 1.0, "AMI": 1.0, "ARI": 1.0, "F1": 1.0}
    outer = a[cells // len(b)].astype(np.float64) * b[cells % len(b)]
    information = max(0.0, float(np.sum(sizes / n * np.log(sizes * n / outer))))
    mean_entropy = (_entropy(a) + _entropy(b)) / 2
    if len(a) == 1 or len(b) == 1:
        information = adjusted = 0.0
    else:
        expected = _expected_information(a, b)
        adjusted = (information - expected) / (mean_entropy - expected)
    both, same_class, same_cluster = (float(np.sum(m * (m - 1.0)) / 2) for m in (sizes, a, b))
    chance = same_class * same_cluster / (n * (n - 1) / 2)
    return {
        "NMI": information / mean_entropy,
        "AMI": adjusted,
        "ARI": (both - chance) / ((same_class + same_cluster) / 2 - chance),
        "F1": 2 * both / (same_class + same_cluster),
    }


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else float("nan")


def _scores(ranks: np.ndarray, ks: Sequence[int]) -> dict[str, np.ndarray]:
    first = ranks[:, 0]
    real = ranks > 0
    count = real.sum(axis=1)
    early = real & (ranks <= count[:, None])
    precision = np.arange(1, ranks.shape[1] + 1) / np.where(real, ranks, np.inf)
    return {f"R@{k}": (first <= k).astype(np.float64) for k in ks} | {
        "P@1": (first == 1).astype(np.float64),
        "RP": early.sum(axis=1) / count,
        "MAP@R": np.where(early, precision, 0).sum(axis=1) / count,
        "mAP": precision.sum(axis=1) / count,
        "MRR": 1 / first,
    }


def _entropy(sizes: np.ndarray) -> float:
    p = sizes / sizes.sum()
    return float(-np.sum(p * np.log(p)))


def _expected_information(a: np.ndarray, b: np.ndarray) -> float:
    """E[I] of two random partitions with these sizes: it depends on the distinct sizes alone.

    A hypergeometric sum for each pair of sizes: with thousands of classes, few pairs are distinct.
    """
    from scipy.special import gammaln

    n = int(a.sum())
    total = 0.0
    for x, x_times in zip(*np.unique(a, return_counts=True), strict=True):
        for y, y_times in zip(*np.unique(b, return_counts=True), strict=True):
            m = np.arange(max(1, x + y - n), min(x, y) + 1, dtype=np.float64)
            log_p = (
                gammaln(x + 1) + gammaln(y + 1) + gammaln(n - x + 1) + gammaln(n - y + 1)
                - gammaln(n + 1) - gammaln(m + 1) - gammaln(x - m + 1) - gammaln(y - m + 1)
                - gammaln(n - x - y + m + 1)
            )  # fmt: skip
            terms = m / n * (np.log(n * m) - np.log(x) - np.log(y)) * np.exp(log_p)
            total += x_times * y_times * float(terms.sum())
    return total
