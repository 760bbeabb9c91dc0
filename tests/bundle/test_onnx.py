"""ONNX programs of every net and every method compute what JAX computes, in new processes."""

import functools
import importlib.util
import json
import pathlib
import re
import shutil
import sys
import types
from typing import NamedTuple

import forged
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bundle_cases import exported, trained
from flax import traverse_util
from PIL import Image
from processes import ROOT, python
from system import METHODS, tiny

from dmljax import nets
from dmljax.bundle import exporting, files, loading, models, preprocessing
from dmljax.config.fields import complete
from dmljax.nets import layers, vit
from dmljax.nets.layers import impl

SIZES = {"lecun": (32, 1), "convnet": (32, 3)}


def _values(path, shape, rng):
    """Values that keep the variance of a deep net, so that a wrong operation shows at its end."""
    name = path.rpartition("/")[2]
    if name in ("scale", "var"):
        return rng.uniform(0.5, 1.5, shape).astype(np.float32)
    fan_in = np.prod(shape[:-1]) if name == "kernel" else 50
    return (rng.normal(size=shape) * np.sqrt(2 / fan_in)).astype(np.float32)


class Packaged(NamedTuple):
    """A bundle of random parameters, images, and what the net computes for them."""

    folder: pathlib.Path
    images: np.ndarray
    embeddings: np.ndarray


def _packaged(folder, config, shape):
    folder.mkdir()
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (6, *shape), np.uint8)
    net = models.model_of(config, shape, classes=4)
    tensors = {path: _values(path, x.shape, rng) for path, x in net.tensors.items()}
    jitted = jax.jit(net.embed_fn)

    def embed_fn(images):
        return np.asarray(jitted(tensors, images))

    config, variables = models.at_size(
        config, traverse_util.unflatten_dict(tensors, sep="/"), shape
    )
    model = models.with_values(models.model_of(config, shape, classes=4), variables)
    preprocess = preprocessing.from_transform("unchanged", shape)
    facts = {"batch_sizes": [1, 6], "classes": 4}
    exporting.write_model(folder, model, config, preprocess, embed_fn, **facts)
    return Packaged(folder, images, embed_fn(images))


def _reports(packaged):
    """Of both programs, which run in new processes."""
    folder, images, embeddings = packaged
    manifest = files.read_manifest(folder)
    models.write_onnx(folder)
    manifest, labels = files.write_manifest(folder, manifest), np.arange(6) % 4
    return exporting.check_programs(folder, manifest, embeddings, images, labels)["programs"]


def _config(tmp_path, **fields):
    return complete(tiny(tmp_path, **fields)) | {"normalize": fields.get("normalize", "unit")}


# One of each family, with two blocks or few, for images of another size than its own.
TINY = {"width": 16, "heads": 2, "depth": 1, "patch": 8, "image_size": 24}
FAMILIES = {
    "vit_s16": TINY,  # DINO, and with another resizing of positions augreg
    "dinov2_s14": TINY,
    "dinov2_s14_reg": TINY,
    "dinov3_splus16": TINY | {"hidden": 24},  # a gated MLP
    "clip_b16": TINY | {"projection": 12},
    "siglip2_b16_224": TINY,
    "unicom_b32": TINY | {"projection": 12, "image_size": [32, 40]},
    "convnext_t": {"width": 8, "blocks": [1, 1, 1, 1]},
    "mobilenet_v2": {"multiplier": 0.1},
    "efficientnet_lite0": {"multiplier": 0.1, "depth": 0.3},
}
TINY_SHAPE = (32, 40, 3)
WITH_POSITIONS = ("vit_s16", "dinov2_s14", "dinov2_s14_reg", "clip_b16", "siglip2_b16_224")


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    """Gives the bundle of a family by its name."""
    folder = tmp_path_factory.mktemp("families")

    @functools.cache
    def packaged(name):
        method = {"name": "pairs", "dim": None}  # the pooled features as unit vectors
        config = _config(folder, net={"name": name, **FAMILIES[name]}, method=method)
        return _packaged(folder / name, config, TINY_SHAPE)

    return packaged


def _agree(packaged, program):
    """Runs a program in this process: it must give the embeddings of the net."""
    bundle = loading.load(packaged.folder, program=program, batch_sizes=[6])
    outputs = bundle.embed_prepared(packaged.images)
    difference, cosine = loading.differences(packaged.embeddings, outputs)
    limit, least = loading.LIMITS["cpu"]
    assert difference <= limit and cosine >= least, packaged.folder.name
    assert np.ptp(packaged.embeddings, axis=0).max() > 0.02  # the images differ


