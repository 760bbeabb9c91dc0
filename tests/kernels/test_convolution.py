"""Convolutions and their gradients equal XLA's own, whatever the geometry."""

import importlib.metadata
import os
import subprocess
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmljax.kernels import convolution


def _gradients(conv, x, kernel, weights):
    return jax.jit(jax.grad(lambda x, k: jnp.sum(conv(x, k) * weights), argnums=(0, 1)))(x, kernel)


@pytest.mark.parametrize("flags", ["", "-individual_convolution"])
@settings(deadline=None, max_examples=10)
@given(
    st.integers(1, 5), st.integers(1, 3), st.integers(0, 2), st.integers(0, 6), st.integers(0, 4)
)
def test_gradients_are_those_of_xla(flags, size, strides, padding, more, other):
    rng = np.random.default_rng(size * 100 + strides * 10 + padding)
    shape = [max(1, size - 2 * padding) + extra for extra in (more, other)]
    x = rng.normal(size=(2, *shape, 3)).astype(np.float32)
    kernel = rng.normal(size=(size, size, 3, 4)).astype(np.float32)
    options = {"strides": strides, "padding": padding}
    weights = rng.normal(size=convolution.conv(x, kernel, **options).shape).astype(np.float32)
    with mock.patch.object(os, "environ", os.environ | {"XLA_FLAGS": flags}):
        ours = _gradients(lambda x, k: convolution.conv(x, k, **options), x, kernel, weights)
    with jax.enable_x64(True):  # not float32, so XLA's own
        wide = [a.astype(np.float64) for a in (x, kernel, weights)]
        exact = _gradients(lambda x, k: convolution.conv(x, k, **options), *wide)
    for got, want in zip(ours, exact, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("flags", ["", "-individual_convolution"])
@settings(deadline=None, max_examples=15)
@given(
    st.tuples(st.integers(1, 11), st.integers(1, 5)),
    st.integers(1, 4),
    st.integers(0, 3),
    st.sampled_from([(32, 32), (33, 40), (64, 32)]),
)
def test_filtering_is_the_same_convolution(flags, size, width, padding, features):
    rng = np.random.default_rng(size[0] * 100 + size[1] * 10 + padding)
    rows = max(1, 3 - 2 * padding) + size[0]
    columns = max(1, width - 2 * padding) + size[1]
    x = rng.normal(size=(2, rows, columns, features[0]))
    kernel = rng.normal(size=(3, width, *features)) / np.sqrt(3 * width * features[0])
    shape = (2, rows + 2 * padding - 2, columns + 2 * padding - width + 1, features[1])
    assert convolution._filters(x.shape, kernel.shape, 1, (padding, padding)) == (shape[1] >= 4)

    def all_three(x, kernel, g):
        y, backward = jax.vjp(lambda x, k: convolution.conv(x, k, padding=padding), x, kernel)
        assert y.shape == shape
        return y, *backward(g)

    arguments = x, kernel, rng.normal(size=shape)
    with mock.patch.object(os, "environ", os.environ | {"XLA_FLAGS": flags}):
        ours = jax.jit(all_three)(*(a.astype(np.float32) for a in arguments))
    with jax.enable_x64(True):  # not float32, so XLA's own
        exact = jax.jit(all_three)(*arguments)
    for got, want in zip(ours, exact, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * max(1, np.abs(want).max()))


@pytest.mark.parametrize(("platform", "convolutions"), [("cpu", 6), ("cuda", 1), ("tpu", 1)])
def test_other_platforms_have_one_convolution(platform, convolutions):
    x, kernel = jnp.ones((4, 8, 8, 32)), jnp.ones((3, 3, 32, 64))
    traced = jax.jit(lambda x, k: convolution.conv(x, k, padding=1)).trace(x, kernel)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert text.count("stablehlo.convolution") == convolutions


@pytest.mark.parametrize("limit", [1, 1 << 30])
def test_pieces_of_the_map_add_up(monkeypatch, limit):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 12, 10, 2)).astype(np.float32)
    g = rng.normal(size=(3, 6, 5, 4)).astype(np.float32)
    whole = convolution._kernel_products(x, (3, 3, 2, 4), g, 2, (1, 1))
    monkeypatch.setattr(convolution, "_PATCHES", limit)
    pieces = convolution._kernel_products(x, (3, 3, 2, 4), g, 2, (1, 1))
    np.testing.assert_allclose(pieces, whole, rtol=1e-5, atol=1e-5)


def test_the_products_are_what_runs_on_the_cpu():
    x, kernel = jnp.ones((4, 8, 8, 3)), jnp.ones((3, 3, 3, 5))
    gradient = jax.jit(jax.grad(lambda k: jnp.sum(convolution.conv(x, k, padding=1) ** 2)))
    text = gradient.lower(kernel).compile().as_text()
    # Of convolutions the forward one alone is left.
    assert text.count("convolution(") + text.count("__onednn$conv") <= 1 and "dot" in text


def test_a_process_of_main_has_the_gradients_of_xlas_own_kernels():
    code = """
import os
from dmljax import main
main.tune_cpu()
assert os.environ["XLA_FLAGS"].count("individual_convolution") == 1, os.environ["XLA_FLAGS"]
import jax, jax.numpy as jnp
from dmljax.kernels import convolution
x, kernel = jnp.ones((4, 8, 8, 32)), jnp.ones((3, 3, 32, 64))
gradient = jax.jit(jax.grad(lambda k: jnp.sum(convolution.conv(x, k, padding=1) ** 2)))
text = gradient.lower(kernel).compile().as_text()
# Six products along rows for the map, and six for the gradient.
print(text.count(" convolution("), text.count("ynn_fusion"), text.count(" dot("))
print(text.count(" while("))  # the map is turned around by moves that the compiler keeps apart
"""
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.stdout.split() == ["12", "0", "0", "1"], done.stdout + done.stderr


def test_flags_that_are_set_already_stay():
    code = 'import os; from dmljax import main; main.tune_cpu(); print(os.environ["XLA_FLAGS"])'
    command = [sys.executable, "-c", code]
    flags = "--xla_cpu_use_fusion_emitters=true --xla_cpu_experimental_ynn_fusion_type=-dot"
    env = os.environ | {"XLA_FLAGS": flags}
    assert subprocess.check_output(command, env=env, text=True) == f"{flags}\n"
    del env["XLA_FLAGS"]
    flag_is_known = importlib.metadata.version("jaxlib").startswith("0.10.")
    flags = subprocess.check_output(command, env=env, text=True)
    assert ("--xla_cpu_use_fusion_emitters=false" in flags) == flag_is_known
