"""Every backbone against PyTorch, stage by stage; sizes, ranges of stages, options, bad input."""

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from operations import multiply_adds
from torch_weights import fill, randomize, variables

from dmljax import nets
from dmljax.nets import layers
from dmljax.nets.resnet import ResNet
from dmljax.nets.vit import ViT
from dmljax.train import registry

# Compiling is nearly all of the time; the arithmetic is the same.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


class Case(NamedTuple):
    """A small net, and the stages through which gradients are compared: compiling takes long."""

    net: Callable
    reference: str
    keywords: dict[str, Any]
    size: int = 64
    channels: int = 3
    steps: dict[str, str] = {}  # noqa: RUF012
    map_shape: tuple[int, int, int] | None = None  # that the first of these stages takes


BOTTLENECK = {"blocks": (2, 1, 1, 1), "bottleneck": True, "width": 8}
BASIC = {"blocks": (1, 1, 1, 1), "bottleneck": False, "width": 8, "last_stride": 1}
VIT = {"width": 32, "heads": 2, "depth": 2, "patch": 8, "image_size": 32}
CASES = {
    "bottleneck": Case(
        functools.partial(ResNet, **BOTTLENECK),
        "resnet:ResNet",
        BOTTLENECK,
        steps={"start": "layer1", "stop": "layer2"},
        map_shape=(8, 8, 8),
    ),
    "basic": Case(
        functools.partial(ResNet, **BASIC),
        "resnet:ResNet",
        BASIC,
        steps={"start": "stem", "stop": "layer2"},
    ),
    "googlenet": Case(
        nets.googlenet,
        "googlenet:Caffe",
        {},
        steps={"start": "3a", "stop": "3a"},
        map_shape=(8, 8, 192),
    ),
    "googlenet_bn": Case(
        functools.partial(nets.googlenet_bn, transform_input=False),
        "googlenet:Torchvision",
        {},
        steps={"start": "3a", "stop": "3a"},
        map_shape=(8, 8, 192),
    ),
    "bn_inception": Case(
        nets.bn_inception,
        "bn_inception:BNInception",
        {},
        steps={"start": "3c", "stop": "3c"},
        map_shape=(8, 8, 320),
    ),
    "mobilenet_v2": Case(
        nets.mobilenet_v2,
        "mobilenet:MobileNetV2",
        {},
        steps={"start": "1", "stop": "3"},
        map_shape=(16, 16, 32),
    ),
    "vit": Case(functools.partial(ViT, **VIT), "vit:ViT", VIT, size=32),
    "lecun": Case(nets.lecun, "small:Lecun", {}, size=32, channels=1),
    "convnet": Case(nets.convnet, "small:ConvNet", {}, size=32),
}
NORMED = [name for name in CASES if name not in ("googlenet", "vit", "lecun")]
RANGED = [name for name in CASES if name not in ("vit", "lecun")]


def build(name, **keywords):
    # What ends early has other features than the classifier of the whole net was made for.
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


def reference(name, **keywords):
    """With random values, and those values as variables of ours."""
    pytest.importorskip("torch")
    module, _, cls = CASES[name].reference.partition(":")
    cls = getattr(importlib.import_module(f"reference_{module}"), cls)
    net = randomize(cls(**CASES[name].keywords | keywords))
    return net, variables({k: v.numpy().copy() for k, v in net.state_dict().items()})


def to_torch(x):
    return importlib.import_module("torch").from_numpy(np.asarray(x)).permute(0, 3, 1, 2)


def to_numpy(x):
    x = x.detach().numpy()
    return x.transpose(0, 2, 3, 1) if x.ndim == 4 else x


def assert_close(ours, theirs, tolerance=1e-4):
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    assert ours.shape == theirs.shape
    assert np.max(np.abs(theirs)) > 1e-3
    assert np.max(np.abs(ours - theirs)) <= tolerance * np.max(np.abs(theirs))


# --- the same numbers as PyTorch ----------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_every_stage_agrees_with_pytorch(name):
    net, values = reference(name)
    assert jax.tree.map(jnp.shape, values) == jax.tree.map(lambda s: s.shape, shapes(name))
    x = images(name)
    ours = dict(evaluate(name)(values, x))
    theirs = {key: to_numpy(value) for key, value in net.eval()(to_torch(x)).items()}
    assert_close(ours["max_pooled"], theirs["features"].max((1, 2)))
    if name == "lecun":
        ours["logits"] = ours.pop("embeddings")
    assert set(ours) - {"max_pooled"} == set(theirs)
    for key, value in theirs.items():
        assert_close(ours[key], value)


