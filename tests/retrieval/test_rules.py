"""Similarities, exclusion and ties against their definitions, pair by pair."""

import jax.numpy as jnp
import numpy as np
import pytest

from dmljax import retrieval
from dmljax.retrieval import rules


def _naive(name, query, item):
    if name == "euclidean":
        return -sum((a - b) ** 2 for a, b in zip(query, item, strict=True)) / 2
    norms = np.sqrt(sum(a * a for a in query)) * np.sqrt(sum(b * b for b in item))
    return sum(a * b for a, b in zip(query, item, strict=True)) / norms if norms > 0 else 0.0


@pytest.mark.parametrize("name", ["euclidean", "cosine"])
@pytest.mark.parametrize("offset", [0.0, 2.5])
def test_product_and_offsets_give_the_similarity(name, offset):
    rng = np.random.default_rng(0)
    queries, items = rng.standard_normal((5, 4)), rng.standard_normal((7, 4))
    items[3] = 0
    similarity_fn = getattr(retrieval, name)
    center = jnp.full(4, offset, jnp.float32)
    q, query_offsets = similarity_fn(jnp.asarray(queries, jnp.float32), center)
    g, item_offsets = similarity_fn(jnp.asarray(items, jnp.float32), center)
    similarities = q @ g.T + query_offsets[:, None] + item_offsets[None]
    for i in range(5):
        for j in range(7):
            expected = _naive(name, queries[i], items[j])
            np.testing.assert_allclose(similarities[i, j], expected, atol=1e-5)


def test_a_similarity_of_a_user_is_one_function():
    """The inner product: long vectors are near to everything."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((40, 3)) * rng.uniform(0.1, 9, (40, 1))
    dot = lambda vectors, center: (vectors, jnp.zeros_like(vectors[:, 0]))  # noqa: E731
    indices, _ = retrieval.nearest(x, x[:30], k=5, similarity_fn=dot)
    np.testing.assert_array_equal(indices, np.argsort(-(x @ x[:30].T), axis=1)[:, :5])


def test_sorted_negatives_are_counted_by_the_rule_of_ties():
    rng = np.random.default_rng(2)
    negatives, positives = np.sort(rng.integers(0, 9, 50) / 2), rng.integers(-1, 10, 12) / 2
    expected = [sum(bool(rules.precedes(n, p)) for n in negatives) for p in positives]
    assert rules.count_ahead(negatives, positives).tolist() == expected


@pytest.mark.parametrize("numpy", [np, jnp])
def test_pairs_that_share_a_group_in_any_column_are_left_out(numpy):
    rng = np.random.default_rng(3)
    rows, columns = rng.integers(0, 4, (6, 2)), rng.integers(0, 4, (9, 2))
    expected = [[any(a == b for a, b in zip(r, c, strict=True)) for c in columns] for r in rows]
    mask = rules.mask(numpy.asarray(rows)[:, None], numpy.asarray(columns)[None])
    np.testing.assert_array_equal(mask, expected)
