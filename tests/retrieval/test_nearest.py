"""Nearest neighbors against sorting all similarities."""

import jax
import numpy as np
import pytest
from search_loops import all_similarities

from dmljax import retrieval


@pytest.mark.parametrize(("k", "name"), [(1, "euclidean"), (5, "cosine"), (200, "euclidean")])
def test_nearest_neighbors_are_those_of_sorting_all_similarities(k, name):
    rng = np.random.default_rng(8)
    q, g = rng.standard_normal((150, 6)), rng.standard_normal((200, 6))
    indices, similarities = retrieval.nearest(
        q, g, k=k, similarity_fn=getattr(retrieval, name), tile=128
    )
    expected = all_similarities(q, g, name)
    np.testing.assert_array_equal(indices, np.argsort(-expected, axis=1)[:, :k])
    np.testing.assert_allclose(similarities, -np.sort(-expected, axis=1)[:, :k], atol=1e-5)


def test_nearest_excludes_oneself_and_orders_ties_by_index():
    x = np.zeros((300, 2))
    indices, similarities = retrieval.nearest(x, k=3, tile=128)
    expected = [[j for j in range(5) if j != i][:3] for i in range(300)]
    np.testing.assert_array_equal(indices, expected)
    np.testing.assert_array_equal(similarities, 0)
    assert retrieval.nearest(x, x, k=1)[0].tolist() == [[0]] * 300
    indices, similarities = retrieval.nearest(np.eye(5), k=1, groups=np.zeros(5, int))
    assert (indices == -1).all() and np.isneginf(similarities).all()


@pytest.mark.parametrize(
    ("columns", "devices", "within"), [(1, 2, True), (2, None, True), (2, 2, False)]
)
def test_nearest_outside_groups(columns, devices, within):
    """An item that shares a group with the query in any column is left out; -1 is no group."""
    rng = np.random.default_rng(9)
    q, g = rng.standard_normal((150, 6)), rng.standard_normal((200, 6))
    g = q if within else g
    groups, others = (rng.integers(-1, 4, (len(x), columns)) * 2**33 for x in (q, g))
    groups, others = (np.where(x < 0, -1, x) for x in (groups, others))
    others = groups if within else others
    search = {} if within else {"gallery": g, "gallery_groups": others.squeeze()}
    search |= {"devices": devices and jax.local_devices()[:devices]}
    k = 149 if within else 200
    indices, similarities = retrieval.nearest(q, k=k, groups=groups.squeeze(), tile=128, **search)
    expected = all_similarities(q, g)
    for i in range(len(q)):
        allowed = [
            j
            for j in np.argsort(-expected[i], kind="stable")
            if not (within and i == j)
            and not any(a == b != -1 for a, b in zip(groups[i], others[j], strict=True))
        ]
        assert allowed and indices[i, : len(allowed)].tolist() == allowed
        assert (indices[i, len(allowed) :] == -1).all()
        assert np.isneginf(similarities[i, len(allowed) :]).all()
        np.testing.assert_allclose(similarities[i, : len(allowed)], expected[i][allowed], atol=1e-4)
