"""ConvNeXt (Liu et al., CVPR 2022): timm, transformers, the authors."""

from dmljax.weights.entries import APACHE, BICUBIC, IMAGENET, Published, hub
from dmljax.weights.names import NameMap

_22K = IMAGENET.replace("1k", "22k")

PUBLISHED = {
    f"convnext_{size[0]}": Published(
        f"convnext_{size[0]}",
        hub(f"timm/convnext_{size}.fb_in22k"),
        megabytes,
        APACHE,
        _22K,
        BICUBIC,
    )
    for size, megabytes in (("tiny", 178), ("small", 265), ("base", 440), ("large", 919))
}


def _transformers(prefix: str) -> NameMap:
    layer = f"{prefix}encoder.stages.*.layers.*"
    return NameMap(
        "ConvNeXt, transformers",
        marks=(f"{prefix}encoder.stages.0.layers.0.dwconv.weight",),
        rules={
            "stem.0": f"{prefix}embeddings.patch_embeddings",
            "stem.1": f"{prefix}embeddings.layernorm",
            "stages.*.downsample.*": f"{prefix}encoder.stages.*.downsampling_layer.*",
            "stages.*.blocks.*.gamma": f"{layer}.layer_scale_parameter",
            "stages.*.blocks.*.conv_dw": f"{layer}.dwconv",
            "stages.*.blocks.*.norm": f"{layer}.layernorm",
            "stages.*.blocks.*.mlp.fc1": f"{layer}.pwconv1",
            "stages.*.blocks.*.mlp.fc2": f"{layer}.pwconv2",
            "head.norm": f"{prefix}layernorm",
            "head.fc": "classifier",
        },
    )


_BLOCK, _OURS = "stages.*.*", "stages.*.blocks.*"
_ORIGINAL = NameMap(
    "ConvNeXt, original",
    marks=("downsample_layers.0.0.weight", "stages.0.0.dwconv.weight"),
    rules={
        "stem.*": "downsample_layers.0.*",
        "stages.*.downsample.*": "downsample_layers.*.*",
        f"{_OURS}.gamma": f"{_BLOCK}.gamma",
        f"{_OURS}.conv_dw": f"{_BLOCK}.dwconv",
        f"{_OURS}.norm": f"{_BLOCK}.norm",
        f"{_OURS}.mlp.fc1": f"{_BLOCK}.pwconv1",
        f"{_OURS}.mlp.fc2": f"{_BLOCK}.pwconv2",
        "head.norm": "norm",
        "head.fc": "head",
    },
)

# A file of the backbone alone has no prefix.
NAME_MAPS = (_transformers("convnext."), _transformers(""), _ORIGINAL)
