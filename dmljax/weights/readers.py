"""Files of weights as named numpy arrays: PyTorch (both formats), safetensors, Caffe, ONNX.

A `.pth` file is a pickle, that is, a program for a small stack machine. Nothing of it is run here:
`_unpickle` is a machine of its own which knows containers, numbers and text, and a handful of names
(`_GLOBALS`) that it takes as symbols. Any other name is refused before anything is done with it.
Caffe and ONNX files are read field by field off the protobuf wire. torch, caffe and protobuf are
not needed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import math
import os
import pathlib
import pickletools
import re
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

__all__ = ["Weights", "read", "write"]

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


class Weights(NamedTuple):
    """What a file holds. `layout`: torch, safetensors, caffe or onnx; `metadata`: safetensors'."""

    tensors: dict[str, np.ndarray]
    layout: str
    sha256: str
    metadata: dict[str, str]


class _Refused(ValueError):
    """Says by itself what is wrong; any other error of a reader means a damaged file."""


def read(path: str | os.PathLike) -> Weights:
    """The tensors of a file, under the names and in the types that it has."""
    path = pathlib.Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder: name the file of weights in it")
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    data = path.read_bytes()
    try:
        layout, tensors, metadata = _parse(data)
    except _Refused as error:
        raise ValueError(f"{path} {error}") from error
    except Exception as error:  # whatever bytes can do to a reader
        what = f"{type(error).__name__}: {error}".rstrip(": ")
        raise ValueError(f"{path} is damaged or cut short ({what}): download it again") from error
    if not tensors:
        raise ValueError(f"{path} holds no tensors")
    return Weights(tensors, layout, hashlib.sha256(data).hexdigest(), metadata)


def write(path: str | os.PathLike, tensors: Mapping[str, np.ndarray], metadata: str) -> None:
    """A safetensors file, in place only when it is whole. `metadata` goes under the key dmljax."""
    # One key alone, because the order of several would change from run to run.
    data = safetensors.numpy.save(
        {name: np.asarray(array, order="C") for name, array in tensors.items()},
        {"dmljax": metadata},
    )
    path = pathlib.Path(path)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


_Parsed = tuple[str, dict[str, np.ndarray], dict[str, str]]


def _parse(data: bytes) -> _Parsed:
    if not data:
        raise _Refused("is empty: download it again")
    if re.match(rb"\s*<(!doctype|html|head|body|\?xml|error)", data[:512], re.IGNORECASE):
        raise _Refused("is a web page, not weights: the download ended on an error page")
    if data.startswith(b"version https://git-lfs"):
        raise _Refused("is a pointer of Git LFS, not the weights: fetch the file itself")
    if data.startswith(b"\x89HDF") or data[257:262] == b"ustar":
        raise _Refused("is HDF5 or a tar archive: only .pth, safetensors, Caffe and ONNX are read")
    if data[8:9] == b"{" and int.from_bytes(data[:8], "little") < 1 << 27:
        return _safetensors(data)
    if data.startswith(b"PK\x03\x04"):
        return "torch", _torch_zip(data), {}
    if data[0] == 0x80 and data[1] in (2, 3, 4, 5):
        return "torch", _torch_legacy(data), {}
    return _protobuf(data)


# --- safetensors --------------------------------------------------------------------------------

_SAFETENSORS = {
    "F64": "f8",
    "F32": "f4",
    "F16": "f2",
    "BF16": _BFLOAT16,
    "I64": "i8",
    "I32": "i4",
    "I16": "i2",
    "I8": "i1",
    "U8": "u1",
    "BOOL": "?",
}


def _safetensors(data: bytes) -> _Parsed:
    tensors = {}
    for name, entry in safetensors.deserialize(data):
        if entry["dtype"] not in _SAFETENSORS:
            raise _Refused(f"holds {name} as {entry['dtype']}, which is not read")
        array = np.frombuffer(entry["data"], _SAFETENSORS[entry["dtype"]])
        tensors[name] = array.reshape(entry["shape"])
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return "safetensors", tensors, header.get("__metadata__", {})


