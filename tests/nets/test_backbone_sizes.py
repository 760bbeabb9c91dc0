"""Numbers of parameters and operations, and sizes of feature maps, as published."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dmljax import nets
from dmljax.nets import layers


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
        ("efficientnet_lite0", 64, 4_652_008),
        ("efficientnet_lite1", 64, 5_416_680),
        ("efficientnet_lite2", 64, 6_092_072),
        ("convnext_t", 64, 28_589_128),
        ("convnext_b", 64, 88_591_464),
        ("convnext_l", 64, 197_767_336),
        ("vit_s16", 224, 22_050_664),
        ("vit_b16", 224, 86_567_656),
    ],
)
def test_parameters_with_a_thousand_classes(name, size, parameters):
    assert count(getattr(nets, name)(classes=1000), size) == parameters


def test_parameters_of_the_published_systems():
    reduction = 2048 * 512 + 512
    for classes, total in ((98, 24_607_394), (100, 24_608_420), (11_318, 30_363_254)):
        assert count(nets.resnet50()) + reduction + 513 * classes == total
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


@functools.cache
def _outputs(net, size):
    x = jax.ShapeDtypeStruct((2, size, size, 3), jnp.float32)
    key = jax.random.key(0)
    return jax.eval_shape(lambda k, x: net.init_with_output(k, x, train=False)[0], key, x)


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
    outputs = _outputs(net, size)
    assert outputs[stage].shape == (2, *shape)
    assert outputs["pooled"].shape == (2, outputs["features"].shape[-1])


def test_narrow_and_wide_mobilenets_round_their_widths():
    # Torchvision's counts for these multipliers.
    assert count(nets.mobilenet_v2(multiplier=0.5, classes=1000)) == 1_968_680
    assert count(nets.mobilenet_v2(multiplier=1.4, classes=1000)) == 6_108_776
