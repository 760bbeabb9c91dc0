"""Batch norm and response norm by their definitions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from layer_arrays import normal
from losses.numeric import gradient

from dmljax.nets import layers


def batch_norm(x, *, train=True, where=None, **keywords):
    layer = layers.BatchNorm(**keywords)
    c = x.shape[-1]
    params = {
        "scale": np.linspace(0.5, 1.5, c, dtype="f"),
        "bias": np.linspace(-1, 1, c, dtype="f"),
    }
    old = {"mean": np.full(c, 0.3, "f"), "var": np.full(c, 2, "f")}
    v = {"params": params, "batch_stats": old}
    y, new = layer.apply(v, x, train=train, where=where, mutable=["batch_stats"])
    return y, new["batch_stats"], params, old


@pytest.mark.parametrize("shape", [(6, 4), (3, 5, 5, 4)])
def test_batch_norm_by_definition(shape):
    x = 3 * normal(*shape) + 1
    axes, n = tuple(range(len(shape) - 1)), int(np.prod(shape[:-1]))
    mean, var = x.mean(axes), x.var(axes)
    # Without options, the numbers are PyTorch's.
    for options, share, eps in (({}, 0.1, 1e-5), ({"momentum": 0.2, "epsilon": 1e-2}, 0.2, 1e-2)):
        y, new, params, old = batch_norm(x, **options)
        expected = (x - mean) / np.sqrt(var + eps) * params["scale"] + params["bias"]
        np.testing.assert_allclose(y, expected, atol=1e-5)
        updated = (1 - share) * old["mean"] + share * mean
        np.testing.assert_allclose(new["mean"], updated, rtol=1e-5)
        updated = (1 - share) * old["var"] + share * var * n / (n - 1)
        np.testing.assert_allclose(new["var"], updated, rtol=1e-5)

    for keywords in ({"train": False}, {"frozen": True}):
        y, new, params, old = batch_norm(x, epsilon=1e-2, **keywords)
        expected = (x - old["mean"]) / np.sqrt(old["var"] + 1e-2) * params["scale"] + params["bias"]
        np.testing.assert_allclose(y, expected, atol=1e-5)
        jax.tree.map(np.testing.assert_array_equal, dict(new), old)


@pytest.mark.parametrize("options", [{}, {"use_bias": False}])
def test_gradients_of_batch_norm_are_those_of_its_definition(options):
    x = (3 * normal(4, 5, 6, 3) + 1).astype(np.float64)
    weights = normal(4, 5, 6, 3).astype(np.float64)
    with jax.enable_x64(True):
        layer = layers.BatchNorm(epsilon=1e-2, **options)
        variables = layer.init(jax.random.key(0), x, train=True)
        stats = variables["batch_stats"]
        params = jax.tree.map(lambda p: jnp.linspace(0.5, 2, 3), variables.get("params", {}))

        def layer_value(params, x):
            variables = {"params": params, "batch_stats": stats}
            y, new = layer.apply(variables, x, train=True, mutable=["batch_stats"])
            # No gradient flows through the running statistics.
            return jnp.sum(y * weights) + sum(map(jnp.sum, jax.tree.leaves(new)))

        def definition(params, x):
            centered = x - jnp.mean(x, axis=(0, 1, 2), keepdims=True)
            y = centered / jnp.sqrt(jnp.mean(centered**2, axis=(0, 1, 2), keepdims=True) + 1e-2)
            y = y * params.get("scale", jnp.ones(3)).reshape(1, 1, 1, 3)
            return jnp.sum((y + params.get("bias", jnp.zeros(3)).reshape(1, 1, 1, 3)) * weights)

        actual, expected = (
            jax.grad(f, argnums=(0, 1))(params, x) for f in (layer_value, definition)
        )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9), actual, expected
    )


def test_batch_norm_statistics_are_exact_far_from_zero():
    # The mean of squares minus the square of the mean would lose all digits here.
    x = 1000 + normal(4096, 2)
    y, new, *_ = batch_norm(x, momentum=1.0)
    np.testing.assert_allclose(new["var"], x.astype(np.float64).var(0, ddof=1), rtol=1e-3)
    x = jnp.asarray(x / 100, jnp.bfloat16)
    y, new, *_ = batch_norm(x, momentum=1.0, dtype=jnp.bfloat16)
    assert y.dtype == jnp.bfloat16 and new["var"].dtype == jnp.float32
    np.testing.assert_allclose(new["mean"], np.asarray(x, np.float64).mean(0), rtol=1e-5)


@pytest.mark.parametrize("shape", [(7, 6), (4, 2, 3, 6)])
def test_masking_a_row_of_batch_norm_is_dropping_it(shape):
    def value(x, directions, where=None):
        y, new, _, old = batch_norm(x, where=where)
        return jnp.sum(y * directions), (y, new, old)

    slope = jax.grad(value, has_aux=True)
    x, directions, where = normal(*shape) + 1, normal(*shape), normal(*shape[:-1]) < 0.5
    expected, (y_of_rows, stats_of_rows, _) = slope(x[where], directions[where])
    masked = where[..., None]
    actual, (y, stats, old) = slope(np.where(masked, x, 100), directions * masked, where)
    np.testing.assert_allclose(y[where], y_of_rows, atol=1e-5)
    np.testing.assert_allclose(actual[where], expected, atol=1e-5)
    np.testing.assert_array_equal(actual[~where], 0)
    for name in stats:
        np.testing.assert_allclose(stats[name], stats_of_rows[name], rtol=1e-5)
    # One row, or none, has no variance to learn from.
    for count in (0, 1):
        one = (np.arange(where.size) < count).reshape(where.shape)
        y, stats, *_ = batch_norm(x, where=one)
        jax.tree.map(np.testing.assert_array_equal, dict(stats), old)
        assert np.isfinite(y).all()


def test_batch_norm_uses_statistics_of_the_global_batch():
    x = normal(16, 2, 2, 3) + np.arange(16, dtype="f")[:, None, None, None]
    mesh = Mesh(np.array(jax.devices()), ("data",))
    assert mesh.size == 8
    step = jax.jit(lambda x: batch_norm(x)[:2])
    sharded = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), step(sharded), batch_norm(x)[:2]
    )


def test_batch_norm_needs_two_values():
    with pytest.raises(ValueError, match="one value per channel to train on: use a larger batch"):
        batch_norm(normal(1, 1, 1, 4))
    batch_norm(normal(1, 1, 1, 4), train=False)
    batch_norm(normal(1, 1, 1, 4), frozen=True)
    batch_norm(normal(1, 1, 2, 4))


def response_norm(x, size, alpha):
    y = np.zeros_like(x)
    for c in range(x.shape[-1]):
        near = x[..., max(0, c - size // 2) : c + size // 2 + 1]
        y[..., c] = x[..., c] / (1 + alpha / size * (near**2).sum(-1)) ** 0.75
    return y


@pytest.mark.parametrize("options", [{}, {"size": 5, "alpha": 5e-4}, {"size": 11, "alpha": 1e-3}])
def test_values_and_gradients_of_response_norm_by_definition(options):
    # Without options, the numbers are PyTorch's.
    definition = functools.partial(response_norm, **{"size": 5, "alpha": 1e-4} | options)
    x, weights = np.float64(80 * normal(1, 2, 2, 16)), np.float64(normal(1, 2, 2, 16))
    with jax.enable_x64(True):
        fn = functools.partial(layers.local_response_norm, **options)
        y, backward = jax.vjp(fn, x)
        np.testing.assert_allclose(y, definition(x), rtol=1e-9)
        expected = gradient(lambda x: np.sum(definition(x) * weights), x, step=1e-4)
        np.testing.assert_allclose(backward(weights)[0], expected, rtol=1e-5, atol=1e-7)
    assert np.max(np.abs(np.asarray(y) - x)) > 1
