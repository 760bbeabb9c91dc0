"""safetensors: a JSON header and raw arrays."""

from __future__ import annotations

import json
import os

import ml_dtypes
import numpy as np
import safetensors

from dmljax.weights.readers.errors import Refused

__all__ = ["is_header", "parse", "read_metadata"]

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
    """Whether the first nine bytes of a file are a plausible header size and the start of JSON."""
    return start[8:9] == b"{" and int.from_bytes(start[:8], "little") < _MAX_HEADER


def parse(data: bytes) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Tensors and metadata."""
    tensors = {}
    for name, entry in safetensors.deserialize(data):
        if entry["dtype"] not in _DTYPES:
            raise Refused(f"holds {name} as {entry['dtype']}, which is not read")
        array = np.frombuffer(entry["data"], _DTYPES[entry["dtype"]])
        tensors[name] = array.reshape(entry["shape"])
    return tensors, _metadata(data[8 : 8 + int.from_bytes(data[:8], "little")])


def read_metadata(path: str | os.PathLike) -> dict[str, str]:
    """The metadata of a file, without reading its arrays; empty for files that are not safetensors.

    A damaged header is an error of `read`, not of this function.
    """
    with open(path, "rb") as file:
        start = file.read(9)
        if not is_header(start):
            return {}
        try:
            return _metadata(start[8:] + file.read(int.from_bytes(start[:8], "little") - 1))
        except ValueError:
            return {}


def _metadata(header: bytes) -> dict[str, str]:
    return json.loads(header).get("__metadata__", {})
