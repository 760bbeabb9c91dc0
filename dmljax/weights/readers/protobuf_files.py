"""Protobuf messages: Caffe's `.caffemodel` (a NetParameter), and ONNX (a ModelProto) with its
weights inside.
"""

import math
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

from dmljax.weights.readers.errors import Refused

_FLOATS: dict[int, Any] = {  # by TensorProto.DataType
    1: "<f4",
    10: "<f2",
    11: "<f8",
    16: np.dtype(ml_dtypes.bfloat16),
}
_INTEGERS = (6, 7)  # shapes that the graph computes with
_TYPED_FIELDS = {1: 4, 11: 10}  # of values that are not raw bytes


def fields(view: memoryview) -> Iterator[tuple[int, int, Any]]:
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


class Message(dict[int, list[Any]]):
    """All values of each field of a message, by the number of the field."""

    def __init__(self, view: memoryview):
        for number, _, value in fields(view):
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


def shaped(values: np.ndarray, shape: list[int]) -> np.ndarray:
    """Returns `values` in this shape; raises if the sizes differ."""
    if math.prod(shape) != values.size:
        raise ValueError(f"{values.size} values for the shape {shape}")
    return values.reshape(shape)


def parse_caffe(view: memoryview) -> dict[str, np.ndarray]:
    """Reads the blobs of a NetParameter, as `LAYER.weight`, `LAYER.bias`, `LAYER.2` and so on."""
    tensors: dict[str, np.ndarray] = {}
    net = Message(view)
    for layers, name_field, blobs_field in ((2, 4, 6), (100, 1, 7)):
        for raw in net.blocks(layers):
            layer = Message(raw)
            if layers == 2 and 1 in layer:
                raise Refused("is a Caffe model of 2013: run upgrade_net_proto_binary on it")
            for i, blob in enumerate(layer.blocks(blobs_field)):
                name = f"{layer.text(name_field)}.{('weight', 'bias')[i] if i < 2 else i}"
                if name in tensors:
                    raise ValueError(f"{name} occurs twice")
                tensors[name] = _blob(Message(blob))
    return tensors


def _blob(blob: Message) -> np.ndarray:
    if 7 in blob:
        shape = Message(blob.blocks(7)[-1]).ints(1)
    else:  # before 2015: always four axes, with leading ones
        shape = [(blob.ints(number) or [0])[-1] for number in (1, 2, 3, 4)]
    values = blob.array(5, "<f4") if 5 in blob else blob.array(8, "<f8")
    return shaped(values, shape)


def parse_onnx(view: memoryview) -> dict[str, np.ndarray]:
    """Reads the floats among the initializers of the graph of a ModelProto."""
    tensors = {}
    for raw in Message(Message(view).blocks(7)[-1]).blocks(5):
        tensor = Message(raw)
        name, kind = tensor.text(8), (tensor.ints(2) or [0])[-1]
        if 13 in tensor or any(tensor.ints(14)):
            raise Refused("keeps its weights in other files: save it as one file")
        if kind in _INTEGERS:
            continue
        field = 9 if 9 in tensor else _TYPED_FIELDS.get(kind)
        if kind not in _FLOATS or field is None:
            raise Refused(f"holds {name} in ONNX type {kind}, which is not read: use a float file")
        tensors[name] = shaped(tensor.array(field, _FLOATS[kind]), tensor.ints(1))
    return tensors
