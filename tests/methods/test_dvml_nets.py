"""DVML's heads, samples and decoder: sizes, formulas, and what the gradients reach."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

dvml = importlib.import_module("dmljax.methods.dvml")

RNG = np.random.default_rng(0)
X = np.abs(RNG.normal(size=(6, 10))).astype(np.float32)
HEADS = ("invariant", "mean", "log_variance")


def _count(module, width):
    x = jax.ShapeDtypeStruct((2, width), jnp.float32)
    shapes = jax.eval_shape(lambda x: module.init(jax.random.key(0), x, train=False), x)
    return sum(leaf.size for leaf in jax.tree.leaves(shapes["params"]))


def test_sizes_of_the_paper():
    assert _count(dvml.VariationalHeads(), 1024) == 3 * (1024 * 512 + 512)
    assert _count(dvml.VariationalDecoder(), 512) == 512 * 512 + 512 + 512 * 1024 + 1024


def test_sizes_of_the_published_code():
    heads = dvml.VariationalHeads(features=128, norms=dvml.NESTED_NORMS)
    assert _count(heads, 1024) == 3 * (1024 * 128 + 128) + 3 * 2 * 1024
    heads = dvml.VariationalHeads(features=64, norms=dvml.SHARED_NORM)
    assert _count(heads, 1024) == 3 * (1024 * 64 + 64) + 2 * 1024
    decoder = dvml.VariationalDecoder(activation_fn=jax.nn.relu, norm=True)
    assert _count(decoder, 128) == 128 * 512 + 512 + 2 * 512 + 512 * 1024 + 1024


def _linear(params, x):
    return x @ np.asarray(params["kernel"]) + np.asarray(params["bias"])


def _normed(x):
    return (x - x.mean(axis=0)) / np.sqrt(x.var(axis=0) + 1e-3)


@pytest.mark.parametrize("norms", ["none", "shared", "nested"])
def test_heads_are_linear_layers_behind_their_norms(norms):
    names = {"none": (), "shared": dvml.SHARED_NORM, "nested": dvml.NESTED_NORMS}[norms]
    heads = dvml.VariationalHeads(features=4, norms=names)
    variables = heads.init(jax.random.key(0), X, train=False)
    out, state = heads.apply(variables, X, train=True, mutable="batch_stats")
    x = X if norms == "none" else _normed(X)
    y = _normed(x) if norms == "nested" else x
    params = variables["params"]
    for name, rows in zip(HEADS, (x, y, y), strict=True):
        np.testing.assert_allclose(out[name], _linear(params[name], rows), atol=2e-5)
        np.testing.assert_array_equal(params[name]["bias"], 0)
    assert set(state.get("batch_stats", {})) == set(names)
    if norms != "none":  # moves by one hundredth
        moved = state["batch_stats"]["norm"]["mean"]
        np.testing.assert_allclose(moved, 0.01 * X.mean(axis=0), rtol=1e-5)


def test_samples_have_their_mean_and_variance():
    mean = np.array([[0.0, 3.0], [-1.0, 0.5]], np.float32)
    log_variance = np.log(np.array([[1.0, 0.25], [4.0, 0.01]], np.float32))
    z = dvml.sample_variations(mean, log_variance, samples=20_000, key=jax.random.key(0))
    assert z.shape == (20_000, 2, 2)
    np.testing.assert_allclose(np.mean(z, axis=0), mean, atol=0.05)
    np.testing.assert_allclose(np.var(z, axis=0), np.exp(log_variance), rtol=0.05)
    repeated = dvml.sample_variations(mean, log_variance, samples=20_000, key=jax.random.key(0))
    np.testing.assert_array_equal(z, repeated)
    assert dvml.sample_variations(mean, log_variance, key=jax.random.key(0)).shape == (20, 2, 2)


def test_samples_carry_gradients():
    """d z / d mean = 1, d z / d log variance = (z - mean) / 2."""
    mean, log_variance = np.float32([[0.3, -1.0]]), np.float32([[-0.5, 0.8]])

    def total(mean, log_variance):
        return jnp.sum(dvml.sample_variations(mean, log_variance, samples=3, key=jax.random.key(1)))

    z = np.asarray(dvml.sample_variations(mean, log_variance, samples=3, key=jax.random.key(1)))
    slopes = jax.grad(total, argnums=(0, 1))(mean, log_variance)
    np.testing.assert_allclose(slopes[0], 3, rtol=1e-6)
    np.testing.assert_allclose(slopes[1], np.sum((z - mean) / 2, axis=0), rtol=1e-5)


def test_wrong_arguments_are_refused_in_one_line(unchecked):
    heads = dvml.VariationalHeads(norms=("norms",))
    with pytest.raises(ValueError, match=r"norms can be norm, norm_mean, .*, not 'norms'"):
        heads.init(jax.random.key(0), X, train=False)
