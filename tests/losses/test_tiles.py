"""Losses in tiles: the plain form is the referee, on one and on several devices."""

import functools
import inspect
import re

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from test_contract import SECOND, TABLE, Result, run_all, value_and_gradients
from test_contract import B as CONTRACT_B
from test_contract import inputs as contract_inputs

from dmljax import losses, miners, ops

VIEWS = ("clip", "siglip")
PAIRS = ("circle", "contrastive", "multi_similarity", "ntxent", "supcon")
RANKED = ("recall_at_k", "smooth_ap")


B, N, D = 13, 16, 4
# In place of defaults that would not be missed.
NOT_NEUTRAL = {
    "contrastive": {"pos_margin": 0.1, "power": 2.0, "pos_weight": 0.5, "neg_weight": 3.0}
    | {"distance_fn": ops.euclidean, "neg_margin": 3.0}
}


def mesh_of(devices):
    return Mesh(np.array(jax.devices()[:devices]), ("data",))


def inputs(seed=0, dtype=np.float64):
    """Classes of one to six rows, rows of NaN that do not count, and references."""
    rng = np.random.default_rng(seed)
    where = np.arange(B) % 6 != 1
    x = np.where(where[:, None], rng.normal(size=(B, D)), np.nan).astype(dtype)
    labels = rng.permutation(np.repeat([0, 1, 2, 3], (1, 2, 4, 6)))
    y, reference_labels = rng.normal(size=(N, D)).astype(dtype), np.arange(N) % 4
    return x, labels, y, reference_labels, where


def compiled(name, tile=None, devices=1):
    """Values and gradients of a loss: within a batch, and with references."""
    loss_fn = functools.partial(getattr(losses, name), **NOT_NEUTRAL.get(name, {}), **tiles(tile))

    def values(x, y, labels, reference_labels, where):
        if name in VIEWS:
            return loss_fn(x, y[:B], where=where)
        references = {"references": y, "reference_labels": reference_labels}
        within, against = (loss_fn(x, labels, where=where, **r) for r in ({}, references))
        return within + 2 * against

    return on_mesh(jax.value_and_grad(values, argnums=(0, 1)), devices)


def tiles(tile):
    return {} if tile is None else {"tile": tile}


def on_mesh(function, devices, **jit_options):
    mesh = mesh_of(devices)

    def call(*args):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return function(*args)

    return jax.jit(call, **jit_options)


@functools.cache
def plain(name):
    x, labels, y, reference_labels, where = inputs()
    with jax.enable_x64(True):
        return compiled(name)(x, y, labels, reference_labels, where)


def check(actual, expected, tolerance=1e-11):
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.shape == e.shape and a.dtype == e.dtype
        np.testing.assert_allclose(a, e, rtol=tolerance, atol=tolerance * np.abs(e).max())


ON_THREE = ("clip", "ntxent", "smooth_ap")
SOME = [
    pytest.param(
        name,
        devices,
        marks=[] if devices == (3 if name in ON_THREE else 1) else [pytest.mark.slow],
    )
    for name in VIEWS + PAIRS + RANKED
    for devices in (1, 3, 8)
]


@pytest.mark.parametrize(("name", "devices"), SOME)
def test_tiles_on_devices_give_the_value_and_gradient_of_the_loss(name, devices):
    """Three devices do not divide the rows."""
    x, labels, y, reference_labels, where = inputs()
    with jax.enable_x64(True):
        everywhere = NamedSharding(mesh_of(devices), PartitionSpec())
        arguments = jax.device_put((x, y, labels, reference_labels, where), everywhere)
        value, gradients = compiled(name, 3, devices)(*arguments)
    assert value.dtype == np.float64 and all(np.abs(g).max() > 1e-4 for g in gradients)
    assert not gradients[0][~where].any()
    check((value, gradients), plain(name))


