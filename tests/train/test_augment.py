"""Operations on a device: the draws of the host form, and pixels that are almost equal."""

import functools
import inspect

import jax
import numpy as np
import pytest

from dmljax.data import features, transforms
from dmljax.data.transforms.operations import OPERATIONS
from dmljax.data.transforms.transform import Transform, bind
from dmljax.train import augment

SIZES = [(40, 52, 3), (48, 40, 3), (40, 40, 3)]


def mine(*, size=24):
    """A recipe of a user: it cuts what it has resized, and resizes a second time."""
    box = [transforms.random_resized_crop(size=28), transforms.resize_shorter_side(size=30)]
    return [*box, transforms.random_crop(size=size), transforms.random_flip()]


VARIANTS = {
    "mine": (mine, {}),
    "colors": (transforms.standard_train, {"color": 0.4}),
    "two resizes": (transforms.standard_train, {"shorter": 30}),
    "hue": (transforms.color_jitter, {"hue": 0.5}),
    "bicubic": (transforms.standard_train, {"filter": "bicubic"}),
    "fast": (transforms.standard_train, {"antialias": False}),
    "shrunk": (transforms.squash_eval, {"size": 9}),
    "enlarged": (transforms.squash_eval, {"size": 97}),
    "sizes stay": (transforms.random_flip, {}),
    "nearest": (transforms.distort, {"outside": "nearest", "noise": 0}),
}
CASES = {name: (getattr(transforms, name), {}) for name in transforms.__all__} | VARIANTS
# Pillow rounds hue and saturation to 256 levels.
LARGEST = dict.fromkeys(("color_jitter", "colors", "hue"), 16)


def _photo(shape, seed):
    """Smooth colors with little noise."""
    rng = np.random.default_rng(seed)
    corners = rng.integers(0, 256, (4, 5, shape[2]), np.uint8)
    resize = transforms.resize(height=shape[0], width=shape[1], filter="bicubic")
    noisy = resize(corners, rng) + rng.normal(size=shape) * 6
    return np.clip(noisy, 0, 255).astype(np.uint8)


def _both_forms(transform, images, **options):
    """The images after the host form, and after the form of devices."""
    program = augment.program(transform, [x.shape for x in images])
    canvas = np.full((len(images), *program.bounds[0]), 99, images[0].dtype)
    for row, image in zip(canvas, images, strict=True):
        row[tuple(map(slice, image.shape))] = image
    draws = [transform.draws(x.shape, np.random.default_rng(i)) for i, x in enumerate(images)]
    numbers = np.array([sum(x, ()) for x in draws], np.float32)
    apply_fn = jax.jit(functools.partial(augment.apply, program, **options))
    expected = [transform(x, np.random.default_rng(i)) for i, x in enumerate(images)]
    return np.stack(expected), np.asarray(apply_fn(canvas, numbers))


def _bound(name):
    function, options = CASES[name]
    is_sized = "size" in inspect.signature(function).parameters
    return bind(function, **{"size": 24} | options if is_sized else options)


@pytest.mark.parametrize("name", CASES)
def test_pixels_are_almost_those_of_the_host(name):
    transform = _bound(name)
    sizes = SIZES if len({transform.shapes(shape)[-1] for shape in SIZES}) == 1 else SIZES[2:]
    if name in ("distort", "glyphs_train", "nearest"):
        sizes = SIZES[2:]
    images = [_photo(sizes[i % len(sizes)], i) for i in range(24)]
    expected, actual = (x.astype(int) for x in _both_forms(transform, images))
    noise = max((getattr(x, "noise", 0) for x in transform.operations), default=0)
    if noise:  # each form has its own
        images = [np.full_like(images[0], 128)] * 200
        expected, actual = _both_forms(transform, images)
        assert abs(expected.mean() - actual.mean()) < 0.1
        assert actual.std() == pytest.approx(noise, rel=0.01)
        assert abs(np.corrcoef(expected.ravel(), actual.ravel())[0, 1]) < 0.01
        return
    difference = np.abs(actual - expected)
    assert difference.max() <= LARGEST.get(name, 3) and difference.mean() < 0.7
    assert abs((actual - expected).mean()) < 0.3, "darker or brighter on average"


def test_accelerators_transform_several_images_at_a_time():
    images = [_photo(SIZES[i % 3], i) for i in range(24)]
    for name in ("colors", "graph_train", "abe_train"):
        _, one = _both_forms(_bound(name), images)
        _, several = _both_forms(_bound(name), images, together=7)
        assert np.abs(one.astype(int) - several).max() <= 1


def test_resizing_to_the_same_size_is_left_out():
    transform = bind(transforms.dvml_train, size=24)
    for shapes, changes in ((SIZES, True), ([(24, 24, 3)], False)):
        assert augment.program(transform, shapes).changes == (changes, True, True)


def test_views_of_cached_features():
    images = [np.random.default_rng(i).normal(size=(5, 8)).astype(np.float32) for i in range(9)]
    for transform in features.transforms_of(Transform(), Transform(), views=4):
        np.testing.assert_array_equal(*_both_forms(transform, images))


def test_every_operation_of_training_has_a_form_for_devices():
    assert augment.OPERATIONS.keys() <= OPERATIONS.keys()
    assert {name for name, x in OPERATIONS.items() if x.is_random} <= augment.OPERATIONS.keys()
    for name in transforms.__all__:
        if name.endswith("_train"):
            augment.program(bind(getattr(transforms, name)), [(256, 256, 3)])


def rolled(image, rng):
    """A function of a user."""
    return np.roll(image, 1, axis=1)


def with_rolled():
    return [transforms.resize(height=24, width=24), rolled]


@pytest.mark.parametrize("transform_fn", [rolled, with_rolled])
def test_a_function_of_pixels_is_refused_with_its_name(transform_fn):
    text = f"transform {transform_fn.__name__} .*host computes .*rolled.*runtime.data=host"
    with pytest.raises(augment.NoDeviceForm, match=text) as refused:
        augment.program(bind(transform_fn), SIZES)
    assert "\n" not in str(refused.value)


def test_images_of_several_sizes_are_refused():
    with pytest.raises(ValueError, match="choose a transform that returns images of one size"):
        augment.program(bind(transforms.unchanged), SIZES)

    def distorted_first():
        return [transforms.distort(), transforms.resize(height=8, width=8)]

    with pytest.raises(augment.NoDeviceForm, match="distort gets images of several sizes"):
        augment.program(bind(distorted_first), SIZES)
