"""Files of weights as named numpy arrays: PyTorch (both formats), safetensors, Caffe, ONNX.

Nothing in a file is executed. A `.pth` file is a pickle, which is a program for a small stack
machine; `torch_files` interprets only what a state dict needs and refuses everything else. Caffe's
NetParameter and ONNX's ModelProto are protobuf messages, which are read field by field. torch,
Caffe and protobuf need not be installed. Arrays of safetensors are views of the file: only what is
used of them is read into memory.
"""

import dataclasses
import functools
import hashlib
import math
import os
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import safetensors

from dmljax.files import reading
from dmljax.files.writing import sha256
from dmljax.weights import torch_files
from dmljax.weights.torch_files import Refused

_KNOWN = "(.pth, safetensors, Caffe, ONNX)"
_OTHER_FILES = (  # first bytes, and what such a file is
    (rb"\Z", "is empty: download it again"),
    (
        rb"\s*<(!doctype|html|head|body|\?xml|error)",
        "is a web page, not weights: the download ended on an error page",
    ),
    (
        rb"version https://git-lfs",
        "is a pointer of Git LFS, not the weights: fetch the file itself",
    ),
    (rb"\x89HDF|.{257}ustar", f"is HDF5 or a tar archive, which is not read {_KNOWN}"),
)
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
_FLOATS: dict[int, Any] = {  # by TensorProto.DataType
    1: "<f4",
    10: "<f2",
    11: "<f8",
    16: np.dtype(ml_dtypes.bfloat16),
}
_INTEGERS = (6, 7)  # shapes that the graph computes with
_TYPED_FIELDS = {1: 4, 11: 10}  # of values that are not raw bytes


@dataclasses.dataclass(frozen=True)
class Weights:
    """The content of a file, or of several shards.

    `layout` is torch, safetensors, caffe or onnx. Only safetensors files have `metadata`, and only
    their tensors stay in the file until they are used.
    """

    tensors: dict[str, np.ndarray]
    layout: str
    metadata: dict[str, str]
    files: tuple[pathlib.Path, ...]

    @functools.cached_property
    def sha256(self) -> str:
        """The digest of the file; of an index, of the digests of index and shards."""
        digests = [sha256(file) for file in self.files]
        total = hashlib.sha256("".join(digests).encode()).hexdigest()
        return digests[0] if len(digests) == 1 else total


def read(path: str | os.PathLike) -> Weights:
    """Reads the tensors of a file, with the names and types that they have in the file.

    For weights in several files, `path` is their index: `model.safetensors.index.json`.
    """
    path = pathlib.Path(path)
    if not path.is_file():
        problem = "is a folder: name the file in it" if path.is_dir() else "does not exist"
        raise FileNotFoundError(f"{path} {problem}")
    try:
        if path.name.endswith(".index.json"):
            weights = _read_shards(path)
        else:
            weights = Weights(*_parse(path), (path,))
    except Refused as error:
        raise ValueError(f"{path} {error}") from error
    except Exception as error:  # damaged bytes can cause any error in a reader
        reason = f"{type(error).__name__}: {error}".rstrip(": ")
        raise ValueError(f"{path} is damaged or cut short ({reason}): download it again") from error
    if not weights.tensors:
        raise ValueError(f"{path} holds no tensors")
    return weights


def _read_shards(path: pathlib.Path) -> Weights:
    tensors: dict[str, np.ndarray] = {}
    shards = _shards(path)
    for shard, names in shards.items():
        try:
            content = _parse_safetensors(shard)[0]
        except Exception as error:
            raise Refused(f"names {shard.name}, which is damaged or cut short: {error}") from error
        if lacking := [name for name in names if name not in content]:
            raise Refused(f"says that {shard.name} holds {lacking[0]}, which it does not")
        tensors |= {name: content[name] for name in names}
    return Weights(tensors, "safetensors", {}, (path, *shards))


def _parse(path: pathlib.Path) -> tuple[dict[str, np.ndarray], str, dict[str, str]]:
    """Tensors, layout and metadata, by the first bytes of the file."""
    with open(path, "rb") as file:
        start = file.read(9)
    if _is_header(start):
        tensors, metadata = _parse_safetensors(path)
        return tensors, "safetensors", metadata
    data = path.read_bytes()
    for pattern, problem in _OTHER_FILES:
        if re.match(pattern, data[:512], re.IGNORECASE | re.DOTALL):
            raise Refused(problem)
    if data.startswith(b"PK\x03\x04"):
        return torch_files.parse_zip(data), "torch", {}
    if data[0] == 0x80 and data[1] in (2, 3, 4, 5):
        return torch_files.parse_legacy(data), "torch", {}
    return _parse_protobuf(data)


def _parse_protobuf(data: bytes) -> tuple[dict[str, np.ndarray], str, dict[str, str]]:
    view, fields, reason = memoryview(data), set(), ""
    try:
        fields = {(number, wire) for number, wire, _ in _fields(view)}
    except ValueError as error:
        reason = f", or it is damaged or cut short: {error}"
    if (1, 0) in fields and (7, 2) in fields:
        return _parse_onnx(view), "onnx", {}
    if (2, 2) in fields or (100, 2) in fields:
        return _parse_caffe(view), "caffe", {}
    raise Refused(f"is not a known file of weights {_KNOWN}{reason}")


