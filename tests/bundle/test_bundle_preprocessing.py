"""The named operations of a bundle give the pixels of the evaluation, bit for bit."""

import inspect
import json

import numpy as np
import pytest

from dmljax.bundle import BadBundle, BadImage, preprocessing
from dmljax.data import transforms

RNG = np.random.default_rng(0)
DETERMINISTIC = {"center_crop", "pad", "resize", "squash", "unchanged"}
DETERMINISTIC |= {name for name in transforms.__all__ if name.endswith("_eval")}
OPTIONS = {
    "standard_eval": [{}, {"size": 40, "shorter": 50}, {"size": 40, "antialias": False}],
    "graph_eval": [{"size": 30, "shorter": 41}, {"size": 64}],
    "small_eval": [{}, {"size": 33}],
    "pad": [{"size": 50}, {"size": 50, "fill": 128}],
    "resize": [{"size": 50}],
    "squash": [{"size": 60}],
    "center_crop": [{"size": 48}],
    "abe_eval": [{}, {"size": 64}],
    "dvml_eval": [{}, {"size": 64}],
    "unchanged": [{}],
}


def test_every_transform_of_an_evaluation_has_operations():
    assert set(OPTIONS) == DETERMINISTIC


@pytest.mark.parametrize("name", sorted(OPTIONS))
@pytest.mark.parametrize("channels", [1, 3])
def test_pixels_are_those_of_the_transform(name, channels):
    transform = getattr(transforms, name)
    sizes = [(60, 60)] if name in ("resize", "unchanged") else [(60, 91), (77, 52), (60, 60)]
    for options in OPTIONS[name]:
        for h, w in sizes:
            image = RNG.integers(0, 256, (h, w, channels), np.uint8)
            expected = transform(image, RNG, **options)
            spec = {"name": name, **options}
            made = preprocessing.from_transform(spec, expected.shape)
            np.testing.assert_array_equal(made(image), expected)
            parsed = preprocessing.parse(json.loads(json.dumps(made.to_json())))
            assert parsed == made


def test_defaults_are_those_of_the_transform():
    spec = preprocessing.from_transform("standard_eval", (224, 224, 3))
    size = inspect.signature(transforms.standard_eval).parameters["size"].default
    assert [operation["size"] for operation in spec.operations] == [256, size]


def test_code_and_random_transforms_are_refused():
    for name in ("my_module:crop", "standard_train", "random_crop"):
        with pytest.raises(ValueError, match="holds no code: choose one of abe_eval"):
            preprocessing.from_transform(name, (8, 8, 3))
    with pytest.raises(ValueError, match="not for 4 channels"):
        preprocessing.from_transform("unchanged", (8, 8, 4))


def test_channels_are_converted_as_training_data_has_them():
    gray = RNG.integers(0, 256, (8, 8), np.uint8)
    to_rgb = preprocessing.from_transform("unchanged", (8, 8, 3))
    to_gray = preprocessing.from_transform("unchanged", (8, 8, 1))
    np.testing.assert_array_equal(to_rgb(gray), np.repeat(gray[:, :, None], 3, axis=2))
    np.testing.assert_array_equal(to_gray(to_rgb(gray)), gray[:, :, None])


def _changed(**fields):
    data = preprocessing.from_transform("abe_eval", (224, 224, 3)).to_json()
    return json.loads(json.dumps(data)) | fields


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"format": 2}, "reads format 1"),
        ({"input": {"height": 0, "width": 8, "channels": 3}}, "height must be 1 to 20000, not 0"),
        ({"input": {"height": 8, "width": 8, "channels": 4, "dtype": "uint8"}}, "1 or 3 channels"),
        ({"operations": [{"name": "eval", "code": "1"}]}, "there is no operation 'eval'"),
        ({"operations": [{"name": "center_crop"}]}, "center_crop takes size"),
        ({"operations": [{"name": "center_crop", "size": 1, "x": 1}]}, "center_crop takes size"),
        ({"operations": [{"name": "center_crop", "size": -1}]}, "must be 1 to 16384, not -1"),
        ({"operations": [{"name": "center_crop", "size": True}]}, "not True"),
        ({"operations": [{"name": "pad_to_square", "size": 9, "fill": 256}]}, "must be 0 to 255"),
        (
            {"operations": [{"name": "resize_shorter_side", "size": 9, "antialias": 1}]},
            "must be true or false",
        ),
        ({"operations": [{"name": "center_crop", "size": 9}] * 17}, "a list of at most 16"),
        ({"operations": "center_crop"}, "a list of at most 16"),
    ],
)
def test_an_altered_list_is_refused(data, message):
    with pytest.raises(BadBundle, match=message):
        preprocessing.parse(_changed(**data))


def test_images_that_cannot_become_the_input_are_refused():
    crop = preprocessing.from_transform({"name": "center_crop", "size": 48}, (48, 48, 3))
    with pytest.raises(BadImage, match="a crop of 48 does not fit a 40x60 image") as raised:
        crop(np.zeros((60, 40, 3), np.uint8))
    assert raised.value.kind == "too_small" and raised.value.status == 422
    resize = preprocessing.from_transform({"name": "resize", "size": 8}, (8, 8, 3))
    with pytest.raises(BadImage, match="16 x 8 pixels becomes 16 x 8, but the net takes 8 x 8"):
        resize(np.zeros((8, 16, 3), np.uint8))
    for wrong in (
        np.zeros((8, 8, 3)),
        np.zeros((8, 8, 2), np.uint8),
        np.zeros((0, 8, 3), np.uint8),
    ):
        with pytest.raises(BadImage) as raised:
            resize(wrong)
        assert raised.value.status == 415
