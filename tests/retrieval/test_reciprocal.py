"""k-reciprocal neighborhoods against the definition written out."""

import numpy as np
import pytest

from dmljax.retrieval import reciprocal


def _referee(x, k, size):
    """The definition, with full matrices and lists."""
    d = ((x[:, None] - x[None]) ** 2).sum(-1)
    rank = np.argsort(d, axis=1, kind="stable").tolist()
    near_count = round(k / 2) + 1
    batches = []
    for i in range(len(x)):
        reciprocal = [f for f in rank[i][: k + 1] if i in rank[f][: k + 1]]
        expanded = set(reciprocal)
        for c in reciprocal:
            neighborhood = [f for f in rank[c][:near_count] if c in rank[f][:near_count]]
            if len(set(neighborhood) & set(reciprocal)) > 2 / 3 * len(neighborhood):
                expanded |= set(neighborhood)
        batch = sorted(expanded, key=lambda j: (d[i, j], j))[:size]
        for j in rank[i]:
            if len(batch) < size and j not in batch:
                batch.append(j)
        batches.append(batch)
    return np.array(batches)


def _referee_queries(q, g, k, size):
    d = ((q[:, None] - g[None]) ** 2).sum(-1)
    forward = np.argsort(d, axis=1, kind="stable").tolist()
    back = np.argsort(d.T, axis=1, kind="stable").tolist()
    within = ((g[:, None] - g[None]) ** 2).sum(-1)
    within = np.argsort(within, axis=1, kind="stable").tolist()
    near_count = round(k / 2) + 1
    batches = []
    for i in range(len(q)):
        reciprocal = [f for f in forward[i][: k + 1] if i in back[f][: k + 1]]
        expanded = set(reciprocal)
        for c in reciprocal:
            neighborhood = [f for f in within[c][:near_count] if c in within[f][:near_count]]
            if len(set(neighborhood) & set(reciprocal)) > 2 / 3 * len(neighborhood):
                expanded |= set(neighborhood)
        batch = sorted(expanded, key=lambda j: (d[i, j], j))[:size]
        batch += [j for j in forward[i] if j not in batch][: size - len(batch)]
        batches.append(batch)
    return np.array(batches)


@pytest.mark.parametrize("k, size", [(30, 7), (6, 7), (7, 7), (4, 9), (5, 1)])
def test_neighborhoods_are_those_of_the_definition(k, size):
    rng = np.random.default_rng(k)
    centers = rng.normal(size=(12, 6))
    x = centers[rng.integers(12, size=90)] + 0.6 * rng.normal(size=(90, 6))
    batches = reciprocal.k_reciprocal(x, k=k, batch_size=size)
    assert (batches == _referee(x, k, size)).all()
    assert (batches[:, 0] == np.arange(90)).all()
    assert all(len(set(row.tolist())) == size for row in batches)


def test_neighborhoods_of_queries_are_those_of_the_definition():
    rng = np.random.default_rng(0)
    centers = rng.normal(size=(8, 5))
    q = centers[rng.integers(8, size=30)] + 0.5 * rng.normal(size=(30, 5))
    g = centers[rng.integers(8, size=70)] + 0.5 * rng.normal(size=(70, 5))
    plain, ties = (q, g), (np.round(q[:, :2]), np.round(g[:, :2]))
    for sets, k, size in ((plain, 6, 3), (plain, 7, 12), (plain, 30, 3), (ties, 6, 5)):
        batches = reciprocal.k_reciprocal_queries(*sets, k=k, batch_size=1 + size)
        assert (batches == _referee_queries(*sets, k, size)).all()


def test_an_image_leads_its_batch_even_among_copies_of_itself():
    x = np.zeros((8, 3))
    batches = reciprocal.k_reciprocal(x, k=3, batch_size=4)
    assert (batches[:, 0] == np.arange(8)).all()
    with pytest.raises(ValueError, match="between 1 and 8 embeddings, got 9"):
        reciprocal.k_reciprocal(x, batch_size=9)
