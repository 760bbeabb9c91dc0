"""Folders that are no bundle, or one that somebody changed, are refused before anything runs."""

import hashlib
import json
import os
import shutil
import struct
import sys
import zipfile

import forged
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save

from dmljax import main
from dmljax.bundle import BadBundle, admission, files, load, signing

OUTPUT = {"dimension": 4, "unit": True, "similarity": "cosine", "precision": "float32"}


@pytest.fixture
def copy(bundle_folder, tmp_path):
    return shutil.copytree(bundle_folder, tmp_path / "a.bundle")


def _manifest(folder, change_fn=lambda manifest: None):
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    change_fn(manifest)
    path.write_text(json.dumps(files.sealed(manifest)))
    return manifest


def _replace(folder, name, data):
    """Puts other bytes into a file, with a manifest that confirms them."""
    (folder / name).write_bytes(data)
    entry = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    _manifest(folder, lambda manifest: manifest["files"].update({name: entry}))


def _refused(folder, message):
    with pytest.raises(BadBundle, match=message) as raised:
        load(folder)
    assert "\n" not in str(raised.value)


def test_every_file_is_confirmed_by_its_digest(copy):
    """One flipped bit in any file, the size unchanged."""
    names = sorted(path.name for path in copy.iterdir() if path.name != "manifest.json")
    assert len(names) == 8
    for name in names:
        data = (copy / name).read_bytes()
        (copy / name).write_bytes(bytes([data[0] ^ 1]) + data[1:])
        _refused(copy, f"{name} of .* is changed or damaged: the manifest has another")
        (copy / name).write_bytes(data)
    assert load(copy).dimension == 4


def test_missing_extra_and_truncated_files(copy):
    data = (copy / "params.safetensors").read_bytes()
    (copy / "params.safetensors").write_bytes(data[:-1])
    _refused(copy, "params.safetensors of .* is changed: it has")
    (copy / "params.safetensors").unlink()
    _refused(copy, "is not complete: params.safetensors is missing")
    (copy / "params.safetensors").write_bytes(data)
    (copy / "setup.py").write_text("print(1)")
    _refused(copy, "a file that its manifest does not list: 'setup.py'")


def test_links_are_refused(copy, tmp_path):
    for name in ("params.safetensors", "manifest.json"):
        shutil.move(copy / name, tmp_path / name)
        (copy / name).symlink_to(tmp_path / name)
        _refused(copy, f"{name}.* is a link|cannot be read: Too many levels")
        (copy / name).unlink()
        shutil.move(tmp_path / name, copy / name)
    os.mkfifo(copy / "extra")
    _refused(copy, "does not list: 'extra'")


@pytest.mark.parametrize("name", ["../params.safetensors", "/etc/passwd", "a/b", "setup.py", ""])
def test_names_outside_of_the_list_are_refused(copy, name):
    entry = {"bytes": 1, "sha256": "0" * 64}
    _manifest(copy, lambda manifest: manifest["files"].update({name: entry}))
    _refused(copy, "which is no file of a bundle")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"format": 2}, "has the bundle format 2, and this program reads format 1"),
        ({"format": None}, "has the bundle format None"),
        ({"files": []}, "lists no files"),
        ({"files": {"README.md": {"bytes": 1, "sha256": "0"}}}, "README.md needs bytes and sha256"),
        ({"files": {}}, "lists no README.md, config.json"),
        ({"model": "f" * 64}, "the model digest of .* does not belong to its files"),
        ({"model": "f"}, "model is 'f'"),
        ({"batch_sizes": []}, r"batch_sizes is \[\]"),
        ({"batch_sizes": [10**9]}, "batch_sizes is"),
        ({"batch_sizes": [True]}, "batch_sizes is"),
        ({"output": 3}, "output.dimension is None"),
        ({"output": OUTPUT | {"dimension": -1}}, "output.dimension is -1"),
        ({"output": OUTPUT | {"dimension": 10**30}}, "output.dimension is 1000"),
        (
            {"output": OUTPUT | {"dimension": 5}},
            r"gives embeddings of \(4,\) numbers, and .* says 5",
        ),
        ({"thresholds": {"fmr=1e-2": {"cosine": "1"}}}, "thresholds.fmr=1e-2 is"),
        ({"thresholds": {"fmr=1e-2": {"cosine": 2}}}, "thresholds.fmr=1e-2 is"),
        ({"thresholds": {"constructor": {"cosine": 0.5}}}, "thresholds has the name 'constructor'"),
    ],
)
def test_a_wrong_manifest(copy, fields, message):
    _manifest(copy, lambda manifest: manifest.update(fields))
    _refused(copy, message)


