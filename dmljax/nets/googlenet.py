"""GoogLeNet (Szegedy et al., CVPR 2015) and BN-Inception (Ioffe & Szegedy, ICML 2015).

GoogLeNet is Caffe's net, or the one that torchvision distributes. They are different nets and
cannot share weights. Published results with "GoogLeNet" mean Caffe's. Stages of both: `conv1 pool1
conv2 pool2 3a 3b pool3 4a 4b 4c 4d 4e pool4 5a 5b`. A response norm belongs to the stage before it.

The published weights of BN-Inception were converted from Caffe. Its convolutions have biases
although a batch norm follows, and its parameters have no hierarchy: `inception_3a_3x3_reduce`.
`dmljax.nets` documents what all backbones share.
"""

import functools
from collections.abc import Callable, Mapping
from typing import ClassVar

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from dmljax.nets import files, layers
from dmljax.nets.initializers import caffe_xavier, truncated_normal
from dmljax.nets.layers import BatchNorm, named
from dmljax.ops import Array

__all__ = ["bn_inception", "googlenet", "googlenet_bn"]

_Inceptions = dict[str, tuple[int, int, int, int, int, int]]

# Widths: 1x1; 3x3 reduce, 3x3; 5x5 reduce, 5x5; pool projection.
_GOOGLENET: _Inceptions = {
    "3a": (64, 96, 128, 16, 32, 32),
    "3b": (128, 128, 192, 32, 96, 64),
    "4a": (192, 96, 208, 16, 48, 64),
    "4b": (160, 112, 224, 24, 64, 64),
    "4c": (128, 128, 256, 24, 64, 64),
    "4d": (112, 144, 288, 32, 64, 64),
    "4e": (256, 160, 320, 32, 128, 128),
    "5a": (256, 160, 320, 32, 128, 128),
    "5b": (384, 192, 384, 48, 128, 128),
}
# Widths: 1x1; 3x3 reduce, 3x3; double 3x3 reduce, double 3x3; pool projection. A block without the
# first and the last halves the feature map and passes its input on through a max pool.
_BN_INCEPTION: _Inceptions = {
    "3a": (64, 64, 64, 64, 96, 32),
    "3b": (64, 64, 96, 64, 96, 64),
    "3c": (0, 128, 160, 64, 96, 0),
    "4a": (224, 64, 96, 96, 128, 128),
    "4b": (192, 96, 128, 96, 128, 128),
    "4c": (160, 128, 160, 128, 160, 128),
    "4d": (96, 128, 192, 160, 192, 128),
    "4e": (0, 128, 192, 192, 256, 0),
    "5a": (352, 192, 320, 160, 224, 128),
    "5b": (352, 192, 320, 192, 224, 128),
}


def _channels(inceptions: _Inceptions, pools: tuple[str, ...] = ()) -> dict[str, int]:
    """Computes the channels of all stages; each of `pools` has one more pool behind it."""
    channels, last = {"conv1": 64, "pool1": 64, "conv2": 192, "pool2": 192}, 192
    for stage, (one, _, three, _, third, project) in inceptions.items():
        last = channels[stage] = one + three + third + (project or last)
        if stage in pools:
            channels[f"pool{stage[0]}"] = last
    return channels


