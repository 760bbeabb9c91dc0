"""Vision transformers (Dosovitskiy et al., ICLR 2021) with the layout and names of DINO and timm.

The stages are the blocks, `0` to `11`; their feature maps are the patch tokens `[b h w d]`. After
the last norm, `features` are the patch tokens and `pooled` is the class token.
"""

from __future__ import annotations

import functools
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from dmljax.nets import layers
from dmljax.nets.initializers import normal
from dmljax.nets.layers import Conv, Dense, Dtype
from dmljax.ops import Array

__all__ = ["vit_b16", "vit_s16"]


class ViT(nn.Module, kw_only=True):
    """Vision transformer. `image_size` fixes the grid of position embeddings.

    For images of another size they are interpolated (bicubic, as by PyTorch's `interpolate`).
    """

    expected_normalization: ClassVar[str] = "imagenet"

    width: int
    heads: int
    depth: int = 12
    patch: int = 16
    image_size: int = 224
    classes: int | None = None
    remat: bool = False
    dtype: Dtype | None = None
    impl: str = "auto"

    @nn.compact
    def __call__(
        self, images: Float[Array, "b h w c"], *, train: bool
    ) -> dict[str, Float[jax.Array, "..."]]:
        def dense(x, features, name):
            init = normal(0.02)
            zeros = nn.initializers.zeros
            return Dense(features, True, self.dtype, init, zeros, name=name)(x)

        def norm(x, name):
            return nn.LayerNorm(1e-6, dtype=self.dtype, use_fast_variance=False, name=name)(x)

        def attention(x):
            qkv = dense(x, 3 * self.width, "qkv")
            qkv = qkv.reshape(*x.shape[:2], 3, self.heads, self.width // self.heads)
            y = jax.nn.dot_product_attention(*(qkv[:, :, i] for i in range(3)))
            return dense(y.reshape(x.shape), self.width, "proj")

        def mlp(x):
            x = nn.gelu(dense(x, 4 * self.width, "fc1"), approximate=False)
            return dense(x, self.width, "fc2")

        def block(x):
            x = x + layers.named("attn", attention, norm(x, "norm1"))
            return x + layers.named("mlp", mlp, norm(x, "norm2"))

        def blocks(x):
            for i in range(self.depth):
                x = layers.named(str(i), block, x, remat=self.remat)
                outputs[str(i)] = as_map(x)
            return x

        def embed(x):
            options = {"kernel_init": None, "bias_init": None, "use_bias": True}
            options |= {"dtype": self.dtype, "impl": self.impl, "name": "proj"}
            return Conv(self.width, self.patch, self.patch, **options)(x)

        def as_map(tokens):
            return tokens[:, 1:].reshape(images.shape[0], h, w, self.width)

        layers.check_maps("vit", images, 3)
        self._check(images.shape[1:3])
        h, w = (n // self.patch for n in images.shape[1:3])
        side = self.image_size // self.patch
        init = normal(0.02)
        cls_token = self.param("cls_token", init, (1, 1, self.width))
        pos_embed = self.param("pos_embed", init, (1, side * side + 1, self.width))

        x = layers.named("patch_embed", embed, images)
        x = x.reshape(images.shape[0], h * w, self.width)
        cls_tokens = jnp.broadcast_to(cls_token, (images.shape[0], 1, self.width))
        x = jnp.concatenate((cls_tokens.astype(x.dtype), x), axis=1)
        x = x + interpolate_positions(pos_embed, h, w).astype(x.dtype)
        outputs: dict[str, jax.Array] = {}
        x = norm(layers.named("blocks", blocks, x), "norm")
        outputs = layers.add_pooled(outputs, as_map(x))
        outputs["pooled"] = jnp.asarray(x[:, 0], jnp.promote_types(x.dtype, jnp.float32))
        if self.classes is not None:
            outputs["logits"] = Dense(self.classes, name="head")(outputs["pooled"])
        return outputs

    def _check(self, shape) -> None:
        if shape[0] % self.patch or shape[1] % self.patch:
            raise ValueError(
                f"images of {shape[0]} x {shape[1]} pixels cannot be cut into patches of "
                f"{self.patch}: both sides must be multiples of {self.patch}"
            )
        if self.image_size % self.patch or self.width % self.heads:
            raise ValueError(
                f"image_size {self.image_size} must be a multiple of patch {self.patch}, and width "
                f"{self.width} of heads {self.heads}"
            )


def interpolate_positions(
    positions: Float[Array, "1 n d"], h: int, w: int
) -> Float[jax.Array, "1 m d"]:
    """Position embeddings of a class token and a square grid, resized to h x w patches."""
    side = round((positions.shape[1] - 1) ** 0.5)
    if (h, w) == (side, side):
        return jnp.asarray(positions)
    grid = positions[:, 1:].reshape(side, side, -1)
    rows, columns = (bicubic(side, n).astype(np.float32) for n in (h, w))
    grid = jnp.einsum("yh,xw,hwd->yxd", rows, columns, grid, precision="highest")
    return jnp.concatenate((positions[:, :1], grid.reshape(1, h * w, -1)), axis=1)


def bicubic(before: int, after: int) -> Float[np.ndarray, "after before"]:
    """Matrix that resizes a line as PyTorch does: Keys' kernel with a = -0.75, edges repeated.

    `jax.image.resize` has a = -0.5.
    """
    a = -0.75
    center = (np.arange(after) + 0.5) * before / after - 0.5
    weights = np.zeros((after, before))
    for tap in range(-1, 3):
        index = np.floor(center).astype(int) + tap
        t = np.abs(center - index)
        near = (a + 2) * t**3 - (a + 3) * t**2 + 1
        far = a * (t**3 - 5 * t**2 + 8 * t - 4)
        np.add.at(
            weights,
            (np.arange(after), np.clip(index, 0, before - 1)),
            np.where(t <= 1, near, far),
        )
    return weights


vit_s16 = functools.partial(ViT, width=384, heads=6)
vit_b16 = functools.partial(ViT, width=768, heads=12)
