"""The plan of a transform draws what the transform draws, and leaves its pixels to others."""

import functools
import inspect

import numpy as np
import pytest

from dmljax.data import transforms
from dmljax.data.transforms import plan, resampling

SIZES = [(30, 41, 3), (37, 30, 3), (32, 32, 3)]


def _image(shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def _bound(name):
    function = getattr(transforms, name)
    small = {"size": 24} if "size" in inspect.signature(function).parameters else {}
    return functools.partial(function, **small)


@pytest.mark.parametrize("name", transforms.__all__)
def test_a_plan_draws_what_the_transform_draws(name):
    transform_fn = _bound(name)
    outputs = {transform_fn(_image(shape), np.random.default_rng(0)).shape for shape in SIZES}
    sizes = SIZES if len(outputs) == 1 else SIZES[2:]
    program = plan.program(transform_fn, sizes, title=name)
    for seed in range(30):
        for shape in sizes:
            rng, other = np.random.default_rng(seed), np.random.default_rng(seed)
            image, draws = transform_fn(_image(shape), rng), program.draw(shape, other)
            assert image.shape == program.bounds[-1]
            assert rng.random() == other.random()
            assert len(draws.scalars) == sum(scalars for scalars, _ in program.layouts)
            assert np.isfinite(draws.scalars).all()


def test_steps_that_change_nothing_are_left_out():
    transform_fn = functools.partial(transforms.standard_train, size=24, shorter=32)
    programs = [
        plan.program(transform_fn, [shape], title="x") for shape in ((32, 40, 3), (33, 40, 3))
    ]
    names = [[step.name for step in program.steps] for program in programs]
    assert names == [["cut", "scale", "mirror"], ["scale", "cut", "scale", "mirror"]]
    # Also if the first box that is drawn has the size.
    box_fn = functools.partial(transforms.random_resized_crop, ratio=(1.0, 1.0))
    first = box_fn(plan.Plan((32, 40, 3)), np.random.default_rng(0), size=24)
    box_fn = functools.partial(box_fn, size=first.shapes[1][0])
    steps = plan.program(box_fn, [(32, 40, 3)], title="x").steps
    assert [step.name for step in steps] == ["cut", "scale"]
    # A box has any side, up to that of its image.
    assert programs[0].resizings[1] == {(side, 24) for side in range(1, 41)}


def _rolled(image, rng):
    return np.roll(image, 1, axis=1)


def _every_second(image, rng):
    return image[::2]


def _sometimes(image, rng):
    return transforms.random_flip(image, rng) if rng.random() < 0.5 else image


def _any_size(image, rng):
    return transforms.resize(image, rng, size=int(rng.integers(8, 30)))[:8, :8]


def _mirrors_tall_images(image, rng):
    small = transforms.squash(image, rng, size=24)
    return transforms.random_flip(small, rng) if len(image) > 35 else small


def test_steps_that_depend_on_the_size_of_an_image_are_refused():
    with pytest.raises(plan.NoDeviceForm, match="steps depend on the size of an image"):
        plan.program(_mirrors_tall_images, SIZES, title="x")


@pytest.mark.parametrize("transform_fn", [_rolled, _every_second])
def test_a_transform_that_reads_pixels_is_refused_with_its_name(transform_fn):
    name = transform_fn.__name__
    with pytest.raises(plan.NoDeviceForm, match=f"transform {name} .*runtime.data=host") as refused:
        plan.program(transform_fn, SIZES, title=name)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("transform_fn", [_sometimes, _any_size])
def test_steps_that_depend_on_a_draw_are_refused(transform_fn):
    program = plan.program(transform_fn, SIZES[:1], title="mine")
    with pytest.raises(plan.NoDeviceForm, match=r"mine .*depend on what it draws"):
        for seed in range(20):
            program.draw(SIZES[0], np.random.default_rng(seed))


def test_images_of_several_sizes_need_a_transform_that_makes_one_of_them():
    with pytest.raises(ValueError, match="choose a transform that returns images of one size"):
        plan.program(transforms.unchanged, SIZES, title="unchanged")
    with pytest.raises(plan.NoDeviceForm, match="'mirror' gets images of several sizes"):
        plan.program(_flip_first, SIZES, title="mine")


def _flip_first(image, rng):
    return transforms.squash(transforms.random_flip(image, rng), rng, size=8)


@pytest.mark.parametrize("filter", ["bilinear", "bicubic"])
def test_on_one_axis_the_weights_are_those_of_pillow(filter):
    for length in [*range(1, 80, 3), 255, 256, 700]:
        for target in (1, 24, 57):
            image = _image((length, 5, 3), seed=length)
            taps = resampling.taps(length, target, filter=filter)
            places = taps.starts[:, None] + np.arange(taps.weights.shape[1])
            pixels = image[np.minimum(places, length - 1)].astype(np.int64)
            total = (pixels * taps.weights[:, :, None, None]).sum(axis=1)
            expected = resampling.scale(image, target, 5, filter=filter)
            actual = np.clip((total + (1 << (taps.bits - 1))) >> taps.bits, 0, 255)
            np.testing.assert_array_equal(actual, expected)
