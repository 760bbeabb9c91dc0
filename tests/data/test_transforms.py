"""Transforms against their definitions and distributions."""

import functools
import inspect
import itertools
import json
import math
import pickle

import numpy as np
import pytest
from PIL import Image

from dmljax.config import registry
from dmljax.data import transforms
from dmljax.data.transforms import resampling, transform
from dmljax.data.transforms.recipes import shorter_of
from dmljax.nets import normalizations


def _image(h=30, w=40, c=3, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (h, w, c), np.uint8)


def _rng(seed=0):
    return np.random.default_rng(seed)


def call(transform_fn, image, rng, **options):
    return transform.bind(transform_fn, **options)(image, rng)


def _positions(h, w):
    """An image whose pixels are their own positions: (row, column, 0)."""
    rows, columns = np.mgrid[:h, :w]
    return np.stack([rows, columns, 0 * rows], axis=-1).astype(np.uint8)


@pytest.mark.parametrize("name", transforms.__all__)
def test_every_transform_is_pure_and_named(name):
    function = registry.resolve("transform", name)
    parameters = inspect.signature(function).parameters.values()
    assert all(p.kind is p.KEYWORD_ONLY and p.default is not p.empty for p in parameters)
    bound, image = transform.bind(function), _image(300, 260)
    before = image.copy()
    output, repeated = bound(image, _rng(1)), bound(image, _rng(1))
    assert (image == before).all(), "the input has changed"
    assert output.dtype == np.uint8 and (output == repeated).all()
    assert output.shape == bound.shapes(image.shape)[-1]
    is_random = (bound(image, _rng(2)) != output).any()
    assert is_random == any(operation.is_random for operation in bound.operations)
    # Exactly what a device gets: the draws, and only then a seed in place of the noise.
    rng, other = _rng(3), _rng(3)
    bound(image, rng)
    draws = bound.draws(image.shape, other)
    assert len(draws) == len(bound.operations) + 1
    if not any(getattr(operation, "noise", 0) for operation in bound.operations):
        rng.integers(1 << 24)
        assert rng.random() == other.random()
    # JSON and pickle give the same operations.
    again = transform.Transform(tuple(transform.of_json(json.loads(json.dumps(bound.to_json())))))
    assert again.to_json() == bound.to_json() and pickle.loads(pickle.dumps(bound)) == bound
    assert (again(image, _rng(1)) == output).all()


def rolled(image, rng, *, most=3):
    """A function of a user."""
    return np.roll(image, int(rng.integers(1, most)), axis=1)


def own_train(*, size=20):
    """A recipe of a user, with a function among the operations."""
    return [transforms.resize(height=size, width=size), rolled, transforms.random_flip()]


def test_functions_and_recipes_of_a_user():
    image = _image()
    bound = transform.bind(rolled, most=5)
    assert (bound(image, _rng(7)) == rolled(image, _rng(7), most=5)).all()
    assert bound.to_json() == [{"name": f"{__name__}:rolled", "most": 5}]
    assert bound.title == "rolled(most=5)" and bound.batch is None and bound.least_side is None
    recipe, rng = transform.bind(own_train, size=24), _rng(7)
    small = transforms.resize(height=24, width=24)(image, rng)
    expected = transforms.random_flip()(rolled(small, rng), rng)
    assert (recipe(image, _rng(7)) == expected).all()
    assert recipe.title == "own_train(size=24)"
    assert recipe.to_json()[1] == {"name": f"{__name__}:rolled", "most": 3}


SIZES = {"graph": 227, "dvml": 227, "abe": 224, "small": 64, "standard": 224}


@pytest.mark.parametrize("name, size", [*SIZES.items(), ("squash", 224)])
@pytest.mark.parametrize("shape", [(375, 500), (20, 700), (64, 64), (1, 1)])
def test_recipes_return_the_published_size_for_any_input(name, size, shape):
    for kind in ("eval",) if name == "squash" else ("eval", "train"):
        image = call(getattr(transforms, f"{name}_{kind}"), _image(*shape), _rng())
        assert image.shape == (size, size, 3)


