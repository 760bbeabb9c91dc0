"""Properties of all ranking losses: order, scale, masks, precision, memory, messages."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from naive_ranking import LOSSES, ROWS, batch, compiled, each_kind, each_loss, run_padded

from dmljax import losses, ops
from dmljax.losses import ranking


@each_kind
def test_the_mean_is_over_the_entries_that_count(name):
    x, _ = batch()
    labels, where = np.array([0, 0, 1, 1, 1, 2, 0, 2, 2]), np.array([1] * 5 + [0] * 4, bool)
    entries = jax.jit(functools.partial(LOSSES[name], reduce_fn=None))(x, labels, where=where)
    assert not entries[5:].any()
    counted = 12 if name == "histogram" else 5
    value, _ = run_padded(name, x, labels, where)
    np.testing.assert_allclose(entries.sum() / counted, value, rtol=1e-5)


@each_loss
def test_order_and_scale_do_not_matter(name):
    x, labels = batch()
    order = np.random.default_rng(7).permutation(ROWS)
    value, gradient = run_padded(name, x, labels)
    other, moved = run_padded(name, 8 * x[order], labels[order])
    np.testing.assert_allclose(value, other, rtol=1e-5)
    np.testing.assert_allclose(gradient[order], 8 * moved, rtol=1e-3, atol=1e-5)


@each_kind
def test_jit_and_vmap_give_the_plain_values(name):
    x, labels = batch()
    batches = np.stack([x, x[::-1] ** 2])
    plain = [LOSSES[name](one, labels) for one in batches]
    np.testing.assert_allclose(plain, [run_padded(name, one, labels)[0] for one in batches], 1e-5)
    together, slopes = jax.vmap(compiled(name), in_axes=(0, None))(batches, labels)
    np.testing.assert_allclose(together, plain, rtol=1e-5)
    np.testing.assert_allclose(slopes[1], run_padded(name, batches[1], labels)[1], 1e-4, 1e-6)


@each_loss
@pytest.mark.parametrize("labels", ([0] * 6, range(6), [0, 0, 0, 1, 1, 1]), ids=str)
def test_degenerate_batches_are_finite(name, labels):
    labels = np.array(labels)
    rng = np.random.default_rng(8)
    spread = rng.normal(size=(6, 3))
    near = np.ones((6, 3)) + 1e-6 * spread
    tiny, large = 1e-30 * spread, 1e30 * spread
    half = spread * (np.arange(6) % 2)[:, None]
    for x in (spread, near, tiny, large, half, np.ones((6, 3)), np.zeros((6, 3))):
        for where in (np.ones(6, bool), np.zeros(6, bool), np.arange(6) < 2, np.arange(6) < 1):
            value, gradient = run_padded(name, x.astype(np.float32), labels, where)
            assert np.isfinite(value) and value >= -1e-5
            assert np.isfinite(gradient).all()
            assert where.sum() > 1 or (value == 0 and not gradient.any())


@each_kind
def test_a_single_row_has_loss_0(name):
    x, labels = jnp.ones((1, 3)), jnp.array([2])
    value, gradient = jax.jit(jax.value_and_grad(LOSSES[name]))(x, labels)
    assert value == 0 and not gradient.any()


@each_loss
@pytest.mark.parametrize("row", range(ROWS))
def test_a_nan_in_any_row_makes_the_loss_nan(name, row):
    # Rows 0 and 5 are alone in their class: they are only negatives.
    x, labels = batch()[0], np.array([9, 0, 0, 0, 1, 8, 1, 0, 1])
    x[row, 1] = np.nan
    assert np.isnan(run_padded(name, x, labels)[0])


@each_kind
def test_half_precision_is_computed_in_float32(name):
    x, labels = batch()
    half = jnp.asarray(x).astype(jnp.bfloat16)
    value, gradient = compiled(name)(half, labels)
    wide, slope = run_padded(name, np.asarray(half.astype(jnp.float32)), labels)
    assert gradient.dtype == jnp.bfloat16
    np.testing.assert_allclose(value, wide, rtol=1e-6)
    np.testing.assert_allclose(gradient.astype(jnp.float32), slope, rtol=1e-2, atol=1e-6)


@each_kind
def test_multi_hot_labels_and_mined_pairs_give_the_value_of_their_pairs(name):
    x, labels = batch()
    value, _ = run_padded(name, x, labels)
    loss = jax.jit(LOSSES[name])
    hot = labels[:, None] == np.arange(4)[None]
    np.testing.assert_allclose(loss(x, hot), value, rtol=1e-6)
    pairs = ops.pairs(labels)
    np.testing.assert_allclose(loss(x, pairs), value, rtol=1e-6)
    # Only pairs that a miner keeps are ranked.
    selected = np.random.default_rng(9).random((ROWS, ROWS)) < 0.7
    fewer = ops.Pairs(pairs.positives & selected, pairs.negatives & selected)
    mined = functools.partial(
        LOSSES[name], mine_fn=lambda _, p: ops.Pairs(p[0] & selected, p[1] & selected)
    )
    np.testing.assert_allclose(jax.jit(mined)(x, labels), loss(x, fewer), rtol=1e-6)
    assert abs(loss(x, fewer) - value) > 1e-3


@pytest.mark.parametrize("name", ranking.__all__)
def test_no_loss_stores_an_array_of_b_cubed(name):
    # Labels are an argument, so this is the same program for 256 classes of 4 and for 2 of 512.
    x = jax.ShapeDtypeStruct((1024, 128), jnp.float32)
    labels = jax.ShapeDtypeStruct((1024,), jnp.int32)
    lowered = jax.jit(jax.value_and_grad(getattr(losses, name))).lower(x, labels)
    assert lowered.compile().memory_analysis().temp_size_in_bytes < 64 * 2**20


def test_wrong_arguments_are_named():
    x, labels = batch()
    for name in ("fast_ap", "histogram"):
        with pytest.raises(ValueError, match="num_bins must be at least 1, not 0"):
            getattr(losses, name)(x, labels, num_bins=0)
    for ks in ((), (0, 1)):
        with pytest.raises(ValueError, match="ks must be one or more numbers from 1"):
            losses.recall_at_k(x, labels, ks=ks)
