"""DINO (Caron et al., ICCV 2021), DINOv2 (Oquab et al., TMLR 2024) with and without registers,
DINOv3 (Siméoni et al., 2025), and the vision transformers of ImageNet-21k (augreg).
"""

import functools
from typing import Any

from dmljax.nets import files
from dmljax.nets.normalizations import HALF
from dmljax.nets.transformer import silu
from dmljax.nets.vit import B, G, L, S, ViT

# DINO (Caron et al., ICCV 2021) and the ViTs of ImageNet-21k (Steiner et al., TMLR 2022).
_dino = functools.partial(ViT, resize="torch_offset")
vit_s16 = functools.partial(_dino, **S)
vit_b16 = functools.partial(_dino, **B)
_augreg = functools.partial(ViT, resize="antialiased", expected_normalization=HALF)
augreg_s16 = functools.partial(_augreg, **S)
augreg_b16 = functools.partial(_augreg, **B)
augreg_l16 = functools.partial(_augreg, **L)

# DINOv2 (Oquab et al., TMLR 2024), with registers (Darcet et al., ICLR 2024).
_dinov2 = functools.partial(ViT, patch=14, image_size=518, layer_scale=True)
_dinov2_reg = functools.partial(_dinov2, registers=4, resize="antialiased")
_SWIGLU: dict[str, Any] = {"hidden": 4096, "gated": True, "activation": silu}
dinov2_s14 = functools.partial(_dinov2, **S)
dinov2_b14 = functools.partial(_dinov2, **B)
dinov2_l14 = functools.partial(_dinov2, **L)
dinov2_g14 = functools.partial(_dinov2, **G, **_SWIGLU)
dinov2_s14_reg = functools.partial(_dinov2_reg, **S)
dinov2_b14_reg = functools.partial(_dinov2_reg, **B)
dinov2_l14_reg = functools.partial(_dinov2_reg, **L)
dinov2_g14_reg = functools.partial(_dinov2_reg, **G, **_SWIGLU)

# DINOv3 (Siméoni et al., 2025).
_dinov3 = functools.partial(
    ViT, positions="rotary", registers=4, biased="qv", layer_scale=True, epsilon=1e-5
)
dinov3_s16 = functools.partial(_dinov3, **S)
dinov3_splus16 = functools.partial(_dinov3, **S, hidden=1536, gated=True, activation=silu)
dinov3_b16 = functools.partial(_dinov3, **B)
dinov3_l16 = functools.partial(_dinov3, **L)
dinov3_hplus16 = functools.partial(
    _dinov3, width=1280, heads=20, depth=32, hidden=5120, gated=True, activation=silu
)
__all__ = [
    name
    for name, value in list(globals().items())
    if isinstance(value, functools.partial) and not name.startswith("_")
]

_LABELS = "ImageNet-21k, with labels; ImageNet's terms of use speak of research and may bind you"
_AUGREG = files.Preprocessing(shorter=248, filter="bicubic", normalize=HALF)
_LVD_142 = (
    "LVD-142M: 142 million images of the web without labels, chosen by likeness to public data "
    "sets, which may include your test images"
)
_LVD_1689 = "LVD-1689M: 1.7 billion images of the web without labels"
_DINOV3 = files.License(
    "DINOv3 License",
    "under these terms",
    "pass on the weights, and what is fine-tuned from them, only under this license with a copy of "
    "it (https://ai.meta.com/resources/models-and-libraries/dinov3-license); no military, nuclear "
    "or weapons use; name DINOv3 in publications",
)


def _dino_file(net: str, file: str, megabytes: int) -> files.Published:
    url = f"https://dl.fbaipublicfiles.com/dino/{file}/{file}.pth"
    return files.Published(
        net, url, megabytes, files.APACHE, "ImageNet-1k, without labels", files.BICUBIC
    )


def _augreg_file(size: str, megabytes: int) -> files.Published:
    url = files.hub(f"timm/vit_{size}_patch16_224.augreg_in21k")
    return files.Published(f"augreg_{size[0]}16", url, megabytes, files.APACHE, _LABELS, _AUGREG)


def _dinov2_file(size: str, megabytes: int, registers: str) -> files.Published:
    net, url = f"dinov2_{size[0]}14", files.hub(f"facebook/dinov2-{registers}{size}")
    net = f"{net}_reg" if registers else net
    return files.Published(net, url, megabytes, files.APACHE, _LVD_142, files.BICUBIC)


