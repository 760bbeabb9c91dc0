"""Proxy losses against plain loops and pytorch-metric-learning, and properties of all of them."""

import functools
import importlib.util
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numeric import assert_near, gradient

from dmljax import losses, ops

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "proxies.npz"
CENTERED = {"subcenter_arcface", "soft_triple"}
LENGTHS = {"sphereface", "large_margin_softmax"}  # what depends on the lengths of embeddings


# --- the referee: one row, one class at a time --------------------------------------------------


def _cos(x, w):
    return x @ w / math.sqrt((x @ x) * (w @ w))


def _ce(logits, label):
    peak = max(logits)
    return peak + math.log(sum(math.exp(z - peak) for z in logits)) - logits[label]


def _by_row(logits_fn):
    """The mean cross-entropy of `logits_fn(x, label, proxies)`."""

    def value(x, labels, proxies):
        rows = zip(x, labels, strict=True)
        return sum(_ce(logits_fn(row, y, proxies), y) for row, y in rows) / len(x)

    return value


def _arcface(cosines, label, margin=28.6, scale=64):
    m = math.radians(margin)
    z = list(cosines)
    t = math.acos(z[label])
    z[label] = math.cos(t + m) if t <= math.pi - m else z[label] - m * math.sin(m)
    return [scale * s for s in z]


def _psi(cosines, label, margin=4):
    z = list(cosines)
    t = math.acos(z[label])
    k = math.floor(t / (math.pi / margin))
    z[label] = (-1) ** k * math.cos(margin * t) - 2 * k
    return z


def _soft(x, centers, gamma=0.1):
    cosines = [_cos(x, w) for w in centers]
    shares = [math.exp(s / gamma) for s in cosines]
    return sum(e * s for e, s in zip(shares, cosines, strict=True)) / sum(shares)


def _soft_triple(x, label, proxies):
    z = [_soft(x, centers) for centers in proxies]
    z[label] -= 0.01
    return [20 * s for s in z]


def _cosface(x, label, proxies):
    return [64 * (_cos(x, w) - 0.35 * (c == label)) for c, w in enumerate(proxies)]


def _proxy_anchor(x, labels, proxies):
    pull = push = 0
    for c, w in enumerate(proxies):
        pos = [math.exp(-32 * (_cos(r, w) - 0.1)) for r, y in zip(x, labels, strict=True) if y == c]
        neg = [math.exp(32 * (_cos(r, w) + 0.1)) for r, y in zip(x, labels, strict=True) if y != c]
        pull += math.log(1 + sum(pos))
        push += math.log(1 + sum(neg))
    return pull / len(set(labels)) + push / len(proxies)


def _squares(x, w):
    gap = x / math.sqrt(x @ x) - w / math.sqrt(w @ w)
    return gap @ gap


def _norm(x):
    return math.sqrt(x @ x)


NAIVE = {
    "normalized_softmax": _by_row(lambda x, y, ws: [_cos(x, w) / 0.05 for w in ws]),
    "cosface": _by_row(_cosface),
    "arcface": _by_row(lambda x, y, ws: _arcface([_cos(x, w) for w in ws], y)),
    "subcenter_arcface": _by_row(
        lambda x, y, ws: _arcface([max(_cos(x, w) for w in centers) for centers in ws], y)
    ),
    "sphereface": _by_row(
        lambda x, y, ws: [_norm(x) * z for z in _psi([_cos(x, w) for w in ws], y)]
    ),
    "large_margin_softmax": _by_row(
        lambda x, y, ws: [
            _norm(x) * _norm(w) * z
            for w, z in zip(ws, _psi([_cos(x, w) for w in ws], y), strict=True)
        ]
    ),
    "soft_triple": _by_row(_soft_triple),
    "proxy_anchor": _proxy_anchor,
    "proxy_nca": _by_row(lambda x, y, ws: [-_squares(x, w) for w in ws]),
    "proxy_nca_pp": _by_row(lambda x, y, ws: [-9 * _squares(x, w) for w in ws]),
}
NAMES = sorted(NAIVE)
each_loss = pytest.mark.parametrize("name", NAMES)


def test_every_loss_has_a_referee():
    assert set(NAMES) | {"label_smoothed_cross_entropy"} == set(losses.proxies.__all__)


