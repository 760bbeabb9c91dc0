"""GoogLeNet (Szegedy et al., CVPR 2015): Caffe's net, and the one that torchvision distributes.

They are different nets and cannot share weights. Published results with "GoogLeNet" mean Caffe's.
Stages of both: `conv1 pool1 conv2 pool2 3a 3b pool3 4a 4b 4c 4d 4e pool4 5a 5b`. A response norm
belongs to the stage before it. `dmljax.nets` documents what all backbones share.
"""

import functools
from collections.abc import Callable
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from dmljax.nets import layers
from dmljax.nets.initializers import caffe_xavier, truncated_normal
from dmljax.nets.layers import Conv, Dtype
from dmljax.ops import Array

__all__ = ["googlenet", "googlenet_bn"]

# Widths: 1x1; 3x3 reduce, 3x3; 5x5 reduce, 5x5; pool projection.
_INCEPTIONS = {
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
_STAGES = (
    *("conv1", "pool1", "conv2", "pool2", "3a", "3b", "pool3"),
    *("4a", "4b", "4c", "4d", "4e", "pool4", "5a", "5b"),
)


def _channels(start: str) -> int:
    """Channels of the feature map that the stage `start` takes."""
    channels = 3
    for stage in _STAGES[: _STAGES.index(start)]:
        if stage in _INCEPTIONS:
            one, _, three, _, five, pool = _INCEPTIONS[stage]
            channels = one + three + five + pool
        else:
            channels = {"conv1": 64, "conv2": 192}.get(stage, channels)
    return channels


class GoogLeNet(nn.Module, kw_only=True):
    """Caffe's `bvlc_googlenet`: biases, no batch norm, local response norms, real 5x5 kernels.

    The auxiliary classifiers and the dropout of its training are left out. The published code of
    DVML computes the response norms over 11 channels and does not divide alpha = 1e-4 by 11:
    `lrn_size=11, lrn_alpha=1.1e-3`. `pools=False` leaves out pool2, pool3 and pool4: feature maps
    keep their size, and the parameters are the same.
    """

    expected_normalization: ClassVar[str] = "caffe"

    lrn_size: int = 5
    lrn_alpha: float = 1e-4
    pools: bool = True
    classes: int | None = None
    start: str = "conv1"
    stop: str = "5b"
    remat: bool | str = False
    dtype: Dtype | None = None
    impl: str = "auto"

    @nn.compact
    def __call__(
        self, images: Float[Array, "b h w c"], *, train: bool
    ) -> dict[str, Float[jax.Array, "..."]]:
        max_pool = functools.partial(layers.max_pool, impl=self.impl)

        def conv(x, features, size, name, strides=1):
            conv = Conv(
                features,
                size,
                strides,
                size // 2,
                use_bias=True,
                dtype=self.dtype,
                # Caffe's initial values; with others this deep net does not start to learn.
                kernel_init=caffe_xavier,
                bias_init=nn.initializers.constant(0.2),
                impl=self.impl,
                name=name,
            )
            return nn.relu(conv(x))

        def conv2(x):
            return conv(conv(x, 64, 1, "3x3_reduce"), 192, 3, "3x3")

        def inception(x):
            one, three_reduce, three, five_reduce, five, project = _INCEPTIONS[stage]
            branches = (
                conv(x, one, 1, "1x1"),
                conv(conv(x, three_reduce, 1, "3x3_reduce"), three, 3, "3x3"),
                conv(conv(x, five_reduce, 1, "5x5_reduce"), five, 5, "5x5"),
                conv(max_pool(x, 3, strides=1, padding=1), project, 1, "pool_proj"),
            )
            return jnp.concatenate(branches, axis=-1)

        def norm(x):
            return layers.local_response_norm(x, size=self.lrn_size, alpha=self.lrn_alpha)

        stages = layers.stage_range("googlenet", _STAGES, self.start, self.stop)
        layers.check_maps(f"googlenet from {self.start!r} on", images, _channels(self.start))
        x, outputs = images, {}
        for stage in stages:
            if stage == "conv1":
                x = layers.named("conv1", lambda x: conv(x, 64, 7, "7x7_s2", strides=2), x)
            elif stage == "pool1":
                x = norm(max_pool(x, 3, strides=2, ceil=True))
            elif stage == "conv2":
                x = norm(layers.named("conv2", conv2, x, remat=self.remat))
            elif stage.startswith("pool"):
                x = max_pool(x, 3, strides=2, ceil=True) if self.pools else x
            else:
                x = layers.named(f"inception_{stage}", inception, x, remat=self.remat)
            outputs[stage] = x
        return layers.add_pooled(outputs, x, classes=self.classes, classifier="loss3/classifier")


class GoogLeNetBN(nn.Module, kw_only=True):
    """Torchvision's net: batch norm, no biases, no response norms, 3x3 instead of 5x5 kernels.

    `transform_input` scales images from ImageNet's mean and deviation to -1..1, the input that
    torchvision's published weights were trained on. Set it to False for weights trained otherwise.
    The auxiliary classifiers and dropout are left out.
    """

    expected_normalization: ClassVar[str] = "imagenet"

    transform_input: bool = True
    classes: int | None = None
    start: str = "conv1"
    stop: str = "5b"
    norm: Callable = layers.BatchNorm
    remat: bool | str = False
    dtype: Dtype | None = None
    impl: str = "auto"

    @nn.compact
    def __call__(
        self, images: Float[Array, "b h w c"], *, train: bool
    ) -> dict[str, Float[jax.Array, "..."]]:
        max_pool = functools.partial(layers.max_pool, impl=self.impl)

        def conv(x, features, size, name, strides=1):
            return layers.ConvNorm(
                features,
                size,
                strides,
                size // 2,
                norm=functools.partial(self.norm, epsilon=1e-3),
                dtype=self.dtype,
                kernel_init=truncated_normal(0.01),
                impl=self.impl,
                name=name,
            )(x, train=train)

        def inception(x):
            one, three_reduce, three, five_reduce, five, project = _INCEPTIONS[stage]

            def pair(name, reduced, features):
                return layers.named(
                    name, lambda x: conv(conv(x, reduced, 1, "0"), features, 3, "1"), x
                )

            pooled = max_pool(x, 3, strides=1, padding=1)
            branches = (
                conv(x, one, 1, "branch1"),
                pair("branch2", three_reduce, three),
                pair("branch3", five_reduce, five),
                layers.named("branch4", lambda x: conv(x, project, 1, "1"), pooled),
            )
            return jnp.concatenate(branches, axis=-1)

        stages = layers.stage_range("googlenet_bn", _STAGES, self.start, self.stop)
        layers.check_maps(f"googlenet_bn from {self.start!r} on", images, _channels(self.start))
        x, outputs = images, {}
        if self.transform_input and self.start == "conv1":
            x = _to_unit_range(x)
        for stage in stages:
            if stage == "conv1":
                x = conv(x, 64, 7, "conv1", strides=2)
            elif stage == "conv2":
                x = conv(conv(x, 64, 1, "conv2"), 192, 3, "conv3")
            elif stage.startswith("pool"):
                x = max_pool(x, 2 if stage == "pool4" else 3, strides=2, ceil=True)
            else:
                x = layers.named(f"inception{stage}", inception, x, remat=self.remat)
            outputs[stage] = x
        return layers.add_pooled(outputs, x, classes=self.classes)


def _to_unit_range(x):
    """Renormalizes images from ImageNet's mean and std to -1..1."""
    mean = np.array((0.485, 0.456, 0.406), np.float32)[None, None, None, :]
    std = np.array((0.229, 0.224, 0.225), np.float32)[None, None, None, :]
    return x * (std / 0.5) + (mean - 0.5) / 0.5


googlenet = GoogLeNet
googlenet_bn = GoogLeNetBN
