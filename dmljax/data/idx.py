"""The idx format of MNIST's files."""

import gzip
import pathlib

import numpy as np


def read(path: pathlib.Path) -> np.ndarray:
    """The `uint8` array in an idx file, gzipped or not."""
    data = path.read_bytes()
    if data[:2] == b"\x1f\x8b":
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError) as error:
            raise ValueError(f"{path} is a damaged gzip file: {error}") from error
    if len(data) < 4 or data[:3] != b"\0\0\x08":
        raise ValueError(f"{path} is not an idx file of bytes: it starts with {data[:4]!r}")
    rank = data[3]
    header = 4 + 4 * rank
    shape = tuple(np.frombuffer(data, ">u4", rank, 4).tolist()) if len(data) >= header else ()
    expected = header + int(np.prod(shape, dtype=np.int64))
    if not shape or len(data) != expected:
        raise ValueError(f"{path} has {len(data)} bytes, but its header announces {expected}")
    return np.frombuffer(data, np.uint8, offset=header).reshape(shape)
