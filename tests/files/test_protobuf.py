"""Tensors of an ONNX file that lie in other files are found wherever they are."""

import forged
import pytest
from forged import field

from dmljax.files.protobuf import has_external_data

TENSORS = {
    "outside": forged.outside_tensor("secret.txt"),
    "a location alone": field(14, 1),
    "a list of places alone": field(13, b""),
    "the second location": field(14, 0) + field(14, 1) + field(14, 0),
    "a number that parsers cut to 1": field(14, (1 << 32) + 1),
}
INSIDE = field(1, 2) + field(2, 1) + field(8, "w") + field(9, b"\0" * 8) + field(14, 0)


def _places(tensor):
    """Models with the tensor in every place of onnx.proto that holds one."""
    attributes = {
        "t": field(5, tensor),
        "g": field(6, field(5, tensor)),
        "tensors": field(10, tensor),
        "graphs": field(11, field(5, tensor)),
        "sparse_tensor": field(22, field(1, tensor)),
        "sparse_tensors": field(23, field(2, tensor)),
        "g in g": field(6, field(1, field(5, field(6, field(5, tensor))))),
    }
    places = {f"attribute {k}": field(7, field(1, field(5, v))) for k, v in attributes.items()}
    return places | {
        "initializer": field(7, field(5, tensor)),
        "sparse values": field(7, field(15, field(1, tensor))),
        "sparse indices": field(7, field(15, field(2, tensor))),
        "function": field(25, field(7, field(5, field(5, tensor)))),
        "attribute of a function": field(25, field(11, field(5, tensor))),
        "training": field(20, field(1, field(5, tensor))),
        "training steps": field(20, field(2, field(5, tensor))),
        "a second graph": field(7, b"") + field(7, field(5, INSIDE)) + field(7, field(5, tensor)),
    }


@pytest.mark.parametrize("place", _places(b""))
def test_a_tensor_outside_is_found(place):
    for tensor in TENSORS.values():
        assert has_external_data(memoryview(field(1, 8) + _places(tensor)[place]))
    assert not has_external_data(memoryview(field(1, 8) + _places(INSIDE)[place]))


def test_subgraphs_of_any_depth_are_searched():
    graph = field(5, TENSORS["outside"])
    for _ in range(3_000):
        graph = field(1, field(5, field(6, graph)))
    assert has_external_data(memoryview(field(7, graph)))


def test_a_file_that_is_cut_is_refused():
    data = forged.onnx_program(INSIDE)
    assert not has_external_data(memoryview(data))
    with pytest.raises(ValueError, match="ends"):
        has_external_data(memoryview(data[:-1]))
