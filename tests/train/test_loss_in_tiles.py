"""Runs whose loss is computed in tiles."""

import jax
import numpy as np
import optax
import pytest
from system import tiny
from train.pixels import (
    EXACT,
    C,
    Pixels,
    as_float64,
    batch_of,
    distance,
    first_state,
    refusal,
    run_on,
    scaled,
)

from dmljax import losses, methods
from dmljax.config.build import build
from dmljax.train.devices import Shardings
from dmljax.train.step import train_step


def test_a_step_in_tiles_is_that_of_the_whole_matrix(without_diagnostics):
    """Also with the net in chunks, and on three devices, which do not divide the batch."""
    optimizer = optax.trace(0.0)  # whose state is the gradient
    batch = batch_of(16)
    results = []
    for tile, chunk, devices in ((None, None, 1), (5, None, 1), (5, 7, 3)):
        loss_fn = losses.supcon
        if tile:
            mesh = Shardings(jax.devices()[:devices]).mesh
            loss_fn = losses.tiled(loss_fn, tile=tile, mesh=mesh)
        method = methods.pairs(Pixels(), loss_fn, classes=C, dim=5, prefixes=(2,))
        step = train_step(method, optimizer, normalize_fn=scaled, seed=0, chunk=chunk)
        state = as_float64(first_state(method, optimizer))
        with jax.enable_x64(True):
            results.append(run_on(devices, step, state, batch, chunk=chunk))
    (expected, metrics), *others = results
    assert metrics["gradient_norm"] > 1e-3
    for actual, tile_metrics in others:
        assert distance(actual.opt_state, expected.opt_state) < EXACT
        np.testing.assert_allclose(tile_metrics["loss"], metrics["loss"], rtol=EXACT)


def test_a_config_computes_its_loss_in_tiles_on_its_devices(tmp_path):
    loss = {
        "name": "contrastive",
        "pos_margin": {"name": "ramp", "first": 0.0, "last": 0.2, "at": [0, 4]},
    }
    values, programs = [], []
    for fields in ({}, {"tile": 3}):
        run = build(tiny(tmp_path, loss=loss, runtime={"devices": 3}, **fields))
        params, model_state = run.method.init(jax.random.key(0), _batch())

        def value(params, run=run, model_state=model_state):
            return run.method.loss(params, model_state, _batch(), key=jax.random.key(0), step=2)[0]

        values.append(value(params))
        programs.append(str(jax.make_jaxpr(value)(params)))
    np.testing.assert_allclose(values[1], values[0], rtol=1e-6)
    assert ["ppermute" in program for program in programs] == [False, True]


def _batch():
    rng = np.random.default_rng(0)
    images = rng.normal(size=(8, 8, 8, 3)).astype(np.float32)
    return {"images": images, "labels": np.arange(8) // 2}


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"tile": 0}, "tile must be 1 or more"),
        ({"tile": 4}, "triplet does not exist in tiles: take one of circle, "),
        ({"tile": 4, "loss": "supcon", "miner": "batch_hard"}, "tile=4 and miner={"),
        ({"tile": 4, "loss": {"name": "supcon", "mine_fn": "batch_hard"}}, "tile=4 and loss.mine"),
        (
            {"tile": 4, "loss": "supcon", "method": {"name": "pairs", "dim": 4, "memory": 16}},
            "tile=4 and method.memory=16: tiles know the pairs by their labels alone. Leave out",
        ),
        ({"tile": 4, "loss": {"name": "supcon", "reduce_fn": None}}, "loss.reduce_fn=None keeps"),
        ({"tile": 4, "loss": "nca"}, "nca does not exist in tiles: take one of circle"),
        (
            {"tile": 4, "loss": "proxy_anchor", "method": "proxies"},
            "tile=4 divides the pairs of a batch. For losses against proxies, --config.method.tile",
        ),
    ],
)
def test_what_cannot_be_tiled_is_refused_before_anything_is_written(tmp_path, fields, message):
    assert message in refusal(tmp_path, **fields)
