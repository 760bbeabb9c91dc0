"""Small nets for small images, which train on a CPU."""

from collections.abc import Callable
from typing import ClassVar

import flax.linen as nn
import jax
from jaxtyping import Float

from dmljax.nets import layers
from dmljax.nets.layers import BatchNorm, Conv, ConvNorm, Dense, Dtype
from dmljax.ops import Array

__all__ = ["convnet", "lecun"]


class ConvNet(layers.Backbone, kw_only=True):
    """3x3 convolutions with batch norm and relu. Stages: `conv1`, `conv2`, ...

    It takes images of one channel or three, and is fast on a CPU at 32 to 64 pixels.
    """

    family: ClassVar[str] = "convnet"
    image_channels: ClassVar[tuple[int, ...]] = (1, 3)

    widths: tuple[int, ...] = (32, 64, 64, 128, 128)
    strides: tuple[int, ...] = (2, 1, 2, 1, 2)
    norm: Callable = BatchNorm

    @property
    def channels(self) -> dict[str, int]:  # type: ignore[override]
        if not self.widths or len(self.widths) != len(self.strides):
            raise ValueError(
                f"convnet needs one stride per width, not {len(self.strides)} strides for "
                f"{len(self.widths)} widths"
            )
        return {f"conv{i}": width for i, width in enumerate(self.widths, 1)}

    def stage(self, stage: str, x: Array, train: bool) -> Array:
        def unit(_, x):
            options = {"norm": self.norm, "dtype": self.dtype, "impl": self.impl, "name": stage}
            layer = ConvNorm(
                self.channels[stage], 3, strides[stage], 1, kernel_init=None, **options
            )
            return layer(x, train=train)

        strides = dict(zip(self.channels, self.strides, strict=True))
        return layers.checkpointed(unit, self.remat)(self, x)


class Lecun(nn.Module, kw_only=True):
    """The net of Hadsell et al. (CVPR 2006) for MNIST padded to 32 x 32: 37,097 parameters.

    15 convolutions 6x6, relu, mean of 3x3, 30 convolutions 9x9, relu, and a linear map to
    `embeddings` of `dim` numbers, which `dim=None` leaves out. Unlike here, the subsampling of the
    paper is trainable, and its units are not relu.
    """

    dim: int | None = 2
    remat: bool | str = False
    dtype: Dtype | None = None
    impl: str = "auto"

    @nn.compact
    def __call__(
        self, images: Float[Array, "b h w c"], *, train: bool
    ) -> dict[str, Float[jax.Array, "..."]]:
        def conv(features, size, name, x):
            options = {"use_bias": True, "kernel_init": None, "bias_init": None}
            options |= {"dtype": self.dtype, "impl": self.impl, "name": name}
            return nn.relu(Conv(features, size, **options)(x))

        layers.check_maps("lecun", images, (1, 3))
        if images.shape[1:3] != (32, 32):
            raise ValueError(
                f"lecun takes images of 32 x 32 pixels, not {images.shape[1]} x {images.shape[2]}: "
                "pad the images of MNIST by 2 on every side"
            )

        def conv1(_, x):
            return layers.avg_pool(conv(15, 6, "conv1", x), 3, strides=3)

        outputs = {"conv1": layers.checkpointed(conv1, self.remat)(self, images)}
        outputs["conv2"] = conv(30, 9, "conv2", outputs["conv1"])
        outputs = layers.add_pooled(outputs, outputs["conv2"])
        if self.dim is not None:
            outputs["embeddings"] = Dense(self.dim, name="fc")(outputs["pooled"])
        return outputs


convnet = ConvNet
lecun = Lecun
