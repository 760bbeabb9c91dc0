"""One self-contained HTML file from `Facts`, and the same facts read back from the file.

The file holds the hand-written page (`page.html`, `page.css`, `page.js`), a JSON text with what is
small, one gzip of all arrays and long lists, and the sheets of thumbnails as WebP. It needs no
network: a content security policy forbids every request. The same facts give the same bytes.
"""

import base64
import dataclasses
import gzip
import html
import importlib.resources
import json
import math
import os
import pathlib
import re
from typing import Any

import numpy as np

from dmljax.files import reading
from dmljax.files.run_folder import RunFolder
from dmljax.files.writing import write_text
from dmljax.report.facts import Facts

FILE = RunFolder("").page.name

# Lists of strings and of numbers that are longer than this travel in the gzip.
_LONG_LIST = 200
_LONG_TEXT = 2000
_NARROW = {"bool": np.uint8, "int64": np.int32, "uint64": np.uint32}
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
)


class NotAPage(ValueError):
    """A file that is not a page of dmljax."""


def write(facts: Facts, path: str | os.PathLike) -> pathlib.Path:
    """Writes the page of `facts` to `path`, completely or not at all."""
    write_text(path, html_of(facts))
    return pathlib.Path(path)


def html_of(facts: Facts) -> str:
    """Returns the page as text."""
    arrays = _Arrays()
    tree = arrays.packed(
        {
            field.name: getattr(facts, field.name)
            for field in dataclasses.fields(facts)
            if field.name != "sheets"
        }
    )
    blob = gzip.compress(b"".join(arrays.chunks), compresslevel=9, mtime=0)
    sheets = "".join(
        f'<script type="text/plain" class="sheet">{base64.b64encode(sheet).decode()}</script>\n'
        for sheet in facts.sheets
    )
    values = {
        "policy": _POLICY,
        "title": html.escape(f"{facts.title}: {facts.headline}" if facts.headline else facts.title),
        "summary": html.escape(facts.summary),
        "css": _source("page.css"),
        "js": _source("page.js"),
        "data": _json_in_html(tree),
        "blob": base64.b64encode(blob).decode(),
        "sheets": sheets,
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], _source("page.html"))


def path_of(run: str | os.PathLike) -> pathlib.Path:
    """Returns the path of a page from the folder of its run, or from its own path."""
    path = pathlib.Path(run)
    if path.is_dir():
        path = path / FILE
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: make it with `dmljax report {path.parent}`")
    return path


def read(run: str | os.PathLike) -> dict[str, Any]:
    """Reads the fields of `Facts` from a page, as plain dicts, lists and arrays.

    `run` is a page, or the folder of a run. `sheets` is a list of the bytes of WebP files. Raises
    `NotAPage` for any other file.
    """
    path = path_of(run)
    text = path.read_text(encoding="utf-8", errors="replace")
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    blob = re.search(r'<script type="text/plain" id="blob">(.*?)</script>', text, re.S)
    if data is None or blob is None or not text.rstrip().endswith("</html>"):
        raise NotAPage(f"{path} is not a page of dmljax: make one with `dmljax report RUN`")
    try:
        content = gzip.decompress(base64.b64decode(blob[1]))
        tree = _unpacked(reading.json_value(data[1]), content)
    except (ValueError, EOFError, OSError, KeyError) as error:
        raise NotAPage(
            f"{path} is damaged ({error}): make it again with `dmljax report RUN`"
        ) from error
    sheets = re.findall(r'<script type="text/plain" class="sheet">(.*?)</script>', text)
    return tree | {"sheets": [base64.b64decode(sheet) for sheet in sheets]}


def _source(name: str) -> str:
    folder = importlib.resources.files("dmljax.report")
    return folder.joinpath(name).read_text(encoding="utf-8")


def _json_in_html(tree: Any) -> str:
    """Returns JSON with `<` and non-ASCII characters escaped, so that no class name can end it."""
    text = json.dumps(tree, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")


class _Arrays:
    """Replaces arrays and long lists by their offsets in one sequence of bytes."""

    def __init__(self) -> None:
        self.chunks: list[bytes] = []
        self._size = 0

    def packed(self, value: Any) -> Any:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = dataclasses.fields(value)
            value = {field.name: getattr(value, field.name) for field in fields}
        if isinstance(value, dict):
            return {str(key): self.packed(v) for key, v in value.items() if v is not None}
        if isinstance(value, np.ndarray):
            array = np.ascontiguousarray(value)
            # Browsers have no arrays of booleans, and none of 64-bit integers that are numbers.
            array = array.astype(_NARROW.get(array.dtype.name, array.dtype), copy=False)
            array = array.astype(array.dtype.newbyteorder("<"), copy=False)
            span = self._add(array.tobytes())
            return {"$": [array.dtype.name, list(array.shape), *span]}
        if isinstance(value, np.generic):
            value = value.item()
        if isinstance(value, float):
            return value if math.isfinite(value) else None
        if isinstance(value, list | tuple):
            if len(value) > _LONG_LIST and all(isinstance(v, str | int | float) for v in value):
                return {"$": ["json", [], *self._add(json.dumps(list(value)).encode())]}
            return [self.packed(v) for v in value]
        if isinstance(value, str) and len(value) > _LONG_TEXT:
            return {"$": ["json", [], *self._add(json.dumps(value).encode())]}
        return value

    def _add(self, content: bytes) -> tuple[int, int]:
        offset, size = self._size, len(content)
        self.chunks.append(content + bytes(-size % 8))
        self._size += size + -size % 8
        return offset, size


def _unpacked(value: Any, content: bytes) -> Any:
    if isinstance(value, list):
        return [_unpacked(v, content) for v in value]
    if not isinstance(value, dict):
        return value
    if "$" not in value:
        return {key: _unpacked(v, content) for key, v in value.items()}
    kind, shape, offset, size = value["$"]
    chunk = content[offset : offset + size]
    if kind == "json":
        return reading.json_value(chunk)
    return np.frombuffer(chunk, np.dtype(kind).newbyteorder("<")).reshape(shape)
