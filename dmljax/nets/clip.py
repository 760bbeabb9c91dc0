"""Vision transformers that were trained on pairs of image and text, with their towers for text.

CLIP (Radford et al., ICML 2021), OpenCLIP (Cherti et al., CVPR 2023), SigLIP (Zhai et al., ICCV
2023), SigLIP 2 (Tschannen et al., 2025), and UNICOM (An et al., ICLR 2023), which has no text.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn

from dmljax.nets import files
from dmljax.nets.normalizations import CLIP, HALF
from dmljax.nets.transformer import TextTower, quick_gelu, tanh_gelu
from dmljax.nets.vit import SO, B, H, L, ViT

# Checkpoints of OpenAI need quick-GELU, most of OpenCLIP's the exact GELU. The tensors do not tell.
_openclip = functools.partial(
    ViT, pre_norm=True, patch_bias=False, epsilon=1e-5, expected_normalization=CLIP
)
_clip = functools.partial(_openclip, activation=quick_gelu)
clip_b32 = functools.partial(_clip, **B, patch=32, projection=512)
clip_b16 = functools.partial(_clip, **B, projection=512)
clip_l14 = functools.partial(_clip, **L, patch=14, projection=768)
clip_l14_336 = functools.partial(_clip, **L, patch=14, projection=768, image_size=336)
openclip_b32 = functools.partial(_openclip, **B, patch=32, projection=512)
openclip_b16 = functools.partial(_openclip, **B, projection=512)
openclip_l14 = functools.partial(_openclip, **L, patch=14, projection=768)
openclip_h14 = functools.partial(_openclip, **H, patch=14, projection=1024)

# SigLIP and SigLIP 2 are the same nets.
_siglip = functools.partial(
    ViT,
    class_token=False,
    positions="patches",
    pool="attention",
    activation=tanh_gelu,
    expected_normalization=HALF,
)
siglip_b16_224 = siglip2_b16_224 = functools.partial(_siglip, **B)
siglip_b16_256 = siglip2_b16_256 = functools.partial(_siglip, **B, image_size=256)
siglip_b16_384 = siglip2_b16_384 = functools.partial(_siglip, **B, image_size=384)
siglip_b16_512 = siglip2_b16_512 = functools.partial(_siglip, **B, image_size=512)
siglip_l16_256 = siglip2_l16_256 = functools.partial(_siglip, **L, image_size=256)
# 27 patches of 14 pixels. The authors resize to 384 and leave the last 6 pixels out.
siglip_so400m14_384 = functools.partial(_siglip, **SO, patch=14, image_size=378)
siglip2_so400m14_384 = siglip_so400m14_384
siglip2_so400m16_256 = functools.partial(_siglip, **SO, image_size=256)

_unicom = functools.partial(
    ViT,
    class_token=False,
    positions="patches",
    pool="flatten",
    biased="",
    epsilon=1e-5,
    activation=nn.relu6,
    projection=768,
    expected_normalization=CLIP,
)
unicom_b32 = functools.partial(_unicom, **B | {"projection": 512}, patch=32)
unicom_b16 = functools.partial(_unicom, **B)
unicom_l14 = functools.partial(_unicom, **L, patch=14)
unicom_l14_336 = functools.partial(_unicom, **L, patch=14, image_size=336)
__all__ = [
    name
    for name, value in list(globals().items())
    if isinstance(value, functools.partial) and not name.startswith("_")
]

_clip_text = functools.partial(TextTower, vocabulary=49408, end=49407)
_small = functools.partial(_clip_text, width=512, heads=8, projection=512)
_large = functools.partial(_clip_text, **B, projection=768)
_siglip2 = functools.partial(
    TextTower,
    vocabulary=256_000,
    length=64,
    activation=tanh_gelu,
    epsilon=1e-6,
    projection_bias=True,
)
# By the name of the net that embeds the images of the same checkpoint.
TOWERS: dict[str, Callable[..., TextTower]] = {
    name: tower
    for names, tower in (
        ("clip_b32 clip_b16", functools.partial(_small, activation=quick_gelu)),
        ("clip_l14 clip_l14_336", functools.partial(_large, activation=quick_gelu)),
        ("openclip_b32 openclip_b16", _small),
        ("openclip_l14", _large),
        ("openclip_h14", functools.partial(_clip_text, **L, projection=1024)),
        ("siglip2_b16_224 siglip2_b16_256", functools.partial(_siglip2, **B, projection=768)),
        ("siglip2_b16_384 siglip2_b16_512", functools.partial(_siglip2, **B, projection=768)),
        ("siglip2_l16_256", functools.partial(_siglip2, **L, projection=1024)),
        ("siglip2_so400m14_384", functools.partial(_siglip2, **SO, projection=1152)),
        ("siglip2_so400m16_256", functools.partial(_siglip2, **SO, projection=1152)),
    )
    for name in names.split()
}


class TokenRule(NamedTuple):
    """From the words of a tokenizer to the `length` tokens of a tower.

    `begin` and `end` are tokens in the vocabulary that are put around the words. What is missing
    is filled up by `padding`, and what is too long is cut before `end`.
    """

    length: int
    begin: str | None
    end: str
    padding: str
    lowercase: bool


def token_rule(net: str) -> TokenRule:
    """Returns the rule of the tower for the net of this name."""
    if net.startswith("siglip2"):
        return TokenRule(64, None, "<eos>", "<pad>", lowercase=True)
    return TokenRule(77, "<|startoftext|>", "<|endoftext|>", "<|endoftext|>", lowercase=True)


_OPENAI = "400 million pairs of image and text of the web, which may include your test images"
_LAION = "LAION-2B: 2 billion pairs of image and English text of the web"
_DATACOMP = "DataComp-1B: 1.4 billion pairs of image and text of the web"
_WEBLI = "WebLI: 10 billion pairs of image and text of the web, which may include your test images"
_URL = "https://github.com/deepglint/unicom/releases/download"
_LAION_400M = (
    "LAION-400M: pairs of the web, in clusters; open-metric-learning reports that test sets of "
    "retrieval (Cars, SOP) were part of it"
)


def _clip_file(net, repository, megabytes, data, size=224, normalize=CLIP) -> files.Published:
    inputs = files.Preprocessing(size, size, "bicubic", normalize)
    return files.Published(net, files.hub(repository), megabytes, files.MIT, data, inputs)


def _siglip_file(net: str, repository: str, size: int, megabytes: int) -> files.Published:
    inputs = files.Preprocessing(size, None, "bicubic", HALF)
    return files.Published(
        net, files.hub(f"google/{repository}"), megabytes, files.APACHE, _WEBLI, inputs
    )


def _unicom_file(name: str, digits: str, megabytes: int, size: int = 224) -> files.Published:
    folder = name.lower().replace("-", "", 1).replace("-", "_")
    inputs = files.Preprocessing(size, 256 if size == 224 else size, "bicubic", CLIP)
    about = megabytes, files.MIT, _LAION_400M, inputs, f"sha256:{digits}"
    url = f"{_URL}/{folder}/FP16-ViT-{name}.pt"
    return files.Published(f"unicom_{folder.removesuffix('px')}", url, *about)


_B32, _B16, _L14 = "laion/CLIP-ViT-B-32", "laion/CLIP-ViT-B-16", "laion/CLIP-ViT-L-14"
_SIGLIP = (
    *(
        _siglip_file(
            f"siglip{v}_b16_{size}", f"siglip{v}-base-patch16-{size}", size, 1500 if v else 813
        )
        for v in ("", "2")
        for size in (224, 256, 384, 512)
    ),
    _siglip_file("siglip_l16_256", "siglip-large-patch16-256", 256, 2609),
    _siglip_file("siglip2_l16_256", "siglip2-large-patch16-256", 256, 3526),
    _siglip_file("siglip_so400m14_384", "siglip-so400m-patch14-384", 378, 3511),
    _siglip_file("siglip2_so400m14_384", "siglip2-so400m-patch14-384", 378, 4544),
    _siglip_file("siglip2_so400m16_256", "siglip2-so400m-patch16-256", 256, 4544),
)
_UNICOM = (
    _unicom_file("B-32", "f9d5696a", 234),
    _unicom_file("B-16", "c04f324f", 404),
    _unicom_file("L-14", "ff3ab62f", 1145),
    _unicom_file("L-14-336px", "3916ab5a", 1817, 336),
)
PUBLISHED = {
    "clip_b32": _clip_file("clip_b32", "openai/clip-vit-base-patch32", 605, _OPENAI),
    "clip_b16": _clip_file("clip_b16", "openai/clip-vit-base-patch16", 599, _OPENAI),
    "clip_l14": _clip_file("clip_l14", "openai/clip-vit-large-patch14", 1711, _OPENAI),
    "clip_l14_336": _clip_file(
        "clip_l14_336", "openai/clip-vit-large-patch14-336", 1712, _OPENAI, 336
    ),
    "openclip_b32_laion2b": _clip_file("openclip_b32", f"{_B32}-laion2B-s34B-b79K", 605, _LAION),
    "openclip_b16_laion2b": _clip_file("openclip_b16", f"{_B16}-laion2B-s34B-b88K", 599, _LAION),
    "openclip_b16_datacomp": _clip_file(
        "openclip_b16", f"{_B16}-DataComp.XL-s13B-b90K", 599, _DATACOMP
    ),
    "openclip_l14_laion2b": _clip_file(
        "openclip_l14", f"{_L14}-laion2B-s32B-b82K", 1711, _LAION, normalize=HALF
    ),
    "openclip_l14_datacomp": _clip_file(
        "openclip_l14", f"{_L14}-DataComp.XL-s13B-b90K", 1711, _DATACOMP
    ),
    "openclip_h14_laion2b": _clip_file(
        "openclip_h14", "laion/CLIP-ViT-H-14-laion2B-s32B-b79K", 3945, _LAION
    ),
} | {entry.net: entry for entry in (*_SIGLIP, *_UNICOM)}


def _transformers_blocks(prefix: str) -> dict[str, str | files.Source]:
    """Maps the names of the blocks of a tower for images or text, CLIP's or SigLIP's."""
    return files.block_rules(
        f"{prefix}encoder.layers.*",
        norm1="layer_norm1",
        qkv=tuple(f"self_attn.{x}_proj" for x in "qkv"),
        proj="self_attn.out_proj",
        norm2="layer_norm2",
        fc1="mlp.fc1",
        fc2="mlp.fc2",
    )


def _openclip_blocks(prefix: str) -> dict[str, str | files.Source]:
    """Maps the same names in files of OpenCLIP."""
    block = f"{prefix}transformer.resblocks.*"
    return {
        "blocks.*.attn.qkv.weight": f"{block}.attn.in_proj_weight",
        "blocks.*.attn.qkv.bias": f"{block}.attn.in_proj_bias",
    } | files.block_rules(
        block, norm1="ln_1", proj="attn.out_proj", norm2="ln_2", fc1="mlp.c_fc", fc2="mlp.c_proj"
    )


def _transformers_rules(prefix: str) -> dict[str, str | files.Source]:
    """Maps the names of CLIP and SigLIP; a file of the image tower alone may lack the prefix."""
    return _transformers_blocks(prefix) | {
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


def _clip_transformers(prefix: str) -> files.NameMap:
    marks, rules = (f"{prefix}pre_layrnorm.weight",), _transformers_rules(prefix)
    return files.NameMap("CLIP, transformers", marks, rules, unused=_TEXT_TOWER, resize="torch")


def _siglip_transformers(prefix: str) -> files.NameMap:
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
        rules[f"attn_pool.q.{leaf}"] = files.Source(fused, rows=(0, 1, 3))
        rules[f"attn_pool.kv.{leaf}"] = files.Source(fused, rows=(1, 3, 3))
    marks = (f"{head}.probe", f"{prefix}encoder.layers.0.layer_norm1.weight")
    return files.NameMap("SigLIP, transformers", marks, rules, unused=_TEXT_TOWER, resize="torch")


def _siglip_timm(prefix: str, title: str) -> files.NameMap:
    """Maps timm's names, in which OpenCLIP also keeps its SigLIP nets."""
    names = ["pos_embed", "patch_embed.proj", "norm"]
    names += [f"blocks.*.{x}" for x in ("norm1", "norm2", "attn.qkv", "attn.proj")]
    names += ["blocks.*.mlp.fc1", "blocks.*.mlp.fc2", "attn_pool.mlp.fc1", "attn_pool.mlp.fc2"]
    names += [f"attn_pool.{x}" for x in ("q", "kv", "proj", "norm")]
    rules = {name: f"{prefix}{name}" for name in names} | {"latent": f"{prefix}attn_pool.latent"}
    unused = (r"text\..*", *_TEXT_TOWER)
    return files.NameMap(title, (rules["latent"],), rules, unused=unused, resize="antialiased")


