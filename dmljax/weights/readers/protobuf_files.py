"""Protobuf messages: Caffe's `.caffemodel` (a NetParameter), and ONNX (a ModelProto) with its
weights inside.
"""

from typing import Any

import ml_dtypes
import numpy as np

from dmljax.files.protobuf import Message, has_external_data, shaped
from dmljax.weights.readers.errors import Refused

_FLOATS: dict[int, Any] = {  # by TensorProto.DataType
    1: "<f4",
    10: "<f2",
    11: "<f8",
    16: np.dtype(ml_dtypes.bfloat16),
}
_INTEGERS = (6, 7)  # shapes that the graph computes with
_TYPED_FIELDS = {1: 4, 11: 10}  # of values that are not raw bytes


def parse_caffe(view: memoryview) -> dict[str, np.ndarray]:
    """Reads the blobs of a NetParameter, as `LAYER.weight`, `LAYER.bias`, `LAYER.2` and so on."""
    tensors: dict[str, np.ndarray] = {}
    net = Message(view)
    for layers, name_field, blobs_field in ((2, 4, 6), (100, 1, 7)):
        for raw in net.blocks(layers):
            layer = Message(raw)
            if layers == 2 and 1 in layer:
                raise Refused("is a Caffe model of 2013: run upgrade_net_proto_binary on it")
            for i, blob in enumerate(layer.blocks(blobs_field)):
                name = f"{layer.text(name_field)}.{('weight', 'bias')[i] if i < 2 else i}"
                if name in tensors:
                    raise ValueError(f"{name} occurs twice")
                tensors[name] = _blob(Message(blob))
    return tensors


def _blob(blob: Message) -> np.ndarray:
    if 7 in blob:
        shape = Message(blob.blocks(7)[-1]).ints(1)
    else:  # before 2015: always four axes, with leading ones
        shape = [(blob.ints(number) or [0])[-1] for number in (1, 2, 3, 4)]
    values = blob.array(5, "<f4") if 5 in blob else blob.array(8, "<f8")
    return shaped(values, shape)


def parse_onnx(view: memoryview) -> dict[str, np.ndarray]:
    """Reads the floats among the initializers of the graph of a ModelProto."""
    if has_external_data(view):
        raise Refused("keeps its weights in other files: save it as one file")
    tensors = {}
    for raw in Message(Message(view).blocks(7)[-1]).blocks(5):
        tensor = Message(raw)
        name, kind = tensor.text(8), (tensor.ints(2) or [0])[-1]
        if kind in _INTEGERS:
            continue
        field = 9 if 9 in tensor else _TYPED_FIELDS.get(kind)
        if kind not in _FLOATS or field is None:
            raise Refused(f"holds {name} in ONNX type {kind}, which is not read: use a float file")
        tensors[name] = shaped(tensor.array(field, _FLOATS[kind]), tensor.ints(1))
    return tensors