def check_step(name, step, dtype, tolerance):
    net, values = reference(name)
    values = jax.tree.map(lambda a: a.astype(dtype), values)
    x = step_images(name).astype(dtype)
    theirs = net.to(to_torch(x).dtype).train()(to_torch(x), **CASES[name].steps)
    shape = to_numpy(theirs["features"]).shape
    directions = np.random.default_rng(8).normal(size=shape).astype(dtype)
    ((theirs["features"] * to_torch(directions)).sum() + (theirs["pooled"] ** 2).sum()).backward()
    (outputs, statistics), gradients = step(values, x, directions)
    assert_close(outputs["features"], to_numpy(theirs["features"]), tolerance / 10)

    state = {k: v.numpy() for k, v in net.state_dict().items()}
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4),
        dict(statistics),
        variables(state).get("batch_stats", {}),
    )
    expected = {
        path: np.zeros(p.shape, dtype) if p.grad is None else p.grad.numpy()
        for path, p in net.named_parameters()
    }
    expected = variables(expected)["params"]
    # A bias before a batch norm has no gradient but rounding, hence the absolute part.
    largest = max(np.max(np.abs(leaf)) for leaf in jax.tree.leaves(expected))

    def compare(a, b):
        assert np.max(np.abs(a - b)) <= tolerance * max(np.max(np.abs(b)), 1e-3 * largest)

    jax.tree.map(compare, gradients, expected)
    moving = [leaf for leaf in jax.tree.leaves(expected) if np.max(np.abs(leaf)) > 1e-3 * largest]
    assert len(moving) >= 4


HEAVY = {"bn_inception", "googlenet_bn", "mobilenet_v2"}  # minutes of compiling


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in HEAVY)) for n in CASES]
)
def test_a_training_step_agrees_with_pytorch(name):
    check_step(name, compiled_train(name), np.float32, 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if CASES[name].map_shape])
