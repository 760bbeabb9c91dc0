"""k-reciprocal neighbourhoods (Zhong et al., 2017): the graph system's batches at test time.

A net that attends over its batch needs, at test time, batches of images that belong together. Each
image (or query) gets one: itself and its nearest among those whose neighbourhoods agree with its
own.
"""

from __future__ import annotations

import numpy as np

__all__ = ["k_reciprocal", "k_reciprocal_queries"]


def _nearest(queries: np.ndarray, references: np.ndarray, count: int, tile: int = 512):
    """Indices of the `count` nearest references of each query, nearest first, ties by index."""
    count = min(count, len(references))
    norms = np.einsum("nd,nd->n", references, references)
    found = np.empty((len(queries), count), np.int64)
    for begin in range(0, len(queries), tile):
        block = queries[begin : begin + tile]
        scores = norms - 2 * (block @ references.T)
        # The rows are cut at the value of the last neighbour, so that ties are broken by index
        # and not by how the partition happened to fall.
        bound = np.partition(scores, count - 1, axis=1)[:, count - 1 : count]
        for row, (score, limit) in enumerate(zip(scores, bound, strict=True), begin):
            near = np.flatnonzero(score <= limit)
            found[row] = near[np.argsort(score[near], kind="stable")[:count]]
    return found


def _expanded(first: np.ndarray, back: list[bool], near: np.ndarray, near_sets: list[set]):
    """R and, of each member of R whose own neighbourhood mostly lies in R, that neighbourhood."""
    mutual = [f for f, whose in zip(first.tolist(), back, strict=True) if whose]
    reciprocal = set(mutual)
    expanded = set(reciprocal)
    for c in mutual:
        own = {f for f in near[c].tolist() if c in near_sets[f]}
        if len(own & reciprocal) > 2 / 3 * len(own):
            expanded |= own
    return expanded


def _batch(begin: list[int], members: set, ranking: np.ndarray, distances, size: int) -> list[int]:
    """`begin`, then the nearest members, then the nearest of all until `size` is reached."""
    order = np.array(sorted(members - set(begin)), np.int64)
    order = order[np.argsort(distances(order), kind="stable")] if len(order) else order
    batch = (begin + order.tolist())[:size]
    taken = set(batch)
    batch += [i for i in ranking.tolist() if i not in taken][: size - len(batch)]
    return batch


def _distances(query: np.ndarray, references: np.ndarray):
    return lambda rows: np.square(references[rows] - query).sum(axis=1)


def k_reciprocal(embeddings: np.ndarray, *, k: int = 30, batch_size: int = 7) -> np.ndarray:
    """The batch of each image, `[n batch_size]`: itself, then its k-reciprocal neighbours.

    R holds those of the `k + 1` nearest that have the image among their own; the expansion looks
    at the `k / 2 + 1` nearest. Memory is bounded: no n x n matrix is kept.
    """
    x = np.asarray(embeddings, np.float64)
    if not 1 <= batch_size <= len(x):
        raise ValueError(f"batches of {batch_size} do not suit {len(x)} embeddings")
    ranking = _nearest(x, x, max(k + 1, batch_size))
    near = ranking[:, : round(k / 2) + 1]
    near_sets, sets = (
        [set(r) for r in near.tolist()],
        [set(r) for r in ranking[:, : k + 1].tolist()],
    )
    batches = np.empty((len(x), batch_size), np.int64)
    for i in range(len(x)):
        first = ranking[i, : k + 1]
        back = [i in sets[f] for f in first.tolist()]
        members = _expanded(first, back, near, near_sets)
        batches[i] = _batch([i], members, ranking[i], _distances(x[i], x), batch_size)
    return batches


def k_reciprocal_queries(
    queries: np.ndarray, gallery: np.ndarray, *, k: int = 30, batch_size: int = 4
) -> np.ndarray:
    """In-Shop: for each query its `batch_size - 1` gallery neighbours, `[q batch_size - 1]`.

    Reciprocity is tested with each gallery item's ranking of the queries, the expansion within the
    gallery.
    """
    q, g = np.asarray(queries, np.float64), np.asarray(gallery, np.float64)
    size = batch_size - 1
    if not 1 <= size <= len(g):
        raise ValueError(f"batches of {batch_size} do not suit a gallery of {len(g)}")
    ranking = _nearest(q, g, max(k + 1, size))
    back_sets = [set(row) for row in _nearest(g, q, k + 1).tolist()]
    near = _nearest(g, g, round(k / 2) + 1)
    near_sets = [set(row) for row in near.tolist()]
    batches = np.empty((len(q), size), np.int64)
    for i in range(len(q)):
        first = ranking[i, : k + 1]
        back = [i in back_sets[f] for f in first.tolist()]
        members = _expanded(first, back, near, near_sets)
        batches[i] = _batch([], members, ranking[i], _distances(q[i], g), size)
    return batches
