"""Files of transformers: shards, unwanted parts, other sizes, licenses."""

import json
import mmap
import pathlib
import struct
import sys

import jax
import numpy as np
import pytest
import safetensors.numpy

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "nets"))
import published as fixtures

from dmljax import main, nets, weights
from dmljax.weights import converted, readers


def write(path, tensors):
    path.write_bytes(safetensors.numpy.save(tensors))
    return path


def load(path, net):
    return weights.load(path, net, report_fn=lambda _: None)


def write_shards(folder, tensors, count=3):
    """As transformers writes large models: tensors in turn, and an index."""
    names, weight_map = sorted(tensors), {}
    for i in range(count):
        file = f"model-{i + 1:05d}-of-{count:05d}.safetensors"
        write(folder / file, {name: tensors[name] for name in names[i::count]})
        weight_map |= dict.fromkeys(names[i::count], file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return index


def test_shards_are_one_file(tmp_path):
    tensors, net = fixtures.tensors("clip"), fixtures.net("clip")
    index = write_shards(tmp_path, tensors)
    expected = load(write(tmp_path / "whole.safetensors", tensors), net)
    jax.tree.map(np.testing.assert_array_equal, load(index, net), expected)
    digest = converted.file_digest(index)
    second = tmp_path / "model-00002-of-00003.safetensors"
    content = safetensors.numpy.load(second.read_bytes())
    write(second, {name: array + 1 for name, array in content.items()})
    assert converted.file_digest(index) != digest
    write(second, dict(list(content.items())[1:]))
    with pytest.raises(ValueError, match=r"says that model-00002-of-00003\.safetensors holds"):
        load(index, net)
    second.write_bytes(b"")
    with pytest.raises(ValueError, match=r"names model-00002-of-00003.safetensors, which is dam"):
        load(index, net)
    second.unlink()
    message = r"needs 3 shards in its folder, and model-00002-of-00003.safetensors is missing"
    with pytest.raises(ValueError, match=message) as error:
        load(index, net)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("file", ["../x.safetensors", "/etc/passwd", "..", "a\\b", 7, ""])
def test_shards_outside_the_folder_are_refused(tmp_path, file):
    write(tmp_path / "x.safetensors", {"a": np.zeros(2, np.float32)})
    (tmp_path / "folder").mkdir()
    index = tmp_path / "folder" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(ValueError, match="which is not a file of the same folder"):
        readers.read(index)
    index.write_text("{")
    with pytest.raises(ValueError, match="damaged or cut short"):
        readers.read(index)


def header_only(path, header, size):
    """A file with this header and `size` bytes that are zero and take no room on the disk."""
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + size)
    return path


def entry(shape, begin, end):
    return {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("second", "size"),
    [
        (entry([4], 8, 24), 24),  # overlaps
        (entry([4], 16, 64), 64),  # longer than its shape
        (entry([400], 16, 1616), 32),  # beyond the end
        (entry([4], 24, 40), 40),  # a hole before it
        (entry([4], 16, 32), 64),  # bytes that belong to nothing
        (entry([1 << 62, 4], 16, 32), 32),
        (entry([-4], 16, 32), 32),
    ],
)
def test_lying_headers_are_refused(tmp_path, second, size):
    path = header_only(tmp_path / "x.safetensors", {"a": entry([4], 0, 16), "b": second}, size)
    with pytest.raises(ValueError, match="is damaged or cut short"):
        readers.read(path)


def large(name, **sizes):
    """Names and shapes of a tiny case, at the size of a published net."""
    case = fixtures.CASES[name]
    old = {32: sizes["width"], 96: 4 * sizes["width"], 17: 1370}
    shapes = {}
    for tensor, shape in case["tensors"].items():
        copies = range(sizes["depth"]) if ".layer.1." in tensor else [1]
        for i in copies:
            new_name = tensor.replace(".layer.1.", f".layer.{i}.")
            shapes[new_name] = [old.get(n, n) for n in shape]
    return shapes


def write_sparse(path, shapes):
    header, offset = {}, 0
    for name, shape in shapes.items():
        end = offset + 4 * int(np.prod(shape))
        header[name], offset = entry(shape, offset, end), end
    return header_only(path, header, offset)


def test_a_file_of_another_size_is_named(tmp_path):
    path = write_sparse(tmp_path / "model.safetensors", large("dinov2", width=768, depth=12))
    with pytest.raises(ValueError, match=r"is a dinov2_b14, not a dinov2_s14$") as error:
        weights.load(path, nets.dinov2_s14())
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match=r"is a dinov2_b14, not a dinov2_b14_reg$"):
        weights.load(path, nets.dinov2_b14_reg())
    with pytest.raises(ValueError, match=r"is a dinov2_b14, not a resnet18$"):
        weights.load(path, nets.resnet18())
    with pytest.raises(ValueError, match=r"position_embeddings \[1 1370 768\], in the net \[1 257"):
        weights.load(path, nets.dinov2_b14(image_size=224))


def test_only_the_wanted_tensors_are_read(tmp_path):
    """Tensors of a file are views of the file on the disk."""
    path = write(tmp_path / "x.safetensors", fixtures.tensors("clip"))
    for base in readers.read(path).tensors.values():
        while isinstance(base, np.ndarray):
            base = base.base
        assert isinstance(base, mmap.mmap)