def test_a_training_step_of_the_whole_net_agrees_with_pytorch(name, monkeypatch):
    # In float32, rounding decides some relus and maxima of a deep net, and its gradients differ.
    monkeypatch.setitem(CASES, name, CASES[name]._replace(steps={}, map_shape=None, size=96))
    with jax.enable_x64(True):
        check_step(name, train_fn(name), np.float64, 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("depth", [18, 34, 50, 101, 152])
def test_full_resnets_agree_with_pytorch(depth, monkeypatch):
    net = getattr(nets, f"resnet{depth}")
    keywords = {key: net.keywords[key] for key in ("blocks", "bottleneck")}
    monkeypatch.setitem(CASES, f"resnet{depth}", Case(net, "resnet:ResNet", keywords))
    test_every_stage_agrees_with_pytorch(f"resnet{depth}")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit_s16", "vit_b16"])
def test_full_transformers_agree_with_pytorch(name, monkeypatch):
    net = getattr(nets, name)
    keywords = net.keywords | {"depth": 12, "patch": 16, "image_size": 224}
    monkeypatch.setitem(CASES, name, Case(net, "vit:ViT", keywords, size=224))
    test_every_stage_agrees_with_pytorch(name)


def test_transformer_takes_images_of_other_sizes():
    net, values = reference("vit")
    for size in ((40, 24), (16, 16)):
        x = images("vit", size=size)
        ours = evaluate("vit")(values, x)
        theirs = net(to_torch(x))
        for key in ("features", "pooled"):
            assert_close(ours[key], to_numpy(theirs[key]))


def test_googlenet_with_the_response_norms_of_dvmls_code():
    lrn = {"lrn_size": 11, "lrn_alpha": 11e-4}
    net, values = reference("googlenet", lrn=(11, 11e-4))
    x = 60 * images("googlenet")
    ours = run(nets.googlenet(stop="pool2", **lrn), values, x)["features"]
    assert_close(ours, to_numpy(net(to_torch(x), stop="pool2")["features"]))
    plain = run(nets.googlenet(stop="pool2"), values, x)["features"]
    assert np.max(np.abs(ours - plain)) > 0.01 * np.max(ours)


def test_googlenet_bn_scales_imagenet_input_to_unit_range():
    pixels = np.random.default_rng(0).uniform(size=(1, 32, 32, 3)).astype(np.float32)
    normal = (pixels - np.float32([0.485, 0.456, 0.406])) / np.float32([0.229, 0.224, 0.225])
    plain = nets.googlenet_bn(stop="conv1", transform_input=False)
    values = fill(layers.shapes(plain, 32))
    expected = plain.apply(values, 2 * pixels - 1, train=False)["features"]
    scaled = nets.googlenet_bn(stop="conv1")
    assert_close(scaled.apply(values, normal, train=False)["features"], expected, 1e-5)
    # The map of a later stage is no image.
    late = {"start": "pool1", "stop": "pool1"}
    plain = nets.googlenet_bn(transform_input=False, **late)
    scaled = nets.googlenet_bn(**late)
    a, b = (net.apply({}, expected, train=False)["features"] for net in (scaled, plain))
    np.testing.assert_array_equal(a, b)


GOLDEN = {
    "bottleneck": (13.404375, 15.390230),
    "basic": (-10.682175, -8.753193),
    "googlenet": (8.698211, 8.208907),
    "googlenet_bn": (12.996244, 12.506556),
    "bn_inception": (-7.293233, -6.654482),
    "mobilenet_v2": (-2.556430, -2.417935),
    "vit": (-1.079474, 0.594977),
    "lecun": (0.683973, 1.142453),
    "convnet": (-1.044481, -1.327793),
}


@pytest.mark.parametrize("name", CASES)
def test_numbers_stay_what_they_were_when_they_agreed_with_pytorch(name):
    outputs = evaluate(name)(fill(shapes(name)), images(name))
    last = outputs["embeddings" if name == "lecun" else "logits"]
    np.testing.assert_allclose(last[:2, 0], GOLDEN[name], rtol=1e-4)


# --- sizes --------------------------------------------------------------------------------------


def count(net, size=64, channels=3):
    params = layers.shapes(net, size, channels=channels)["params"]
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize(
    ("name", "size", "parameters"),
    [
        ("resnet18", 64, 11_689_512),
        ("resnet34", 64, 21_797_672),
        ("resnet50", 64, 25_557_032),
        ("resnet101", 64, 44_549_160),
        ("resnet152", 64, 60_192_808),
        ("googlenet", 64, 6_998_552),
        ("googlenet_bn", 64, 6_624_904),
        ("bn_inception", 64, 11_295_240),
        ("mobilenet_v2", 64, 3_504_872),
        ("vit_s16", 224, 22_050_664),
        ("vit_b16", 224, 86_567_656),
    ],
)
def test_parameters_with_a_thousand_classes(name, size, parameters):
    assert count(getattr(nets, name)(classes=1000), size) == parameters


def test_parameters_of_the_published_systems():
    red = 2048 * 512 + 512
    for classes, total in ((98, 24_607_394), (100, 24_608_420), (11_318, 30_363_254)):
        assert count(nets.resnet50()) + red + 513 * classes == total
    assert count(nets.lecun(), 32, channels=1) == 37_097
    assert count(nets.lecun(dim=None), 32, channels=1) == 555 + 36_480

    low = count(nets.googlenet(stop="pool3"))
    middle = count(nets.googlenet(start="4a", stop="4e"), 14, channels=480)
    high = count(nets.googlenet(start="pool4"), 14, channels=832)
    assert (low, middle, high) == (676_848, 2_809_168, 2_487_536)
    assert count(nets.googlenet()) == 5_973_552
    for learners, total in ((1, 9_707_360), (2, 9_844_800), (4, 10_513_280), (8, 12_047_040)):
        masks, embedding = learners * (832 * 480 + 480), 1025 * 512 // learners
        assert low + middle + masks + middle + high + embedding == total


def test_multiply_adds_of_googlenet():
    for start, stop, size, channels, total in (
        ("conv1", "3b", 224, 3, 909_991_936),
        ("4a", "4e", 14, 480, 549_878_784),
        ("5a", "5b", 7, 832, 121_777_152),
    ):
        net = nets.googlenet(start=start, stop=stop)
        variables = layers.shapes(net, size, channels=channels)
        x = jax.ShapeDtypeStruct((1, size, size, channels), jnp.float32)
        jaxpr = jax.make_jaxpr(lambda v, x, net=net: net.apply(v, x, train=False))(variables, x)
        assert multiply_adds(jaxpr.jaxpr) == total


@pytest.mark.parametrize(
    ("net", "size", "stage", "shape"),
    [
        (nets.resnet50(), 227, "stem", (57, 57, 64)),
        (nets.resnet50(), 227, "layer4", (8, 8, 2048)),
        (nets.resnet50(last_stride=1), 227, "layer4", (15, 15, 2048)),
        (nets.resnet18(), 224, "layer4", (7, 7, 512)),
        (nets.googlenet(), 224, "conv1", (112, 112, 64)),
        (nets.googlenet(), 224, "pool3", (14, 14, 480)),
        (nets.googlenet(), 227, "pool1", (57, 57, 64)),
        (nets.googlenet(), 227, "pool2", (28, 28, 192)),
        (nets.googlenet(), 227, "5b", (7, 7, 1024)),
        (nets.googlenet_bn(), 224, "5b", (7, 7, 1024)),
        (nets.bn_inception(), 227, "3c", (14, 14, 576)),
        (nets.bn_inception(), 224, "5b", (7, 7, 1024)),
        (nets.mobilenet_v2(), 224, "18", (7, 7, 1280)),
        (nets.vit_s16(), 224, "features", (14, 14, 384)),
        (nets.convnet(), 64, "features", (8, 8, 128)),
    ],
)
def test_maps_have_the_published_sizes(net, size, stage, shape):
    x = jax.ShapeDtypeStruct((2, size, size, 3), jnp.float32)
    key = jax.random.key(0)
    outputs = jax.eval_shape(lambda k, x: net.init_with_output(k, x, train=False)[0], key, x)
    assert outputs[stage].shape == (2, *shape)
    assert outputs["pooled"].shape == (2, outputs["features"].shape[-1])


def test_narrow_and_wide_mobilenets_round_their_widths():
    # Torchvision's counts for these multipliers.
    assert count(nets.mobilenet_v2(multiplier=0.5, classes=1000)) == 1_968_680
    assert count(nets.mobilenet_v2(multiplier=1.4, classes=1000)) == 6_108_776


# --- ranges of stages ---------------------------------------------------------------------------

RANGES = {
    "bottleneck": ("layer2", "layer3", "layer4"),
    "basic": ("stem", "layer1", "layer2"),
    "googlenet": ("conv2", "pool2", "3a"),
    "googlenet_bn": ("conv2", "pool2", "3a"),
    "bn_inception": ("3b", "3c", "4a"),
    "mobilenet_v2": ("3", "4", "5"),
    "convnet": ("conv2", "conv3", "conv5"),
}


@pytest.mark.parametrize("name", RANGED)
def test_ranges_of_stages_make_up_the_whole(name):
    first, second, third = RANGES[name]
    whole = evaluate(name)(fill(shapes(name)), images(name))
    head, tail = build(name, stop=first), build(name, start=second, stop=third)
    values = fill(shapes(name))
    middle = run(head, values, images(name))
    assert_close(middle["features"], whole[first], 1e-5)
    assert second not in middle
    end = run(tail, values, middle["features"])
    assert_close(end["features"], whole[third], 1e-5)
    assert first not in end and "logits" not in end

    size, channels = middle["features"].shape[2:]
    part = layers.shapes(tail, size, channels=channels)
    flat, whole = (dict(jax.tree_util.tree_leaves_with_path(t)) for t in (part, shapes(name)))
    assert flat and flat.items() <= whole.items()


# --- options ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_bfloat16_computes_but_does_not_keep(name):
    net, x = build(name, dtype="bfloat16"), images(name)

    def run(key, x):
        v = net.init(key, x, train=True)
        outputs, new = net.apply(v, x, train=True, mutable=["batch_stats"])
        return outputs, v, new

    outputs, v, new = jax.eval_shape(run, jax.random.key(0), x)
    assert {leaf.dtype for leaf in jax.tree.leaves((v, new))} == {np.dtype("float32")}
    kinds = {key: value.dtype.name for key, value in outputs.items()}
    wide = {"pooled", "max_pooled", "logits", "embeddings"} & set(kinds)
    assert {kinds.pop(key) for key in wide} == {"float32"}
    assert set(kinds.values()) == {"bfloat16"}


def test_bfloat16_is_near_float32():
    values, x = fill(shapes("convnet")), images("convnet")
    exact = evaluate("convnet")(values, x)["logits"]
    near = run(build("convnet", dtype="bfloat16"), values, x)["logits"]
    assert 1e-6 < np.max(np.abs(near - exact)) / np.max(np.abs(exact)) < 0.05


@pytest.mark.parametrize("name", NORMED)
def test_frozen_batch_norms_leave_all_statistics_alone(name):
    x = jax.ShapeDtypeStruct((2, CASES[name].size, CASES[name].size, 3), jnp.float32)

    def run(frozen):
        net = build(name, frozen=frozen)
        jax.eval_shape(lambda v, x: net.apply(v, x, train=True), shapes(name), x)

    run(frozen=True)
    with pytest.raises(Exception, match="immutable"):
        run(frozen=False)


def test_frozen_batch_norms_train_as_they_evaluate():
    values, x = fill(shapes("convnet")), images("convnet")
    directions = np.ones((4, 4, 4, 128), np.float32)
    (outputs, statistics), gradients = train_fn("convnet", frozen=True)(values, x, directions)
    assert_close(outputs["logits"], evaluate("convnet")(values, x)["logits"], 1e-5)
    jax.tree.map(np.testing.assert_array_equal, dict(statistics), values["batch_stats"])
    assert np.max(np.abs(gradients["conv1"]["bn"]["scale"])) > 0


@pytest.mark.parametrize("name", NORMED)
def test_momentum_is_the_share_of_the_batch(name):
    values, x = fill(shapes(name)), images(name)
    first = {"bottleneck": "stem", "basic": "stem", "mobilenet_v2": "0"}.get(name, "conv1")
    net = build(name, stop=first, momentum=0.0)  # the training step above has another
    step = jit(functools.partial(net.apply, train=True, mutable=["batch_stats"]))
    jax.tree.map(
        np.testing.assert_array_equal,
        dict(step(values, x)[1]["batch_stats"]),
        values["batch_stats"],
    )


@pytest.mark.parametrize("name", CASES)
def test_remat_is_there_and_changes_no_name(name):
    steps = CASES[name].steps
    kept, again = build(name, **steps), build(name, remat=True, **steps)

    def trace(net):
        init = functools.partial(net.init_with_output, train=False)
        jaxpr, (_, v) = jax.make_jaxpr(init, return_shape=True)(
            jax.random.key(0), step_images(name)
        )
        return "checkpoint" in str(jaxpr) or "remat" in str(jaxpr), v

    (there, plain), (here, same) = trace(kept), trace(again)
    assert here and not there
    assert plain == same


SLOW = ("basic", "bn_inception", "vit", "googlenet")
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in SLOW]


