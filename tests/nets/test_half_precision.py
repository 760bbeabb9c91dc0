"""In bfloat16, nets keep nothing in float32, and transformers multiply nothing in float32."""

import collections
import functools
import math
import re

import flax.linen as nn
import jax
import jax.ad_checkpoint
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from nets.backbone_cases import CASES, VIT

from dmljax import nets
from dmljax.nets import layers, token_attention, transformer
from dmljax.nets.transformer import Parts

B, T, WIDTH, HEADS = 2, 10, 64, 4
X = jnp.asarray(np.random.default_rng(0).normal(size=(B, T, WIDTH)), jnp.bfloat16)


class _Block(nn.Module):
    dtype: object = jnp.bfloat16

    @nn.compact
    def __call__(self, x):
        options = {"width": WIDTH, "heads": HEADS, "hidden": 2 * WIDTH, "layer_scale": True}
        return Parts(**options, dtype=self.dtype).block(x)


def _equations(jaxpr, path=""):
    """`(path, equation)` of a program and of all programs in it."""
    for equation in jaxpr.eqns:
        here = f"{path}/{equation.source_info.name_stack}"
        yield here, equation
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from _equations(inner, here)


def test_only_norms_activations_and_softmax_compute_in_float32():
    params = _Block().init(jax.random.key(0), X)["params"]
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.float32.dtype}

    def gradients(params, x, g):
        outputs, pull_back = jax.vjp(lambda p, x: _Block().apply({"params": p}, x), params, x)
        assert outputs.dtype == jnp.bfloat16
        return pull_back(g)

    wide, products, norms = [], 0, 0
    for path, equation in _equations(jax.make_jaxpr(gradients)(params, X, X).jaxpr):
        norms += "norm1" in path or "norm2" in path
        if equation.primitive.name == "dot_general":
            products += 1
            assert {v.aval.dtype for v in equation.invars} == {jnp.bfloat16.dtype}, path
        for variable in equation.outvars:
            is_wide = variable.aval.dtype == jnp.float32
            if is_wide and variable.aval.shape[:1] == (B,) and variable.aval.size >= X.size:
                wide.append((path, variable.aval.shape))
    assert norms > 10 and products == 18  # 6 forward: qkv, 2 of attention, proj, fc1, fc2
    others = [(path, shape) for path, shape in wide if "norm" not in path]
    of_activation = [path for path, shape in others if shape == (B, T, 2 * WIDTH)]
    assert of_activation and all("/mlp" in path and "/fc" not in path for path in of_activation)
    assert {shape for _, shape in others} <= {(B, HEADS, T, T), (B, T, 2 * WIDTH)}, others


@pytest.mark.parametrize("activation", ["gelu", "quick_gelu", "silu", "tanh_gelu"])
def test_an_activation_keeps_its_input_alone_and_rounds_once(activation, capsys):
    function = getattr(transformer, activation)
    x = jnp.linspace(-8, 8, 1001)
    half = x.astype(jnp.bfloat16)
    jax.ad_checkpoint.print_saved_residuals(lambda x: function(x).astype(jnp.float32).sum(), half)
    assert capsys.readouterr().out.splitlines() == ["bf16[1001] from the argument x"]
    for fn in (function, jax.vmap(jax.grad(function))):
        exact = fn(half.astype(jnp.float32)).astype(jnp.bfloat16)
        near = jnp.abs(fn(half) - exact) <= 2e-3 * jnp.abs(exact) + 3e-7
        assert near.mean() > 0.98 and fn(half).dtype == jnp.bfloat16
        np.testing.assert_allclose(fn(half).astype(float), exact.astype(float), 0.01, 1e-6)


_TRANSFORMERS = ("dinov2_g14_reg", "dinov3_splus16", "clip_b32", "siglip_b16_224", "unicom_b32")
_CONVOLUTIONAL = ("bottleneck", "googlenet", "mobilenet_v2", "convnext", "lecun", "convnet")
NETS = {x: (CASES[x].net, CASES[x].size, CASES[x].channels) for x in _CONVOLUTIONAL}
NETS |= {x: (functools.partial(getattr(nets, x), **VIT), 32, 3) for x in _TRANSFORMERS}


def _kept_bytes(net, size, channels, capsys):
    """By type, the bytes that a training step keeps for the backward pass. Computes nothing."""
    images = jax.ShapeDtypeStruct((32, size, size, channels), jnp.bfloat16)
    variables = dict(layers.shapes(net, size, channels=channels))
    params = variables.pop("params")

    def total(params, variables, images):
        variables = {**variables, "params": params}
        outputs, _ = net.apply(variables, images, train=True, mutable=["batch_stats"])
        return outputs["pooled"].astype(jnp.float32).sum()

    jax.ad_checkpoint.print_saved_residuals(total, params, variables, images)
    kept = collections.Counter()
    for line in capsys.readouterr().out.splitlines():
        dtype, sides, source = re.fullmatch(r"(\w+)\[([\d,]*)\] (.*)", line).groups()
        if "from the argument" not in source:
            bits = {"bool": 8}.get(dtype) or int(re.sub(r"\D", "", dtype))
            kept[dtype] += math.prod(int(side) for side in sides.split(",") if side) * bits // 8
    return kept


@pytest.mark.parametrize("name", NETS)
def test_a_net_keeps_no_float32_copies(name, capsys):
    net, *image = NETS[name]
    kept = _kept_bytes(net(dtype=jnp.bfloat16), *image, capsys)
    assert kept["f32"] < 0.02 * kept.total()
    assert kept["bf16"] > 0.5 * kept.total()


@pytest.mark.parametrize("shared", [0, 4])
def test_the_gradient_in_half_precision_is_that_of_float32(shared):
    """What all keys and values have in common does not change the gradient of q."""
    q, k, v, g = np.random.default_rng(1).normal(size=(4, B, T, HEADS, 16)).astype(np.float32)
    k, v = k + shared, v + shared

    def gradients(dtype):
        _, pull_back = jax.vjp(
            token_attention.attention, *(jnp.asarray(a, dtype) for a in (q, k, v))
        )
        return [np.asarray(x, np.float32) for x in pull_back(jnp.asarray(g, dtype))]

    for half, full in zip(gradients(jnp.bfloat16), gradients(jnp.float32), strict=True):
        np.testing.assert_allclose(half, full, atol=0.02 * np.abs(full).max())
