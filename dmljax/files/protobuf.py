"""Protobuf messages, field by field off the wire, without a schema."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np


def fields(view: memoryview) -> Iterator[tuple[int, int, Any]]:
    """(number, wire type, value) of each field.

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
        """All values of a field that is not an integer."""
        values = self.get(number, [])
        if any(isinstance(value, int) for value in values):
            raise ValueError(f"field {number} is a number")
        return values

    def text(self, number: int) -> str:
        """The last value of a text field, or ''."""
        return str(b"".join(self.blocks(number)[-1:]), "utf-8")

    def ints(self, number: int) -> list[int]:
        """Repeated integers, packed or not."""
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
        """Repeated numbers of fixed width, packed or not."""
        return np.frombuffer(b"".join(self.blocks(number)), dtype)


def shaped(values: np.ndarray, shape: list[int]) -> np.ndarray:
    """`values` in this shape, if it has as many."""
    if math.prod(shape) != values.size:
        raise ValueError(f"{values.size} values for the shape {shape}")
    return values.reshape(shape)