@pytest.mark.parametrize("name", ["convnet", *SLOW])
def test_remat_changes_no_value(name):
    values, x = fill(shapes(name)), step_images(name)
    net = build(name, **CASES[name].steps)
    outputs = jax.eval_shape(functools.partial(net.apply, train=False), values, x)
    directions = np.ones(outputs["features"].shape, "float32")
    kept, again = (
        step(values, x, directions) for step in (compiled_train(name), train_fn(name, remat=True))
    )
    largest = max(float(jnp.max(jnp.abs(leaf))) for leaf in jax.tree.leaves(kept[1]))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5 * largest), kept, again
    )
    jax.tree.map(  # statistics of the batch are taken in once, not twice
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), kept[0], again[0]
    )


def test_fresh_caffe_googlenet_starts_as_in_caffe():
    net, key = nets.googlenet(stop="conv1"), jax.random.key(0)
    init = jit(lambda key: net.init(key, jnp.zeros((1, 16, 16, 3)), train=False))
    fresh = init(key)["params"]["conv1"]["7x7_s2"]
    np.testing.assert_array_equal(fresh["bias"], np.float32(0.2))
    bound = (3 / 147) ** 0.5  # uniform of variance 1 / (7 * 7 * 3)
    assert 0.99 * bound < float(jnp.max(jnp.abs(fresh["kernel"]))) <= bound
    np.testing.assert_allclose(np.std(fresh["kernel"]), 1 / 147**0.5, rtol=0.02)


