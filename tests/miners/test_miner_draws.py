"""Miners that draw at random: the distribution of what they draw, and their keys."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from miner_cases import DRAWS, EVERY, KEY

from dmljax import miners, ops


def test_distance_weighted_draws_by_the_inverse_density():
    distances = jnp.array([[0.3, 0.2, 0.7, 0.9, 1.2, 1.5]])
    positives = jnp.array([[True, False, False, False, False, False]])
    pairs = ops.Pairs(positives, ~positives)
    draw = jax.jit(
        jax.vmap(lambda key: miners.distance_weighted(distances, pairs, key=key, dim=6).negatives)
    )
    drawn = np.asarray(draw(jax.random.split(KEY, 20_000)))[:, 0]
    assert (drawn.sum(axis=1) == 1).all()
    d = np.maximum(distances[0], 0.5)
    weights = 1 / (d**4 * (1 - d**2 / 4) ** 1.5)
    weights = np.where((np.arange(6) > 0) & (np.asarray(distances[0]) < 1.4), weights, 0)
    np.testing.assert_allclose(drawn.mean(axis=0), weights / weights.sum(), atol=0.01)


def test_distance_weighted_draws_distinct_negatives_as_many_as_positives():
    rng = np.random.default_rng(0)
    distances = rng.uniform(0, 2, (40, 50)).astype(np.float32)
    kinds = rng.choice(["p", "n", "-"], (40, 50), p=[0.3, 0.5, 0.2])
    kinds[:3], kinds[3:5], kinds[5:7] = "p", "n", "-"
    positives, negatives = kinds == "p", kinds == "n"
    chosen = miners.distance_weighted(distances, ops.Pairs(positives, negatives), key=KEY, dim=64)
    possible = negatives & (distances < 1.4)
    assert not (chosen.negatives & ~possible).any()
    counts = np.minimum(positives.sum(axis=1), possible.sum(axis=1))
    np.testing.assert_array_equal(chosen.negatives.sum(axis=1), counts)
    np.testing.assert_array_equal(chosen.positives, positives & (counts > 0)[:, None])


def test_distance_weighted_survives_many_dimensions_and_antipodes():
    distances = jnp.array([[0.0, 1e-3, 1.9, 2.0, 2.0000002]])
    positives = jnp.array([[True] * 1 + [False] * 4])
    chosen = miners.distance_weighted(
        distances, ops.Pairs(positives, ~positives), key=KEY, dim=4096, nonzero_loss_cutoff=3
    )
    # Of the negatives, the one whose distance is least likely in 4096 dimensions is drawn.
    log_q = [4094 * np.log(d) + 2046.5 * np.log(1 - d**2 / 4) for d in (0.5, 1.9)]
    np.testing.assert_array_equal(np.flatnonzero(chosen.negatives[0]), [1 + np.argmin(log_q)])


def test_uniform_histogram_fills_every_bin_alike():
    rng = np.random.default_rng(1)
    distances = rng.beta(2, 5, (30, 40)).astype(np.float32) * 2
    kinds = rng.choice(["p", "n", "-"], (30, 40), p=[0.2, 0.7, 0.1])
    pairs = ops.Pairs(kinds == "p", kinds == "n")
    chosen = miners.uniform_histogram(
        distances, pairs, key=KEY, num_bins=8, pos_per_bin=5, neg_per_bin=20
    )
    for mask, drawn, per_bin in zip(pairs, chosen, (5, 20), strict=True):
        drawn = np.asarray(drawn)
        assert not (drawn & ~mask).any()
        d = distances[mask].astype(float)
        edges = np.linspace(d.min(), d.max() + 1e-6, 9)
        sizes, _ = np.histogram(d, edges)
        drawn_sizes, _ = np.histogram(distances[drawn], edges)
        np.testing.assert_array_equal(drawn_sizes, np.minimum(sizes, per_bin))
        assert (sizes > per_bin).any() and (sizes < per_bin).any()


def test_uniform_histogram_draws_evenly_within_a_bin():
    distances = jnp.zeros((2, 6)).at[1].set(1.0)
    pairs = ops.Pairs(jnp.zeros((2, 6), bool), jnp.ones((2, 6), bool))
    draw = jax.vmap(
        lambda key: miners.uniform_histogram(distances, pairs, key=key, neg_per_bin=2).negatives
    )
    drawn = np.asarray(jax.jit(draw)(jax.random.split(KEY, 10_000)))
    assert (drawn.sum(axis=2) == 2).all()
    np.testing.assert_allclose(drawn.mean(axis=0), 1 / 3, atol=0.02)


@pytest.mark.parametrize("name", DRAWS)
def test_the_same_key_gives_the_same_draw_and_another_key_another(name):
    rng = np.random.default_rng(2)
    distances, pairs = rng.uniform(0.5, 1.3, (20, 20)), ops.pairs(np.arange(20) // 4)
    draw = functools.partial(EVERY[name], distances, pairs)
    first, repeated, other = draw(key=KEY), draw(key=KEY), draw(key=jax.random.key(1))
    np.testing.assert_array_equal(first.negatives, repeated.negatives)
    assert (first.negatives != other.negatives).any()