def _is_header(start: bytes) -> bool:
    """Returns whether the first nine bytes of a file are a plausible header size and the start of
    JSON.
    """
    return start[8:9] == b"{" and int.from_bytes(start[:8], "little") < _MAX_HEADER


def _parse_safetensors(path: str | os.PathLike) -> tuple[dict[str, np.ndarray], dict[str, str]]:
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


def _shards(index: pathlib.Path) -> dict[pathlib.Path, list[str]]:
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


def safetensors_metadata(path: str | os.PathLike) -> dict[str, str]:
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
        if not _is_header(start):
            return {}
        return reading.json_value(start[8:] + file.read(int.from_bytes(start[:8], "little") - 1))


def _fields(view: memoryview) -> Iterator[tuple[int, int, Any]]:
    """Yields (number, wire type, value) of each field.

    The value is an int for wire type 0, and bytes for 1 and 5 (a number) and for 2.
    """
    at = 0
    while at < len(view):
        key, at = _varint(view, at)
        number, wire = key >> 3, key & 7
        if number == 0 or wire not in (0, 1, 2, 5):
            raise ValueError(f"field {number} of wire type {wire} at byte {at}")
        value: Any
        if wire == 0:
            value, at = _varint(view, at)
        else:
            length, at = _varint(view, at) if wire == 2 else ({1: 8, 5: 4}[wire], at)
            if at + length > len(view):
                raise ValueError(f"field {number} ends at byte {at + length} of {len(view)}")
            value, at = view[at : at + length], at + length
        yield number, wire, value


def _varint(view: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(view):
            raise ValueError(f"it ends inside a number at byte {at}")
        byte, at = view[at], at + 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError(f"a number of more than ten bytes at byte {at}")


class _Message(dict[int, list[Any]]):
    """All values of each field of a message, by the number of the field."""

    def __init__(self, view: memoryview):
        for number, _, value in _fields(view):
            self.setdefault(number, []).append(value)

    def blocks(self, number: int) -> list[memoryview]:
        """Returns all values of a field that is not an integer."""
        values = self.get(number, [])
        if any(isinstance(value, int) for value in values):
            raise ValueError(f"field {number} is a number")
        return values

    def text(self, number: int) -> str:
        """Returns the last value of a text field, or ''."""
        return str(b"".join(self.blocks(number)[-1:]), "utf-8")

    def ints(self, number: int) -> list[int]:
        """Returns repeated integers, packed or not."""
        integers = []
        for value in self.get(number, []):
            if isinstance(value, int):
                integers.append(value)
                continue
            at = 0
            while at < len(value):
                integer, at = _varint(value, at)
                integers.append(integer)
        return integers

    def array(self, number: int, dtype: str) -> np.ndarray:
        """Returns repeated numbers of fixed width, packed or not."""
        return np.frombuffer(b"".join(self.blocks(number)), dtype)


def _shaped(values: np.ndarray, shape: list[int]) -> np.ndarray:
    """Returns `values` in this shape; raises if the sizes differ."""
    if math.prod(shape) != values.size:
        raise ValueError(f"{values.size} values for the shape {shape}")
    return values.reshape(shape)


def _parse_caffe(view: memoryview) -> dict[str, np.ndarray]:
    """Reads the blobs of a NetParameter, as `LAYER.weight`, `LAYER.bias`, `LAYER.2` and so on."""
    tensors: dict[str, np.ndarray] = {}
    net = _Message(view)
    for layers, name_field, blobs_field in ((2, 4, 6), (100, 1, 7)):
        for raw in net.blocks(layers):
            layer = _Message(raw)
            if layers == 2 and 1 in layer:
                raise Refused("is a Caffe model of 2013: run upgrade_net_proto_binary on it")
            for i, blob in enumerate(layer.blocks(blobs_field)):
                name = f"{layer.text(name_field)}.{('weight', 'bias')[i] if i < 2 else i}"
                if name in tensors:
                    raise ValueError(f"{name} occurs twice")
                tensors[name] = _blob(_Message(blob))
    return tensors


def _blob(blob: _Message) -> np.ndarray:
    if 7 in blob:
        shape = _Message(blob.blocks(7)[-1]).ints(1)
    else:  # before 2015: always four axes, with leading ones
        shape = [(blob.ints(number) or [0])[-1] for number in (1, 2, 3, 4)]
    values = blob.array(5, "<f4") if 5 in blob else blob.array(8, "<f8")
    return _shaped(values, shape)


def _parse_onnx(view: memoryview) -> dict[str, np.ndarray]:
    """Reads the floats among the initializers of the graph of a ModelProto."""
    tensors = {}
    for raw in _Message(_Message(view).blocks(7)[-1]).blocks(5):
        tensor = _Message(raw)
        name, kind = tensor.text(8), (tensor.ints(2) or [0])[-1]
        if 13 in tensor or any(tensor.ints(14)):
            raise Refused("keeps its weights in other files: save it as one file")
        if kind in _INTEGERS:
            continue
        field = 9 if 9 in tensor else _TYPED_FIELDS.get(kind)
        if kind not in _FLOATS or field is None:
            raise Refused(f"holds {name} in ONNX type {kind}, which is not read: use a float file")
        tensors[name] = _shaped(tensor.array(field, _FLOATS[kind]), tensor.ints(1))
    return tensors
