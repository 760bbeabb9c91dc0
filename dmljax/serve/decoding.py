"""A process with limited memory that decodes images and makes small pictures. Imports no jax.

`workers` starts it, kills it where an image takes too long, and says how both talk.
"""

import contextlib
import ctypes
import functools
import os
import pathlib
import resource
import select
import signal
import socket
import struct
import sys
from collections.abc import Callable

from PIL import ImageOps

from dmljax.bundle import images, preprocessing
from dmljax.bundle.errors import BadImage
from dmljax.bundle.preprocessing import Preprocessing
from dmljax.data.decode import file_bytes
from dmljax.files import allocator
from dmljax.files.reading import json_value

# Lengths of the preprocessing and of the image, and the pixels that the header has promised. A
# question without preprocessing asks for a small JPEG, which the page shows.
QUESTION = struct.Struct("<IQQ")
ANSWER = struct.Struct("<BQ")  # one of the following, and the length of what follows
READY, DONE, REFUSED, TOO_LARGE = range(4)
_SIDE, _QUALITY = 384, 88  # of the JPEG of a small picture
_OUT_OF_MEMORY_SCORE = "500"  # where memory runs out, the system ends this process first
# Memory of ordinary images is kept: to get it from the system again takes as long as to decode.
_KEPT, _LARGE = 64 << 20, 32 << 20
_MANY_PIXELS = 4_000_000  # of an image after which nothing is kept
_IDLE_SECONDS = 1.0  # without a question, after which nothing is kept


def main(descriptor: int, memory: int) -> None:
    """Answers questions until the other end is closed. `memory` is what an image may take."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the service
    _end_with_parent()
    _limit(memory)
    # The service may close its end while an answer is on its way.
    with contextlib.suppress(ConnectionError), socket.socket(fileno=descriptor) as connection:
        connection.sendall(ANSWER.pack(READY, 0))
        while head := _received(connection, QUESTION.size, idle_fn=allocator.trim):
            lengths = QUESTION.unpack(head)
            spec = _received(connection, lengths[0])
            status, payload = _answer(spec, _received(connection, lengths[1]), lengths[2])
            connection.sendall(ANSWER.pack(status, len(payload)) + payload)
            if lengths[2] > _MANY_PIXELS:
                allocator.trim()


def _answer(spec: bytes, image: bytes, pixels: int) -> tuple[int, bytes]:
    try:
        if spec:
            return DONE, _prepared(_preprocessing(spec), image, pixels)
        return DONE, _small(image)
    except BadImage as error:
        return REFUSED, f"{error.kind} {error}".encode()
    except MemoryError:
        return TOO_LARGE, b""
    except Exception as error:
        return REFUSED, f"unreadable the image cannot be read: {type(error).__name__}".encode()


@functools.lru_cache(8)
def _preprocessing(spec: bytes) -> Preprocessing:
    return preprocessing.parse(json_value(spec))


def _prepared(preprocess: Preprocessing, image: bytes, most: int) -> bytes:
    def check_size(height: int, width: int) -> None:
        preprocess.check_size(height, width)
        if height * width > most:  # such a file could take more memory than was set aside for it
            raise BadImage(
                "the image cannot be read: its header names two sizes", kind="unreadable"
            )

    try:
        decoded = images.pixels(image, check_size_fn=check_size, least_side=preprocess.least_side)
    except BadImage as error:
        if isinstance(error.__cause__, MemoryError):
            raise error.__cause__ from None
        raise
    return preprocess(decoded).tobytes()


def _small(image: bytes) -> bytes:
    """A JPEG whose sides have at most `_SIDE` pixels."""
    with images.opened(image) as picture:
        if picture.width * picture.height > preprocessing.MAX_PIXELS:
            raise BadImage("the image has too many pixels", kind="too_large")
        picture.draft("RGB", (_SIDE, _SIDE))  # decodes a large JPEG at a fraction of its size
        small = ImageOps.exif_transpose(picture).convert("RGB")
        small.thumbnail((_SIDE, _SIDE))
    return file_bytes(small, "JPEG", quality=_QUALITY)


def _received(
    connection: socket.socket, length: int, *, idle_fn: Callable[[], None] | None = None
) -> bytes:
    """`length` bytes; none where the other end is closed. `idle_fn` is called if none come soon."""
    if idle_fn is not None and not select.select([connection], [], [], _IDLE_SECONDS)[0]:
        idle_fn()
    data = bytearray(length)
    view, position = memoryview(data), 0
    while position < length:
        count = connection.recv_into(view[position:])
        if not count:
            return b""
        position += count
    return bytes(data)


def _limit(memory: int) -> None:
    """No more memory than at present and `memory`."""
    allocator.keep_at_most(_KEPT, large=_LARGE)
    with contextlib.suppress(OSError):
        pathlib.Path("/proc/self/oom_score_adj").write_text(_OUT_OF_MEMORY_SCORE)
    with contextlib.suppress(OSError, ValueError):
        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
        most = pages * os.sysconf("SC_PAGE_SIZE") + memory
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _end_with_parent() -> None:
    """The system ends this process when the service is killed, also in the middle of an image."""
    with contextlib.suppress(OSError, AttributeError):
        set_parent_death_signal = 1
        ctypes.CDLL("libc.so.6").prctl(set_parent_death_signal, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