def test_any_tile_gives_the_same(unchecked):
    x, labels, *_, where = inputs()
    with jax.enable_x64(True):
        expected = losses.supcon(x, labels, where=where)
        for tile in (1, 12, 100):
            function = jax.jit(functools.partial(losses.supcon, tile=tile))
            np.testing.assert_allclose(function(x, labels, where=where), expected, rtol=1e-12)


REDUCTIONS = {
    "sum": ops.sum,
    "mean": ops.mean,
    "active": ops.mean_of_active,
    "threshold": ops.threshold(low=0.1, high=5.0),
    "weighted": ops.weighted(np.linspace(0.5, 2, B)),
    "entries": None,
}


@pytest.mark.parametrize("name", ["multi_similarity", "ntxent"])
def test_reductions_are_those_of_the_loss(name, unchecked):
    x, labels, *_, where = inputs()
    loss_fn = functools.partial(getattr(losses, name), x, labels, where=where)
    refused = ("weighted", "entries") if name == "ntxent" else ()

    @jax.jit
    def both_ways():
        return [
            [loss_fn(reduce_fn=fn, **tiles(tile)) for tile in (4, None)]
            for reduction, fn in REDUCTIONS.items()
            if reduction not in refused
        ]

    with jax.enable_x64(True):
        for in_tiles, at_once in both_ways():
            np.testing.assert_allclose(in_tiles, at_once, rtol=1e-11)
    messages = ("13 weights, but this loss needs", "^reduce_fn.*leave out tile")
    for reduction, message in zip(refused, messages, strict=False):
        with jax.enable_x64(True), pytest.raises(ValueError, match=message):
            loss_fn(reduce_fn=REDUCTIONS[reduction], tile=4)


def test_multi_hot_labels(unchecked):
    x, *_, where = inputs()
    labels = np.random.default_rng(1).random((B, 3)) < 0.4
    labels[~labels.any(axis=1), 0] = True
    labels[2] = True  # which has no negative
    with jax.enable_x64(True):
        actual = jax.jit(functools.partial(losses.supcon, tile=5))(x, labels, where=where)
        np.testing.assert_allclose(actual, losses.supcon(x, labels, where=where), rtol=1e-11)
    for name in RANKED:
        with pytest.raises(ValueError, match="one label for each row"):
            getattr(losses, name)(x, labels, where=where, tile=5)


@pytest.mark.parametrize("name", VIEWS + PAIRS + RANKED)
def test_float32_batches_without_pairs_and_rows_of_nan(name):
    """The contract's results are the referee."""
    x, labels, extra = contract_inputs()
    cases = []
    for classes in (labels, np.zeros(CONTRACT_B, int), np.arange(CONTRACT_B)):
        for rows in (x, np.zeros_like(x), np.repeat(x[:1], CONTRACT_B, axis=0)):
            cases.append((rows, classes, extra, np.ones(CONTRACT_B, bool)))
    cases.append((x, labels[::-1], extra, np.arange(CONTRACT_B) == 3))
    cases.append((x, labels, extra, np.zeros(CONTRACT_B, bool)))
    broken = np.where(np.arange(CONTRACT_B * x.shape[1]).reshape(x.shape) == 13, np.nan, x)
    cases.append((broken, labels, extra, np.ones(CONTRACT_B, bool)))
    second = extra[SECOND["views"]] if TABLE[name][0] == "views" else np.zeros(0, np.float32)
    xs, classes, wheres = (np.stack([case[i] for case in cases]) for i in (0, 1, 3))
    in_tiles = jax.jit(jax.vmap(value_and_gradients(name, tile=4), in_axes=(0, None, 0, 0)))
    value, gradients = in_tiles(xs, second, classes, wheres)
    expected = run_all(name, cases)
    np.testing.assert_allclose(value, [one.value for one in expected], rtol=2e-5, atol=1e-6)
    assert np.isnan(value[-1]) and np.isfinite(gradients[0][:-1]).all()
    assert Result(value[-2], *(gradient[-2] for gradient in gradients)).is_zero
    check(gradients[0][0], expected[0].gradient, 1e-4)


