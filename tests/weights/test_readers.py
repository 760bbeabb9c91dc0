"""Every format is read bit for bit, nothing of a file is run, and damage gets one clear line."""

import io
import pickle
import struct
import zipfile

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import weight_files as make

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


def read(tmp_path, data, name="file.pth"):
    (tmp_path / name).write_bytes(data)
    return readers.read(tmp_path / name)


# --- what is read -------------------------------------------------------------------------------


@pytest.mark.parametrize("legacy", [True, False])
def test_torch_files_written_by_hand(tmp_path, legacy):
    for seed in range(5):
        expected = random_tensors(seed)
        result = read(tmp_path, make.torch_file(expected, legacy=legacy))
        assert result.layout == "torch" and result.metadata == {}
        assert_same(result.tensors, expected)


@pytest.mark.parametrize("legacy", [True, False])
def test_torch_files_written_by_torch(tmp_path, legacy):
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
def test_state_dicts_of_modules_and_of_trainings(tmp_path, legacy):
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


def test_views_and_byte_order_of_the_legacy_format(tmp_path):
    values = np.arange(10, dtype=np.float32)
    view = b"(" + make.text("part") + make.number(4) + make.number(3) + b"t"
    stored = make.storage("Float", "7", 10, view)
    pickled = make.state_dict({"x": make.tensor(stored, 1, (2,), (1,))})
    result = read(tmp_path, make.torch_legacy(pickled, {"7": (10, values.tobytes())}))
    np.testing.assert_array_equal(result.tensors["x"], [5, 6])
    pickled, _ = make.plain({"x": values}, legacy=True)
    raw = {"0": (10, values.astype(">f4").tobytes())}
    result = read(tmp_path, make.torch_legacy(pickled, raw, big=True))
    np.testing.assert_array_equal(result.tensors["x"], values)
    pickled, _ = make.plain({"x": values}, legacy=False)
    data = make.torch_zip(pickled, raw, extra=[("byteorder", b"big")])
    np.testing.assert_array_equal(read(tmp_path, data).tensors["x"], values)


def test_safetensors(tmp_path):
    expected = dict(sorted(random_tensors().items()))
    (tmp_path / "x").write_bytes(safetensors.numpy.save(expected, {"format": "pt"}))
    result = readers.read(tmp_path / "x")
    assert result.layout == "safetensors" and result.metadata == {"format": "pt"}
    assert_same(dict(sorted(result.tensors.items())), expected)


@pytest.mark.parametrize("old", [True, False])
def test_caffe(tmp_path, old):
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


def test_onnx(tmp_path):
    x = np.random.default_rng(0).normal(size=(3, 2)).astype(np.float32)
    result = read(tmp_path, make.onnx({"a/b_w_0": x, "shape": np.array([-1, 4])}))
    assert result.layout == "onnx"
    assert_same(result.tensors, {"a/b_w_0": x, "shape": np.array([-1, 4])})
    half = x.astype(np.float16)
    assert_same(read(tmp_path, make.onnx({"h": half}, kind=10)).tensors, {"h": half})


def test_onnx_values_that_are_not_raw_bytes(tmp_path):
    head = make.field(1, 2) + make.field(8, "x")
    floats = np.array([1.5, -2], np.float32)
    single = b"".join(make.varint(4 << 3 | 5) + v.tobytes() for v in floats)  # not packed
    bits = b"".join(make.varint(int(v)) for v in np.array([1.5, -2], np.float16).view(np.uint16))
    ints = make.field(7, 5) + make.field(7, -6)
    for kind, values, expected in (
        (1, make.field(4, floats.tobytes()), floats),
        (1, single, floats),
        (10, make.field(5, bits), floats.astype(np.float16)),
        (7, ints, np.array([5, -6])),
    ):
        graph = make.field(5, head + make.field(2, kind) + values)
        result = read(tmp_path, make.field(1, 3) + make.field(7, graph))
        assert_same(result.tensors, {"x": expected})


# --- nothing is run -----------------------------------------------------------------------------


