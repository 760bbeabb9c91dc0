"""Small versions of all backbones, and their compiled functions, for several test files."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dmljax import nets
from dmljax.nets import layers
from dmljax.nets.convnext import ConvNeXt
from dmljax.nets.efficientnet import EfficientNetLite
from dmljax.nets.resnet import ResNet
from dmljax.nets.vit import ViT

# Optimizing the programs would take nearly all of the time of these tests.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


class Case(NamedTuple):
    """A small net.

    `reference` is its form in PyTorch; nets without one are compared in test_published.py. A
    training step is compared on the stages of `steps` only, because compiling takes long.
    """

    net: Callable
    reference: str | None = None
    size: int = 64
    channels: int = 3
    steps: dict[str, str] = {}  # noqa: RUF012
    map_shape: tuple[int, int, int] | None = None  # the input of the first of these stages


BOTTLENECK = {"blocks": (2, 1, 1, 1), "bottleneck": True, "width": 8}
BASIC = {"blocks": (1, 1, 1, 1), "bottleneck": False, "width": 8, "last_stride": 1}
VIT = {"width": 32, "heads": 2, "depth": 2, "patch": 8, "image_size": 32}
LITE = {"multiplier": 0.5, "depth": 0.4}
CONVNEXT = {"width": 8, "blocks": (1, 2, 1, 1)}
CASES = {
    "bottleneck": Case(
        functools.partial(ResNet, **BOTTLENECK),
        steps={"start": "layer1", "stop": "layer2"},
        map_shape=(8, 8, 8),
    ),
    "basic": Case(functools.partial(ResNet, **BASIC), steps={"start": "stem", "stop": "layer2"}),
    "googlenet": Case(
        nets.googlenet,
        "googlenet:Caffe",
        steps={"start": "3a", "stop": "3a"},
        map_shape=(8, 8, 192),
    ),
    "googlenet_bn": Case(
        functools.partial(nets.googlenet_bn, transform_input=False),
        "googlenet:Torchvision",
        steps={"start": "3a", "stop": "3a"},
        map_shape=(8, 8, 192),
    ),
    "bn_inception": Case(
        nets.bn_inception,
        "bn_inception:BNInception",
        steps={"start": "3c", "stop": "3c"},
        map_shape=(8, 8, 320),
    ),
    "mobilenet_v2": Case(
        nets.mobilenet_v2, steps={"start": "1", "stop": "3"}, map_shape=(16, 16, 32)
    ),
    "efficientnet_lite": Case(
        functools.partial(EfficientNetLite, **LITE),
        size=66,  # "same" padding differs between even and odd sides
        steps={"start": "0", "stop": "1"},
        map_shape=(17, 16, 32),
    ),
    "convnext": Case(
        functools.partial(ConvNeXt, **CONVNEXT),
        steps={"start": "1", "stop": "1"},
        map_shape=(8, 8, 8),
    ),
    "vit": Case(functools.partial(ViT, **VIT), size=32),
    "lecun": Case(nets.lecun, size=32, channels=1),
    "convnet": Case(nets.convnet, size=32),
}
REFERENCED = [name for name in CASES if CASES[name].reference]
NORMED = [name for name in CASES if name not in ("googlenet", "convnext", "vit", "lecun")]
RANGED = [name for name in CASES if name not in ("vit", "lecun")]


def build(name, **keywords):
    # The classifier fits the features of the last stage only.
    classes = {} if name == "lecun" else {"classes": None if "stop" in keywords else 10}
    return CASES[name].net(**classes | keywords)


def images(name, batch=4, size=None):
    case = CASES[name]
    size = size or (case.size, case.size)
    return np.random.default_rng(7).normal(size=(batch, *size, case.channels)).astype(np.float32)


@functools.cache
def shapes(name):
    return layers.shapes(build(name), CASES[name].size, channels=CASES[name].channels)


def run(net, values, x):
    return jit(lambda v, x: net.apply(v, x, train=False))(values, x)


@functools.cache
def evaluate(name):
    net = build(name)
    return jit(lambda v, x: net.apply(v, x, train=False))


def step_images(name):
    shape = CASES[name].map_shape
    if shape is None:
        return images(name)
    return np.random.default_rng(9).normal(size=(4, *shape)).astype(np.float32)


def train_fn(name, **keywords):
    """(variables, x, directions) -> (outputs, statistics), gradients along `directions`."""
    net = build(name, **CASES[name].steps | keywords)

    def loss(params, v, x, directions):
        v = {**v, "params": params}
        outputs, new = net.apply(v, x, train=True, mutable=["batch_stats"])
        loss = jnp.sum(outputs["features"] * directions) + jnp.sum(outputs["pooled"] ** 2)
        return loss, (outputs, new.get("batch_stats", {}))

    grad = jax.grad(loss, has_aux=True)

    @jit
    def step(v, x, directions):
        gradients, aux = grad(v["params"], v, x, directions)
        return aux, gradients

    return step


compiled_train = functools.cache(train_fn)


def assert_close(ours, theirs, tolerance=1e-4):
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    assert ours.shape == theirs.shape
    assert np.max(np.abs(theirs)) > 1e-3
    assert np.max(np.abs(ours - theirs)) <= tolerance * np.max(np.abs(theirs))