# --- PyTorch ------------------------------------------------------------------------------------

_STORAGES = {
    "DoubleStorage": np.dtype("f8"),
    "FloatStorage": np.dtype("f4"),
    "HalfStorage": np.dtype("f2"),
    "BFloat16Storage": _BFLOAT16,
    "LongStorage": np.dtype("i8"),
    "IntStorage": np.dtype("i4"),
    "ShortStorage": np.dtype("i2"),
    "CharStorage": np.dtype("i1"),
    "ByteStorage": np.dtype("u1"),
    "BoolStorage": np.dtype("?"),
}
# All names that a pickle may mention. They stay words: none of them is looked up or called.
_GLOBALS = {
    "collections.OrderedDict",
    "torch.Size",
    "torch._utils._rebuild_parameter",
    "torch._utils._rebuild_tensor",
    "torch._utils._rebuild_tensor_v2",
    *(f"torch.{name}" for name in _STORAGES),
}
_MAGIC, _PROTOCOL = 0x1950A86A20F9469CFC6C, 1001


@dataclasses.dataclass(frozen=True)
class _Global:
    name: str


@dataclasses.dataclass(frozen=True)
class _Storage:
    key: str
    dtype: np.dtype
    start: int
    length: int


@dataclasses.dataclass(frozen=True)
class _Tensor:
    storage: _Storage
    offset: int
    size: tuple
    stride: tuple


def _torch_zip(data: bytes) -> dict[str, np.ndarray]:
    archive = zipfile.ZipFile(io.BytesIO(data))
    names = archive.namelist()
    roots = [name.removesuffix("data.pkl") for name in names if name.endswith("/data.pkl")]
    if len(roots) != 1:
        raise _Refused("is a zip archive without PyTorch's data.pkl")
    if any(name.startswith(f"{roots[0]}code/") for name in names):
        raise _Refused("is a TorchScript program: save its state_dict() with torch.save")
    # PyTorch compresses nothing, and what is not compressed cannot unfold into more.
    if any(info.compress_type != zipfile.ZIP_STORED for info in archive.infolist()):
        raise _Refused("is a compressed zip archive, which PyTorch does not write")

    def member(name: str) -> bytes:
        return archive.read(roots[0] + name)

    big = f"{roots[0]}byteorder" in names and member("byteorder") == b"big"
    found = _state_dict(_unpickle(io.BytesIO(member("data.pkl"))))
    raw = {key: member(f"data/{key}") for key in {t.storage.key for t in found.values()}}
    return _arrays(found, raw, big)


def _torch_legacy(data: bytes) -> dict[str, np.ndarray]:
    stream = io.BytesIO(data)
    if (magic := _unpickle(stream)) != _MAGIC:
        raise _Refused(f"is a pickle of a {type(magic).__name__}, not written by torch.save")
    if _unpickle(stream) != _PROTOCOL:
        raise _Refused("is in a PyTorch format that is not known")
    system = _unpickle(stream)
    big = isinstance(system, dict) and system.get("little_endian") is False
    storages: list[_Storage] = []
    found = _state_dict(_unpickle(stream, storages))
    widths = {storage.key: storage.dtype.itemsize for storage in storages}
    raw = {}
    for key in _unpickle(stream):
        count = int.from_bytes(stream.read(8), "big" if big else "little")
        raw[key] = stream.read(count * widths[key])
        if len(raw[key]) != count * widths[key]:
            raise ValueError(f"storage {key} ends early")
    if rest := len(data) - stream.tell():
        raise ValueError(f"{rest} bytes follow the last storage")
    return _arrays(found, raw, big)


