"""The named operations of a bundle give the pixels of the evaluation, bit for bit."""

import functools
import inspect
import io
import json

import numpy as np
import pytest
from PIL import Image

from dmljax.bundle import BadBundle, BadImage, parity, preprocessing
from dmljax.data import pipeline, transforms
from dmljax.data.splits import Split
from dmljax.data.transforms.transform import bind

RNG = np.random.default_rng(0)
DETERMINISTIC = {name for name in transforms.__all__ if "train" not in name}
DETERMINISTIC -= {"color_jitter", "distort"} | {n for n in transforms.__all__ if "random" in n}
OPTIONS = {
    "standard_eval": [
        {},
        {"size": 40, "shorter": 50},
        {"size": 40, "antialias": False},
        {"filter": "bicubic"},
    ],
    "graph_eval": [{"size": 30, "shorter": 41}, {"size": 64}],
    "small_eval": [{}, {"size": 33}],
    "pad_to_square": [{"size": 50}, {"size": 50, "fill": 128}],
    "resize_shorter_side": [{"size": 50}, {"size": 50, "filter": "bicubic"}],
    "resize": [{"height": 60, "width": 60, "antialias": False}, {"height": 50, "width": 40}],
    "crop": [{"size": 30, "top": 5, "left": 2}],
    "squash_eval": [{"size": 50}, {"size": 50, "filter": "bicubic"}],
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
    sizes = (
        [(60, 60)]
        if name in ("resize_shorter_side", "unchanged")
        else [(60, 91), (77, 52), (60, 60)]
    )
    for options in OPTIONS[name]:
        for h, w in sizes:
            image = RNG.integers(0, 256, (h, w, channels), np.uint8)
            expected = bind(getattr(transforms, name), **options)(image, RNG)
            spec = {"name": name, **options}
            made = preprocessing.from_transform(spec, expected.shape)
            np.testing.assert_array_equal(made(image), expected)
            parsed = preprocessing.parse(json.loads(json.dumps(made.to_json())))
            assert parsed == made


SCALED = [
    {"name": "standard_eval", "size": 40, "shorter": 50},
    {"name": "standard_eval", "size": 64, "filter": "bicubic"},
    {"name": "squash_eval", "size": 48},
]


@pytest.mark.parametrize("spec", SCALED)
def test_large_jpegs_are_decoded_as_in_the_evaluation(spec, tmp_path):
    picture = Image.fromarray(RNG.integers(0, 256, (450, 600, 3), np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6
    picture.save(tmp_path / "a.jpg", exif=exif)
    split = Split([tmp_path / "a.jpg"], np.zeros(1, np.int32), ("a",))
    size, pixels = spec["size"], {}
    options = {k: v for k, v in spec.items() if k != "name"}
    for scaled in (False, True):
        transform_fn = functools.partial(
            getattr(transforms, spec["name"]), **options, scaled_decode=scaled
        )
        with pipeline.evaluation(split, transform_fn=transform_fn, batch_size=1) as batches:
            (expected,) = next(batches)["images"]
        made = preprocessing.from_transform(spec | {"scaled_decode": scaled}, (size, size, 3))
        parsed = preprocessing.parse(json.loads(json.dumps(made.to_json())))
        assert parsed == made
        pixels[scaled] = preprocessing.prepare(tmp_path / "a.jpg", parsed)
        np.testing.assert_array_equal(pixels[scaled], expected)
        decoded = [Image.open(io.BytesIO(x)) for x in parity.encoded(made)]
        assert any(min(x.size) >= 4 * size for x in decoded) == scaled
    assert (pixels[True] != pixels[False]).any()
    # A program that does not know the field would decode other pixels, so it has to refuse it.
    assert made.to_json()["operations"][0]["scaled_decode"] is True


def test_defaults_are_those_of_the_transform():
    spec = preprocessing.from_transform("standard_eval", (224, 224, 3))
    size = inspect.signature(transforms.standard_eval).parameters["size"].default
    assert [operation.size for operation in spec.operations] == [256, size]


def test_code_and_random_transforms_are_refused():
    for name in ("my_module:crop", "standard_train", "random_crop"):
        with pytest.raises(ValueError, match="no code and draws nothing: choose"):
            preprocessing.from_transform(name, (8, 8, 3))
    with pytest.raises(ValueError, match="not for 4 channels"):
        preprocessing.from_transform("unchanged", (8, 8, 4))


def test_channels_are_converted_as_training_data_has_them():
    gray = RNG.integers(0, 256, (8, 8), np.uint8)
    to_rgb = preprocessing.from_transform("unchanged", (8, 8, 3))
    to_gray = preprocessing.from_transform("unchanged", (8, 8, 1))
    np.testing.assert_array_equal(to_rgb(gray), np.repeat(gray[:, :, None], 3, axis=2))
    np.testing.assert_array_equal(to_gray(to_rgb(gray)), gray[:, :, None])


_CROP = {"name": "center_crop", "size": 9}
_RESIZE = {"name": "resize_shorter_side", "size": 9, "antialias": False}
_SCALED = {"name": "resize_shorter_side", "size": 9, "antialias": True, "scaled_decode": True}


def _changed(**fields):
    return preprocessing.from_transform("abe_eval", (224, 224, 3)).to_json() | fields


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"height": 0}, "height must be a number from 1 to 20000, got 0"),
        ({"channels": 4}, "channels must be 1 or 3, got 4"),
        ({"operations": [{"name": "eval", "code": "1"}]}, "'eval' is not an operation"),
        ({"operations": [{"name": "random_flip"}]}, "'random_flip' is not an operation"),
        ({"operations": [{"name": {}}]}, "{} is not an operation"),
        (
            {"operations": [_CROP | {"size": True}]},
            "center_crop.size must be a whole number, got True",
        ),
        ({"operations": [_RESIZE | {"filter": "box"}]}, "'bilinear' or 'bicubic', got 'box'"),
        ({"operations": [_RESIZE | {"filter": "bicubic"}]}, "needs filter='bilinear'"),
        ({"operations": [_CROP | {"filter": "bicubic"}]}, "has no field .filter"),
        (
            {"operations": [_SCALED | {"scaled_decode": 1}]},
            "scaled_decode must be True or False, got 1",
        ),
        ({"operations": "center_crop"}, "operations must be a list"),
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
    resize = preprocessing.from_transform({"name": "resize_shorter_side", "size": 8}, (8, 8, 3))
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
