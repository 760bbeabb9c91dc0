"""The batch-norm neck against numpy, torch and the other batch norm."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dmljax.nets import heads, layers

RNG = np.random.default_rng(0)


ROWS = RNG.normal(size=(7, 6)).astype(np.float32) * 3 + 1


SCALE = np.linspace(0.5, 2, 6).astype(np.float32)


STATS = {"mean": np.linspace(-1, 1, 6, dtype=np.float32), "var": SCALE[::-1] ** 2}


def _neck(x, *, train=True, where=None, neck=None):
    variables = {"params": {"scale": SCALE}, "batch_stats": STATS}
    neck = neck or heads.BNNeck()
    y, state = neck.apply(variables, x, train=train, where=where, mutable="batch_stats")
    return np.asarray(y), state["batch_stats"]


def test_neck_is_a_batch_norm_without_bias():
    variables = heads.BNNeck().init(jax.random.key(0), ROWS, train=False)
    assert sorted(variables["params"]) == ["scale"]
    y, stats = _neck(ROWS)
    mean, var = ROWS.mean(axis=0), ROWS.var(axis=0)
    np.testing.assert_allclose(y, (ROWS - mean) / np.sqrt(var + 1e-5) * SCALE, atol=1e-5)
    np.testing.assert_allclose(stats["mean"], 0.9 * STATS["mean"] + 0.1 * mean, rtol=1e-5)
    unbiased = ROWS.var(axis=0, ddof=1)
    np.testing.assert_allclose(stats["var"], 0.9 * STATS["var"] + 0.1 * unbiased, rtol=1e-5)
    y, stats = _neck(ROWS, train=False)
    expected = (ROWS - STATS["mean"]) / np.sqrt(STATS["var"] + 1e-5) * SCALE
    np.testing.assert_allclose(y, expected, atol=1e-5)
    np.testing.assert_array_equal(stats["mean"], STATS["mean"])


def test_neck_is_the_batch_norm_of_the_other_layers():
    def total(norm, x, params):
        y, state = norm.apply(
            {"params": params, "batch_stats": STATS}, x, train=True, mutable="batch_stats"
        )
        return jnp.sum(y**3), state

    params = {"scale": SCALE, "bias": SCALE - 1}
    norms = (heads.BNNeck(use_bias=True), layers.BatchNorm())
    neck, norm = (
        jax.value_and_grad(total, argnums=(1, 2), has_aux=True)(n, ROWS, params) for n in norms
    )
    for one, other in zip(*map(jax.tree.leaves, (neck, norm)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


def test_neck_is_the_batch_norm_of_torch():
    torch = pytest.importorskip("torch")
    norm = torch.nn.BatchNorm1d(6)
    with torch.no_grad():
        norm.weight.copy_(torch.tensor(SCALE))
        norm.running_mean.copy_(torch.tensor(STATS["mean"]))
        norm.running_var.copy_(torch.tensor(np.ascontiguousarray(STATS["var"])))
    theirs = norm(torch.tensor(ROWS)).detach().numpy()
    y, stats = _neck(ROWS)
    np.testing.assert_allclose(y, theirs, atol=1e-5)
    np.testing.assert_allclose(stats["mean"], norm.running_mean.numpy(), rtol=1e-5)
    np.testing.assert_allclose(stats["var"], norm.running_var.numpy(), rtol=1e-5)


def test_masking_a_row_of_the_neck_is_dropping_it():
    where = np.array([True, True, False, True, True, False, True])
    broken = np.where(where[:, None], ROWS, np.nan)
    y, stats = _neck(broken, where=where)
    expected, expected_stats = _neck(ROWS[where])
    np.testing.assert_allclose(y[where], expected, atol=1e-5)
    for actual, expected in zip(*map(jax.tree.leaves, (stats, expected_stats)), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5)
    # One row, or none, has no variance to learn from.
    for count in (0, 1):
        _, stats = _neck(ROWS, where=np.arange(7) < count)
        np.testing.assert_array_equal(stats["var"], STATS["var"])


def test_a_frozen_neck_keeps_its_statistics():
    neck = heads.BNNeck(frozen=True)
    y, stats = _neck(ROWS, neck=neck)
    np.testing.assert_allclose(y, _neck(ROWS, train=False)[0], atol=1e-6)
    for name in STATS:
        np.testing.assert_array_equal(stats[name], STATS[name])
