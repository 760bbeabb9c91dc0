"""The losses of ABE against loops in float64."""

import jax
import numpy as np
import pytest
from abe_cases import naive_contrastive, unit

from dmljax import miners, ops
from dmljax.methods.abe import contrastive, divergence, mean_divergence

RNG = np.random.default_rng(0)
X = unit(RNG.normal(size=(8, 3))).astype(np.float32)
LABELS = np.array([0, 0, 1, 1, 2, 2, 2, 3])


@pytest.mark.parametrize("options", [{}, {"margin": 2.5}, {"push_positives": True}])
def test_contrastive_is_the_formula(options):
    expected = naive_contrastive(X, LABELS, **options)
    np.testing.assert_allclose(contrastive(X, LABELS, **options), expected, rtol=1e-5)


def test_contrastive_counts_only_masked_and_mined_pairs():
    where = np.arange(8) < 5
    np.testing.assert_allclose(
        contrastive(X, LABELS, where=where), naive_contrastive(X[:5], LABELS[:5]), rtol=1e-5
    )
    pairs = miners.batch_hard(ops.unit_euclidean(X, X), ops.pairs(LABELS))
    mined = contrastive(X, LABELS, mine_fn=miners.batch_hard)
    np.testing.assert_allclose(mined, contrastive(X, pairs), rtol=1e-6)
    assert abs(float(mined) - naive_contrastive(X, LABELS)) > 0.1
    assert contrastive(X, np.full(8, True)[:, None] * False) > 0  # no class: all are negatives


LEARNERS = unit(RNG.normal(size=(4, 3, 5)) + 1).astype(np.float32)


@pytest.mark.parametrize("margin", [1.0, 0.4])
def test_divergence_is_the_formula(margin):
    total = 0.0
    for image in LEARNERS.astype(np.float64):
        for p in range(3):
            for q in range(p):
                total += max(0, margin - np.sum((image[p] - image[q]) ** 2))
    np.testing.assert_allclose(divergence(LEARNERS, margin=margin), total / 4, rtol=1e-5)
    mean = mean_divergence(LEARNERS, margin=margin)
    np.testing.assert_allclose(mean, total / 4 / 3, rtol=1e-5)


def test_the_divergence_of_one_learner_is_0():
    value, slope = jax.value_and_grad(divergence)(LEARNERS[:, :1])
    assert value == 0 and not np.any(slope)
