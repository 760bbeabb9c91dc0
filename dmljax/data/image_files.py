"""Writes the images of a split as files, a folder for each class.

Programs that read folders of images, such as `dmljax index`, can then use a data set that lies in
an archive or in memory.
"""

import hashlib
import json
import os
import pathlib
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from dmljax.data import decode
from dmljax.data.records import Reader
from dmljax.data.splits import Split
from dmljax.files import writing as files

_MARKER = ".dmljax.json"  # describes the content; hidden files are not read as images
_MOST_BYTES = 120  # of the name of a folder


def write(split: Split, folder: str | os.PathLike, *, about: dict[str, Any]) -> int:
    """Writes the images of `split` to `folder`, as CLASS/NUMBER.SUFFIX; how many were written.

    Encoded images are copied byte for byte, pixels and images that are cut to a box become PNG.
    `about` identifies the split. If the call is interrupted, repeat it: files that exist are kept.
    A folder with other content is refused.
    """
    folder = pathlib.Path(folder)
    counts = {"count": len(split), "labels": hashlib.sha256(split.labels.tobytes()).hexdigest()}
    text = json.dumps(about | counts, sort_keys=True)
    marker = folder / _MARKER
    if folder.exists() and any(folder.iterdir()):
        if not marker.exists() or marker.read_text(errors="replace") != text:
            raise ValueError(f"{folder} holds other files or images: choose another folder")
    else:
        folder.mkdir(parents=True, exist_ok=True)
        files.write_text(marker, text)
    reader, names = Reader(split), _folder_names(split.names)
    digits, written = len(str(max(len(split) - 1, 0))), 0
    existing = {path.with_suffix("").as_posix() for path in folder.glob("*/*")}
    for i, label in enumerate(split.labels.tolist()):
        stem = folder / names[label] / f"{i:0{digits}d}"
        if stem.as_posix() in existing:
            continue
        data, suffix = encoded(split, i, reader)
        stem.parent.mkdir(exist_ok=True)
        with files.atomic_writer(stem.with_suffix(suffix), "wb") as file:
            file.write(data)
        written += 1
    return written


def _folder_names(classes: tuple[str, ...]) -> list[str]:
    """Returns a folder name for each class, without characters that a path may not have."""
    names: list[str] = []
    taken: set[str] = set()
    for number, text in enumerate(classes):
        name = re.sub(r"[\\/:*?\"<>|\x00-\x1f\x7f]", "_", text).strip(" .") or "_"
        while len(name.encode()) > _MOST_BYTES:
            name = name[:-1]
        while name.casefold() in taken:  # some file systems do not tell A from a
            name = f"{name}_{number}"
        taken.add(name.casefold())
        names.append(name)
    return names


def encoded(split: Split, i: int, read_fn: Callable[[int], np.ndarray]) -> tuple[bytes, str]:
    """Returns bytes and suffix of the file of image `i`, or of a PNG file of its pixels.

    `read_fn(i)` gives the pixels, if the image is cut or its format is unknown.
    """
    record = split.records[i]
    if split.boxes is None and not isinstance(record, np.ndarray):
        if isinstance(record, bytes):
            data, found = record, decode.format_of(record)
            suffix = found.suffixes[0] if found else ""
        else:
            data = pathlib.Path(record).read_bytes()
            suffix = pathlib.Path(record).suffix.lower()
        if suffix in decode.SUFFIXES:
            return data, suffix
    return decode.file_bytes(decode.to_pil(read_fn(i)), "PNG"), ".png"
