"""The triplet loss over the triplets that a miner selects, against loops."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dmljax import losses, miners

MARGIN = 0.3
# The miner, and which gaps d_an - d_ap it selects.
TRIPLET_MINERS = {
    "triplet_margin": (
        functools.partial(miners.triplet_margin, margin=MARGIN),
        lambda gap: gap <= MARGIN,
    ),
    "hard_triplets": (miners.hard_triplets, lambda gap: gap <= 0),
    "semihard_triplets": (
        functools.partial(miners.semihard_triplets, margin=MARGIN),
        lambda gap: 0 < gap <= MARGIN,
    ),
    "easy_triplets": (
        functools.partial(miners.easy_triplets, margin=MARGIN),
        lambda gap: gap > MARGIN,
    ),
}


@pytest.mark.parametrize("name", TRIPLET_MINERS)
def test_a_triplet_loss_is_the_mean_over_the_mined_triplets(name):
    mine_fn, selects = TRIPLET_MINERS[name]
    x = np.random.default_rng(8).normal(size=(9, 3))
    labels = np.array([0, 0, 0, 1, 1, 2, 2, 2, 5])
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    d = np.linalg.norm(unit[:, None] - unit[None], axis=-1)
    terms = []
    for a, p, n in itertools.product(range(9), repeat=3):
        if a != p and labels[a] == labels[p] and labels[a] != labels[n]:
            gap = d[a, n] - d[a, p]
            if selects(gap):
                terms.append(max(0, 0.5 - gap))
    expected = np.mean([term for term in terms if term > 0])
    with jax.enable_x64(True):
        value = losses.triplet(jnp.asarray(x), labels, margin=0.5, mine_fn=mine_fn)
        dense = losses.triplet(jnp.asarray(x), labels, margin=0.5, mine_fn=mine_fn, reduce_fn=None)
    np.testing.assert_allclose(value, expected, rtol=1e-9)
    np.testing.assert_allclose(np.asarray(dense).sum(), sum(terms), rtol=1e-9)


def test_pairs_with_references_are_mined():
    rng = np.random.default_rng(10)
    x, y = rng.normal(size=(4, 3)), rng.normal(size=(7, 3))
    labels, others = np.arange(4), np.array([0, 1, 2, 3, 0, 1, 2])
    unit, others_unit = (z / np.linalg.norm(z, axis=1, keepdims=True) for z in (x, y))
    d = np.linalg.norm(unit[:, None] - others_unit[None], axis=-1)
    alike = labels[:, None] == others[None]
    farthest, nearest = np.where(alike, d, -1).max(axis=1), np.where(alike, 9, d).min(axis=1)
    loss = functools.partial(losses.triplet, margin=2.0, mine_fn=miners.batch_hard)
    value = jax.jit(loss)(x, labels, references=y, reference_labels=others)
    np.testing.assert_allclose(value, np.mean(farthest - nearest + 2), rtol=1e-5)
