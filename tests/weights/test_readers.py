"""Files of every format are read bitwise."""

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import weight_files as make
from weight_files import read

from dmljax.weights import readers


def random_tensors(seed=0):
    rng = np.random.default_rng(seed)
    result = {}
    for i, kind in enumerate(["f4", "f2", "f8", "i8", "i4", "i2", "i1", "u1", "?"]):
        shape = tuple(rng.integers(1, 4, rng.integers(0, 5)))
        result[f"layer{i}.0.weight"] = np.asarray(rng.normal(0, 50, shape)).astype(kind)
    result["wide.bias"] = rng.normal(size=7).astype(ml_dtypes.bfloat16)
    result["none"] = np.zeros((0, 3), np.float32)
    return result


def assert_same(result, expected):
    assert list(result) == list(expected)
    for name, array in expected.items():
        assert result[name].dtype == array.dtype and result[name].shape == array.shape, name
        assert result[name].tobytes() == array.tobytes(), name


@pytest.mark.parametrize("legacy", [True, False])
def test_a_torch_file_written_by_hand_is_read_bitwise(tmp_path, legacy):
    for seed in range(5):
        expected = random_tensors(seed)
        result = read(tmp_path, make.torch_file(expected, legacy=legacy))
        assert result.layout == "torch" and result.metadata == {}
        assert_same(result.tensors, expected)


@pytest.mark.parametrize("legacy", [True, False])
def test_a_torch_file_written_by_torch_is_read_bitwise(tmp_path, legacy):
    torch = pytest.importorskip("torch")
    for seed in range(5):
        torch.manual_seed(seed)
        base = torch.randn(6, 5, 4)
        tree = {
            "layer1.0.weight": base,
            "shared": base,
            "view": base[1:4, ::2],
            "turned": base.permute(2, 0, 1)[1:],
            "columns": torch.randn(3, 4, 5, 6).to(memory_format=torch.channels_last),
            "spread": torch.randn(1, 4).expand(3, 4),
            "scalar": torch.tensor(seed, dtype=torch.int64),
            "empty": torch.zeros(0, 2),
            "parameter": torch.nn.Parameter(torch.randn(2, 2)),
        }
        kinds = [torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.bool]
        tree |= {str(kind): (torch.randn(4, 3) * 9).to(kind).T for kind in kinds}
        path = tmp_path / "file.pth"
        torch.save(tree, path, _use_new_zipfile_serialization=not legacy)
        result = readers.read(path).tensors
        assert list(result) == list(tree)
        for name, value in tree.items():
            bits = value.detach().contiguous()
            if value.dtype == torch.bfloat16:
                bits = bits.view(torch.int16)
                assert result[name].dtype == ml_dtypes.bfloat16
            else:
                assert result[name].dtype == bits.numpy().dtype
            assert result[name].shape == tuple(value.shape)
            assert result[name].tobytes() == bits.numpy().tobytes(), name


@pytest.mark.parametrize("legacy", [True, False])
def test_the_state_dict_is_read_alone_and_inside_of_a_checkpoint(tmp_path, legacy):
    torch = pytest.importorskip("torch")
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    net(torch.randn(2, 3, 8, 8)).sum().backward()
    optimizer.step()
    states = {"epoch": 3, "state_dict": net.state_dict(), "optimizer": optimizer.state_dict()}
    for saved in (net.state_dict(), states):
        path = tmp_path / "file.pth"
        torch.save(saved, path, _use_new_zipfile_serialization=not legacy)
        result = readers.read(path).tensors
        assert_same(result, {name: value.numpy() for name, value in net.state_dict().items()})


def test_views_are_read_and_the_other_byte_order_is_refused(tmp_path):
    values = np.arange(10, dtype=np.float32)
    view = b"(" + make.text("part") + make.number(4) + make.number(3) + b"t"
    stored = make.storage("Float", "7", 10, view)
    pickled = make.state_dict({"x": make.tensor(stored, 1, (2,), (1,))})
    result = read(tmp_path, make.torch_legacy(pickled, {"7": (10, values.tobytes())}))
    np.testing.assert_array_equal(result.tensors["x"], [5, 6])
    raw = {"0": (10, values.astype(">f4").tobytes())}
    of_zip = make.torch_zip(make.plain({"x": values}, False)[0], raw, extra=[("byteorder", b"big")])
    for data in (make.torch_legacy(make.plain({"x": values}, True)[0], raw, big=True), of_zip):
        with pytest.raises(ValueError, match="was written on a big-endian machine"):
            read(tmp_path, data)


def test_a_safetensors_file_is_read_bitwise(tmp_path):
    expected = dict(sorted(random_tensors().items()))
    (tmp_path / "x").write_bytes(safetensors.numpy.save(expected, {"format": "pt"}))
    result = readers.read(tmp_path / "x")
    assert result.layout == "safetensors" and result.metadata == {"format": "pt"}
    assert_same(dict(sorted(result.tensors.items())), expected)


@pytest.mark.parametrize("old", [True, False])
def test_a_caffe_file_is_read_bitwise(tmp_path, old):
    rng = np.random.default_rng(0)
    kernel, bias = rng.normal(size=(4, 3, 7, 7)), rng.normal(size=4)
    linear = rng.normal(size=(5, 8))
    blobs = {"data": [], "conv1/7x7_s2": [kernel, bias], "loss3/classifier": [linear]}
    blobs = {k: [a.astype(np.float32) for a in v] for k, v in blobs.items()}
    result = read(tmp_path, make.caffe(blobs, old=old))
    assert result.layout == "caffe"
    names = ["conv1/7x7_s2.weight", "conv1/7x7_s2.bias", "loss3/classifier.weight"]
    assert list(result.tensors) == names
    for name, expected in zip(names, [kernel, bias, linear], strict=True):
        np.testing.assert_array_equal(result.tensors[name].ravel(), expected.astype("f4").ravel())
    # Before 2015 a blob always had four axes.
    ones = (1, 1) if old else ()
    assert result.tensors[names[2]].shape == (*ones, 5, 8)


def test_the_floats_of_an_onnx_file_are_read_bitwise(tmp_path):
    x = np.random.default_rng(0).normal(size=(3, 2)).astype(np.float32)
    result = read(tmp_path, make.onnx({"a/b_w_0": x, "shape": np.array([-1, 4])}))
    assert result.layout == "onnx"
    assert_same(result.tensors, {"a/b_w_0": x})
    half = x.astype(np.float16)
    assert_same(read(tmp_path, make.onnx({"h": half}, kind=10)).tensors, {"h": half})
    # Values that are not raw bytes, packed or not.
    floats = np.array([1.5, -2], np.float32)
    single = b"".join(make.varint(4 << 3 | 5) + v.tobytes() for v in floats)
    for values in (make.field(4, floats.tobytes()), single):
        graph = make.field(5, make.field(1, 2) + make.field(8, "x") + make.field(2, 1) + values)
        result = read(tmp_path, make.field(1, 3) + make.field(7, graph))
        assert_same(result.tensors, {"x": floats})
