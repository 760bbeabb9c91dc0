"""A pickle machine that runs nothing: containers, numbers, text, and the names in a state dict.

`pickle.load` imports and calls whatever a file names. Here a name must be in `_GLOBALS`, and it
stays a string, which is never imported or called. Any other name, and any opcode that could create
an object, is refused before it has an effect.
"""

import dataclasses
import io
import pickletools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import ml_dtypes
import numpy as np

from dmljax.weights.readers.errors import Refused

T = TypeVar("T")

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
            count = int(name[-1])
            if len(stack) < count:
                raise ValueError("a tuple lacks items")
            stack[-count:] = [tuple(stack[-count:])]
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
            if outer_stacks or len(stack) != 1:
                raise ValueError("a pickle ends in the middle")
            return stack[0]
        elif name not in ("PROTO", "FRAME"):
            word = f" {argument}" if isinstance(argument, str) else ""
            raise Refused(f"is not plain weights: its pickle uses {name}{word}. Nothing was run")
    raise ValueError("a pickle has no end")


def _expect(value: Any, type_: type[T]) -> T:
    if type(value) is not type_:
        raise ValueError(f"a {type_name(value)} in place of a {type_.__name__}")
    return value


def type_name(value: Any) -> str:
    """Returns the type of a value, for messages."""
    return type(value).__name__.strip("_").lower()


def _key(value: Any) -> str | int:
    """Returns `value` if it is text, or an integer as in the states of optimizers.

    A nested tuple is hashed item by item: one that holds itself twice at each of 60 levels needs a
    few hundred bytes and 2^60 steps, and one of 200,000 levels exhausts the stack of C.
    """
    if type(value) is str or (type(value) is int and 0 <= value < _MAX_KEY):
        return value
    raise Refused(
        f"is not plain weights: a dict has a {type_name(value)} as a key, not text or a small "
        "number. Save only its state_dict()"
    )


def _dict(pairs: Iterable[tuple[Any, Any]]) -> dict[str | int, Any]:
    return {_key(key): value for key, value in pairs}


def _pairs(items: list[Any]) -> list[tuple[Any, Any]]:
    return list(zip(items[::2], items[1::2], strict=True))


def _global(name: str) -> _Global:
    if name not in _GLOBALS:
        raise Refused(
            f"is not plain weights: its pickle refers to {name[:100]}. Nothing was run. If you "
            "trust where it comes from, save only its state_dict()"
        )
    return _Global(name)


def _persistent(value: Any) -> Storage:
    """Reads the storage ('storage', type, key, device, length); the legacy format adds a view or
    None.
    """
    kind, storage_type, key, _, length, *view = _expect(value, tuple)
    if kind != "storage" or not isinstance(storage_type, _Global) or type(length) is not int:
        raise ValueError("a storage of an unknown kind")
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
            if not all(type(n) is int and n >= 0 for n in numbers):
                raise ValueError("a tensor whose offset, size or stride is no positive number")
        return Tensor(_expect(storage, Storage), offset, size, stride)
    raise ValueError(f"{name} is called")