def _dinov3_file(net: str, size: str, timm: str, megabytes: int) -> files.Published:
    # timm's copy is not gated, and has the same license.
    gated = f"facebook/dinov3-{size}-pretrain-lvd1689m"
    urls = files.hub(f"timm/vit_{timm}_patch16_dinov3_qkvb.lvd1689m"), files.hub(gated)
    # The README resizes to 256 x 256 without keeping the aspect ratio.
    inputs = files.Preprocessing(256, None, "bilinear", "imagenet")
    access = f"{gated} answers only to accounts whose request for access was granted there; "
    access += "timm's copy has the same license and no gate"
    return files.Published(net, urls, megabytes, _DINOV3, _LVD_1689, inputs, access=access)


_V2 = {"small": 88, "base": 346, "large": 1217, "giant": 4546}
_NAMED = {
    "dino_vits16": _dino_file("vit_s16", "dino_deitsmall16_pretrain", 87),
    "dino_vitb16": _dino_file("vit_b16", "dino_vitbase16_pretrain", 343),
}
_AS_NETS = (
    _augreg_file("small", 120),
    _augreg_file("base", 410),
    _augreg_file("large", 1303),
    *(_dinov2_file(size, megabytes, "") for size, megabytes in _V2.items()),
    *(_dinov2_file(size, megabytes, "with-registers-") for size, megabytes in _V2.items()),
    _dinov3_file("dinov3_s16", "vits16", "small", 87),
    _dinov3_file("dinov3_splus16", "vits16plus", "small_plus", 115),
    _dinov3_file("dinov3_b16", "vitb16", "base", 343),
    _dinov3_file("dinov3_l16", "vitl16", "large", 1213),
    _dinov3_file("dinov3_hplus16", "vith16plus", "huge_plus", 3363),
)
PUBLISHED = _NAMED | {entry.net: entry for entry in _AS_NETS}

_TRANSFORMERS_5 = (
    (r"attention\.attention\.query$", "attention.q_proj"),
    (r"attention\.attention\.key$", "attention.k_proj"),
    (r"attention\.attention\.value$", "attention.v_proj"),
    (r"attention\.output\.dense$", "attention.o_proj"),
    (r"intermediate\.dense$", "mlp.fc1"),
    (r"(\.\d+)\.output\.dense$", r"\1.mlp.fc2"),
)
_LAYER = "encoder.layer.*"
_QKV = tuple(f"attention.attention.{part}" for part in ("query", "key", "value"))
_EMBEDDINGS = {
    "cls_token": "embeddings.cls_token",
    "pos_embed": "embeddings.position_embeddings",
    "reg_token": "embeddings.register_tokens",
    "patch_embed.proj": "embeddings.patch_embeddings.projection",
    "norm": "layernorm",
}
_VIT = files.NameMap(
    "ViT, transformers",
    marks=("encoder.layer.0.layernorm_before.weight",),
    rules=_EMBEDDINGS
    | files.block_rules(
        _LAYER,
        norm1="layernorm_before",
        qkv=_QKV,
        proj="attention.output.dense",
        norm2="layernorm_after",
        fc1="intermediate.dense",
        fc2="output.dense",
    ),
    unused=(r"pooler\..*",),
    resize="torch",
    renamed=(*_TRANSFORMERS_5, (r"^encoder\.layer\.", "layers.")),
)

_MASK = (r"(embeddings\.)?mask_token",)
_SCALES = {"ls1": "layer_scale1.lambda1", "ls2": "layer_scale2.lambda1"}


def _swiglu(fused: str, last: str) -> dict[str, str | files.Source]:
    """Maps one matrix to the gate and the values, the gate first."""
    return {
        "blocks.*.mlp.gate": files.Source((fused,), rows=(0, 1, 2)),
        "blocks.*.mlp.fc1": files.Source((fused,), rows=(1, 2, 2)),
        "blocks.*.mlp.fc2": last,
    }


def _maps(
    title: str, marks: tuple[str, ...], register_mark: str, resize: str, **keywords: Any
) -> tuple[files.NameMap, files.NameMap]:
    """Returns the maps of a naming for files with registers and for files without them."""
    name_map = files.NameMap(title, marks, resize=resize, unused=_MASK, **keywords)
    marks = (*marks, register_mark)
    return name_map._replace(
        title=f"{title}, registers", marks=marks, resize="antialiased"
    ), name_map


