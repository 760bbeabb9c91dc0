"""The networks of ABE and of its baseline, computed one learner at a time."""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dmljax.nets import convnet, googlenet
from dmljax.nets.pools import flatten

abe = importlib.import_module("dmljax.methods.abe")

RNG = np.random.default_rng(0)
IMAGES = RNG.normal(size=(3, 16, 16, 3)).astype(np.float32)
NET = functools.partial(convnet, widths=(4, 6, 7, 5), strides=(2, 1, 1, 2))
SMALL = {"net": NET, "split": ("conv2", "conv3"), "features": 12}


def _init(module):
    return jax.device_get(jax.jit(lambda: module.init(jax.random.key(0), IMAGES, train=False))())


@functools.cache
def _small(net, **options):
    module = net(**SMALL, **options)
    apply = jax.jit(lambda variables, x: module.apply(variables, x, train=False))
    return _init(module), lambda *args: jax.device_get(apply(*args))


@functools.cache
def _backbone(**stages):
    """The small backbone's `(variables, x) -> outputs`, between two stages."""
    apply = jax.jit(lambda variables, x: NET(**stages).apply(variables, x, train=False))
    return lambda *args: jax.device_get(apply(*args))


def _unit(linear, pooled):
    vectors = pooled @ linear["kernel"] + linear["bias"]
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def _shapes(net):
    image = jax.ShapeDtypeStruct((1, 224, 224, 3), jnp.float32)
    return jax.eval_shape(lambda x: net.init(jax.random.key(0), x, train=False), image)


FLAT = {"pool_fn": flatten}


@pytest.mark.parametrize("pooled_by", [{}, FLAT], ids=["mean", "flatten"])
def test_abe_by_hand(pooled_by):
    """One learner at a time: S, the mask, G, the pool, the linear map, the unit vector."""
    variables, apply = _small(abe.ABE, learners=3, attention="conv3", **pooled_by)
    out = apply(variables, IMAGES)

    def part(name, x, **stages):
        stage_variables = {
            collection: tree[name] for collection, tree in variables.items() if name in tree
        }
        return _backbone(**stages)(stage_variables, x)

    params = variables["params"]
    maps = part("shared", IMAGES, stop="conv2")["features"]
    attention_maps = part("attention", maps, start="conv3", stop="conv3")["features"]
    for m in range(3):
        kernel = params["masks"]["kernel"][0, 0, :, 6 * m : 6 * (m + 1)]
        mask = 1 / (1 + np.exp(-(attention_maps @ kernel)))  # its bias starts at 0
        np.testing.assert_allclose(out["masks"][:, m], mask, atol=1e-5)
        last = part("head", maps * mask, start="conv3")
        pooled = last["features"].reshape(len(IMAGES), -1) if pooled_by else last["pooled"]
        np.testing.assert_allclose(
            out["learners"][:, m], _unit(params["embedding"], pooled), atol=1e-5
        )
    assert np.abs(out["learners"][:, 0] - out["learners"][:, 1]).max() > 1e-3


def test_without_masks_every_learner_is_the_backbone():
    """`mask_fn` is applied, and S and G make up the whole net."""
    options = {"learners": 2, "attention": "conv3"}
    variables, _ = _small(abe.ABE, **options)
    backbone = jax.tree.map(lambda leaf: leaf + 0.01, _init(NET()))
    filled = abe.with_backbone(variables, backbone)
    _, apply = _small(abe.ABE, **options, mask_fn=jnp.ones_like)
    expected = _unit(filled["params"]["embedding"], _backbone()(backbone, IMAGES)["pooled"])
    learners = apply(filled, IMAGES)["learners"]
    for m in range(2):
        np.testing.assert_allclose(learners[:, m], expected, atol=1e-5)


