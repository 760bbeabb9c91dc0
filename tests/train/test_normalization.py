"""A run normalizes images as its weights expect, else as its net expects, else as ImageNet."""

import pathlib
import sys

import numpy as np
import pytest
from system import tiny

from dmljax import nets, recipes, weights
from dmljax.config.build import build
from dmljax.weights import preprocessing

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "weights"))
from published_layouts import resnet_tensors, write_torch

SMALL = {"blocks": [1, 1, 1, 1], "width": 4}


def normalization(folder, normalize, **net):
    config = tiny(folder, normalize=normalize, net=net)
    config["transform"] = config["eval_transform"] = {"name": "standard_eval", "size": 32}
    return build(config).config["normalize"]


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


@pytest.mark.parametrize("net, expected", [("bn_inception", "caffe_bn"), ("resnet18", "imagenet")])
def test_another_net_in_a_recipe_brings_its_normalization(tmp_path, net, expected):
    config = recipes.proxy_anchor(dataset="cars196")
    small = tiny(tmp_path, net=net, transform={"name": "standard_eval", "size": 64})
    fields = ("dataset", "sampler", "net", "transform", "evaluate", "steps")
    config |= {name: small[name] for name in fields} | {"eval_transform": small["transform"]}
    config["optimizer"] = config["optimizer"] | {"groups": []}
    assert build(config).config["normalize"] == expected


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


def test_equal_numbers_under_another_name_are_no_contradiction(tmp_path, file):
    same = {"name": "rgb", "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
    assert normalization(tmp_path, same, name="resnet18", weights=file, **SMALL) == same


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
    np.testing.assert_allclose(run.normalize_fn(images), preprocessing.caffe(images), rtol=1e-6)
    # The saved config opens again.
    assert build(run.config).config["normalize"] == forced