@pytest.mark.parametrize("name", SIZES)
def test_transforms_of_a_small_size_see_the_whole_image(name):
    """A frame of a tenth of the sides is in every evaluated image, and in most training crops."""
    photograph = np.zeros((480, 480, 3), np.uint8)
    photograph[:48] = photograph[-48:] = photograph[:, :48] = photograph[:, -48:] = 255
    image = call(getattr(transforms, f"{name}_eval"), photograph, _rng(), size=64)
    border = np.concatenate([image[0], image[-1], image[:, 0], image[:, -1]])
    assert image.shape == (64, 64, 3) and (border > 200).all() and (image[16:48, 16:48] == 0).all()
    crops = [
        call(getattr(transforms, f"{name}_train"), photograph, _rng(i), size=64) for i in range(20)
    ]
    assert sum((crop == 255).all(axis=2).any() for crop in crops) > 10


def test_recipes_are_their_lists():
    t, options = transforms, {"filter": "bicubic", "antialias": True}
    amounts = {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.1}
    area = (0.9, 1.0)
    assert t.standard_train(size=32, shorter=40, area=area, flip=1.0, color=0.4, **options) == [
        t.resize_shorter_side(size=40, **options),
        t.random_resized_crop(size=32, area=area, **options),
        t.random_flip(probability=1.0),
        t.color_jitter(**amounts),
    ]
    assert t.standard_train(size=32) == [t.random_resized_crop(size=32), t.random_flip()]
    for size in (224, 227):  # 256 for both; a side that a config gives is used
        sides = [t.resize_shorter_side(size=256), t.center_crop(size=size)]
        assert t.standard_eval(size=size) == t.graph_eval(size=size) == sides
    assert t.standard_eval(size=64, shorter=99)[0].size == 99
    assert all(shorter_of(size) >= size for size in range(1, 300))
    for wrong in ({"flip": 1.5}, {"color": -0.1}):
        with pytest.raises(ValueError, match="must be between 0 and 1"):
            t.standard_train(**wrong)


@pytest.mark.parametrize(
    "before, after", [((375, 500), (256, 341)), ((500, 375), (341, 256)), ((333, 500), (256, 384))]
)
def test_the_longer_side_is_rounded_as_by_torchvision(before, after):
    assert transforms.resize_shorter_side(size=256).shape((*before, 3)) == (*after, 3)