@pytest.mark.parametrize("name", FAMILIES)
def test_the_program_of_every_family_is_its_net(family, name):
    _agree(family(name), "stablehlo")


@pytest.mark.parametrize("name", WITH_POSITIONS)
def test_no_program_resizes_positions(family, name):
    """They are stored at the size of the bundle, 4 x 5 patches. The net's own grid is 3 x 3."""
    folder = family(name).folder
    manifest = files.read_manifest(folder)
    config = manifest.config
    positions = files.read_tensors(folder, manifest, files.PARAMS)["params/net/pos_embed"]
    count = 20 + (name != "siglip2_b16_224")
    assert positions.shape == (1, count, 16) and config["net"]["image_size"] == [32, 40]
    program = files.read(folder, manifest, files.PROGRAM)
    text = jax.export.deserialize(bytearray(program)).mlir_module()
    assert f"tensor<1x{count}x16xf32>" in text and f"tensor<1x{count - 11}x16xf32>" not in text
    matrices = ("tensor<4x3xf32>", "tensor<5x3xf32>")  # which resize 3 rows and 3 columns
    assert not any(matrix in text for matrix in matrices)
    if name != "clip_b16":
        return
    # The program of a bundle from before has the net's own grid, and resizes it.
    config["net"] = {"name": name, **FAMILIES[name]}
    before = models.model_of(config, TINY_SHAPE, classes=4)
    assert before.tensors["params/net/pos_embed"].shape == (1, count - 11, 16)
    assert all(matrix in models.stablehlo(before).mlir_module() for matrix in matrices)


def test_onnx_of_every_family_is_its_net(family):
    """jax2onnx needs a process of its own; here one converts all of them."""
    pytest.importorskip("jax2onnx")
    pytest.importorskip("onnxruntime")
    code = (
        "import pathlib, sys; from dmljax.bundle import models\n"
        "for name in sys.argv[1:]: models._write_onnx(pathlib.Path(name))"
    )
    families = [family(name) for name in FAMILIES]
    manifests = [files.read_manifest(packaged.folder) for packaged in families]
    python(code, *(packaged.folder for packaged in families))
    for packaged, manifest in zip(families, manifests, strict=True):
        files.write_manifest(packaged.folder, manifest)
        _agree(packaged, "onnx")


