"""Pooling by its definition, and against PyTorch."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layer_arrays import from_torch, normal, to_torch

from dmljax.nets import layers


def windows(n, size, strides, padding, ceil):
    """First and last index of every window in a feature map padded on both sides."""
    padded = n + 2 * padding
    starts = [s for s in range(0, padded, strides) if s + size <= padded]
    if ceil and starts[-1] + size < padded and starts[-1] + strides < n + padding:
        starts.append(starts[-1] + strides)
    return [(s, min(s + size, padded)) for s in starts]


CASES = list(itertools.product((2, 3), (1, 2), (0, 1), (False, True)))
CASES += [(2, 3, 0, True), (3, 3, 1, True)]


@pytest.mark.parametrize(("size", "strides", "padding", "ceil"), CASES)
def test_pooling_by_definition(size, strides, padding, ceil):
    for n in (4, 5, 6, 7, 8):
        x = normal(1, n, n, 2)
        pad = ((0, 0), (padding, padding), (padding, padding), (0, 0))
        low, zero = np.pad(x, pad, constant_values=-np.inf), np.pad(x, pad)
        spans = windows(n, size, strides, padding, ceil)
        pairs = [[(a, b) for b in spans] for a in spans]
        largest = [[low[0, a:b, c:d].max((0, 1)) for (a, b), (c, d) in row] for row in pairs]
        mean = [[zero[0, a:b, c:d].mean((0, 1)) for (a, b), (c, d) in row] for row in pairs]
        options = {"strides": strides, "padding": padding, "ceil": ceil}
        np.testing.assert_array_equal(layers.max_pool(x, size, **options)[0], largest)
        np.testing.assert_allclose(layers.avg_pool(x, size, **options)[0], mean, atol=1e-6)


@pytest.mark.parametrize(("size", "strides", "padding", "ceil"), CASES)
def test_pooling_agrees_with_pytorch(size, strides, padding, ceil):
    functional = pytest.importorskip("torch.nn.functional")
    for h, w in ((7, 8), (5, 6)):
        x = normal(2, h, w, 3)
        options = {"strides": strides, "padding": padding, "ceil": ceil}
        for ours, theirs in (
            (layers.max_pool, functional.max_pool2d),
            (layers.avg_pool, functional.avg_pool2d),
        ):
            expected = theirs(to_torch(x), size, strides, padding, ceil_mode=ceil)
            np.testing.assert_allclose(ours(x, size, **options), from_torch(expected), atol=1e-6)


def test_gradients_of_pooling_and_response_norm_agree_with_pytorch():
    functional = pytest.importorskip("torch.nn.functional")
    x, options = 20 * normal(2, 7, 7, 6), {"strides": 2, "padding": 1, "ceil": True}
    for ours, theirs in (
        (
            lambda x: layers.max_pool(x, 3, **options),
            lambda x: functional.max_pool2d(x, 3, 2, 1, ceil_mode=True),
        ),
        (
            lambda x: layers.avg_pool(x, 3, **options),
            lambda x: functional.avg_pool2d(x, 3, 2, 1, ceil_mode=True),
        ),
        (
            layers.local_response_norm,
            lambda x: functional.local_response_norm(x, 5, 1e-4, 0.75, 1.0),
        ),
    ):
        inputs = to_torch(x).requires_grad_()
        (theirs(inputs) ** 2).sum().backward()
        gradient = jax.jit(jax.grad(lambda x, ours=ours: jnp.sum(ours(x) ** 2)))(x)
        np.testing.assert_allclose(gradient, from_torch(inputs.grad), rtol=1e-4, atol=1e-4)


def test_averages_of_bfloat16_are_summed_in_float32():
    x = jnp.full((1, 64, 64, 1), 1.01, jnp.bfloat16)
    x = x.at[0, 0, 0, 0].set(300)
    exact = np.asarray(x, np.float64).mean()
    assert layers.global_mean(x).dtype == jnp.float32
    np.testing.assert_allclose(layers.global_mean(x)[0, 0], exact, rtol=1e-5)
    pooled = layers.avg_pool(x, 64, strides=1)
    assert pooled.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float64(pooled[0, 0, 0, 0]), exact, rtol=2**-8)


def test_maps_smaller_than_a_window_are_refused(unchecked):
    with pytest.raises(ValueError, match="a map of 2 pixels is too small for a window of 3"):
        layers.max_pool(normal(1, 2, 2, 1), 3, strides=2)
    with pytest.raises(ValueError, match="a map of 2 pixels is too small for a window of 5"):
        layers.avg_pool(normal(1, 6, 2, 1), 5, strides=1, padding=1)
