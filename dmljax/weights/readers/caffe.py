"""Caffe's `.caffemodel`: a NetParameter."""

import numpy as np

from dmljax.files.protobuf import Message, shaped
from dmljax.weights.readers.errors import Refused


def parse(view: memoryview) -> dict[str, np.ndarray]:
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
