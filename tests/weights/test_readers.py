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

from dmljax.weights import readers as formats


def _some(seed=0):
    rng = np.random.default_rng(seed)
    found = {}
    for i, kind in enumerate(["f4", "f2", "f8", "i8", "i4", "i2", "i1", "u1", "?"]):
        shape = tuple(rng.integers(1, 4, rng.integers(0, 5)))
        found[f"layer{i}.0.weight"] = np.asarray(rng.normal(0, 50, shape)).astype(kind)
    found["wide.bias"] = rng.normal(size=7).astype(ml_dtypes.bfloat16)
    found["none"] = np.zeros((0, 3), np.float32)
    return found


def _same(found, wanted):
    assert list(found) == list(wanted)
    for name, array in wanted.items():
        assert found[name].dtype == array.dtype and found[name].shape == array.shape, name
        assert found[name].tobytes() == array.tobytes(), name


def _read(tmp_path, data, name="file.pth"):
    (tmp_path / name).write_bytes(data)
    return formats.read(tmp_path / name)


# --- what is read -------------------------------------------------------------------------------


@pytest.mark.parametrize("legacy", [True, False])
def test_torch_files_written_by_hand(tmp_path, legacy):
    for seed in range(5):
        wanted = _some(seed)
        found = _read(tmp_path, make.torch_file(wanted, legacy=legacy))
        assert found.layout == "torch" and found.metadata == {}
        _same(found.tensors, wanted)


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
        found = formats.read(path).tensors
        assert list(found) == list(tree)
        for name, value in tree.items():
            bits = value.detach().contiguous()
            if value.dtype == torch.bfloat16:
                bits = bits.view(torch.int16)
                assert found[name].dtype == ml_dtypes.bfloat16
            else:
                assert found[name].dtype == bits.numpy().dtype
            assert found[name].shape == tuple(value.shape)
            assert found[name].tobytes() == bits.numpy().tobytes(), name


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
        found = formats.read(path).tensors
        _same(found, {name: value.numpy() for name, value in net.state_dict().items()})


def test_views_and_byte_order_of_the_legacy_format(tmp_path):
    values = np.arange(10, dtype=np.float32)
    view = b"(" + make.text("part") + make.number(4) + make.number(3) + b"t"
    stored = make.storage("Float", "7", 10, view)
    pickled = make.state_dict({"x": make.tensor(stored, 1, (2,), (1,))})
    found = _read(tmp_path, make.torch_legacy(pickled, {"7": (10, values.tobytes())}))
    np.testing.assert_array_equal(found.tensors["x"], [5, 6])
    pickled, _ = make.plain({"x": values}, legacy=True)
    raw = {"0": (10, values.astype(">f4").tobytes())}
    found = _read(tmp_path, make.torch_legacy(pickled, raw, big=True))
    np.testing.assert_array_equal(found.tensors["x"], values)
    pickled, _ = make.plain({"x": values}, legacy=False)
    data = make.torch_zip(pickled, raw, extra=[("byteorder", b"big")])
    np.testing.assert_array_equal(_read(tmp_path, data).tensors["x"], values)


def test_safetensors(tmp_path):
    wanted = dict(sorted(_some().items()))
    (tmp_path / "x").write_bytes(safetensors.numpy.save(wanted, {"format": "pt"}))
    found = formats.read(tmp_path / "x")
    assert found.layout == "safetensors" and found.metadata == {"format": "pt"}
    _same(dict(sorted(found.tensors.items())), wanted)


def test_what_is_written_is_read_and_always_the_same_bytes(tmp_path):
    wanted = dict(sorted((_some() | {"turned": np.arange(6.0).reshape(2, 3).T}).items()))
    written = []
    for name in ("a", "b"):
        formats.write(tmp_path / name, wanted, '{"net": "x"}')
        written.append((tmp_path / name).read_bytes())
    assert written[0] == written[1]
    found = formats.read(tmp_path / "a")
    assert found.metadata == {"dmljax": '{"net": "x"}'}
    _same(dict(sorted(found.tensors.items())), wanted | {"turned": wanted["turned"].copy("C")})