class _Payload:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def malicious_objects(marker):
    import os

    code = f"open({str(marker)!r}, 'w').close()"
    inner = {"deep": [({"x": _Payload(eval, code)},)]}
    return {
        "posix.system": _Payload(os.system, f"touch {marker}"),
        "builtins.eval": _Payload(eval, code),
        "builtins.exec": {"state_dict": {"a": _Payload(exec, code)}},
        "builtins.eval nested": {"a": 1, "b": inner},
        "builtins.getattr": _Payload(getattr, os, "system"),
    }


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("container", ["zip", "legacy", "first"])
def test_a_pickle_that_runs_code_is_refused_by_name(tmp_path, protocol, container):
    marker = tmp_path / "ran"
    for name, payload in malicious_objects(marker).items():
        if name == "builtins.getattr":
            pickled = pickle.dumps(getattr, protocol)
        else:
            pickled = pickle.dumps(payload, protocol)
            pickle.loads(pickled)
            assert marker.exists()  # it is a real one
            marker.unlink()
        if container == "zip":
            data = make.torch_zip(pickled, {})
        else:
            data = make.torch_legacy(pickled, {}) if container == "legacy" else pickled
        expected = name.split()[0].replace("builtins", "(builtins|__builtin__)")
        with pytest.raises(ValueError, match=f"refers to {expected}. Nothing was run"):
            read(tmp_path, data)
        assert not marker.exists()


@pytest.mark.parametrize(
    ("pickled", "message"),
    [
        (b"(S'touch %s'\nios\nsystem\n.", "INST os system"),
        (b"(cos\nsystem\nS'touch %s'\no.", "refers to os.system"),
        (b"\x80\x02\x82\x01.", "EXT1"),
        (b"\x80\x02ctorch\nSize\n)\x81.", "NEWOBJ"),
        (b"\x80\x02ctorch.storage\n_load_from_bytes\n.", "torch.storage._load_from_bytes"),
        (b"\x80\x02ctorch\nFloatStorage\n)R.", "torch.FloatStorage is called"),
        (b"\x80\x02ccollections\nOrderedDict\n}b.", "in place of a dict"),
        (b"\x80\x02]K\x01b.", "in place of a dict"),
        (b"\x80\x02K\x01)R.", "in place of a _Global"),
    ],
)
def test_other_ways_to_run_code(tmp_path, pickled, message):
    marker = tmp_path / "ran"
    pickled = pickled.replace(b"%s", str(marker).encode())
    with pytest.raises(ValueError, match=message):
        read(tmp_path, make.torch_zip(pickled, {}))
    assert not marker.exists()


def test_views_beyond_their_storage_are_refused(tmp_path):
    raw = {"0": (4, np.arange(4, dtype=np.float32).tobytes())}
    for offset, size, stride in ((0, (5,), (1,)), (2, (2, 2), (1, 2)), (-1, (1,), (1,))):
        stored = make.storage("Float", "0", 4)
        pickled = make.state_dict({"x": make.tensor(stored, offset, size, stride)})
        with pytest.raises(ValueError, match="damaged or cut short"):
            read(tmp_path, make.torch_zip(pickled, raw))
    # A storage that claims more than the file has.
    pickled = make.state_dict({"x": make.tensor(make.storage("Float", "0", 9), 0, (9,), (1,))})
    with pytest.raises(ValueError, match="storage 0 has 4 values, not 9"):
        read(tmp_path, make.torch_zip(pickled, raw))


# --- bad files ----------------------------------------------------------------------------------


