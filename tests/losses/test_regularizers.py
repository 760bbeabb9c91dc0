"""Regularizers against naive loops and pytorch-metric-learning."""

import functools
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numeric import assert_near, gradient
from system import load_module

from dmljax import losses

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "proxies.npz"


def _unit(x):
    return x / math.sqrt(sum(x * x))


def _lp(x, p=2, power=1):
    return sum(sum(abs(v) ** p for v in row) ** (power / p) for row in x) / len(x)


def _center_invariant(x):
    squares = [sum(row * row) for row in x]
    mean = sum(squares) / len(x)
    return sum((s - mean) ** 2 / 4 for s in squares) / len(x)


def _regular_face(x):
    rows = range(len(x))
    nearest = [max(sum(_unit(x[i]) * _unit(x[j])) for j in rows if j != i) for i in rows]
    return sum(nearest) / len(x)


def _sparse_centers(x):
    total, count = 0, 0
    for centers in x:
        for i in range(len(centers)):
            for j in range(i):
                gap = _unit(centers[i]) - _unit(centers[j])
                total += math.sqrt(sum(gap * gap))
                count += 1
    return total / (2 * count)


NAIVE = {
    "lp": _lp,
    "zero_mean": lambda x: sum(abs(sum(row)) for row in x) / len(x),
    "center_invariant": _center_invariant,
    "regular_face": _regular_face,
    "sparse_centers": _sparse_centers,
}
NAMES = sorted(NAIVE)
each_regularizer = pytest.mark.parametrize("name", NAMES)


def test_every_regularizer_has_a_referee():
    assert set(NAMES) == set(losses.regularizers.__all__)


@functools.cache
def _compiled(name, **keywords):
    def loss(x, where):
        return getattr(losses, name)(x, where=where, **keywords)

    compiled = jax.jit(jax.value_and_grad(loss))
    return lambda x, where=None: compiled(
        x, np.ones(np.shape(x)[:-1], bool) if where is None else where
    )


def _data(name, dtype=np.float32):
    shape = (5, 3, 4) if name == "sparse_centers" else (5, 4)
    return np.random.default_rng(5).normal(size=shape).astype(dtype)


@each_regularizer
def test_value_and_gradient_are_those_of_a_loop(name):
    x = _data(name, np.float64)
    with jax.enable_x64(True):
        value, slope = _compiled(name)(x)
    np.testing.assert_allclose(value, NAIVE[name](x), rtol=1e-10)
    assert_near(slope, gradient(NAIVE[name], x), 1e-6)


def test_lp_equals_the_loop_for_other_norms_and_powers(unchecked):
    x = _data("lp", np.float64)
    for p, power in ((1.0, 1.0), (3.0, 2.0), (2.0, 2.0), (0.5, 1.0)):
        with jax.enable_x64(True):
            value, slope = _compiled("lp", p=p, power=power)(x)
        np.testing.assert_allclose(value, _lp(x, p, power), rtol=1e-10)
        assert_near(slope, gradient(lambda x, p=p, power=power: _lp(x, p, power), x), 1e-6)
        _, slope = _compiled("lp", p=p, power=power)(np.zeros((2, 4), np.float32))
        assert not np.any(slope)
    with pytest.raises(ValueError, match="p must be positive"):
        losses.lp(x.astype(np.float32), p=0.0)


def test_values_and_gradients_are_those_of_pytorch_metric_learning():
    module = load_module(GOLDEN.with_name("cases.py"))
    inputs = {case: x for case, (x, _) in module.of_proxies().items()}
    inputs["proxies"] = module.proxies()[1]
    compared = set()
    with np.load(GOLDEN) as golden:
        for key in golden:
            setting, case, what = key.split("/")
            name, _, settings = setting.partition(":")
            if name not in NAMES or what != "value":
                continue
            keywords = dict(pair.split("=") for pair in settings.split(",") if pair)
            x, where = inputs[case], None
            if x.ndim == 2:
                where = np.arange(12) < len(x)
                x = np.pad(x, [(0, 12 - len(x)), (0, 0)])
            with jax.enable_x64(True):
                fn = _compiled(name, **{k: float(v) for k, v in keywords.items()})
                value, slope = fn(x, where)
            np.testing.assert_allclose(value, golden[key], rtol=1e-6, atol=1e-12)
            assert_near(slope[: len(inputs[case])], golden[f"{setting}/{case}/0"], 1e-5)
            compared.add(name)
    assert compared == set(NAMES)


def test_masking_the_centers_of_a_class_equals_dropping_them():
    sparse_centers, x = _compiled("sparse_centers"), _data("sparse_centers")
    where = np.array([True, True, False, True, False])
    expected, slope = sparse_centers(x[where])
    x[2], x[4] = np.nan, 100
    mask = np.broadcast_to(where[:, None], x.shape[:2])
    value, masked = sparse_centers(x, mask)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    assert_near(masked[where], slope, 1e-5)
    assert not np.any(masked[~where])
    value, slope = sparse_centers(x, np.zeros(mask.shape, bool))
    assert value == 0 and not np.any(slope)


def test_zero_and_equal_centers_are_finite_and_nan_stays_visible():
    sparse_centers, x = _compiled("sparse_centers"), _data("sparse_centers")
    x[0], x[1], x[3, 0] = 0, x[2], x[3, 1]
    for classes in (x, x[:1]):
        value, slope = sparse_centers(classes)
        assert np.isfinite(value) and np.isfinite(slope).all()
    half, slope = sparse_centers(jnp.asarray(x, jnp.bfloat16))
    assert half.dtype == jnp.float32 and slope.dtype == jnp.bfloat16
    x[3] = np.nan
    assert np.isnan(sparse_centers(x)[0])


def test_a_single_vector_has_loss_0():
    """pytorch-metric-learning compares a single vector with itself and returns 1."""
    assert _compiled("regular_face")(_data("regular_face")[:1])[0] == 0
    assert _compiled("sparse_centers")(_data("sparse_centers")[:, :1])[0] == 0


def test_merging_centers_keep_their_direction():
    """Centers 1e-4 apart: 2 - 2 cosine has no digits left in float32."""
    x = np.random.default_rng(6).normal(size=(1, 1, 8)) + 1e-4 * np.random.default_rng(7).normal(
        size=(3, 2, 8)
    )
    x = x.astype(np.float32)
    value, slope = _compiled("sparse_centers")(x)
    with jax.enable_x64(True):
        exact, exact_slope = _compiled("sparse_centers")(x.astype(np.float64))
    np.testing.assert_allclose(value, exact, rtol=5e-3)
    assert_near(slope, exact_slope, 1e-2)


def test_lp_and_zero_mean_take_any_leading_axes(unchecked):
    x = _data("sparse_centers")
    np.testing.assert_allclose(losses.lp(x), losses.lp(x.reshape(-1, 4)), rtol=1e-6)
    where = np.arange(15).reshape(5, 3) % 2 == 0
    flat = losses.zero_mean(x.reshape(-1, 4)[where.reshape(-1)])
    np.testing.assert_allclose(losses.zero_mean(x, where=where), flat, rtol=1e-6)
    with pytest.raises(ValueError, match="where must be bool"):
        losses.lp(x, where=where[0])
    with pytest.raises(ValueError, match=r"\[c k d\]"):
        losses.sparse_centers(x[0])
