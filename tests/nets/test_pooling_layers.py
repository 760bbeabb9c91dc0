"""Pooling by its definition."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layer_arrays import normal

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
POOL_FNS = layers.max_pool, layers.avg_pool


@pytest.mark.parametrize(("size", "strides", "padding", "ceil"), CASES)
def test_values_and_gradients_of_pooling_by_definition(size, strides, padding, ceil):
    options = {"size": size, "strides": strides, "padding": padding, "ceil": ceil}
    maps = [normal(2, h, w, 3) for h, w in ((4, 5), (5, 6), (6, 7), (7, 8), (8, 4))]
    pooled = jax.jit(lambda maps: [[fn(x, **options) for fn in POOL_FNS] for x in maps])(maps)
    for x, outputs in zip(maps, pooled, strict=True):
        h, w = x.shape[1:3]
        pad = ((0, 0), (padding, padding), (padding, padding), (0, 0))
        low, zero = np.pad(x, pad, constant_values=-np.inf), np.pad(x, pad)
        rows, columns = (windows(n, size, strides, padding, ceil) for n in (h, w))
        largest, mean = np.zeros((2, 2, len(rows), len(columns), 3), np.float32)
        weights = normal(*mean.shape)
        of_largest, of_mean = np.zeros_like(zero), np.zeros_like(zero)
        for i, (top, bottom) in enumerate(rows):
            for j, (left, right) in enumerate(columns):
                window = (slice(None), slice(top, bottom), slice(left, right))
                largest[:, i, j] = low[window].max((1, 2))
                mean[:, i, j] = zero[window].mean((1, 2))
                is_largest = low[window] == largest[:, i, j][:, None, None]
                of_largest[window] += weights[:, i, j][:, None, None] * is_largest
                area = (bottom - top) * (right - left)
                of_mean[window] += weights[:, i, j][:, None, None] / area
        inside = (slice(None), slice(padding, padding + h), slice(padding, padding + w))
        for ours, expected in zip(outputs, (largest, mean), strict=True):
            np.testing.assert_allclose(ours, expected, atol=1e-6)
        if (h, w) == (7, 8):  # compiling gradients takes longest
            gradients = jax.jit(
                lambda x, weights: [
                    jax.vjp(functools.partial(fn, **options), x)[1](weights)[0] for fn in POOL_FNS
                ]
            )(x, weights)
            for ours, slopes in zip(gradients, (of_largest, of_mean), strict=True):
                np.testing.assert_allclose(ours, slopes[inside], atol=1e-5)


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
