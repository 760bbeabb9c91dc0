"""Normalizations are those that published weights were trained with."""

import numpy as np
import pytest

from dmljax.config import registry
from dmljax.nets import normalizations

IMAGES = np.random.default_rng(0).integers(0, 256, (2, 5, 6, 3), np.uint8)


LITE = {"name": "rgb", "mean": [0.498, 0.4, 0.3], "std": [0.502, 0.5, 0.4]}


@pytest.mark.parametrize("spec", [*normalizations.INPUTS, LITE], ids=str)
def test_a_normalization_computes_what_its_metadata_describes(spec):
    inputs, normalize_fn = normalizations.inputs(spec), registry.resolve("normalization", spec)
    images = IMAGES[..., ::-1] if inputs["channels"] == "BGR" else IMAGES
    images = images / (255 / inputs["range"][1])
    expected = (images - np.array(inputs["mean"])) / np.array(inputs["std"])
    for array in (IMAGES, pytest.importorskip("jax.numpy").asarray(IMAGES)):
        result = normalize_fn(array)
        assert result.dtype == np.float32
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-4)


def test_normalizations_have_the_published_constants():
    images = normalizations.imagenet(IMAGES)
    golden = (IMAGES / 255.0 - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    np.testing.assert_allclose(images, golden, atol=1e-5)
    caffe = normalizations.caffe(IMAGES)
    np.testing.assert_allclose(caffe, IMAGES[..., ::-1] - np.array([104.0, 117, 123]), atol=1e-4)
    np.testing.assert_allclose(normalizations.caffe_bn(IMAGES) - caffe + [0, 0, 5], 0, atol=1e-4)
    np.testing.assert_allclose(normalizations.unit(IMAGES), IMAGES / 255, atol=1e-6)


def test_the_deviation_of_red_can_be_that_of_the_graph_code():
    images, typo = normalizations.imagenet(IMAGES), normalizations.imagenet(IMAGES, red_std=0.299)
    np.testing.assert_allclose(typo[..., 0] * 0.299, images[..., 0] * 0.229, atol=1e-5)
    np.testing.assert_array_equal(typo[..., 1:], images[..., 1:])


def test_numbers_of_another_range_are_refused():
    with pytest.raises(ValueError, match=r"three numbers each, of RGB from 0 to 1, not \[127"):
        normalizations.rgb(IMAGES, mean=[127, 127, 127], std=[128, 128, 128])
    with pytest.raises(ValueError, match="three numbers each"):
        normalizations.rgb(IMAGES, mean=[0.5], std=[0.5])
    assert normalizations.inputs("my_module:mine") is None