def _state_dict(found: Any) -> dict[str, _Tensor]:
    """The named tensors, which checkpoints of a training may keep under a name of their own."""
    for key in ("state_dict", "model_state_dict", "model"):
        if isinstance(found, dict) and isinstance(found.get(key), dict):
            found = found[key]
    if not isinstance(found, dict):
        raise _Refused(f"holds a {_kind(found)}, not a state dict")
    for name, value in found.items():
        if not isinstance(name, str) or not isinstance(value, _Tensor):
            raise _Refused(f"is no state dict: {str(name)[:80]!r} is a {_kind(value)}")
    return found


def _kind(value: Any) -> str:
    return type(value).__name__.strip("_").lower()


def _arrays(found: dict[str, _Tensor], raw: dict[str, bytes], big: bool) -> dict[str, np.ndarray]:
    storages = {}
    for tensor in found.values():
        storage = tensor.storage
        if storage not in storages:
            storages[storage] = _storage(raw[storage.key], storage, big)
    return {name: _view(storages[tensor.storage], tensor) for name, tensor in found.items()}


def _storage(raw: bytes, storage: _Storage, big: bool) -> np.ndarray:
    if big:
        width = storage.dtype.itemsize
        raw = np.frombuffer(raw, f">u{width}").astype(f"<u{width}").tobytes()
    values = np.frombuffer(raw, storage.dtype)
    stop = storage.start + storage.length
    if storage.start < 0 or storage.length < 0 or stop > len(values):
        raise ValueError(f"storage {storage.key} has {len(values)} values, not {stop}")
    return values[storage.start : stop]


def _view(values: np.ndarray, tensor: _Tensor) -> np.ndarray:
    size, stride = tensor.size, tensor.stride
    numbers = (tensor.offset, *size, *stride)
    if len(size) != len(stride) or not all(isinstance(n, int) and n >= 0 for n in numbers):
        raise ValueError(f"a tensor of size {size} with stride {stride} at {tensor.offset}")
    if 0 in size:
        return np.zeros(size, values.dtype)
    last = tensor.offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    if last >= len(values):  # as_strided itself would read whatever lies there
        raise ValueError(f"a tensor reaches to {last} of a storage of {len(values)}")
    steps = [s * values.itemsize for s in stride]
    return np.lib.stride_tricks.as_strided(values[tensor.offset :], size, steps, writeable=False)


