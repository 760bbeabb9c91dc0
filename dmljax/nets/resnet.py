"""Residual nets (He et al., CVPR 2016) as torchvision builds them, with its parameter names.

The 3x3 convolution of a bottleneck has its stride. Stages: `stem` (including the max pool),
`layer1` to `layer4`. `dmljax.nets` documents what all backbones share.
"""

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import flax.linen as nn

from dmljax.nets import files, layers
from dmljax.nets.layers import BatchNorm
from dmljax.ops import Array

__all__ = ["resnet18", "resnet34", "resnet50", "resnet101", "resnet152"]


class ResNet(layers.Backbone, kw_only=True):
    """Residual net with `blocks` residual blocks per stage.

    A block has three convolutions if `bottleneck` (the last one four times as wide), else two.
    `last_stride=1` doubles the sides of the last feature map.
    """

    family: ClassVar[str] = "resnet"
    expected_normalization: ClassVar[str] = "imagenet"

    blocks: tuple[int, int, int, int]
    bottleneck: bool
    width: int = 64
    last_stride: int = 2
    norm: Callable = BatchNorm

    @property
    def channels(self) -> dict[str, int]:  # type: ignore[override]
        width = self.width * (4 if self.bottleneck else 1)
        return {"stem": self.width} | {f"layer{i + 1}": width * 2**i for i in range(4)}

    def stage(self, stage: str, x: Array, train: bool) -> Array:
        def conv_norm(x, features, size, strides, names):
            x = self.conv(features, size, strides, name=names[0])(x)
            return self.norm(dtype=self.dtype, name=names[1])(x, train=train)

        def block(width, strides, x):
            if self.bottleneck:
                convs = (width, 1, 1), (width, 3, strides), (4 * width, 1, 1)
            else:
                convs = (width, 3, strides), (width, 3, 1)
            y = x
            for i, (features, size, stride) in enumerate(convs, 1):
                y = nn.relu(y) if i > 1 else y
                y = conv_norm(y, features, size, stride, (f"conv{i}", f"bn{i}"))
            if x.shape != y.shape:
                x = layers.named(
                    "downsample", lambda x: conv_norm(x, y.shape[-1], 1, strides, "01"), x
                )
            return nn.relu(x + y)

        def layer(index, x):
            first_stride = (1, 2, 2, self.last_stride)[index]
            for i, strides in enumerate([first_stride] + [1] * (self.blocks[index] - 1)):
                fn = functools.partial(block, self.width * 2**index, strides)
                x = layers.named(str(i), fn, x, remat=self.remat)
            return x

        if stage != "stem":
            return layers.named(stage, functools.partial(layer, int(stage[-1]) - 1), x)
        x = nn.relu(conv_norm(x, self.width, 7, 2, ("conv1", "bn1")))
        return layers.max_pool(x, 3, strides=2, padding=1, impl=self.impl)

    @classmethod
    def facts(cls, shape: files.ShapeFn) -> dict[str, Any] | None:
        # Wide nets and nets of groups have another width in the blocks than in front.
        width, width_of_block = files.rows_of(shape, "conv1", "layer1.0.conv1")
        blocks = tuple(files.count_of(shape, f"layer{i}", "conv1.weight") for i in range(1, 5))
        facts = {"bottleneck": bool(shape("layer1.0.conv3.weight")), "blocks": blocks}
        return facts | {"width": width if width == width_of_block else None} if blocks[0] else None


resnet18 = functools.partial(ResNet, blocks=(2, 2, 2, 2), bottleneck=False)
resnet34 = functools.partial(ResNet, blocks=(3, 4, 6, 3), bottleneck=False)
resnet50 = functools.partial(ResNet, blocks=(3, 4, 6, 3), bottleneck=True)
resnet101 = functools.partial(ResNet, blocks=(3, 4, 23, 3), bottleneck=True)
resnet152 = functools.partial(ResNet, blocks=(3, 8, 36, 3), bottleneck=True)

_DINO = "https://dl.fbaipublicfiles.com/dino/dino_resnet50_pretrain/dino_resnet50_pretrain.pth"

PUBLISHED = {
    "resnet18": files.torchvision("resnet18", "resnet18-f37072fd.pth", 47),
    "resnet34": files.torchvision("resnet34", "resnet34-333f7ec4.pth", 87),
    "resnet50": files.torchvision("resnet50", "resnet50-19c8e357.pth", 103),
    "resnet50_v2": files.torchvision(
        "resnet50", "resnet50-11ad3fa6.pth", 103, files.Preprocessing(shorter=232)
    ),
    "resnet101": files.torchvision("resnet101", "resnet101-5d3b4d8f.pth", 179),
    "resnet152": files.torchvision("resnet152", "resnet152-b121ed2d.pth", 242),
    "resnet50.tv_in1k": files.Published(
        "resnet50", files.hub("timm/resnet50.tv_in1k"), 102, files.BSD, files.IMAGENET
    ),
    "dino_resnet50": files.Published(
        "resnet50", _DINO, 94, files.APACHE, "ImageNet-1k, without labels", files.BICUBIC
    ),
}
