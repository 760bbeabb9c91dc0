"""Losses against proxies in tiles of classes, and on classes that are drawn (`ops.ClassTiles`)."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from train.pixels import EXACT, distance, jit

from dmljax import losses, ops
from dmljax.methods import proxies as method_of
from dmljax.nets import convnet
from dmljax.ops import fold
from dmljax.ops.classes import class_rows
from dmljax.train.compilation import multiply_adds
from dmljax.train.devices import Shardings

RNG = np.random.default_rng(0)
C, D, B = 29, 6, 10
X, LABELS, WHERE = RNG.normal(size=(B, D)), RNG.integers(0, C, B), np.arange(B) != 3
PROXIES = {2: RNG.normal(size=(C, D)), 3: RNG.normal(size=(C, 2, D))}
CENTERED = ("soft_triple", "subcenter_arcface")
TILED = sorted(set(losses.proxies.__all__) - {"label_smoothed_cross_entropy"})
ALL = functools.partial(ops.ClassTiles, share=0.9)  # draws one of one


def _on(devices, name, tiles, **options):
    """Value and both gradients on some devices, which share the proxies."""
    mesh = Shardings(jax.devices()[:devices]).mesh
    w = PROXIES[3 if name in CENTERED else 2]

    def loss(x, w, keywords):
        options_of = {**options, **({} if tiles is None else {"tiles": tiles})}
        return getattr(losses, name)(x, LABELS, w, where=WHERE, **options_of, **keywords)

    def value_and_gradients(x, w, keywords):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return jax.value_and_grad(loss, argnums=(0, 1))(x, w, keywords)

    # A number that may be scheduled: traced, as in the train step.
    scale = {"arcface": "scale", "proxy_anchor": "alpha", "soft_triple": "gamma"}.get(name)
    keywords = {} if scale is None else {scale: np.float64(0.2 if scale == "gamma" else 20.0)}
    everywhere = NamedSharding(mesh, PartitionSpec())
    with jax.enable_x64(True):
        return jax.device_get(
            jit(value_and_gradients)(*jax.device_put((X, w, keywords), everywhere))
        )


@functools.cache
def _plain(name):
    return _on(1, name, None)


QUICK = {("arcface", 1), ("cosface", 3), ("proxy_anchor", 8), ("subcenter_arcface", 8)}


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        pair if pair in QUICK else pytest.param(*pair, marks=pytest.mark.slow)
        for pair in itertools.product(TILED, (1, 3, 8))
    ],
)
def test_a_loss_in_tiles_is_the_loss(name, devices):
    """29 classes are 29, 10 or 4 rows of a device, and the tiles of 4 are not all full."""
    value, gradients = _plain(name)
    tiled, tiled_gradients = _on(devices, name, ops.ClassTiles(4))
    np.testing.assert_allclose(tiled, value, rtol=EXACT)
    assert distance(tiled_gradients[0], gradients[0]) < EXACT
    assert distance(tiled_gradients[1], gradients[1]) < EXACT


@pytest.mark.parametrize("devices", [1, 3])
def test_a_row_without_another_class_costs_nothing(devices, monkeypatch):
    """A small share may draw no other class."""
    monkeypatch.setitem(PROXIES, 2, PROXIES[2][:1])
    monkeypatch.setitem(globals(), "LABELS", np.zeros(B, int))
    value, gradients = _on(devices, "cosface", ops.ClassTiles(4))
    assert value == 0 and not any(gradient.any() for gradient in gradients)


def test_sums_over_devices_neither_overflow_nor_vanish():
    for logs in ([100.0, 101.0, -np.inf], [-300.0, -301.0, -302.0], [-np.inf] * 3):
        one = jnp.ones((1, 1))
        term = fold.LogSumExp(one, one > 0)

        def of_device(peak, term=term):
            state = peak[None], jnp.where(peak > -jnp.inf, 1.0, 0.0)[None]
            return term.result(term.over_devices(state, "devices"))[0]

        actual = jax.vmap(of_device, axis_name="devices")(np.float32(logs))
        np.testing.assert_allclose(actual, np.full(3, np.logaddexp.reduce(logs)), rtol=1e-6)


@pytest.mark.parametrize("name", ["cosface", "proxy_anchor"])
def test_a_draw_of_every_class_is_the_loss(name):
    tiles = ALL(4, key=jax.random.key(0), unbiased=True)
    value, gradients = _plain(name)
    drawn, drawn_gradients = _on(3, name, tiles)
    np.testing.assert_allclose(drawn, value, rtol=EXACT)
    assert distance(drawn_gradients, gradients) < EXACT


SAMPLED = ("arcface", "cosface", "normalized_softmax", "proxy_anchor", "subcenter_arcface")


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        pair if pair in QUICK else pytest.param(*pair, marks=pytest.mark.slow)
        for pair in itertools.product(SAMPLED, (3, 8))
    ],
)
@pytest.mark.parametrize("unbiased", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_devices_compute_the_loss_of_the_same_draw(name, devices, unbiased):
    tiles = ops.ClassTiles(4, 0.1, jax.random.key(1), unbiased)
    (value, gradients), (many, many_gradients) = (_on(n, name, tiles) for n in (1, devices))
    assert 1 < np.any(gradients[1].reshape(C, -1), axis=1).sum() < C - 10
    np.testing.assert_allclose(many, value, rtol=EXACT)
    assert distance(many_gradients, gradients) < EXACT


@functools.cache
def _counts_fn(devices, unbiased):
    """A function of a key: how often each class counts in a draw of one of three, about 0.36."""
    labels = jnp.asarray([2, 2, 28, -1, 11])
    mesh = Shardings(jax.devices()[:devices]).mesh

    def counts(key):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            tiles = ops.ClassTiles(4, 0.36, key, unbiased)
            rows, _ = class_rows(jnp.zeros((C, 1)), labels, tiles)
        weights = rows.extra if unbiased else 1
        return jnp.zeros(C).at[rows.labels].add(rows.where * weights, mode="drop")

    return jit(counts)


def _counts(devices, key, *, unbiased):
    everywhere = Shardings(jax.devices()[:devices]).everywhere
    return np.asarray(_counts_fn(devices, unbiased)(jax.device_put(key, everywhere)))


def test_the_classes_of_the_batch_and_one_of_three_others_are_drawn():
    keys = [jax.random.key(i) for i in range(60)]
    counts = np.stack([_counts(1, key, unbiased=False) for key in keys])
    batch = np.isin(np.arange(C), [2, 28, 11])
    assert (counts[:, batch] == 1).all() and set(np.unique(counts)) == {0, 1}
    threes = np.pad(np.where(batch, 0, counts), [(0, 0), (0, 1)]).reshape(60, 10, 3)
    assert threes.sum(2).max() == 1 and len({tuple(row) for row in counts}) > 50
    # Of 60 draws, a class is in 20 on average, with a deviation of 3.7.
    rates = counts[:, ~batch].mean(0)
    assert rates.min() > 0.05 and rates.max() < 0.65
    weighted = _counts(1, keys[0], unbiased=True)
    # The last neighborhood has two classes.
    np.testing.assert_array_equal(weighted[:27], (counts[0] * np.where(batch, 1, 3))[:27])
    np.testing.assert_array_equal(weighted[27:], (counts[0] * np.where(batch, 1, 2))[27:])
    for devices in (3, 6, 8):
        np.testing.assert_array_equal(_counts(devices, keys[0], unbiased=False), counts[0])


def test_a_step_draws_by_its_key():
    net = convnet(widths=(4,), strides=(4,))
    method = method_of(net, losses.cosface, classes=C, dim=D, sample=0.1)
    batch = {"images": RNG.normal(size=(B, 8, 8, 3)).astype(np.float32), "labels": LABELS}
    params, model_state = method.init(jax.random.key(0), batch)
    loss = jit(lambda key: method.loss(params, model_state, batch, key=key, step=0)[0])
    first, again, other = (float(loss(jax.random.key(i))) for i in (1, 1, 2))
    assert first == again != other


def test_a_loss_gets_the_tiles_of_its_method():
    tiles = []

    def loss_fn(x, labels, w, **keywords):
        tiles.append(keywords["tiles"])
        return jnp.sum(x)

    options = {"tile": 4, "sample": 0.1, "unbiased": True}
    method = method_of(convnet(), loss_fn, classes=C, dim=D, **options)
    outputs = {"features": jnp.asarray(X), "embeddings": jnp.asarray(X)}
    params, batch, key = {"proxies": PROXIES[2]}, {"labels": LABELS}, jax.random.key(0)
    method.split_loss.criterion(params, {}, outputs, batch, key=key, step=0)
    assert tiles[0]._replace(key=None) == (4, 0.1, None, True) and tiles[0].key != key


def test_tiles_compute_the_logits_a_second_time():
    def products(tiles):
        def loss(x, w):
            return losses.arcface(x, LABELS, w, tiles=tiles)

        traced = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(X, PROXIES[2])
        return multiply_adds(traced.jaxpr) / (B * C * D)

    assert products(None) == 3 and products(ops.ClassTiles(1)) == 4


def test_wrong_tiles_are_refused(unchecked):
    call = functools.partial(losses.proxy_anchor, X, LABELS, PROXIES[2])
    drawn = ops.ClassTiles
    for tiles in (drawn(0), drawn(2.5), 4, drawn(4, share=0.0), drawn(4, share=1.5), drawn(4, 0.5)):
        words = r"`size` that is a positive integer .* below 1 with a `key`: got "
        with pytest.raises(ValueError, match=words + re.escape(repr(tiles))):
            call(tiles=tiles)


def test_entries_of_classes_in_tiles(unchecked):
    call = functools.partial(losses.proxy_anchor, X, LABELS, PROXIES[2], reduce_fn=None)
    np.testing.assert_allclose(call(tiles=ops.ClassTiles(4)), call(), rtol=1e-5)
