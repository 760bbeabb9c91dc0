"""Residual nets (He et al., CVPR 2016) as torchvision builds them, with its parameter names.

The 3x3 convolution of a bottleneck has its stride. Stages: `stem` (including the max pool),
`layer1` to `layer4`. `dmljax.nets` documents what all backbones share.
"""

import functools
from collections.abc import Callable
from typing import ClassVar

import flax.linen as nn
import jax
from jaxtyping import Float

from dmljax.nets import layers
from dmljax.nets.layers import BatchNorm, Conv, Dtype
from dmljax.ops import Array

__all__ = ["resnet18", "resnet34", "resnet50", "resnet101", "resnet152"]

_STAGES = ("stem", "layer1", "layer2", "layer3", "layer4")


class ResNet(nn.Module, kw_only=True):
    """Residual net with `blocks` residual blocks per stage.

    A block has three convolutions if `bottleneck` (the last one four times as wide), else two.
    `last_stride=1` doubles the sides of the last feature map.
    """

    expected_normalization: ClassVar[str] = "imagenet"

    blocks: tuple[int, int, int, int]
    bottleneck: bool
    width: int = 64
    last_stride: int = 2
    classes: int | None = None
    start: str = "stem"
    stop: str = "layer4"
    norm: Callable = BatchNorm
    remat: bool | str = False
    dtype: Dtype | None = None
    impl: str = "auto"

    @nn.compact
    def __call__(
        self, images: Float[Array, "b h w c"], *, train: bool
    ) -> dict[str, Float[jax.Array, "..."]]:
        def conv(x, features, size, strides, name):
            options = {"dtype": self.dtype, "impl": self.impl, "name": name}
            return Conv(features, size, strides, size // 2, **options)(x)

        def norm(x, name):
            return self.norm(dtype=self.dtype, name=name)(x, train=train)

        def block(width, strides, x):
            if self.bottleneck:
                convs = (width, 1, 1), (width, 3, strides), (4 * width, 1, 1)
            else:
                convs = (width, 3, strides), (width, 3, 1)
            y = x
            for i, (features, size, stride) in enumerate(convs, 1):
                y = nn.relu(y) if i > 1 else y
                y = norm(conv(y, features, size, stride, f"conv{i}"), f"bn{i}")
            if x.shape != y.shape:
                x = layers.named(
                    "downsample",
                    lambda x: norm(conv(x, y.shape[-1], 1, strides, "0"), "1"),
                    x,
                )
            return nn.relu(x + y)

        def layer(index, x):
            first_stride = (1, 2, 2, self.last_stride)[index]
            for i, strides in enumerate([first_stride] + [1] * (self.blocks[index] - 1)):
                fn = functools.partial(block, self.width * 2**index, strides)
                x = layers.named(str(i), fn, x, remat=self.remat)
            return x

        stages = layers.stage_range("resnet", _STAGES, self.start, self.stop)
        layers.check_maps(f"resnet from {self.start!r} on", images, self._channels)
        x, outputs = images, {}
        for stage in stages:
            if stage == "stem":
                x = nn.relu(norm(conv(x, self.width, 7, 2, "conv1"), "bn1"))
                x = layers.max_pool(x, 3, strides=2, padding=1, impl=self.impl)
            else:
                x = layers.named(stage, functools.partial(layer, _STAGES.index(stage) - 1), x)
            outputs[stage] = x
        return layers.add_pooled(outputs, x, classes=self.classes)

    @property
    def _channels(self) -> int:
        """Channels of the feature map that the stage `start` takes."""
        if self.start in ("stem", "layer1"):
            return 3 if self.start == "stem" else self.width
        return self.width * 2 ** (_STAGES.index(self.start) - 2) * (4 if self.bottleneck else 1)


resnet18 = functools.partial(ResNet, blocks=(2, 2, 2, 2), bottleneck=False)
resnet34 = functools.partial(ResNet, blocks=(3, 4, 6, 3), bottleneck=False)
resnet50 = functools.partial(ResNet, blocks=(3, 4, 6, 3), bottleneck=True)
resnet101 = functools.partial(ResNet, blocks=(3, 4, 23, 3), bottleneck=True)
resnet152 = functools.partial(ResNet, blocks=(3, 8, 36, 3), bottleneck=True)
