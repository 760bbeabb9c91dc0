"""Prompts: tokens that the blocks of a vision transformer read beside the patches."""

from collections.abc import Sequence
from typing import Any

import jax

from dmljax.nets.initializers import uniform

__all__ = ["block_count", "prompts"]


def block_count(params: Any) -> int:
    """Counts the blocks of a vision transformer with these parameters; 0 for other nets."""
    blocks = params.get("blocks", {})
    return len(blocks) if "attn" in blocks.get("0", {}) else 0


def prompts(key: jax.Array, params: Any, shape: Sequence[int]) -> jax.Array:
    """Prompts `[*shape width]` for a vision transformer, drawn as in Jia et al. (ECCV 2022).

    They are uniform with variance 2 / (values of a patch + width).
    """
    kernel = params["patch_embed"]["proj"]["kernel"]  # [p p c width]
    patch, _, channels, width = kernel.shape
    limit = (6 / (channels * patch * patch + width)) ** 0.5
    return uniform(limit)(key, (*shape, width))
