"""Files of weights as named numpy arrays: PyTorch (both formats), safetensors, Caffe, ONNX.

Nothing in a file is executed. A `.pth` file is a pickle, which is a program for a small stack
machine; `unpickle` interprets only what a state dict needs and refuses everything else. Caffe and
ONNX files are protobuf messages, which `protobuf` reads field by field. torch, Caffe and protobuf
need not be installed.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
import re
from typing import NamedTuple

import numpy as np

from dmljax.weights.readers import caffe, onnx, protobuf, safetensors_files, torch_files
from dmljax.weights.readers.errors import Refused

__all__ = ["Weights", "read"]


class Weights(NamedTuple):
    """The content of a file.

    `layout` is torch, safetensors, caffe or onnx. Only safetensors files have `metadata`.
    """

    tensors: dict[str, np.ndarray]
    layout: str
    sha256: str
    metadata: dict[str, str]


def read(path: str | os.PathLike) -> Weights:
    """The tensors of a file, with the names and types that they have in the file."""
    path = pathlib.Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder: name the file of weights in it")
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    data = path.read_bytes()
    try:
        layout, tensors, metadata = _parse(data)
    except Refused as error:
        raise ValueError(f"{path} {error}") from error
    except Exception as error:  # damaged bytes can cause any error in a reader
        reason = f"{type(error).__name__}: {error}".rstrip(": ")
        raise ValueError(f"{path} is damaged or cut short ({reason}): download it again") from error
    if not tensors:
        raise ValueError(f"{path} holds no tensors")
    return Weights(tensors, layout, hashlib.sha256(data).hexdigest(), metadata)


def _parse(data: bytes) -> tuple[str, dict[str, np.ndarray], dict[str, str]]:
    """Layout, tensors and metadata, by the first bytes of the file."""
    if not data:
        raise Refused("is empty: download it again")
    if re.match(rb"\s*<(!doctype|html|head|body|\?xml|error)", data[:512], re.IGNORECASE):
        raise Refused("is a web page, not weights: the download ended on an error page")
    if data.startswith(b"version https://git-lfs"):
        raise Refused("is a pointer of Git LFS, not the weights: fetch the file itself")
    if data.startswith(b"\x89HDF") or data[257:262] == b"ustar":
        raise Refused("is HDF5 or a tar archive: only .pth, safetensors, Caffe and ONNX are read")
    if safetensors_files.is_header(data[:9]):
        return "safetensors", *safetensors_files.parse(data)
    if data.startswith(b"PK\x03\x04"):
        return "torch", torch_files.parse_zip(data), {}
    if data[0] == 0x80 and data[1] in (2, 3, 4, 5):
        return "torch", torch_files.parse_legacy(data), {}
    return _parse_protobuf(data)


def _parse_protobuf(data: bytes) -> tuple[str, dict[str, np.ndarray], dict[str, str]]:
    view = memoryview(data)
    try:
        fields = {(number, wire) for number, wire, _ in protobuf.fields(view)}
    except ValueError as error:
        raise Refused(
            "is no file of weights that is known (.pth, safetensors, Caffe, ONNX), or it is "
            f"damaged or cut short: {error}"
        ) from error
    if (1, 0) in fields and (7, 2) in fields:
        return "onnx", onnx.parse(view), {}
    if (2, 2) in fields or (100, 2) in fields:
        return "caffe", caffe.parse(view), {}
    raise Refused("is no file of weights that is known (.pth, safetensors, Caffe, ONNX)")
