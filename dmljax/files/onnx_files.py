"""Whether an ONNX file takes values from other files."""

from dmljax.files import protobuf

# By messages of onnx.proto, the fields that lead to tensors, and the messages that they hold.
_PATHS = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "function": {7: "node", 11: "attribute"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
}
_EXTERNAL_DATA, _DATA_LOCATION = 13, 14  # of a TensorProto


def has_external_data(view: memoryview) -> bool:
    """Whether any tensor of a ModelProto lies in another file; ValueError if it is damaged.

    All tensors count: of subgraphs, functions, attributes and sparse initializers too.
    """
    remaining = [("model", view)]
    while remaining:
        message, content = remaining.pop()
        for number, wire, value in protobuf.fields(content):
            if message == "tensor":
                # Each occurrence counts, and any number but DEFAULT (0), as parsers cut numbers
                # to 32 bits.
                if number == _EXTERNAL_DATA or (number == _DATA_LOCATION and value != 0):
                    return True
            elif wire == 2 and number in _PATHS[message]:
                remaining.append((_PATHS[message][number], value))
    return False