def test_multi_head_by_hand():
    variables, apply = _small(abe.MultiHead, learners=2)
    out, params = apply(variables, IMAGES), variables["params"]
    assert sorted(params) == ["embedding_0", "embedding_1", "head_0", "head_1", "shared"]
    for m in range(2):
        backbone = {name: tree["shared"] | tree[f"head_{m}"] for name, tree in variables.items()}
        expected = _unit(params[f"embedding_{m}"], _backbone()(backbone, IMAGES)["pooled"])
        np.testing.assert_allclose(out["learners"][:, m], expected, atol=1e-5)
    assert np.abs(out["learners"][:, 0] - out["learners"][:, 1]).max() > 1e-3


def test_one_learner_trains_what_is_shared_and_its_own_mask():
    options = {"learners": 3, "attention": "conv3"}
    variables, _ = _small(abe.ABE, **options)
    net = abe.ABE(**SMALL, **options)

    @jax.jit
    @jax.grad
    def slope(params):
        out = net.apply(variables | {"params": params}, IMAGES, train=False)
        return jnp.sum(out["learners"][:, 1] * jnp.cos(jnp.arange(12.0)).reshape(1, 12)[:, :4])

    slopes = slope(variables["params"])
    for name in ("shared", "attention", "head", "embedding"):
        assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(slopes[name])) > 1e-6
    mask_slopes = np.abs(slopes["masks"]["kernel"]).max(axis=(0, 1, 2)).reshape(3, 6).max(axis=1)
    assert mask_slopes[1] > 1e-7 and mask_slopes[0] == mask_slopes[2] == 0


def test_weights_of_a_backbone_fill_every_copy():
    net = abe.ABE(learners=2)
    shapes, backbone = _shapes(net), _shapes(googlenet())
    filled = abe.with_backbone(shapes, backbone)
    assert jax.tree.structure(filled) == jax.tree.structure(shapes)
    for part in ("shared", "attention", "head"):
        for child, leaves in filled["params"][part].items():
            assert leaves == backbone["params"][child]
    assert filled["params"]["masks"] is shapes["params"]["masks"]
    # A single collection is filled in the same way.
    assert abe.with_backbone(shapes["params"], backbone["params"]) == filled["params"]
    with pytest.raises(ValueError, match=r"the backbone has no inception_4a, .* needs: take"):
        abe.with_backbone(shapes, _init(NET()))


def test_initial_masks_are_glorot_of_each_learner():
    variables, _ = _small(abe.ABE, learners=3, attention="conv3")
    kernel, bound = variables["params"]["masks"]["kernel"], (6 / (7 + 6)) ** 0.5
    assert 0.9 * bound < np.abs(kernel).max() <= bound
    np.testing.assert_array_equal(variables["params"]["masks"]["bias"], 0)


def test_remat_reaches_every_copy_and_keeps_the_names():
    options = {"learners": 2, "attention": "conv3"}
    variables, _ = _small(abe.ABE, **options)
    net = abe.ABE(**SMALL, **options, remat=True)
    shapes = jax.eval_shape(lambda: net.init(jax.random.key(0), IMAGES, train=False))
    assert jax.tree.structure(shapes) == jax.tree.structure(variables)
    text = str(jax.make_jaxpr(lambda v: net.apply(v, IMAGES, train=False))(variables))
    assert text.count("checkpoint") + text.count("remat") >= 4  # conv1, 2, 3 in two copies, 4


def test_wrong_arguments_are_refused_in_one_line(unchecked):
    for options, message in (
        ({"learners": 5}, r"5 learners cannot share 12 features: take a multiple of 5"),
        ({"learners": 0}, r"0 learners cannot share 12 features"),
        (
            {"learners": 2, "attention": "conv4"},
            r"masks of 4 x 4 do not fit maps of 8 x 8: .* not at 'conv4'",
        ),
        ({"learners": 2, "attention": "4e"}, r"convnet has no stage '4e'"),
    ):
        net = abe.ABE(**SMALL, **options)
        with pytest.raises(ValueError, match=message) as caught:
            jax.eval_shape(lambda: net.init(jax.random.key(0), IMAGES, train=False))  # noqa: B023
        assert "\n" not in str(caught.value)