# Operations whose argument is the value itself.
_LITERALS = {
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES"),
    *("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_NEW = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple, "EMPTY_SET": set}


def _unpickle(stream: io.BytesIO, storages: list[_Storage] | None = None) -> Any:
    """The next pickle of a stream, made of containers, literals and the symbols above.

    `storages` gathers all that it mentions, those outside of the state dict too.
    """
    stack: list[Any] = []
    below: list[list[Any]] = []  # the stacks under each mark
    memo: dict[int, Any] = {}
    for opcode, argument, _ in pickletools.genops(stream):
        name = opcode.name
        if name in _LITERALS:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _NEW:
            stack.append(_NEW[name]())
        elif name == "MARK":
            below.append(stack)
            stack = []
        elif name in ("TUPLE", "LIST", "DICT", "APPENDS", "SETITEMS", "POP_MARK"):
            items, stack = stack, below.pop()
            if name == "APPENDS":
                _plain(stack[-1], list).extend(items)
            elif name == "SETITEMS":
                _plain(stack[-1], dict).update(_pairs(items))
            elif name != "POP_MARK":
                made = {"TUPLE": tuple, "LIST": list, "DICT": lambda i: dict(_pairs(i))}[name]
                stack.append(made(items))
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            count = int(name[-1])
            if len(stack) < count:
                raise ValueError("a tuple lacks items")
            stack[-count:] = [tuple(stack[-count:])]
        elif name == "APPEND":
            item = stack.pop()
            _plain(stack[-1], list).append(item)
        elif name == "SETITEM":
            value, key = stack.pop(), stack.pop()
            _plain(stack[-1], dict)[key] = value
        elif name in ("PUT", "BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name == "POP":
            stack.pop()
        elif name == "GLOBAL":
            stack.append(_global(argument.replace(" ", ".")))
        elif name == "STACK_GLOBAL":
            attribute, module = stack.pop(), stack.pop()
            stack.append(_global(f"{module}.{attribute}"))
        elif name == "BINPERSID":
            stack.append(_persistent(stack.pop()))
            if storages is not None:
                storages.append(stack[-1])
        elif name == "REDUCE":
            arguments, function = stack.pop(), stack.pop()
            stack.append(_reduce(function, arguments))
        elif name == "BUILD":
            stack.pop()  # attributes of a state dict: version numbers of layers
            _plain(stack[-1], dict)
        elif name == "STOP":
            if below or len(stack) != 1:
                raise ValueError("a pickle ends in the middle")
            return stack[0]
        elif name not in ("PROTO", "FRAME"):
            of = f" {argument}" if isinstance(argument, str) else ""
            raise _Refused(f"is no plain weights: its pickle uses {name}{of}. Nothing was run")
    raise ValueError("a pickle has no end")


def _plain(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise ValueError(f"a {_kind(value)} in place of a {kind.__name__}")
    return value


def _pairs(items: list[Any]) -> list[tuple[Any, Any]]:
    return list(zip(items[::2], items[1::2], strict=True))


def _global(name: str) -> _Global:
    if name not in _GLOBALS:
        raise _Refused(
            f"is no plain weights: its pickle refers to {name[:100]}. Nothing was run. If you "
            "trust where it comes from, save its state_dict() alone"
        )
    return _Global(name)


def _persistent(value: Any) -> _Storage:
    """('storage', type, key, device, length), and in the legacy format a view or None."""
    kind, storage_type, key, _, length, *view = _plain(value, tuple)
    if kind != "storage" or not isinstance(storage_type, _Global) or type(length) is not int:
        raise ValueError("a storage of an unknown kind")
    start = 0
    if view and view[0] is not None:
        _, start, length = view[0]
    dtype = _STORAGES[storage_type.name.removeprefix("torch.")]
    return _Storage(_plain(key, str), dtype, _plain(start, int), _plain(length, int))


def _reduce(function: Any, arguments: Any) -> Any:
    name = _plain(function, _Global).name
    arguments = _plain(arguments, tuple)
    if name == "collections.OrderedDict":
        return dict(*(map(tuple, a) for a in arguments))
    if name == "torch.Size":
        return tuple(*arguments)
    if name == "torch._utils._rebuild_parameter":
        return _plain(arguments[0], _Tensor)
    if name.startswith("torch._utils._rebuild_tensor"):
        storage, offset, size, stride = arguments[:4]
        size, stride = tuple(_plain(size, tuple)), tuple(_plain(stride, tuple))
        return _Tensor(_plain(storage, _Storage), offset, size, stride)
    raise ValueError(f"{name} is called")


# --- protobuf: Caffe and ONNX -------------------------------------------------------------------


def _protobuf(data: bytes) -> _Parsed:
    view = memoryview(data)
    try:
        kinds = {(number, wire) for number, wire, _ in _fields(view)}
    except ValueError as error:
        # Noise fails at once; what reads well for a while was cut off.
        raise _Refused(
            "is no file of weights that is known (.pth, safetensors, Caffe, ONNX), or it is "
            f"damaged or cut short: {error}"
        ) from error
    if (1, 0) in kinds and (7, 2) in kinds:
        return "onnx", _onnx(view), {}
    if (2, 2) in kinds or (100, 2) in kinds:
        return "caffe", _caffe(view), {}
    raise _Refused("is no file of weights that is known (.pth, safetensors, Caffe, ONNX)")


def _fields(view: memoryview) -> Iterator[tuple[int, int, Any]]:
    """(number, wire type, value) of a message: 0 int, 1 and 5 bytes of a number, 2 bytes."""
    at = 0
    while at < len(view):
        key, at = _varint(view, at)
        number, wire = key >> 3, key & 7
        if number == 0 or wire not in (0, 1, 2, 5):
            raise ValueError(f"field {number} of wire type {wire} at byte {at}")
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
    """The fields of a message by number, each with all its values in order."""

    def __init__(self, view: memoryview):
        for number, _, value in _fields(view):
            self.setdefault(number, []).append(value)

    def blocks(self, number: int) -> list[memoryview]:
        found = self.get(number, [])
        if any(isinstance(value, int) for value in found):
            raise ValueError(f"field {number} is a number")
        return found

    def text(self, number: int) -> str:
        return str(b"".join(self.blocks(number)[-1:]), "utf-8")

    def ints(self, number: int) -> list[int]:
        """Repeated integers, packed or not."""
        found = []
        for value in self.get(number, []):
            if isinstance(value, int):
                found.append(value)
                continue
            at = 0
            while at < len(value):
                one, at = _varint(value, at)
                found.append(one)
        return found

    def array(self, number: int, dtype: str) -> np.ndarray:
        """Repeated numbers of fixed width, packed or not."""
        return np.frombuffer(b"".join(self.blocks(number)), dtype)


def _caffe(view: memoryview) -> dict[str, np.ndarray]:
    """Blobs of a NetParameter: `layer.weight`, `layer.bias`, and `layer.2` and so on beyond."""
    tensors: dict[str, np.ndarray] = {}
    net = _Message(view)
    for layers, name_field, blobs_field in ((2, 4, 6), (100, 1, 7)):
        for raw in net.blocks(layers):
            layer = _Message(raw)
            if layers == 2 and 1 in layer:
                raise _Refused("is a Caffe model of 2013: run upgrade_net_proto_binary on it")
            for i, blob in enumerate(layer.blocks(blobs_field)):
                name = f"{layer.text(name_field)}.{('weight', 'bias')[i] if i < 2 else i}"
                if name in tensors:
                    raise ValueError(f"{name} is there twice")
                tensors[name] = _blob(_Message(blob))
    return tensors


def _blob(blob: _Message) -> np.ndarray:
    if 7 in blob:
        shape = _Message(blob.blocks(7)[-1]).ints(1)
    else:  # four axes, those of size 1 in front where there are fewer
        shape = [(blob.ints(number) or [0])[-1] for number in (1, 2, 3, 4)]
    values = blob.array(5, "<f4") if 5 in blob else blob.array(8, "<f8")
    return _shaped(values, shape)


_ONNX = {1: "<f4", 6: "<i4", 7: "<i8", 10: "<f2", 11: "<f8", 16: _BFLOAT16}
_ONNX_FIELDS = {1: (4, "<f4"), 11: (10, "<f8")}  # where values are that are not raw bytes


def _onnx(view: memoryview) -> dict[str, np.ndarray]:
    """Initializers of the graph of a ModelProto."""
    tensors = {}
    graph = _Message(_Message(view).blocks(7)[-1])
    for raw in graph.blocks(5):
        tensor = _Message(raw)
        name, kind = tensor.text(8), (tensor.ints(2) or [0])[-1]
        if kind not in _ONNX:
            raise _Refused(
                f"holds {name} in ONNX type {kind}, which is not read: use the float one"
            )
        if tensor.ints(14)[-1:] == [1]:
            raise _Refused("keeps its weights in other files: save it as one file")
        if 9 in tensor:
            values = tensor.array(9, _ONNX[kind])
        elif kind in _ONNX_FIELDS:
            values = tensor.array(*_ONNX_FIELDS[kind])
        else:
            bits = tensor.ints(7 if kind == 7 else 5)
            signed = np.array([n - (1 << 64) if n >> 63 else n for n in bits], np.int64)
            width = np.dtype(_ONNX[kind]).itemsize
            values = signed.astype(f"<i{width}").view(_ONNX[kind])
        tensors[name] = _shaped(values, tensor.ints(1))
    return tensors


def _shaped(values: np.ndarray, shape: list[int]) -> np.ndarray:
    if math.prod(shape) != values.size:
        raise ValueError(f"{values.size} values for the shape {shape}")
    return values.reshape(shape)
