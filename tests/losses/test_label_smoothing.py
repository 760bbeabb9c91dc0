"""Cross-entropy with label smoothing: published values, loops, wrong arguments."""

import jax
import numpy as np
import pytest
from naive_proxies import cross_entropy
from numeric import assert_near, gradient

from dmljax import losses


def _logits():
    i, k = np.meshgrid(np.arange(3), np.arange(5), indexing="ij")
    return np.sin(0.9 * (5 * i + k) + 0.2)


@pytest.mark.parametrize(("temperature", "expected"), [(1.0, 1.4006688715), (0.2, 2.0942157697)])
def test_published_values(temperature, expected):
    with jax.enable_x64(True):
        value = losses.label_smoothed_cross_entropy(
            _logits(), np.array([0, 3, 4]), temperature=temperature
        )
    np.testing.assert_allclose(value, expected, rtol=0, atol=1e-10)


LABELS = np.array([0, 3, 4])
LOSS = losses.label_smoothed_cross_entropy


def test_the_gradient_is_that_of_a_loop():
    z, y = _logits(), LABELS

    def naive(z):
        value = 0
        for row, label in zip(z, y, strict=True):
            value += sum(
                (0.9 * (c == label) + 0.1 / 5) * cross_entropy(list(row), c) for c in range(5)
            )
        return value / 3

    with jax.enable_x64(True):
        assert_near(jax.jit(jax.grad(lambda z: LOSS(z, y)))(z), gradient(naive, z), 1e-8)


def test_wrong_arguments_are_named(unchecked):
    z = _logits().astype(np.float32)
    with pytest.raises(ValueError, match="label 5 in row 1"):
        LOSS(z, np.array([0, 5, 4]))
    assert np.isnan(jax.jit(LOSS)(z, np.array([0, 5, 4])))
    with pytest.raises(ValueError, match="epsilon"):
        LOSS(z, LABELS, epsilon=1.5)
