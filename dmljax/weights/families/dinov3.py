"""DINOv3 (Siméoni et al., 2025)."""

from dmljax.weights.entries import License, Preprocessing, Published, hub
from dmljax.weights.names import NameMap, Source, joined

LICENSE = License(
    "DINOv3 License",
    "under these terms",
    "pass on the weights, and what is fine-tuned from them, only under this license with a copy of "
    "it (https://ai.meta.com/resources/models-and-libraries/dinov3-license); no military, nuclear "
    "or weapons use; name DINOv3 in publications",
)
_DATA = "LVD-1689M: 1.7 billion images of the web without labels"
# The README resizes to 256 x 256 without keeping the aspect ratio.
_INPUT = Preprocessing(256, None, "bilinear", "imagenet")
_FILES = {
    "dinov3_s16": ("vits16", "small", 87),
    "dinov3_splus16": ("vits16plus", "small_plus", 115),
    "dinov3_b16": ("vitb16", "base", 343),
    "dinov3_l16": ("vitl16", "large", 1213),
    "dinov3_hplus16": ("vith16plus", "huge_plus", 3363),
}
# timm's copy is not gated, and has the same license.
PUBLISHED = {
    net: Published(
        net,
        (
            hub(f"timm/vit_{timm}_patch16_dinov3_qkvb.lvd1689m"),
            hub(f"facebook/dinov3-{size}-pretrain-lvd1689m"),
        ),
        "",
        megabytes,
        LICENSE,
        _DATA,
        _INPUT,
        access=f"facebook/dinov3-{size}-pretrain-lvd1689m answers only to accounts whose request "
        "for access was granted there; timm's copy has the same license and no gate",
    )
    for net, (size, timm, megabytes) in _FILES.items()
}

_UNUSED = (
    r"(embeddings\.)?mask_token",
    r"rope_embed\.periods",
    r"local_cls_norm\..*",
    r"blocks\.\d+\.attn\.qkv\.bias_mask",
)
_QKV_BIAS = "blocks.*.attn.qkv.bias"
NAME_MAPS = (
    NameMap(
        "DINOv3, transformers",
        ("embeddings.register_tokens", "layer.0.attention.q_proj.weight"),
        rules={
            "cls_token": "embeddings.cls_token",
            "reg_token": "embeddings.register_tokens",
            "patch_embed.proj": "embeddings.patch_embeddings",
            "blocks.*.norm1": "layer.*.norm1",
            "blocks.*.attn.qkv": joined(*(f"layer.*.attention.{x}_proj" for x in "qkv")),
            "blocks.*.attn.bias.q": "layer.*.attention.q_proj.bias",
            "blocks.*.attn.bias.v": "layer.*.attention.v_proj.bias",
            "blocks.*.attn.proj": "layer.*.attention.o_proj",
            "blocks.*.ls1.gamma": "layer.*.layer_scale1.lambda1",
            "blocks.*.norm2": "layer.*.norm2",
            "blocks.*.mlp.gate": "layer.*.mlp.gate_proj",
            "blocks.*.mlp.fc1": "layer.*.mlp.up_proj",
            "blocks.*.mlp.fc2": "layer.*.mlp.down_proj",
            "blocks.*.ls2.gamma": "layer.*.layer_scale2.lambda1",
        },
        unused=_UNUSED,
        renamed=((r"^layer\.", "model.layer."),),
    ),
    NameMap(
        "DINOv3, original",
        ("storage_tokens",),
        rules={
            "reg_token": "storage_tokens",
            # The bias of keys, the middle third, is masked by the original code.
            "blocks.*.attn.bias.q": Source((_QKV_BIAS,), rows=(0, 1, 3)),
            "blocks.*.attn.bias.v": Source((_QKV_BIAS,), rows=(2, 3, 3)),
        },
        gated_rules={
            "blocks.*.mlp.gate": "blocks.*.mlp.w1",
            "blocks.*.mlp.fc1": "blocks.*.mlp.w2",
            "blocks.*.mlp.fc2": "blocks.*.mlp.w3",
        },
        unused=_UNUSED,
    ),
    NameMap(
        "DINOv3, timm",
        ("blocks.0.gamma_1", "reg_token"),
        rules={
            # Biases that are zero in the trained nets; files called `_qkvb` keep them.
            "blocks.*.attn.bias.q": Source(("blocks.*.attn.q_bias",), zero_if_missing=True),
            "blocks.*.attn.bias.v": Source(("blocks.*.attn.v_bias",), zero_if_missing=True),
            "blocks.*.ls1.gamma": "blocks.*.gamma_1",
            "blocks.*.ls2.gamma": "blocks.*.gamma_2",
        },
        gated_rules={
            "blocks.*.mlp.gate": "blocks.*.mlp.fc1_g",
            "blocks.*.mlp.fc1": "blocks.*.mlp.fc1_x",
        },
        unused=_UNUSED,
    ),
)