def test_a_failed_write_leaves_what_was_there(tmp_path, monkeypatch):
    formats.write(tmp_path / "x", {"a": np.zeros(2)}, "old")
    before = (tmp_path / "x").read_bytes()

    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(formats.os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        formats.write(tmp_path / "x", {"a": np.ones(2)}, "new")
    assert [p.name for p in tmp_path.iterdir()] == ["x"]
    assert (tmp_path / "x").read_bytes() == before


@pytest.mark.parametrize("old", [True, False])
def test_caffe(tmp_path, old):
    rng = np.random.default_rng(0)
    kernel, bias = rng.normal(size=(4, 3, 7, 7)), rng.normal(size=4)
    linear = rng.normal(size=(5, 8))
    blobs = {"data": [], "conv1/7x7_s2": [kernel, bias], "loss3/classifier": [linear]}
    blobs = {k: [a.astype(np.float32) for a in v] for k, v in blobs.items()}
    found = _read(tmp_path, make.caffe(blobs, old=old))
    assert found.layout == "caffe"
    names = ["conv1/7x7_s2.weight", "conv1/7x7_s2.bias", "loss3/classifier.weight"]
    assert list(found.tensors) == names
    for name, wanted in zip(names, [kernel, bias, linear], strict=True):
        np.testing.assert_array_equal(found.tensors[name].ravel(), wanted.astype("f4").ravel())
    # Before 2015 a blob always had four axes.
    ones = (1, 1) if old else ()
    assert found.tensors[names[2]].shape == (*ones, 5, 8)


def test_onnx(tmp_path):
    x = np.random.default_rng(0).normal(size=(3, 2)).astype(np.float32)
    found = _read(tmp_path, make.onnx({"a/b_w_0": x, "shape": np.array([-1, 4])}))
    assert found.layout == "onnx"
    _same(found.tensors, {"a/b_w_0": x, "shape": np.array([-1, 4])})
    half = x.astype(np.float16)
    _same(_read(tmp_path, make.onnx({"h": half}, kind=10)).tensors, {"h": half})


def test_onnx_values_that_are_not_raw_bytes(tmp_path):
    head = make.field(1, 2) + make.field(8, "x")
    floats = np.array([1.5, -2], np.float32)
    single = b"".join(make.varint(4 << 3 | 5) + v.tobytes() for v in floats)  # not packed
    bits = b"".join(make.varint(int(v)) for v in np.array([1.5, -2], np.float16).view(np.uint16))
    ints = make.field(7, 5) + make.field(7, -6)
    for kind, values, wanted in (
        (1, make.field(4, floats.tobytes()), floats),
        (1, single, floats),
        (10, make.field(5, bits), floats.astype(np.float16)),
        (7, ints, np.array([5, -6])),
    ):
        graph = make.field(5, head + make.field(2, kind) + values)
        found = _read(tmp_path, make.field(1, 3) + make.field(7, graph))
        _same(found.tensors, {"x": wanted})


# --- nothing is run -----------------------------------------------------------------------------


class _Payload:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def _payloads(marker):
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
    for name, payload in _payloads(marker).items():
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
        wanted = name.split()[0].replace("builtins", "(builtins|__builtin__)")
        with pytest.raises(ValueError, match=f"refers to {wanted}. Nothing was run"):
            _read(tmp_path, data)
        assert not marker.exists()


@pytest.mark.parametrize(
    ("pickled", "said"),
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
def test_other_ways_to_run_code(tmp_path, pickled, said):
    marker = tmp_path / "ran"
    pickled = pickled.replace(b"%s", str(marker).encode())
    with pytest.raises(ValueError, match=said):
        _read(tmp_path, make.torch_zip(pickled, {}))
    assert not marker.exists()


def test_views_beyond_their_storage_are_refused(tmp_path):
    raw = {"0": (4, np.arange(4, dtype=np.float32).tobytes())}
    for offset, size, stride in ((0, (5,), (1,)), (2, (2, 2), (1, 2)), (-1, (1,), (1,))):
        stored = make.storage("Float", "0", 4)
        pickled = make.state_dict({"x": make.tensor(stored, offset, size, stride)})
        with pytest.raises(ValueError, match="damaged or cut short"):
            _read(tmp_path, make.torch_zip(pickled, raw))
    # A storage that claims more than the file has.
    pickled = make.state_dict({"x": make.tensor(make.storage("Float", "0", 9), 0, (9,), (1,))})
    with pytest.raises(ValueError, match="storage 0 has 4 values, not 9"):
        _read(tmp_path, make.torch_zip(pickled, raw))


# --- bad files ----------------------------------------------------------------------------------


def _npz():
    file = io.BytesIO()
    np.savez(file, a=np.zeros(2))
    return file.getvalue()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "is empty"),
        (b"<!DOCTYPE html><html><title>404</title></html>", "is a web page"),
        (b"\n\n <html>not found", "is a web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:12\n", "pointer of Git LFS"),
        (b"\x89HDF\r\n\x1a\n" + b"\0" * 99, "HDF5"),
        (b'{"error": "not found"}', "no file of weights that is known"),
        (np.random.default_rng(0).bytes(3000), "no file of weights that is known"),
        (_npz(), "zip archive without PyTorch's data.pkl"),
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
def test_wrong_files(tmp_path, data, said):
    with pytest.raises(ValueError, match=said) as error:
        _read(tmp_path, data)
    assert "\n" not in str(error.value) and str(tmp_path / "file.pth") in str(error.value)


def test_wrong_paths(tmp_path):
    with pytest.raises(IsADirectoryError, match="is a folder"):
        formats.read(tmp_path)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        formats.read(tmp_path / "none.pth")


def _each_format():
    x = np.linspace(0, 1, 30, dtype=np.float32).reshape(5, 6)
    tensors = {"conv1.weight": x, "bn1.running_mean": x[0].copy()}
    return {
        "zip": make.torch_file(tensors, legacy=False),
        "legacy": make.torch_file(tensors, legacy=True),
        "safetensors": safetensors.numpy.save(tensors),
        "caffe": make.caffe({"a": [x, x[0]], "b": [x]}, old=True),
        "onnx": make.onnx(tensors),
    }


@pytest.mark.parametrize("kind", _each_format())
def test_cut_files(tmp_path, kind):
    data = _each_format()[kind]
    wanted = _read(tmp_path, data).tensors
    for length in range(1, len(data)):
        if kind == "caffe":
            # The end of a layer may be the end of a file: then the later ones are missing.
            try:
                found = _read(tmp_path, data[:length]).tensors
            except ValueError:
                continue
            assert len(found) < len(wanted)
        else:
            with pytest.raises(ValueError, match=r"cut short|no file of weights|no tensors"):
                _read(tmp_path, data[:length])


@pytest.mark.parametrize("kind", _each_format())
@pytest.mark.parametrize("flips", [100, pytest.param(2000, marks=pytest.mark.slow)])
def test_flipped_bits_crash_nothing(tmp_path, kind, flips):
    data = _each_format()[kind]
    rng = np.random.default_rng(flips)
    for _ in range(flips):
        bad = bytearray(data)
        bad[rng.integers(len(data))] ^= 1 << int(rng.integers(8))
        try:
            found = _read(tmp_path, bytes(bad)).tensors
        except ValueError as error:
            assert str(tmp_path / "file.pth") in str(error) and "\n" not in str(error)
        else:
            assert all(array.size < 1 << 20 for array in found.values())


def test_flipped_bits_of_values_are_found_in_a_zip(tmp_path):
    values = np.full(64, 1.25, np.float32)
    data = make.torch_file({"x": values}, legacy=False)
    at = data.index(values.tobytes()) + 40
    bad = data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]
    with pytest.raises(ValueError, match=r"damaged or cut short .*CRC"):
        _read(tmp_path, bad)


def test_bytes_after_the_end(tmp_path):
    data = make.torch_file({"x": np.zeros(3, np.float32)}, legacy=True)
    with pytest.raises(ValueError, match="8 bytes follow"):
        _read(tmp_path, data + struct.pack("<q", 0))
