"""State dicts that `torch.save` wrote: the zip format and the legacy format before PyTorch 1.6.

`pickle.load` imports and calls whatever a file names. The pickle machine here has only the opcodes
of containers, numbers and text, and a few names of a state dict, which stand for functions of this
module. Any other name, and any opcode that could create an object, is refused before it has an
effect.
"""

import io
import pickle
import pickletools
import zipfile
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

import ml_dtypes
import numpy as np

T = TypeVar("T")
_Unpickler: Any = pickle._Unpickler  # whose methods have no types

_BIG_ENDIAN = "was written on a big-endian machine: save it again on another one"
_MAGIC, _PROTOCOL = 0x1950A86A20F9469CFC6C, 1001  # of the legacy format
_MAX_KEY = 1 << 48  # PyTorch 1.4 and older numbers parameters by their addresses
_DTYPES = {
    "Double": np.dtype("f8"),
    "Float": np.dtype("f4"),
    "Half": np.dtype("f2"),
    "BFloat16": np.dtype(ml_dtypes.bfloat16),
    "Long": np.dtype("i8"),
    "Int": np.dtype("i4"),
    "Short": np.dtype("i2"),
    "Char": np.dtype("i1"),
    "Byte": np.dtype("u1"),
    "Bool": np.dtype("?"),
}
_OPCODES = """PROTO FRAME STOP MARK POP POP_MARK
    PUT BINPUT LONG_BINPUT MEMOIZE GET BINGET LONG_BINGET
    NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT
    STRING BINSTRING SHORT_BINSTRING BINBYTES SHORT_BINBYTES
    UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8
    EMPTY_DICT EMPTY_LIST EMPTY_TUPLE EMPTY_SET TUPLE TUPLE1 TUPLE2 TUPLE3 LIST DICT
    APPEND APPENDS SETITEM SETITEMS GLOBAL STACK_GLOBAL BINPERSID REDUCE BUILD"""


class Refused(ValueError):
    """A file is refused; the message says what it is. Other errors of readers mean damage."""


class Storage(NamedTuple):
    """A range of the numbers that the file keeps under `key`."""

    key: str
    dtype: np.dtype
    start: int
    length: int


class Tensor(NamedTuple):
    """A view of a storage, with strides in numbers, not bytes."""

    storage: Storage
    offset: int
    size: tuple
    stride: tuple


def parse_zip(data: bytes) -> dict[str, np.ndarray]:
    """Reads the tensors of an archive with `data.pkl` and one member `data/KEY` per storage."""
    archive = zipfile.ZipFile(io.BytesIO(data))
    names = archive.namelist()
    members = archive.infolist()
    roots = [name.removesuffix("data.pkl") for name in names if name.endswith("/data.pkl")]
    problems = {
        "is a zip archive without PyTorch's data.pkl": len(roots) != 1,
        "is a TorchScript program: save its state_dict() with torch.save": any(
            name.startswith(f"{root}code/") for name in names for root in roots
        ),
        "is a compressed zip archive, which PyTorch does not write": any(
            info.compress_type != zipfile.ZIP_STORED for info in members
        ),
        "is a zip archive whose members overlap, which PyTorch does not write": (
            sum(info.file_size for info in members) > len(data)
        ),
    }
    for problem, is_wrong in problems.items():
        _check(not is_wrong, problem, Refused)

    def member(name: str) -> bytes:
        return archive.read(roots[0] + name)

    is_big_endian = f"{roots[0]}byteorder" in names and member("byteorder") == b"big"
    _check(not is_big_endian, _BIG_ENDIAN, Refused)
    tensors = _state_dict(_Machine(io.BytesIO(member("data.pkl"))).load())
    keys = {tensor.storage.key for tensor in tensors.values()}
    return _arrays(tensors, {key: member(f"data/{key}") for key in keys})


