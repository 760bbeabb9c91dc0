"""The map of the embeddings: near items stay near, the same map twice, and degenerate data."""

import numpy as np
import pytest

from dmljax.report import projection


def _clusters(n, *, classes=12, d=16, seed=0):
    rng = np.random.default_rng(seed)
    labels = np.arange(n) % classes
    return rng.standard_normal((classes, d))[labels] + 0.3 * rng.standard_normal((n, d)), labels


def _share_of_class(positions, labels, k=5):
    distances = ((positions[:, None] - positions[None]) ** 2).sum(axis=2)
    np.fill_diagonal(distances, np.inf)
    near = np.argsort(distances, axis=1)[:, :k]
    return np.mean(labels[near] == labels[:, None])


def test_tsne_keeps_neighborhoods_and_repeats_itself():
    embeddings, labels = _clusters(120)
    embeddings[9] = np.nan
    positions = projection.map_positions(embeddings, labels)
    readable = np.arange(120) != 9
    assert np.isnan(positions).all(axis=1).tolist() == (~readable).tolist()
    assert _share_of_class(positions[readable], labels[readable]) > 0.95
    again = projection.map_positions(embeddings, labels)
    np.testing.assert_array_equal(again, positions)


def test_items_lie_between_their_nearest_anchors():
    embeddings, labels = _clusters(600)
    positions = projection.map_positions(embeddings, labels, anchors=120)
    anchors = projection._anchors(labels, 120, seed=0)
    assert np.bincount(labels[anchors]).tolist() == [10] * 12  # by class in turn
    units = embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True)
    for i in np.setdiff1d(np.arange(600), anchors)[::37]:
        cosines = units[anchors] @ units[i]
        best = np.argsort(-cosines)[:3]
        weights = np.exp((cosines[best] - cosines[best[0]]) / 0.03)
        expected = (weights[:, None] * positions[anchors[best]]).sum(axis=0) / weights.sum()
        np.testing.assert_allclose(positions[i], expected, rtol=1e-3, atol=1e-3)
    assert _share_of_class(positions, labels) > 0.9


@pytest.mark.parametrize("d", [1, 2])
def test_flat_embeddings_are_the_map(d):
    embeddings = np.random.default_rng(0).standard_normal((30, d))
    positions = projection.map_positions(embeddings, np.zeros(30, int), anchors=10)
    np.testing.assert_array_equal(positions[:, :d], embeddings)
    assert not positions[:, d:].any()


@pytest.mark.parametrize("n", [0, 1, 2, 3, 4, 6])
def test_few_items(n):
    embeddings, labels = _clusters(n) if n else (np.zeros((0, 16)), np.zeros(0, int))
    positions = projection.map_positions(embeddings, labels)
    assert positions.shape == (n, 2) and np.isfinite(positions).all()


def test_collapsed_embeddings():
    assert not projection.map_positions(np.ones((50, 8)), np.zeros(50, int)).any()


def test_the_probabilities_have_the_perplexity_and_are_symmetric():
    x, _ = _clusters(50, classes=5)
    x = (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)
    p = np.asarray(projection._attraction(x, np.float32(np.log(8))), np.float64)
    np.testing.assert_allclose(p, p.T, rtol=1e-6)
    assert p.sum() == pytest.approx(1, rel=1e-4) and (np.diag(p) == 0).all()
    squares = ((x[:, None].astype(np.float64) - x[None]) ** 2).sum(axis=2)
    conditional = np.zeros((50, 50))
    for i in range(50):
        low, high = 1e-3, 1e6
        others = np.delete(np.arange(50), i)
        for _ in range(200):
            precision = np.sqrt(low * high)
            weights = np.exp(-precision * (squares[i, others] - squares[i, others].min()))
            weights /= weights.sum()
            entropy = -np.sum(weights[weights > 0] * np.log(weights[weights > 0]))
            low, high = (precision, high) if entropy > np.log(8) else (low, precision)
        conditional[i, others] = weights
    np.testing.assert_allclose(p, (conditional + conditional.T) / 100, atol=2e-5)
