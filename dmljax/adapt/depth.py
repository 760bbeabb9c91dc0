"""How deep a parameter of a backbone lies, from its path alone.

A block is a transformer block, a residual or inverted residual block, an inception module, a block
of ConvNeXt with the downsampling before it, or a convolution of the small nets.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

# The blocks of one family each. The first family that matches a path of the net is taken: the
# stages of ConvNeXt are tried before the blocks of transformers.
_FAMILIES = {
    "convnext": r"(?:^|/)stages/(\d+)/(?:downsample|blocks/(\d+))/",
    "efficientnet": r"(?:^|/)blocks/(\d+)/(\d+)/",
    "vit": r"(?:^|/)blocks/(\d+)/",
    "resnet": r"(?:^|/)layer(\d+)/(\d+)/",
    "mobilenet": r"(?:^|/)features/(\d+)/",
    "inception": r"(?:^|/)inception_?(\d)([a-e])",
    "convnet": r"(?:^|/)conv(\d+)(?:/|$)",
}
_BEFORE_BLOCKS = re.compile(
    r"(^|/)(cls_token|reg_token|pos_embed|patch_embed|norm_pre|stem|conv_stem|conv\d|bn1)(/|_|$)"
)
# The published groups of ConvNeXt: three blocks of its long stage are a layer, and the other stages
# are one layer each.
_LONG_STAGE = 2
_TOKENS = re.compile(r"(^|/)(cls_token|reg_token|pos_embed|latent|prompts)$")


class Blocks(NamedTuple):
    """The blocks of a net: `of[path]` is the number of a parameter's block, from 0.

    It is -1 before the first block, and `total` after the last one.
    """

    of: Mapping[str, int]
    total: int


def blocks(paths: Iterable[str]) -> Blocks:
    """Lists the blocks of the parameters of a backbone; `total` is 0 if no family has such paths.

    >>> blocks(["cls_token", "blocks/0/norm1/scale", "norm/scale"])
    Blocks(of={'cls_token': -1, 'blocks/0/norm1/scale': 0, 'norm/scale': 1}, total=1)
    """
    paths = list(paths)
    return _numbered(paths, _places(paths)[1])


def layer_factors(paths: Iterable[str], decay: float) -> dict[str, float]:
    """Computes the learning-rate factor of each parameter of a backbone: decay ** (L + 1 - layer).

    (Layer-wise rate decay: Howard & Ruder, ACL 2018; for vision transformers Bao et al., ICLR
    2022.) The embedding of patches, tokens and positions, or the stem, are layer 0; block i is
    layer i + 1 of L; what stands behind the last block has the factor 1. ConvNeXt has the layers of
    its published code, where three blocks of the third stage are one. Without blocks there are no
    factors.
    """
    paths = list(paths)
    family, places = _places(paths)
    if family == "convnext":
        places = {p: (s, i // 3 if s == _LONG_STAGE else 0) for p, (s, i) in places.items()}
    layers = _numbered(paths, places)
    if not layers.total:
        return {}
    return {path: decay ** (layers.total - layer) for path, layer in layers.of.items()}


def is_spared_from_decay(path: str, ndim: int) -> bool:
    """Returns whether weight decay skips a parameter: vectors, tokens and positions.

    Vectors are biases, the scales of norms, and LayerScale. The others are class tokens, registers,
    prompts, learned positions and the query of attention pooling.
    """
    return ndim < 2 or _TOKENS.search(path) is not None


def _places(paths: Collection[str]) -> tuple[str, dict[str, tuple]]:
    """Finds the family of a net, and the block index of each parameter that lies in a block."""
    for family, pattern in _FAMILIES.items():
        matches = {path: re.search(pattern, path) for path in paths}
        if any(matches.values()):
            return family, {
                path: tuple(map(_number, match.groups()))
                for path, match in matches.items()
                if match
            }
    return "", {}


def _number(text: str | None) -> int:
    """Returns the index of a block in its stage; inception modules have letters."""
    return int(text) if text and text.isdigit() else ord(text or "\0")


def _numbered(paths: Iterable[str], places: Mapping[str, tuple]) -> Blocks:
    order = {place: i for i, place in enumerate(sorted(set(places.values())))}
    numbers = {}
    for path in paths:
        outside = -1 if _BEFORE_BLOCKS.search(path) else len(order)
        numbers[path] = order[places[path]] if path in places else outside
    return Blocks(numbers, len(order))