_DINOV2_MAPS = (
    *_maps(
        "DINOv2, transformers",
        ("encoder.layer.0.layer_scale1.lambda1",),
        "embeddings.register_tokens",
        "torch",
        rules=_EMBEDDINGS
        | files.block_rules(
            _LAYER,
            norm1="norm1",
            qkv=_QKV,
            proj="attention.output.dense",
            norm2="norm2",
            fc1="mlp.fc1",
            fc2="mlp.fc2",
            **_SCALES,
        ),
        gated_rules=_swiglu(f"{_LAYER}.mlp.weights_in", f"{_LAYER}.mlp.weights_out"),
        renamed=_TRANSFORMERS_5,
    ),
    # timm adds the position of the class token into the token of the nets with registers.
    files.NameMap(
        "DINOv2, registers, timm",
        ("blocks.0.ls1.gamma", "reg_token", "pos_embed"),
        rules={"pos_embed": files.Source(("pos_embed",), zero_row=True)},
        gated_rules=_swiglu("blocks.*.mlp.fc1", "blocks.*.mlp.fc2"),
        resize="antialiased",
    ),
    *_maps(
        "DINOv2, original",
        ("mask_token", "pos_embed"),
        "register_tokens",
        "torch_offset",
        rules={"reg_token": "register_tokens"},
        gated_rules=_swiglu("blocks.*.mlp.w12", "blocks.*.mlp.w3"),
    ),
    files.NameMap(
        "DINOv2, timm",
        ("blocks.0.ls1.gamma", "pos_embed"),
        gated_rules=_swiglu("blocks.*.mlp.fc1", "blocks.*.mlp.fc2"),
        resize="antialiased",
    ),
)

_QKV_BIAS = "blocks.*.attn.qkv.bias"
_DINOV3_MAPS = (
    files.NameMap(
        "DINOv3, transformers",
        ("embeddings.register_tokens", "layer.0.attention.q_proj.weight"),
        rules={
            "cls_token": "embeddings.cls_token",
            "reg_token": "embeddings.register_tokens",
            "patch_embed.proj": "embeddings.patch_embeddings",
            "blocks.*.attn.bias.q": "layer.*.attention.q_proj.bias",
            "blocks.*.attn.bias.v": "layer.*.attention.v_proj.bias",
        }
        | files.block_rules(
            "layer.*",
            norm1="norm1",
            qkv=tuple(f"attention.{x}_proj" for x in "qkv"),
            proj="attention.o_proj",
            norm2="norm2",
            gate="mlp.gate_proj",
            fc1="mlp.up_proj",
            fc2="mlp.down_proj",
            **_SCALES,
        ),
        renamed=((r"^layer\.", "model.layer."),),
    ),
    files.NameMap(
        "DINOv3, original",
        ("storage_tokens",),
        rules={
            "reg_token": "storage_tokens",
            # The bias of keys, the middle third, is masked by the original code.
            "blocks.*.attn.bias.q": files.Source((_QKV_BIAS,), rows=(0, 1, 3)),
            "blocks.*.attn.bias.v": files.Source((_QKV_BIAS,), rows=(2, 3, 3)),
        },
        gated_rules=files.block_rules("blocks.*", gate="mlp.w1", fc1="mlp.w2", fc2="mlp.w3"),
    ),
    files.NameMap(
        "DINOv3, timm",
        ("blocks.0.gamma_1", "reg_token"),
        rules={
            # Biases that are zero in the trained nets; files called `_qkvb` keep them.
            "blocks.*.attn.bias.q": files.Source(("blocks.*.attn.q_bias",), zero_if_missing=True),
            "blocks.*.attn.bias.v": files.Source(("blocks.*.attn.v_bias",), zero_if_missing=True),
        }
        | files.block_rules("blocks.*", ls1="gamma_1", ls2="gamma_2"),
        gated_rules=files.block_rules("blocks.*", gate="mlp.fc1_g", fc1="mlp.fc1_x"),
    ),
)
_DINOV3_UNUSED = (
    *_MASK,
    r"rope_embed\.periods",
    r"local_cls_norm\..*",
    r"blocks\.\d+\.attn\.qkv\.bias_mask",
)
NAME_MAPS = (
    _VIT,
    *_DINOV2_MAPS,
    *(name_map._replace(unused=_DINOV3_UNUSED) for name_map in _DINOV3_MAPS),
)