@pytest.mark.parametrize("filter", ["bilinear", "bicubic"])
@pytest.mark.parametrize("channels", [1, 3])
def test_filters_are_those_of_pillow(filter, channels):
    """Every transform with a filter, when it enlarges and when it shrinks."""
    image = _image(75, 100, channels)
    method = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}[filter]

    def pillow(pixels, width, height):
        resized = Image.fromarray(pixels.squeeze()).resize((width, height), method)
        return np.asarray(resized).reshape(height, width, channels)

    resizing = {"filter": filter}
    for size in (30, 120):
        shorter, squashed = pillow(image, size * 4 // 3, size), pillow(image, size, size)
        left = round((size * 4 // 3 - size) / 2)
        for transform_fn, options, expected in (
            (transforms.resize_shorter_side, {"size": size}, shorter),
            (transforms.resize, {"height": size, "width": size}, squashed),
            (transforms.squash_eval, {"size": size}, squashed),
            (
                transforms.standard_eval,
                {"size": size, "shorter": size},
                shorter[:, left : left + size],
            ),
        ):
            output = call(transform_fn, image, _rng(), **options, **resizing)
            np.testing.assert_array_equal(output, expected)
        crop = transforms.random_resized_crop(size=size, area=(1, 1), **resizing)
        expected = pillow(image[:, :75], size, size)
        np.testing.assert_array_equal(crop(image[:, :75], _rng()), expected)


def test_filters_that_do_not_exist_are_refused():
    with pytest.raises(ValueError, match="`filter` must be 'bilinear' or 'bicubic', got 'lanczos'"):
        call(transforms.resize_shorter_side, _image(), _rng(), filter="lanczos")
    with pytest.raises(ValueError, match="needs filter='bilinear'"):
        call(transforms.standard_eval, _image(), _rng(), antialias=False, filter="bicubic")
    with pytest.raises(ValueError, match="'median' or 'nearest', got 'edge'"):
        call(transforms.distort, _image(), _rng(), outside="edge")


def test_crops_have_the_offsets_of_their_systems():
    image = _positions(256, 256)
    # torchvision rounds 14.5 to 14; DVML's offset is 15 of 29.
    assert call(transforms.center_crop, image, _rng(), size=227)[0, 0].tolist() == [14, 14, 0]
    assert call(transforms.dvml_eval, image, _rng())[0, 0].tolist() == [15, 15, 0]
    assert call(transforms.abe_eval, image, _rng())[0, 0].tolist() == [16, 16, 0]
    rng = _rng()
    corners = np.array(
        [call(transforms.random_crop, image, rng, size=227)[0, 0] for _ in range(2000)]
    )
    for axis in (0, 1):
        assert set(corners[:, axis].tolist()) == set(range(30))
    assert abs(np.corrcoef(corners[:, 0], corners[:, 1])[0, 1]) < 0.1
    with pytest.raises(ValueError, match="crop of 227 does not fit a 40x30 image: resize"):
        call(transforms.center_crop, _image(), _rng())


def test_random_resized_crop_draws_area_and_ratio_as_published():
    h, w, rng, crop = 250, 250, _rng(), transforms.random_resized_crop(size=250)
    boxes = np.array([crop.draw((h, w, 3), rng) for _ in range(3000)])
    top, left, height, width = boxes.T
    assert (boxes >= 0).all() and (top + height <= h).all() and (left + width <= w).all()
    areas, ratios = height * width / (h * w), np.log(width / height)
    assert 0.06 < areas.min() < 0.12 and areas.max() > 0.9
    assert abs(ratios.mean()) < 0.02  # log-uniform, so even around square
    assert ratios.std() == pytest.approx(math.log(4 / 3) / math.sqrt(3), rel=0.12)
    # Large boxes are rejected more often; below half of the area, the distribution is uniform.
    histogram = np.histogram(areas[areas < 0.5], bins=4, range=(0.08, 0.5))[0]
    assert histogram.max() < 1.35 * histogram.min()
    # The corners of a cropped image of positions show the box.
    out, rng = crop(_positions(h, w), _rng()).astype(int), _rng()
    top, left, height, width = crop.draw((h, w, 3), rng)
    assert np.abs(out[0, 0, :2] - (top, left)).max() <= 1
    assert np.abs(out[-1, -1, :2] - (top + height - 1, left + width - 1)).max() <= 1


@pytest.mark.parametrize("shape, axis", [((10, 200), 1), ((200, 10), 0)])
def test_random_resized_crop_falls_back_to_a_central_box(shape, axis):
    crop = transforms.random_resized_crop(size=10, area=(1.0, 1.0))
    positions = crop(_positions(*shape), _rng())[:, :, axis]
    assert positions.min() >= 92 and positions.max() <= 107  # 13 long, ratio 4/3


def test_flip_has_its_probability_and_is_exact():
    image, rng = _positions(3, 7), _rng()
    flips = [call(transforms.random_flip, image, rng)[0, 0, 1] for _ in range(2000)]
    assert set(flips) == {0, 6} and 900 < sum(f == 6 for f in flips) < 1100
    flipped = call(transforms.random_flip, image, rng, probability=1.0)
    assert (flipped == image[:, ::-1]).all()


def _bilinear(image, height, width):
    """Bilinear by definition: each pixel from the four around its center."""
    h, w, c = image.shape
    out = np.zeros((height, width, c))
    for y, x in itertools.product(range(height), range(width)):
        v = min(max((y + 0.5) * h / height - 0.5, 0), h - 1)
        u = min(max((x + 0.5) * w / width - 0.5, 0), w - 1)
        for r, q in itertools.product((int(v), int(v) + 1), (int(u), int(u) + 1)):
            share = (1 - abs(v - r)) * (1 - abs(u - q))
            out[y, x] += share * image[min(r, h - 1), min(q, w - 1)]
    return out


@pytest.mark.parametrize("opencv", [False, True])
@pytest.mark.parametrize("sides", [(20, 31), (5, 4), (1, 1), (16, 16), (1, 40)])
def test_without_antialiasing_pixels_are_interpolated_from_four(monkeypatch, opencv, sides):
    if not opencv:
        monkeypatch.setattr(resampling, "cv2", None)
    elif resampling.cv2 is None:
        pytest.skip("OpenCV (the extra 'fast') is not installed")
    for channels in (1, 3):
        image = _image(*sides)[:, :, :channels]
        out = transforms.resize(height=16, width=16, antialias=False)(image, _rng())
        assert out.shape == (16, 16, channels) and out.dtype == np.uint8
        assert np.abs(out - _bilinear(image, 16, 16)).max() <= 1.5


def test_without_antialiasing_pixels_do_not_depend_on_opencv(monkeypatch):
    if resampling.cv2 is None:
        pytest.skip("OpenCV (the extra 'fast') is not installed")
    recipe = transform.bind(transforms.standard_train, size=65, antialias=False)
    images = [_image(h, w) for h, w in ((375, 500), (70, 90), (65, 65), (30, 300))]
    images.append(images[0][:, :, :1])
    fast = [recipe(image, _rng(i)) for i, image in enumerate(images)]
    monkeypatch.setattr(resampling, "cv2", None)
    for i, image in enumerate(images):
        np.testing.assert_array_equal(recipe(image, _rng(i)), fast[i])


def test_pad_keeps_the_aspect_ratio_and_centers_the_image():
    out = call(
        transforms.pad_to_square, np.full((50, 100, 3), 200, np.uint8), _rng(), size=64, fill=7
    )
    assert (out[16:48] == 200).all() and (out[:16] == 7).all() and (out[48:] == 7).all()
    assert call(transforms.pad_to_square, _image(1, 900), _rng(), size=64).shape == (64, 64, 3)


def test_color_jitter_is_bounded_and_each_change_has_an_effect():
    image = np.full((4, 4, 3), (100, 50, 25), np.uint8)
    off = dict(brightness=0.0, contrast=0.0, saturation=0.0, hue=0.0)

    def changed(image, seed=0, **amounts):
        return call(transforms.color_jitter, image, _rng(seed), **{**off, **amounts})

    assert (changed(image) == image).all()
    tall = np.concatenate([image, 255 - image])
    for part in off:
        assert len({changed(tall, s, **{part: 0.4}).tobytes() for s in range(8)}) > 4, part
    bright = [changed(image, s, brightness=0.4)[0, 0] / image[0, 0] for s in range(200)]
    assert 0.58 < np.min(bright) < 0.65 and 1.35 < np.max(bright) < 1.42
    gray = np.full((2, 2, 3), 90, np.uint8)
    assert (changed(gray, hue=0.5) == gray).all()  # gray has no hue
    with pytest.raises(ValueError, match="three channels, not 1"):
        changed(_image(c=1))


def test_random_erasing_as_the_graph_system_draws_it():
    h = w = 100
    erasing, rng = transforms.random_erasing(fill=(9, 8, 7)), _rng()
    boxes = np.array([erasing.draw((h, w, 3), rng) for _ in range(3000)])
    top, left, height, width = boxes[boxes[:, 2] > 0].T
    assert 0.46 < len(top) / 3000 < 0.54
    areas, ratios = height * width / (h * w), height / width
    assert 0.015 < areas.min() < 0.03 and 0.35 < areas.max() < 0.42
    assert ratios.min() > 0.25 and ratios.max() < 3.8
    # The ratio is uniform in 0.3..3.3: three times as many tall boxes as if it were log-uniform.
    assert np.mean(ratios > 1) > 0.7
    image, expected = np.zeros((h, w, 3), np.uint8), np.zeros((h, w, 3), np.uint8)
    expected[top[0] : top[0] + height[0], left[0] : left[0] + width[0]] = (9, 8, 7)
    for channels in (3, 1):  # grayscale uses the first value
        box = top[0], left[0], height[0], width[0]
        erased = erasing.apply(image[..., :channels], rng, *box)
        assert (erased == expected[..., :channels]).all() and not image.any()


def test_graph_train_erases_with_the_mean_of_cifar_in_normalized_units():
    for red_std in (0.229, 0.299):
        image = np.zeros((300, 300, 3), np.uint8)
        colors = set()
        for seed in range(20):
            out = call(transforms.graph_train, image, _rng(seed), red_std=red_std)
            erased = out[out.any(axis=2)]
            colors |= set(map(tuple, np.unique(erased, axis=0).tolist()))
        (color,) = colors
        batch = np.array(color, np.uint8).reshape(1, 1, 1, 3)
        value = normalizations.imagenet(batch, red_std=red_std)[0, 0, 0]
        assert np.abs(value - (0.4914, 0.4822, 0.4465)).max() < 0.5 / 255 / 0.224 + 1e-6


def test_distort_shifts_inverts_rotates_and_adds_noise():
    off = dict(rotation=0, shear=0, scale=(1, 1), shift=0, invert=0, noise=0)

    def distorted(image, seed=0, **options):
        return call(transforms.distort, image, _rng(seed), **{**off, **options})

    image, bar = np.zeros((2, 33, 33, 1), np.uint8)
    image[16, 16] = bar[16, 4:29] = 255
    assert (distorted(image) == image).all()
    assert (distorted(image, invert=1) == 255 - image).all()
    rows, columns = np.mgrid[:33, :33] - 16
    moved = distorted(image, shift=3.0).astype(float)[..., 0]
    dx, dy = _rng().uniform(-3, 3, 5)[3:]  # after angle, shear and scale
    assert (moved * columns).sum() / moved.sum() == pytest.approx(dx, abs=0.1)
    assert (moved * rows).sum() / moved.sum() == pytest.approx(dy, abs=0.1)
    grain = distorted(np.full((99, 99, 3), 128, np.uint8), noise=20)
    assert grain.std() == pytest.approx(20, rel=0.05) and abs(grain.mean() - 128) < 1
    turned = distorted(bar, seed=5, rotation=30.0).astype(float)[..., 0]
    slope = (turned * rows * columns).sum() / (turned * columns**2).sum()
    angle = math.radians(_rng(5).uniform(-30, 30))
    assert abs(slope) == pytest.approx(abs(math.tan(angle)), rel=0.1)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("outside", ["median", "nearest"])
def test_affine_equals_a_loop_over_pixels(channels, outside):
    rng = _rng(3)
    images = rng.integers(0, 256, (3, 7, 9, channels), dtype=np.uint8)
    maps = np.array([1, 0.2, -1, -0.3, 0.9, 1]) + rng.normal(size=(3, 6)) * 0.2
    maps[2, 2] = 100  # all outside
    out = resampling.affine(images, maps, outside)
    for image, (a, b, c, d, e, f), moved in zip(images, maps, out, strict=True):
        border = np.concatenate([image[0], image[-1], image[:, 0], image[:, -1]])
        background = np.sort(border, axis=0)[len(border) // 2].astype(float)

        def pixel(row, column, image=image, background=background):
            nearest = min(max(row, 0), 6), min(max(column, 0), 8)
            inside = nearest == (row, column)
            return image[nearest] if inside or outside == "nearest" else background

        for row, column in np.ndindex(7, 9):
            x = a * (column + 0.5) + b * (row + 0.5) + c - 0.5
            y = d * (column + 0.5) + e * (row + 0.5) + f - 0.5
            left, top = math.floor(x), math.floor(y)
            right, down = x - left, y - top
            near = (1 - right) * pixel(top, left) + right * pixel(top, left + 1)
            far = (1 - right) * pixel(top + 1, left) + right * pixel(top + 1, left + 1)
            assert np.abs((1 - down) * near + down * far - moved[row, column]).max() < 0.51


@pytest.mark.parametrize("name", ["distort", "glyphs_train"])
def test_a_batch_is_distorted_like_its_images(name):
    bound = transform.bind(getattr(transforms, name))
    images = _rng(4).integers(0, 256, (70, 32, 32, 1), dtype=np.uint8)
    batch = bound.batch(images, (_rng(i) for i in range(70)))
    assert (batch == np.stack([bound(x, _rng(i)) for i, x in enumerate(images)])).all()


def test_an_evaluation_is_decoded_at_twice_its_shorter_side_or_more():
    def side(function, **options):
        return transform.bind(function, **options, scaled_decode=True).least_side

    assert side(transforms.standard_eval) == 512
    assert side(transforms.standard_eval, size=224, shorter=224) == 448
    assert side(functools.partial(transforms.standard_eval, size=112)) == 256
    assert side(transforms.squash_eval, size=384) == 768
    assert side(transforms.standard_train, shorter=256) == 512
    assert transform.bind(transforms.standard_train).least_side is None
    assert transform.bind(transforms.graph_eval).least_side is None
    with pytest.raises(ValueError, match="scaled_decode=False: change them, or set antialias=True"):
        side(transforms.standard_eval, antialias=False)


@pytest.mark.parametrize("area", [(0.08, 1.0), (0.01, 0.02)])
def test_images_that_are_decoded_at_a_fraction_leave_every_crop_twice_its_size(area, monkeypatch):
    """However small the crop is, of an image of any shape."""
    scaled = transform.bind(transforms.standard_train, size=30, area=area, scaled_decode=True)
    crops, scale = [], resampling.scale
    monkeypatch.setattr(
        resampling, "scale", lambda x, *a, **k: crops.append(x.shape[:2]) or scale(x, *a, **k)
    )
    for h, w in ((1, 1), (3, 2), (1, 4)):
        side = scaled.least_side
        image = np.zeros((side * h // min(h, w), side * w // min(h, w), 1), np.uint8)
        for i in range(100):
            scaled(image, _rng(i))
    shortest = min(map(min, crops))  # a side of a crop is rounded
    assert 2 * 30 - 1 <= shortest <= 2 * 30 * 1.3
