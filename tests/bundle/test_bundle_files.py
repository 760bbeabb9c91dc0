"""Folders that are no bundle, or one that somebody changed, are refused before anything runs."""

import json
import os
import shutil
import struct
import sys

import forged
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save

from dmljax import main
from dmljax.bundle import BadBundle, files, load, models


@pytest.fixture
def copy(bundle_folder, tmp_path):
    return shutil.copytree(bundle_folder, tmp_path / "a.bundle")


def _refused(folder, message):
    with pytest.raises(BadBundle, match=message) as raised:
        load(folder)
    assert "\n" not in str(raised.value)


def test_every_file_is_confirmed_by_its_digest(copy):
    """One flipped bit in any file, the size unchanged."""
    names = sorted(path.name for path in copy.iterdir() if path.name != "manifest.json")
    assert len(names) == 4
    for name in names:
        data = (copy / name).read_bytes()
        (copy / name).write_bytes(bytes([data[0] ^ 1]) + data[1:])
        _refused(copy, f".*{name} is damaged or changed: its SHA-256 is not the manifest's")
        (copy / name).write_bytes(data)
    assert load(copy).dimension == 4


def test_missing_extra_and_truncated_files(copy, tmp_path):
    (copy / "setup.py").write_text("print(1)")
    _refused(copy, "the folder has another file, setup.py")
    (copy / "setup.py").unlink()
    data = (copy / "params.safetensors").read_bytes()
    (copy / "params.safetensors").write_bytes(data[:-1])
    _refused(copy, "params.safetensors is damaged or changed")
    (copy / "params.safetensors").unlink()
    _refused(copy, "is not complete: params.safetensors is missing")
    (copy / "params.safetensors").symlink_to(tmp_path / "params")
    (tmp_path / "params").write_bytes(data)
    _refused(copy, "params.safetensors is missing, or is a link")
    (copy / "params.safetensors").unlink()
    shutil.move(copy / "manifest.json", tmp_path / "manifest")
    (copy / "manifest.json").symlink_to(tmp_path / "manifest")
    _refused(copy, "is not a bundle: a bundle is a folder with a manifest.json")
    shutil.move(tmp_path / "manifest", copy / "manifest.json")
    os.mkfifo(copy / "params.safetensors")  # reading it would wait for ever
    _refused(copy, "is not complete: params.safetensors is missing")


RATE = {"cosine": 0.5}
OUTPUT = {"dimension": 4, "unit": True, "similarity": "cosine", "precision": "float32"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"format": 2}, "format must be 1, got 2"),
        ({"files": {"README.md": "0"}}, "files.README.md must be 64 hexadecimal digits, got '0'"),
        ({"files": {}}, "the folder has another file, README.md"),
        ({"files": {"../a": "0" * 64}}, "a name in files must be one of"),
        ({"model": "f" * 64}, "the model digest of .* does not belong to its files"),
        ({"batch_sizes": []}, r"batch_sizes must be a list of one size or more, got \[\]"),
        ({"batch_sizes": [10**9]}, r"batch_sizes\[0\] must be a number from 1 to 65536"),
        ({"prefixes": [2, 1]}, r"prefixes must be in ascending order, got \[2, 1\]"),
        ({"output": OUTPUT | {"dimension": 5}}, "has another dimension than 5"),
        ({"thresholds": {"fmr=1e-2": {"cosine": 2}}}, "fmr=1e-2.cosine must be a number from -1"),
        ({"thresholds": {"constructor": RATE}}, "a name in thresholds must be a rate such as"),
    ],
)
def test_a_wrong_manifest(copy, fields, message):
    forged.change_manifest(copy, **fields)
    _refused(copy, message)


def test_no_flipped_bit_of_the_manifest_is_accepted(copy):
    """Of the fields that are read: thresholds, batch sizes, ... have no other digest."""
    forged.change_manifest(copy, thresholds={"fmr=1e-2": {"cosine": 0.875}})
    content = (copy / "manifest.json").read_bytes()
    assert files.read_manifest(copy).thresholds["fmr=1e-2"].cosine == 0.875
    rng, at = np.random.default_rng(0), content.index(b"0.875")
    for position in [*range(at, at + 5), *rng.integers(len(content), size=200)]:
        changed = bytearray(content)
        changed[position] ^= 1 << int(rng.integers(3))
        (copy / "manifest.json").write_bytes(changed)
        with pytest.raises(BadBundle):
            files.read_manifest(copy)


def test_bundle_check_prints_one_identity(copy, capsys):
    main.main(["bundle", "check", str(copy)])
    identity = json.loads((copy / "manifest.json").read_text())["identity"]
    assert f"identity {identity}\n" in capsys.readouterr().out


