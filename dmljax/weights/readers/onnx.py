"""ONNX files with their weights inside: a ModelProto."""

from typing import Any

import ml_dtypes
import numpy as np

from dmljax.files.protobuf import Message, has_external_data, shaped
from dmljax.weights.readers.errors import Refused

_DTYPES: dict[int, Any] = {  # by TensorProto.DataType
    1: "<f4",
    6: "<i4",
    7: "<i8",
    10: "<f2",
    11: "<f8",
    16: np.dtype(ml_dtypes.bfloat16),
}
_TYPED_FIELDS = {1: (4, "<f4"), 11: (10, "<f8")}  # of values that are not raw bytes


def parse(view: memoryview) -> dict[str, np.ndarray]:
    """Reads the initializers of the graph of a ModelProto."""
    if has_external_data(view):
        raise Refused("keeps its weights in other files: save it as one file")
    tensors = {}
    graph = Message(Message(view).blocks(7)[-1])
    for raw in graph.blocks(5):
        tensor = Message(raw)
        name, kind = tensor.text(8), (tensor.ints(2) or [0])[-1]
        if kind not in _DTYPES:
            raise Refused(
                f"holds {name} in ONNX type {kind}, which is not supported: use a float file"
            )
        if 9 in tensor:
            values = tensor.array(9, _DTYPES[kind])
        elif kind in _TYPED_FIELDS:
            values = tensor.array(*_TYPED_FIELDS[kind])
        else:
            bits = tensor.ints(7 if kind == 7 else 5)
            signed = np.array([n - (1 << 64) if n >> 63 else n for n in bits], np.int64)
            width = np.dtype(_DTYPES[kind]).itemsize
            values = signed.astype(f"<i{width}").view(_DTYPES[kind])
        tensors[name] = shaped(values, tensor.ints(1))
    return tensors
