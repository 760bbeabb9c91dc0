"""k-reciprocal neighborhoods against the definition written out."""

import numpy as np
import pytest

from dmljax.retrieval import k_reciprocal


def _order(x, y):
    distances = ((x[:, None] - y[None]) ** 2).sum(-1)
    return distances, np.argsort(distances, axis=1, kind="stable").tolist()


def _referee(q, g, k, size):
    """The definition, with full matrices and lists."""
    d, forward = _order(q, g)
    back, within = _order(g, q)[1], _order(g, g)[1]
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


@pytest.mark.parametrize("k, size", [(30, 7), (6, 7), (4, 9), (5, 1)])
def test_neighborhoods_are_those_of_the_definition(k, size):
    rng = np.random.default_rng(k)
    centers = rng.normal(size=(12, 6))
    x = centers[rng.integers(12, size=90)] + 0.6 * rng.normal(size=(90, 6))
    batches = k_reciprocal(x, k=k, batch_size=size)
    assert (batches == _referee(x, x, k, size)).all()
    assert (batches[:, 0] == np.arange(90)).all()
    assert all(len(set(row.tolist())) == size for row in batches)


def test_neighborhoods_of_queries_are_those_of_the_definition():
    rng = np.random.default_rng(0)
    centers = rng.normal(size=(8, 5))
    q = centers[rng.integers(8, size=30)] + 0.5 * rng.normal(size=(30, 5))
    g = centers[rng.integers(8, size=70)] + 0.5 * rng.normal(size=(70, 5))
    plain, ties = (q, g), (np.round(q[:, :2]), np.round(g[:, :2]))
    for sets, k, size in ((plain, 6, 3), (plain, 7, 12), (plain, 30, 3), (ties, 6, 5)):
        batches = k_reciprocal(*sets, k=k, batch_size=1 + size)
        assert (batches == _referee(*sets, k, size)).all()
    assert k_reciprocal(q, g).shape == (30, 3) and k_reciprocal(q).shape == (30, 7)


def test_an_image_leads_its_batch_even_among_copies_of_itself():
    x = np.zeros((8, 3))
    batches = k_reciprocal(x, k=3, batch_size=4)
    assert (batches[:, 0] == np.arange(8)).all()
    with pytest.raises(ValueError, match="between 1 and 8, got 9"):
        k_reciprocal(x, batch_size=9)
    with pytest.raises(ValueError, match="between 2 and 9, got 1"):
        k_reciprocal(x, x, batch_size=1)
