"""CLIP (Radford et al., ICML 2021) and OpenCLIP (Cherti et al., CVPR 2023): the image towers."""

from dmljax.normalizations import CLIP, HALF
from dmljax.weights.entries import MIT, Preprocessing, Published, hub
from dmljax.weights.names import NameMap, Source, joined

_OPENAI = "400 million pairs of image and text of the web, which may include your test images"
_LAION = "LAION-2B: 2 billion pairs of image and English text of the web"
_DATACOMP = "DataComp-1B: 1.4 billion pairs of image and text of the web"


def _published(net, repository, megabytes, data, size=224, normalize=CLIP) -> Published:
    inputs = Preprocessing(size, size, "bicubic", normalize)
    return Published(net, hub(repository), "", megabytes, MIT, data, inputs)


_L_336 = "openai/clip-vit-large-patch14-336"
PUBLISHED = {
    "clip_b32": _published("clip_b32", "openai/clip-vit-base-patch32", 605, _OPENAI),
    "clip_b16": _published("clip_b16", "openai/clip-vit-base-patch16", 599, _OPENAI),
    "clip_l14": _published("clip_l14", "openai/clip-vit-large-patch14", 1711, _OPENAI),
    "clip_l14_336": _published("clip_l14_336", _L_336, 1712, _OPENAI, 336),
    "openclip_b32_laion2b": _published(
        "openclip_b32", "laion/CLIP-ViT-B-32-laion2B-s34B-b79K", 605, _LAION
    ),
    "openclip_b16_laion2b": _published(
        "openclip_b16", "laion/CLIP-ViT-B-16-laion2B-s34B-b88K", 599, _LAION
    ),
    "openclip_b16_datacomp": _published(
        "openclip_b16", "laion/CLIP-ViT-B-16-DataComp.XL-s13B-b90K", 599, _DATACOMP
    ),
    "openclip_l14_laion2b": _published(
        "openclip_l14", "laion/CLIP-ViT-L-14-laion2B-s32B-b82K", 1711, _LAION, normalize=HALF
    ),
    "openclip_l14_datacomp": _published(
        "openclip_l14", "laion/CLIP-ViT-L-14-DataComp.XL-s13B-b90K", 1711, _DATACOMP
    ),
    "openclip_h14_laion2b": _published(
        "openclip_h14", "laion/CLIP-ViT-H-14-laion2B-s32B-b79K", 3945, _LAION
    ),
}


def transformers_blocks(prefix: str) -> dict[str, str | Source]:
    """Maps the names of the blocks of a tower for images or text, CLIP's or SigLIP's."""
    layer = f"{prefix}encoder.layers.*"
    return {
        "blocks.*.norm1": f"{layer}.layer_norm1",
        "blocks.*.attn.qkv": joined(*(f"{layer}.self_attn.{x}_proj" for x in "qkv")),
        "blocks.*.attn.proj": f"{layer}.self_attn.out_proj",
        "blocks.*.norm2": f"{layer}.layer_norm2",
        "blocks.*.mlp.fc1": f"{layer}.mlp.fc1",
        "blocks.*.mlp.fc2": f"{layer}.mlp.fc2",
    }


def openclip_blocks(prefix: str) -> dict[str, str | Source]:
    """Maps the same names in files of OpenCLIP."""
    block = f"{prefix}transformer.resblocks.*"
    return {
        "blocks.*.norm1": f"{block}.ln_1",
        "blocks.*.attn.qkv.weight": f"{block}.attn.in_proj_weight",
        "blocks.*.attn.qkv.bias": f"{block}.attn.in_proj_bias",
        "blocks.*.attn.proj": f"{block}.attn.out_proj",
        "blocks.*.norm2": f"{block}.ln_2",
        "blocks.*.mlp.fc1": f"{block}.mlp.c_fc",
        "blocks.*.mlp.fc2": f"{block}.mlp.c_proj",
    }


def transformers_rules(prefix: str) -> dict[str, str | Source]:
    """Maps the names of CLIP and SigLIP; a file of the image tower alone may lack the prefix."""
    return transformers_blocks(prefix) | {
        "cls_token": f"{prefix}embeddings.class_embedding",
        "pos_embed": f"{prefix}embeddings.position_embedding.weight",
        "patch_embed.proj": f"{prefix}embeddings.patch_embedding",
        "norm_pre": f"{prefix}pre_layrnorm",
        "norm": f"{prefix}post_layernorm",
        "proj": "visual_projection",
    }


TEXT_TOWER = (
    r"text_model\..*",
    r"text_projection(\.weight|\.bias)?",
    r"logit_(scale|bias)",
    r".*\.position_ids",
)
_OPEN_TEXT_TOWER = (
    r"transformer\..*",
    r"text\..*",
    r"token_embedding\.weight",
    r"positional_embedding",
    r"ln_final\..*",
    r"attn_mask",
    *TEXT_TOWER,
)
NAME_MAPS = (
    *(
        NameMap(
            "CLIP, transformers",
            (f"{prefix}pre_layrnorm.weight",),
            rules=transformers_rules(prefix),
            unused=TEXT_TOWER,
            resize="torch",
        )
        for prefix in ("vision_model.", "")
    ),
    NameMap(
        "CLIP, OpenCLIP",
        ("visual.ln_pre.weight",),
        rules=openclip_blocks("visual.")
        | {
            "cls_token": "visual.class_embedding",
            "pos_embed": "visual.positional_embedding",
            "patch_embed.proj": "visual.conv1",
            "norm_pre": "visual.ln_pre",
            "norm": "visual.ln_post",
            "proj.weight": Source(("visual.proj",), transposed=True),
        },
        unused=_OPEN_TEXT_TOWER,
        resize="antialiased",
    ),
    NameMap(
        "CLIP, timm",
        ("norm_pre.weight",),
        rules={"proj": "head"},
        zeros=(r"head\.bias",),
        resize="antialiased",
    ),
)