def test_the_license_of_dinov3_travels(tmp_path, capsys):
    tensors = fixtures.tensors("dinov3_splus")
    path, to = write(tmp_path / "model.safetensors", tensors), tmp_path / "converted.safetensors"
    flags = [f"--net.{k}={v}" for k, v in fixtures.CASES["dinov3_splus"]["keywords"].items()]
    words = ["weights", str(path), "--net=dinov3_splus16", f"--to={to}", *flags]
    assert main.main(words) == 0
    metadata = weights.read_metadata(to)
    assert metadata["license"].startswith("DINOv3 License; may be sold: under these terms; pass on")
    assert "with a copy of it" in metadata["license"] and "assumed" in metadata["license"]
    inputs = metadata["inputs"]
    assert (inputs["size"], inputs["shorter"], inputs["filter"]) == (256, None, "bilinear")
    assert inputs["normalization"] == "imagenet" and inputs["mean"] == [0.485, 0.456, 0.406]
    net = fixtures.net("dinov3_splus")
    jax.tree.map(np.testing.assert_array_equal, load(path, net), load(to, net))
    assert weights.expected_normalization(to) == "imagenet"


def test_the_positions_of_a_file_are_resized_as_its_code_does(tmp_path):
    """And a net that does otherwise is told so."""
    name = "dinov2_original"
    path = write(tmp_path / "model.safetensors", fixtures.tensors(name))
    to = tmp_path / "converted.safetensors"
    keywords = {k: v for k, v in fixtures.CASES[name]["keywords"].items() if k != "resize"}
    flags = [f"--net.{k}={v}" for k, v in keywords.items()]
    main.main(["weights", str(path), "--net=dinov2_s14", f"--to={to}", *flags])
    assert weights.read_metadata(to)["net"]["resize"] == "torch_offset"
    for file in (path, to):
        notes = []
        weights.load(file, nets.dinov2_s14(**keywords), report_fn=notes.append)
        assert len(notes) == 1 and "set resize='torch_offset'" in notes[0]
        weights.load(file, fixtures.net(name), report_fn=notes.append)
        assert len(notes) == 1


def test_a_tensor_that_is_missing_unknown_or_of_another_shape_is_named(tmp_path):
    """Two or three tensors of a file in each of three namings."""
    for name in ("dinov2_g", "dinov3_splus_timm", "openclip"):
        tensors, net = fixtures.tensors(name), fixtures.net(name)
        wanted = [n for n in tensors if not n.startswith(("text", "logit", "transformer."))]
        wanted = [n for n in wanted if "mask" not in n and n not in UNWANTED]
        for tensor in wanted[:: len(wanted) // 2]:
            changed = {k: v for k, v in tensors.items() if k != tensor}
            with pytest.raises(ValueError, match="does not fit the net") as error:
                load(write(tmp_path / "x.safetensors", changed), net)
            assert f"missing: {tensor}" in str(error.value)
            changed = tensors | {tensor: np.zeros((*tensors[tensor].shape, 2), np.float32)}
            with pytest.raises(ValueError, match=r"shape: .*in the net"):
                load(write(tmp_path / "x.safetensors", changed), net)
        changed = tensors | {"something.else": np.zeros(2, np.float32)}
        with pytest.raises(ValueError, match=r"not in the net: something\.else$"):
            load(write(tmp_path / "x.safetensors", changed), net)


UNWANTED = ("positional_embedding", "token_embedding.weight", "ln_final.weight", "ln_final.bias")


def test_a_projection_of_clip_has_no_bias(tmp_path):
    tensors = fixtures.tensors("clip_timm") | {"head.bias": np.ones(16, np.float32)}
    with pytest.raises(ValueError, match=r"not zero: head\.bias$"):
        load(write(tmp_path / "x.safetensors", tensors), fixtures.net("clip_timm"))


def test_explain_says_what_a_file_is(capsys):
    for name, fragments in {
        "dinov2_s14": (
            "shorter side to 256 (bicubic)",
            "may be sold: yes; keep",
            "resolve/main/model",
        ),
        "dinov3_b16": ("under these terms; pass on", "both sides to 256", "answers only to acc"),
        "siglip2_b16_256": ("WebLI", "mean 0.5 0.5 0.5", "256 x 256 pixels"),
        "openclip_b16": ("openclip_b16_laion2b\n", "openclip_b16_datacomp\n", "LAION-2B"),
        "bn_inception": ("not stated; the authors", "BGR 0 to 255"),
    }.items():
        assert main.main(["weights", "explain", name]) == 0
        printed = capsys.readouterr().out
        assert all(fragment in printed for fragment in fragments), printed
    for words, message in (
        (["explain", "dinov2_s15"], "did you mean 'dinov2_s14'"),
        (["explain"], "name a published file or net to explain"),
        (["x.pth", "y"], "x.pth y is not known: see dmljax weights --help"),
    ):
        with pytest.raises(ValueError, match=message):
            main.main(["weights", *words])
    assert converted.FORMAT == 1
