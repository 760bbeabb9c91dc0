"""The normalization of a run is that of its weights, else that of its net, else ImageNet's."""

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


def test_a_contradiction_that_is_insisted_on_holds(tmp_path, file):
    forced = {"name": "caffe", "force": True}
    config = tiny(tmp_path, normalize=forced, net={"name": "resnet18", "weights": file, **SMALL})
    config["transform"] = config["eval_transform"] = {"name": "standard_eval", "size": 32}
    run = build(config)
    images = np.full((1, 2, 2, 3), 100, np.uint8)
    np.testing.assert_allclose(run.normalize_fn(images), preprocessing.caffe(images), rtol=1e-6)
    # The saved config opens again.
    assert build(run.config).config["normalize"] == forced
