"""Vision transformers of DINO (Caron et al., ICCV 2021) and of ImageNet-21k (augreg)."""

from dmljax.normalizations import HALF
from dmljax.weights.entries import APACHE, BICUBIC, Preprocessing, Published, hub
from dmljax.weights.names import NameMap, joined

_URL = "https://dl.fbaipublicfiles.com/dino"
_DATA = "ImageNet-1k, without labels"
_21K = "ImageNet-21k, with labels; ImageNet's terms of use speak of research and may bind you"
_AUGREG = Preprocessing(shorter=248, filter="bicubic", normalize=HALF)


def _published(net: str, file: str, megabytes: int) -> Published:
    url = f"{_URL}/{file}/{file}.pth"
    return Published(net, url, "", megabytes, APACHE, _DATA, BICUBIC)


def _augreg(size: str, megabytes: int) -> Published:
    url = hub(f"timm/vit_{size}_patch16_224.augreg_in21k")
    return Published(f"augreg_{size[0]}16", url, "", megabytes, APACHE, _21K, _AUGREG)


PUBLISHED = {
    "dino_vits16": _published("vit_s16", "dino_deitsmall16_pretrain", 87),
    "dino_vitb16": _published("vit_b16", "dino_vitbase16_pretrain", 343),
    "augreg_s16": _augreg("small", 120),
    "augreg_b16": _augreg("base", 410),
    "augreg_l16": _augreg("large", 1303),
}

TRANSFORMERS_5 = (
    (r"attention\.attention\.query$", "attention.q_proj"),
    (r"attention\.attention\.key$", "attention.k_proj"),
    (r"attention\.attention\.value$", "attention.v_proj"),
    (r"attention\.output\.dense$", "attention.o_proj"),
    (r"intermediate\.dense$", "mlp.fc1"),
    (r"(\.\d+)\.output\.dense$", r"\1.mlp.fc2"),
)
_LAYER = "encoder.layer.*"
NAME_MAPS = (
    NameMap(
        "ViT, transformers",
        marks=("encoder.layer.0.layernorm_before.weight",),
        rules={
            "cls_token": "embeddings.cls_token",
            "pos_embed": "embeddings.position_embeddings",
            "patch_embed.proj": "embeddings.patch_embeddings.projection",
            "blocks.*.norm1": f"{_LAYER}.layernorm_before",
            "blocks.*.attn.qkv": joined(
                *(f"{_LAYER}.attention.attention.{part}" for part in ("query", "key", "value"))
            ),
            "blocks.*.attn.proj": f"{_LAYER}.attention.output.dense",
            "blocks.*.norm2": f"{_LAYER}.layernorm_after",
            "blocks.*.mlp.fc1": f"{_LAYER}.intermediate.dense",
            "blocks.*.mlp.fc2": f"{_LAYER}.output.dense",
            "norm": "layernorm",
        },
        unused=(r"pooler\..*",),
        resize="torch",
        renamed=(*TRANSFORMERS_5, (r"^encoder\.layer\.", "layers.")),
    ),
)
