"""Chunks of a batch, shards of proxies or of a gallery, any number of devices: the same numbers."""

import functools
import math
import re
import shutil

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from losses import test_contract as contract
from methods.one_step import Patches
from system import tiny

from dmljax import losses, methods, metrics, miners, nets, retrieval
from dmljax.methods import base
from dmljax.nets import layers
from dmljax.retrieval import sharding as search_sharding
from dmljax.retrieval import tiles
from dmljax.train import journal, loop, named_methods, optimizers, run_folder, schedules
from dmljax.train.devices import Shardings, of_state, path_of, prefetch, put, shardings
from dmljax.train.step import check_chunks, init_state, train_step

# Compiling takes nearly all of the time here, and several times less without optimizing.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
RNG = np.random.default_rng(0)
C, SIDE = 4, 8


class Pixels(nn.Module, kw_only=True):
    """A backbone that sees each pixel alone, and compiles at once."""

    widths: tuple[int, ...] = (6, 8)
    norm: bool = False

    @nn.compact
    def __call__(self, x, *, train):
        for width in self.widths:
            x = nn.Dense(width)(x)
            x = jax.nn.relu(layers.BatchNorm()(x, train=train) if self.norm else x)
        return {"features": x, "pooled": x.mean(axis=(1, 2))}


def _scaled(images):
    return jnp.asarray(images, jnp.float32) / 128 - 1


def _batch(b):
    tints = RNG.integers(0, 256, (b, 1, 1, 3))
    images = (tints + RNG.integers(0, 256, (b, SIDE, SIDE, 3))) // 2
    return {"images": images.astype(np.uint8), "labels": (np.arange(b) % C).astype(np.int32)}


def _first(method, optimizer):
    batch = {"images": np.zeros((2, SIDE, SIDE, 3), np.float32), "labels": np.zeros(2, np.int32)}
    init_fn = functools.partial(method.init, batch=batch)
    return jit(lambda key: init_state(*init_fn(key), optimizer))(jax.random.key(0))


def _distance(a, b):
    """|a - b| / |b| over all leaves."""
    a, b = (np.concatenate([np.ravel(x) for x in jax.tree.leaves(t)]) for t in (a, b))
    return np.linalg.norm(a - b) / np.linalg.norm(b)


EXACT = 1e-12  # in float64


def _as_float64(tree):
    return jax.tree.map(
        lambda a: np.float64(a) if jnp.issubdtype(a.dtype, np.floating) else a, tree
    )


def _drawn(shapes):
    """Parameters and statistics, drawn without compiling anything."""
    rng = np.random.default_rng(0)

    def draw(leaf):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return np.zeros(leaf.shape, leaf.dtype)
        return rng.normal(size=leaf.shape) * 0.3 if len(leaf.shape) > 1 else np.ones(leaf.shape)

    return jax.tree.map(draw, shapes)


def _on(devices, function, shared, rows):
    """`function(shared, rows)`, compiled for so many devices, over which `rows` are split."""
    shards = Shardings(jax.devices()[:devices])
    on_devices = jax.device_put(shared, shards.everywhere), put(rows, shards.rows)
    return jax.device_get(jit(function)(*on_devices))


# --- a batch in chunks --------------------------------------------------------------------------

IN_CHUNKS = {
    "mined": (methods.pairs, losses.triplet, {"mine_fn": miners.batch_hard}),
    "memory": (methods.pairs, losses.multi_similarity, {"memory": 32, "normalized": False}),
    "proxies": (methods.proxies, losses.proxy_anchor, {}),
    "centers": (methods.proxies, losses.soft_triple, {"centers": 2, "sparsity": 0.2}),
}


@pytest.fixture
def without_diagnostics(monkeypatch):
    """Leaves out the diagnostics of a batch, which take half of the time to compile."""
    monkeypatch.setattr(base, "diagnostics", lambda *_, **__: {})