def test_bundle_check_skips_onnx_where_onnxruntime_is_missing(copy, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    forged.replace(copy, files.ONNX, b"")
    assert main.main(["bundle", "check", str(copy)]) == 0
    printed = capsys.readouterr().out
    assert "stablehlo: the stored embeddings differ by" in printed and "identity" in printed
    assert "onnx: only its digest was checked" in printed and "'dmljax[onnx]'" in printed
    (copy / files.ONNX).write_bytes(b"x")
    with pytest.raises(BadBundle, match=r"embed\.onnx"):
        main.main(["bundle", "check", str(copy)])


@pytest.mark.parametrize(
    "text", ["", "[]", '{"format": NaN}', "[" * 100_000, '{"format": 1}', "\xff"]
)
def test_a_manifest_that_is_no_json_object(copy, text):
    (copy / "manifest.json").write_text(text)
    _refused(copy, "manifest.json")


def test_folders_that_are_no_bundle(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"the bundle .* does not exist"):
        load(tmp_path / "missing")
    (tmp_path / "a.zip").write_bytes(b"PK")
    for place in (tmp_path, tmp_path / "a.zip"):
        _refused(place, "is not a bundle: a bundle is a folder with a manifest.json")


def test_other_platforms(copy):
    """The program says for which platform it is; the manifest's words are not trusted."""
    program = models.stablehlo(models.open_model(copy), platforms=("tpu",))
    forged.replace(copy, "embed.jaxexport", bytes(program.serialize()))
    _refused(copy, "is for tpu, and JAX runs on cpu\\. Export the run again")


def test_a_program_that_is_no_program(copy):
    data = (copy / "embed.jaxexport").read_bytes()
    for damaged in (b"", b"x" * 100, data[:100]):
        forged.replace(copy, "embed.jaxexport", damaged)
        _refused(copy, "the program of .* cannot be read .*made by jax .* Export the run again")


def _own_shape(target):
    return lambda x: jax.ffi.ffi_call(target, jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


FORGED = {
    "lapack_sgetrf_ffi": forged.lapack_program,
    # The second one has the name of the call that an export makes, with a result.
    "a_function_of_a_stranger": lambda bundle: forged.changed_program(
        bundle, _own_shape("a_function_of_a_stranger"), "a_function_of_a_stranger"
    ),
    "shape_assertion": lambda bundle: forged.changed_program(
        bundle, _own_shape("shape_assertion"), "shape_assertion"
    ),
}


@pytest.mark.parametrize("target", FORGED)
def test_a_program_may_not_call_functions_by_name(copy, bundle_folder, target):
    """XLA would look for them in this process. `load` and `bundle check` never run the program."""
    forged.replace(copy, "embed.jaxexport", FORGED[target](bundle_folder))
    message = f"calls '{target}'.* it could run any code"
    _refused(copy, message)
    with pytest.raises(BadBundle, match=message):
        main.main(["bundle", "check", str(copy)])


def test_an_honest_program_has_one_custom_call(bundle_folder):
    """Otherwise the test above would also pass if no program were accepted."""
    data = files.read(bundle_folder, files.read_manifest(bundle_folder), files.PROGRAM)
    text = jax.export.deserialize(bytearray(data)).mlir_module()
    assert text.count("custom_call") == text.count("custom_call @shape_assertion(") == 1
    assert load(bundle_folder).dimension == 4


def test_another_version_of_jax_must_compute_the_stored_examples(copy):
    """As JAX's promise is about time, and the version here may be any."""

    program = json.loads((copy / "manifest.json").read_text())["program"]
    forged.change_manifest(copy, program=program | {"jax": "0.9.0"})
    assert load(copy).dimension == 4
    golden = load_file(copy / "golden.safetensors")
    golden["embeddings"] = np.roll(golden["embeddings"], 1, axis=1)
    forged.replace(copy, "golden.safetensors", save(golden))
    _refused(copy, "gives other embeddings than at the export: .* Export the run again")


def test_other_pixels_than_at_the_export(copy):
    golden = load_file(copy / "golden.safetensors")
    golden["inputs"] = golden["inputs"] ^ 1
    forged.replace(copy, "golden.safetensors", save(golden))
    with pytest.raises(
        BadBundle, match=r"gives other pixels than at the export: .* versions of Pillow"
    ):
        load(copy).check()


def test_parameters_that_do_not_fit_the_program(copy):
    """Also where all digests were made to agree."""
    tensors = load_file(copy / "params.safetensors")
    first = min(tensors)
    for change in (
        {"other": tensors[first]},
        {first: tensors[first].astype(np.float16)},
        {first: np.full_like(tensors[first], np.nan)},
    ):
        forged.replace(copy, "params.safetensors", save(tensors | change))
        _refused(copy, "does not fit its parameters, or they contain NaN")


def test_damaged_safetensors(copy):
    def header(entries):
        text = json.dumps(entries).encode()
        return struct.pack("<Q", len(text)) + text

    one = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    damaged = {
        "header too large": struct.pack("<Q", 200 << 20) + b"{}",
        "header beyond the file": struct.pack("<Q", 1000) + b"{}",
        "overlap": header({"a": one, "b": one}) + b"\0" * 4,
        "outside": header({"a": one | {"data_offsets": [0, 400]}}) + b"\0" * 4,
        "no header": b"",
    }
    for data in damaged.values():
        forged.replace(copy, "params.safetensors", data)
        _refused(copy, "params.safetensors of .* is damaged")
    forged.replace(copy, "params.safetensors", header({"a": one | {"dtype": "C64"}}) + b"\0" * 4)
    _refused(copy, "params.safetensors of .* is damaged")