def _data(name, b=6, c=4, d=3, k=2, dtype=np.float32):
    rng = np.random.default_rng(3)
    x = rng.normal(size=(b, d)).astype(dtype)
    w = rng.normal(size=(c, k, d) if name in CENTERED else (c, d)).astype(dtype)
    return x, np.array([0, 0, 1, 2, 2, 0])[:b], w


@functools.cache
def _compiled(name, **keywords):
    """Value and both gradients."""

    def loss(x, proxies, labels, where):
        return getattr(losses, name)(x, labels, proxies, where=where, **keywords)

    compiled = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    return lambda x, w, y, where=None: compiled(
        x, w, y, np.ones(len(x), bool) if where is None else where
    )


@each_loss
def test_naive_loops(name):
    module = _golden_module()
    w = module.proxies()[name in CENTERED]
    x, y = module.cases()["balanced"]
    with jax.enable_x64(True):
        value, (dx, dw) = _compiled(name)(x, w, y)
        assert value.dtype == dx.dtype == dw.dtype == np.float64
    np.testing.assert_allclose(value, NAIVE[name](x, y, w), rtol=1e-10)
    assert_near(dx, gradient(lambda x: NAIVE[name](x, y, w), x), 1e-6)
    assert_near(dw, gradient(lambda w: NAIVE[name](x, y, w), w), 1e-6)


# --- the peer -----------------------------------------------------------------------------------


