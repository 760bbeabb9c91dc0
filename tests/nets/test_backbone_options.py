"""Arguments of backbones: ranges of stages, types, frozen batch norm, remat; bad input."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backbone_cases import (
    CASES,
    NORMED,
    RANGED,
    assert_close,
    build,
    evaluate,
    images,
    jit,
    run,
    shapes,
    step_images,
    train_fn,
)
from torch_weights import fill

from dmljax import losses, methods, nets
from dmljax.config import registry
from dmljax.nets import layers

RANGES = {
    "bottleneck": ("layer2", "layer3", "layer4"),
    "basic": ("stem", "layer1", "layer2"),
    "googlenet": ("conv2", "pool2", "3a"),
    "googlenet_bn": ("conv2", "pool2", "3a"),
    "bn_inception": ("3b", "3c", "4a"),
    "mobilenet_v2": ("3", "4", "5"),
    "efficientnet_lite": ("stem", "0", "1"),
    "convnext": ("0", "1", "2"),
    "convnet": ("conv2", "conv3", "conv5"),
}


# Other options of the classes of `bottleneck` and `googlenet`.
ALIKE = ("basic", "googlenet_bn", "bn_inception", "mobilenet_v2")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in ALIKE)) for n in RANGED]
)
def test_consecutive_ranges_of_stages_equal_the_net(name):
    first, second, third = RANGES[name]
    outputs = evaluate(name)(fill(shapes(name)), images(name))
    head, tail = build(name, stop=first), build(name, start=second, stop=third)
    values = fill(shapes(name))
    middle = run(head, values, images(name))
    assert_close(middle["features"], outputs[first], 1e-5)
    assert second not in middle
    end = run(tail, values, middle["features"])
    assert_close(end["features"], outputs[third], 1e-5)
    assert first not in end and "logits" not in end

    size, channels = middle["features"].shape[2:]
    tail_shapes = layers.shapes(tail, size, channels=channels)
    of_range, of_net = (
        dict(jax.tree_util.tree_leaves_with_path(tree)) for tree in (tail_shapes, shapes(name))
    )
    assert of_range and of_range.items() <= of_net.items()


@pytest.mark.parametrize(
    ("name", "options", "first", "second"),
    [
        ("vit", {"registers": 2, "classes": None}, "0", "1"),
        ("convnext", {"blocks": (1, 3, 2, 1), "classes": None}, "1.0", "1.1"),
    ],
)
def test_nets_in_two_parts_that_are_split_at_a_block(name, options, first, second):
    net = build(name, **options)
    values, x = fill(layers.shapes(net, CASES[name].size)), images(name)
    head, tail = build(name, stop=first, **options), build(name, start=second, **options)
    expected, middle = run(net, values, x), run(head, values, x)
    inputs = {k: middle[k] for k in ("prefix",) if k in middle}
    assert inputs.keys() == ({"prefix"} if name == "vit" else set())
    end = jax.jit(lambda v, x, inputs: tail.apply(v, x, train=False, **inputs))(
        values, middle["features"], inputs
    )
    assert end.keys() <= expected.keys()
    for output in ("features", "pooled"):
        assert_close(end[output], expected[output], 1e-5)
    in_head = layers.shapes(head, CASES[name].size)["params"]
    assert ("pos_embed" in in_head) == ("pos_embed" in values["params"])
    assert "norm" not in in_head and "head" not in in_head


@pytest.mark.parametrize("name", [name for name in CASES if name not in ALIKE])
def test_bfloat16_is_the_type_of_activations_only(name):
    net, x = build(name, dtype="bfloat16"), images(name)

    def run(key, x):
        v = net.init(key, x, train=True)
        outputs, new = net.apply(v, x, train=True, mutable=["batch_stats"])
        return outputs, v, new

    outputs, v, new = jax.eval_shape(run, jax.random.key(0), x)
    assert {leaf.dtype for leaf in jax.tree.leaves((v, new))} == {np.dtype("float32")}
    dtypes = {key: value.dtype.name for key, value in outputs.items()}
    wide = {"pooled", "max_pooled", "class_and_mean", "logits", "embeddings"} & set(dtypes)
    assert {dtypes.pop(key) for key in wide} == {"float32"}
    assert set(dtypes.values()) == {"bfloat16"}


@pytest.mark.parametrize("name", NORMED)
def test_frozen_batch_norm_does_not_update_statistics(name):
    x = jax.ShapeDtypeStruct((2, CASES[name].size, CASES[name].size, 3), jnp.float32)

    def run(frozen):
        net = build(name, norm=layers.frozen_batch_norm if frozen else layers.batch_norm)
        jax.eval_shape(lambda v, x: net.apply(v, x, train=True), shapes(name), x)

    run(frozen=True)
    with pytest.raises(Exception, match="immutable"):
        run(frozen=False)


def test_frozen_batch_norm_trains_as_it_evaluates():
    values, x = fill(shapes("convnet")), images("convnet")
    directions = np.ones((4, 4, 4, 128), np.float32)
    (outputs, statistics), gradients = train_fn("convnet", norm=layers.frozen_batch_norm)(
        values, x, directions
    )
    assert_close(outputs["logits"], evaluate("convnet")(values, x)["logits"], 1e-5)
    jax.tree.map(np.testing.assert_array_equal, dict(statistics), values["batch_stats"])
    assert np.max(np.abs(gradients["conv1"]["bn"]["scale"])) > 0


@pytest.mark.parametrize("name", CASES)
def test_remat_is_in_the_program_and_changes_no_name(name):
    steps = CASES[name].steps
    plain, with_remat = build(name, **steps), build(name, remat=True, **steps)

    def trace(net):
        init = functools.partial(net.init_with_output, train=False)
        jaxpr, (_, v) = jax.make_jaxpr(init, return_shape=True)(
            jax.random.key(0), step_images(name)
        )
        return "checkpoint" in str(jaxpr) or "remat" in str(jaxpr), v

    (plain_has_remat, shapes), (has_remat, shapes_with_remat) = trace(plain), trace(with_remat)
    assert has_remat and not plain_has_remat
    assert shapes == shapes_with_remat


def test_remat_changes_no_value():
    """The recomputation does not update the statistics of batch norm again."""
    x = images("convnet", size=(16, 16))

    def step(**options):
        net = nets.convnet(widths=(4, 8), strides=(2, 2), **options)
        variables = net.init(jax.random.key(0), x, train=False)

        def loss(params):
            trained = {**variables, "params": params}
            outputs, new = net.apply(trained, x, train=True, mutable=["batch_stats"])
            return jnp.sum(outputs["pooled"] ** 2), (outputs, new)

        return jit(jax.grad(loss, has_aux=True))(variables["params"])

    plain, with_remat = step(), step(remat=True)
    assert max(float(jnp.max(leaf)) for leaf in jax.tree.leaves(plain[1][1])) > 0.1
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), plain, with_remat
    )


def test_initial_values_of_googlenet_are_those_of_caffe():
    net, key = nets.googlenet(stop="conv1"), jax.random.key(0)
    init = jit(lambda key: net.init(key, jnp.zeros((1, 16, 16, 3)), train=False))
    initial = init(key)["params"]["conv1"]["7x7_s2"]
    np.testing.assert_array_equal(initial["bias"], np.float32(0.2))
    bound = (3 / 147) ** 0.5  # uniform of variance 1 / (7 * 7 * 3)
    assert 0.99 * bound < float(jnp.max(jnp.abs(initial["kernel"]))) <= bound
    np.testing.assert_allclose(np.std(initial["kernel"]), 1 / 147**0.5, rtol=0.02)


@pytest.mark.parametrize("channels", [1, 3])
def test_convnet_takes_gray_and_color(channels):
    net = nets.convnet(widths=(4, 8), strides=(1, 2))
    v = layers.shapes(net, 16, channels=channels)
    assert v["params"]["conv1"]["conv"]["kernel"].shape == (3, 3, channels, 4)
    assert set(v["params"]) == {"conv1", "conv2"}


def test_a_config_names_a_net_and_its_options():
    net = registry.resolve("net", {"name": "resnet50", "last_stride": 1, "classes": 5})()
    assert (net.blocks, net.last_stride, net.classes) == ((3, 4, 6, 3), 1, 5)
    assert registry.resolve("net", "googlenet")().lrn_size == 5
    for name in ("resnet50", "googlenet", "bn_inception", "convnext_t", "vit_s16", "convnet"):
        with pytest.raises(ValueError, match=r"no argument 'clases': did you mean 'classes'\?"):
            registry.resolve("net", {"name": name, "clases": 5})
    with pytest.raises(ValueError, match="did you mean 'resnet50'"):
        registry.resolve("net", "resnet_50")


def zeros(*shape, dtype=np.float32):
    return jnp.zeros(shape, dtype)


@pytest.mark.parametrize(
    ("net", "shape", "message"),
    [
        (nets.resnet50(stop="layer5"), (2, 64, 64, 3), "resnet has no stage 'layer5'. It has"),
        (nets.googlenet(start="4f"), (2, 64, 64, 3), "no stage '4f'. It has: conv1, pool1"),
        (nets.resnet18(start="layer3", stop="stem"), (2, 64, 64, 3), "exchange start and stop"),
        (nets.resnet50(), (2, 64, 64, 4), "3 channels, not [2, 64, 64, 4]"),
        (nets.resnet50(start="layer2"), (2, 8, 8, 3), "'layer2' on takes [b h w c] with 256"),
        (nets.googlenet(), (64, 64, 3), "not [64, 64, 3]"),
        (nets.mobilenet_v2(start="5"), (2, 8, 8, 24), "32 channels, not"),
        (nets.efficientnet_lite0(start="3"), (2, 8, 8, 24), "'3' on takes [b h w c] with 40"),
        (nets.convnext_t(start="2.9"), (2, 8, 8, 384), "convnext has no stage '2.9'. It has"),
        (nets.convnext_t(start="2.4", stop="2.3"), (2, 8, 8, 384), "reaches stage '2.3' before"),
        (nets.convnext_t(start="1"), (2, 8, 8, 3), "'1' on takes [b h w c] with 96 channels"),
        (nets.vit_s16(stop="12"), (2, 32, 32, 3), "vit has no stage '12'"),
        (nets.vit_s16(start="3"), (2, 4, 4, 3), "'3' on takes [b h w c] with 384"),
        (nets.vit_s16(start="3"), (2, 4, 4, 384), "before the patches as `prefix` [b 1 384]"),
        (nets.bn_inception(), (2, 240, 240, 3), "15 x 15 pixels at '4e', which must be even"),
        (nets.bn_inception(), (2, 64, 64, 3, "uint8"), "as floats, not uint8"),
        (nets.vit_s16(), (2, 227, 227, 3), "227 pixels cannot be cut into patches of 16"),
        (nets.vit_s16(), (2, 0, 0, 3), "not [2, 0, 0, 3]"),
        (nets.unicom_b32(), (2, 256, 256, 3), "flattens the tokens of 224"),
        (nets.siglip_b16_224(pool="class"), (2, 224, 224, 3), "without a class token"),
        (nets.dinov2_s14(resize="x"), (2, 224, 224, 3), "resize is one of torch, torch_"),
        (nets.vit_s16(image_size=100), (2, 224, 224, 3), "image_size 100 must be a multiple"),
        (nets.lecun(), (2, 28, 28, 1), "not 28 x 28: pad the images of MNIST by 2"),
        (nets.lecun(), (2, 32, 32, 2), "1 or 3 channels, not"),
        (nets.convnet(strides=(2, 1)), (2, 32, 32, 3), "not 2 strides for 5 widths"),
        (nets.googlenet(), (2, 4, 4, 3), "a map of 2 pixels is too small for a window of 3"),
    ],
)
def test_bad_input_is_refused_in_one_line(net, shape, message, unchecked):
    *sides, dtype = shape if isinstance(shape[-1], str) else (*shape, "float32")
    x = jax.ShapeDtypeStruct(tuple(sides), dtype)
    with pytest.raises(ValueError) as error:
        jax.eval_shape(lambda k, x: net.init(k, x, train=False), jax.random.key(0), x)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


OUTSIDE = """
import typing
import flax.linen as nn
from dmljax.nets import layers

class TinyNet(nn.Module, kw_only=True):
    expected_normalization: typing.ClassVar = "unit"
    width: int = 4

    @nn.compact
    def __call__(self, images, *, train):
        x = layers.ConvNorm(self.width, 3, strides=2, name="conv1")(images, train=train)
        return layers.add_pooled({"conv1": x}, x)
"""


def test_a_backbone_of_another_package_trains_in_a_method(tmp_path, monkeypatch):
    (tmp_path / "my_nets.py").write_text(OUTSIDE)
    monkeypatch.syspath_prepend(tmp_path)
    net = registry.resolve("net", {"name": "my_nets:TinyNet", "width": 6})()
    assert net.expected_normalization == "unit"
    method = methods.pairs(net, losses.triplet, classes=2, dim=3)
    batch = {"images": zeros(2, 8, 8, 3), "labels": zeros(2, dtype=np.int32)}
    params, _ = jax.eval_shape(lambda key: method.init(key, batch), jax.random.key(0))
    assert params["net"]["conv1"]["conv"]["kernel"].shape == (3, 3, 3, 6)
