"""Searches by definition: loops over all pairs, in double precision."""

import numpy as np

from dmljax import retrieval


def all_similarities(queries, gallery, name="euclidean"):
    """[q n] in double precision, by definition."""
    queries, gallery = np.asarray(queries, np.float64), np.asarray(gallery, np.float64)
    if name == "euclidean":
        return np.stack([-0.5 * ((query - gallery) ** 2).sum(-1) for query in queries])
    norms = [np.linalg.norm(x, axis=1, keepdims=True) for x in (queries, gallery)]
    queries, gallery = (
        x / np.where(n > 0, n, 1) for x, n in zip((queries, gallery), norms, strict=True)
    )
    return queries @ gallery.T


def naive_ranks(similarities, labels, gallery_labels, *, within, counts=None):
    """{query: ranks of its positives}, by counting, among the items where `counts [q n]`."""
    ranks = {}
    for i, row in enumerate(similarities):
        searched = np.arange(len(row)) != (i if within else -1)
        if counts is not None:
            searched &= counts[i]
        positives = np.sort(row[searched & (gallery_labels == labels[i])])[::-1]
        negatives = row[searched & (gallery_labels != labels[i])]
        if len(positives):
            ranks[i] = [j + 1 + int((negatives >= p).sum()) for j, p in enumerate(positives)]
    return ranks


def ranks_by_query(blocks):
    """{query: ranks of its positives} of what `retrieval.ranks` yields."""
    ranks = {}
    for block in blocks:
        for query, row in zip(block.queries.tolist(), block.ranks, strict=True):
            assert query not in ranks and (row > 0).sum() == np.flatnonzero(row > 0)[-1] + 1
            ranks[query] = row[row > 0].tolist()
    return ranks


def all_ranks(*args, **kwargs):
    return ranks_by_query(retrieval.ranks(*args, **kwargs))


def lattice(rng, n, d=3, top=3):
    """Small whole numbers: many duplicates and ties, and all arithmetic is exact."""
    return rng.integers(0, top, (n, d)).astype(np.float32)
