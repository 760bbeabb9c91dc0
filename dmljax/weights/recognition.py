"""Which published net a file or a net is, by its sizes and parts."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn

# One name per architecture, in the names of our nets, that no architecture below has.
_ARCHITECTURES = {
    "layer1.0.conv1.weight": "a resnet",
    "inception3a.branch1.conv.weight": "googlenet_bn, torchvision's",
    "inception_3a.1x1.weight": "googlenet, Caffe's",
    "inception_3a_1x1.weight": "bn_inception",
    "features.1.conv.0.0.weight": "a mobilenet_v2",
    "blocks.0.0.conv_dw.weight": "an efficientnet_lite",
    "stages.0.blocks.0.conv_dw.weight": "a convnext",
    "blocks.0.attn.qkv.weight": "a vit",
}
# shape("layer1.0.conv1.weight") -> the shape of this tensor or None, with PyTorch's axes; with
# gated=True, by the names of a file for a net with gated MLPs.
ShapeFn = Callable[..., tuple[int, ...] | None]


def names_of(shape: ShapeFn) -> list[str]:
    """Returns the published nets with the sizes and parts that the shapes of tensors tell.

    They tell neither the activation nor the number of heads.
    """
    for recognize in (_mobilenet, _convnext, _resnet, _efficientnet, _vit):
        if facts := recognize(shape):
            family = recognize.__name__.strip("_")
            return [
                name
                for name, (module, net) in _published_nets().items()
                if module == family and all(getattr(net, k) == v for k, v in facts.items())
            ]
    return []


def listed(names: Sequence[str]) -> str:
    """Lists names of nets for a sentence.

    >>> listed(["efficientnet_lite0"]), listed(["siglip_b16_224", "siglip2_b16_224"])
    ('an efficientnet_lite0', 'a siglip_b16_224 or siglip2_b16_224')
    """
    return f"{'an' if names[0][0] in 'aeio' else 'a'} {' or '.join(names)}"


def architecture(shape: ShapeFn) -> str | None:
    """Describes the architecture of a file, for a message."""
    return next((words for name, words in _ARCHITECTURES.items() if shape(name)), None)


@functools.cache
def _published_nets() -> dict[str, tuple[str, nn.Module]]:
    from dmljax.nets import convnext, efficientnet, mobilenet, resnet, vit

    return {
        name: (module.__name__.rpartition(".")[2], getattr(module, name)())
        for module in (vit, convnext, efficientnet, mobilenet, resnet)
        for name in module.__all__
    }


def _rows(shape: ShapeFn, *names: str) -> tuple[int, ...]:
    shapes = (shape(f"{name}.weight") for name in names)
    return tuple(found[0] if found else 0 for found in shapes)


def _count(shape: ShapeFn, stage: str, part: str) -> int:
    number = 0
    while shape(f"{stage}.{number}.{part}"):
        number += 1
    return number


def _mobilenet(shape: ShapeFn) -> dict[str, Any] | None:
    ends = _rows(shape, "features.0.0", "features.18.0")
    return {"multiplier": 1.0 if ends == (32, 1280) else None} if all(ends) else None


def _convnext(shape: ShapeFn) -> dict[str, Any] | None:
    blocks = tuple(_count(shape, f"stages.{i}.blocks", "gamma") for i in range(4))
    return {"width": _rows(shape, "stem.0")[0], "blocks": blocks} if blocks[0] else None


def _resnet(shape: ShapeFn) -> dict[str, Any] | None:
    # Wide nets and nets of groups have another width in the blocks than in front.
    width, width_of_block = _rows(shape, "conv1", "layer1.0.conv1")
    blocks = tuple(_count(shape, f"layer{i}", "conv1.weight") for i in range(1, 5))
    facts = {"bottleneck": bool(shape("layer1.0.conv3.weight")), "blocks": blocks}
    return facts | {"width": width if width == width_of_block else None} if blocks[0] else None


def _efficientnet(shape: ShapeFn) -> dict[str, Any] | None:
    if shape("blocks.1.0.se.conv_reduce.weight"):
        return None  # an EfficientNet, which has all tensors of a lite one
    repeats = tuple(_count(shape, f"blocks.{i}", "conv_dw.weight") for i in range(7))
    last = ("blocks.0.0.conv_pw", *(f"blocks.{i}.0.conv_pwl" for i in range(1, 7)))
    rows = _rows(shape, "conv_stem", *last, "conv_head")
    channels = dict(zip(("stem", *map(str, range(7)), "head"), rows, strict=True))
    return {"channels": channels, "repeats": repeats} if repeats[0] else None


def _vit(shape: ShapeFn) -> dict[str, Any] | None:
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
        "depth": _count(shape, "blocks", "norm1.weight"),
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
