"""Which published net a file or a net is, by its sizes and parts."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dmljax.weights.names import NameMap

# One name per architecture, in the names of our nets, that no architecture below has.
_ARCHITECTURES = {
    "layer1.0.conv1.weight": "a resnet",
    "inception3a.branch1.conv.weight": "googlenet_bn, torchvision's",
    "inception_3a.1x1.weight": "googlenet, Caffe's",
    "inception_3a_1x1.weight": "bn_inception",
    "features.1.conv.0.0.weight": "a mobilenet_v2",
    "blocks.0.0.conv_dw.weight": "an efficientnet_lite",
    "_blocks.0._depthwise_conv.weight": "an efficientnet_lite",
    "stages.0.blocks.0.conv_dw.weight": "a convnext",
    "blocks.0.attn.qkv.weight": "a vit",
}


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


class _Stages(NamedTuple):
    """What tensors tell of a net of convolutions."""

    family: str
    widths: tuple[int, ...]
    blocks: tuple[int, ...] = ()
    bottleneck: bool = False


def nets_of(tensors: Mapping[str, np.ndarray], name_map: NameMap) -> list[str]:
    """Returns the published nets that fit the tensors of a file."""
    facts = _facts_of_file(tensors, name_map)
    return [name for name, other in _facts_of_nets().items() if other == facts]


def names_of(net: Any) -> list[str]:
    """Returns the published nets with the sizes and parts of `net`."""
    facts = _facts_of_net(net)
    return [name for name, other in _facts_of_nets().items() if other == facts]


def listed(names: Sequence[str]) -> str:
    """Lists names of nets for a sentence.

    >>> listed(["efficientnet_lite0"]), listed(["siglip_b16_224", "siglip2_b16_224"])
    ('an efficientnet_lite0', 'a siglip_b16_224 or siglip2_b16_224')
    """
    return f"{'an' if names[0][0] in 'aeio' else 'a'} {' or '.join(names)}"


@functools.cache
def _facts_of_nets() -> dict[str, _Facts | _Stages]:
    from dmljax.nets import convnext, efficientnet, mobilenet, resnet, vit

    modules = (vit, convnext, efficientnet, mobilenet, resnet)
    nets = {name: getattr(module, name)() for module in modules for name in module.__all__}
    return {name: facts for name, net in nets.items() if (facts := _facts_of_net(net))}


def _facts_of_net(net: Any) -> _Facts | _Stages | None:
    from dmljax.nets import convnext, efficientnet, mobilenet, resnet, vit

    if isinstance(net, convnext.ConvNeXt):
        return _Stages("convnext", (net.width,), tuple(net.blocks))
    if isinstance(net, efficientnet.EfficientNetLite):
        return _Stages("efficientnet_lite", net.widths, net.repeats)
    if isinstance(net, mobilenet.MobileNetV2):
        return _Stages("mobilenet_v2", (32, 1280)) if net.multiplier == 1 else None
    if isinstance(net, resnet.ResNet):
        return _Stages("resnet", (net.width, net.width), tuple(net.blocks), net.bottleneck)
    if not isinstance(net, vit.ViT):
        return None
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


def _facts_of_file(tensors: Mapping[str, np.ndarray], name_map: NameMap) -> _Facts | _Stages | None:
    def shape(name: str, gated: bool = False) -> tuple[int, ...] | None:
        source = name_map.source(name, gated=gated)
        if not all(name in tensors for name in source.names):
            return None
        array = tensors[source.names[0]]
        return array.shape[::-1] if source.transposed else array.shape

    if facts := _stages_of_file(shape):
        # Nets with squeeze-and-excitation have all tensors of a net without it.
        return None if any(".se." in n or "._se_" in n for n in tensors) else facts
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


def _stages_of_file(shape: Callable[[str], tuple[int, ...] | None]) -> _Stages | None:
    def rows(*names: str) -> tuple[int, ...]:
        shapes = (shape(f"{name}.weight") for name in names)
        return tuple(found[0] for found in shapes if found)

    def count(stage: str, part: str) -> int:
        number = 0
        while shape(f"{stage}.{number}.{part}"):
            number += 1
        return number

    if len(ends := rows("features.0.0", "features.18.0")) == 2:
        return _Stages("mobilenet_v2", ends)
    if shape("stages.0.blocks.0.gamma"):
        blocks = (count(f"stages.{i}.blocks", "gamma") for i in range(4))
        return _Stages("convnext", rows("stem.0"), tuple(blocks))
    if shape("layer1.0.conv1.weight"):
        blocks = (count(f"layer{i}", "conv1.weight") for i in range(1, 5))
        # Wide nets and nets of groups have another width in the blocks than in front.
        widths = rows("conv1", "layer1.0.conv1")
        return _Stages("resnet", widths, tuple(blocks), bool(shape("layer1.0.conv3.weight")))
    if shape("blocks.0.0.conv_dw.weight"):
        last = ("conv_pw", *["conv_pwl"] * 6)
        widths = rows(*(f"blocks.{i}.0.{name}" for i, name in enumerate(last)))
        blocks = (count(f"blocks.{i}", "conv_dw.weight") for i in range(7))
        return _Stages("efficientnet_lite", widths, tuple(blocks))
    return None


def architecture(tensors: Mapping[str, np.ndarray], name_map: NameMap) -> str | None:
    """Describes the architecture of a file, for a message."""
    for name, words in _ARCHITECTURES.items():
        if all(source in tensors for source in name_map.source(name).names):
            return words
    return None
