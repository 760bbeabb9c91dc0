"""The losses of DVML against loops in float64."""

import jax
import numpy as np

from dmljax.methods.dvml import (
    divergence,
    n_pairs,
    reconstruction_half_sum,
    reconstruction_mean_square,
    reconstruction_norm,
)

RNG = np.random.default_rng(0)


def test_divergence_is_that_of_two_normals():
    mean, log_variance = RNG.normal(size=(2, 4, 3))
    expected = 0.0
    grid = np.linspace(-12, 12, 20_001)
    for m, v in zip(mean.ravel(), np.exp(log_variance.ravel()), strict=True):
        log_p = -((grid - m) ** 2) / (2 * v) - np.log(2 * np.pi * v) / 2
        log_q = -(grid**2) / 2 - np.log(2 * np.pi) / 2
        expected += np.sum(np.exp(log_p) * (log_p - log_q)) * (grid[1] - grid[0])
    actual = divergence(mean.astype(np.float32), log_variance.astype(np.float32))
    np.testing.assert_allclose(actual, expected / 4, rtol=1e-4)
    assert divergence(np.zeros((2, 3), np.float32), np.zeros((2, 3), np.float32)) == 0


def test_divergence_pulls_a_huge_variance_back():
    zeros, huge = np.zeros((1, 1), np.float32), np.full((1, 1), 1e3, np.float32)
    value, slope = jax.value_and_grad(divergence, argnums=1)(zeros, huge)
    assert np.isfinite(value) and np.isfinite(slope).all() and slope > 1


def test_reconstruction_has_three_forms():
    features, decoded = RNG.normal(size=(4, 6)), RNG.normal(size=(3, 4, 6))
    norms = [np.linalg.norm(features[i] - decoded[t, i]) for t in range(3) for i in range(4)]
    args = features.astype(np.float32), decoded.astype(np.float32)
    np.testing.assert_allclose(reconstruction_norm(*args), np.mean(norms), rtol=1e-5)
    squares = np.sum(np.square(norms))
    half = reconstruction_half_sum(*args)
    np.testing.assert_allclose(half, squares / 3 / 2, rtol=1e-5)
    mean = reconstruction_mean_square(*args)
    np.testing.assert_allclose(mean, squares / (3 * 4 * 6), rtol=1e-5)
    slope = jax.grad(lambda d: reconstruction_norm(args[0], d))(args[0][None])
    np.testing.assert_array_equal(slope, 0)  # not NaN, where nothing is left to do


def test_n_pairs_is_softmax_over_the_positives():
    anchors, positives = RNG.normal(size=(2, 4, 3))
    x = np.concatenate([anchors, positives]).astype(np.float32)
    labels = np.tile(np.arange(4), 2)
    terms = []
    for i in range(4):
        others = [anchors[i] @ (positives[j] - positives[i]) for j in range(4) if j != i]
        terms.append(np.log1p(np.sum(np.exp(others))))
    norms = np.mean(np.sum(anchors**2, axis=1)) + np.mean(np.sum(positives**2, axis=1))
    for weight in (0.0, 3e-3, 0.5):
        expected = np.mean(terms) + weight / 4 * norms
        np.testing.assert_allclose(n_pairs(x, labels, l2_weight=weight), expected, rtol=1e-5)
    np.testing.assert_allclose(n_pairs(x, labels), np.mean(terms) + 3e-3 / 4 * norms, rtol=1e-5)
