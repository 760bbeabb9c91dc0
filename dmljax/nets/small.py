"""Small nets for small images, which train on a CPU."""

from __future__ import annotations

import flax.linen as nn
import jax
from jaxtyping import Float

from dmljax.nets import layers
from dmljax.nets.layers import Array, Conv, ConvNorm, Dense, Dtype

__all__ = ["convnet", "lecun"]


class Lecun(nn.Module, kw_only=True):
    """For MNIST padded to 32 x 32, after Hadsell et al. (CVPR 2006): 37,097 parameters.

    relu(6x6, 15), mean of 3x3, relu(9x9, 30), and a linear map to `dim`: `embeddings`, which
    `dim=None` leaves out. The paper's subsampling is trainable and its units are not relu.
    """

    dim: int | None = 2
    remat: bool = False
    dtype: Dtype | None = None

    @nn.compact
    def __call__(
        self, images: Float[Array, "b h w c"], *, train: bool
    ) -> dict[str, Float[jax.Array, "..."]]:
        def conv(features, size, name, x):
            default = {"use_bias": True, "kernel_init": None, "bias_init": None}
            return nn.relu(Conv(features, size, dtype=self.dtype, name=name, **default)(x))

        layers.check_maps("lecun", images, (1, 3))
        if images.shape[1:3] != (32, 32):
            raise ValueError(
                f"lecun takes images of 32 x 32 pixels, not {images.shape[1]} x {images.shape[2]}: "
                "pad those of MNIST by 2 on every side"
            )

        def first(_, x):
            return layers.avg_pool(conv(15, 6, "conv1", x), 3, strides=3)

        one = (nn.remat(first) if self.remat else first)(self, images)
        two = conv(30, 9, "conv2", one)
        outputs = layers.pool({"conv1": one, "conv2": two}, two)
        if self.dim is not None:
            outputs["embeddings"] = Dense(self.dim, name="fc")(outputs["pooled"])
        return outputs


class ConvNet(nn.Module, kw_only=True):
    """3x3 convolutions, batch norm, relu, and a mean over space; stages `conv1`, `conv2`, ...

    Quick on a CPU with images of 32 to 64 pixels, of one channel or three.
    """

    widths: tuple[int, ...] = (32, 64, 64, 128, 128)
    strides: tuple[int, ...] = (2, 1, 2, 1, 2)
    classes: int | None = None
    start: str = "conv1"
    stop: str | None = None
    momentum: float = 0.1
    frozen: bool = False
    remat: bool = False
    dtype: Dtype | None = None

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
                self.momentum,
                frozen=self.frozen,
                dtype=self.dtype,
                kernel_init=None,
                name=stage,
            )(x, train=train)

        x, outputs = images, {}
        for stage in stages:
            features, strides = (v[names.index(stage)] for v in (self.widths, self.strides))
            x = outputs[stage] = (nn.remat(run) if self.remat else run)(self, x)
        outputs = layers.pool(outputs, x)
        if self.classes is not None:
            outputs["logits"] = Dense(self.classes, name="fc")(outputs["pooled"])
        return outputs


lecun = Lecun
convnet = ConvNet
