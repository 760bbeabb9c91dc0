"""UNICOM (An et al., ICLR 2023)."""

from dmljax.normalizations import CLIP
from dmljax.weights.entries import MIT, Preprocessing, Published
from dmljax.weights.names import NameMap

_URL = "https://github.com/deepglint/unicom/releases/download"
_DATA = (
    "LAION-400M: pairs of the web, in clusters; open-metric-learning reports that test sets of "
    "retrieval (Cars, SOP) were part of it"
)
_DIGITS = {"B-32": "f9d5696a", "B-16": "c04f324f", "L-14": "ff3ab62f", "L-14-336px": "3916ab5a"}
_FOLDERS = {"B-32": "b32", "B-16": "b16", "L-14": "l14", "L-14-336px": "l14_336px"}


def _published(net: str, name: str, megabytes: int, size: int = 224) -> Published:
    inputs = Preprocessing(size, 256 if size == 224 else size, "bicubic", CLIP)
    url, digest = f"{_URL}/{_FOLDERS[name]}/FP16-ViT-{name}.pt", f"sha256:{_DIGITS[name]}"
    return Published(net, url, megabytes, MIT, _DATA, inputs, digest)


PUBLISHED = {
    "unicom_b32": _published("unicom_b32", "B-32", 234),
    "unicom_b16": _published("unicom_b16", "B-16", 404),
    "unicom_l14": _published("unicom_l14", "L-14", 1145),
    "unicom_l14_336": _published("unicom_l14_336", "L-14-336px", 1817, 336),
}
# The names are ours. The names of other nets, which lack `feature`, have other maps.
NAME_MAPS = (NameMap("UNICOM", ("feature.0.weight", "blocks.0.attn.qkv.weight")),)
