"""The contract of all public methods: shapes, the pretrained backbone, kinds of `Inspect`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util
from one_step import Patches, jit

from dmljax import losses, methods, miners
from dmljax.methods import base

B, CLASSES = 8, 4
# A new method is one row here: its loss, its options, and the kinds that it lets one inspect.
METHODS = {
    "abe": (
        losses.triplet,
        {"learners": 2, "dim": 6, "split": ("one", "two"), "attention": "two"},
        {"parts", "spatial_masks"},
    ),
    "dvml": (losses.triplet, {"samples": 2}, {"synthetic_features"}),
    "graph": (
        losses.label_smoothed_cross_entropy,
        {"dim": 8, "pool_fn": None, "neck": True},
        {"parts", "refine", "batch_attention"},
    ),
    "pairs": (losses.triplet, {"dim": 5, "memory": 16}, set()),
    "proxies": (losses.proxy_anchor, {"dim": 5}, set()),
}
RANKS = {"parts": 2, "spatial_masks": 5, "batch_attention": 4, "synthetic_features": 2}
KEY = jax.random.key(0)
BATCH = {
    "images": np.random.default_rng(0).normal(size=(B, 6, 6, 3)).astype(np.float32),
    "labels": np.arange(B, dtype=np.int32) % CLASSES,
}


@functools.cache
def _method(name):
    loss_fn, options, _ = METHODS[name]
    method = getattr(methods, name)(Patches(), loss_fn, classes=CLASSES, **options)
    return method, jax.eval_shape(method.init, KEY, BATCH)


def test_every_method_has_a_row():
    assert set(METHODS) == set(methods.__all__)


@pytest.mark.parametrize("name", METHODS)
def test_loss_state_and_embeddings_have_their_shapes(name):
    method, (params, model_state) = _method(name)
    step = jnp.zeros((), jnp.int32)

    def loss(params, model_state):
        return method.loss(params, model_state, BATCH, key=KEY, step=step)

    value, (new_state, metrics) = jax.eval_shape(loss, params, model_state)
    assert value.shape == () and all(metric.shape == () for metric in metrics.values())
    assert jax.tree.map(lambda x: (x.shape, x.dtype), new_state) == jax.tree.map(
        lambda x: (x.shape, x.dtype), model_state
    )
    embeddings = jax.eval_shape(method.embed, params, model_state, BATCH["images"])
    assert embeddings.ndim == 2 and embeddings.shape[0] == B and embeddings.dtype == jnp.float32


@pytest.mark.parametrize("name", METHODS)
def test_a_pretrained_backbone_replaces_the_drawn_one_and_nothing_else(name):
    method, _ = _method(name)
    shapes = jax.eval_shape(lambda: Patches().init(KEY, BATCH["images"], train=False))
    backbone = jax.tree.map(lambda x: np.full(x.shape, 7, x.dtype), dict(shapes))
    init = jit(lambda key, backbone: method.init(key, BATCH, backbone=backbone)[0])
    drawn, pretrained = init(KEY, None), init(KEY, backbone)
    assert jax.tree.structure(drawn) == jax.tree.structure(pretrained)
    stages = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(pretrained):
        names = [entry.key for entry in path]
        if names[0] == "net" and names[-1] in backbone["params"]:
            np.testing.assert_array_equal(leaf, 7)
            stages += 1
        else:
            np.testing.assert_array_equal(leaf, functools.reduce(dict.get, names, drawn))
    assert stages == (len(backbone["params"]) + 1 if name == "abe" else len(backbone["params"]))


@pytest.mark.parametrize("name", METHODS)
def test_a_method_inspects_the_kinds_of_its_row(name):
    method, (params, model_state) = _method(name)
    kinds = {} if method.inspect is None else method.inspect._asdict()
    kinds = {kind: inspect_fn for kind, inspect_fn in kinds.items() if inspect_fn is not None}
    assert set(kinds) == METHODS[name][2]
    for kind, inspect_fn in kinds.items():
        if kind == "refine":
            continue
        options = {"key": KEY} if kind == "synthetic_features" else {}
        arrays = jax.eval_shape(
            functools.partial(inspect_fn, **options), params, model_state, BATCH["images"]
        )
        assert arrays and all(array.ndim == RANKS[kind] for array in arrays.values())


def test_the_split_loss_is_the_loss():
    for name in ("pairs", "proxies"):
        method, _ = _method(name)
        params, model_state = jit(method.init)(KEY, BATCH)
        options = {"key": KEY, "step": jnp.zeros((), jnp.int32)}

        def in_two_steps(params, model_state, method=method, options=options):
            outputs, model_state = method.split_loss.forward(
                params, model_state, BATCH["images"], key=KEY
            )
            return method.split_loss.criterion(params, model_state, outputs, BATCH, **options)

        def at_once(params, model_state, method=method, options=options):
            return method.loss(params, model_state, BATCH, **options)

        results = [jit(f)(params, model_state) for f in (in_two_steps, at_once)]
        for first, second in zip(*map(jax.tree.leaves, results), strict=True):
            np.testing.assert_array_equal(first, second)


def test_only_a_random_miner_gets_a_key():
    """The pairs that it draws follow the key of the step."""
    mine_fn = functools.partial(miners.distance_weighted, dim=5)
    x = np.random.default_rng(1).normal(size=(B, 5)).astype(np.float32)
    random_loss = base.with_miner(losses.triplet, base.RandomMiner(mine_fn))
    values = [random_loss(x, BATCH["labels"], key=jax.random.key(seed)) for seed in (0, 0, 1)]
    assert values[0] == values[1] != values[2]
    plain_loss = base.with_miner(losses.triplet, miners.batch_hard)
    expected = losses.triplet(x, BATCH["labels"], mine_fn=miners.batch_hard)
    assert plain_loss(x, BATCH["labels"], key=KEY) == expected


@pytest.mark.parametrize("name", METHODS)
def test_a_method_declares_its_backbone_and_its_rows_for_classes(name):
    """Against the parameters that change with the backbone, and with the number of classes."""
    loss_fn, options, _ = METHODS[name]
    few, many = (
        getattr(methods, name)(Patches(), loss_fn, classes=n, **options) for n in (CLASSES, 9)
    )
    shapes = jax.eval_shape(lambda: Patches().init(KEY, BATCH["images"], train=False))
    backbone = jax.tree.map(lambda x: np.full(x.shape, 7, x.dtype), dict(shapes))
    init = jit(lambda key, backbone: few.init(key, BATCH, backbone=backbone)[0])
    trees = init(KEY, None), init(KEY, backbone), jax.eval_shape(many.init, KEY, BATCH)[0]
    initial, with_backbone, with_more_classes = (
        traverse_util.flatten_dict(tree, sep="/") for tree in trees
    )

    def declared(folders):
        return {path for path in initial for f in folders if path == f or path.startswith(f"{f}/")}

    assert declared(few.per_class) == {
        p for p in initial if initial[p].shape != with_more_classes[p].shape
    }
    changed = {path for path in initial if not np.array_equal(initial[path], with_backbone[path])}
    assert declared(few.backbone) == changed and changed
