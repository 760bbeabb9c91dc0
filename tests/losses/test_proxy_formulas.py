"""Formulas of single proxy losses, also where pytorch-metric-learning is wrong."""

import functools

import jax
import numpy as np
import pytest
from naive_proxies import compiled, proxy_data

from dmljax import losses


def test_arcface_margin_is_in_degrees_and_never_rises(unchecked):
    w = np.eye(2, dtype=np.float32)
    angles = np.linspace(0, np.pi, 181)
    x = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    labels = np.zeros(181, int)
    for name, keywords in (("arcface", {"margin": 60.0}), ("sphereface", {"margin": 4})):
        fn = getattr(losses, name)
        fn = functools.partial(fn, reduce_fn=None, **keywords)
        loss = np.asarray(jax.jit(fn)(x, labels, np.stack([w[0], 0 * w[0]])))
        assert np.all(np.diff(loss) > -1e-5)  # the other logit is always 0
    with pytest.raises(ValueError, match="degrees"):
        losses.arcface(x, labels, w, margin=200.0)
    with pytest.raises(ValueError, match="whole number"):
        losses.sphereface(x, labels, w, margin=1.5)


def test_margins_may_be_scheduled():
    x, y, w = proxy_data("arcface")
    value = jax.jit(lambda m: losses.arcface(x, y, w, margin=m))(10.0)
    np.testing.assert_allclose(value, compiled("arcface", margin=10.0)(x, w, y)[0], rtol=1e-6)


def test_a_small_loss_keeps_its_digits():
    w = np.eye(3, dtype=np.float32)
    x = w[:1] + np.float32(0.01)
    value, (dx, _) = compiled("cosface")(x, w, np.array([0]))
    with jax.enable_x64(True):
        exact, (exact_dx, _) = compiled("cosface")(
            x.astype(np.float64), w.astype(np.float64), np.array([0])
        )
    assert 0 < float(exact) < 1e-16  # the log of 1 + 1e-17, not of 1
    np.testing.assert_allclose(value, float(exact), rtol=1e-4)
    np.testing.assert_allclose(dx, exact_dx, rtol=1e-3)
