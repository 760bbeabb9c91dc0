"""Damaged forms of real files, from a generator of random numbers with a fixed seed."""

from __future__ import annotations

import copy
import json
import struct
from typing import Any

import numpy as np

_NUMBERS = (0, 1, 127, 128, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**32 - 1, 2**62, 2**63, 2**64 - 1)
_VALUES: tuple[Any, ...] = (None, True, 0, -1, 2**70, 1e308, float("inf"), float("nan"), "", "../a")
_VALUES += ("\ud800", "\0", "a:b", "x" * 5000, [], {}, [[]], {"a": None}, "9" * 400, -0.5)


def damaged(data: bytes, others: list[bytes], rng: np.random.Generator) -> bytes:
    """`data` after one to four changes of bytes, or of values if it is JSON."""
    if data[:1] in (b"{", b"[") and rng.random() < 0.7:
        try:
            return _damaged_json(data, rng)
        except ValueError:
            pass
    content = bytearray(data)
    for _ in range(int(rng.integers(1, 5))):
        place = int(rng.integers(len(content) + 1))
        if rng.random() < 0.5:  # the first bytes decide how the rest is read
            place = int(place * rng.random() ** 3)
        _CHANGES[rng.integers(len(_CHANGES))](content, place, others, rng)
    return bytes(content)


def _flip(content, place, others, rng):
    if content:
        content[place % len(content)] ^= 1 << int(rng.integers(8))


def _byte(content, place, others, rng):
    content[place : place + 1] = bytes([int(rng.choice([0, 1, 9, 10, 32, 48, 127, 128, 255]))])


def _noise(content, place, others, rng):
    content[place:place] = rng.bytes(int(rng.integers(1, 9)))


def _removal(content, place, others, rng):
    del content[place : place + int(rng.integers(1, 40))]


def _cut(content, place, others, rng):
    del content[place:]


def _repetition(content, place, others, rng):
    content[place:place] = bytes(content[place : place + 64]) * int(rng.integers(1, 20))


def _number(content, place, others, rng):
    size, code = ((1, "B"), (2, "H"), (4, "I"), (8, "Q"))[rng.integers(4)]
    value = _NUMBERS[rng.integers(len(_NUMBERS))] % 2 ** (8 * size)
    content[place : place + size] = struct.pack("<>"[rng.integers(2)] + code, value)


def _digits(content, place, others, rng):
    places = [i for i, x in enumerate(content) if 48 <= x <= 57]
    if places:
        i = places[rng.integers(len(places))]
        content[i : i + 1] = str(_NUMBERS[rng.integers(len(_NUMBERS))]).encode()


def _other_file(content, place, others, rng):
    other = others[rng.integers(len(others))]
    start = int(rng.integers(len(other) + 1))
    content[place:] = other[start:]


_CHANGES = (_flip, _byte, _noise, _removal, _cut, _repetition, _number, _digits, _other_file)


def _damaged_json(data: bytes, rng: np.random.Generator) -> bytes:
    root = [json.loads(data)]
    for _ in range(int(rng.integers(1, 4))):
        nodes, stack = [], [root]
        while stack:
            node = stack.pop()
            keys = list(node) if isinstance(node, dict) else range(len(node))
            nodes += [(node, key) for key in keys]
            stack += [node[key] for key in keys if isinstance(node[key], dict | list)]
        node, key = nodes[rng.integers(len(nodes))]
        action = rng.integers(5)
        if action == 0 and node is not root:
            del node[key]
        elif action == 1:
            node[key] = [node[key]]
            for _ in range(int(rng.choice([1, 200, 100_000]))):
                node[key] = [node[key]]
        elif action == 2 and isinstance(node, dict):
            node[str(_VALUES[rng.integers(len(_VALUES))])] = node.pop(key)
        elif action == 3 and isinstance(node[key], int | float):
            node[key] = -node[key] if rng.random() < 0.5 else node[key] * 2**40
        else:
            node[key] = copy.deepcopy(_VALUES[rng.integers(len(_VALUES))])
    depth = 0
    node = root[0]
    while isinstance(node, list) and len(node) == 1:  # too deep for json.dumps
        node, depth = node[0], depth + 1
    try:
        return b"[" * depth + json.dumps(node).encode() + b"]" * depth
    except RecursionError:
        return b'{"a":' * 100_000 + b"1" + b"}" * 100_000
