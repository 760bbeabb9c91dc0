"""Files of weights as named numpy arrays: PyTorch (both formats), safetensors, Caffe, ONNX.

Nothing in a file is executed. A `.pth` file is a pickle, which is a program for a small stack
machine; `torch_files` interprets only what a state dict needs and refuses everything else. Caffe
and ONNX files are protobuf messages, which are read field by field. torch, Caffe and protobuf need
not be installed.
"""

import dataclasses
import functools
import hashlib
import os
import pathlib
import re

import numpy as np

from dmljax.files.writing import sha256
from dmljax.weights.readers import protobuf_files, safetensors_files, torch_files
from dmljax.weights.readers.errors import Refused

__all__ = ["Weights", "read"]

_KNOWN = "(.pth, safetensors, Caffe, ONNX)"
_OTHER_FILES = (  # first bytes, and what such a file is
    (rb"\Z", "is empty: download it again"),
    (
        rb"\s*<(!doctype|html|head|body|\?xml|error)",
        "is a web page, not weights: the download ended on an error page",
    ),
    (
        rb"version https://git-lfs",
        "is a pointer of Git LFS, not the weights: fetch the file itself",
    ),
    (rb"\x89HDF|.{257}ustar", f"is HDF5 or a tar archive, which is not read {_KNOWN}"),
)


@dataclasses.dataclass(frozen=True)
class Weights:
    """The content of a file, or of several shards.

    `layout` is torch, safetensors, caffe or onnx. Only safetensors files have `metadata`, and only
    their tensors stay in the file until they are used.
    """

    tensors: dict[str, np.ndarray]
    layout: str
    metadata: dict[str, str]
    files: tuple[pathlib.Path, ...]

    @functools.cached_property
    def sha256(self) -> str:
        """The digest of the file; of an index, of the digests of index and shards."""
        digests = [sha256(file) for file in self.files]
        total = hashlib.sha256("".join(digests).encode()).hexdigest()
        return digests[0] if len(digests) == 1 else total


def read(path: str | os.PathLike) -> Weights:
    """Reads the tensors of a file, with the names and types that they have in the file.

    For weights in several files, `path` is their index: `model.safetensors.index.json`.
    """
    path = pathlib.Path(path)
    if not path.is_file():
        problem = "is a folder: name the file in it" if path.is_dir() else "does not exist"
        raise FileNotFoundError(f"{path} {problem}")
    try:
        if path.name.endswith(".index.json"):
            weights = _read_shards(path)
        else:
            weights = Weights(*_parse(path), (path,))
    except Refused as error:
        raise ValueError(f"{path} {error}") from error
    except Exception as error:  # damaged bytes can cause any error in a reader
        reason = f"{type(error).__name__}: {error}".rstrip(": ")
        raise ValueError(f"{path} is damaged or cut short ({reason}): download it again") from error
    if not weights.tensors:
        raise ValueError(f"{path} holds no tensors")
    return weights


def _read_shards(path: pathlib.Path) -> Weights:
    tensors: dict[str, np.ndarray] = {}
    shards = safetensors_files.shards(path)
    for shard, names in shards.items():
        try:
            content = safetensors_files.parse(shard)[0]
        except Exception as error:
            raise Refused(f"names {shard.name}, which is damaged or cut short: {error}") from error
        if lacking := [name for name in names if name not in content]:
            raise Refused(f"says that {shard.name} holds {lacking[0]}, which it does not")
        tensors |= {name: content[name] for name in names}
    return Weights(tensors, "safetensors", {}, (path, *shards))


def _parse(path: pathlib.Path) -> tuple[dict[str, np.ndarray], str, dict[str, str]]:
    """Tensors, layout and metadata, by the first bytes of the file."""
    with open(path, "rb") as file:
        start = file.read(9)
    if safetensors_files.is_header(start):
        tensors, metadata = safetensors_files.parse(path)
        return tensors, "safetensors", metadata
    data = path.read_bytes()
    for pattern, problem in _OTHER_FILES:
        if re.match(pattern, data[:512], re.IGNORECASE | re.DOTALL):
            raise Refused(problem)
    if data.startswith(b"PK\x03\x04"):
        return torch_files.parse_zip(data), "torch", {}
    if data[0] == 0x80 and data[1] in (2, 3, 4, 5):
        return torch_files.parse_legacy(data), "torch", {}
    return _parse_protobuf(data)


def _parse_protobuf(data: bytes) -> tuple[dict[str, np.ndarray], str, dict[str, str]]:
    view, fields, reason = memoryview(data), set(), ""
    try:
        fields = {(number, wire) for number, wire, _ in protobuf_files.fields(view)}
    except ValueError as error:
        reason = f", or it is damaged or cut short: {error}"
    if (1, 0) in fields and (7, 2) in fields:
        return protobuf_files.parse_onnx(view), "onnx", {}
    if (2, 2) in fields or (100, 2) in fields:
        return protobuf_files.parse_caffe(view), "caffe", {}
    raise Refused(f"is not a known file of weights {_KNOWN}{reason}")
