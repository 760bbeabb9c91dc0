"""k-reciprocal neighborhoods (Zhong et al., 2017), on the host.

Two items are k-reciprocal neighbors if each is among the k nearest of the other. At test time, a
net that attends over its batch gets one batch per image: the image and its k-reciprocal neighbors.
"""

from __future__ import annotations

import numpy as np

from dmljax.retrieval import tiles

__all__ = ["k_reciprocal", "k_reciprocal_queries"]


def _nearest(queries: np.ndarray, references: np.ndarray, count: int, tile: int = 512):
    """The `count` nearest references of each query, nearest first, ties by index, `[q count]`."""
    count = min(count, len(references))
    norms = np.einsum("nd,nd->n", references, references)
    nearest = np.empty((len(queries), count), np.int64)
    for start in range(0, len(queries), tile):
        tiles.check_stop()
        block = queries[start : start + tile]
        scores = norms - 2 * (block @ references.T)
        # Keep everything up to the distance of the last neighbor, so that ties are broken by index
        # and not by the order that `partition` leaves.
        bound = np.partition(scores, count - 1, axis=1)[:, count - 1 : count]
        for row, (score, limit) in enumerate(zip(scores, bound, strict=True), start):
            near = np.flatnonzero(score <= limit)
            nearest[row] = near[np.argsort(score[near], kind="stable")[:count]]
    return nearest


def _expanded(candidates: list[int], mutual: list[bool], near: np.ndarray, near_sets: list[set]):
    """The candidates with `mutual`, plus the neighborhoods of those that mostly agree with them.

    A neighborhood is added if more than two thirds of it are already among the mutual candidates.
    """
    reciprocal = {i for i, is_mutual in zip(candidates, mutual, strict=True) if is_mutual}
    expanded = set(reciprocal)
    for i in reciprocal:
        neighborhood = {j for j in near[i].tolist() if i in near_sets[j]}
        if len(neighborhood & reciprocal) > 2 / 3 * len(neighborhood):
            expanded |= neighborhood
    return expanded


def _batch(
    first: list[int],
    members: set[int],
    ranking: np.ndarray,
    query: np.ndarray,
    references: np.ndarray,
    size: int,
) -> list[int]:
    """`first`, then the nearest members, then the nearest references, `size` in total."""
    order = np.array(sorted(members - set(first)), np.int64)
    if len(order):
        distances = np.square(references[order] - query).sum(axis=1)
        order = order[np.argsort(distances, kind="stable")]
    batch = (first + order.tolist())[:size]
    chosen = set(batch)
    remaining = [i for i in ranking.tolist() if i not in chosen]
    return batch + remaining[: size - len(batch)]


def k_reciprocal(embeddings: np.ndarray, *, k: int = 30, batch_size: int = 7) -> np.ndarray:
    """The batch of each image: itself, then its k-reciprocal neighbors, `[n batch_size]`.

    The `k + 1` nearest images that have the image among their own `k + 1` nearest are expanded by
    neighborhoods of `k / 2 + 1`. If these are fewer than `batch_size`, the nearest images follow.
    Memory is bounded: no n x n matrix is kept.

    Reference: Zhong et al., Re-ranking Person Re-identification with k-reciprocal Encoding, CVPR
    2017, arXiv:1701.08398; the batches are as in Seidenschwarz et al., ICML 2021.

    Args:
        embeddings: `[n d]`, compared by Euclidean distance.
        k: Reciprocal neighbors are chosen among this many.
        batch_size: The image and its neighbors.

    >>> x = np.array([[0.0], [0.1], [5.0], [5.1]])
    >>> retrieval.k_reciprocal(x, k=1, batch_size=2).tolist()
    [[0, 1], [1, 0], [2, 3], [3, 2]]
    """
    x = np.asarray(embeddings, np.float64)
    if not 1 <= batch_size <= len(x):
        raise ValueError(f"batch_size must be between 1 and {len(x)} embeddings, not {batch_size}")
    ranking = _nearest(x, x, max(k + 1, batch_size))
    near = ranking[:, : round(k / 2) + 1]
    near_sets = [set(row) for row in near.tolist()]
    sets = [set(row) for row in ranking[:, : k + 1].tolist()]
    batches = np.empty((len(x), batch_size), np.int64)
    for i in range(len(x)):
        candidates = ranking[i, : k + 1].tolist()
        mutual = [i in sets[candidate] for candidate in candidates]
        members = _expanded(candidates, mutual, near, near_sets)
        batches[i] = _batch([i], members, ranking[i], x[i], x, batch_size)
    return batches


def k_reciprocal_queries(
    queries: np.ndarray, gallery: np.ndarray, *, k: int = 30, batch_size: int = 4
) -> np.ndarray:
    """The k-reciprocal neighbors of each query in a gallery, `[q batch_size - 1]`, as for In-Shop.

    A gallery item is reciprocal if it has the query among its `k + 1` nearest queries. The
    expansion uses neighborhoods within the gallery.

    Reference: as `k_reciprocal`.

    Args:
        queries: `[q d]`, compared by Euclidean distance.
        gallery: `[n d]`.
        k: Reciprocal neighbors are chosen among this many.
        batch_size: The query and its neighbors.

    >>> queries, gallery = np.array([[0.0], [5.2]]), np.array([[5.0], [0.1], [5.1]])
    >>> retrieval.k_reciprocal_queries(queries, gallery, k=1, batch_size=2).tolist()
    [[1], [2]]
    """
    q, g = np.asarray(queries, np.float64), np.asarray(gallery, np.float64)
    size = batch_size - 1
    if not 1 <= size <= len(g):
        raise ValueError(f"batch_size must be between 2 and {len(g) + 1}, not {batch_size}")
    ranking = _nearest(q, g, max(k + 1, size))
    back_sets = [set(row) for row in _nearest(g, q, k + 1).tolist()]
    near = _nearest(g, g, round(k / 2) + 1)
    near_sets = [set(row) for row in near.tolist()]
    batches = np.empty((len(q), size), np.int64)
    for i in range(len(q)):
        candidates = ranking[i, : k + 1].tolist()
        mutual = [i in back_sets[candidate] for candidate in candidates]
        members = _expanded(candidates, mutual, near, near_sets)
        batches[i] = _batch([], members, ranking[i], q[i], g, size)
    return batches
