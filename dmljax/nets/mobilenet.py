"""MobileNetV2 (Sandler et al., CVPR 2018) as torchvision builds it, with its parameter names.

The stages are the entries of torchvision's `features`: `0` is the stem, `1` to `17` are the
inverted residual blocks, `18` is the last convolution. `dmljax.nets` documents what all backbones
share.
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
_STAGES = tuple(map(str, range(len(_BLOCKS) + 2)))


class MobileNetV2(nn.Module, kw_only=True):
    """MobileNetV2. `multiplier` scales all widths, which are then rounded to multiples of 8."""

    expected_normalization: ClassVar[str] = "imagenet"

    multiplier: float = 1.0
    classes: int | None = None
    start: str = "0"
    stop: str = "18"
    norm: Callable = BatchNorm
    remat: bool | str = False
    dtype: Dtype | None = None
    impl: str = "auto"

    @nn.compact
    def __call__(
        self, images: Float[Array, "b h w c"], *, train: bool
    ) -> dict[str, Float[jax.Array, "..."]]:
        def conv_norm(x, features, size, names, strides=1, groups=1, limits=None):
            options = {"dtype": self.dtype, "impl": self.impl, "name": names[0]}
            conv = Conv(features, size, strides, size // 2, groups, **options)
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
                number = int(stage)
                if 0 < number <= len(_BLOCKS):
                    expansion, _, strides = _BLOCKS[number - 1]
                    fn = functools.partial(residual, expansion, widths[number], strides)
                    fn = functools.partial(layers.named, "conv", fn)
                else:
                    size, strides = (1, 1) if number else (3, 2)
                    fn = functools.partial(unit, widths[number], size, strides, 1)
                x = outputs[stage] = layers.named(stage, fn, x, remat=self.remat)
            return x

        widths = [layers.multiple_of_8(32 * self.multiplier)]
        widths += [layers.multiple_of_8(width * self.multiplier) for _, width, _ in _BLOCKS]
        widths += [layers.multiple_of_8(1280 * max(1.0, self.multiplier))]
        stages = layers.stage_range("mobilenet_v2", _STAGES, self.start, self.stop)
        channels = widths[int(self.start) - 1] if self.start != "0" else 3
        layers.check_maps(f"mobilenet_v2 from {self.start!r} on", images, channels)
        outputs: dict[str, jax.Array] = {}
        x = layers.named("features", features, images)
        return layers.add_pooled(outputs, x, classes=self.classes, classifier="classifier/1")


mobilenet_v2 = MobileNetV2
