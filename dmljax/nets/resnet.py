"""Residual nets (He et al., CVPR 2016) as torchvision builds them, with its parameter names.

The stride of a bottleneck is on its 3x3 convolution. Stages: `stem` (with the max pool), `layer1`
to `layer4`. See `dmljax.nets` for what all backbones share.
"""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
from jaxtyping import Float

from dmljax.nets import layers
from dmljax.nets.layers import Array, BatchNorm, Conv, Dense, Dtype

__all__ = ["resnet18", "resnet34", "resnet50", "resnet101", "resnet152"]

_STAGES = ("stem", "layer1", "layer2", "layer3", "layer4")


class ResNet(nn.Module, kw_only=True):
    """`blocks` per stage, of three convolutions (the last four times as wide) or of two.

    `last_stride=1` keeps the last map twice as large.
    """

    blocks: tuple[int, int, int, int]
    bottleneck: bool
    width: int = 64
    last_stride: int = 2
    classes: int | None = None
    start: str = "stem"
    stop: str = "layer4"
    momentum: float = 0.1
    frozen: bool = False
    remat: bool = False
    dtype: Dtype | None = None

    @nn.compact
    def __call__(
        self, images: Float[Array, "b h w c"], *, train: bool
    ) -> dict[str, Float[jax.Array, "..."]]:
        def conv(x, features, size, strides, name):
            conv = Conv(features, size, strides, size // 2, dtype=self.dtype, name=name)
            return conv(x)

        def norm(x, name):
            norm = BatchNorm(self.momentum, frozen=self.frozen, dtype=self.dtype, name=name)
            return norm(x, train=train)

        def block(width, strides, x):
            if self.bottleneck:
                rows = (width, 1, 1), (width, 3, strides), (4 * width, 1, 1)
            else:
                rows = (width, 3, strides), (width, 3, 1)
            y = x
            for i, row in enumerate(rows, 1):
                y = norm(conv(nn.relu(y) if i > 1 else y, *row, f"conv{i}"), f"bn{i}")
            if x.shape != y.shape:
                x = layers.named(
                    "downsample",
                    lambda x: norm(conv(x, y.shape[-1], 1, strides, "0"), "1"),
                    x,
                )
            return nn.relu(x + y)

        def layer(index, x):
            steps = [(1, 2, 2, self.last_stride)[index]] + [1] * (self.blocks[index] - 1)
            for i, strides in enumerate(steps):
                fn = functools.partial(block, self.width * 2**index, strides)
                x = layers.named(str(i), fn, x, remat=self.remat)
            return x

        stages = layers.stage_range("resnet", _STAGES, self.start, self.stop)
        layers.check_maps(f"resnet from {self.start!r} on", images, self._channels)
        x, outputs = images, {}
        for stage in stages:
            if stage == "stem":
                x = nn.relu(norm(conv(x, self.width, 7, 2, "conv1"), "bn1"))
                x = layers.max_pool(x, 3, strides=2, padding=1)
            else:
                x = layers.named(stage, functools.partial(layer, _STAGES.index(stage) - 1), x)
            outputs[stage] = x
        outputs = layers.pool(outputs, x)
        if self.classes is not None:
            outputs["logits"] = Dense(self.classes, name="fc")(outputs["pooled"])
        return outputs

    @property
    def _channels(self) -> int:
        """Of the map on which `start` begins."""
        if self.start in ("stem", "layer1"):
            return 3 if self.start == "stem" else self.width
        return self.width * 2 ** (_STAGES.index(self.start) - 2) * (4 if self.bottleneck else 1)


resnet18 = functools.partial(ResNet, blocks=(2, 2, 2, 2), bottleneck=False)
resnet34 = functools.partial(ResNet, blocks=(3, 4, 6, 3), bottleneck=False)
resnet50 = functools.partial(ResNet, blocks=(3, 4, 6, 3), bottleneck=True)
resnet101 = functools.partial(ResNet, blocks=(3, 4, 23, 3), bottleneck=True)
resnet152 = functools.partial(ResNet, blocks=(3, 8, 36, 3), bottleneck=True)
