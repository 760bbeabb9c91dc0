"""SigLIP (Zhai et al., ICCV 2023) and SigLIP 2 (Tschannen et al., 2025): the image towers."""

from dmljax.normalizations import HALF
from dmljax.weights.entries import APACHE, Preprocessing, Published, hub
from dmljax.weights.families.clip import TEXT_TOWER, transformers_rules
from dmljax.weights.names import NameMap, Source

_DATA = "WebLI: 10 billion pairs of image and text of the web, which may include your test images"


def _published(net: str, repository: str, size: int, megabytes: int) -> Published:
    inputs = Preprocessing(size, None, "bicubic", HALF)
    return Published(net, hub(f"google/{repository}"), "", megabytes, APACHE, _DATA, inputs)


PUBLISHED = {
    f"siglip{v}_b16_{size}": _published(
        f"siglip{v}_b16_{size}", f"siglip{v}-base-patch16-{size}", size, 1500 if v else 813
    )
    for v in ("", "2")
    for size in (224, 256, 384, 512)
}
PUBLISHED |= {
    name: _published(name, repository, size, megabytes)
    for name, repository, size, megabytes in (
        ("siglip_l16_256", "siglip-large-patch16-256", 256, 2609),
        ("siglip2_l16_256", "siglip2-large-patch16-256", 256, 3526),
        ("siglip_so400m14_384", "siglip-so400m-patch14-384", 378, 3511),
        ("siglip2_so400m14_384", "siglip2-so400m-patch14-384", 378, 4544),
        ("siglip2_so400m16_256", "siglip2-so400m-patch16-256", 256, 4544),
    )
}


def _transformers(prefix: str) -> NameMap:
    head = f"{prefix}head"
    fused, bias = f"{head}.attention.in_proj_weight", f"{head}.attention.in_proj_bias"
    rules = transformers_rules(prefix) | {
        "latent": f"{head}.probe",
        "attn_pool.q.weight": Source((fused,), rows=(0, 1, 3)),
        "attn_pool.q.bias": Source((bias,), rows=(0, 1, 3)),
        "attn_pool.kv.weight": Source((fused,), rows=(1, 3, 3)),
        "attn_pool.kv.bias": Source((bias,), rows=(1, 3, 3)),
        "attn_pool.proj": f"{head}.attention.out_proj",
        "attn_pool.norm": f"{head}.layernorm",
        "attn_pool.mlp.fc1": f"{head}.mlp.fc1",
        "attn_pool.mlp.fc2": f"{head}.mlp.fc2",
    }
    marks = (f"{head}.probe", f"{prefix}encoder.layers.0.layer_norm1.weight")
    return NameMap("SigLIP, transformers", marks, rules, unused=TEXT_TOWER, resize="torch")


def _timm(prefix: str, title: str) -> NameMap:
    """Maps timm's names, in which OpenCLIP also keeps its SigLIP nets."""
    names: tuple[str, ...] = ("pos_embed", "patch_embed.proj", "norm")
    names += tuple(f"blocks.*.{x}" for x in ("norm1", "norm2", "attn.qkv", "attn.proj"))
    names += ("blocks.*.mlp.fc1", "blocks.*.mlp.fc2", "attn_pool.mlp.fc1", "attn_pool.mlp.fc2")
    names += tuple(f"attn_pool.{x}" for x in ("q", "kv", "proj", "norm"))
    rules = {name: f"{prefix}{name}" for name in names} | {"latent": f"{prefix}attn_pool.latent"}
    unused = (r"text\..*", *TEXT_TOWER)
    return NameMap(title, (rules["latent"],), rules, unused=unused, resize="antialiased")


NAME_MAPS = (
    _transformers("vision_model."),
    _transformers(""),
    _timm("", "SigLIP, timm"),
    _timm("visual.trunk.", "SigLIP, OpenCLIP"),
)
