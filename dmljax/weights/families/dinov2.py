"""DINOv2 (Oquab et al., TMLR 2024), with and without registers."""

from typing import Any

from dmljax.weights.entries import APACHE, BICUBIC, Published, hub
from dmljax.weights.families.dino import TRANSFORMERS_5
from dmljax.weights.names import NameMap, Source, joined

_URL = "https://dl.fbaipublicfiles.com/dinov2"
_DATA = (
    "LVD-142M: 142 million images of the web without labels, chosen by likeness to public data "
    "sets, which may include your test images"
)


def _published(size: str, megabytes: int, registers: str) -> Published:
    net, repository = f"dinov2_{size[0]}14", f"facebook/dinov2-{registers}{size}"
    if registers:
        net = f"{net}_reg"
    return Published(net, hub(repository), "", megabytes, APACHE, _DATA, BICUBIC)


_SIZES = {"small": 88, "base": 346, "large": 1217, "giant": 4546}
PUBLISHED = {
    entry.net: entry
    for registers in ("", "with-registers-")
    for entry in (_published(size, mb, registers) for size, mb in _SIZES.items())
}

_LAYER = "encoder.layer.*"
_MASK = (r"(embeddings\.)?mask_token",)
_TRANSFORMERS = {
    "cls_token": "embeddings.cls_token",
    "pos_embed": "embeddings.position_embeddings",
    "reg_token": "embeddings.register_tokens",
    "patch_embed.proj": "embeddings.patch_embeddings.projection",
    "blocks.*.norm1": f"{_LAYER}.norm1",
    "blocks.*.attn.qkv": joined(
        *(f"{_LAYER}.attention.attention.{part}" for part in ("query", "key", "value"))
    ),
    "blocks.*.attn.proj": f"{_LAYER}.attention.output.dense",
    "blocks.*.ls1.gamma": f"{_LAYER}.layer_scale1.lambda1",
    "blocks.*.norm2": f"{_LAYER}.norm2",
    "blocks.*.mlp.fc1": f"{_LAYER}.mlp.fc1",
    "blocks.*.mlp.fc2": f"{_LAYER}.mlp.fc2",
    "blocks.*.ls2.gamma": f"{_LAYER}.layer_scale2.lambda1",
    "norm": "layernorm",
}


def _swiglu(fused: str, last: str) -> dict[str, str | Source]:
    """Maps one matrix to the gate and the values, the gate first."""
    return {
        "blocks.*.mlp.gate": Source((fused,), rows=(0, 1, 2)),
        "blocks.*.mlp.fc1": Source((fused,), rows=(1, 2, 2)),
        "blocks.*.mlp.fc2": last,
    }


def _maps(
    title: str,
    marks: tuple[str, ...],
    register_mark: str,
    resizes: tuple[str, str],
    **keywords: Any,
) -> tuple[NameMap, NameMap]:
    """Returns the maps of a naming for files with registers and for files without them."""
    return (
        NameMap(f"{title}, registers", (*marks, register_mark), resize=resizes[1], **keywords),
        NameMap(title, marks, resize=resizes[0], **keywords),
    )


NAME_MAPS = (
    *_maps(
        "DINOv2, transformers",
        ("encoder.layer.0.layer_scale1.lambda1",),
        "embeddings.register_tokens",
        ("torch", "antialiased"),
        rules=_TRANSFORMERS,
        gated_rules=_swiglu(f"{_LAYER}.mlp.weights_in", f"{_LAYER}.mlp.weights_out"),
        unused=_MASK,
        renamed=TRANSFORMERS_5,
    ),
    # timm adds the position of the class token into the token of the nets with registers.
    NameMap(
        "DINOv2, registers, timm",
        ("blocks.0.ls1.gamma", "reg_token", "pos_embed"),
        rules={"pos_embed": Source(("pos_embed",), zero_row=True)},
        gated_rules=_swiglu("blocks.*.mlp.fc1", "blocks.*.mlp.fc2"),
        resize="antialiased",
    ),
    *_maps(
        "DINOv2, original",
        ("mask_token", "pos_embed"),
        "register_tokens",
        ("torch_offset", "antialiased"),
        rules={"reg_token": "register_tokens"},
        gated_rules=_swiglu("blocks.*.mlp.w12", "blocks.*.mlp.w3"),
        unused=_MASK,
    ),
    NameMap(
        "DINOv2, timm",
        ("blocks.0.ls1.gamma", "pos_embed"),
        gated_rules=_swiglu("blocks.*.mlp.fc1", "blocks.*.mlp.fc2"),
        resize="antialiased",
    ),
)
