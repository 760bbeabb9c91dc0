"""State dicts that `torch.save` wrote: the zip format and the legacy format before PyTorch 1.6.

`pickle.load` imports and calls whatever a file names. The pickle machine here runs nothing: it
knows containers, numbers, text, and the names in a state dict. A name must be in `_GLOBALS`, and it
stays a string, which is never imported or called. Any other name, and any opcode that could create
an object, is refused before it has an effect.
"""

import dataclasses
import io
import pickletools
import zipfile
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import ml_dtypes
import numpy as np

from dmljax.weights.readers.errors import Refused

T = TypeVar("T")

_BIG_ENDIAN = "was written on a big-endian machine: save it again on another one"
_MAGIC, _PROTOCOL = 0x1950A86A20F9469CFC6C, 1001  # of the legacy format
_STORAGES = {
    "DoubleStorage": np.dtype("f8"),
    "FloatStorage": np.dtype("f4"),
    "HalfStorage": np.dtype("f2"),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "LongStorage": np.dtype("i8"),
    "IntStorage": np.dtype("i4"),
    "ShortStorage": np.dtype("i2"),
    "CharStorage": np.dtype("i1"),
    "ByteStorage": np.dtype("u1"),
    "BoolStorage": np.dtype("?"),
}
_GLOBALS = {
    "collections.OrderedDict",
    "torch.Size",
    "torch._utils._rebuild_parameter",
    "torch._utils._rebuild_tensor",
    "torch._utils._rebuild_tensor_v2",
    *(f"torch.{name}" for name in _STORAGES),
}
# Opcodes whose argument is the value itself.
_LITERALS = {
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES"),
    *("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
}
_MAX_KEY = 1 << 48  # PyTorch 1.4 and older numbers parameters by their addresses
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_BUILD: dict[str, Callable] = {
    "TUPLE": tuple,
    "LIST": list,
    "DICT": lambda items: _dict(_pairs(items)),
}
_NEW = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple, "EMPTY_SET": set}


@dataclasses.dataclass(frozen=True)
class _Global:
    name: str


@dataclasses.dataclass(frozen=True)
class Storage:
    """A range of the numbers that the file keeps under `key`."""

    key: str
    dtype: np.dtype
    start: int
    length: int


