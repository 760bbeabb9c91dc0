"""Which published vision transformer a file or a net is, by its sizes and parts."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from dmljax.weights.name_maps import NameMap


class _Facts(NamedTuple):
    """What tensors tell of a net. They tell neither the activation nor the number of heads."""

    width: int
    depth: int
    patch: int
    hidden: int
    gated: bool
    registers: int
    positions: int
    pre_norm: bool
    layer_scale: bool
    pool: str
    projection: int | None


def transformers(tensors: Mapping[str, np.ndarray], name_map: NameMap) -> list[str]:
    """The nets of `nets.vit` that fit the tensors of a file."""
    facts = _facts_of_file(tensors, name_map)
    return [name for name, other in _facts_of_nets().items() if other == facts]


def names_of(net: Any) -> list[str]:
    """The nets of `nets.vit` with the sizes and parts of `net`."""
    from dmljax.nets import vit  # here, so that reading files does not import all nets

    if not isinstance(net, vit.ViT):
        return []
    facts = _facts_of_net(net)
    return [name for name, other in _facts_of_nets().items() if other == facts]


@functools.cache
def _facts_of_nets() -> dict[str, _Facts]:
    from dmljax.nets import vit

    return {name: _facts_of_net(getattr(vit, name)()) for name in vit.__all__}


def _facts_of_net(net: Any) -> _Facts:
    grid = math.prod(net.grid) + (net.positions == "class")
    return _Facts(
        net.width,
        net.depth,
        net.patch,
        net.hidden or 4 * net.width,
        net.gated,
        net.registers,
        0 if net.positions == "rotary" else grid,
        net.pre_norm,
        net.layer_scale,
        net.pool,
        net.projection,
    )


def _facts_of_file(tensors: Mapping[str, np.ndarray], name_map: NameMap) -> _Facts | None:
    def shape(name: str, gated: bool = False) -> tuple[int, ...] | None:
        source = name_map.source(name, gated=gated)
        if not all(name in tensors for name in source.names):
            return None
        array = tensors[source.names[0]]
        return array.shape[::-1] if source.transposed else array.shape

    kernel, depth = shape("patch_embed.proj.weight"), 0
    while shape(f"blocks.{depth}.norm1.weight"):
        depth += 1
    last, last_gated = (shape("blocks.0.mlp.fc2.weight", gated) for gated in (False, True))
    fc2 = last or last_gated
    if kernel is None or fc2 is None or len(kernel) != 4 or len(fc2) != 2:
        return None
    gate = shape("blocks.0.mlp.gate.weight", gated=True)
    fused = name_map.source("blocks.0.mlp.gate", gated=True).rows is not None
    positions, tokens = shape("pos_embed"), shape("reg_token")
    zero_row = name_map.source("pos_embed").zero_row
    flatten, latent = shape("feature.2.weight"), shape("latent")
    projection = flatten or shape("proj.weight")
    return _Facts(
        kernel[0],
        depth,
        kernel[-1],
        fc2[-1],
        gate is not None and gate[0] == fc2[-1] * (2 if fused else 1),
        tokens[-2] if tokens and len(tokens) > 1 else 0,
        positions[-2] + zero_row if positions and len(positions) > 1 else 0,
        shape("norm_pre.weight") is not None,
        shape("blocks.0.ls1.gamma") is not None,
        "flatten" if flatten else "attention" if latent else "class",
        projection[0] if projection else None,
    )