@pytest.mark.parametrize("name", IN_CHUNKS)
def test_gradient_in_chunks_is_that_of_the_batch(name, without_diagnostics):
    factory, loss_fn, options = IN_CHUNKS[name]
    method = factory(Pixels(), loss_fn, classes=C, dim=5, **options)
    optimizer = optax.trace(0.0)  # whose state is the gradient
    state, batch = _as_float64(_first(method, optimizer)), _batch(16)
    results = []
    for chunk, devices in ((None, 1), (4, 1), (8, 4)):
        step = train_step(method, optimizer, normalize_fn=_scaled, seed=0, chunk=chunk)
        with jax.enable_x64(True):
            results.append(_on(devices, step, state, batch))
    (direct, metrics), *others = results
    assert metrics["gradient_norm"] > 1e-3
    for after, other_metrics in others:
        assert _distance(after.opt_state, direct.opt_state) < EXACT
        np.testing.assert_allclose(other_metrics["loss"], metrics["loss"], rtol=EXACT)
        if name == "memory":
            assert _distance(after.model_state["memory"], direct.model_state["memory"]) < EXACT
            assert int(after.model_state["memory"].filled) == 16


def test_a_large_batch_takes_the_memory_of_a_chunk():
    b, chunk = 4096, 64
    net = Pixels(widths=(64, 64))
    method = methods.proxies(net, losses.proxy_anchor, classes=C, dim=5)
    optimizer = optax.trace(0.0)
    state = _first(method, optimizer)

    def memory(b, chunk):
        step = train_step(method, optimizer, normalize_fn=_scaled, seed=0, chunk=chunk)
        compiled = jit(step).lower(state, _batch(b)).compile()
        return compiled, compiled.memory_analysis().temp_size_in_bytes

    direct, most = memory(b, None)
    chunked, taken = memory(b, chunk)
    # What is kept beside a chunk: the outputs, what the loss makes of them, and pairs of 1,024 rows
    # for the log; none of it grows with the net.
    share, kept = most * chunk // b, 4 * (b * 64 + 8 * 1024**2)
    print(f"all at once {most:,}, the share of a chunk {share:,}, in chunks {taken:,} bytes")
    assert taken < 2 * share + kept and taken < most / 8
    batch = _batch(b)
    (a, _), (c, _) = direct(state, batch), chunked(state, batch)
    assert _distance(c.opt_state, a.opt_state) < 1e-6


def _refusal(tmp_path, **fields):
    config = tiny(tmp_path, **fields)
    with pytest.raises(ValueError) as refused:
        loop.run(config, tmp_path / "run")
    assert not (tmp_path / "run").exists() and "\n" not in str(refused.value)
    return str(refused.value)


def test_chunks_are_refused_where_they_would_change_the_gradient(tmp_path):
    one = {"chunk": 4, "runtime": {"devices": 1}}
    assert "batch norm" in _refusal(tmp_path, **one)
    dvml = {"name": "dvml", "dim": 4, "samples": 2}
    assert "split loss" in _refusal(tmp_path, method=dvml, **one)
    assert "chunk=3 must divide" in _refusal(tmp_path, chunk=3, runtime={"devices": 1})
    assert "the 4 devices" in _refusal(tmp_path, chunk=2, runtime={"devices": 4})


@pytest.mark.parametrize("frozen, remat", [(True, False), (True, True), (False, True)])
def test_a_norm_that_is_frozen_couples_nothing(frozen, remat):
    net = nets.convnet(widths=(4,), strides=(2,), frozen=frozen, remat=remat)
    method = methods.pairs(net, losses.triplet, classes=C, dim=5)
    images = jax.ShapeDtypeStruct((2, SIDE, SIDE, 3), jnp.float32)
    batch = {"images": images, "labels": jax.ShapeDtypeStruct((2,), jnp.int32)}
    shapes = init_state(*jax.eval_shape(method.init, jax.random.key(0), batch), optax.identity())
    if frozen:
        check_chunks(method, shapes, images, chunk=4, batch=8)
    else:
        with pytest.raises(ValueError, match="frozen=True"):
            check_chunks(method, shapes, images, chunk=4, batch=8)