def test_scalars_get_their_gradients():
    x, labels, y, reference_labels, where = inputs()
    x = np.where(where[:, None], x, 0)

    def gradient(devices, **options):
        def loss(temperature, y):
            options_of = {"references": y, "reference_labels": reference_labels, **options}
            return losses.supcon(x, labels, temperature=temperature, **options_of)

        function, everywhere = (
            on_mesh(jax.grad(loss), devices),
            NamedSharding(mesh_of(devices), PartitionSpec()),
        )
        return function(*jax.device_put((0.3, y), everywhere))

    with jax.enable_x64(True):
        expected, actual = gradient(1), gradient(3, tile=4)
        assert abs(expected) > 0.01
        check(actual, expected)


def test_exactly_these_losses_take_a_tile():
    takes_tile = {
        n for n in losses.__all__ if "tile" in inspect.signature(getattr(losses, n)).parameters
    }
    assert takes_tile == {*VIEWS, *PAIRS, *RANKED, "snr_contrastive"}
    x, labels, *_ = inputs()
    with pytest.raises(TypeError, match="unexpected keyword argument 'tile'"):
        losses.triplet(x, labels, tile=4)


def test_an_explicit_mesh_is_refused(unchecked):
    x, labels, *_ = inputs()
    mesh = jax.make_mesh((8,), ("a",), axis_types=(jax.sharding.AxisType.Explicit,))

    @jax.jit
    def loss(x):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return losses.supcon(x, labels, tile=4)

    with pytest.raises(ValueError, match=r"axes \('a',\): take jax.sharding.Mesh"):
        loss(x)


def test_wrong_tiles_miners_and_masks_of_pairs_are_refused(unchecked):
    x, labels, *_ = inputs()
    for keywords, second, message in (
        ({"tile": 0}, labels, "^tile must be a positive integer or None, got 0$"),
        ({"tile": 2.5}, labels, "tile must be .*, got 2.5"),
        ({"mine_fn": miners.batch_hard}, labels, "^a miner needs all pairs at once, .*tile=4"),
        ({}, ops.pairs(labels), "^ops.Pairs as labels, .*leave out one of the two"),
        ({"where": np.ones(3, bool)}, labels, "where must be bool"),
        ({"references": x}, labels, "references need reference_labels"),
    ):
        with pytest.raises(ValueError, match=message):
            losses.supcon(x, second, **{"tile": 4, **keywords})
    in_tiles = functools.partial(losses.supcon, tile=4)
    in_memory = losses.cross_batch_memory(in_tiles, size=16)
    with pytest.raises(ValueError, match="such as of a memory"):
        in_memory.loss(in_memory.init(D), np.nan_to_num(x).astype(np.float32), labels)


def large(name, b, devices=1, *, tile=1024):
    """The compiled value and gradient for `b` rows of 128 dimensions, divided over the devices."""
    loss_fn = functools.partial(getattr(losses, name), **tiles(tile))
    x = jax.ShapeDtypeStruct((b, 128), np.float32)
    second = x if name in VIEWS else jax.ShapeDtypeStruct((b,), np.int32)
    argnums = (0, 1) if name in VIEWS else 0
    rows = NamedSharding(mesh_of(devices), PartitionSpec("data"))
    function = on_mesh(jax.value_and_grad(loss_fn, argnums), devices, in_shardings=rows)
    return function.lower(x, second).compile()


def test_65536_rows_take_less_than_1_gb():
    """All pairs of 65,536 rows are 17 GB."""
    assert large("smooth_ap", 65536).memory_analysis().temp_size_in_bytes < 1e9


def collectives(program):
    return set(re.findall(r" (all-gather|collective-permute|all-to-all)(?:-start)?\(", program))


def test_references_travel_around_the_ring():
    """No device gathers the embeddings of all, which are 34 MB and several times that in use."""
    program = large("clip", 65536, devices=8)
    assert collectives(program.as_text()) == {"collective-permute"}
    assert program.memory_analysis().temp_size_in_bytes < 1e8