class GoogLeNet(layers.Backbone, kw_only=True):
    """Caffe's `bvlc_googlenet`: biases, no batch norm, local response norms, real 5x5 kernels.

    The auxiliary classifiers and the dropout of its training are left out. The published code of
    DVML computes the response norms over 11 channels and does not divide alpha = 1e-4 by 11:
    `lrn_size=11, lrn_alpha=1.1e-3`. `pools=False` leaves out pool2, pool3 and pool4: feature maps
    keep their size, and the parameters are the same.
    """

    family: ClassVar[str] = "googlenet"
    mark: ClassVar[str] = "inception_3a.1x1.weight"
    channels: ClassVar[Mapping[str, int]] = _channels(_GOOGLENET, ("3b", "4e"))
    classifier: ClassVar[str] = "loss3/classifier"
    expected_normalization: ClassVar[str] = "caffe"

    lrn_size: int = 5
    lrn_alpha: float = 1e-4
    pools: bool = True

    def stage(self, stage: str, x: Array, train: bool) -> Array:
        del train
        max_pool = functools.partial(layers.max_pool, impl=self.impl)

        def conv(x, features, size, name, strides=1):
            # Caffe's initial values; with others this deep net does not start to learn.
            init = {"kernel_init": caffe_xavier, "bias_init": nn.initializers.constant(0.2)}
            return nn.relu(self.conv(features, size, strides, use_bias=True, name=name, **init)(x))

        def conv2(x):
            return conv(conv(x, 64, 1, "3x3_reduce"), 192, 3, "3x3")

        def inception(x):
            one, three_reduce, three, five_reduce, five, project = _GOOGLENET[stage]
            branches = (
                conv(x, one, 1, "1x1"),
                conv(conv(x, three_reduce, 1, "3x3_reduce"), three, 3, "3x3"),
                conv(conv(x, five_reduce, 1, "5x5_reduce"), five, 5, "5x5"),
                conv(max_pool(x, 3, strides=1, padding=1), project, 1, "pool_proj"),
            )
            return jnp.concatenate(branches, axis=-1)

        def norm(x):
            return layers.local_response_norm(x, size=self.lrn_size, alpha=self.lrn_alpha)

        if stage == "conv1":
            return named("conv1", lambda x: conv(x, 64, 7, "7x7_s2", strides=2), x)
        if stage == "pool1":
            return norm(max_pool(x, 3, strides=2, ceil=True))
        if stage == "conv2":
            return norm(named("conv2", conv2, x, remat=self.remat))
        if stage.startswith("pool"):
            return max_pool(x, 3, strides=2, ceil=True) if self.pools else x
        return named(f"inception_{stage}", inception, x, remat=self.remat)


