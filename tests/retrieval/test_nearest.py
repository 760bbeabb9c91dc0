"""Nearest neighbors against sorting all similarities."""

import numpy as np
import pytest
from search_loops import all_similarities

from dmljax import retrieval


@pytest.mark.parametrize("k", [1, 5, 200])
@pytest.mark.parametrize("name", ["euclidean", "cosine"])
def test_nearest(k, name):
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