def npz_file():
    file = io.BytesIO()
    np.savez(file, a=np.zeros(2))
    return file.getvalue()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (b"<!DOCTYPE html><html><title>404</title></html>", "is a web page"),
        (b"\n\n <html>not result", "is a web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:12\n", "pointer of Git LFS"),
        (b"\x89HDF\r\n\x1a\n" + b"\0" * 99, "HDF5"),
        (b'{"error": "not result"}', "no file of weights that is known"),
        (np.random.default_rng(0).bytes(3000), "no file of weights that is known"),
        (npz_file(), "zip archive without PyTorch's data.pkl"),
        (pickle.dumps({"a": [1]}, 2), "pickle of a dict, not written by torch.save"),
        (make.torch_zip(pickle.dumps([1, 2], 2), {}), "holds a list, not a state dict"),
        (make.torch_zip(pickle.dumps({"a": 5}, 2), {}), "no state dict: 'a' is a int"),
        (make.torch_zip(pickle.dumps({}, 2), {}), "holds no tensors"),
        (make.torch_zip(b"", {}, extra=[("code/net.py", b"")]), "TorchScript"),
        (make.torch_zip(b"\x80\x02}.", {}, method=zipfile.ZIP_DEFLATED), "compressed zip"),
        (make.field(2, make.field(1, b"")), "Caffe model of 2013"),
        (make.onnx({"x": np.zeros(2, np.int8)}, kind=3), "x in ONNX type 3"),
        (make.onnx({"x": np.zeros(2, np.float32)}, kind=11), "1 values for the shape"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_files(tmp_path, data, message):
    with pytest.raises(ValueError, match=message) as error:
        read(tmp_path, data)
    assert "\n" not in str(error.value) and str(tmp_path / "file.pth") in str(error.value)


def test_wrong_paths(tmp_path):
    with pytest.raises(IsADirectoryError, match="is a folder"):
        readers.read(tmp_path)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        readers.read(tmp_path / "none.pth")


def files_of_all_formats():
    x = np.linspace(0, 1, 30, dtype=np.float32).reshape(5, 6)
    tensors = {"conv1.weight": x, "bn1.running_mean": x[0].copy()}
    return {
        "zip": make.torch_file(tensors, legacy=False),
        "legacy": make.torch_file(tensors, legacy=True),
        "safetensors": safetensors.numpy.save(tensors),
        "caffe": make.caffe({"a": [x, x[0]], "b": [x]}, old=True),
        "onnx": make.onnx(tensors),
    }


@pytest.mark.parametrize("kind", files_of_all_formats())
def test_cut_files(tmp_path, kind):
    data = files_of_all_formats()[kind]
    expected = read(tmp_path, data).tensors
    for length in range(1, len(data)):
        if kind == "caffe":
            # The end of a layer may be the end of a file: then the later ones are missing.
            try:
                result = read(tmp_path, data[:length]).tensors
            except ValueError:
                continue
            assert len(result) < len(expected)
        else:
            with pytest.raises(ValueError, match=r"cut short|no file of weights|no tensors"):
                read(tmp_path, data[:length])


@pytest.mark.parametrize("kind", files_of_all_formats())
@pytest.mark.parametrize("flips", [100, pytest.param(2000, marks=pytest.mark.slow)])
def test_flipped_bits_crash_nothing(tmp_path, kind, flips):
    data = files_of_all_formats()[kind]
    rng = np.random.default_rng(flips)
    for _ in range(flips):
        bad = bytearray(data)
        bad[rng.integers(len(data))] ^= 1 << int(rng.integers(8))
        try:
            result = read(tmp_path, bytes(bad)).tensors
        except ValueError as error:
            assert str(tmp_path / "file.pth") in str(error) and "\n" not in str(error)
        else:
            assert all(array.size < 1 << 20 for array in result.values())


def test_flipped_bits_of_values_are_found_in_a_zip(tmp_path):
    values = np.full(64, 1.25, np.float32)
    data = make.torch_file({"x": values}, legacy=False)
    at = data.index(values.tobytes()) + 40
    bad = data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]
    with pytest.raises(ValueError, match=r"damaged or cut short .*CRC"):
        read(tmp_path, bad)


def test_bytes_after_the_end(tmp_path):
    data = make.torch_file({"x": np.zeros(3, np.float32)}, legacy=True)
    with pytest.raises(ValueError, match="8 bytes follow"):
        read(tmp_path, data + struct.pack("<q", 0))
