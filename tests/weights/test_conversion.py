"""A converted file loads like the published one, and carries its source, license and input."""

import hashlib
import json

import jax
import numpy as np
import pytest
import safetensors.numpy
import weight_files as make
from published_layouts import googlenet_blobs, resnet_tensors, small_resnet, write_torch

from dmljax import nets, weights
from dmljax.nets.clip import token_rule
from dmljax.weights import PUBLISHED, conversion, converted, readers

SPEC = {"name": "resnet18", "blocks": (1, 1, 1, 1), "width": 4}


def convert(path, to, **keywords):
    spec = SPEC | {"classes": 10} | keywords
    return weights.convert(path, small_resnet(classes=spec["classes"]), to, spec=spec)


def test_a_converted_file_loads_the_same_and_names_its_source(tmp_path):
    path, to = write_torch(tmp_path, resnet_tensors()), tmp_path / "converted.safetensors"
    metadata = convert(path, to)
    assert weights.read_metadata(to) == json.loads(json.dumps(metadata))
    assert metadata["source"]["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert metadata["source"]["file"] == "file.pth" and metadata["source"]["known_as"] is None
    assert metadata["net"]["classes"] == 10 and "unknown" in metadata["license"]
    assert metadata["inputs"]["mean"] == [0.485, 0.456, 0.406] and metadata["inputs"]["size"] == 224
    for net in (small_resnet(classes=10), small_resnet(), small_resnet(start="layer3")):
        a, b = weights.load(path, net), weights.load(to, net)
        assert jax.tree.structure(a) == jax.tree.structure(b)
        jax.tree.map(np.testing.assert_array_equal, a, b)
    content = to.read_bytes()
    convert(path, to)
    assert to.read_bytes() == content
    with pytest.raises(ValueError, match="is converted already"):
        convert(to, to)
    with pytest.raises(ValueError, match=r"converted for resnet18, does not fit.*fc/kernel"):
        weights.load(to, small_resnet(classes=3))


def test_a_converted_file_without_a_classifier(tmp_path):
    to = tmp_path / "converted.safetensors"
    metadata = convert(write_torch(tmp_path, resnet_tensors()), to, classes=None)
    assert "fc.weight" in metadata["notes"][0]
    assert not any("fc" in name for name in readers.read(to).tensors)


def test_written_files_are_read_and_always_the_same_bytes(tmp_path):
    tensors = {"a": np.arange(6, dtype="f4"), "transposed": np.arange(6.0).reshape(2, 3).T}
    contents = []
    for name in ("a", "b"):
        converted.write(tmp_path / name, tensors, '{"net": "x"}')
        contents.append((tmp_path / name).read_bytes())
    assert contents[0] == contents[1]
    result = readers.read(tmp_path / "a")
    assert result.metadata == {"dmljax": '{"net": "x"}'}
    assert set(result.tensors) == set(tensors)
    for name, array in tensors.items():
        np.testing.assert_array_equal(result.tensors[name], array)
        assert result.tensors[name].dtype == array.dtype


def test_a_full_disk_leaves_the_old_file(tmp_path, monkeypatch):
    converted.write(tmp_path / "x", {"a": np.zeros(2)}, "old")
    before = (tmp_path / "x").read_bytes()

    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="no space"):
        converted.write(tmp_path / "x", {"a": np.ones(2)}, "new")
    assert [p.name for p in tmp_path.iterdir()] == ["x"]
    assert (tmp_path / "x").read_bytes() == before


def test_bad_metadata_is_refused(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(safetensors.numpy.save({"x": np.zeros(2)}))
    with pytest.raises(ValueError, match="was not converted by dmljax"):
        weights.read_metadata(path)
    for text, message in (
        ("{", "is damaged"),
        ("{}", "is damaged"),
        ('{"format": 2}', "later format, 2"),
    ):
        converted.write(path, {"x": np.zeros(2)}, text)
        with pytest.raises(ValueError, match=message):
            weights.load(path, small_resnet())
        with pytest.raises(ValueError, match=message):
            weights.expected_normalization(path)


def test_a_changed_bit_of_a_converted_file_is_detected(tmp_path):
    to = tmp_path / "converted.safetensors"
    convert(write_torch(tmp_path, resnet_tensors()), to)
    data = bytearray(to.read_bytes())
    data[-1000] ^= 1
    to.write_bytes(data)
    with pytest.raises(ValueError, match="is damaged"):
        weights.load(to, small_resnet())


def test_a_published_file_brings_its_license_and_input(tmp_path, monkeypatch):
    path, to = tmp_path / "net.caffemodel", tmp_path / "converted.safetensors"
    path.write_bytes(make.caffe(googlenet_blobs(), old=True))
    assert weights.expected_normalization(path) is None
    digest = hashlib.sha1(path.read_bytes()).hexdigest()
    published = PUBLISHED["googlenet"]._replace(digest=f"sha1:{digest}")
    monkeypatch.setitem(PUBLISHED, "googlenet", published)
    metadata = weights.convert(path, nets.googlenet(), to, spec={"name": "googlenet"})
    assert metadata["source"]["known_as"] == "googlenet" and "BVLC" in metadata["license"]
    assert metadata["inputs"]["channels"] == "BGR" and metadata["inputs"]["range"] == [0, 255]
    assert weights.expected_normalization(path) == weights.expected_normalization(to) == "caffe"


def test_other_files_are_expected_to_have_the_input_of_the_net(tmp_path):
    path, to = tmp_path / "net.caffemodel", tmp_path / "converted.safetensors"
    path.write_bytes(make.caffe(googlenet_blobs(), old=True))
    weights.convert(path, nets.googlenet(), to, spec={"name": "googlenet"})
    assert weights.expected_normalization(to) == "caffe"
    convert(write_torch(tmp_path, resnet_tensors()), to)
    assert weights.expected_normalization(to) == "imagenet"
    # Published files of one net may have several licenses: then no license is recorded.
    assert conversion._of_net("resnet18") and conversion._of_net("resnet50") is None


def test_every_tower_for_text_has_the_tokens_of_its_family():
    assert token_rule("clip_b32")[:2] == (77, "<|startoftext|>")
    assert token_rule("siglip2_b16_256")[:4] == (64, None, "<eos>", "<pad>")
