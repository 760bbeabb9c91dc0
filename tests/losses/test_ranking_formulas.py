"""Ranking losses on batches whose loss is known, also where pytorch-metric-learning is wrong."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from naive_ranking import unit
from scipy.special import expit

from dmljax import losses


def _perfect(labels):
    """Every class a point of its own, all classes at right angles."""
    return np.eye(np.max(labels) + 1, dtype=np.float32)[labels]


def test_smooth_ap_of_a_perfect_batch_is_0_for_all_class_sizes():
    # The peer takes 4 x 3 for 3 x 4 and reports .297.
    for labels in (np.repeat(np.arange(4), 3), np.array([0, 1, 0, 2, 2, 1, 0, 0, 3, 3])):
        assert jax.jit(losses.smooth_ap)(_perfect(labels), labels) < 1e-4


def test_histogram_has_a_last_bin_for_duplicates():
    labels = np.repeat(np.arange(3), 3)
    value, gradient = jax.value_and_grad(losses.histogram)(jnp.asarray(_perfect(labels)), labels)
    assert value == 0  # all positives are in the last bin, all negatives far below
    assert np.isfinite(gradient).all()
    # If all vectors are equal, every positive lies in the bin of every negative.
    assert losses.histogram(np.ones((4, 2), np.float32), np.array([0, 0, 1, 1])) > 0.9999


def test_recall_at_k_does_not_rank_the_query():
    # One positive, nearest: rank 1, so sigmoid(k - 1).
    labels = np.array([0, 0, 1, 1])
    value = losses.recall_at_k(_perfect(labels), labels, ks=(1, 2))
    assert value == pytest.approx(1 - (expit(0) + expit(1)) / 2, abs=1e-6)


def test_recall_at_k_divides_by_the_most_that_k_places_hold():
    # All of one class and alike: each of 7 positives has rank 4.
    x, labels = np.ones((8, 2), np.float32), np.zeros(8, int)
    assert losses.recall_at_k(x, labels, ks=(2,)) == pytest.approx(1 - 7 * expit(-2) / 2, abs=1e-5)
    assert losses.recall_at_k(x, labels, ks=(16,)) == pytest.approx(0, abs=1e-4)
    # The recall is at most 1, however many positives rank within k.
    assert losses.recall_at_k(x, labels, ks=(5,)) == pytest.approx(0, abs=1e-6)


def test_fast_ap_is_one_minus_precision_where_bins_are_pure():
    # All positives are opposite to the anchor, so they rank last, behind all negatives.
    x = np.array([[1, 0], [-1, 0], [1, 0], [-1, 0]], np.float32)
    assert losses.fast_ap(x, np.array([0, 0, 1, 1])) == pytest.approx(1 - 1 / 3)
    assert losses.fast_ap(x, np.array([0, 1, 0, 1])) == pytest.approx(0)


def test_histogram_entries_are_shares_of_positives_below_a_negative():
    x = jnp.asarray(np.random.default_rng(5).normal(size=(10, 3)), jnp.float32)
    labels = np.arange(10) // 3
    shares = losses.histogram(x, labels, reduce_fn=None)
    assert shares.shape == (10, 10) and shares.min() >= 0 and shares.max() < 1.0001
    s = unit(x) @ unit(x).T
    has_positives = labels < 3
    alike = s[(labels[:, None] == labels[None]) & ~np.eye(10, dtype=bool)]
    for i, j in ((0, 3), (5, 9), (9, 5)):
        assert has_positives[i] or has_positives[j]
        assert shares[i, j] == pytest.approx(np.mean(alike < s[i, j]), abs=0.12)
