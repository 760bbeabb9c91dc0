"""Runs whose loss is computed in tiles."""

import functools

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
from dmljax.train.step import train_step


def test_a_step_in_tiles_is_that_of_the_whole_matrix(without_diagnostics):
    """Also with the net in chunks, and on three devices, which do not divide the batch."""
    optimizer = optax.trace(0.0)  # whose state is the gradient
    batch = batch_of(16)
    results = []
    for tile, chunk, devices in ((None, None, 1), (5, None, 1), (5, 7, 3)):
        loss_fn = functools.partial(losses.supcon, tile=tile)
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
        run = build(tiny(tmp_path, loss=loss | fields, runtime={"devices": 3}))
        params, model_state = run.method.init(jax.random.key(0), _batch())

        def value(params, run=run, model_state=model_state):
            with jax.sharding.use_abstract_mesh(run.shards.mesh.abstract_mesh):  # as in a step
                key = jax.random.key(0)
                return run.method.loss(params, model_state, _batch(), key=key, step=2)[0]

        values.append(jax.jit(value)(jax.device_put(params, run.shards.everywhere)))
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
        ({"loss": {"name": "supcon", "tile": 0}}, "loss.tile=0 must be a positive integer"),
        ({"loss": {"name": "supcon", "tile": 4}, "miner": "batch_hard"}, "leave out the tile, or"),
    ],
)
def test_what_cannot_be_tiled_is_refused_before_anything_is_written(tmp_path, fields, message):
    assert message in refusal(tmp_path, **fields)
