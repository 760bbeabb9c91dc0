"""The map: t-SNE against its definition, and the items between the anchors."""

import numpy as np
import pytest
from page_cases import clustered

from dmljax.report import projection, sprites


def test_the_probabilities_have_the_perplexity_and_are_symmetric():
    x, _ = clustered(50, 5)
    p = np.asarray(projection._attraction(x, 8.0), np.float64)
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


def test_neighborhoods_survive_the_projection():
    x, labels = clustered(200, 10, spread=0.3)
    places = projection.plane(x, labels)
    distances = ((places[:, None] - places[None]) ** 2).sum(axis=2)
    np.fill_diagonal(distances, np.inf)
    assert np.mean(labels[distances.argmin(axis=1)] == labels) > 0.95
    np.testing.assert_array_equal(places, projection.plane(x, labels))


def test_items_between_anchors_lie_near_their_nearest_anchors():
    x, labels = clustered(120, 6, spread=0.3)
    places = projection.plane(x, labels, most=60)
    chosen = projection.anchors(labels, 60)
    assert np.bincount(labels[chosen]).tolist() == [10] * 6  # the classes in turn
    np.testing.assert_array_equal(places[chosen], projection.tsne(_units(x)[chosen]))
    for i in np.setdiff1d(np.arange(120), chosen)[:20]:
        cosines = x[chosen].astype(np.float64) @ x[i]
        near = np.argsort(-cosines)[:3]
        weights = np.exp(cosines[near] / 0.03)
        expected = weights @ places[chosen[near]] / weights.sum()
        np.testing.assert_allclose(places[i], expected, rtol=1e-3, atol=1e-3)


def _units(x):
    """As `plane` makes unit vectors: t-SNE would amplify a difference in the last bit."""
    return x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)


@pytest.mark.parametrize("dimension", [1, 2])
def test_flat_embeddings_are_their_own_map(dimension):
    x = np.random.default_rng(0).normal(size=(9, dimension)).astype(np.float32)
    places = projection.plane(x, np.zeros(9, int))
    np.testing.assert_array_equal(places[:, :dimension], x)
    assert (places[:, dimension:] == 0).all()


def test_thumbnails_within_the_budget_come_from_lists_first_and_then_from_classes_in_turn():
    assert sprites.thumbnail_size(5000)[:2] == (5000, 64)
    assert sprites.thumbnail_size(8000)[:2] == (8000, 48)
    assert sprites.thumbnail_size(60_502)[:2] == (5500, 48)
    labels = np.repeat([0, 1, 2], [50, 5, 5])
    chosen = sprites.choose(labels, [49, 48], 14)
    assert {48, 49} <= set(chosen.tolist()) and len(set(chosen.tolist())) == 14
    counts = np.bincount(labels[chosen], minlength=3)
    assert counts.tolist() == [6, 4, 4] and (np.diff(labels[chosen]) >= 0).all()


@pytest.mark.parametrize("shape", [(1, 500, 3), (500, 1, 1), (7, 5, 3)])
def test_images_of_any_shape_fill_a_cell(shape):
    image = np.full(shape, 90, np.uint8)
    cell = sprites.cover(image, 64)
    assert cell.shape == (64, 64, 3) and (cell == 90).all()
