"""Properties of all miners: masks, gradients, degenerate batches, NaN, precision, messages."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from miner_cases import DRAWS, EVERY, KEY, TRIPLET_MINERS, mined

from dmljax import losses, miners, ops
from dmljax.miners.selections import every, semihardest

# A pair of `across_halves` is never part of a triplet, and a dropped row moves the second half.
ONE_OF_EACH = [n for n in EVERY if ":" not in n or n.endswith("easy,semihard")]


ONE_OF_EACH.remove("across_halves")


each_miner = pytest.mark.parametrize("name", ONE_OF_EACH)


def test_every_miner_but_across_halves_is_tested_once():
    assert len(ONE_OF_EACH) == len(miners.__all__) - 1


@functools.cache
def _loss(name):
    """The value and gradient of a triplet loss over the mined pairs."""
    return jax.jit(
        jax.value_and_grad(functools.partial(losses.triplet, margin=1.0, mine_fn=EVERY[name]))
    )


_loss_of_pairs = jax.jit(jax.value_and_grad(functools.partial(losses.triplet, margin=1.0)))


def _batch(seed, b=9, d=4):
    x = np.random.default_rng(seed).normal(size=(b, d)).astype(np.float32)
    return x, np.arange(b) // 2


def _distances(x):
    unit = x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-30)
    return np.linalg.norm(unit[:, None] - unit[None], axis=-1).astype(np.float32)


@each_miner
def test_a_masked_row_is_a_dropped_row(name):
    x, labels = _batch(3)
    where = np.array([1, 1, 0, 1, 1, 1, 0, 1, 1], bool)
    distances = _distances(x)
    chosen = mined(name, distances, ops.pairs(labels, where=where))
    for mask in chosen:
        for axis in range(mask.ndim):
            assert not np.compress(~where, mask, axis=axis).any()
    if name in DRAWS:
        return
    fewer = mined(name, distances[where][:, where], ops.pairs(labels[where]))
    for mask, dropped in zip(chosen, fewer, strict=True):
        for axis in range(mask.ndim):
            mask = np.compress(where, mask, axis=axis)
        np.testing.assert_array_equal(mask, dropped)


@pytest.mark.parametrize("name", [name for name in ONE_OF_EACH if name not in TRIPLET_MINERS])
def test_no_gradient_flows_through_the_choice_of_pairs(name):
    x, labels = _batch(4)
    chosen = ops.Pairs(*mined(name, _distances(x), ops.pairs(labels)))
    value, gradient = _loss(name)(x, labels)
    fixed, slope = _loss_of_pairs(x, chosen)
    assert value > 0
    np.testing.assert_allclose(value, fixed, rtol=1e-5)
    np.testing.assert_allclose(gradient, slope, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in ONE_OF_EACH if name in TRIPLET_MINERS])
def test_no_gradient_flows_through_the_choice_of_triplets(name):
    x, labels = _batch(4)
    slope = jax.grad(lambda d: EVERY[name](d, ops.pairs(labels)).distances.sum())(_distances(x))
    assert not slope.any()


@each_miner
@pytest.mark.parametrize("labels", ([0] * 9, range(9), [0] * 5 + [1] * 4), ids=str)
def test_a_degenerate_batch_selects_only_pairs_and_has_a_finite_loss(name, labels):
    labels = np.array(labels)
    for x in (_batch(5)[0], np.ones((9, 4), np.float32), np.zeros((9, 4), np.float32)):
        for where in (np.ones(9, bool), np.zeros(9, bool)):
            pairs = ops.pairs(labels, where=where)
            chosen = mined(name, _distances(x), pairs)
            for mask, possible in zip(chosen, pairs, strict=len(chosen) == 2):
                possible = possible[..., None] if mask.ndim == 3 else possible
                assert not (mask & ~possible).any()
            value, gradient = _loss(name)(x, labels, where=where)
            assert np.isfinite(value) and np.isfinite(gradient).all()


@each_miner
@pytest.mark.parametrize("row", range(3))
def test_a_nan_in_a_row_makes_the_loss_nan(name, row):
    x, _ = _batch(6)
    x[row, 0] = np.nan
    assert np.isnan(_loss(name)(x, np.arange(9) // 3)[0])


# Those with a loop, and one that returns triplets.
@pytest.mark.parametrize("name", ["hardest_fraction", *DRAWS, "semihard_triplets"])
def test_vmap_in_half_precision_gives_the_values_of_single_batches(name):
    labels = np.arange(9) // 2
    x = jnp.stack([_batch(seed)[0] for seed in range(2)]).astype(jnp.bfloat16)
    values, gradients = jax.vmap(_loss(name), in_axes=(0, None))(x, labels)
    single = [_loss(name)(np.asarray(one, np.float32), labels)[0] for one in x]
    np.testing.assert_allclose(values, single, rtol=1e-5)
    assert gradients.dtype == jnp.bfloat16


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


def test_wrong_arguments_are_named(unchecked):
    distances, pairs = np.ones((3, 4), np.float32), ops.Pairs(*np.zeros((2, 3, 4), bool))
    wrong = [
        (miners.batch_easy_hard, {"pos_fn": semihardest}, "semihardest is relative to one pair"),
        (miners.batch_easy_hard, {"pos_fn": every}, "semihardest is relative to one pair"),
        (miners.hardest_fraction, {"fraction": 50}, "must be between 0 and 1, not 50"),
        (miners.angular, {"angle": 90}, "between 0 and 90, not 90"),
        (miners.angular, {}, r"must be \[b b\], not \[3, 4\]"),
        (miners.across_halves, {}, r"across_halves works .* must be \[b b\], not \[3, 4\]"),
        (miners.next_in_batch, {}, r"next_in_batch works .* must be \[b b\], not \[3, 4\]"),
        (miners.distance_weighted, {"key": KEY, "dim": 1}, "at least 2, not 1"),
        (miners.uniform_histogram, {"key": KEY, "num_bins": 0}, "num_bins must be at least 1"),
    ]
    for miner, keywords, message in wrong:
        with pytest.raises(ValueError, match=message):
            miner(distances, pairs, **keywords)
    with pytest.raises(ValueError, match=r"positives must be bool \[3, 4\].*not int.. \[3, 3\]"):
        miners.batch_hard(distances, ops.Pairs(np.zeros((3, 3), int), pairs.negatives))


def test_triplets_given_to_a_miner_and_a_number_as_key_are_refused(unchecked):
    distances = np.ones((3, 3), np.float32)
    pairs = ops.pairs(np.array([0, 0, 1]))
    with pytest.raises(TypeError, match=r"^pairs must be .*take ops.triplets_to_pairs"):
        miners.multi_similarity(distances, miners.semihard_triplets(distances, pairs))
    for miner in (miners.uniform_histogram, functools.partial(miners.distance_weighted, dim=4)):
        with pytest.raises(TypeError, match="key"):
            miner(distances, pairs, key=0)