NAME_MAPS = (
    _clip_transformers("vision_model."),
    _clip_transformers(""),
    files.NameMap(
        "CLIP, OpenCLIP",
        ("visual.ln_pre.weight",),
        rules=_openclip_blocks("visual.")
        | {
            "cls_token": "visual.class_embedding",
            "pos_embed": "visual.positional_embedding",
            "patch_embed.proj": "visual.conv1",
            "norm_pre": "visual.ln_pre",
            "norm": "visual.ln_post",
            "proj.weight": files.Source(("visual.proj",), transposed=True),
        },
        unused=_OPEN_TEXT_TOWER,
        resize="antialiased",
    ),
    files.NameMap(
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
    # The names are ours. The names of other nets, which lack `feature`, have other maps.
    files.NameMap("UNICOM", ("feature.0.weight", "blocks.0.attn.qkv.weight")),
)


def _text_transformers(projection: str, mark: str) -> files.NameMap:
    rules = _transformers_blocks("text_model.") | {
        "token_embed": _matrix("text_model.embeddings.token_embedding.weight"),
        "pos_embed": "text_model.embeddings.position_embedding.weight",
        "norm": "text_model.final_layer_norm",
        "proj": projection,
    }
    return files.NameMap("transformers", (mark,), rules)


def _text_openclip(prefix: str, projection: str | files.Source, mark: str) -> files.NameMap:
    rules = _openclip_blocks(prefix) | {
        "token_embed": _matrix(f"{prefix}token_embedding.weight"),
        "pos_embed": f"{prefix}positional_embedding",
        "norm": f"{prefix}ln_final",
        "proj.weight" if isinstance(projection, files.Source) else "proj": projection,
    }
    return files.NameMap("OpenCLIP", (mark,), rules)


def _matrix(name: str) -> files.Source:
    """Returns a matrix that is not a kernel, so that its axes stay."""
    return files.Source((name,), transposed=True)


TEXT_NAME_MAPS = (
    _text_transformers("text_model.head", "text_model.head.weight"),
    _text_transformers("text_projection", "text_projection.weight"),
    _text_openclip("text.", "text.text_projection", "text.text_projection.weight"),
    _text_openclip("", _matrix("text_projection"), "text_projection"),
)
