"""CLIP (Radford et al., ICML 2021), OpenCLIP (Cherti et al., CVPR 2023), SigLIP (Zhai et al., ICCV
2023) and SigLIP 2 (Tschannen et al., 2025): the image towers.
"""

from dmljax.normalizations import CLIP, HALF
from dmljax.weights.entries import APACHE, MIT, Preprocessing, Published, hub
from dmljax.weights.names import NameMap, Source, block_rules

_OPENAI = "400 million pairs of image and text of the web, which may include your test images"
_LAION = "LAION-2B: 2 billion pairs of image and English text of the web"
_DATACOMP = "DataComp-1B: 1.4 billion pairs of image and text of the web"
_WEBLI = "WebLI: 10 billion pairs of image and text of the web, which may include your test images"


def _clip(net, repository, megabytes, data, size=224, normalize=CLIP) -> Published:
    inputs = Preprocessing(size, size, "bicubic", normalize)
    return Published(net, hub(repository), megabytes, MIT, data, inputs)


def _siglip(net: str, repository: str, size: int, megabytes: int) -> Published:
    inputs = Preprocessing(size, None, "bicubic", HALF)
    return Published(net, hub(f"google/{repository}"), megabytes, APACHE, _WEBLI, inputs)


_B32, _B16, _L14 = "laion/CLIP-ViT-B-32", "laion/CLIP-ViT-B-16", "laion/CLIP-ViT-L-14"
_SIGLIP = (
    *(
        _siglip(f"siglip{v}_b16_{size}", f"siglip{v}-base-patch16-{size}", size, 1500 if v else 813)
        for v in ("", "2")
        for size in (224, 256, 384, 512)
    ),
    _siglip("siglip_l16_256", "siglip-large-patch16-256", 256, 2609),
    _siglip("siglip2_l16_256", "siglip2-large-patch16-256", 256, 3526),
    _siglip("siglip_so400m14_384", "siglip-so400m-patch14-384", 378, 3511),
    _siglip("siglip2_so400m14_384", "siglip2-so400m-patch14-384", 378, 4544),
    _siglip("siglip2_so400m16_256", "siglip2-so400m-patch16-256", 256, 4544),
)
PUBLISHED = {
    "clip_b32": _clip("clip_b32", "openai/clip-vit-base-patch32", 605, _OPENAI),
    "clip_b16": _clip("clip_b16", "openai/clip-vit-base-patch16", 599, _OPENAI),
    "clip_l14": _clip("clip_l14", "openai/clip-vit-large-patch14", 1711, _OPENAI),
    "clip_l14_336": _clip("clip_l14_336", "openai/clip-vit-large-patch14-336", 1712, _OPENAI, 336),
    "openclip_b32_laion2b": _clip("openclip_b32", f"{_B32}-laion2B-s34B-b79K", 605, _LAION),
    "openclip_b16_laion2b": _clip("openclip_b16", f"{_B16}-laion2B-s34B-b88K", 599, _LAION),
    "openclip_b16_datacomp": _clip("openclip_b16", f"{_B16}-DataComp.XL-s13B-b90K", 599, _DATACOMP),
    "openclip_l14_laion2b": _clip(
        "openclip_l14", f"{_L14}-laion2B-s32B-b82K", 1711, _LAION, normalize=HALF
    ),
    "openclip_l14_datacomp": _clip(
        "openclip_l14", f"{_L14}-DataComp.XL-s13B-b90K", 1711, _DATACOMP
    ),
    "openclip_h14_laion2b": _clip(
        "openclip_h14", "laion/CLIP-ViT-H-14-laion2B-s32B-b79K", 3945, _LAION
    ),
} | {entry.net: entry for entry in _SIGLIP}


