"""Vision transformers (Dosovitskiy et al., ICLR 2021), composed of parts.

One module with options is DINO, DINOv2, DINOv3, CLIP, SigLIP, UNICOM and the ViTs of ImageNet-21k.
The parameters have timm's names as far as it has one. The stages are the blocks, `0` to
`depth - 1`; their feature maps are the patch tokens `[b h w d]`. `features` are the patch tokens
after the last norm, and `prefix [b p d]` are the class token and the registers there. `pooled` is
what the authors use for retrieval: the class token, its projection, or the output of a pooling
head. With a class token, `class_and_mean` is the token, without the projection, beside the mean of
`features`.

A net that stops before the last block has no last norm, and `pooled` is the mean of its map. A net
that starts later takes the map of the block before, and its `prefix` as a keyword.

CLIP was trained with its last norm on the class token only; `features` has it on all tokens.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from dmljax import ops
from dmljax.hints import check_all
from dmljax.nets import layers
from dmljax.nets.files import ShapeFn, count_of
from dmljax.nets.initializers import normal, uniform
from dmljax.nets.layers import BatchNorm, Dense
from dmljax.nets.positions import RESIZES, resized, rotary_table
from dmljax.nets.token_attention import check
from dmljax.nets.transformer import Parts, gelu
from dmljax.ops import Array


class ViT(layers.Backbone, kw_only=True):
    """Vision transformer.

    * `image_size`, one side or (height, width), fixes the grid of learned positions. For images of
      another size they are resized at every call, by the rule `resize` of
      `nets.positions.RESIZES`; `nets.positions.at_size` resizes them once.
    * `positions`: 'class' (learned, of the class token and the patches), 'patches' (learned, of
      the patches only) or 'rotary' (DINOv3: no parameters, queries and keys are rotated).
    * `registers` are tokens between the class token and the patches, without positions.
    * `pre_norm` adds a norm before the blocks. `epsilon` is for all norms.
    * `hidden` is the width within the MLP, by default 4 times `width`. It computes
      fc2(activation(fc1(x))), or `gated` fc2(activation(gate(x)) * fc1(x)), which is SwiGLU.
    * `biased` has the letters of the projections q, k and v that have a bias.
    * `layer_scale` multiplies the output of each branch by a vector.
    * `pool` makes `pooled` from the tokens: 'class', 'attention' (SigLIP's head) or 'flatten'
      (UNICOM's two linear layers on all tokens, which fix the size of images). `projection` is the
      width of a linear layer without bias behind it, or of the second layer of 'flatten'.
    * `drop_path` is the rate of stochastic depth of the last block; it grows with depth from 0.
    * `norm` is the batch norm of 'flatten'.
    * `start` and `stop`: the first and the last block to run; None is the last of the net.
    * `attention` is a form of `nets.token_attention`.
    """

    family: ClassVar[str] = "vit"
    mark: ClassVar[str] = "blocks.0.attn.qkv.weight"

    width: int
    heads: int
    depth: int = 12
    patch: int = 16
    image_size: int | tuple[int, int] = 224
    positions: str = "class"
    resize: str = "torch"
    class_token: bool = True
    registers: int = 0
    patch_bias: bool = True
    pre_norm: bool = False
    epsilon: float = 1e-6
    hidden: int | None = None
    activation: Callable = gelu
    gated: bool = False
    biased: str = "qkv"
    layer_scale: bool = False
    pool: str = "class"
    projection: int | None = None
    expected_normalization: str | Mapping[str, Any] = "imagenet"
    norm: Callable = BatchNorm
    drop_path: float = 0.0
    attention: str = "auto"

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of the learned positions."""
        h, w = np.broadcast_to(self.image_size, 2).tolist()
        return h // self.patch, w // self.patch

    @property
    def position_count(self) -> int:
        """Counts the learned positions, including that of the class token if it has one."""
        count = math.prod(self.grid) + (self.positions == "class")
        return 0 if self.positions == "rotary" else count

    @property
    def mlp_width(self) -> int:
        return self.hidden or 4 * self.width

    def tokens(self, shape: tuple[int, ...]) -> int:
        """Computes the tokens of an image of `shape` (height, width, channels)."""
        patches = (shape[0] // self.patch) * (shape[1] // self.patch)
        return patches + self.class_token + self.registers

    @nn.compact
    def __call__(
        self,
        images: Float[Array, "b h w c"],
        *,
        train: bool,
        prefix: Float[Array, "b p d"] | None = None,
    ) -> dict[str, Float[jax.Array, "..."]]:
        init = normal(0.02)
        width, b = self.width, images.shape[0]

        def blocks(x):
            for i in map(int, stages):
                if prompts is not None and i < len(prompts):
                    x = between(x, repeated(prompts[i], x))
                rate = layers.drop_rate(i, self.depth, self.drop_path, train=train)
                block = functools.partial(parts.block, drop_path=rate)
                x = layers.named(str(i), block, x, remat=self.remat)
                outputs[str(i)] = as_map(x)
            return x

        def embed(x):
            options = {"kernel_init": None, "bias_init": None, "use_bias": self.patch_bias}
            return self.conv(width, self.patch, self.patch, 0, name="proj", **options)(x)

        def as_map(tokens):
            return tokens[:, -h * w :].reshape(b, h, w, width)

        def between(x, *tokens):
            """Inserts `tokens` before the patches, instead of the prompts in `x`."""
            return jnp.concatenate((x[:, :count], *tokens, x[:, -h * w :]), axis=1)

        def repeated(token, x):
            return jnp.broadcast_to(token, (b, *token.shape[-2:])).astype(x.dtype)

        def attention_pool(x):
            y = parts.dense(repeated(latent, x), width, "q"), parts.dense(x, 2 * width, "kv")
            q, kv = (part.reshape(*part.shape[:2], -1, width // self.heads) for part in y)
            k, v = jnp.split(kv, 2, axis=2)
            y = jax.nn.dot_product_attention(q, k, v).reshape(b, 1, width)
            y = parts.dense(y, width, "proj")
            return (y + layers.named("mlp", parts.mlp, parts.norm(y, "norm")))[:, 0]

        def flatten(x):
            norm, x = functools.partial(self.norm, epsilon=2e-5), x.reshape(b, -1)
            for i, features in enumerate((width, self.projection or width)):
                x = Dense(features, False, self.dtype, name=str(2 * i))(x)
                x = norm(dtype=self.dtype, name=str(2 * i + 1))(x, train=train)
            return x

        last = str(self.depth - 1)
        names = tuple(map(str, range(self.depth)))
        stages = layers.stage_range("vit", names, self.start or "0", self.stop or last)
        has_images, has_end = stages[0] == "0", stages[-1] == last
        count = self.class_token + self.registers  # of the tokens before the patches
        if has_images:
            layers.check_maps("vit", images, 3)
            self._check(images.shape[1:3])
            h, w = (n // self.patch for n in images.shape[1:3])
        else:
            layers.check_maps(f"vit from {stages[0]!r} on", images, width)
            h, w = images.shape[1:3]
            if count and (prefix is None or prefix.shape != (b, count, width)):
                raise ValueError(
                    f"vit from {stages[0]!r} on takes the tokens before the patches as `prefix` "
                    f"[b {count} {width}]: give the output 'prefix' of the block before"
                )
        # `adapt.trained.prompts` and `methods.semantic_proxies` add tokens to the parameters of a
        # trained net: for the first blocks, [prompts, width] or [b, prompts, width] each.
        prompts: Any = None
        if self.has_variable("params", "prompts"):
            prompts = self.get_variable("params", "prompts")
        if has_images and self.class_token:
            cls_token = self.param("cls_token", init, (1, 1, width))
        if has_images and self.registers:
            reg_token = self.param("reg_token", init, (1, self.registers, width))
        if has_end and self.pool == "attention":
            latent = self.param("latent", init, (1, 1, width))
        table = rotary_table(h, w, width // self.heads) if self.positions == "rotary" else None
        if has_images and table is None:
            pos_embed = self.param("pos_embed", init, (1, self.position_count, width))
            pos_embed = resized(pos_embed, self.grid, (h, w), self.resize)

        options = {name: getattr(self, name) for name in _SHARED}
        parts = Parts(**options, hidden=self.mlp_width, table=table)

        if has_images:
            x = layers.named("patch_embed", embed, images).reshape(b, h * w, width)
            if self.positions == "patches":
                x = x + pos_embed.astype(x.dtype)
            if self.class_token:
                x = jnp.concatenate((repeated(cls_token, x), x), axis=1)
            if self.positions == "class":
                x = x + pos_embed.astype(x.dtype)
            if self.registers:
                x = jnp.concatenate((x[:, :1], repeated(reg_token, x), x[:, 1:]), axis=1)
            if self.pre_norm:
                x = parts.norm(x, "norm_pre")
        else:
            x = images.reshape(b, h * w, width)
            if count:
                x = jnp.concatenate((jnp.asarray(prefix, x.dtype), x), axis=1)
        outputs: dict[str, jax.Array] = {}
        x = layers.named("blocks", blocks, x)
        if prompts is not None:
            x = between(x)
        if has_end:
            x = parts.norm(x, "norm")
        outputs = layers.add_pooled(outputs, as_map(x))
        if count:
            outputs["prefix"] = x[:, :count]
        if not has_end:
            return outputs
        if self.pool == "attention":
            pooled = layers.named("attn_pool", attention_pool, x)
        elif self.pool == "flatten":
            pooled = layers.named("feature", flatten, x)
        else:
            pooled = x[:, 0]
        if self.projection and self.pool != "flatten":
            pooled = parts.dense(pooled, self.projection, "proj", use_bias=False)
        if self.class_token:
            pair = x[:, 0], outputs["pooled"]
            outputs["class_and_mean"] = jnp.concatenate(pair, axis=1)
        outputs["pooled"] = ops.widen(pooled)
        if self.classes is not None:
            outputs["logits"] = Dense(self.classes, name="head")(outputs["pooled"])
        return outputs

    def _check(self, shape) -> None:
        size = tuple(np.broadcast_to(self.image_size, 2).tolist())
        images = f"images of {shape[0]} x {shape[1]} pixels"
        problems = {
            f"{images} cannot be cut into patches of {self.patch}: both sides must be multiples of "
            f"{self.patch}": any(side % self.patch for side in shape),
            f"image_size {self.image_size} must be a multiple of patch {self.patch}, and width "
            f"{self.width} of heads {self.heads}": any(side % self.patch for side in size)
            or self.width % self.heads > 0,
            f"{images} do not fit a head that flattens the tokens of {size[0]} x {size[1]} pixels: "
            "set image_size before training": self.pool == "flatten" and tuple(shape) != size,
            "without a class token, set positions='patches' and another pool": not self.class_token
            and "class" in (self.positions, self.pool),
        }
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            problems[f"{name} is one of {', '.join(allowed)}, not {value!r}"] = value not in allowed
        check_all(problems)
        check(self.attention)

    @classmethod
    def facts(cls, shape: ShapeFn) -> dict[str, Any] | None:
        kernel = shape("patch_embed.proj.weight")
        gate, last = (shape(f"blocks.0.mlp.{x}.weight", gated=True) for x in ("gate", "fc2"))
        is_gated = bool(gate and last and gate[0] == last[-1])
        fc2 = last if is_gated else shape("blocks.0.mlp.fc2.weight")
        if kernel is None or fc2 is None or len(kernel) != 4 or len(fc2) != 2:
            return None
        flatten, positions, registers = map(shape, ("feature.2.weight", "pos_embed", "reg_token"))
        projection = flatten or shape("proj.weight")
        return {
            "width": kernel[0],
            "depth": count_of(shape, "blocks", "norm1.weight"),
            "patch": kernel[-1],
            "mlp_width": fc2[-1],
            "gated": is_gated,
            "registers": registers[-2] if registers else 0,
            "position_count": positions[-2] if positions and len(positions) > 1 else 0,
            "pre_norm": shape("norm_pre.weight") is not None,
            "layer_scale": shape("blocks.0.ls1.gamma") is not None,
            "pool": "flatten" if flatten else "attention" if shape("latent") else "class",
            "projection": projection[0] if projection else None,
        }


def block_count(params: Any) -> int:
    """Counts the blocks of a vision transformer with these parameters; 0 for other nets."""
    blocks = params.get("blocks", {})
    return len(blocks) if "attn" in blocks.get("0", {}) else 0


def prompts(key: jax.Array, params: Any, shape: Sequence[int]) -> jax.Array:
    """Draws prompts `[*shape width]`, tokens that blocks read beside the patches.

    They are uniform with variance 2 / (values of a patch + width), as in Jia et al. (ECCV 2022).
    """
    patch, _, channels, width = params["patch_embed"]["proj"]["kernel"].shape
    limit = (6 / (channels * patch * patch + width)) ** 0.5
    return uniform(limit)(key, (*shape, width))


_SHARED = sorted(set(Parts._fields) - {"hidden", "table", "is_causal"})
_CHOICES = {
    "positions": ("class", "patches", "rotary"),
    "pool": ("class", "attention", "flatten"),
    "resize": RESIZES,
}


# Widths, heads and depths of the published nets.
S: dict[str, Any] = {"width": 384, "heads": 6}
B: dict[str, Any] = {"width": 768, "heads": 12}
L: dict[str, Any] = {"width": 1024, "heads": 16, "depth": 24}
G: dict[str, Any] = {"width": 1536, "heads": 24, "depth": 40}
H: dict[str, Any] = {"width": 1280, "heads": 16, "depth": 32}
SO: dict[str, Any] = {"width": 1152, "heads": 16, "depth": 27, "hidden": 4304}