# At the real width. Nets of one family differ by their widths and depths alone.
REAL = ["efficientnet_lite0", "convnext_t", "vit_b16"]
OTHERS = sorted({*nets.__all__} - {*vit.__all__, *FAMILIES, *REAL} | {"vit_b16"})


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*REAL, "mobilenet_v2", *OTHERS}))
def test_every_net(name, tmp_path):
    size, channels = SIZES.get(name, (96, 3))
    config = _config(tmp_path, net={"name": name})
    reports = _reports(_packaged(tmp_path / "net.bundle", config, (size, size, channels)))
    # `check_programs` has compared both programs with the limits of an export.
    assert reports["onnx"]["same_nearest"] == 1
    print(name, json.dumps(reports["onnx"]), flush=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_every_method(name, tmp_path):
    config = _config(tmp_path, **METHODS[name])
    reports = _reports(_packaged(tmp_path / "method.bundle", config, (12, 12, 3)))
    for size in ("one", "three", "largest_batch"):
        assert reports["onnx"][size]["largest_difference"] < 1e-6


def test_portable_pooling_is_the_same_pooling():
    """With its padding in an operation of its own, for every padding that the nets use."""
    x = np.random.default_rng(0).normal(size=(2, 9, 12, 3)).astype(np.float32)
    for size, strides, padding, ceil in ((3, 2, 1, False), (3, 2, 0, True), (3, 1, 1, False)):
        options = {"strides": strides, "padding": padding, "ceil": ceil}
        plain = layers.max_pool(x, size, **options)
        with impl.portable():
            traced = str(jax.make_jaxpr(lambda x: layers.max_pool(x, size, **options))(x))  # noqa: B023
            portable = layers.max_pool(x, size, **options)
        np.testing.assert_array_equal(plain, portable)
        assert "platform_index" not in traced and "reduce_window_max" in traced
        windows = traced.split("reduce_window_max")[1].split("\n]")[0]
        assert f"padding={((0, 0),) * 4}" in windows.replace("  ", ""), windows


def test_portable_convolutions_have_one_form():
    x, kernel = jnp.ones((1, 8, 8, 32)), jnp.ones((3, 3, 1, 32))

    def conv(x, kernel):
        return layers.convolution.conv(x, kernel, padding=1, groups=x.shape[3])

    assert "platform_index" in str(jax.make_jaxpr(lambda x: conv(x, kernel))(x))
    with impl.portable():
        assert "platform_index" not in str(jax.make_jaxpr(lambda x: conv(x, kernel))(x))


def test_a_missing_package_is_named_with_its_command(run_folder, tmp_path, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "jax2onnx" else find_spec(name)
    )
    with pytest.raises(ImportError, match="pip install --no-deps jax2onnx=="):
        exporting.export(run_folder, tmp_path / "a.bundle", onnx=True)
    assert not list(tmp_path.iterdir())


def test_a_package_that_jax2onnx_lacks_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(models, "check_onnx_installed", lambda: None)
    problem = "ModuleNotFoundError: No module named 'sympy.core'"
    monkeypatch.setattr(models.parity, "run_module", lambda *words: problem)
    with pytest.raises(ImportError, match=r"needs sympy, .* imports: pip install sympy$"):
        models.write_onnx(tmp_path)


def test_a_bundle_without_onnx_says_so(bundle_folder):
    with pytest.raises(loading.BadBundle, match=r"has no embed\.onnx: export it again"):
        loading.load(bundle_folder, program="onnx")


@pytest.mark.parametrize(
    ("options", "runs_onnx"),
    [({}, True), ({"filter": "bicubic", "scaled_decode": True}, False)],
)
def test_the_example_of_the_page_needs_no_dmljax(options, runs_onnx, tmp_path, monkeypatch):
    """The same pixels and embeddings as the bundle, for a photograph that a camera has turned.

    Without onnxruntime, a session that returns its input takes its place.
    """
    if runs_onnx:
        pytest.importorskip("jax2onnx")
        pytest.importorskip("onnxruntime")
    else:
        session = types.SimpleNamespace(run=lambda names, inputs: [inputs["images"]])
        module = types.SimpleNamespace(InferenceSession=lambda path: session)
        monkeypatch.setitem(sys.modules, "onnxruntime", module)
    run = trained(tmp_path, eval_transform={"name": "standard_eval", "size": 12} | options)
    exported(run, tmp_path / "photos.bundle", onnx=runs_onnx)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    pixels = np.random.default_rng(0).integers(0, 256, (9, 13, 3), np.uint8)
    photo = Image.fromarray(pixels).resize((260, 151), Image.Resampling.BICUBIC)
    photo.save(tmp_path / "a.jpg", exif=exif)
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "ship.md").read_text()
    [block] = [x for x in re.findall(r"```py\n(.*?)```", text, re.S) if "onnxruntime" in x]
    assert "dmljax" not in block
    example = {}
    exec(compile(block, "block", "exec"), example)
    bundle = loading.load(tmp_path / "photos.bundle")
    np.testing.assert_array_equal(example["prepare"]("a.jpg"), bundle.prepare("a.jpg"))
    if runs_onnx:
        np.testing.assert_allclose(example["x"], bundle.embed(["a.jpg"]), atol=1e-5)


def test_a_program_that_reads_other_files_is_refused(bundle_folder, tmp_path, monkeypatch):
    """onnxruntime would give the text of a file of this machine as the embedding."""
    onnxruntime = pytest.importorskip("onnxruntime")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "secret.txt").write_bytes(b"secret and more")
    program = forged.onnx_program(forged.outside_tensor("secret.txt"))
    session = onnxruntime.InferenceSession(program, providers=["CPUExecutionProvider"])
    (secret,) = session.run(None, {"images": np.zeros((1, 12, 12, 3), np.uint8)})
    assert secret.tobytes() == b"secret"  # what a bundle must not do
    copy = shutil.copytree(bundle_folder, tmp_path / "a.bundle")
    for data, message in (
        (program, "embed.onnx of .* cannot be used .*it takes values from other files"),
        (program[:-1], "embed.onnx of .* cannot be used"),
    ):
        forged.replace(copy, files.ONNX, data)
        with pytest.raises(loading.BadBundle, match=message) as refused:
            loading.load(copy, program="onnx")
        assert "\n" not in str(refused.value)
