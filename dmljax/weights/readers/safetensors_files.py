"""safetensors: a JSON header and raw arrays, in one file or in shards with an index.

Arrays are views of the file: only what is used of them is read into memory.
"""

import os
import pathlib

import ml_dtypes
import numpy as np
import safetensors

from dmljax.files import reading
from dmljax.weights.readers.errors import Refused

_DTYPES = {
    "F64": "f8",
    "F32": "f4",
    "F16": "f2",
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": "i8",
    "I32": "i4",
    "I16": "i2",
    "I8": "i1",
    "U8": "u1",
    "BOOL": "?",
}
_MAX_HEADER = 1 << 27  # bytes


def is_header(start: bytes) -> bool:
    """Returns whether the first nine bytes of a file are a plausible header size and the start of
    JSON.
    """
    return start[8:9] == b"{" and int.from_bytes(start[:8], "little") < _MAX_HEADER


def parse(path: str | os.PathLike) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Tensors and metadata."""
    with safetensors.safe_open(path, "np"):
        pass  # refuses wrong sizes, and tensors that overlap or lie outside the file
    header = _header(path)
    content = np.memmap(path, np.uint8, "r").view(np.ndarray)
    start = 8 + int.from_bytes(content[:8].tobytes(), "little")
    metadata, tensors = header.pop("__metadata__", {}), {}
    for name, entry in header.items():
        if entry["dtype"] not in _DTYPES:
            raise Refused(f"holds {name} as {entry['dtype']}, which is not read")
        begin, end = (start + offset for offset in entry["data_offsets"])
        array = content[begin:end].view(_DTYPES[entry["dtype"]])
        tensors[name] = array.reshape(entry["shape"])
    return tensors, metadata


def shards(index: pathlib.Path) -> dict[pathlib.Path, list[str]]:
    """Returns the files that an index (`model.safetensors.index.json`) names, each with its
    tensors.
    """
    names: dict[pathlib.Path, list[str]] = {}
    for name, file in reading.json_value(index.read_bytes())["weight_map"].items():
        if not isinstance(file, str) or file in ("", ".", "..") or {"/", "\\"} & set(file):
            raise Refused(f"names {file!r} as a shard, which is not a file of the same folder")
        names.setdefault(index.parent / file, []).append(name)
    if missing := [path.name for path in names if not path.is_file()]:
        raise Refused(
            f"needs {len(names)} shards in its folder, and {', '.join(missing[:5])} "
            f"{'is' if len(missing) == 1 else 'are'} missing: download the same folder again"
        )
    return names


def read_metadata(path: str | os.PathLike) -> dict[str, str]:
    """Reads the metadata of a file without its arrays; it is empty for files that are not
    safetensors.

    A damaged header is an error of `read`, not of this function.
    """
    try:
        metadata = _header(path).get("__metadata__")
        return metadata if isinstance(metadata, dict) else {}
    except ValueError:
        return {}


def _header(path: str | os.PathLike) -> dict:
    with open(path, "rb") as file:
        start = file.read(9)
        if not is_header(start):
            return {}
        return reading.json_value(start[8:] + file.read(int.from_bytes(start[:8], "little") - 1))