@dataclasses.dataclass(frozen=True)
class Tensor:
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
    refusals = {
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
    if wrong := [text for text, is_wrong in refusals.items() if is_wrong]:
        raise Refused(wrong[0])

    def member(name: str) -> bytes:
        return archive.read(roots[0] + name)

    is_big_endian = f"{roots[0]}byteorder" in names and member("byteorder") == b"big"
    _check(not is_big_endian, _BIG_ENDIAN, Refused)
    tensors = _state_dict(unpickle(io.BytesIO(member("data.pkl"))))
    keys = {tensor.storage.key for tensor in tensors.values()}
    return _arrays(tensors, {key: member(f"data/{key}") for key in keys})


def parse_legacy(data: bytes) -> dict[str, np.ndarray]:
    """Reads the tensors of a stream of pickles, which the bytes of all storages follow."""
    stream = io.BytesIO(data)
    magic = unpickle(stream)
    problem = f"is a pickle of a {type(magic).__name__}, not written by torch.save"
    _check(magic == _MAGIC, problem, Refused)
    _check(unpickle(stream) == _PROTOCOL, "is in a PyTorch format that is not known", Refused)
    system = unpickle(stream)
    is_big_endian = isinstance(system, dict) and system.get("little_endian") is False
    _check(not is_big_endian, _BIG_ENDIAN, Refused)
    storages: list[Storage] = []
    tensors = _state_dict(unpickle(stream, storages))
    itemsizes = {storage.key: storage.dtype.itemsize for storage in storages}
    contents = {}
    keys = unpickle(stream)
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


def unpickle(stream: io.BytesIO, storages: list[Storage] | None = None) -> Any:
    """Reads the next pickle of a stream. Appends every storage that it mentions to `storages`."""
    stack: list[Any] = []
    outer_stacks: list[list[Any]] = []  # one per open mark
    memo: dict[int, Any] = {}
    argument: Any
    for opcode, argument, _ in pickletools.genops(stream):
        name = opcode.name
        if name in _LITERALS:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _NEW:
            stack.append(_NEW[name]())
        elif name == "MARK":
            outer_stacks.append(stack)
            stack = []
        elif name in ("TUPLE", "LIST", "DICT", "APPENDS", "SETITEMS", "POP_MARK"):
            items, stack = stack, outer_stacks.pop()
            if name == "APPENDS":
                _expect(stack[-1], list).extend(items)
            elif name == "SETITEMS":
                _expect(stack[-1], dict).update(_dict(_pairs(items)))
            elif name != "POP_MARK":
                stack.append(_BUILD[name](items))
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            items = [stack.pop() for _ in range(int(name[-1]))]
            stack.append(tuple(items[::-1]))
        elif name == "APPEND":
            item = stack.pop()
            _expect(stack[-1], list).append(item)
        elif name == "SETITEM":
            value, key = stack.pop(), stack.pop()
            _expect(stack[-1], dict)[_key(key)] = value
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
            attribute, module = _expect(stack.pop(), str), _expect(stack.pop(), str)
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
            _expect(stack[-1], dict)
        elif name == "STOP":
            _check(not outer_stacks and len(stack) == 1, "a pickle ends in the middle")
            return stack[0]
        elif name not in ("PROTO", "FRAME"):
            word = f" {argument}" if isinstance(argument, str) else ""
            raise Refused(f"is not plain weights: its pickle uses {name}{word}. Nothing was run")
    raise ValueError("a pickle has no end")


def _expect(value: Any, type_: type[T]) -> T:
    _check(type(value) is type_, f"a {_type_name(value)} in place of a {type_.__name__}")
    return value


def _check(is_right: bool, problem: str, error: type[ValueError] = ValueError) -> None:
    if not is_right:
        raise error(problem)


def _type_name(value: Any) -> str:
    """Returns the type of a value, for messages."""
    return type(value).__name__.strip("_").lower()


def _key(value: Any) -> str | int:
    """Returns `value` if it is text, or an integer as in the states of optimizers.

    A nested tuple is hashed item by item: one that holds itself twice at each of 60 levels needs a
    few hundred bytes and 2^60 steps, and one of 200,000 levels exhausts the stack of C.
    """
    problem = (
        f"is not plain weights: a dict has a {_type_name(value)} as a key, not text or a small "
        "number. Save only its state_dict()"
    )
    _check(type(value) is str or (type(value) is int and 0 <= value < _MAX_KEY), problem, Refused)
    return value


def _dict(pairs: Iterable[tuple[Any, Any]]) -> dict[str | int, Any]:
    return {_key(key): value for key, value in pairs}


def _pairs(items: list[Any]) -> list[tuple[Any, Any]]:
    return list(zip(items[::2], items[1::2], strict=True))


def _global(name: str) -> _Global:
    problem = (
        f"is not plain weights: its pickle refers to {name[:100]}. Nothing was run. If you "
        "trust where it comes from, save only its state_dict()"
    )
    _check(name in _GLOBALS, problem, Refused)
    return _Global(name)


def _persistent(value: Any) -> Storage:
    """Reads the storage ('storage', type, key, device, length); the legacy format adds a view or
    None.
    """
    kind, storage_type, key, _, length, *view = _expect(value, tuple)
    is_known = kind == "storage" and isinstance(storage_type, _Global) and type(length) is int
    _check(is_known, "a storage of an unknown kind")
    start = 0
    if view and view[0] is not None:
        _, start, length = view[0]
    dtype = _STORAGES[storage_type.name.removeprefix("torch.")]
    return Storage(_expect(key, str), dtype, _expect(start, int), _expect(length, int))


def _reduce(function: Any, arguments: Any) -> Any:
    name = _expect(function, _Global).name
    arguments = _expect(arguments, tuple)
    if name == "collections.OrderedDict":  # Python 2 passes its pairs as lists, in a list
        pairs = _expect(arguments[0], list) if arguments else []
        items = _dict(map(tuple, pairs))
        pairs.clear()  # so that a short file cannot have one list copied many times
        return items
    if name == "torch.Size":
        return _expect(arguments[0], tuple) if arguments else ()
    if name == "torch._utils._rebuild_parameter":
        return _expect(arguments[0], Tensor)
    if name.startswith("torch._utils._rebuild_tensor"):
        storage, offset, size, stride = arguments[:4]
        for numbers in ((offset,), _expect(size, tuple), _expect(stride, tuple)):
            is_positive = all(type(n) is int and n >= 0 for n in numbers)
            _check(is_positive, "a tensor whose offset, size or stride is not a positive number")
        return Tensor(_expect(storage, Storage), offset, size, stride)
    raise ValueError(f"{name} is called")
