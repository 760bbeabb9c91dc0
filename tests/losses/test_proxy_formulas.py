"""Formulas of single proxy losses, also where pytorch-metric-learning is wrong."""

import functools
import math

import jax
import numpy as np
import pytest
from naive_proxies import CENTERED, compiled, proxy_data

from dmljax import losses


@pytest.mark.parametrize("name", ["arcface", "subcenter_arcface"])
def test_arcface_has_a_finite_gradient_parallel_to_the_proxy(name):
    """Peers go through acos, whose slope there is infinite, and return NaN."""
    w = np.eye(3)
    x = 2 * np.eye(3)[:1]
    with jax.enable_x64(True):
        proxies = w[:, None] if name in CENTERED else w
        value, (dx, dw) = compiled(name, scale=4.0)(x, proxies, np.array([0]))
    m = math.radians(28.6)
    np.testing.assert_allclose(value, math.log(1 + 2 * math.exp(-4 * math.cos(m))), rtol=1e-9)
    # The derivative of the angle to its proxy is 0, so only the softmax of the others remains.
    share = 1 / (2 + math.exp(4 * math.cos(m)))
    np.testing.assert_allclose(dx, [[0, 2 * share, 2 * share]], atol=1e-9)
    others = [[0, 0, 0], [4 * share, 0, 0], [4 * share, 0, 0]]
    np.testing.assert_allclose(dw.reshape(3, 3), others, atol=1e-9)


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


def test_one_center_is_the_plain_loss():
    x, y, w = proxy_data("arcface")
    expected = compiled("arcface")(x, w, y)[0]
    several = compiled("subcenter_arcface")
    np.testing.assert_allclose(several(x, w[:, None], y)[0], expected, rtol=1e-6)
    # The same center twice acts like one.
    twice = np.stack([w, 3 * w], axis=1)
    np.testing.assert_allclose(several(x, twice, y)[0], expected, rtol=1e-6)
