"""Gradients of convolutions equal XLA's own, whatever the geometry."""

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

from dmljax import main
from dmljax.nets import convolution


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
    with mock.patch.dict(os.environ, XLA_FLAGS=flags):
        ours = _gradients(lambda x, k: convolution.conv(x, k, **options), x, kernel, weights)
    with jax.enable_x64(True):  # not float32, so XLA's own
        wide = [a.astype(np.float64) for a in (x, kernel, weights)]
        exact = _gradients(lambda x, k: convolution.conv(x, k, **options), *wide)
    for got, want in zip(ours, exact, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("limit", [1, 1 << 30])
def test_pieces_of_the_map_add_up(monkeypatch, limit):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 12, 10, 2)).astype(np.float32)
    g = rng.normal(size=(3, 6, 5, 4)).astype(np.float32)
    whole = convolution._kernel_products(x, (3, 3, 2, 4), g, 2, 1)
    monkeypatch.setattr(convolution, "_PATCHES", limit)
    pieces = convolution._kernel_products(x, (3, 3, 2, 4), g, 2, 1)
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
from dmljax.nets import convolution
x, kernel = jnp.ones((4, 8, 8, 32)), jnp.ones((3, 3, 32, 64))
gradient = jax.jit(jax.grad(lambda k: jnp.sum(convolution.conv(x, k, padding=1) ** 2)))
text = gradient.lower(kernel).compile().as_text()
print(text.count(" convolution("), text.count("ynn_fusion"), text.count(" dot("))
print(text.count(" while("))  # the map is turned around by moves that the compiler keeps apart
"""
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.stdout.split() == ["2", "0", "0", "1"], done.stdout + done.stderr


def test_flags_that_are_set_already_stay(monkeypatch):
    given = "--xla_cpu_use_fusion_emitters=true --xla_cpu_experimental_ynn_fusion_type=-dot"
    monkeypatch.setenv("XLA_FLAGS", given)
    main.tune_cpu()
    assert os.environ["XLA_FLAGS"] == given
    monkeypatch.delenv("XLA_FLAGS")
    main.tune_cpu()
    old = importlib.metadata.version("jaxlib").startswith("0.10.")
    assert ("--xla_cpu_use_fusion_emitters=false" in os.environ["XLA_FLAGS"]) == old
