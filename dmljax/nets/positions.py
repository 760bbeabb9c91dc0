"""Positions of patches in vision transformers: learned grids at any size, and rotary angles.

Published codes resize a learned grid in three ways, which differ by per cents: `RESIZES`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from dmljax.ops import Array

__all__ = ["RESIZES", "at_size", "resized", "rotary_table", "rotated"]

# 'torch': PyTorch's plain bicubic (Keys' kernel with a = -0.75, edges repeated), as in
# transformers' DINOv2, ViT, CLIP and SigLIP. 'torch_offset': the same with centers of a grid that
# is 0.1 longer, as in the codes of DINO and of DINOv2 without registers. 'antialiased': PyTorch's
# bicubic with antialiasing (a = -0.5), as in timm and in DINOv2 with registers.
RESIZES = ("torch", "torch_offset", "antialiased")


def resized(
    positions: Float[Array, "1 n d"], grid: tuple[int, int], to: tuple[int, int], rule: str
) -> Float[jax.Array, "1 m d"]:
    """Positions of a grid `[h w]`, resized to another by a rule of `RESIZES`.

    Positions before the grid, such as one of a class token, stay as they are.
    """
    if to == grid:
        return jnp.asarray(positions)
    prefix = positions.shape[1] - grid[0] * grid[1]
    maps = positions[:, prefix:].reshape(*grid, -1)
    rows, columns = (
        _bicubic(*sides, rule).astype(np.float32) for sides in zip(grid, to, strict=True)
    )
    maps = jnp.einsum("yh,xw,hwd->yxd", rows, columns, maps, precision="highest")
    maps = maps.reshape(1, to[0] * to[1], -1)
    return jnp.concatenate((positions[:, :prefix], maps), axis=1) if prefix else maps


def at_size(net: Any, variables: Any, size: tuple[int, int]) -> tuple[Any, Any]:
    """Returns the same net for images of `size` (height, width), with learned positions of that
    size.

    Their resizing happens once, here, and no longer at every call. `net` is a `nets.vit.ViT`;
    others have no learned positions, and stay. `variables` is a tree that holds the net's variables
    in any place, as the variables of a method do; its other arrays stay.

    >>> from dmljax.nets import dinov2_s14  # for images of 518 pixels
    >>> at_size(dinov2_s14(), {}, (224, 280))[0].image_size
    (224, 280)
    """
    before = getattr(net, "grid", None)
    if before is None or net.positions == "rotary":
        return net, variables
    to = (size[0] // net.patch, size[1] // net.patch)
    if before == to:
        return net, variables
    shape = (1, net.position_count, net.width)

    def convert(path, x):
        if getattr(path[-1], "key", None) != "pos_embed" or x.shape != shape:
            return x
        return np.asarray(resized(x, before, to, net.resize))

    image_size = size[0] if size[0] == size[1] else tuple(size)
    return net.clone(image_size=image_size), jax.tree_util.tree_map_with_path(convert, variables)


def _bicubic(before: int, after: int, rule: str) -> Float[np.ndarray, "after before"]:
    """Builds the matrix that resizes a line with Keys' kernel.

    `jax.image.resize` has these matrices too ("cubic-pytorch", and "cubic" with antialiasing), but
    no offset, and antialiasing cannot be converted to ONNX.
    """
    antialiased = rule == "antialiased"
    a, offset = -0.5 if antialiased else -0.75, 0.1 if rule == "torch_offset" else 0.0
    center = (np.arange(after)[:, None] + 0.5) * before / (after + offset) - 0.5
    # With antialiasing the kernel is stretched, and cut at the edges; else edges are repeated.
    index = np.arange(before) if antialiased else np.arange(-2, before + 2)
    t = np.abs(center - index) / (max(before / after, 1) if antialiased else 1)
    near = (a + 2) * t**3 - (a + 3) * t**2 + 1
    far = a * (t**3 - 5 * t**2 + 8 * t - 4)
    taps = np.where(t <= 1, near, np.where(t < 2, far, 0))
    if antialiased:
        return taps / taps.sum(axis=1, keepdims=True)
    weights = np.zeros((before, after))
    np.add.at(weights, np.clip(index, 0, before - 1), taps.T)
    return weights.T


def rotary_table(h: int, w: int, size: int) -> Float[np.ndarray, "2 n size"]:
    """Cosines and sines of the rotary angles of h x w patches, for heads of `size` channels.

    Rows and columns of patch centers run from -1 to 1, whatever the number of patches. The angles
    are 2 pi y / period, then 2 pi x / period, with size / 4 periods from 1 to 100 (DINOv3, Siméoni
    et al., 2025). They are repeated once, for the two halves of the channels.
    """
    if size % 4:
        raise ValueError(f"rotary positions need heads of a multiple of 4 channels, not {size}")
    periods = 100 ** (np.arange(size // 4) / (size / 4))
    y, x = (2 * (np.arange(n) + 0.5) / n - 1 for n in (h, w))
    centers = np.stack(np.meshgrid(y, x, indexing="ij"), axis=-1).reshape(h * w, 2, 1)
    angles = np.tile((2 * np.pi * centers / periods).reshape(h * w, size // 2), 2)
    return np.stack((np.cos(angles), np.sin(angles))).astype(np.float32)


def rotated(
    x: Float[Array, "b n heads size"], table: Float[np.ndarray, "2 m size"]
) -> Float[jax.Array, "b n heads size"]:
    """Queries or keys with their last m tokens rotated; computed in float32."""
    cos, sin = table[:, None, :, None]
    prefix, patches = jnp.split(x, [x.shape[1] - table.shape[1]], axis=1)
    first, second = jnp.split(patches.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate((-second, first), axis=-1)
    patches = jnp.concatenate((first, second), axis=-1) * cos + turned * sin
    return jnp.concatenate((prefix, patches.astype(x.dtype)), axis=1)