def _golden_module():
    spec = importlib.util.spec_from_file_location("golden_proxies", GOLDEN.with_suffix(".py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


with np.load(GOLDEN) as _file:
    _golden = dict(_file)
_spelled = sorted(
    {key.split("/")[0] for key in _golden if key.split(":")[0].split("/")[0] in NAMES}
)


@pytest.mark.parametrize("spelled", _spelled)
def test_pytorch_metric_learning(spelled):
    name, _, settings = spelled.partition(":")
    # The margin of sphereface must be an int.
    pairs = [pair.split("=") for pair in settings.split(",") if pair]
    keywords = {k: float(v) if "." in v else int(v) for k, v in pairs}
    module = _golden_module()
    w = module.proxies()[name in CENTERED]
    cases = module.cases()
    assert len(cases) == 7
    for case, (x, y) in cases.items():
        # Padded to one shape with rows that do not count, because compiling takes longest.
        padding = 12 - len(x)
        padded, where = np.pad(x, [(0, padding), (0, 0)]), np.arange(12) < len(x)
        with jax.enable_x64(True):
            value, (dx, dw) = _compiled(name, **keywords)(padded, w, np.pad(y, (0, padding)), where)
        np.testing.assert_allclose(value, _golden[f"{spelled}/{case}/value"], rtol=1e-6, atol=1e-9)
        assert_near(dx[: len(x)], _golden[f"{spelled}/{case}/0"], 1e-5)
        assert_near(dw, _golden[f"{spelled}/{case}/1"], 1e-5)


def test_the_peer_covers_every_loss():
    assert {spelled.partition(":")[0] for spelled in _spelled} == set(NAMES)


# --- properties ---------------------------------------------------------------------------------


@each_loss
def test_masked_rows_do_not_matter(name):
    """Whatever they hold. That they do not count, the comparison with the peer tests."""
    x, y, w = _data(name)
    where = np.array([True, False, True, True, False, True])
    expected, (dx, dw) = _compiled(name)(x, w, y, where)
    np.testing.assert_allclose(expected, NAIVE[name](x[where], y[where], w), rtol=1e-4)
    x[1], x[4], y[1], y[4] = np.nan, 0, -1, 99
    value, slopes = _compiled(name)(x, w, y, where)
    assert value == expected
    np.testing.assert_array_equal(slopes[0], dx)
    np.testing.assert_array_equal(slopes[1], dw)
    assert not np.any(dx[~where])


def test_wrong_labels_of_masked_rows_do_not_raise():
    x, y, w = _data("cosface")
    where = np.arange(6) > 1
    expected = losses.cosface(x, y, w, where=where)
    y[:2] = -1, 99
    assert losses.cosface(x, y, w, where=where) == expected


@each_loss
def test_an_empty_mask_gives_0(name):
    x, y, w = _data(name)
    value, slopes = _compiled(name)(x, w, y, np.zeros(6, bool))
    assert value == 0
    assert not any(np.any(slope) for slope in slopes)


@each_loss
def test_finite_on_parallel_opposite_and_zero_rows(name):
    x, y, w = _data(name)
    near = w[:, 0] if name in CENTERED else w
    x[0] = 3 * near[0]  # parallel to its own proxy
    x[1] = near[0]
    x[2] = -2 * near[1]  # and opposite
    x[3] = x[4]  # twice the same
    x[5] = 0
    w[3] = 0
    value, slopes = _compiled(name)(x, w, y)
    assert np.isfinite(value)
    assert all(np.isfinite(slope).all() for slope in slopes)
    for size in (1e-30, 1e30):
        value, slopes = _compiled(name)(x * np.float32(size), w, y)
        assert np.isfinite(value) and all(np.isfinite(slope).all() for slope in slopes)


@pytest.mark.parametrize("name", ["cosface", "soft_triple", "proxy_anchor"])
def test_bfloat16(name):
    x, y, w = (jnp.asarray(a) for a in _data(name))
    x, w = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)
    value, (dx, dw) = _compiled(name)(x, w, y)
    wide, (wide_dx, wide_dw) = _compiled(name)(x.astype(jnp.float32), w.astype(jnp.float32), y)
    assert value.dtype == jnp.float32 and dx.dtype == dw.dtype == jnp.bfloat16
    np.testing.assert_allclose(value, wide, rtol=1e-6)
    assert_near(dx.astype(jnp.float32), wide_dx, 2**-8)
    assert_near(dw.astype(jnp.float32), wide_dw, 2**-8)


@each_loss
def test_order_and_length_do_not_matter(name):
    x, y, w = _data(name)
    value, (dx, _) = _compiled(name)(x, w, y)
    order = np.array([4, 2, 0, 5, 1, 3])
    moved, (moved_dx, _) = _compiled(name)(x[order], w, y[order])
    np.testing.assert_allclose(moved, value, rtol=1e-5)
    assert_near(moved_dx, dx[order], 1e-5)
    renamed = np.array([2, 0, 3, 1])
    np.testing.assert_allclose(
        _compiled(name)(x, w[np.argsort(renamed)], renamed[y])[0], value, rtol=1e-5
    )
    longer = _compiled(name)(7 * x, w, y)[0]
    assert np.isclose(longer, value, rtol=1e-5) == (name not in LENGTHS)


@each_loss
def test_labels_out_of_range(name, unchecked):
    x, y, w = _data(name)
    for bad in (4, -1):
        y[2] = bad
        with pytest.raises(ValueError, match=rf"label {bad} in row 2 .* the 4 classes"):
            getattr(losses, name)(x, y, w)
        value, (_, dw) = _compiled(name)(x, w, y)
        assert np.isnan(value) and np.isnan(dw).any()


@each_loss
def test_nan_stays_visible(name):
    x, y, w = _data(name)
    x[3, 0] = np.nan
    assert np.isnan(_compiled(name)(x, w, y)[0])
    x, y, w = _data(name)
    w[0] = np.nan
    assert np.isnan(_compiled(name)(x, w, y)[0])


@pytest.mark.parametrize("name", ["cosface", "soft_triple", "sphereface", "proxy_anchor"])
def test_one_class(name):
    x, y, w = _data(name, c=1)
    value, slopes = _compiled(name)(x, w, y * 0)
    if name == "proxy_anchor":  # all pull
        np.testing.assert_allclose(value, _proxy_anchor(x, y * 0, w), rtol=1e-5)
    else:
        assert value == 0
        assert not any(np.any(slope) for slope in slopes)


@each_loss
def test_entries_and_weights(name):
    x, y, w = _data(name)
    where = np.array([True, True, True, False, False, True])

    @jax.jit
    def both(x, y, w, where, weigh):
        fn = functools.partial(getattr(losses, name), x, y, w, where=where)
        return fn(reduce_fn=None), fn(reduce_fn=ops.weighted(weigh, ops.sum))

    by_class = name == "proxy_anchor"
    weights = np.array([1.0, 2.0, 0.5, 3.0], np.float32)
    weigh = weights if by_class else weights[y]
    entries, total = both(x, y, w, where, weigh)
    assert entries.shape == ((4,) if by_class else (6,))
    assert by_class or not np.any(entries[~where])
    np.testing.assert_allclose(total, np.sum(entries * weigh), rtol=1e-5)
    if not by_class:
        mean = _compiled(name)(x, w, y, where)[0]
        np.testing.assert_allclose(mean, entries.sum() / 4, rtol=1e-6)


@each_loss
def test_wrong_arguments(name, unchecked):
    x, y, w = _data(name)
    fn = getattr(losses, name)
    with pytest.raises(ValueError, match=r"proxies must be \[c .*d = 3"):
        fn(x, y, w[0])
    with pytest.raises(ValueError, match=r"proxies must be \[c .*d = 3"):
        fn(x, y, w[..., :2])
    with pytest.raises(ValueError, match="proxies must be floats"):
        fn(x, y, w.astype(int))
    with pytest.raises(ValueError, match=r"labels must be int \[6\]"):
        fn(x, y[:5], w)
    with pytest.raises(ValueError, match=r"labels must be int \[6\]"):
        fn(x, y.astype(np.float32), w)
    with pytest.raises(ValueError, match="where must be bool"):
        fn(x, y, w, where=np.ones(6))


def test_label_types():
    x, y, w = _data("cosface")
    expected = _compiled("cosface")(x, w, y)[0]
    for dtype in (np.uint8, np.int8, np.int16, np.uint32):
        value = _compiled("cosface")(x, w, y.astype(dtype))[0]
        np.testing.assert_allclose(value, expected, rtol=1e-6)


# --- faults of the peer, and formulas of single losses -------------------------------------------


@pytest.mark.parametrize("name", ["arcface", "subcenter_arcface"])
def test_arcface_gradient_when_parallel_to_the_proxy(name):
    """Peers go through acos, whose slope there is infinite, and return NaN."""
    w = np.eye(3)
    x = 2 * np.eye(3)[:1]
    with jax.enable_x64(True):
        proxies = w[:, None] if name in CENTERED else w
        value, (dx, dw) = _compiled(name, scale=4.0)(x, proxies, np.array([0]))
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
        assert np.all(np.diff(loss) > -1e-5)  # the other logit is 0 all along
    with pytest.raises(ValueError, match="degrees"):
        losses.arcface(x, labels, w, margin=200.0)
    with pytest.raises(ValueError, match="whole number"):
        losses.sphereface(x, labels, w, margin=1.5)


def test_margins_may_be_scheduled():
    x, y, w = _data("arcface")
    value = jax.jit(lambda m: losses.arcface(x, y, w, margin=m))(10.0)
    np.testing.assert_allclose(value, _compiled("arcface", margin=10.0)(x, w, y)[0], rtol=1e-6)


def test_a_small_loss_keeps_its_digits():
    w = np.eye(3, dtype=np.float32)
    x = w[:1] + np.float32(0.01)
    value, (dx, _) = _compiled("cosface")(x, w, np.array([0]))
    with jax.enable_x64(True):
        exact, (exact_dx, _) = _compiled("cosface")(
            x.astype(np.float64), w.astype(np.float64), np.array([0])
        )
    assert 0 < float(exact) < 1e-16  # the log of 1 + 1e-17, not of 1
    np.testing.assert_allclose(value, float(exact), rtol=1e-4)
    np.testing.assert_allclose(dx, exact_dx, rtol=1e-3)


def test_one_center_is_the_plain_loss():
    x, y, w = _data("arcface")
    expected = _compiled("arcface")(x, w, y)[0]
    several = _compiled("subcenter_arcface")
    np.testing.assert_allclose(several(x, w[:, None], y)[0], expected, rtol=1e-6)
    # The same center twice acts like one.
    twice = np.stack([w, 3 * w], axis=1)
    np.testing.assert_allclose(several(x, twice, y)[0], expected, rtol=1e-6)


# --- label smoothing ----------------------------------------------------------------------------


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
            value += sum((0.9 * (c == label) + 0.1 / 5) * _ce(list(row), c) for c in range(5))
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
        np.mean([_ce(list(r), c) for r, c in zip(z, y, strict=True)]),
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
