"""Convolution and linear layers against PyTorch, and their initial values."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layer_arrays import from_torch, normal, to_torch

from dmljax.nets import layers
from dmljax.nets.layers.convolution import conv


@pytest.mark.parametrize(
    "options", [(3, 1, 1, 1), (3, 2, 1, 2), (1, 2, 0, 1), (7, 2, 3, 1), (3, 1, 1, 6)]
)
def test_convolutions_agree_with_pytorch(options):
    functional = pytest.importorskip("torch.nn.functional")
    size, strides, padding, groups = options
    x, kernel, bias = normal(2, 9, 10, 6), normal(size, size, 6 // groups, 12), normal(12)
    layer = layers.Conv(12, size, strides, padding, groups, use_bias=True)
    ours = layer.apply({"params": {"kernel": kernel, "bias": bias}}, x)
    weight, b = to_torch(kernel.transpose(3, 0, 1, 2)), to_torch(bias[:, None, None, None])
    expected = functional.conv2d(to_torch(x), weight, b.flatten(), strides, padding, 1, groups)
    np.testing.assert_allclose(ours, from_torch(expected), rtol=1e-4, atol=1e-4)


def test_initial_values_have_the_published_deviation():
    x = normal(1, 4, 4, 64)
    key = jax.random.key(0)
    plain = layers.Conv(256, 3, padding=1)
    kernel = jax.jit(plain.init)(key, x)["params"]["kernel"]
    np.testing.assert_allclose(np.std(kernel), np.sqrt(2 / (9 * 256)), rtol=0.02)
    assert set(jax.eval_shape(plain.init, key, x)["params"]) == {"kernel"}
    torch_default = layers.Conv(256, 3, use_bias=True, kernel_init=None, bias_init=None)
    conv, dense = (
        jax.jit(torch_default.init)(key, x),
        jax.jit(layers.Dense(512).init)(key, np.ones((1, 576), "f")),
    )
    for leaf in jax.tree.leaves((conv["params"], dense["params"])):  # both have 576 inputs
        assert 0.9 / 24 < float(jnp.max(jnp.abs(leaf))) <= 1 / 24
        assert abs(float(jnp.mean(leaf))) < 0.1 / 24


def test_a_dense_layer_maps_the_last_axis():
    params = {"kernel": normal(3, 4), "bias": normal(4)}
    for shape in ((5, 3), (2, 5, 3), (0, 3), (2, 0, 3)):
        x = normal(*shape)
        y = layers.Dense(4, merged=len(shape) > 2).apply({"params": params}, x)
        assert y.shape == (*shape[:-1], 4)
        np.testing.assert_allclose(y, x @ params["kernel"] + params["bias"], atol=1e-6)
    narrow = layers.Dense(4, dtype=jnp.bfloat16).apply({"params": params}, normal(2, 3))
    assert narrow.dtype == jnp.bfloat16


@pytest.mark.parametrize("limits", [None, (0, 1)])
@pytest.mark.parametrize("options", [(3, 1, 1, 1), (3, 2, 1, 12), (1, 1, 0, 1)])
def test_a_norm_folded_into_the_kernel_changes_nothing_but_rounding(options, limits):
    """Values and all gradients against the plain form, where the norm has fixed statistics."""
    size, strides, padding, groups = options

    class Unit(nn.Module):
        impl: str

        @nn.compact
        def __call__(self, x):
            options = {"use_bias": True, "impl": self.impl, "name": "conv"}
            conv = layers.Conv(12, size, strides, padding, groups, **options)
            norm = layers.BatchNorm(frozen=True, name="norm")
            return layers.conv_norm(conv, norm, x, train=True, limits=limits)

    x, weights = normal(4, 6, 6, 12), normal(4, 6 // strides, 6 // strides, 12)
    stats = {"norm": {"mean": normal(12), "var": normal(12) ** 2 + 0.5}}
    params = {
        "conv": {"kernel": normal(size, size, 12 // groups, 12), "bias": normal(12)},
        "norm": {"scale": normal(12), "bias": normal(12)},
    }
    assert jax.tree.map(jnp.shape, Unit("auto").init(jax.random.key(0), x)["params"]) == (
        jax.tree.map(jnp.shape, params)
    )

    def run(impl):
        def total(params, x):
            variables = {"params": params, "batch_stats": stats}
            return jnp.sum(Unit(impl).apply(variables, x) * weights)

        return jax.jit(jax.value_and_grad(total, argnums=(0, 1)))

    fast, plain = run("cpu")(params, x), run("xla")(params, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3), fast, plain)


def test_the_gradient_at_a_limit_is_zero():
    """As in PyTorch's ReLU6, where a map of zeros meets a shift of zero."""
    x, kernel = jnp.zeros((1, 2, 2, 3)), jnp.ones((1, 1, 3, 4))

    def total(bias, impl):
        return conv(x, kernel, bias, limits=(0, 6), impl=impl).sum()

    for impl in ("auto", "cpu", "xla"):
        gradient = jax.grad(total)(jnp.array([0.0, 6, 3, -1]), impl)
        np.testing.assert_array_equal(gradient, [0, 0, 4, 0])