def parse_legacy(data: bytes) -> dict[str, np.ndarray]:
    """Reads the tensors of a stream of pickles, which the bytes of all storages follow."""
    stream = io.BytesIO(data)
    magic = _Machine(stream).load()
    problem = f"is a pickle of a {type(magic).__name__}, not written by torch.save"
    _check(magic == _MAGIC, problem, Refused)
    _check(
        _Machine(stream).load() == _PROTOCOL, "is in a PyTorch format that is not known", Refused
    )
    system = _Machine(stream).load()
    is_big_endian = isinstance(system, dict) and system.get("little_endian") is False
    _check(not is_big_endian, _BIG_ENDIAN, Refused)
    machine = _Machine(stream)
    tensors = _state_dict(machine.load())
    itemsizes = {storage.key: storage.dtype.itemsize for storage in machine.storages}
    contents = {}
    keys = _Machine(stream).load()
    is_list = isinstance(keys, list) and all(isinstance(key, str) for key in keys)
    _check(is_list, "its list of storages is not a list of names")
    for key in keys:
        size = int.from_bytes(stream.read(8), "little") * itemsizes[key]
        contents[key] = stream.read(size)
        _check(len(contents[key]) == size, f"storage {key} ends early")
    remaining = len(data) - stream.tell()
    _check(not remaining, f"{remaining} bytes follow the last storage")
    return _arrays(tensors, contents)


