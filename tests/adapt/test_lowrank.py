"""Low-rank adapters against plain loops, and against those of qwix."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from pretrained import VIT

from dmljax import adapt
from dmljax.adapt.lowrank import lora_scale
from dmljax.config import registry

RNG = np.random.default_rng(0)


def _flat(tree):
    return traverse_util.flatten_dict(tree, sep="/")


def _drawn(tree):
    return jax.tree.map(lambda x: jnp.asarray(RNG.normal(size=x.shape), jnp.float32), tree)


class _Net(nn.Module):
    """A module of Flax alone: a 1 x 1 and a 3 x 3 convolution, and a linear layer."""

    @nn.compact
    def __call__(self, images):
        x = nn.Conv(4, (1, 1), name="point")(images)
        x = nn.Conv(4, (3, 3), name="wide")(x)
        return nn.Dense(5, name="out")(x.mean(axis=(1, 2)))


def test_adapters_of_any_module_act_as_two_small_maps():
    net, images = _Net(), jnp.asarray(RNG.normal(size=(2, 4, 4, 3)), jnp.float32)
    params = net.init(jax.random.key(0), images)["params"]
    adapters = adapt.lora(jax.random.key(1), params, rank=2)
    shapes = {path: x.shape for path, x in _flat(adapters).items()}
    expected = {"point/a": (3, 2), "point/b": (2, 4), "out/a": (4, 2), "out/b": (2, 5)}
    assert shapes == expected  # and none for 3 x 3
    outputs = net.apply({"params": adapt.merged(params, adapters, scale=3.0)}, images)
    np.testing.assert_array_equal(outputs, net.apply({"params": params}, images))  # b is zero
    adapters = _drawn(adapters)
    outputs = net.apply({"params": adapt.merged(params, adapters, scale=3.0)}, images)

    def linear(x, name):
        kernel = params[name]["kernel"].reshape(x.shape[-1], -1)
        a, b = adapters[name]["a"], adapters[name]["b"]
        return x @ kernel + params[name]["bias"].reshape(1, -1) + 3.0 * (x @ a) @ b

    x = linear(images.reshape(-1, 3), "point").reshape(2, 4, 4, 4)
    x = nn.Conv(4, (3, 3)).apply({"params": params["wide"]}, x)
    np.testing.assert_allclose(outputs, linear(x.mean(axis=(1, 2)), "out"), atol=1e-4)


def test_magnitudes_are_the_norms_of_columns_whatever_the_factors_are():
    """DoRA against a loop over columns; a column of zeros stays."""
    net, images = _Net(), jnp.asarray(RNG.normal(size=(2, 4, 4, 3)), jnp.float32)
    params = net.init(jax.random.key(0), images)["params"]
    params["out"]["kernel"] = params["out"]["kernel"].at[:, 1].set(0)
    adapters = adapt.with_magnitudes(params, adapt.lora(jax.random.key(1), params, rank=2))
    assert {path for path in _flat(adapters) if "magnitude" in path} == {
        "point/magnitude",
        "out/magnitude",
    }
    first = adapt.merged(params, adapters, scale=3.0)
    for name in ("point", "out"):  # b is zero
        np.testing.assert_allclose(first[name]["kernel"], params[name]["kernel"], rtol=1e-6)
    adapters = _drawn(adapters)
    merged = adapt.merged(params, adapters, scale=3.0)
    for name in ("point", "out"):
        kernel = np.asarray(merged[name]["kernel"]).reshape(-1, merged[name]["kernel"].shape[-1])
        before = np.asarray(params[name]["kernel"], np.float64).reshape(kernel.shape)
        a, b, magnitude = (
            np.asarray(adapters[name][x], np.float64) for x in ("a", "b", "magnitude")
        )
        for i, column in enumerate(kernel.T):
            total = before[:, i] + 3.0 * a @ b[:, i]
            expected = magnitude[i] * total / np.linalg.norm(total)
            np.testing.assert_allclose(column, expected, atol=1e-6)

    weights = _drawn(params["out"]["kernel"])

    def weighted(adapters):
        return jnp.sum(adapt.merged(params, adapters, scale=3.0)["out"]["kernel"] * weights)

    # The norm of the sum is a constant for the gradient: that of b is as without a magnitude,
    # times magnitude / norm.
    gradient = jax.grad(weighted)(adapters)["out"]
    total = params["out"]["kernel"] + 3.0 * adapters["out"]["a"] @ adapters["out"]["b"]
    factors = adapters["out"]["magnitude"] / jnp.linalg.norm(total, axis=0)
    plain = {"out": {x: adapters["out"][x] for x in "ab"}}
    expected = jax.grad(weighted)(plain)["out"]["b"] * factors[None]
    np.testing.assert_allclose(gradient["b"], expected, rtol=1e-4, atol=1e-5)
    assert np.abs(gradient["magnitude"]).min() > 0


def test_the_default_targets_are_the_fused_projections_of_attention():
    net = registry.resolve("net", VIT)()
    images = jnp.zeros((1, 12, 12, 3))
    params = jax.eval_shape(lambda key: net.init(key, images, train=False), jax.random.key(0))
    adapters = jax.eval_shape(lambda p: adapt.lora(jax.random.key(0), p), params["params"])
    assert set(_flat(adapters)) == {f"blocks/{i}/attn/qkv/{x}" for i in range(3) for x in "ab"}


def test_the_scales_of_lora_and_rslora():
    assert lora_scale(rank=4, alpha=8.0) == 2.0
    assert lora_scale(rank=4, alpha=8.0, rslora=True) == 4.0
