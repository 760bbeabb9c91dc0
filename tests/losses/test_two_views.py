"""Two-view losses against naive loops and pytorch-metric-learning."""

import functools
import math
import pathlib

import jax
import numpy as np
import pytest
from numeric import assert_near, gradient
from system import load_module

from dmljax import losses

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "proxies.npz"


def _cos(x, y):
    return sum(x * y) / math.sqrt(sum(x * x) * sum(y * y))


def _clip(x, y, temperature=0.07):
    b, t, total = len(x), temperature, 0
    for i in range(b):
        along = sum(math.exp((_cos(x[i], y[j]) - _cos(x[i], y[i])) / t) for j in range(b))
        across = sum(math.exp((_cos(x[j], y[i]) - _cos(x[i], y[i])) / t) for j in range(b))
        total += (math.log(along) + math.log(across)) / 2
    return total / b


def _siglip(x, y, scale=10, bias=-10):
    total = 0
    for i in range(len(x)):
        for j in range(len(x)):
            z = 1 if i == j else -1
            total += math.log(1 + math.exp(-z * (scale * _cos(x[i], y[j]) + bias)))
    return total / len(x)


def _vicreg(x, y, invariance=25, variance=25, covariance=1, eps=1e-4):
    b, d = x.shape
    squares = sum((x[i, a] - y[i, a]) ** 2 for i in range(b) for a in range(d))
    total = invariance * squares / (b * d)
    for side in (x, y):
        mean = [sum(side[:, a]) / b for a in range(d)]
        for a in range(d):
            for e in range(d):
                cov = sum((r[a] - mean[a]) * (r[e] - mean[e]) for r in side) / max(b - 1, 1)
                if a == e:
                    total += variance * max(0, 1 - math.sqrt(cov + eps)) / d / 2
                else:
                    total += covariance * cov**2 / d
    return total


NAIVE = {"clip": _clip, "siglip": _siglip, "vicreg": _vicreg}
OPTIONS = {
    "clip": {"temperature": 0.3},
    "siglip": {"scale": 4.0, "bias": -2.0},
    "vicreg": {"invariance": 3.0, "variance": 5.0, "covariance": 2.0, "eps": 0.01},
}
NAMES = sorted(NAIVE)
each_loss = pytest.mark.parametrize("name", NAMES)


def test_every_loss_has_a_referee():
    assert set(NAMES) == set(losses.two_views.__all__)


@functools.cache
def _compiled(name, **options):
    def loss(x, y, where):
        return getattr(losses, name)(x, y, where=where, **options)

    compiled = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    return lambda x, y, where=None: compiled(
        x, y, np.ones(len(x), bool) if where is None else where
    )


def _data(dtype=np.float32):
    rng = np.random.default_rng(4)
    x = rng.normal(size=(6, 3))
    return x.astype(dtype), (0.6 * x + 0.3 * rng.normal(size=(6, 3))).astype(dtype)


@each_loss
@pytest.mark.parametrize("has_options", [False, True])
def test_value_and_gradients_are_those_of_a_loop(name, has_options):
    options = OPTIONS[name] if has_options else {}
    loop = functools.partial(NAIVE[name], **options)
    x, y = _data(np.float64)
    with jax.enable_x64(True):
        value, (dx, dy) = _compiled(name, **options)(x, y)
    np.testing.assert_allclose(value, loop(x, y), rtol=1e-10)
    assert_near(dx, gradient(lambda x: loop(x, y), x), 1e-6)
    assert_near(dy, gradient(lambda y: loop(x, y), y), 1e-6)


def test_vicreg_is_that_of_pytorch_metric_learning():
    module = load_module(GOLDEN.with_name("cases.py"))
    with np.load(GOLDEN) as golden:
        for case, (x, _) in module.of_proxies().items():
            if case == "one":
                continue
            padding = 12 - len(x)
            pair = [np.pad(side, [(0, padding), (0, 0)]) for side in (x, -0.5 * x[::-1])]
            with jax.enable_x64(True):
                value, slopes = _compiled("vicreg")(*pair, np.arange(12) < len(x))
            np.testing.assert_allclose(value, golden[f"vicreg/{case}/value"], rtol=1e-6)
            for i, slope in enumerate(slopes):
                assert_near(slope[: len(x)], golden[f"vicreg/{case}/{i}"], 1e-5)


@pytest.mark.parametrize("name", ["clip", "siglip"])
def test_the_mean_is_over_the_entries_that_count(name):
    x, y = _data()
    where = np.array([True, False, True, True, False, True])
    entries = jax.jit(functools.partial(getattr(losses, name), reduce_fn=None))(x, y, where=where)
    assert entries.shape == (6,) and not np.any(entries[~where])
    value = _compiled(name)(x, y, where)[0]
    np.testing.assert_allclose(entries.sum() / 4, value, rtol=1e-6)


def test_temperature_and_bias_may_be_learned():
    x, y = _data()
    slope = jax.jit(jax.grad(lambda t: losses.clip(x, y, temperature=t)))(0.07)
    step = np.float32(1e-3)
    measured = (_clip(x, y, 0.07 + step) - _clip(x, y, 0.07 - step)) / (2 * step)
    np.testing.assert_allclose(slope, measured, rtol=1e-2)
    slope = jax.jit(jax.grad(lambda b: losses.siglip(x, y, bias=b)))(-10.0)
    measured = (_siglip(x, y, bias=-9.99) - _siglip(x, y, bias=-10.01)) / 0.02
    np.testing.assert_allclose(slope, measured, rtol=1e-2)


@each_loss
def test_wrong_arguments_are_named(name, unchecked):
    x, y = _data()
    with pytest.raises(ValueError, match="same shape"):
        getattr(losses, name)(x, y[:5])
    with pytest.raises(ValueError, match="must be floats"):
        getattr(losses, name)(x, y.astype(int))
