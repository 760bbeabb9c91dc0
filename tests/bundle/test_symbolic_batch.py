"""Every net and every method becomes a program for batches of any size, on all platforms."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from system import METHODS, tiny
from test_onnx import FAMILIES, RUN, TINY_SHAPE

from dmljax import nets
from dmljax.bundle import models, programs
from dmljax.config.build import build
from dmljax.config.fields import complete
from dmljax.methods import assemble
from dmljax.nets import clip, dino, pools, vit

CHANNELS, SIZES = {"lecun": 1}, {"googlenet": 64, "googlenet_bn": 64, "bn_inception": 64}
SLOW = ("bn_inception", "googlenet", "googlenet_bn", "mobilenet_v2", "vit_b16")
SLOW += ("efficientnet_lite1", "efficientnet_lite2", "convnext_s", "convnext_b", "convnext_l")
SLOW += tuple(f"resnet{depth}" for depth in (34, 50, 101, 152))
# The tests of families export a small net of each other family.
NETS = sorted({*nets.__all__} - {*clip.__all__, *dino.__all__, *FAMILIES} | {"vit_b16"})
NETS = [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in NETS]


def _exported(embed_fn, variables, shape):
    model = models.model(embed_fn, lambda x: x / jnp.float32(255), variables, shape)
    return model, models.stablehlo(model)


def _check(exported, dimension):
    (out,) = exported.out_avals
    assert not isinstance(out.shape[0], int) and out.shape[1] == dimension
    assert exported.platforms == models.PLATFORMS
    assert exported.in_avals[-1].dtype == np.uint8
    assert programs.refusal(exported) is None


@pytest.mark.parametrize("name", NETS)
def test_every_net(name):
    net, size = getattr(nets, name)(), SIZES.get(name, 32)
    shape = (size, size, CHANNELS.get(name, 3))
    shapes = jax.eval_shape(
        lambda key: net.init_with_output(key, jnp.zeros((1, *shape)), train=False),
        jax.random.key(0),
    )
    outputs, variables = shapes

    def embed(variables, images):
        return net.apply(variables, images / jnp.float32(255), train=False)["pooled"]

    exported = models.stablehlo(models.Model(embed, variables, shape))
    _check(exported, outputs["pooled"].shape[1])


@pytest.mark.parametrize("name", sorted({*FAMILIES} - {*RUN}))
def test_every_family(name, tmp_path):
    fields = {"net": {"name": name, **FAMILIES[name]}, "method": {"name": "pairs", "dim": None}}
    config = complete(tiny(tmp_path, **fields)) | {"normalize": "unit"}
    model = models.model_of(config, TINY_SHAPE, classes=4)
    exported = models.stablehlo(model)
    _check(exported, exported.out_avals[0].shape[1])


@pytest.mark.parametrize("name", pools.__all__)
def test_every_pool(name):
    """As the head of a method has it: a function, a module, or an output of the net."""
    net = vit.ViT(width=8, heads=2, depth=1, patch=4, image_size=8, dtype="bfloat16")
    pool_fn = getattr(pools, name)
    if name == "learned_attention":
        pool_fn = functools.partial(pool_fn, heads=2)
    encoder = assemble.encoder(net, dim=None, pool_fn=pool_fn)
    images = jnp.zeros((1, 8, 8, 3))
    params, model_state, _ = jax.eval_shape(lambda: encoder.init(jax.random.key(0), images))

    def embed(params, model_state, images):
        return encoder.apply(params, model_state, images, train=False)[0]["features"]

    variables = {"params": params, "model_state": model_state}
    model, exported = _exported(embed, variables, (8, 8, 3))
    _check(exported, {"flatten": 4 * 8, "class_and_mean": 2 * 8}.get(name, 8))
    assert exported.out_avals[0].dtype == np.float32
    learned = {"learned_attention": "attention", "learned_gem": "gem"}.get(name)
    in_head = {path.split("/")[2] for path in model.tensors if path.startswith("params/head/")}
    assert in_head == ({learned} if learned else set())


@pytest.mark.parametrize("name", METHODS)
def test_every_method(name, tmp_path):
    """And its program takes what the embedding reads: no classifier, no proxies, no memory."""
    run = build(tiny(tmp_path, **METHODS[name]))
    variables = {"params": run.shapes.params, "model_state": run.shapes.model_state}
    model = models.model(run.method.embed, run.normalize_fn, variables, run.eval_image_shape)
    exported = models.stablehlo(model)
    _check(exported, METHODS[name]["method"]["dim"])
    everything = models.flat(variables)
    assert set(model.tensors) <= set(everything)
    left_out = {path.split("/")[1] for path in set(everything) - set(model.tensors)}
    expected = {"pairs": "memory", "proxies": "proxies", "graph": "graph", "dvml": "decoder"}
    expected["semantic_proxies"] = "proxies"
    assert (name == "abe" and not left_out) or expected[name] in left_out


def test_the_program_is_the_function():
    """Bitwise, for batches of several sizes, with the parameters as arguments."""
    net = nets.convnet(widths=(4, 8), strides=(2, 1))
    rng = np.random.default_rng(0)
    variables = net.init(jax.random.key(0), jnp.zeros((1, 8, 8, 3)), train=False)

    def embed(params, model_state, images):
        return net.apply(params, images, train=False)["pooled"]

    model, exported = _exported(embed, {"params": variables, "model_state": {}}, (8, 8, 3))
    loaded = export.deserialize(exported.serialize())
    for size in (1, 3, 8):
        images = rng.integers(0, 256, (size, 8, 8, 3), np.uint8)
        expected = jax.jit(model.embed_fn)(model.tensors, images)
        np.testing.assert_array_equal(jax.jit(loaded.call)(model.tensors, images), expected)
        other = {path: x + 1e-3 for path, x in model.tensors.items()}
        assert (np.asarray(jax.jit(loaded.call)(other, images)) != np.asarray(expected)).any()
