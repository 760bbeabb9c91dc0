"""How many values a body of JSON or msgpack has, without making them.

An empty list is one byte of msgpack and 64 in Python. So values are counted before they are parsed.
"""

import re

# Runs of values of one size, so that Python takes a step for each run: the bytes of one value, and
# what such runs look like. Heads of arrays and maps count as values.
_RUNS = (
    (9, re.compile(rb"(?:[\xcb\xcf\xd3].{8})+", re.DOTALL)),
    (5, re.compile(rb"(?:[\xca\xce\xd2\xdd\xdf].{4})+", re.DOTALL)),
    (1, re.compile(rb"[\x00-\xa0\xc0-\xc3\xe0-\xff]+", re.DOTALL)),
    (3, re.compile(rb"(?:[\xcd\xd1\xdc\xde].{2})+", re.DOTALL)),
    (2, re.compile(rb"(?:[\xcc\xd0].)+", re.DOTALL)),
)
_RUN_OF_BYTE = {
    byte: run for run in _RUNS for byte in range(256) if run[1].match(bytes([byte]) + bytes(8))
}
# Text, bytes and extensions: how many bytes say the length, and what follows beside that.
_LENGTHS = {0xD9: (1, 0), 0xDA: (2, 0), 0xDB: (4, 0), 0xC4: (1, 0), 0xC5: (2, 0), 0xC6: (4, 0)}
_LENGTHS |= {0xC7: (1, 1), 0xC8: (2, 1), 0xC9: (4, 1)}
_FIXED_EXTENSIONS = {0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17}


def of_json(body: bytes) -> int:
    """An upper bound of the number of values; commas and brackets within text count, too."""
    return 1 + body.count(b",") + body.count(b"[") + body.count(b"{")


def of_msgpack(body: bytes, *, most: int) -> int:
    """The number of values, keys included; what is larger than `most` is not counted to its end."""
    position, count = 0, 0
    while position < len(body) and count <= most:
        byte = body[position]
        if run := _RUN_OF_BYTE.get(byte):
            size, pattern = run
            match = pattern.match(body, position)
            end = match.end() if match else len(body)
            count += max(1, (end - position) // size)
            position = end
            continue
        count += 1
        if 0xA0 <= byte <= 0xBF:
            position += 1 + (byte & 0x1F)
        elif byte in _LENGTHS:
            width, more = _LENGTHS[byte]
            length = int.from_bytes(body[position + 1 : position + 1 + width], "big")
            position += 1 + width + more + length
        else:
            position += 1 + _FIXED_EXTENSIONS.get(byte, 0)
    return count