def test_no_flipped_bit_of_the_manifest_is_accepted(copy):
    """Of the fields that are read: thresholds, batch sizes, ... have no other digest."""
    _manifest(copy, lambda manifest: manifest.update(thresholds={"fmr=1e-2": {"cosine": 0.875}}))
    content = (copy / "manifest.json").read_bytes()
    expected, rng, refused = json.loads(content), np.random.default_rng(0), 0
    at = content.index(b"0.875")
    for position in [*range(at, at + 5), *rng.integers(len(content), size=400)]:
        changed = bytearray(content)
        changed[position] ^= 1 << int(rng.integers(3))
        (copy / "manifest.json").write_bytes(changed)
        try:
            manifest = files.read_manifest(copy)
        except BadBundle:
            refused += 1
        else:  # the word "identity" itself: the bundle counts as one of before
            assert all(manifest[name] == expected[name] for name in set(expected) - {"identity"})
    assert refused > 380


def test_bundle_check_prints_one_identity_and_knows_older_bundles(copy, capsys):
    main.main(["bundle", "check", str(copy)])
    identity = json.loads((copy / "manifest.json").read_text())["identity"]
    assert f"identity {identity}\n" in capsys.readouterr().out
    manifest = _manifest(copy)
    del manifest["identity"]
    (copy / "manifest.json").write_text(json.dumps(manifest))
    main.main(["bundle", "check", str(copy)])
    assert "identity none: an older bundle" in capsys.readouterr().out


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


def test_a_signature_says_who_wrote_a_bundle(copy, tmp_path, capsys):
    ed25519 = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ed25519")
    from cryptography.hazmat.primitives import serialization as form

    for name in ("mine", "other"):
        key = ed25519.Ed25519PrivateKey.generate()
        private = form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption()
        (tmp_path / f"{name}.pem").write_bytes(key.private_bytes(*private))
        public = form.Encoding.PEM, form.PublicFormat.SubjectPublicKeyInfo
        (tmp_path / f"{name}.pub").write_bytes(key.public_key().public_bytes(*public))
    check = ["bundle", "check", str(copy), f"--signed-by={tmp_path / 'mine.pub'}"]
    with pytest.raises(BadBundle, match="is not signed"):
        main.main(check)
    signing.sign(copy, signing.signer(tmp_path / "mine.pem"))
    main.main(check)
    assert "signed by the owner of" in capsys.readouterr().out
    with pytest.raises(BadBundle, match=r"was not signed by the owner of .*other.pub"):
        main.main([*check[:3], f"--signed-by={tmp_path / 'other.pub'}"])
    _manifest(copy, lambda manifest: manifest.update(thresholds={"fmr=1e-2": {"cosine": 0.5}}))
    with pytest.raises(BadBundle, match="or changed since"):
        main.main(check)
    with pytest.raises(ValueError, match=r"mine.pub is no private key in PEM"):
        signing.signer(tmp_path / "mine.pub")


def test_signatures_without_the_package_are_refused_in_one_line(copy, monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography", None)
    words = ["export", "runs/x", "--out=y.bundle", "--sign=key.pem"]
    for command in (words, ["bundle", "check", str(copy), "--signed-by=key.pub"]):
        with pytest.raises(ImportError, match=r"^signatures need cryptography: pip install \S+$"):
            main.main(command)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"format": NaN}', "[" * 100_000, '{"format": 1}', "\xff"]
)
def test_a_manifest_that_is_no_json_object(copy, text):
    (copy / "manifest.json").write_text(text)
    _refused(copy, "manifest.json")


def test_a_manifest_may_not_be_huge(copy):
    with (copy / "manifest.json").open("ab") as file:
        file.truncate(10 << 20)
    _refused(copy, "has 10,485,760 bytes: the limit is")