def _state_dict(content: Any) -> dict[str, Tensor]:
    """Returns the named tensors, which a training checkpoint keeps under one of three keys."""
    for key in ("state_dict", "model_state_dict", "model"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    problem = f"holds a {_type_name(content)}, not a state dict"
    _check(isinstance(content, dict), problem, Refused)
    for name, value in content.items():
        problem = f"is not a state dict: {str(name)[:80]!r} is a {_type_name(value)}"
        _check(isinstance(name, str) and isinstance(value, Tensor), problem, Refused)
    return content


def _arrays(tensors: dict[str, Tensor], contents: dict[str, bytes]) -> dict[str, np.ndarray]:
    return {name: _view(contents[x.storage.key], x) for name, x in tensors.items()}


def _view(content: bytes, tensor: Tensor) -> np.ndarray:
    storage, size, stride = tensor.storage, tensor.size, tensor.stride
    values, stop = np.frombuffer(content, storage.dtype), storage.start + storage.length
    is_inside = 0 <= storage.start <= stop <= len(values)
    _check(is_inside, f"storage {storage.key} has {len(values)} values, not {stop}")
    values = values[storage.start : stop]
    if 0 in size:
        return np.zeros(size, values.dtype)
    last = tensor.offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    # Otherwise `as_strided` would read memory that does not belong to the file.
    _check(last < len(values), f"a tensor reaches to {last} of a storage of {len(values)}")
    steps = [s * values.itemsize for s in stride]
    return np.lib.stride_tricks.as_strided(values[tensor.offset :], size, steps, writeable=False)


class _Machine(_Unpickler):
    """Reads one pickle. `storages` are those that it mentions."""

    def __init__(self, stream: io.BytesIO):
        super().__init__(stream, encoding="latin1")
        self.storages: list[Storage] = []

    def find_class(self, module: str, name: str) -> Any:
        known = _GLOBALS.get(f"{module}.{name}")
        problem = (
            f"is not plain weights: its pickle refers to {f'{module}.{name}'[:100]}. Nothing was "
            "run. If you trust where it comes from, save only its state_dict()"
        )
        _check(known is not None, problem, Refused)
        return known

    def persistent_load(self, pid: Any) -> Storage:
        """Reads the storage ('storage', dtype, key, device, length); the legacy format adds a view
        or None.
        """
        kind, dtype, key, _, length, *view = _expect(pid, tuple)
        is_known = kind == "storage" and isinstance(dtype, np.dtype) and type(length) is int
        _check(is_known, "a storage of an unknown kind")
        start = 0
        if view and view[0] is not None:
            _, start, length = view[0]
        self.storages.append(
            Storage(_expect(key, str), dtype, _expect(start, int), _expect(length, int))
        )
        return self.storages[-1]

    def load_global(self) -> None:
        module, name = self.readline(), self.readline()
        _check(name.endswith(b"\n"), "a name ends early")
        self.append(self.find_class(module[:-1].decode(), name[:-1].decode()))

    def load_dict(self) -> None:
        self.append(_dict(_pairs(self.pop_mark())))

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        _expect(self.stack[-1], dict).update(_dict([(key, value)]))

    def load_setitems(self) -> None:
        pairs = _pairs(self.pop_mark())
        _expect(self.stack[-1], dict).update(_dict(pairs))

    def load_build(self) -> None:
        self.stack.pop()  # attributes of a state dict: version numbers of layers
        _expect(self.stack[-1], dict)


class _Dispatch(dict[int, Callable]):
    def __missing__(self, code: int) -> Callable:
        opcode = pickletools.code2op.get(chr(code))  # type: ignore[attr-defined]
        _check(opcode is not None, f"at an unknown opcode {code}")
        raise Refused(f"is not plain weights: its pickle uses {opcode.name}. Nothing was run")


_codes = [getattr(pickle, name)[0] for name in _OPCODES.split()]
_methods = [_Unpickler.dispatch[code].__name__ for code in _codes]
_Machine.dispatch = _Dispatch(
    {code: getattr(_Machine, name) for code, name in zip(_codes, _methods, strict=True)}
)


def _expect(value: Any, type_: type[T]) -> T:
    _check(type(value) is type_, f"a {_type_name(value)} in place of a {type_.__name__}")
    return value


def _check(is_right: bool, problem: str, error: type[ValueError] = ValueError) -> None:
    if not is_right:
        raise error(problem)


def _type_name(value: Any) -> str:
    """Returns the type of a value, for messages."""
    return type(value).__name__.strip("_").lower()


def _dict(pairs: Iterable[tuple[Any, Any]]) -> dict[str | int, Any]:
    """Builds a dict whose keys are text, or integers as in the states of optimizers.

    A nested tuple is hashed item by item: one that holds itself twice at each of 60 levels needs a
    few hundred bytes and 2^60 steps, and one of 200,000 levels exhausts the stack of C.
    """
    items = list(pairs)
    for key, _ in items:
        problem = (
            f"is not plain weights: a dict has a {_type_name(key)} as a key, not text or a small "
            "number. Save only its state_dict()"
        )
        is_key = type(key) is str or (type(key) is int and 0 <= key < _MAX_KEY)
        _check(is_key, problem, Refused)
    return dict(items)


def _pairs(items: list[Any]) -> list[tuple[Any, Any]]:
    return list(zip(items[::2], items[1::2], strict=True))


def _ordered_dict(pairs: Any = None) -> dict[str | int, Any]:
    """Builds an OrderedDict. Python 2 passes its pairs as lists, in a list."""
    pairs = _expect([] if pairs is None else pairs, list)
    items = _dict(map(tuple, pairs))
    pairs.clear()  # so that a short file cannot have one list copied many times
    return items


def _size(sides: Any = ()) -> tuple:
    return _expect(sides, tuple)


def _parameter(tensor: Any, *_: Any) -> Tensor:
    return _expect(tensor, Tensor)


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, *_: Any) -> Tensor:
    for numbers in ((offset,), _expect(size, tuple), _expect(stride, tuple)):
        is_positive = all(type(n) is int and n >= 0 for n in numbers)
        _check(is_positive, "a tensor whose offset, size or stride is not a positive number")
    return Tensor(_expect(storage, Storage), offset, size, stride)


_GLOBALS = {
    "collections.OrderedDict": _ordered_dict,
    "torch.Size": _size,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    **{f"torch.{name}Storage": dtype for name, dtype in _DTYPES.items()},
}