class GoogLeNetBN(layers.Backbone, kw_only=True):
    """Torchvision's net: batch norm, no biases, no response norms, 3x3 instead of 5x5 kernels.

    `transform_input` scales images from ImageNet's mean and deviation to -1..1, the input that
    torchvision's published weights were trained on. Set it to False for weights trained otherwise.
    The auxiliary classifiers and dropout are left out.
    """

    family: ClassVar[str] = "googlenet_bn"
    mark: ClassVar[str] = "inception3a.branch1.conv.weight"
    channels: ClassVar[Mapping[str, int]] = GoogLeNet.channels
    expected_normalization: ClassVar[str] = "imagenet"

    transform_input: bool = True
    norm: Callable = BatchNorm

    def stage(self, stage: str, x: Array, train: bool) -> Array:
        max_pool = functools.partial(layers.max_pool, impl=self.impl)

        def conv(x, features, size, name, strides=1):
            norm, init = functools.partial(self.norm, epsilon=1e-3), truncated_normal(0.01)
            options = {"norm": norm, "dtype": self.dtype, "kernel_init": init, "impl": self.impl}
            layer = layers.ConvNorm(features, size, strides, size // 2, **options, name=name)
            return layer(x, train=train)

        def inception(x):
            one, three_reduce, three, five_reduce, five, project = _GOOGLENET[stage]

            def pair(name, reduced, features):
                return named(name, lambda x: conv(conv(x, reduced, 1, "0"), features, 3, "1"), x)

            pooled = max_pool(x, 3, strides=1, padding=1)
            branches = (
                conv(x, one, 1, "branch1"),
                pair("branch2", three_reduce, three),
                pair("branch3", five_reduce, five),
                named("branch4", lambda x: conv(x, project, 1, "1"), pooled),
            )
            return jnp.concatenate(branches, axis=-1)

        if stage == "conv1":
            x = _to_unit_range(x) if self.transform_input else x
            return conv(x, 64, 7, "conv1", strides=2)
        if stage == "conv2":
            return conv(conv(x, 64, 1, "conv2"), 192, 3, "conv3")
        if stage.startswith("pool"):
            return max_pool(x, 2 if stage == "pool4" else 3, strides=2, ceil=True)
        return named(f"inception{stage}", inception, x, remat=self.remat)


def _to_unit_range(x):
    """Renormalizes images from ImageNet's mean and std to -1..1."""
    mean = np.array((0.485, 0.456, 0.406), np.float32)[None, None, None, :]
    std = np.array((0.229, 0.224, 0.225), np.float32)[None, None, None, :]
    return x * (std / 0.5) + (mean - 0.5) / 0.5


class BNInception(layers.Backbone, kw_only=True):
    """BN-Inception. Stages: `conv1 pool1 conv2 pool2`, then `3a` to `5b`.

    `3c` and `4e` halve the feature map. Its sides must be even there, because the branches round
    odd sides differently. Images of 224, 227 or 256 pixels fit.
    """

    family: ClassVar[str] = "bn_inception"
    mark: ClassVar[str] = "inception_3a_1x1.weight"
    channels: ClassVar[Mapping[str, int]] = _channels(_BN_INCEPTION)
    classifier: ClassVar[str] = "last_linear"
    expected_normalization: ClassVar[str] = "caffe_bn"

    norm: Callable = BatchNorm

    def stage(self, stage: str, x: Array, train: bool) -> Array:
        max_pool = functools.partial(layers.max_pool, impl=self.impl)

        def conv(x, features, size, name, strides=1):
            x = self.conv(features, size, strides, use_bias=True, name=name)(x)
            return nn.relu(self.norm(dtype=self.dtype, name=f"{name}_bn")(x, train=train))

        def inception(_, x):
            one, three_reduce, three, double_reduce, double, project = _BN_INCEPTION[stage]
            name, strides = f"inception_{stage}_", 1 if one else 2
            a = conv(x, three_reduce, 1, name + "3x3_reduce")
            a = conv(a, three, 3, name + "3x3", strides)
            b = conv(x, double_reduce, 1, name + "double_3x3_reduce")
            b = conv(b, double, 3, name + "double_3x3_1")
            b = conv(b, double, 3, name + "double_3x3_2", strides)
            if not one:
                pooled = max_pool(x, 3, strides=2, ceil=True)
                return jnp.concatenate((a, b, pooled), axis=-1)
            # Only the last block pools by maximum.
            pool_fn = max_pool if stage == "5b" else layers.avg_pool
            pooled = conv(pool_fn(x, 3, strides=1, padding=1), project, 1, name + "pool_proj")
            return jnp.concatenate((conv(x, one, 1, name + "1x1"), a, b, pooled), axis=-1)

        if stage == "conv1":
            return conv(x, 64, 7, "conv1_7x7_s2", strides=2)
        if stage == "conv2":
            return conv(conv(x, 64, 1, "conv2_3x3_reduce"), 192, 3, "conv2_3x3")
        if stage.startswith("pool"):
            return max_pool(x, 3, strides=2, ceil=True)
        if stage in ("3c", "4e") and (x.shape[1] % 2 or x.shape[2] % 2):
            raise ValueError(
                f"bn_inception halves a map of {x.shape[1]} x {x.shape[2]} pixels at "
                f"{stage!r}, which must be even: use images of 224, 227 or 256 pixels"
            )
        return layers.checkpointed(inception, self.remat)(self, x)


googlenet = GoogLeNet
googlenet_bn = GoogLeNetBN
bn_inception = BNInception

_ONNX = "https://github.com/onnx/models/raw/4c46cd00fbdb7cd30b6c1c17ab54f2e1f4f7b177/validated"
_CAFFE = files.License("BVLC, released for unrestricted use", "yes", "no conditions")
_CADENE = files.License("not stated", "not stated", "the authors state no license for the weights")

PUBLISHED = {
    "googlenet": files.Published(
        "googlenet",
        "http://dl.caffe.berkeleyvision.org/bvlc_googlenet.caffemodel",
        54,
        _CAFFE,
        files.IMAGENET,
        files.Preprocessing(normalize="caffe"),
        "sha1:405fc5acd08a3bb12de8ee5e23a96bec22f08204",
    ),
    "googlenet_onnx": files.Published(
        "googlenet",
        f"{_ONNX}/vision/classification/inception_and_googlenet/googlenet/model/googlenet-7.onnx",
        28,
        _CAFFE,
        files.IMAGENET,
        files.Preprocessing(normalize="caffe"),
        "sha256:5725ccfd90845735ce5897faf7843c3f9b13acda3c4f3bff82cb21c9337c9de8",
    ),
    "googlenet_bn": files.torchvision("googlenet_bn", "googlenet-1378be20.pth", 52),
    "bn_inception": files.Published(
        "bn_inception",
        "http://data.lip6.fr/cadene/pretrainedmodels/bn_inception-52deb4733.pth",
        45,
        _CADENE,
        files.IMAGENET,
        files.Preprocessing(normalize="caffe_bn"),
        "sha256:52deb4733",
    ),
}
