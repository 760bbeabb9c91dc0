"""BN-Inception (Ioffe & Szegedy, ICML 2015), layout and names of the weights in common use.

They were converted from Caffe: the convolutions have biases although a batch norm follows, and the
parameters lie flat, `inception_3a_3x3_reduce` beside `inception_3a_3x3_reduce_bn`. Those weights
take BGR from 0 to 255 minus (104, 117, 128). See `dmljax.nets` for what all backbones share.
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Float

from dmljax.nets import layers
from dmljax.nets.layers import Array, BatchNorm, Conv, Dense, Dtype

__all__ = ["bn_inception"]

# 1x1; 3x3 reduce, 3x3; double 3x3 reduce, double 3x3; pool projection. Without the first and the
# last, the block halves the map and passes its input on through a max pool.
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
    """Of the map on which `start` begins."""
    channels = 3
    for stage in _STAGES[: _STAGES.index(start)]:
        if stage in _INCEPTIONS:
            one, _, three, _, double, project = _INCEPTIONS[stage]
            channels = one + three + double + (project or channels)
        else:
            channels = {"conv1": 64, "conv2": 192}.get(stage, channels)
    return channels


class BNInception(nn.Module, kw_only=True):
    """Stages: `conv1 pool1 conv2 pool2`, then `3a` to `5b`, of which `3c` and `4e` halve the map.

    Images of 224, 227 or 256 pixels fit; where a map to be halved is odd, its branches disagree.
    """

    classes: int | None = None
    start: str = "conv1"
    stop: str = "5b"
    momentum: float = 0.1
    frozen: bool = False
    remat: bool = False
    dtype: Dtype | None = None

    @nn.compact
    def __call__(
        self, images: Float[Array, "b h w c"], *, train: bool
    ) -> dict[str, Float[jax.Array, "..."]]:
        def conv(x, features, size, name, strides=1):
            x = Conv(
                features, size, strides, size // 2, use_bias=True, dtype=self.dtype, name=name
            )(x)
            norm = BatchNorm(self.momentum, frozen=self.frozen, dtype=self.dtype, name=f"{name}_bn")
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
                pooled = layers.max_pool(x, 3, strides=2, ceil=True)
                return jnp.concatenate((a, b, pooled), axis=-1)
            # The last block alone pools by maximum.
            pool_fn = layers.max_pool if stage == "5b" else layers.avg_pool
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
                x = layers.max_pool(x, 3, strides=2, ceil=True)
            else:
                if stage in ("3c", "4e") and (x.shape[1] % 2 or x.shape[2] % 2):
                    raise ValueError(
                        f"bn_inception halves a map of {x.shape[1]} x {x.shape[2]} pixels at "
                        f"{stage!r}, which must be even: use images of 224, 227 or 256 pixels"
                    )
                x = (nn.remat(inception) if self.remat else inception)(self, x)
            outputs[stage] = x
        outputs = layers.pool(outputs, x)
        if self.classes is not None:
            outputs["logits"] = Dense(self.classes, name="last_linear")(outputs["pooled"])
        return outputs


bn_inception = BNInception
