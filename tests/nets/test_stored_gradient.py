"""`layers.with_stored_gradient`: the same numbers, and each gradient is computed once."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from dmljax.nets import layers


class _Rows(nn.Module):
    """Eight blocks x + gamma Dense(LayerNorm(x)), as in a transformer."""

    stored: bool

    @nn.compact
    def __call__(self, x):
        for i in range(8):
            gamma = self.param(f"gamma{i}", nn.initializers.constant(0.5), (x.shape[-1],))
            y = nn.Dense(x.shape[-1])(nn.LayerNorm(use_fast_variance=False)(x))
            x = x + y * gamma[None, None]
            if self.stored:
                x = layers.with_stored_gradient(x)
        return x[:, 0]


def _gradient(stored, x, variables):
    def loss(variables, x):
        return jnp.sum(_Rows(stored).apply(variables, x) ** 2)

    return jax.jit(jax.grad(loss, argnums=(0, 1))).lower(variables, x).compile()


def test_gradients_are_equal_and_no_sum_is_repeated():
    x = np.random.default_rng(0).normal(size=(3, 11, 12)).astype(np.float32)
    variables = _Rows(False).init(jax.random.key(0), x)
    stored, plain = (_gradient(stored, x, variables) for stored in (True, False))
    for a, b in zip(*(jax.tree.leaves(f(variables, x)) for f in (stored, plain)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    if jax.default_backend() == "cpu":
        sums = [len(re.findall(r"f32\[3,11,12\]\S* add\(", f.as_text())) for f in (stored, plain)]
        assert sums[0] < 0.6 * sums[1], sums


def test_a_gradient_that_is_not_a_number_stays_one():
    x = jnp.array([[jnp.nan, 2.0], [3.0, 4.0]])
    gradient = jax.grad(lambda x: jnp.sum(layers.with_stored_gradient(x) ** 2))(x)
    np.testing.assert_array_equal(jnp.isnan(gradient), [[True, False], [False, False]])


def test_batches_of_gradients():
    x = jnp.arange(6.0).reshape(3, 2)
    gradient = jax.vmap(jax.grad(lambda x: jnp.sum(layers.with_stored_gradient(x) ** 3)))(x)
    np.testing.assert_allclose(gradient, 3 * x**2)
