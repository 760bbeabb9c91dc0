"""k-reciprocal neighborhoods (Zhong et al., 2017), on the host.

Two items are k-reciprocal neighbors if each is among the k nearest of the other. At test time, a
net that attends over its batch gets one batch per image: the image and its k-reciprocal neighbors.
"""

import numpy as np
from jaxtyping import Float, Int

from dmljax.retrieval import neighbors, tiles

__all__ = ["k_reciprocal", "k_reciprocal_queries"]


def k_reciprocal(
    embeddings: Float[np.ndarray, "n d"], *, k: int = 30, batch_size: int = 7
) -> Int[np.ndarray, "n batch_size"]:
    """Returns the batch of each image: itself, then its k-reciprocal neighbors.

    The `k + 1` nearest images that have the image among their own `k + 1` nearest are expanded by
    neighborhoods of `k / 2 + 1`. If these are fewer than `batch_size`, the nearest images follow.
    Images are compared by Euclidean distance.

    Reference: Zhong et al., Re-ranking Person Re-identification with k-reciprocal Encoding, CVPR
    2017, arXiv:1701.08398; the batches are as in Seidenschwarz et al., ICML 2021.

    >>> x = np.array([[0.0], [0.1], [5.0], [5.1]])
    >>> retrieval.k_reciprocal(x, k=1, batch_size=2).tolist()
    [[0, 1], [1, 0], [2, 3], [3, 2]]
    """
    if not 1 <= batch_size <= len(embeddings):
        raise ValueError(
            f"`batch_size` must be between 1 and {len(embeddings)} embeddings, got {batch_size}"
        )
    ranking = _nearest(embeddings, embeddings, max(k + 1, batch_size))
    back, near = ranking[:, : k + 1], ranking[:, : round(k / 2) + 1]
    x = np.asarray(embeddings, np.float64)
    batches = [
        _batch([i], x[i], x, ranking[i], members, batch_size)
        for i, members in enumerate(_members(ranking[:, : k + 1], back, near))
    ]
    return np.array(batches, np.int64)


def k_reciprocal_queries(
    queries: Float[np.ndarray, "q d"],
    gallery: Float[np.ndarray, "n d"],
    *,
    k: int = 30,
    batch_size: int = 4,
) -> Int[np.ndarray, "q m"]:
    """Returns the `batch_size - 1` k-reciprocal neighbors of each query in a gallery.

    A gallery item is reciprocal if it has the query among its `k + 1` nearest queries, as for
    In-Shop. The expansion uses neighborhoods within the gallery. See `k_reciprocal`.

    >>> queries, gallery = np.array([[0.0], [5.2]]), np.array([[5.0], [0.1], [5.1]])
    >>> retrieval.k_reciprocal_queries(queries, gallery, k=1, batch_size=2).tolist()
    [[1], [2]]
    """
    size = batch_size - 1
    if not 1 <= size <= len(gallery):
        raise ValueError(f"`batch_size` must be between 2 and {len(gallery) + 1}, got {batch_size}")
    ranking = _nearest(queries, gallery, max(k + 1, size))
    back, near = _nearest(gallery, queries, k + 1), _nearest(gallery, gallery, round(k / 2) + 1)
    q, g = np.asarray(queries, np.float64), np.asarray(gallery, np.float64)
    batches = [
        _batch([], q[i], g, ranking[i], members, size)
        for i, members in enumerate(_members(ranking[:, : k + 1], back, near))
    ]
    return np.array(batches, np.int64)


def _nearest(
    queries: Float[np.ndarray, "q d"], references: Float[np.ndarray, "n d"], count: int
) -> Int[np.ndarray, "q k"]:
    return neighbors.nearest(queries, references, k=min(count, len(references)))[0]


def _members(
    candidates: Int[np.ndarray, "q k"], back: Int[np.ndarray, "n j"], near: Int[np.ndarray, "n m"]
) -> list[set[int]]:
    """Returns the mutual candidates of each query and the neighborhoods that agree with them.

    `back` are the nearest queries of each reference, and `near` its nearest references. A
    neighborhood is added if more than two thirds of it are already among the mutual candidates.
    """
    back_sets, near_sets = ([set(row) for row in x.tolist()] for x in (back, near))
    neighborhoods = [{j for j in row if i in near_sets[j]} for i, row in enumerate(near.tolist())]
    members = []
    for i, row in enumerate(candidates.tolist()):
        tiles.check_stop()
        mutual = {c for c in row if i in back_sets[c]}
        agreeing = (neighborhoods[c] for c in mutual)
        members.append(mutual.union(*(x for x in agreeing if len(x & mutual) > 2 / 3 * len(x))))
    return members


def _batch(
    first: list[int],
    query: Float[np.ndarray, "d"],
    references: Float[np.ndarray, "n d"],
    ranking: Int[np.ndarray, "k"],
    members: set[int],
    size: int,
) -> list[int]:
    """Returns `first`, then the nearest members, then the nearest references, `size` in total."""
    order = np.array(sorted(members - set(first)), np.int64)
    distances = np.square(references[order] - query).sum(axis=1)
    batch = first + order[np.argsort(distances, kind="stable")].tolist()
    return [*dict.fromkeys(batch[:size] + ranking.tolist())][:size]
