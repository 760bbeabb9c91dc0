"""Sharded proxies are trained as on one device."""

import functools
import math
import re

import jax
import numpy as np
from train.pixels import RNG, Pixels, batch_of, distance, first_state, jit, refusal, scaled

from dmljax import losses, methods
from dmljax.adapt import path_of
from dmljax.train import loop, optimizers, schedules
from dmljax.train.devices import Shardings, of_state, put
from dmljax.train.step import train_step


def _shards(tree, name):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    arrays = [a for p, a in leaves if path_of(p).endswith(name)]
    return [[s.data.shape for s in a.addressable_shards] for a in arrays]


def test_sharded_proxies_learn_the_values_of_one_device(without_diagnostics):
    c, d, b = 500, 5, 16
    method = methods.proxies(Pixels(), losses.normalized_softmax, classes=c, dim=d, multiple=8)
    optimizer = optimizers.build(
        optimizers.adam(), rate=0.1, schedule=schedules.constant(total=2), average=0.5
    )
    first = first_state(method, optimizer)
    batch = batch_of(b) | {"labels": RNG.integers(0, c, b).astype(np.int32)}
    results = []
    for devices in (1, 8):
        shards = Shardings(jax.devices()[:devices])
        places = of_state(first, shards, patterns=["^proxies"])
        step = train_step(
            method,
            optimizer,
            normalize_fn=scaled,
            seed=0,
            gather_fn=functools.partial(loop._copy, everywhere=shards.everywhere),
        )
        step = jit(step, out_shardings=(places, shards.everywhere))
        state, rows = jax.device_put(first, places), put(batch, shards.rows)
        compiled = step.lower(state, rows).compile()
        for _ in range(2):
            state, metrics = compiled(state, rows)
        results.append(jax.device_get((state.params, metrics)))
    # The proxies, both moments, the average: 63 of 504 rows for each device.
    assert _shards(state, "proxies") == [[(63, d)] * 8] * 4
    assert _shards(state.params["net"], "kernel")[0] == [(3, 6)] * 8
    (params, metrics), (params_on_many, metrics_on_many) = results
    assert not params["proxies"][c:].any() and params["proxies"][:c].all()
    assert distance(params_on_many, params) < 1e-5
    np.testing.assert_allclose(metrics_on_many["loss"], metrics["loss"], rtol=1e-6)
    # Devices exchange embeddings, and neither proxies nor a row of logits for each image.
    sent = re.findall(r"= \w+\[([\d,]*)\]\S* (?:all-\w+|collective-\w+)\(", compiled.as_text())
    sizes = [math.prod(int(n) for n in shape.split(",") if n) for shape in sent]
    assert sizes and max(sizes) < 63 * d


def test_shards_are_refused_in_one_line(tmp_path, monkeypatch):
    proxies = {"name": "proxies", "dim": 4}
    loss = {"name": "proxy_anchor"}
    many = {"devices": 8, "sharded": ["^proxies"]}
    assert "multiple=8" in refusal(tmp_path, method=proxies, loss=loss, runtime=many)
    many["sharded"] = ["^proxy"]
    refused = refusal(tmp_path, method=proxies, loss=loss, runtime=many)
    assert "'^proxy'" in refused and "head, net, proxies" in refused
    dvml = {"name": "dvml", "dim": 4, "samples": 2}
    many["sharded"] = ["^net/conv1/conv/kernel"]
    assert "split loss" in refusal(tmp_path, method=dvml, runtime=many | {"devices": 1})