# --- the same loss and gradient on any number of devices ----------------------------------------

# One against eight says it, for one loss of each kind of computation; two, four and the other
# losses take minutes more.
devices_ = pytest.mark.parametrize(
    "devices", [8, pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]
)
_kept = {}


def _alone(name, make):
    if name not in _kept:
        _kept[name] = make(1)
    return _kept[name]


QUICK = ("arcface", "clip", "fast_ap", "histogram", "label_smoothed_cross_entropy", "margin")
QUICK += ("multi_similarity", "proxy_anchor", "soft_triple", "supcon", "triplet", "vicreg")


def _quick(name):
    return name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)


@devices_
@pytest.mark.parametrize("name", [_quick(name) for name in contract.TABLE])
def test_losses_do_not_see_devices(name, devices):
    x, labels, extra = _as_float64(contract.inputs(b=16))
    rows = {"x": x, "labels": labels, "other": extra.pop("other")}

    def run(devices):
        def loss(x, shared, rows):
            return contract.call(name, x, rows["labels"], {**shared, "other": rows["other"]})

        def both(shared, rows):
            return jax.value_and_grad(loss, argnums=(0, 1))(rows["x"], shared, rows)

        return _on(devices, both, extra, rows)

    with jax.enable_x64(True):
        one, many = _alone(name, run), run(devices)
    assert one[0].dtype == many[0].dtype == np.float64 and np.linalg.norm(one[1][0]) > 1e-6
    np.testing.assert_allclose(many[0], one[0], rtol=EXACT)
    assert _distance(many[1], one[1]) < EXACT


CROSS = functools.partial(losses.label_smoothed_cross_entropy, temperature=0.5)
NORMED = Pixels(norm=True)
LEARNERS = {"learners": 2, "dim": 6, "split": ("one", "two"), "attention": "two"}
EVERY = {
    "pairs": lambda: methods.pairs(NORMED, losses.multi_similarity, classes=C, dim=5, memory=32),
    "proxies": lambda: methods.proxies(NORMED, losses.proxy_anchor, classes=C, dim=5),
    "graph": lambda: named_methods.graph(NORMED, CROSS, classes=C, dim=8, heads=2, pool="mean"),
    "dvml": lambda: named_methods.dvml(NORMED, losses.triplet, classes=C, dim=5, samples=2),
    "abe": lambda: named_methods.abe(Patches(), losses.contrastive, classes=C, **LEARNERS),
}


