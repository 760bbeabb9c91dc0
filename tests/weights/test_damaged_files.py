"""Files that are wrong, cut or damaged are refused in one line, and crash nothing."""

import io
import pickle
import struct
import zipfile

import numpy as np
import pytest
import safetensors.numpy
import weight_files as make
from weight_files import read

from dmljax.weights import readers


def npz_file():
    file = io.BytesIO()
    np.savez(file, a=np.zeros(2))
    return file.getvalue()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (b"<!DOCTYPE html><html><title>404</title></html>", "is a web page"),
        (b"\n\n <html>not found", "is a web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:12\n", "pointer of Git LFS"),
        (b"\x89HDF\r\n\x1a\n" + b"\0" * 99, "HDF5"),
        (b'{"error": "not found"}', "not a known file of weights"),
        (np.random.default_rng(0).bytes(3000), "not a known file of weights"),
        (npz_file(), "zip archive without PyTorch's data.pkl"),
        (pickle.dumps({"a": [1]}, 2), "pickle of a dict, not written by torch.save"),
        (make.torch_zip(pickle.dumps([1, 2], 2), {}), "holds a list, not a state dict"),
        (make.torch_zip(pickle.dumps({"a": 5}, 2), {}), "not a state dict: 'a' is a int"),
        (make.torch_zip(pickle.dumps({}, 2), {}), "holds no tensors"),
        (make.torch_zip(b"", {}, extra=[("code/net.py", b"")]), "TorchScript"),
        (make.torch_zip(b"\x80\x02}.", {}, method=zipfile.ZIP_DEFLATED), "compressed zip"),
        (make.field(2, make.field(1, b"")), "Caffe model of 2013"),
        (make.onnx({"x": np.zeros(2, np.int8)}, kind=3), "x in ONNX type 3"),
        (make.onnx({"x": np.zeros(2, np.float32)}, kind=11), "1 values for the shape"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_file_that_is_no_file_of_weights_is_refused_in_one_line(tmp_path, data, message):
    with pytest.raises(ValueError, match=message) as error:
        read(tmp_path, data)
    assert "\n" not in str(error.value) and str(tmp_path / "file.pth") in str(error.value)


def test_a_folder_and_a_missing_file_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="is a folder"):
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
def test_a_cut_file_is_refused(tmp_path, kind):
    data = files_of_all_formats()[kind]
    expected = read(tmp_path, data).tensors
    for length in range(1, len(data)):
        if kind == "caffe":
            # A file cut at the end of a layer is valid, and lacks the layers after it.
            try:
                result = read(tmp_path, data[:length]).tensors
            except ValueError:
                continue
            assert len(result) < len(expected)
        else:
            with pytest.raises(ValueError, match=r"cut short|not a known file|no tensors"):
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


def test_bytes_after_the_end_are_refused(tmp_path):
    data = make.torch_file({"x": np.zeros(3, np.float32)}, legacy=True)
    with pytest.raises(ValueError, match="8 bytes follow"):
        read(tmp_path, data + struct.pack("<q", 0))


def test_members_of_a_zip_that_overlap_are_refused(tmp_path):
    """Each entry of the directory is another name for the same 64 kB."""
    entries = {"x": np.zeros(1 << 14, np.float32)}
    data = make.torch_file(entries, legacy=False)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        stored = archive.getinfo("archive/data/0")
        start = archive.start_dir
    local = data[stored.header_offset : start]
    pickled, raw = make.plain({f"x{i}": entries["x"] for i in range(50)}, legacy=False)
    whole = make.torch_zip(pickled, {key: (0, b"") for key in raw})
    with zipfile.ZipFile(io.BytesIO(whole)) as archive:
        at, count = archive.start_dir, len(archive.namelist())
    directory = whole[at : whole.rindex(b"PK\5\6")]
    # The entries of the empty members get the sizes, the sum and the place of the stored one.
    changed, place = b"", 0
    while place < len(directory):
        fields = list(struct.unpack("<4s6H3L5H2L", directory[place : place + 46]))
        size = 46 + fields[10] + fields[11] + fields[12]
        name = directory[place + 46 : place + size]
        if b"/data/" in name:
            fields[7:10], fields[16] = [stored.CRC, stored.file_size, stored.file_size], at
        changed += struct.pack("<4s6H3L5H2L", *fields) + name
        place += size
    body = whole[:at] + local
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, count, count, len(changed), len(body), 0)
    bomb = body + changed + end
    assert len(bomb) < 90_000  # and 50 members of 65,536 bytes
    with pytest.raises(ValueError, match="members overlap, which PyTorch does not write"):
        read(tmp_path, bomb)
