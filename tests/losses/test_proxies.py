"""Proxy losses against plain loops and pytorch-metric-learning (the peer)."""

import functools
import inspect
import pathlib

import jax
import numpy as np
import pytest
from naive_proxies import CENTERED, NAIVE, NAMES, OPTIONS, compiled, each_loss
from numeric import assert_near, gradient
from system import load_module

from dmljax import losses

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "proxies.npz"


def test_every_loss_has_a_referee():
    assert set(NAMES) | {"label_smoothed_cross_entropy"} == set(losses.proxies.__all__)


@each_loss
@pytest.mark.parametrize("has_options", [False, True])
def test_value_and_gradients_are_those_of_a_loop(name, has_options):
    options = OPTIONS[name] if has_options else {}
    parameters = inspect.signature(getattr(losses, name)).parameters.values()
    keywords = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert keywords == {*OPTIONS[name], "where", "reduce_fn", "tiles"}
    module = _golden_module()
    w = module.proxies()[name in CENTERED]
    x, y = module.of_proxies()["balanced"]
    with jax.enable_x64(True):
        value, (dx, dw) = compiled(name, **options)(x, w, y)
        assert value.dtype == dx.dtype == dw.dtype == np.float64
    loop = functools.partial(NAIVE[name], **options)
    np.testing.assert_allclose(value, loop(x, y, w), rtol=1e-10)
    assert_near(dx, gradient(lambda x: loop(x, y, w), x), 1e-6)
    assert_near(dw, gradient(lambda w: loop(x, y, w), w), 1e-6)


def _golden_module():
    return load_module(GOLDEN.with_name("cases.py"))


with np.load(GOLDEN) as _file:
    _golden = dict(_file)


_settings_of_peer = sorted(
    {key.split("/")[0] for key in _golden if key.split(":")[0].split("/")[0] in NAMES}
)
assert {setting.partition(":")[0] for setting in _settings_of_peer} == set(NAMES)


@pytest.mark.parametrize("setting", _settings_of_peer)
def test_values_and_gradients_are_those_of_pytorch_metric_learning(setting):
    name, _, settings = setting.partition(":")
    # The margin of sphereface must be an int.
    pairs = [pair.split("=") for pair in settings.split(",") if pair]
    keywords = {k: float(v) if "." in v else int(v) for k, v in pairs}
    module = _golden_module()
    w = module.proxies()[name in CENTERED]
    cases = module.of_proxies()
    assert len(cases) == 7
    for case, (x, y) in cases.items():
        # Padded to one shape with rows that do not count, because compiling takes longest.
        padding = 12 - len(x)
        padded, where = np.pad(x, [(0, padding), (0, 0)]), np.arange(12) < len(x)
        with jax.enable_x64(True):
            value, (dx, dw) = compiled(name, **keywords)(padded, w, np.pad(y, (0, padding)), where)
        np.testing.assert_allclose(value, _golden[f"{setting}/{case}/value"], rtol=1e-6, atol=1e-9)
        assert_near(dx[: len(x)], _golden[f"{setting}/{case}/0"], 1e-5)
        assert_near(dw, _golden[f"{setting}/{case}/1"], 1e-5)
