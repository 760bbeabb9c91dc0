"""Runs whose loss is computed in tiles."""

import jax
import numpy as np
import pytest
from system import tiny
from train.pixels import (
    refusal,
)

from dmljax.config.build import build


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
