"""ONNX programs of every net and every method compute what JAX computes, in new processes."""

import functools
import importlib.util
import re
import shutil
import sys
import types

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
from dmljax.bundle import exporting, files, loading, models, preprocessing, programs
from dmljax.config.fields import complete
from dmljax.nets import clip, dino, layers
from dmljax.nets.layers import impl

SIZES = {"lecun": (32, 1), "convnet": (32, 3)}


def _values(path, shape, rng):
    """Values that keep the variance of a deep net, so that a wrong operation shows at its end."""
    name = path.rpartition("/")[2]
    if name in ("scale", "var"):
        return rng.uniform(0.5, 1.5, shape).astype(np.float32)
    fan_in = np.prod(shape[:-1]) if name == "kernel" else 50
    return (rng.normal(size=shape) * np.sqrt(2 / fan_in)).astype(np.float32)


def _packaged(folder, config, shape, *, onnx=False):
    """A bundle of random parameters. `write` compares its programs with the net on images."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (6, *shape), np.uint8)
    net = models.model_of(config, shape, classes=4)
    tensors = {path: _values(path, x.shape, rng) for path, x in net.tensors.items()}
    jitted = jax.jit(net.embed_fn)

    def embed_fn(images):
        return np.asarray(jitted(tensors, images))

    assert np.ptp(embed_fn(images), axis=0).max() > 0.02  # the images differ
    variables = traverse_util.unflatten_dict(tensors, sep="/")
    config, model = models.at_size(config, variables, shape, classes=4)
    preprocess = preprocessing.from_transform("unchanged", shape)
    options = {"batch_sizes": [1, 6], "classes": 4, "onnx": onnx}
    manifest = exporting.write(folder, model, config, preprocess, embed_fn, images, **options)
    return files.write_manifest(folder, manifest)


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
# These run, one of each structure: registers, rotary positions and a gated MLP, pooling by
# attention, convolutions. `test_symbolic_batch` exports the others without values.
RUN = ("dinov2_s14_reg", "dinov3_splus16", "siglip2_b16_224", "convnext_t", "mobilenet_v2")


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    """Gives the folder of the bundle of a family by its name."""
    folder = tmp_path_factory.mktemp("families")

    @functools.cache
    def packaged(name):
        method = {"name": "pairs", "dim": None}  # the pooled features as unit vectors
        config = _config(folder, net={"name": name, **FAMILIES[name]}, method=method)
        _packaged(folder / name, config, TINY_SHAPE)
        return folder / name

    return packaged


@pytest.mark.parametrize("name", ["dinov2_s14_reg", "siglip2_b16_224"])
def test_no_program_resizes_positions(family, name):
    """They are stored at the size of the bundle, 4 x 5 patches. The net's own grid is 3 x 3."""
    folder = family(name)
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


def test_programs_of_the_families_are_their_nets(family):
    """jax2onnx needs a process of its own; here one converts all of them."""
    folders = [family(name) for name in RUN]  # compares the first program with the net
    loading.load(folders[0]).check()
    pytest.importorskip("jax2onnx")
    pytest.importorskip("onnxruntime")
    code = (
        "import pathlib, sys; from dmljax.bundle import models\n"
        "for name in sys.argv[1:]: models._write_onnx(pathlib.Path(name))"
    )
    manifests = [files.read_manifest(folder) for folder in folders]
    python(code, *folders[1:])
    for folder, manifest in zip(folders[1:], manifests[1:], strict=True):
        files.write_manifest(folder, manifest)
        loading.load(folder, program="onnx").check()


# At the real width. Nets of one family differ by their widths and depths alone.
REAL = ["efficientnet_lite0", "convnext_t", "vit_b16"]
OTHERS = sorted({*nets.__all__} - {*clip.__all__, *dino.__all__, *FAMILIES, *REAL} | {"vit_b16"})


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*REAL, "mobilenet_v2", *OTHERS}))
def test_every_net(name, tmp_path):
    size, channels = SIZES.get(name, (96, 3))
    config = _config(tmp_path, net={"name": name})
    manifest = _packaged(tmp_path / "net.bundle", config, (size, size, channels), onnx=True)
    assert manifest.parity["programs"]["onnx"]["same_nearest"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_every_method(name, tmp_path):
    config = _config(tmp_path, **METHODS[name])
    manifest = _packaged(tmp_path / "method.bundle", config, (12, 12, 3), onnx=True)
    for size in ("one", "three", "largest_batch"):
        assert manifest.parity["programs"]["onnx"][size]["largest_difference"] < 1e-6


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


# Numbers of fields of onnx.proto from a ModelProto to a tensor.
PLACES = {
    "initializer": (7, 5),
    "sparse values": (7, 15, 1),
    "attribute": (7, 1, 5, 5),
    "graph of an attribute": (7, 1, 5, 6, 5),
    "tensors of an attribute": (7, 1, 5, 10),
    "graphs of an attribute": (7, 1, 5, 11, 5),
    "sparse tensor of an attribute": (7, 1, 5, 22, 1),
    "sparse tensors of an attribute": (7, 1, 5, 23, 2),
    "graph in a graph": (7, 1, 5, 6, 1, 5, 6, 5),
    "function": (25, 7, 5, 5),
    "training": (20, 1, 5),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_tensor_outside_is_found_in_every_place_of_a_model(place):
    onnx = pytest.importorskip("onnx")

    def is_outside(message):
        for number in reversed(PLACES[place]):
            message = forged.field(number, message)
        return programs.has_external_data(onnx.load_model_from_string(message))

    location, places = forged.field(14, 1), forged.field(13, b"")
    cut_to_one = forged.field(14, (1 << 32) + 1)  # by parsers
    for tensor in (forged.outside_tensor("secret.txt"), location, places, cut_to_one):
        assert is_outside(tensor)
    assert not is_outside(forged.field(8, "w") + forged.field(9, b"12") + forged.field(14, 0))
