"""A run normalizes images as its weights expect, else as its net expects, else as ImageNet."""

import ast
import pathlib
import shlex
import sys

import numpy as np
import pytest
from system import tiny

from dmljax import nets, weights
from dmljax.config import fields
from dmljax.config.build import build
from dmljax.nets import files, normalizations
from dmljax.runs import summary
from dmljax.train import start

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "weights"))
from published_layouts import resnet_tensors, write_torch

SMALL = {"blocks": [1, 1, 1, 1], "width": 4}


def normalization(folder, normalize, **net):
    config = tiny(folder, normalize=normalize, net=net)
    config["transform"] = config["eval_transform"] = {"name": "standard_eval", "size": 32}
    return fields.short(build(config).config["normalize"])


@pytest.fixture
def file(tmp_path):
    """A converted resnet18, whose metadata says "imagenet"."""
    to = tmp_path / "resnet18.safetensors"
    net = nets.resnet18(blocks=(1, 1, 1, 1), width=4)
    path = write_torch(tmp_path, resnet_tensors())
    weights.convert(path, net, to, spec={"name": "resnet18"})
    return str(to)


def test_without_weights_the_normalization_is_that_of_the_net(tmp_path):
    assert normalization(tmp_path, None, name="resnet18", **SMALL) == "imagenet"
    assert normalization(tmp_path, None, name="googlenet", stop="conv1") == "caffe"
    assert normalization(tmp_path, None, name="convnet") == "imagenet"
    assert normalization(tmp_path, "unit", name="googlenet", stop="conv1") == "unit"


def test_with_weights_the_normalization_is_that_of_the_file(tmp_path, file):
    assert normalization(tmp_path, None, name="resnet18", weights=file, **SMALL) == "imagenet"
    explicit = {"name": "imagenet", "red_std": 0.299}
    assert normalization(tmp_path, explicit, name="resnet18", weights=file, **SMALL) == explicit


def test_a_contradiction_to_the_file_is_refused(tmp_path, file):
    message = "normalize='caffe' contradicts .*resnet18.safetensors, which expects 'imagenet'"
    with pytest.raises(ValueError, match=message):
        normalization(tmp_path, "caffe", name="resnet18", weights=file, **SMALL)
    half = {"name": "rgb", "mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]}
    message = r"'mean': \(0.5, 0.5, 0.5\).* contradicts .*expects 'imagenet'.*'force': True"
    with pytest.raises(ValueError, match=message):
        normalization(tmp_path, half, name="resnet18", weights=file, **SMALL)


def test_numbers_for_each_channel_come_from_the_file(tmp_path):
    """The metadata of a converted file may hold a dict; the run's config opens again."""
    spec = {"name": "rgb", "mean": [0.5, 0.4, 0.3], "std": [0.5, 0.6, 0.7]}
    net = nets.resnet18(blocks=(1, 1, 1, 1), width=4)
    type(net).expected_normalization, before = spec, type(net).expected_normalization
    try:
        to = tmp_path / "half.safetensors"
        metadata = weights.convert(write_torch(tmp_path, resnet_tensors()), net, to, spec={})
    finally:
        type(net).expected_normalization = before
    assert metadata["inputs"]["mean"] == spec["mean"] and metadata["inputs"]["channels"] == "RGB"
    assert weights.expected_normalization(to) == spec
    file = str(to)
    assert normalization(tmp_path, None, name="resnet18", weights=file, **SMALL) == spec
    other = {**spec, "std": [0.5, 0.6, 0.8]}
    with pytest.raises(ValueError, match=r"0\.8.*contradicts .*expects .*0\.7"):
        normalization(tmp_path, other, name="resnet18", weights=file, **SMALL)


def test_a_contradiction_that_is_insisted_on_holds(tmp_path, file):
    forced = {"name": "caffe", "force": True}
    config = tiny(tmp_path, normalize=forced, net={"name": "resnet18", "weights": file, **SMALL})
    config["transform"] = config["eval_transform"] = {"name": "standard_eval", "size": 32}
    run = build(config)
    images = np.full((1, 2, 2, 3), 100, np.uint8)
    np.testing.assert_allclose(run.normalize_fn(images), normalizations.caffe(images), rtol=1e-6)
    # The saved config opens again.
    assert build(run.config).config["normalize"] == forced


def prepared(folder, weights, transform):
    """The run of a config with this file, whose evaluation prepares images by `transform`."""
    config = tiny(folder, net={"name": "resnet18", "weights": weights, **SMALL}, normalize=None)
    train = {"name": "standard_eval", "size": 32}
    return build(config | {"transform": train, "eval_transform": transform})


@pytest.fixture
def published(tmp_path, monkeypatch):
    """Files of weights that were trained on squashed images: a published one, and converted."""
    entry = weights.PUBLISHED["resnet18"]._replace(
        url="https://example.org/squashed.pth",
        digest="",
        preprocessing=files.Preprocessing(40, None, "bicubic", "imagenet"),
    )
    monkeypatch.setitem(weights.PUBLISHED, "squashed", entry)
    path = write_torch(tmp_path, resnet_tensors()).rename(tmp_path / "squashed.pth")
    to = tmp_path / "converted.safetensors"
    net = nets.resnet18(blocks=(1, 1, 1, 1), width=4)
    weights.convert(path, net, to, spec={"name": "resnet18"})
    return [str(path), str(to)]


def test_images_that_are_prepared_otherwise_than_for_the_weights_are_named(tmp_path, published):
    for path in published:
        name = pathlib.Path(path).name
        run = prepared(tmp_path, path, {"name": "standard_eval", "size": 32})
        state = start.first_state(run)
        line = (
            f"{name} was trained for squash_eval(size=40, filter=bicubic), and this run evaluates "
            "with standard_eval(size=32, shorter=40, filter=bilinear). To prepare images as for "
            "the weights: --config.eval_transform="
        )
        lines = summary.header(run, state)
        assert len(lines) == 2 and lines[1].startswith(line) and "\n" not in lines[1]
        advice = shlex.split(lines[1].removeprefix(line))
        assert len(advice) == 1
        same = prepared(tmp_path, path, ast.literal_eval(advice[0]))  # the advice ends it
        assert len(summary.header(same, state)) == 1
        again = summary.header(run, state._replace(step=np.int32(1)))
        assert len(again) == 1  # a run that goes on has said it


@pytest.mark.parametrize(
    "options, is_named",
    [
        ({"size": 40}, False),
        ({"size": 43}, False),  # as published systems cut 227 pixels for nets of 224
        ({"size": 44}, True),
        ({"size": 40, "filter": "bilinear"}, True),
        ({"name": "standard_eval", "size": 40}, True),
        ({"name": "dvml_eval", "size": 32}, False),  # of a published system
    ],
)
def test_what_of_the_preparation_is_compared(tmp_path, published, options, is_named):
    defaults = {"name": "squash_eval"}
    if options.get("name") != "dvml_eval":
        defaults |= {"filter": "bicubic"}
    for path in published:
        run = prepared(tmp_path, path, defaults | options)
        assert bool(run.input_note) == is_named