@devices_
@pytest.mark.parametrize("name", methods.__all__)
def test_methods_do_not_see_devices(name, devices, without_diagnostics):
    method = EVERY[name]()
    images = RNG.normal(size=(16, 9, 9, 3))
    rows = {"images": images, "labels": (np.arange(16) // 2 % C).astype(np.int32)}
    first = {"images": images[:2].astype(np.float32), "labels": rows["labels"][:2]}
    shapes = jax.eval_shape(method.init, jax.random.key(0), first)
    state = _as_float64(_drawn(shapes))

    def run(devices):
        def loss(params, model_state, batch):
            key = jax.random.key(1)
            return method.loss(params, model_state, batch, key=key, step=jnp.int32(1))

        def both(state, batch):
            return jax.value_and_grad(loss, has_aux=True)(*state, batch)

        return _on(devices, both, state, rows)

    with jax.enable_x64(True):
        (one, (after, _)), slopes = run(1)
        (many, (their_state, _)), their_slopes = run(devices)
    assert one.dtype == np.float64
    np.testing.assert_allclose(many, one, rtol=EXACT)
    assert _distance(their_slopes, slopes) < EXACT
    if jax.tree.leaves(after):  # batch norm's running means are float32 in any case
        assert _distance(their_state, after) < 1e-6 < _distance(after, state[1])


# --- parameters in shards -----------------------------------------------------------------------


def _shards(tree, name):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    arrays = [a for p, a in leaves if path_of(p).endswith(name)]
    return [[s.data.shape for s in a.addressable_shards] for a in arrays]


def test_proxies_in_shards_are_those_of_one_device(without_diagnostics):
    c, d, b = 500, 5, 16
    method = methods.proxies(Pixels(), losses.normalized_softmax, classes=c, dim=d, multiple=8)
    optimizer = optimizers.build(
        optimizers.adam(), rate=0.1, schedule=schedules.constant(total=2), average=0.5
    )
    first = _first(method, optimizer)
    batch = _batch(b) | {"labels": RNG.integers(0, c, b).astype(np.int32)}
    results = []
    for devices in (1, 8):
        shards = Shardings(jax.devices()[:devices])
        places = of_state(first, shards, patterns=["^proxies"])
        step = train_step(
            method,
            optimizer,
            normalize_fn=_scaled,
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
    (one, scores), (many, their_scores) = results
    assert not one["proxies"][c:].any() and one["proxies"][:c].all()
    assert _distance(many, one) < 1e-5
    np.testing.assert_allclose(their_scores["loss"], scores["loss"], rtol=1e-6)
    # Embeddings travel to the proxies, never proxies or a row of logits for each image.
    sent = re.findall(r"= \w+\[([\d,]*)\]\S* (?:all-\w+|collective-\w+)\(", compiled.as_text())
    sizes = [math.prod(int(n) for n in shape.split(",") if n) for shape in sent]
    assert sizes and max(sizes) < 63 * d


def test_shards_are_refused_in_one_line(tmp_path, monkeypatch):
    proxies = {"name": "proxies", "dim": 4}
    loss = {"name": "proxy_anchor"}
    many = {"devices": 8, "sharded": ["^proxies"]}
    assert "multiple=8" in _refusal(tmp_path, method=proxies, loss=loss, runtime=many)
    many["sharded"] = ["^proxy"]
    refused = _refusal(tmp_path, method=proxies, loss=loss, runtime=many)
    assert "'^proxy'" in refused and "head, net, proxies" in refused
    dvml = {"name": "dvml", "dim": 4, "samples": 2}
    many["sharded"] = ["^net/conv1/conv/kernel"]
    assert "split loss" in _refusal(tmp_path, method=dvml, runtime=many | {"devices": 1})


# --- a run that changes its devices -------------------------------------------------------------


def _lines(workdir):
    return [x["loss"] for x in journal.read(workdir / "metrics.jsonl") if "loss" in x]


def test_a_run_goes_on_with_other_devices(tmp_path, without_diagnostics):
    options = {"evaluate": {"ks": [1], "clustering": False, "batch_size": 16}, "log_every": 1}
    options["net"] = "methods.one_step:Patches"
    proxies = {"method": {"name": "proxies", "dim": 4, "multiple": 4}}
    config = tiny(tmp_path, loss={"name": "proxy_anchor"}, **proxies, **options)

    def go(name, devices):
        runtime = {"devices": devices, "sharded": ["^proxies"]}
        loop.run({**config, "runtime": runtime}, tmp_path / name)
        return _lines(tmp_path / name), jax.device_get(run_folder.reopen(tmp_path / name)[1].params)

    first_curve, params = go("on2", 2)
    assert len(first_curve) == 6
    for devices in (4, 1):
        name = f"on{devices}"
        shutil.copytree(tmp_path / "on2", tmp_path / name)
        for step in (4, 6):
            shutil.rmtree(tmp_path / name / "checkpoints" / str(step))
        curve, last = go(name, devices)
        assert curve[:2] == first_curve[:2] and len(curve) == 6
        # In float32: rounding only, which six steps of Adam let grow.
        np.testing.assert_allclose(curve, first_curve, rtol=1e-4)
        assert _distance(last, params) < 1e-3


# --- a gallery among devices, or larger than they are -------------------------------------------


def _scores(x, y, devices, **keywords):
    queries, labels = (x[:700], y[:700]) if "gallery" in keywords else (x, y)
    devices = jax.devices()[:devices]
    scores = metrics.per_query(queries, labels, tile=128, devices=devices, **keywords)
    near = retrieval.nearest(queries, keywords.get("gallery"), k=5, tile=128, devices=devices)
    return scores, near


@pytest.mark.parametrize("devices", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("split", [False, True])
def test_a_search_does_not_see_devices(split, devices, monkeypatch):
    # Ties, classes of one, small ones, and one of so many that its rows are sorted.
    x = RNG.integers(0, 4, (1100, 6)).astype(np.float32)
    y = np.where(np.arange(1100) % 10 == 0, 400, RNG.integers(0, 400, 1100))
    keywords = {"gallery": x[300:], "gallery_labels": y[300:]} if split else {}
    one, near = _scores(x, y, 1, **keywords)
    heights = []
    real = search_sharding.on_mesh
    monkeypatch.setattr(
        search_sharding, "on_mesh", lambda mesh, *a: heights.append(mesh) or real(mesh, *a)
    )
    many, their_near = _scores(x, y, devices, **keywords)
    assert {mesh.size for mesh in heights} == {devices}
    assert np.isnan(one["mAP"]).any() and np.nanmax(one["mAP"]) > 0
    for name in one:
        np.testing.assert_array_equal(many[name], one[name])
    for a, b in zip(their_near, near, strict=True):
        np.testing.assert_array_equal(a, b)


def test_clusters_do_not_see_devices():
    x, y = RNG.normal(size=(500, 4)).astype(np.float32), RNG.integers(0, 60, 500)
    one, many = (
        metrics.clustering(x, y, seeds=(0, 1), tile=128, devices=jax.devices()[:n]) for n in (1, 3)
    )
    assert one == many and 0 < one["NMI"] < 1


@pytest.mark.parametrize("devices", [1, 2])
def test_a_gallery_beyond_the_devices_memory_is_streamed(devices, monkeypatch, tmp_path):
    # 19 dimensions: other tests leave no arrays of so many behind.
    x = RNG.normal(size=(1500, 19)).astype(np.float32)
    y = np.where(np.arange(1500) % 15 == 0, 300, RNG.integers(0, 300, 1500))
    np.save(tmp_path / "x.npy", x)
    keywords = {"gallery": np.load(tmp_path / "x.npy", mmap_mode="r"), "gallery_labels": y}
    resident, near = _scores(x, y, devices, **keywords)
    within = metrics.per_query(x, y, tile=128, devices=jax.devices()[:devices])
    monkeypatch.setattr(tiles, "RESIDENT_BYTES", 0)
    monkeypatch.setattr(tiles, "BLOCKS_PER_PASS", 2)
    alive = []
    real = tiles.Tiles._load

    def load(self, i):
        tile = real(self, i)
        sizes = [a.nbytes for a in jax.live_arrays() if a.shape[-1:] == (19,)]
        alive.append(sum(sizes))
        return tile

    monkeypatch.setattr(tiles.Tiles, "_load", load)
    streamed, their_near = _scores(x, y, devices, **keywords)
    again = metrics.per_query(x, y, tile=128, devices=jax.devices()[:devices])
    for a, b in ((streamed, resident), (again, within)):
        for name in a:
            np.testing.assert_array_equal(a[name], b[name])
    np.testing.assert_array_equal(their_near[0], near[0])
    # Never all: a few blocks of queries, and the tile they meet.
    assert (
        len(alive) > 4 * 12 and max(alive) <= (tiles.BLOCKS_PER_PASS + 3) * devices * 128 * 19 * 4
    )


def test_the_next_batch_is_sent_off_while_one_is_used():
    sent = []

    def batches():
        for i in range(4):
            sent.append(i)
            yield {"x": np.full(8, i)}

    rows = shardings(jax.devices()[:1], batch=8).rows
    for i, batch in enumerate(prefetch(batches(), rows)):
        assert int(batch["x"][0]) == i and sent == list(range(min(i + 2, 4)))
