"""The table of published files of weights. docs/weights.md describes them."""

import os
import pathlib

from dmljax.files.writing import digest_once
from dmljax.weights.entries import Published
from dmljax.weights.families import (
    clip,
    convnext,
    dino,
    dinov2,
    dinov3,
    efficientnet,
    googlenet,
    mobilenet,
    resnet,
    siglip,
    unicom,
)
from dmljax.weights.name_maps import NameMap

_FAMILIES = (
    resnet,
    mobilenet,
    efficientnet,
    convnext,
    googlenet,
    dino,
    dinov2,
    dinov3,
    clip,
    siglip,
    unicom,
)
PUBLISHED: dict[str, Published] = {
    name: entry for family in _FAMILIES for name, entry in family.PUBLISHED.items()
}
NAME_MAPS: tuple[NameMap, ...] = tuple(
    name_map for family in _FAMILIES for name_map in getattr(family, "NAME_MAPS", ())
)


def file_name(name: str) -> str:
    """Returns the name under which `fetch` keeps the file."""
    file = PUBLISHED[name].urls[0].rpartition("/")[2]
    # All files of the timm hub have this name.
    return f"{name}.safetensors" if file == "model.safetensors" else file


def identify(path: str | os.PathLike) -> str | None:
    """Returns the name in `PUBLISHED` of the file at `path`, or None.

    A file is recognized by its digest, or by its name where no digest is published. Names are
    compared first: computing the digests of a large file takes seconds.
    """
    file = pathlib.Path(path).name
    for name, published in PUBLISHED.items():
        if not published.digest and file_name(name) == file:
            return name
    for name, published in PUBLISHED.items():
        algorithm, _, digits = published.digest.partition(":")
        if algorithm and digest_once(path, algorithm).startswith(digits):
            return name
    return None