@pytest.mark.parametrize("channels", [1, 3])
def test_convnet_takes_grey_and_colour(channels):
    net = nets.convnet(widths=(4, 8), strides=(1, 2))
    v = layers.shapes(net, 16, channels=channels)
    assert v["params"]["conv1"]["conv"]["kernel"].shape == (3, 3, channels, 4)
    assert set(v["params"]) == {"conv1", "conv2"}


# --- names and bad input ------------------------------------------------------------------------


def test_configs_name_nets_and_their_options():
    net = registry.resolve("net", {"name": "resnet50", "last_stride": 1, "classes": 5})()
    assert (net.blocks, net.last_stride, net.classes) == ((3, 4, 6, 3), 1, 5)
    assert registry.resolve("net", "googlenet")().lrn_size == 5
    for name in ("resnet50", "googlenet", "bn_inception", "mobilenet_v2", "vit_s16", "convnet"):
        with pytest.raises(TypeError, match=r"no argument 'clases': did you mean 'classes'\?"):
            registry.resolve("net", {"name": name, "clases": 5})
    with pytest.raises(ValueError, match="did you mean 'resnet50'"):
        registry.resolve("net", "resnet_50")


def zeros(*shape, dtype=np.float32):
    return jnp.zeros(shape, dtype)


@pytest.mark.parametrize(
    ("net", "x", "message"),
    [
        (nets.resnet50(stop="layer5"), zeros(2, 64, 64, 3), "resnet has no stage 'layer5'. It has"),
        (nets.googlenet(start="4f"), zeros(2, 64, 64, 3), "no stage '4f'. It has: conv1, pool1"),
        (
            nets.resnet18(start="layer3", stop="stem"),
            zeros(2, 64, 64, 3),
            "exchange start and stop",
        ),
        (nets.resnet50(), zeros(2, 64, 64, 4), "3 channels, not [2, 64, 64, 4]"),
        (nets.resnet50(start="layer2"), zeros(2, 8, 8, 3), "'layer2' on takes [b h w c] with 256"),
        (nets.googlenet(start="4a"), zeros(2, 14, 14, 3), "'4a' on takes [b h w c] with 480"),
        (nets.googlenet(), zeros(64, 64, 3), "not [64, 64, 3]"),
        (nets.googlenet_bn(), zeros(2, 3, 64, 64), "3 channels, not [2, 3, 64, 64]"),
        (nets.mobilenet_v2(start="5"), zeros(2, 8, 8, 24), "32 channels, not"),
        (nets.bn_inception(), zeros(2, 240, 240, 3), "15 x 15 pixels at '4e', which must be even"),
        (nets.bn_inception(), zeros(2, 64, 64, 3, dtype="uint8"), "as floats, not uint8"),
        (
            nets.vit_s16(),
            zeros(2, 227, 227, 3),
            "227 x 227 pixels cannot be cut into patches of 16",
        ),
        (nets.vit_s16(), zeros(2, 0, 0, 3), "1 pixels or more, not 0 x 0"),
        (nets.vit_s16(image_size=100), zeros(2, 224, 224, 3), "image_size 100 must be a multiple"),
        (nets.lecun(), zeros(2, 28, 28, 1), "32 x 32 pixels, not 28 x 28: pad those of MNIST by 2"),
        (nets.lecun(), zeros(2, 32, 32, 2), "1 or 3 channels, not"),
        (nets.convnet(strides=(2, 1)), zeros(2, 32, 32, 3), "not 2 strides for 5 widths"),
        (nets.convnet(stop="conv6"), zeros(2, 32, 32, 3), "no stage 'conv6'"),
        (nets.googlenet(), zeros(2, 4, 4, 3), "a map of 2 pixels is too small for a window of 3"),
    ],
)
def test_bad_input_gets_one_clear_line(net, x, message, unchecked):
    with pytest.raises(ValueError) as error:
        jax.eval_shape(lambda k, x: net.init(k, x, train=False), jax.random.key(0), x)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
