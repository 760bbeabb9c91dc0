"""MobileNetV2 (Sandler et al., CVPR 2018) as torchvision builds it, with its parameter names.

The stages are the entries of torchvision's `features`: `0` is the stem, `1` to `17` are the
inverted residual blocks, `18` is the last convolution. `dmljax.nets` documents what all backbones
share.
"""

import functools
from collections.abc import Callable, Sequence
from typing import ClassVar

from dmljax.nets import layers
from dmljax.nets.layers import BatchNorm
from dmljax.ops import Array

__all__ = ["mobilenet_v2"]

# expansion, width, stride of each inverted residual block
_BLOCKS = tuple(
    (expansion, width, strides if i == 0 else 1)
    for expansion, width, repeats, strides in (
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    )
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
        widths = [32, *(width for _, width, _ in _BLOCKS)]
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
                    expansion, _, strides = _BLOCKS[number - 1]
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


mobilenet_v2 = MobileNetV2
