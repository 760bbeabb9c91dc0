"""Cross-entropy with label smoothing: published values, loops, masks, wrong arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from naive_proxies import cross_entropy
from numeric import assert_near, gradient

from dmljax import losses


def _logits():
    i, k = np.meshgrid(np.arange(3), np.arange(5), indexing="ij")
    return np.sin(0.9 * (5 * i + k) + 0.2)


@pytest.mark.parametrize(("temperature", "expected"), [(1.0, 1.4006688715), (0.2, 2.0942157697)])
def test_label_smoothing_values(temperature, expected):
    with jax.enable_x64(True):
        value = losses.label_smoothed_cross_entropy(
            _logits(), np.array([0, 3, 4]), temperature=temperature
        )
    np.testing.assert_allclose(value, expected, rtol=0, atol=1e-10)


def test_label_smoothing_properties(unchecked):
    fn = losses.label_smoothed_cross_entropy
    compiled = jax.jit(fn)
    z, y = _logits(), np.array([0, 3, 4])

    def naive(z):
        value = 0
        for row, label in zip(z, y, strict=True):
            value += sum(
                (0.9 * (c == label) + 0.1 / 5) * cross_entropy(list(row), c) for c in range(5)
            )
        return value / 3

    with jax.enable_x64(True):
        assert_near(jax.jit(jax.grad(lambda z: fn(z, y)))(z), gradient(naive, z), 1e-8)
    z = z.astype(np.float32)
    where = np.array([True, False, True])
    np.testing.assert_allclose(
        compiled(np.where(where[:, None], z, np.nan), np.array([0, -1, 4]), where=where),
        compiled(z[where], y[where]),
        rtol=1e-6,
    )
    assert compiled(z, y, where=np.zeros(3, bool)) == 0
    np.testing.assert_allclose(
        fn(z, y, epsilon=0.0),
        np.mean([cross_entropy(list(r), c) for r, c in zip(z, y, strict=True)]),
        rtol=1e-6,
    )
    assert (
        np.isfinite(compiled(1e4 * z, y))
        and compiled(z.astype(jnp.bfloat16), y).dtype == jnp.float32
    )
    with pytest.raises(ValueError, match="label 5 in row 1"):
        fn(z, np.array([0, 5, 4]))
    assert np.isnan(compiled(z, np.array([0, 5, 4])))
    with pytest.raises(ValueError, match="epsilon"):
        fn(z, y, epsilon=1.5)
