"""Both forms of max pooling have the same values and gradients, whatever the geometry."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmljax.nets.layers.max_pooling import max_pool, xla_max_pool


@settings(deadline=None, max_examples=8)
@given(
    st.integers(1, 4),
    st.integers(1, 4),
    st.tuples(*[st.tuples(st.integers(0, 2), st.integers(0, 3))] * 2),
    st.tuples(st.integers(0, 6), st.integers(0, 4)),
    st.integers(0, 3),
)
def test_values_and_gradients_are_those_of_xla(size, strides, padding, extra, seed):
    # A window inside the padding alone would have no maximum.
    padding = tuple((min(a, size - 1), min(b, size - 1)) for a, b in padding)
    rng = np.random.default_rng(seed)
    # Among these integers many are equal, and the first of them gets the gradient.
    x = rng.integers(-2, 2, (2, size + extra[0], size + extra[1], 3)).astype(np.float32)
    options = {"size": size, "strides": strides, "padding": padding}
    expected, expected_backward = jax.vjp(functools.partial(xla_max_pool, **options), x)
    weights = rng.normal(size=expected.shape).astype(np.float32)
    for impl in ("auto", "cpu", "xla"):
        y, backward = jax.vjp(functools.partial(max_pool, impl=impl, **options), x)
        np.testing.assert_array_equal(y, expected)
        np.testing.assert_allclose(backward(weights)[0], expected_backward(weights)[0], atol=1e-5)


def test_nan_input_stays_visible():
    x = np.zeros((1, 4, 4, 1), np.float32)
    x[0, 0, 1] = np.nan
    y = max_pool(x, 2, strides=2, padding=((0, 0), (0, 0)))
    np.testing.assert_array_equal(y[0, :, :, 0], [[np.nan, 0], [0, 0]])


@pytest.mark.parametrize(
    ("impl", "platform", "strides", "faster"),
    [
        ("auto", "cpu", 2, True),
        ("auto", "cpu", 1, False),
        # XLA's gradient is refused there where `runtime.deterministic` is set.
        ("auto", "cuda", 2, True),
        ("auto", "cuda", 1, True),
        ("auto", "rocm", 2, True),
        ("auto", "tpu", 2, False),
        ("cpu", "tpu", 1, True),
        ("xla", "cpu", 2, False),
    ],
)
def test_impl_and_platform_choose_the_form(impl, platform, strides, faster):
    x = jnp.ones((2, 9, 9, 3))
    options = {"strides": strides, "padding": ((1, 1), (1, 1)), "impl": impl}
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(max_pool(x, 3, **options) ** 2)))
    text = gradient.trace(x).lower(lowering_platforms=(platform,)).as_text()
    assert ("select_and_scatter" not in text and "reduce_window" not in text) == faster


def test_windows_whose_positions_do_not_fit_into_8_bits_take_the_form_of_xla():
    x = jnp.ones((1, 17, 17, 1))
    for size, own in ((16, True), (17, False)):
        program = jax.make_jaxpr(
            lambda x, size=size: max_pool(x, size, strides=1, padding=((0, 0),) * 2, impl="cpu")
        )
        assert ("reduce_window" not in str(program(x))) == own