def test_folders_that_are_no_bundle(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no bundle"):
        load(tmp_path / "missing")
    _refused(tmp_path, "it has no manifest.json")
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("../manifest.json", "{}")
    _refused(tmp_path / "a.zip", "a bundle is a folder, unpack it first")


def test_other_platforms_and_versions(copy, bundle_folder):
    """The program says for which platform it is; the manifest's words are not trusted."""
    from dmljax.bundle import programs

    manifest = files.read_manifest(bundle_folder)
    model = programs.open_model(bundle_folder, manifest)
    program = programs.stablehlo(model, platforms=("tpu",)).serialize()
    _replace(copy, "embed.jaxexport", bytes(program))
    _refused(copy, "is for tpu, and JAX runs on cpu\\. .* dmljax bundle rebuild")

    def newer(manifest):
        manifest["program"] |= {"calling_convention": 99, "jax": "9.9.9"}

    _manifest(copy, newer)
    _refused(copy, f"made by jax 9.9.9, and this is jax {jax.__version__}.*dmljax bundle rebuild")


def test_a_program_that_is_no_program(copy):
    data = (copy / "embed.jaxexport").read_bytes()
    for damaged in (b"", b"x" * 100, data[:100]):
        _replace(copy, "embed.jaxexport", damaged)
        _refused(copy, "the program of .* cannot be read .*made by jax")


def test_a_program_without_a_main_function_is_refused_in_one_line(copy):
    """It can be read, and fails where it is lowered."""
    data = (copy / "embed.jaxexport").read_bytes()
    assert b"main" in data
    _replace(copy, "embed.jaxexport", data.replace(b"main", b"nain"))
    _refused(copy, "the program of .* cannot be read .*made by jax .*KeyError: .*main")


def test_a_program_that_crashes_its_reader_is_refused_in_one_line(copy, monkeypatch):
    """One byte is changed. This jaxlib reads beyond the end of a table: a segmentation fault."""
    data = (copy / "embed.jaxexport").read_bytes()
    table = b"\x05!\x05\x1f)\x03\x05#)\t\x00"
    if data.count(table) != 1:
        pytest.skip("another version of JAX writes other bytes")
    _replace(copy, "embed.jaxexport", data.replace(table, table.replace(b"#", b"K")))
    _refused(copy, r"the program of .* cannot be read .*its process crashed \(SIG")
    monkeypatch.setattr(admission, "run_module", None)
    _refused(copy, "crashed")  # it is not tried twice


def test_an_accepted_program_is_not_tried_again(copy, tmp_path, monkeypatch):
    tried, cache = [], tmp_path / "cache"
    monkeypatch.setattr(admission, "_problems", {})
    monkeypatch.setattr(admission.at_hand, "cache_folder", lambda: cache)
    monkeypatch.setattr(admission, "run_module", lambda *words: tried.append(words))
    for _ in range(2):
        assert load(copy).dimension == 4
    assert len(tried) == 1
    monkeypatch.setattr(admission, "_problems", {})  # as another process
    load(copy)
    assert len(tried) == 1 and len(list((cache / "programs").iterdir())) == 1
    shutil.rmtree(cache)
    cache.write_text("no folder can be made here")
    monkeypatch.setattr(admission, "_problems", {})
    assert load(copy).dimension == 4 and len(tried) == 2


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
    message = f"calls '{target}'.* it could run any code.*dmljax bundle rebuild"
    _refused(copy, message)
    with pytest.raises(BadBundle, match=message):
        main.main(["bundle", "check", str(copy)])


def test_an_honest_program_has_one_custom_call(bundle_folder):
    """Otherwise the test above would also pass if no program were accepted."""
    data = files.read(bundle_folder, files.read_manifest(bundle_folder), files.PROGRAM)
    text = jax.export.deserialize(bytearray(data)).mlir_module()
    assert text.count("custom_call") == text.count("custom_call @shape_assertion(") == 1
    assert load(bundle_folder).dimension == 4


def test_stored_examples_of_another_form(copy):
    golden = load_file(copy / "golden.safetensors")
    for names in (["inputs"], ["inputs", "embeddings", "encoded_1"], []):
        _replace(copy, "golden.safetensors", save({name: golden[name] for name in names}))
        with pytest.raises(BadBundle, match=r"golden.safetensors .* needs inputs, embeddings"):
            load(copy).check()


def test_a_config_without_a_net(copy):
    config = json.loads((copy / "config.json").read_text())
    del config["net"]
    _replace(copy, "config.json", json.dumps(config).encode())
    _refused(copy, "config.json has no net")


def test_another_version_of_jax_must_compute_the_stored_examples(copy):
    """As JAX's promise is about time, and the version here may be any."""

    def older(manifest):
        manifest["program"]["jax"] = "0.9.0"

    _manifest(copy, older)
    assert load(copy).dimension == 4
    golden = load_file(copy / "golden.safetensors")
    golden["embeddings"] = np.roll(golden["embeddings"], 1, axis=1)
    _replace(copy, "golden.safetensors", save(golden))
    _refused(copy, "gives other embeddings than at the export: .* dmljax bundle rebuild")


def test_other_pixels_than_at_the_export(copy):
    golden = load_file(copy / "golden.safetensors")
    golden["inputs"] = golden["inputs"] ^ 1
    _replace(copy, "golden.safetensors", save(golden))
    with pytest.raises(
        BadBundle, match=r"gives other pixels than at the export: .* versions of Pillow"
    ):
        load(copy).check()


def _altered(copy, tensors):
    data = save(tensors)
    _replace(copy, "params.safetensors", data)
    config, preprocess = (
        json.loads((copy / name).read_text()) for name in ("config.json", "preprocess.json")
    )
    digest = files.model_digest(tensors, preprocess, config)
    _manifest(copy, lambda manifest: manifest.update({"model": digest}))


def test_parameters_that_do_not_fit_the_program(copy):
    """Also where all digests were made to agree."""
    tensors = load_file(copy / "params.safetensors")
    first, second, third, *_ = sorted(tensors)
    changed = dict(tensors)
    changed["other"] = changed.pop(first)
    changed[second] = changed[second].astype(np.float16)
    changed[third] = changed[third][:1]
    _altered(copy, changed)
    _refused(copy, f"{first} is missing; other is not of this net; {second} is float16")
    nan = {name: np.full_like(x, np.nan) for name, x in tensors.items()}
    _altered(copy, nan)
    _refused(copy, f"{first} has NaN or infinity; {second} has NaN")


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
        _replace(copy, "params.safetensors", data)
        _refused(copy, "params.safetensors is damaged")
    _replace(copy, "params.safetensors", header({"a": one | {"dtype": "C64"}}) + b"\0" * 4)
    _refused(copy, "params.safetensors (is damaged|holds a as C64)")
