"""ONNX programs of every net and every method compute what JAX computes, in new processes."""

import importlib.util
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from system import METHODS, tiny

from dmljax import kernels, nets
from dmljax.bundle import exporting, files, loading, onnx_program, preprocessing, rebuilding
from dmljax.config.fields import complete
from dmljax.files.writing import write_json
from dmljax.nets import layers

SIZES = {"lecun": (32, 1), "convnet": (32, 3)}


def _values(path, shape, rng):
    """Values that keep the variance of a deep net, so that a wrong operation shows at its end."""
    name = path.rpartition("/")[2]
    if name in ("scale", "var"):
        return rng.uniform(0.5, 1.5, shape).astype(np.float32)
    fan_in = np.prod(shape[:-1]) if name == "kernel" else 50
    return (rng.normal(size=shape) * np.sqrt(2 / fan_in)).astype(np.float32)


def _packaged(folder, config, shape):
    """A bundle of random parameters with its ONNX program, and the reports of both programs."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (8, *shape), np.uint8)
    shapes = rebuilding.model_of(config, shape, classes=4)
    tensors = {path: _values(path, x.shape, rng) for path, x in shapes.tensors.items()}
    model = shapes._replace(tensors=tensors)
    jitted = jax.jit(model.embed_fn)

    def embed_fn(images):
        return np.asarray(jitted(tensors, images))

    write_json(folder / files.CONFIG, config)
    preprocess = preprocessing.from_transform("unchanged", shape)
    exporting.write_model(folder, model, preprocess, embed_fn)
    facts = {"batch_sizes": [1, 8], "classes": 4, "thresholds": {}}
    exporting.write_manifest(folder, model, facts)
    onnx_program.write(folder)
    manifest = exporting.write_manifest(folder, model, facts)
    labels = np.arange(8) % 4
    return exporting.check_programs(folder, manifest, embed_fn(images), images, labels)["programs"]


def _config(tmp_path, **fields):
    return complete(tiny(tmp_path, **fields)) | {"normalize": fields.get("normalize", "unit")}


@pytest.mark.slow
@pytest.mark.parametrize("name", nets.__all__)
def test_every_net(name, tmp_path):
    size, channels = SIZES.get(name, (96, 3))
    options = {"image_size": 96} if name.startswith("vit") else {}
    config = _config(tmp_path, net={"name": name, **options})
    reports = _packaged(tmp_path / "net.bundle", config, (size, size, channels))
    # `check_programs` has compared both programs with the limits of an export.
    assert reports["onnx"]["same_nearest"] == 1
    print(name, json.dumps(reports["onnx"]), flush=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_every_method(name, tmp_path):
    config = _config(tmp_path, **METHODS[name])
    reports = _packaged(tmp_path / "method.bundle", config, (12, 12, 3))
    for size in ("one", "three", "largest_batch"):
        assert reports["onnx"][size]["largest_difference"] < 1e-6


def test_portable_pooling_is_the_same_pooling():
    """With its padding in an operation of its own, for every padding that the nets use."""
    x = np.random.default_rng(0).normal(size=(2, 9, 12, 3)).astype(np.float32)
    for size, strides, padding, ceil in ((3, 2, 1, False), (3, 2, 0, True), (3, 1, 1, False)):
        options = {"strides": strides, "padding": padding, "ceil": ceil}
        plain = layers.max_pool(x, size, **options)
        with kernels.portable():
            traced = str(jax.make_jaxpr(lambda x: layers.max_pool(x, size, **options))(x))  # noqa: B023
            portable = layers.max_pool(x, size, **options)
        np.testing.assert_array_equal(plain, portable)
        assert "platform_index" not in traced and "reduce_window_max" in traced
        windows = traced.split("reduce_window_max")[1].split("\n]")[0]
        assert f"padding={((0, 0),) * 4}" in windows.replace("  ", ""), windows


def test_portable_convolutions_have_one_form():
    x, kernel = jnp.ones((1, 8, 8, 32)), jnp.ones((3, 3, 32, 32))

    def conv(x, kernel):
        return kernels.convolution.conv(x, kernel, padding=1)

    assert "platform_index" in str(jax.make_jaxpr(lambda x: conv(x, kernel))(x))
    with kernels.portable():
        assert "platform_index" not in str(jax.make_jaxpr(lambda x: conv(x, kernel))(x))


def test_a_missing_package_is_named_with_its_command(run_folder, tmp_path, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "jax2onnx" else find_spec(name)
    )
    with pytest.raises(ImportError, match="pip install --no-deps jax2onnx=="):
        exporting.export(run_folder, tmp_path / "a.bundle", onnx=True)
    assert not list(tmp_path.iterdir())


def test_a_bundle_without_onnx_says_so(bundle_folder):
    with pytest.raises(loading.BadBundle, match="has no ONNX program: export the run with --onnx"):
        loading.load(bundle_folder, program="onnx")
