"""Sums of losses, and statistics against a triple loop."""

import jax
import numpy as np
import pytest

from dmljax import losses, ops


def _data(b=9):
    rng = np.random.default_rng(13)
    return rng.normal(size=(b, 4)).astype(np.float32), rng.integers(0, 3, size=b)


def test_weighted_sum():
    x, y = _data()
    both = losses.weighted_sum({"a": (0.5, losses.contrastive), "b": (2.0, losses.ntxent)})
    where = np.arange(9) < 7
    total, values = both(x, y, where=where)
    assert set(values) == {"a", "b"}
    np.testing.assert_allclose(values["a"], losses.contrastive(x, y, where=where), rtol=1e-6)
    np.testing.assert_allclose(values["b"], losses.ntxent(x, y, where=where), rtol=1e-6)
    np.testing.assert_allclose(total, 0.5 * values["a"] + 2 * values["b"], rtol=1e-6)
    slope, _ = jax.jit(jax.grad(both, has_aux=True))(x, y)
    parts = 0.5 * jax.grad(losses.contrastive)(x, y) + 2 * jax.grad(losses.ntxent)(x, y)
    np.testing.assert_allclose(slope, parts, rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match="no losses"):
        losses.weighted_sum({})


def _naive(x, y, margin):
    x = x / np.sqrt((x * x).sum(1, keepdims=True))
    b = range(len(x))
    d = np.array([[np.sqrt(((x[i] - x[j]) ** 2).sum()) for j in b] for i in b])
    positives = {(i, j) for i in b for j in b if i != j and y[i] == y[j]}
    negatives = {(i, j) for i in b for j in b if y[i] != y[j]}
    triplets = [(a, p, n) for a, p in positives for i, n in negatives if i == a]
    active = [(a, p, n) for a, p, n in triplets if d[a, p] - d[a, n] + margin > 0]

    def share(hits, of):
        return len(set(hits)) / max(len(set(of)), 1)

    return {
        "positive_distance": np.mean([d[pair] for pair in positives]) if positives else 0,
        "negative_distance": np.mean([d[pair] for pair in negatives]) if negatives else 0,
        "active_triplets": share(active, triplets),
        "active_positives": share([t[:2] for t in active], [t[:2] for t in triplets]),
        "active_negatives": share([t[::2] for t in active], [t[::2] for t in triplets]),
    }


@pytest.mark.parametrize("margin", [0.0, 0.2, 0.7])
def test_stats(margin):
    x, y = _data()
    expected = _naive(x.astype(np.float64), y, margin)
    assert margin or 0 < expected["active_triplets"] < 1
    ours = jax.jit(lambda x, y: losses.stats(x, y, margin=margin))(x, y)
    assert set(ours) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(ours[name], value, rtol=1e-5, err_msg=name)
    where = np.arange(9) != 4
    masked = losses.stats(np.where(where[:, None], x, np.nan), y, margin=margin, where=where)
    for name, value in _naive(x[where].astype(np.float64), y[where], margin).items():
        np.testing.assert_allclose(masked[name], value, rtol=1e-5, err_msg=name)
    # With the batch as references and itself left out by id, the same.
    pairs = ops.pairs(y, y, ids=np.arange(9), reference_ids=np.arange(9))
    apart = losses.stats(x, pairs, margin=margin, references=x.copy())
    for name, value in expected.items():
        np.testing.assert_allclose(apart[name], value, rtol=1e-4, err_msg=name)


def test_a_collapse_shows():
    x, y = np.ones((6, 4), np.float32), np.array([0, 0, 1, 1, 2, 2])
    stats = losses.stats(x, y)
    assert stats["negative_distance"] == stats["positive_distance"] == 0
    assert stats["active_triplets"] == stats["active_positives"] == stats["active_negatives"] == 1
    solved = losses.stats(np.eye(3, dtype=np.float32)[y], y)
    assert solved["active_triplets"] == solved["active_positives"] == 0


@pytest.mark.parametrize("y", [[0, 0, 0], [0, 1, 2]])
def test_stats_without_triplets(y):
    x = np.random.default_rng(14).normal(size=(3, 4)).astype(np.float32)
    stats = losses.stats(x, np.array(y))
    assert np.isfinite(list(stats.values())).all()
    assert stats["active_triplets"] == stats["active_positives"] == stats["active_negatives"] == 0


def test_stats_have_no_gradient():
    x, y = _data()
    assert not np.any(jax.grad(lambda x: losses.stats(x, y)["positive_distance"])(x))
