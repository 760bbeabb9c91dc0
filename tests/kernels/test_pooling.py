"""The maximum over windows and its gradient equal XLA's own, whatever the geometry."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dmljax.kernels import pooling


def _both(function, x, weights):
    value, back = jax.vjp(function, x)
    return value, back(weights)[0]


@settings(deadline=None, max_examples=8)
@given(
    st.integers(1, 4),
    st.integers(1, 4),
    st.tuples(*[st.tuples(st.integers(0, 2), st.integers(0, 3))] * 2),
    st.tuples(st.integers(0, 6), st.integers(0, 4)),
    st.integers(0, 3),
)
def test_values_and_gradients_are_those_of_xla(size, strides, sides, more, seed):
    # No window lies in the padding alone: such a maximum is of nothing.
    sides = tuple((min(a, size - 1), min(b, size - 1)) for a, b in sides)
    rng = np.random.default_rng(seed)
    # Whole numbers: many are equal, and the first of them gets the gradient.
    x = rng.integers(-2, 2, (2, size + more[0], size + more[1], 3)).astype(np.float32)
    options = {"strides": strides, "sides": sides}
    weights = rng.normal(size=pooling.largest(x, size, **options).shape).astype(np.float32)
    ours = _both(lambda x: pooling.largest(x, size, **options), x, weights)
    theirs = _both(lambda x: pooling._plain(x, size, strides, sides), x, weights)
    np.testing.assert_array_equal(ours[0], theirs[0])
    np.testing.assert_allclose(ours[1], theirs[1], atol=1e-5)


def test_what_is_not_a_number_stays_so():
    x = np.zeros((1, 4, 4, 1), np.float32)
    x[0, 0, 1] = np.nan
    y = pooling.largest(x, 2, strides=2, sides=((0, 0), (0, 0)))
    np.testing.assert_array_equal(y[0, :, :, 0], [[np.nan, 0], [0, 0]])


def test_the_taps_are_what_runs_on_the_cpu():
    x = jnp.ones((2, 9, 9, 3))
    options = {"strides": 2, "sides": ((1, 1), (1, 1))}
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(pooling.largest(x, 3, **options) ** 2)))
    text = gradient.lower(x).compile().as_text()
    assert "scatter" not in text and "reduce-window" not in text
