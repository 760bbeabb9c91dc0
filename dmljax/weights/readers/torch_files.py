"""State dicts that `torch.save` wrote: the zip format and the legacy format before PyTorch 1.6."""

import io
import zipfile
from typing import Any

import numpy as np

from dmljax.weights.readers.errors import Refused
from dmljax.weights.readers.unpickle import Storage, Tensor, type_name, unpickle

_MAGIC, _PROTOCOL = 0x1950A86A20F9469CFC6C, 1001  # of the legacy format


def parse_zip(data: bytes) -> dict[str, np.ndarray]:
    """Tensors of an archive with `data.pkl` and one member `data/KEY` per storage."""
    archive = zipfile.ZipFile(io.BytesIO(data))
    names = archive.namelist()
    roots = [name.removesuffix("data.pkl") for name in names if name.endswith("/data.pkl")]
    if len(roots) != 1:
        raise Refused("is a zip archive without PyTorch's data.pkl")
    if any(name.startswith(f"{roots[0]}code/") for name in names):
        raise Refused("is a TorchScript program: save its state_dict() with torch.save")
    members = archive.infolist()
    if any(info.compress_type != zipfile.ZIP_STORED for info in members):
        raise Refused("is a compressed zip archive, which PyTorch does not write")
    if sum(info.file_size for info in members) > len(data):
        raise Refused("is a zip archive whose members overlap, which PyTorch does not write")

    def member(name: str) -> bytes:
        return archive.read(roots[0] + name)

    big_endian = f"{roots[0]}byteorder" in names and member("byteorder") == b"big"
    tensors = _state_dict(unpickle(io.BytesIO(member("data.pkl"))))
    keys = {tensor.storage.key for tensor in tensors.values()}
    return _arrays(tensors, {key: member(f"data/{key}") for key in keys}, big_endian)


def parse_legacy(data: bytes) -> dict[str, np.ndarray]:
    """Tensors of a stream of pickles, which the bytes of all storages follow."""
    stream = io.BytesIO(data)
    if (magic := unpickle(stream)) != _MAGIC:
        raise Refused(f"is a pickle of a {type(magic).__name__}, not written by torch.save")
    if unpickle(stream) != _PROTOCOL:
        raise Refused("is in a PyTorch format that is not known")
    system = unpickle(stream)
    big_endian = isinstance(system, dict) and system.get("little_endian") is False
    storages: list[Storage] = []
    tensors = _state_dict(unpickle(stream, storages))
    itemsizes = {storage.key: storage.dtype.itemsize for storage in storages}
    contents = {}
    keys = unpickle(stream)
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise ValueError("its list of storages is none")
    for key in keys:
        count = int.from_bytes(stream.read(8), "big" if big_endian else "little")
        contents[key] = stream.read(count * itemsizes[key])
        if len(contents[key]) != count * itemsizes[key]:
            raise ValueError(f"storage {key} ends early")
    if remaining := len(data) - stream.tell():
        raise ValueError(f"{remaining} bytes follow the last storage")
    return _arrays(tensors, contents, big_endian)


def _state_dict(content: Any) -> dict[str, Tensor]:
    """Returns the named tensors, which a training checkpoint keeps under one of three keys."""
    for key in ("state_dict", "model_state_dict", "model"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not isinstance(content, dict):
        raise Refused(f"holds a {type_name(content)}, not a state dict")
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise Refused(f"is no state dict: {str(name)[:80]!r} is a {type_name(value)}")
    return content


def _arrays(
    tensors: dict[str, Tensor], contents: dict[str, bytes], big_endian: bool
) -> dict[str, np.ndarray]:
    values = {}
    for tensor in tensors.values():
        storage = tensor.storage
        if storage not in values:
            values[storage] = _storage_values(contents[storage.key], storage, big_endian)
    return {name: _view(values[tensor.storage], tensor) for name, tensor in tensors.items()}


def _storage_values(content: bytes, storage: Storage, big_endian: bool) -> np.ndarray:
    if big_endian:
        width = storage.dtype.itemsize
        content = np.frombuffer(content, f">u{width}").astype(f"<u{width}").tobytes()
    values = np.frombuffer(content, storage.dtype)
    stop = storage.start + storage.length
    if storage.start < 0 or storage.length < 0 or stop > len(values):
        raise ValueError(f"storage {storage.key} has {len(values)} values, not {stop}")
    return values[storage.start : stop]


def _view(values: np.ndarray, tensor: Tensor) -> np.ndarray:
    size, stride = tensor.size, tensor.stride
    if len(size) != len(stride):
        raise ValueError(f"a tensor of {len(size)} axes with {len(stride)} strides")
    if 0 in size:
        return np.zeros(size, values.dtype)
    last = tensor.offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    if last >= len(values):  # `as_strided` would read memory that does not belong to the file
        raise ValueError(f"a tensor reaches to {last} of a storage of {len(values)}")
    steps = [s * values.itemsize for s in stride]
    return np.lib.stride_tricks.as_strided(values[tensor.offset :], size, steps, writeable=False)
