"""A small net for small images, which trains on a CPU."""

from collections.abc import Callable

import flax.linen as nn
import jax
from jaxtyping import Float

from dmljax.nets import layers
from dmljax.nets.layers import BatchNorm, ConvNorm, Dtype
from dmljax.ops import Array

__all__ = ["convnet"]


class ConvNet(nn.Module, kw_only=True):
    """3x3 convolutions with batch norm and relu. Stages: `conv1`, `conv2`, ...

    It takes images of one channel or three, and is fast on a CPU at 32 to 64 pixels.
    """

    widths: tuple[int, ...] = (32, 64, 64, 128, 128)
    strides: tuple[int, ...] = (2, 1, 2, 1, 2)
    classes: int | None = None
    start: str = "conv1"
    stop: str | None = None
    norm: Callable = BatchNorm
    remat: bool | str = False
    dtype: Dtype | None = None
    impl: str = "auto"

    @nn.compact
    def __call__(
        self, images: Float[Array, "b h w c"], *, train: bool
    ) -> dict[str, Float[jax.Array, "..."]]:
        if not self.widths or len(self.widths) != len(self.strides):
            raise ValueError(
                f"convnet needs one stride per width, not {len(self.strides)} strides for "
                f"{len(self.widths)} widths"
            )
        names = tuple(f"conv{i}" for i in range(1, len(self.widths) + 1))
        stages = layers.stage_range("convnet", names, self.start, self.stop or names[-1])
        index = names.index(self.start)
        channels = self.widths[index - 1] if index else (1, 3)
        layers.check_maps(f"convnet from {self.start!r} on", images, channels)

        def run(_, x):
            return ConvNorm(
                features,
                3,
                strides,
                1,
                norm=self.norm,
                dtype=self.dtype,
                kernel_init=None,
                impl=self.impl,
                name=stage,
            )(x, train=train)

        x, outputs = images, {}
        for stage in stages:
            features, strides = (v[names.index(stage)] for v in (self.widths, self.strides))
            x = outputs[stage] = layers.checkpointed(run, self.remat)(self, x)
        return layers.add_pooled(outputs, x, classes=self.classes)


convnet = ConvNet
