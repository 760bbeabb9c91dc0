"""Towers that embed text beside the images of CLIP (Radford et al., ICML 2021) and SigLIP 2.

A tower is a module `tower(tokens [b n]) -> [b d]`. Its vectors are compared with those of the image
tower of the same checkpoint by cosine similarity.
"""

import functools
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from dmljax import ops
from dmljax.nets import layers
from dmljax.nets.initializers import normal
from dmljax.nets.layers import Dtype
from dmljax.nets.transformer import Parts, gelu, quick_gelu, tanh_gelu
from dmljax.ops import Array

__all__ = ["TOWERS", "TextTower"]


class TextTower(nn.Module, kw_only=True):
    """A transformer over `length` tokens; one token gives the vector of the text.

    With an `end` token, a token sees only itself and the tokens before it, and the vector is that
    of the first `end` (CLIP). Without it, all tokens see each other, padding included, and the
    last token gives the vector (SigLIP). `projection` is the width of the last linear layer,
    which has a bias if `projection_bias`.
    """

    vocabulary: int
    width: int
    heads: int
    depth: int = 12
    length: int = 77
    hidden: int | None = None
    activation: Callable = gelu
    epsilon: float = 1e-5
    end: int | None = None
    projection: int
    projection_bias: bool = False
    dtype: Dtype | None = None

    @nn.compact
    def __call__(self, tokens: Int[Array, "b n"]) -> Float[jax.Array, "b d"]:
        if tokens.shape[1] != self.length:
            raise ValueError(f"the tower takes {self.length} tokens, not {tokens.shape[1]}")
        parts = Parts(
            width=self.width,
            heads=self.heads,
            hidden=self.hidden or 4 * self.width,
            activation=self.activation,
            epsilon=self.epsilon,
            is_causal=self.end is not None,
            dtype=self.dtype,
        )

        def blocks(x):
            for i in range(self.depth):
                x = layers.named(str(i), parts.block, x)
            return x

        words = self.param("token_embed", normal(0.02), (self.vocabulary, self.width))
        positions = self.param("pos_embed", normal(0.01), (1, self.length, self.width))
        x = jnp.asarray(jnp.take(words, tokens, axis=0) + positions, self.dtype)
        x = parts.norm(layers.named("blocks", blocks, x), "norm")
        last = jnp.full(tokens.shape[0], self.length - 1)
        if self.end is not None:
            last = jnp.argmax(tokens == self.end, axis=1)
        x = jnp.take_along_axis(x, last.reshape(-1, 1, 1), axis=1)[:, 0]
        return ops.widen(parts.dense(x, self.projection, "proj", self.projection_bias))


_clip = functools.partial(TextTower, vocabulary=49408, end=49407)
_small = functools.partial(_clip, width=512, heads=8, projection=512)
_large = functools.partial(_clip, width=768, heads=12, projection=768)
_siglip2 = functools.partial(
    TextTower,
    vocabulary=256_000,
    length=64,
    activation=tanh_gelu,
    epsilon=1e-6,
    projection_bias=True,
)
_siglip2_b = functools.partial(_siglip2, width=768, heads=12, projection=768)
_siglip2_so = functools.partial(
    _siglip2, width=1152, heads=16, depth=27, hidden=4304, projection=1152
)

# By the name of the net that embeds the images of the same checkpoint.
TOWERS: dict[str, Callable[..., TextTower]] = {
    "clip_b32": functools.partial(_small, activation=quick_gelu),
    "clip_b16": functools.partial(_small, activation=quick_gelu),
    "clip_l14": functools.partial(_large, activation=quick_gelu),
    "clip_l14_336": functools.partial(_large, activation=quick_gelu),
    "openclip_b32": _small,
    "openclip_b16": _small,
    "openclip_l14": _large,
    "openclip_h14": functools.partial(_clip, width=1024, heads=16, depth=24, projection=1024),
    "siglip2_b16_224": _siglip2_b,
    "siglip2_b16_256": _siglip2_b,
    "siglip2_b16_384": _siglip2_b,
    "siglip2_b16_512": _siglip2_b,
    "siglip2_l16_256": functools.partial(_siglip2, width=1024, heads=16, depth=24, projection=1024),
    "siglip2_so400m14_384": _siglip2_so,
    "siglip2_so400m16_256": _siglip2_so,
}
