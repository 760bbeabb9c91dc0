"""What the devices share gives the values of one device, and one device needs less memory."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from train.pixels import RNG, Pixels, batch_of, distance, jit, refusal, scaled

from dmljax import losses, methods
from dmljax.adapt.trees import path_of
from dmljax.train import devices as placement
from dmljax.train.devices import Shardings, put
from dmljax.train.step import init_state, train_step

OPTIMIZER = optax.adam(0.01)
_ROUNDING = 1e-6  # of two steps in float32
SENT = r"= \w+\[([\d,]*)\]\S* (?:all-\w+|reduce-\w+|collective-\w+)(?:-start)?\("


class Step:
    """The train step of a method on some devices, as `loop.compiled_step` makes it."""

    def __init__(self, method, *, devices, sharded, classes, batch):
        shards = Shardings(jax.devices()[:devices])
        example = {"images": jnp.zeros((2, 8, 8, 3)), "labels": jnp.zeros(2, jnp.int32)}
        self.rows = rows = placement.class_rows(
            method,
            jax.eval_shape(method.init, jax.random.key(0), example)[0],
            classes=classes,
            shards=shards,
            sharded=sharded,
        )

        def init(key):
            params, model_state = method.init(key, example)
            return init_state(rows.padded(params), model_state, OPTIMIZER)

        self.init = init
        self.shapes = jax.eval_shape(init, jax.random.key(0))
        self.places = placement.of_state(self.shapes, shards, sharded=sharded, class_rows=rows)

        def copied(tree):
            return jax.lax.with_sharding_constraint(tree, shards.everywhere)

        step = train_step(
            method,
            OPTIMIZER,
            normalize_fn=scaled,
            seed=0,
            batch_size=batch,
            gather_fn=copied if rows.is_split else None,
            params_fn=placement.used_params_fn(shards, sharded=sharded, class_rows=rows),
        )

        def on_mesh(state, batch):
            with jax.sharding.use_abstract_mesh(shards.mesh.abstract_mesh):
                return step(state, batch)

        state = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            self.shapes,
            self.places,
        )
        count = shards.padded(batch)
        images = jax.ShapeDtypeStruct((count, 8, 8, 3), np.uint8, sharding=shards.rows)
        labels = jax.ShapeDtypeStruct((count,), np.int32, sharding=shards.rows)
        jitted = jit(on_mesh, donate_argnums=0, out_shardings=(self.places, shards.everywhere))
        self.shards, self.count = shards, count
        self.compiled = jitted.lower(state, {"images": images, "labels": labels}).compile()
        self.memory = self.compiled.memory_analysis()
        # Elements of what every collective returns.
        sizes = re.findall(SENT, self.compiled.as_text())
        self.sent = [math.prod(int(n) for n in shape.split(",") if n) for shape in sizes]

    def run(self, batch, steps):
        """State, parameters without padding, and metrics after some steps."""
        padded = {
            k: np.concatenate([x, np.zeros((self.count - len(x), *x.shape[1:]), x.dtype)])
            for k, x in batch.items()
        }
        state = jax.device_put(jit(self.init)(jax.random.key(0)), self.places)
        for _ in range(steps):
            state, metrics = self.compiled(state, put(padded, self.shards.rows))
        return state, jax.device_get((self.rows.cut(state.params), metrics))


def _share(state, shapes):
    """The share of the numbers of a tree that the first device holds."""
    held = sum(x.addressable_shards[0].data.size for x in jax.tree.leaves(state))
    return held / sum(x.size for x in jax.tree.leaves(shapes))


@pytest.fixture(scope="module")
def wide():
    """A net whose layers 8 devices can share and 3 cannot, except one."""
    return Pixels(widths=(24, 64))


@pytest.mark.parametrize("devices", [3, pytest.param(8, marks=pytest.mark.slow)])
def test_every_way_to_share_learns_the_values_of_one_device(wide, devices, without_diagnostics):
    c, b = 50, 10
    options = {"classes": c, "dim": 16, "tile": 7}
    method = methods.proxies(wide, losses.normalized_softmax, **options)
    batch = batch_of(b) | {"labels": RNG.integers(0, c, b).astype(np.int32)}
    common = {"classes": c, "batch": b}
    _, (params, metrics) = Step(method, devices=1, sharded=None, **common).run(batch, 2)
    held, peak = {}, {}
    for sharded in (None, "classes", "state", "all"):
        step = Step(method, devices=devices, sharded=sharded, **common)
        state, (params_on_many, metrics_on_many) = step.run(batch, 2)
        assert distance(params_on_many, params) < _ROUNDING
        np.testing.assert_allclose(metrics_on_many["loss"], metrics["loss"], rtol=1e-6)
        held[sharded] = [_share(x, x) for x in (state.params, state.opt_state)]
        peak[sharded] = step.memory.argument_size_in_bytes
        if sharded is not None:
            assert not np.asarray(state.params["proxies"])[c:].any()
    assert held[None] == [1, 1] and held["classes"][0] < 1
    assert held["state"][0] == held["classes"][0] and held["state"][1] < 0.9 * held["classes"][1]
    assert held["all"][0] < held["state"][0] and held["all"][1] == held["state"][1]
    assert peak[None] > peak["classes"] > peak["state"] > peak["all"]


def test_a_device_computes_its_share_of_a_batch_alone(wide, without_diagnostics):
    method = methods.pairs(wide, losses.contrastive, classes=4, dim=8)
    options = {"sharded": None, "classes": 4, "batch": 64}
    flops = [
        Step(method, devices=n, **options).compiled.cost_analysis()["flops"] for n in (1, 3, 8)
    ]
    for share, work in zip((22 / 64, 1 / 8), flops[1:], strict=True):
        assert work < 1.25 * share * flops[0]


def test_an_array_is_split_on_its_longest_axis_that_divides():
    shards = Shardings(jax.devices()[:8])
    shapes = {"a": (8, 24, 16), "b": (3, 3, 8), "c": (8, 8), "d": (7, 9), "e": (), "f": (0, 8)}
    specs = {k: placement._split(shape, shards).spec for k, shape in shapes.items()}
    P = jax.sharding.PartitionSpec
    assert specs["a"] == P(None, "data") and specs["b"] == P(None, None, "data")
    assert specs["c"] == P("data") and specs["d"] == specs["e"] == specs["f"] == P()


def test_only_rows_of_classes_are_split_by_classes():
    """Of a method with a split loss. The column of a factored moment has the same name."""
    shards, spec = Shardings(jax.devices()[:3]), jax.ShapeDtypeStruct
    shapes = {"kernel": (3, 7), "bias": (7,), "other": (7,)}
    params = {"head": {name: spec(shape, np.float32) for name, shape in shapes.items()}}
    method = methods.proxies(Pixels(), losses.arcface, classes=7)
    method = method._replace(per_class=("head/kernel", "head/bias"))
    options = {"classes": 7, "shards": shards, "sharded": "state"}
    rows = placement.class_rows(method, params, **options)
    assert rows == placement.ClassRows(frozenset({"head/bias"}), 7, 9, is_split=True)
    rows_of_none = placement.class_rows(method._replace(split_loss=None), params, **options)
    assert rows_of_none == placement.ClassRows(frozenset(), 7, 7, is_split=False)
    at_rest = {"head": params["head"] | {"bias": spec((9,), np.float32)}}
    for sharded, gathered in (("state", 0), ("all", 2)):  # no device gathers rows of classes
        used_fn = placement.used_params_fn(shards, sharded=sharded, class_rows=rows)
        assert str(jax.make_jaxpr(used_fn)(at_rest)).count("sharding_constraint") == gathered
        assert jax.eval_shape(used_fn, at_rest) == params
    moments = {"row": (9,), "column": (1,)}
    state = {"opt_state": {k: {"head": {"bias": spec(x, np.float32)}} for k, x in moments.items()}}
    places = placement.of_state(state, shards, sharded="classes", class_rows=rows)["opt_state"]
    assert places["row"]["head"]["bias"] == shards.rows
    assert places["column"]["head"]["bias"] == shards.everywhere


def test_devices_exchange_embeddings_and_never_weights_of_classes(without_diagnostics):
    c, d, b = 500, 12, 16
    for name, options in (
        ("arcface", {"tile": 40}),
        ("proxy_anchor", {"tile": 40}),
        ("subcenter_arcface", {"tile": 40, "centers": 2}),
        ("cosface", {"sample": 0.2}),
        ("normalized_softmax", {}),
    ):
        method = methods.proxies(Pixels(), getattr(losses, name), classes=c, dim=d, **options)
        step = Step(method, devices=8, sharded="classes", classes=c, batch=b)
        assert step.rows.rows == 504 and step.places.params["proxies"] == step.shards.rows
        of_proxies = [
            place == step.shards.rows
            for keys, place in jax.tree_util.tree_leaves_with_path(step.places)
            if path_of(keys).endswith("proxies")
        ]
        assert of_proxies == [True] * 3  # they and both moments
        assert step.sent and max(step.sent) < 63 * d, (name, step.sent)


def test_100_000_classes_need_the_memory_of_a_tile(without_diagnostics):
    """8 devices and 512 rows: all logits of a device take 26 MB, its weights 1.6 MB."""
    c, d, b = 100_000, 32, 512
    shard = 4 * c * d // 8
    temporaries = {}
    for name, options in {
        "plain": {},
        "tiled": {"tile": 1000},
        "sampled": {"tile": 1000, "sample": 0.1},
    }.items():
        method = methods.proxies(Pixels(), losses.arcface, classes=c, dim=d, **options)
        step = Step(method, devices=8, sharded="classes", classes=c, batch=b)
        assert step.memory.argument_size_in_bytes < 3.1 * shard
        temporaries[name] = step.memory.temp_size_in_bytes
    logits = 4 * b * c // 8
    assert temporaries["plain"] > 2 * logits
    # The gradient of the shard, and some arrays of the size of a tile's logits.
    for name in ("tiled", "sampled"):
        assert temporaries[name] < 2 * shard + 4 * (4 * b * 1000), temporaries


@pytest.mark.parametrize("name, devices", [("contrastive", 3), ("multi_similarity", 8)])
def test_devices_share_a_memory_and_never_send_it(name, devices, without_diagnostics):
    """The rows of earlier batches, with the values of one device."""
    size, d = 1023 if devices == 3 else 1024, 16  # a memory that the devices divide
    method = methods.pairs(Pixels(), getattr(losses, name), classes=5, dim=d, memory=size)
    batch, common = batch_of(24), {"classes": 5, "batch": 24}
    _, (params, metrics) = Step(method, devices=1, sharded=None, **common).run(batch, 2)
    step = Step(method, devices=devices, sharded="state", **common)
    assert step.sent and max(step.sent) < size * d / 8
    state, (params_on_many, metrics_on_many) = step.run(batch, 2)
    assert _share(state.model_state["memory"], state.model_state["memory"]) < 1.04 / devices
    assert distance(params_on_many, params) < _ROUNDING
    assert metrics["memory_loss"] > 0
    np.testing.assert_allclose(metrics_on_many["memory_loss"], metrics["memory_loss"], rtol=1e-5)


NET = {"name": "convnet", "widths": [4, 8], "strides": [2, 2]}
PROXIES = {"method": {"name": "proxies", "dim": 4, "tile": 3}, "loss": {"name": "proxy_anchor"}}


def test_what_cannot_be_shared_is_refused_in_one_line(tmp_path):
    many = {"devices": 8, "sharded": "classes"}
    message = refusal(tmp_path, **PROXIES, runtime=many)
    assert "8 devices cannot share 4 classes" in message and "devices=4" in message
    message = refusal(tmp_path, runtime={"sharded": "classes"})  # pairs
    assert "which this method has not" in message
    message = refusal(tmp_path, runtime={"sharded": "stage"})
    assert "'all' or None, got 'stage'" in message
    for field, value, words in (
        ("sample", 0.0, "above 0 and at most 1"),
        ("sample", 1.5, "above 0 and at most 1"),
        ("tile", 0, "classes from 1 on"),
        ("unbiased", True, "set it, too"),
    ):
        method = {"name": "proxies", "dim": 4, field: value}
        message = refusal(tmp_path, **PROXIES | {"method": method})
        assert f"method.{field}" in message and words in message
    loss = {"name": "config.outside:my_loss"}
    message = refusal(tmp_path, **PROXIES | {"loss": loss})
    assert "method.tile: this loss needs all classes at once" in message
