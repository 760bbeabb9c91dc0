"""The contract of all public methods: shapes, the pretrained backbone, kinds of `Inspect`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import traverse_util
from one_step import Patches, jit

from dmljax import losses, methods, miners
from dmljax.config import registry
from dmljax.methods import assemble, base
from dmljax.nets.vit import ViT

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
    "semantic_proxies": (losses.proxy_anchor, {"dim": 5, "count": 2, "depth": 1}, set()),
}
RANKS = {"parts": 2, "spatial_masks": 5, "batch_attention": 4, "synthetic_features": 2}
KEY = jax.random.key(0)
BATCH = {
    "images": np.random.default_rng(0).normal(size=(B, 6, 6, 3)).astype(np.float32),
    "labels": np.arange(B, dtype=np.int32) % CLASSES,
}


def _net(name):
    if name == "semantic_proxies":  # which needs tokens
        return ViT(width=8, heads=2, depth=1, patch=3, image_size=6)
    return Patches()


@functools.cache
def _method(name):
    loss_fn, options, _ = METHODS[name]
    method = getattr(methods, name)(_net(name), loss_fn, classes=CLASSES, **options)
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


def test_a_memory_is_filled_from_the_first_step_and_counts_from_its_start():
    options = {"classes": CLASSES, "dim": 5, "memory": 2 * B, "memory_start": 3}
    method = methods.pairs(Patches(), losses.contrastive, **options)
    params, model_state = jit(method.init)(KEY, BATCH)
    loss = jit(lambda step: method.loss(params, model_state, BATCH, key=KEY, step=step))
    (before, _), *others = (loss(step) for step in (0, 2, 3, 4))
    for (value, (state, metrics)), counts in zip(others, (False, True, True), strict=True):
        assert state["memory"].filled == B and metrics["memory_loss"] > 0.1
        np.testing.assert_allclose(value, before + counts * metrics["memory_loss"], rtol=1e-6)


class _Dropped(nn.Module):
    @nn.compact
    def __call__(self, x, *, train):
        return nn.Dropout(0.5, deterministic=not train)(nn.Dense(20)(x))


def test_modules_draw_their_own_parameters_and_their_own_dropout():
    two = assemble.modules(lambda run, x: (run["a"](x), run["b"](x)), a=_Dropped(), b=_Dropped())
    params, model_state, _ = two.init(KEY, BATCH["images"][:, 0, 0])
    kernels = [params[name]["Dense_0"]["kernel"] for name in "ab"]
    assert not np.array_equal(*kernels)
    same = {"a": params["a"], "b": params["a"]}
    options = {"train": True, "key": KEY}
    (a, b), _ = two.apply(same, model_state, BATCH["images"][:, 0, 0], **options)
    assert not np.array_equal(a == 0, b == 0)


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
        getattr(methods, name)(_net(name), loss_fn, classes=n, **options) for n in (CLASSES, 9)
    )
    shapes = jax.eval_shape(lambda: _net(name).init(KEY, BATCH["images"], train=False))
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
    assert declared(few.backbone) == changed and len(changed) >= len(backbone["params"])
    for path in changed:  # and all else is drawn as without the pretrained backbone
        np.testing.assert_array_equal(with_backbone[path], 7)


class _Pooled(nn.Module):
    """A backbone that compiles at once, with all outputs that a head may take."""

    @nn.compact
    def __call__(self, x, *, train):
        x = nn.Dense(8)(x)
        mean, largest = x.mean(axis=(1, 2)), x.max(axis=(1, 2))
        both = jnp.concatenate([mean, largest], axis=1)
        return {"features": x, "pooled": mean, "max_pooled": largest, "class_and_mean": both}


@pytest.mark.parametrize(
    "head",
    [{"dense_fn": name} for name in registry.names("dense_fn")]
    + [{"pool_fn": name} for name in registry.names("pool_fn")],
    ids=lambda head: "-".join(head.values()),
)
def test_every_head_of_the_registry_learns(head):
    """A step along the gradient lowers the loss, and every parameter of the head has a gradient."""
    spec = {"name": "pairs", "dim": 5, **head}
    if head.get("pool_fn") == "learned_attention":
        spec["pool_fn"] = {"name": "learned_attention", "heads": 2}
    method = registry.resolve("method", spec)(_Pooled(), losses.contrastive, classes=CLASSES)
    params, model_state = method.init(KEY, BATCH)

    def loss_fn(head):
        value, _ = method.loss({**params, "head": head}, model_state, BATCH, key=KEY, step=0)
        return value

    value_and_grad = jit(jax.value_and_grad(loss_fn))
    value, gradients = value_and_grad(params["head"])
    flat = traverse_util.flatten_dict(gradients, sep="/")
    # Keys of attention have no bias that matters: softmax takes the same from all positions.
    assert all(jnp.any(g != 0) for name, g in flat.items() if name != "attention/k/bias")
    moved = jax.tree.map(lambda p, g: p - 1e-3 * g, params["head"], gradients)
    assert value_and_grad(moved)[0] < value


@pytest.mark.parametrize("name", ["pairs", "proxies"])
def test_a_method_with_prefixes_adds_their_losses_to_that_of_the_whole_width(name):
    """Against a loop over the cut features of the method without prefixes; also with a memory."""
    loss_fn = {"pairs": losses.contrastive, "proxies": losses.proxy_anchor}[name]
    make = functools.partial(getattr(methods, name), Patches(), classes=CLASSES, dim=6)
    plain, nested = make(loss_fn), make(loss_fn, prefixes=(2, 4))
    assert nested.prefixes == (2, 4) and plain.prefixes == ()
    params, model_state = jit(nested.init)(KEY, BATCH)
    outputs, _ = plain.split_loss.forward(params, model_state, BATCH["images"], key=KEY)
    expected = 0
    for dim in (2, 4, 6):
        vectors = [outputs["features"], *([params["proxies"]] if name == "proxies" else [])]
        x, *rest = (v[:, :dim] / jnp.linalg.norm(v[:, :dim], axis=1)[:, None] for v in vectors)
        expected += loss_fn(x, BATCH["labels"], *rest)
    value, _ = jit(functools.partial(nested.loss, key=KEY, step=0))(params, model_state, BATCH)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    # The initial proxies are those of the loss itself.
    for a, b in zip(
        *(jax.tree.leaves(jit(m.init)(KEY, BATCH)) for m in (plain, nested)), strict=True
    ):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("pairs", {"dim": 6, "prefixes": [4, 8]}, "at most the width 6"),
        ("pairs", {"prefixes": [4, 2]}, "ascending numbers of dimensions"),
        ("pairs", {"prefixes": [2], "unit": False}, "prefixes are unit vectors"),
        ("dvml", {"prefixes": [2]}, "dvml has no argument 'prefixes'"),
        ("pairs", {"prefixes": [2.5]}, r"prefixes\[0\] must be a whole number"),
    ],
)
def test_prefixes_that_a_method_cannot_have_are_refused_before_training(name, options, message):
    with pytest.raises(ValueError, match=message) as raised:
        factory = registry.resolve("method", {"name": name, **options})
        method = factory(Patches(), METHODS[name][0], classes=CLASSES)
        jax.eval_shape(lambda: method.init(KEY, BATCH))
    assert "\n" not in str(raised.value)
