"""What the first bytes of an image say, read without a decoder, in microseconds.

A decoder may take minutes for a small file of some kinds. `problem` names the file that is refused
for that, and `facts` says how much work a file may be.
"""

import re
import struct
from typing import NamedTuple

MAX_SCANS = 100  # of a JPEG: each one is a pass over all pixels; progressive ones have about ten
_PLAIN_PPM = re.compile(rb"P[123]\s")
_PPM = re.compile(rb"P[4-6](?:\s|#[^\n]*\n)+(\d{1,9})(?:\s|#[^\n]*\n)+(\d{1,9})\s")
_SCAN = b"\xff\xda"
_COMPRESSED = (b"zTXt", b"iTXt", b"iCCP")  # parts of a PNG
_PARTS = 10_000  # of a PNG that are counted
_SEGMENTS = 1000  # of a JPEG before its size
_ENTRIES = 1000  # of the first list of a TIFF
_WIDTH, _LENGTH, _SHORT = 256, 257, 3  # tags of a TIFF, and a type of their values


class Facts(NamedTuple):
    """The format, the pixels, and how often a decoder passes over them; None: unknown.

    `texts`: compressed texts and profiles of a PNG; a decoder unfolds each of them.
    """

    format: str | None
    pixels: int | None
    scans: int = 1
    texts: int = 0


def problem(data: bytes) -> str | None:
    """Why a file is refused before anything is decoded; None if it is not."""
    if _PLAIN_PPM.match(data):
        return "the image is a PPM with numbers as text: save it as a binary PPM (P4, P5, P6)"
    if data[:2] == b"BM" and _compression(data) in (1, 2):
        return "the image is a BMP with run lengths (RLE): save it without compression"
    if data[:2] == b"\xff\xd8" and (scans := data.count(_SCAN)) > MAX_SCANS:
        return f"the JPEG has {scans:,} scans: the limit is {MAX_SCANS}"
    return None


def facts(data: bytes) -> Facts:
    """What the header says; a decoder may find that it is wrong."""
    try:
        if data[:8] == b"\x89PNG\r\n\x1a\n":
            width, height = struct.unpack_from(">II", data, 16)
            return Facts("PNG", width * height, texts=_texts(data))
        if data[:2] == b"\xff\xd8":
            return Facts("JPEG", _jpeg(data), data.count(_SCAN))
        if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
            return Facts("WEBP", _webp(data))
        if data[:6] in (b"GIF87a", b"GIF89a"):
            width, height = struct.unpack_from("<HH", data, 6)
            return Facts("GIF", width * height)
        if data[:2] == b"BM":
            return Facts("BMP", _bmp(data))
        if data[:4] in (b"II*\0", b"MM\0*"):
            return Facts("TIFF", _tiff(data))
        if match := _PPM.match(data[:1000]):
            return Facts("PPM", int(match[1]) * int(match[2]))
    except (struct.error, IndexError):  # the file ends within its header
        pass
    return Facts(None, None)


def _texts(data: bytes) -> int:
    """How many parts of a PNG are compressed texts or profiles, at most."""
    position, count = 8, 0
    for _ in range(_PARTS):
        part = data[position : position + 8]
        if len(part) < 8:
            return count
        length, kind = struct.unpack(">I4s", part)
        position += 12 + length
        count += kind in _COMPRESSED
    return count + _PARTS


def _jpeg(data: bytes) -> int | None:
    """The largest size that a header before the first scan names."""
    position, pixels = 2, None
    for _ in range(_SEGMENTS):
        while data[position : position + 2] == b"\xff\xff":
            position += 1
        if data[position : position + 1] != b"\xff":
            return None
        marker = data[position + 1]
        if marker == 0xDA:
            return pixels
        (length,) = struct.unpack_from(">H", data, position + 2)
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width = struct.unpack_from(">HH", data, position + 5)
            pixels = max(pixels or 0, height * width)
        position += 2 + length
    return None


def _webp(data: bytes) -> int | None:
    kind = data[12:16]
    if kind == b"VP8X":
        width = int.from_bytes(data[24:27], "little")
        return (width + 1) * (int.from_bytes(data[27:30], "little") + 1)
    if kind == b"VP8L":
        (bits,) = struct.unpack_from("<I", data, 21)
        return ((bits & 0x3FFF) + 1) * ((bits >> 14 & 0x3FFF) + 1)
    if kind == b"VP8 ":
        width, height = struct.unpack_from("<HH", data, 26)
        return (width & 0x3FFF) * (height & 0x3FFF)
    return None


def _bmp(data: bytes) -> int:
    (size,) = struct.unpack_from("<I", data, 14)
    width, height = struct.unpack_from("<HH" if size == 12 else "<ii", data, 18)
    return abs(width * height)


def _compression(data: bytes) -> int:
    if len(data) < 34 or data[14:18] == b"\x0c\0\0\0":
        return 0
    return struct.unpack_from("<I", data, 30)[0]


def _tiff(data: bytes) -> int | None:
    order = "<" if data[:1] == b"I" else ">"
    (start,) = struct.unpack_from(f"{order}I", data, 4)
    (count,) = struct.unpack_from(f"{order}H", data, start)
    sides: dict[int, int] = {}
    for i in range(min(count, _ENTRIES)):
        position = start + 2 + 12 * i
        tag, kind = struct.unpack_from(f"{order}HH", data, position)
        if tag in (_WIDTH, _LENGTH):
            (sides[tag],) = struct.unpack_from(
                order + ("H" if kind == _SHORT else "I"), data, position + 8
            )
    return sides[_WIDTH] * sides[_LENGTH] if len(sides) == 2 else None
