"""BN-Inception (Ioffe & Szegedy, ICML 2015) with the layout and names of the published weights.

The weights were converted from Caffe. Convolutions have biases although a batch norm follows, and
the parameters have no hierarchy: `inception_3a_3x3_reduce`, `inception_3a_3x3_reduce_bn`.
`dmljax.nets` documents what all backbones share.
"""

import functools
from collections.abc import Callable
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Float

from dmljax.nets import layers
from dmljax.nets.layers import BatchNorm, Conv, Dtype
from dmljax.ops import Array

__all__ = ["bn_inception"]

# Widths: 1x1; 3x3 reduce, 3x3; double 3x3 reduce, double 3x3; pool projection. A block without the
# first and the last halves the feature map and passes its input on through a max pool.
_INCEPTIONS = {
    "3a": (64, 64, 64, 64, 96, 32),
    "3b": (64, 64, 96, 64, 96, 64),
    "3c": (0, 128, 160, 64, 96, 0),
    "4a": (224, 64, 96, 96, 128, 128),
    "4b": (192, 96, 128, 96, 128, 128),
    "4c": (160, 128, 160, 128, 160, 128),
    "4d": (96, 128, 192, 160, 192, 128),
    "4e": (0, 128, 192, 192, 256, 0),
    "5a": (352, 192, 320, 160, 224, 128),
    "5b": (352, 192, 320, 192, 224, 128),
}
_STAGES = ("conv1", "pool1", "conv2", "pool2", *_INCEPTIONS)


def _channels(start: str) -> int:
    """Channels of the feature map that the stage `start` takes."""
    channels = 3
    for stage in _STAGES[: _STAGES.index(start)]:
        if stage in _INCEPTIONS:
            one, _, three, _, double, project = _INCEPTIONS[stage]
            channels = one + three + double + (project or channels)
        else:
            channels = {"conv1": 64, "conv2": 192}.get(stage, channels)
    return channels


class BNInception(nn.Module, kw_only=True):
    """BN-Inception. Stages: `conv1 pool1 conv2 pool2`, then `3a` to `5b`.

    `3c` and `4e` halve the feature map. Its sides must be even there, because the branches round
    odd sides differently. Images of 224, 227 or 256 pixels fit.
    """

    expected_normalization: ClassVar[str] = "caffe_bn"

    classes: int | None = None
    start: str = "conv1"
    stop: str = "5b"
    norm: Callable = BatchNorm
    remat: bool | str = False
    dtype: Dtype | None = None
    impl: str = "auto"

    @nn.compact
    def __call__(
        self, images: Float[Array, "b h w c"], *, train: bool
    ) -> dict[str, Float[jax.Array, "..."]]:
        max_pool = functools.partial(layers.max_pool, impl=self.impl)

        def conv(x, features, size, name, strides=1):
            options = {"dtype": self.dtype, "impl": self.impl, "name": name}
            x = Conv(features, size, strides, size // 2, use_bias=True, **options)(x)
            norm = self.norm(dtype=self.dtype, name=f"{name}_bn")
            return nn.relu(norm(x, train=train))

        def inception(_, x):
            one, three_reduce, three, double_reduce, double, project = _INCEPTIONS[stage]
            name, strides = f"inception_{stage}_", 1 if one else 2
            a = conv(x, three_reduce, 1, name + "3x3_reduce")
            a = conv(a, three, 3, name + "3x3", strides)
            b = conv(x, double_reduce, 1, name + "double_3x3_reduce")
            b = conv(b, double, 3, name + "double_3x3_1")
            b = conv(b, double, 3, name + "double_3x3_2", strides)
            if not one:
                pooled = max_pool(x, 3, strides=2, ceil=True)
                return jnp.concatenate((a, b, pooled), axis=-1)
            # Only the last block pools by maximum.
            pool_fn = max_pool if stage == "5b" else layers.avg_pool
            pooled = conv(pool_fn(x, 3, strides=1, padding=1), project, 1, name + "pool_proj")
            return jnp.concatenate((conv(x, one, 1, name + "1x1"), a, b, pooled), axis=-1)

        stages = layers.stage_range("bn_inception", _STAGES, self.start, self.stop)
        layers.check_maps(f"bn_inception from {self.start!r} on", images, _channels(self.start))
        x, outputs = images, {}
        for stage in stages:
            if stage == "conv1":
                x = conv(x, 64, 7, "conv1_7x7_s2", strides=2)
            elif stage == "conv2":
                x = conv(conv(x, 64, 1, "conv2_3x3_reduce"), 192, 3, "conv2_3x3")
            elif stage.startswith("pool"):
                x = max_pool(x, 3, strides=2, ceil=True)
            else:
                if stage in ("3c", "4e") and (x.shape[1] % 2 or x.shape[2] % 2):
                    raise ValueError(
                        f"bn_inception halves a map of {x.shape[1]} x {x.shape[2]} pixels at "
                        f"{stage!r}, which must be even: use images of 224, 227 or 256 pixels"
                    )
                x = layers.checkpointed(inception, self.remat)(self, x)
            outputs[stage] = x
        return layers.add_pooled(outputs, x, classes=self.classes, classifier="last_linear")


bn_inception = BNInception