def transformers_blocks(prefix: str) -> dict[str, str | Source]:
    """Maps the names of the blocks of a tower for images or text, CLIP's or SigLIP's."""
    return block_rules(
        f"{prefix}encoder.layers.*",
        norm1="layer_norm1",
        qkv=tuple(f"self_attn.{x}_proj" for x in "qkv"),
        proj="self_attn.out_proj",
        norm2="layer_norm2",
        fc1="mlp.fc1",
        fc2="mlp.fc2",
    )


def openclip_blocks(prefix: str) -> dict[str, str | Source]:
    """Maps the same names in files of OpenCLIP."""
    block = f"{prefix}transformer.resblocks.*"
    return {
        "blocks.*.attn.qkv.weight": f"{block}.attn.in_proj_weight",
        "blocks.*.attn.qkv.bias": f"{block}.attn.in_proj_bias",
    } | block_rules(
        block, norm1="ln_1", proj="attn.out_proj", norm2="ln_2", fc1="mlp.c_fc", fc2="mlp.c_proj"
    )


def _transformers_rules(prefix: str) -> dict[str, str | Source]:
    """Maps the names of CLIP and SigLIP; a file of the image tower alone may lack the prefix."""
    return transformers_blocks(prefix) | {
        "cls_token": f"{prefix}embeddings.class_embedding",
        "pos_embed": f"{prefix}embeddings.position_embedding.weight",
        "patch_embed.proj": f"{prefix}embeddings.patch_embedding",
        "norm_pre": f"{prefix}pre_layrnorm",
        "norm": f"{prefix}post_layernorm",
        "proj": "visual_projection",
    }


_TEXT_TOWER = (
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
    *_TEXT_TOWER,
)


def _clip_transformers(prefix: str) -> NameMap:
    marks, rules = (f"{prefix}pre_layrnorm.weight",), _transformers_rules(prefix)
    return NameMap("CLIP, transformers", marks, rules, unused=_TEXT_TOWER, resize="torch")


def _siglip_transformers(prefix: str) -> NameMap:
    head = f"{prefix}head"
    rules = _transformers_rules(prefix) | {
        "latent": f"{head}.probe",
        "attn_pool.proj": f"{head}.attention.out_proj",
        "attn_pool.norm": f"{head}.layernorm",
        "attn_pool.mlp.fc1": f"{head}.mlp.fc1",
        "attn_pool.mlp.fc2": f"{head}.mlp.fc2",
    }
    for leaf in ("weight", "bias"):
        fused = (f"{head}.attention.in_proj_{leaf}",)
        rules[f"attn_pool.q.{leaf}"] = Source(fused, rows=(0, 1, 3))
        rules[f"attn_pool.kv.{leaf}"] = Source(fused, rows=(1, 3, 3))
    marks = (f"{head}.probe", f"{prefix}encoder.layers.0.layer_norm1.weight")
    return NameMap("SigLIP, transformers", marks, rules, unused=_TEXT_TOWER, resize="torch")


def _siglip_timm(prefix: str, title: str) -> NameMap:
    """Maps timm's names, in which OpenCLIP also keeps its SigLIP nets."""
    names = ["pos_embed", "patch_embed.proj", "norm"]
    names += [f"blocks.*.{x}" for x in ("norm1", "norm2", "attn.qkv", "attn.proj")]
    names += ["blocks.*.mlp.fc1", "blocks.*.mlp.fc2", "attn_pool.mlp.fc1", "attn_pool.mlp.fc2"]
    names += [f"attn_pool.{x}" for x in ("q", "kv", "proj", "norm")]
    rules = {name: f"{prefix}{name}" for name in names} | {"latent": f"{prefix}attn_pool.latent"}
    unused = (r"text\..*", *_TEXT_TOWER)
    return NameMap(title, (rules["latent"],), rules, unused=unused, resize="antialiased")


NAME_MAPS = (
    _clip_transformers("vision_model."),
    _clip_transformers(""),
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
    _siglip_transformers("vision_model."),
    _siglip_transformers(""),
    _siglip_timm("", "SigLIP, timm"),
    _siglip_timm("visual.trunk.", "SigLIP, OpenCLIP"),
)
