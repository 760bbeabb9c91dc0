"""Protobuf messages, field by field without a schema, and the external data of ONNX files."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

# Messages of onnx.proto, and the types of their fields that contain tensors.
_PATHS = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "function": {7: "node", 11: "attribute"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
}
_EXTERNAL_DATA, _DATA_LOCATION = 13, 14  # of a TensorProto


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


def has_external_data(view: memoryview) -> bool:
    """Returns whether any tensor of a ModelProto is in another file; raises if it is damaged.

    It checks all tensors, also of subgraphs, functions, attributes and sparse initializers.
    """
    remaining = [("model", view)]
    while remaining:
        message, content = remaining.pop()
        for number, wire, value in fields(content):
            if message == "tensor":
                # Each occurrence counts, and any number but DEFAULT (0), as parsers cut numbers
                # to 32 bits.
                if number == _EXTERNAL_DATA or (number == _DATA_LOCATION and value != 0):
                    return True
            elif wire == 2 and number in _PATHS[message]:
                remaining.append((_PATHS[message][number], value))
    return False
