"""Pooling by its definition, and both forms of max pooling."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_arrays import normal

from dmljax.nets import layers
from dmljax.nets.layers import pooling


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


@settings(deadline=None, max_examples=8)
@given(
    st.integers(1, 4),
    st.integers(1, 4),
    st.tuples(*[st.tuples(st.integers(0, 2), st.integers(0, 3))] * 2),
    st.tuples(st.integers(0, 6), st.integers(0, 4)),
    st.integers(0, 3),
)
def test_both_forms_of_max_pooling_have_the_same_values_and_gradients(
    size, strides, padding, extra, seed
):
    # A window inside the padding alone would have no maximum.
    padding = tuple((min(a, size - 1), min(b, size - 1)) for a, b in padding)
    rng = np.random.default_rng(seed)
    # Among these integers many are equal, and the first of them gets the gradient.
    x = rng.integers(-2, 2, (2, size + extra[0], size + extra[1], 3)).astype(np.float32)
    options = {"size": size, "strides": strides, "padding": padding}
    expected, expected_backward = jax.vjp(functools.partial(pooling._xla_max_pool, **options), x)
    weights = rng.normal(size=expected.shape).astype(np.float32)
    for impl in ("auto", "cpu"):
        y, backward = jax.vjp(functools.partial(pooling._max_pool, impl=impl, **options), x)
        np.testing.assert_array_equal(y, expected)
        np.testing.assert_allclose(backward(weights)[0], expected_backward(weights)[0], atol=1e-5)


def test_nan_input_stays_visible():
    x = np.zeros((1, 4, 4, 1), np.float32)
    x[0, 0, 1] = np.nan
    y = layers.max_pool(x, 2, strides=2)
    np.testing.assert_array_equal(y[0, :, :, 0], [[np.nan, 0], [0, 0]])


@pytest.mark.parametrize(
    ("impl", "platform", "strides", "faster"),
    [
        ("auto", "cpu", 2, True),
        ("auto", "cpu", 1, False),
        # XLA's gradient is refused there where `runtime.deterministic` is set.
        ("auto", "cuda", 2, True),
        ("auto", "rocm", 1, True),
        ("auto", "tpu", 2, False),
        ("cpu", "tpu", 1, True),
        ("xla", "cpu", 2, False),
    ],
)
def test_impl_and_platform_choose_the_form(impl, platform, strides, faster):
    x = jnp.ones((2, 9, 9, 3))
    options = {"strides": strides, "padding": 1, "impl": impl}
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(layers.max_pool(x, 3, **options) ** 2)))
    text = gradient.trace(x).lower(lowering_platforms=(platform,)).as_text()
    assert ("select_and_scatter" not in text and "reduce_window" not in text) == faster


def test_windows_whose_positions_do_not_fit_into_8_bits_take_the_form_of_xla():
    x = jnp.ones((1, 17, 17, 1))
    for size, own in ((16, True), (17, False)):
        program = jax.make_jaxpr(
            lambda x, size=size: layers.max_pool(x, size, strides=1, impl="cpu")
        )
        assert ("reduce_window" not in str(program(x))) == own
