"""Transforms on a device: every operation of `data.transforms` as a function of the same name.

The host draws the numbers of a transform (`Transform.draws`), and the step changes the pixels. Both
forms share every draw except noise, which the device makes from a seed. Pixels equal the host's up
to a few gray levels: sums are in float32, and hue and saturation are not rounded to 256 levels.
"""

import itertools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dmljax.data.transforms.operations import Operation, Shape
from dmljax.data.transforms.transform import Transform

# Operations on images of one size, because they look at the borders of the image.
_OF_ONE_SIZE = ("distort",)


class NoDeviceForm(ValueError):
    """A transform that only the host can compute."""


class Program(NamedTuple):
    """A transform for the images of a data set.

    `bounds` are the largest shapes before the first operation and after each one. `counts` are the
    lengths of the tuples of `Transform.draws`. `changes[i]` is False if operation i resizes images
    that have the size already.
    """

    transform: Transform
    bounds: tuple[Shape, ...]
    counts: tuple[int, ...]
    changes: tuple[bool, ...]


def program(transform: Transform, shapes: Iterable[Shape]) -> Program:
    """Returns the program of a transform for images of these shapes.

    Raises `NoDeviceForm` in one line if the transform reads pixels itself.
    """
    distinct = sorted(set(shapes))
    for operation in transform.operations:
        name = operation.to_json()["name"]
        if not (isinstance(operation, Operation) and name in OPERATIONS):
            raise _refusal(transform, f"only the host computes {name}")
    by_shape = [transform.shapes(shape) for shape in distinct]
    after = [sorted(set(column)) for column in zip(*by_shape, strict=True)]
    if len(after[-1]) > 1:
        raise ValueError(
            f"images of one batch have the shapes {after[-1][:3]}: choose a transform that "
            "returns images of one size, such as --config.transform=standard_train"
        )
    names = [type(operation).__name__ for operation in transform.operations]
    for name, before in zip(names, after, strict=False):
        if name in _OF_ONE_SIZE and len(before) > 1:
            raise _refusal(transform, f"{name} gets images of several sizes")
    draws = transform.draws(distinct[0], np.random.default_rng(0))
    return Program(
        transform,
        tuple(tuple(map(max, zip(*column, strict=True))) for column in after),
        tuple(map(len, draws)),
        tuple(
            not name.startswith("resize") or any(row[i] != row[i + 1] for row in by_shape)
            for i, name in enumerate(names)
        ),
    )


def _refusal(transform: Transform, reason: str) -> NoDeviceForm:
    return NoDeviceForm(
        f"the transform {transform.title} has no form for devices ({reason}). Leave it to the host "
        "by --config.runtime.data=host, or build it from operations of dmljax.data.transforms"
    )


def apply(
    program: Program, images: jax.Array, numbers: jax.Array, *, together: int | None = None
) -> jax.Array:
    """Transforms images `[b ...]`, `together` at a time, or one by one.

    `images` have the largest shape, with anything beyond their own; `numbers [b k]` are the draws.
    A row of zeros gives an image, too: padding.
    """
    starts = np.cumsum([0, *program.counts])
    last = len(program.counts) - 1

    def of_image(rows):
        image, numbers = rows
        of_operations = [numbers[a:b] for a, b in itertools.pairwise(starts)]
        key = jax.random.key(of_operations[last][0].astype(jnp.uint32))
        for i, operation in enumerate(program.transform.operations):
            if not program.changes[i]:
                continue
            bound = program.bounds[i + 1][:2]
            height, width, *draws = of_operations[i]
            new = of_operations[i + 1][:2] if i + 1 < last else bound
            context = _Context(height, width, new, bound, key=jax.random.fold_in(key, i))
            image = OPERATIONS[type(operation).__name__](operation, image, context, *draws)
        return image

    return jax.lax.map(of_image, (images, numbers), batch_size=together)


class _Context(NamedTuple):
    """The size of an image before and after an operation, of the array after it, and a key."""

    height: jax.Array
    width: jax.Array
    new: Any
    bound: tuple[int, ...]
    key: jax.Array


def _weights(
    length: Any,
    target: Any,
    pixels: int,
    rows: int,
    *,
    start: Any = 0,
    offset: Any = 0,
    how: Any,
) -> jax.Array:
    """Returns the weights `[rows pixels]` of pixels that resize a part of an axis.

    The pixels from `start` to `start + length` become `target` rows from row `offset` on; other
    rows have the weights 0. `how` is an operation with `antialias` and `filter`, or None for
    Pillow's bilinear filter.
    """
    antialias, filter_ = (True, "bilinear") if how is None else (how.antialias, how.filter)
    stretch = jnp.maximum(length / target, 1.0) if antialias else 1.0
    row = jnp.arange(rows) - offset
    centers = start + (row + 0.5) * (length / target)
    # Without antialiasing, pixels at the border are repeated.
    centers = centers if antialias else jnp.clip(centers, start + 0.5, start + length - 0.5)
    positions = jnp.arange(pixels) + 0.5
    distance = jnp.abs(positions[None] - centers[:, None]) / stretch
    weights = _cubic(distance) if filter_ == "bicubic" else jnp.maximum(1 - distance, 0)
    weights *= ((positions > start) & (positions < start + length))[None]
    weights *= ((row >= 0) & (row < target))[:, None]
    total = weights.sum(axis=1, keepdims=True)
    return weights / jnp.where(total == 0, 1, total)


def _cubic(x: jax.Array) -> jax.Array:
    """Evaluates Pillow's bicubic filter, a = -0.5, at distances of 0 or more."""
    near = (1.5 * x - 2.5) * x * x + 1
    far = ((x - 5) * x + 8) * x * -0.5 + 2
    return jnp.where(x < 1, near, jnp.where(x < 2, far, 0.0))


def _resampled(image: jax.Array, rows: jax.Array, columns: jax.Array) -> jax.Array:
    """Multiplies both axes of an image by weights, and rounds after each, as Pillow does."""
    pixels = image.astype(jnp.float32)
    pixels = _rounded(jnp.einsum("sw,hwc->hsc", columns, pixels, precision="highest"))
    pixels = _rounded(jnp.einsum("rh,hsc->rsc", rows, pixels, precision="highest"))
    return pixels.astype(jnp.uint8)


def _rounded(pixels: jax.Array) -> jax.Array:
    return jnp.clip(jnp.floor(pixels + 0.5), 0, 255)


def _resize(operation, image, context):
    h, w = image.shape[:2]
    return _resampled(
        image,
        _weights(context.height, context.new[0], h, context.bound[0], how=operation),
        _weights(context.width, context.new[1], w, context.bound[1], how=operation),
    )


def _random_resized_crop(operation, image, context, top, left, height, width):
    side = operation.size
    return _resampled(
        image,
        _weights(height, side, image.shape[0], side, start=top, how=operation),
        _weights(width, side, image.shape[1], side, start=left, how=operation),
    )


def _pad_to_square(operation, image, context, top, left, height, width):
    side = operation.size
    rows = _weights(context.height, height, image.shape[0], side, offset=top, how=None)
    columns = _weights(context.width, width, image.shape[1], side, offset=left, how=None)
    inside = _box(image, side, side, top, left, height, width)
    return jnp.where(inside, _resampled(image, rows, columns), jnp.uint8(operation.fill))


def _box(image: jax.Array, h: int, w: int, top: Any, left: Any, height: Any, width: Any):
    """Returns a mask `[h w 1]` of a box."""
    rows, columns = jnp.arange(h)[:, None, None], jnp.arange(w)[None, :, None]
    is_row = (rows >= top) & (rows < top + height)
    return is_row & (columns >= left) & (columns < left + width)


def _cut(operation, image, context, top, left):
    corner = (top.astype(jnp.int32), left.astype(jnp.int32), 0)
    return jax.lax.dynamic_slice(image, corner, (operation.size, operation.size, image.shape[2]))


def _random_flip(operation, image, context, is_mirrored):
    column = jnp.arange(image.shape[1])
    mirrored = context.width.astype(jnp.int32) - 1 - column
    return jnp.take(image, jnp.where(is_mirrored > 0, mirrored, column), axis=1, mode="clip")


def _random_erasing(operation, image, context, top, left, height, width):
    h, w, channels = image.shape
    color = jnp.array(operation.fill[:channels], jnp.uint8)[None, None]
    return jnp.where(_box(image, h, w, top, left, height, width), color, image)


def _color_jitter(operation, image, context, brightness, contrast, saturation, hue_shift, *order):
    """Colors are integers after each change, and enhancers round down, as in Pillow."""
    is_image = _box(image, *image.shape[:2], 0, 0, context.height, context.width)

    def with_contrast(pixels):
        gray = jnp.where(is_image, _gray(pixels), 0)
        mean = jnp.rint(gray.sum() / (context.height * context.width))
        return _blended(mean, pixels, contrast)

    changes = (
        lambda pixels: _blended(0.0, pixels, brightness),
        with_contrast,
        lambda pixels: _blended(_gray(pixels), pixels, saturation),
        (lambda pixels: _with_hue(pixels, hue_shift)) if operation.hue > 0 else lambda x: x,
    )
    pixels = image.astype(jnp.float32)
    for change in order:
        pixels = jax.lax.switch(change.astype(jnp.int32), changes, pixels)
    return pixels.astype(jnp.uint8)


def _gray(pixels: jax.Array) -> jax.Array:
    """Returns the luma of ITU-R 601-2, `[h w 1]`."""
    luma = jnp.array([[0.299], [0.587], [0.114]])
    return jnp.rint(jnp.matmul(pixels, luma, precision="highest"))


def _blended(plain: Any, pixels: jax.Array, fraction: jax.Array) -> jax.Array:
    return jnp.clip(jnp.trunc(plain + fraction * (pixels - plain)), 0, 255)


def _with_hue(pixels: jax.Array, shift: jax.Array) -> jax.Array:
    """Adds `shift` to the hue, whose full circle is 256."""
    value = pixels.max(axis=2)
    chroma = value - pixels.min(axis=2)
    red, green, blue = jnp.moveaxis(pixels, 2, 0)
    distance = jnp.where(
        red == value,
        green - blue,
        jnp.where(green == value, blue - red + 2 * chroma, red - green + 4 * chroma),
    )
    sector = distance / jnp.maximum(chroma, 1) + shift * (6 / 256)  # 6 are a full circle
    # Each channel is the value less a part of the chroma, by its distance on the circle.
    sextant = (jnp.array([5.0, 3.0, 1.0])[None, None] + sector[:, :, None]) % 6
    fraction = jnp.clip(jnp.minimum(sextant, 4 - sextant), 0, 1)
    return jnp.rint(value[:, :, None] - chroma[:, :, None] * fraction)


def _distort(operation, image, context, a, b, c, d, e, f, is_inverted):
    h, w, channels = image.shape
    pixels = image.astype(jnp.float32)
    margin = int(operation.outside == "median")
    if margin:
        sides = jnp.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
        edge = jnp.sort(sides, axis=0)[h + w]
    else:
        edge = jnp.zeros(channels, jnp.float32)
    padded = jnp.broadcast_to(edge[None, None], (h + 3, w + 3, channels))
    padded = padded.at[1 : h + 1, 1 : w + 1].set(pixels)
    xs, ys = jnp.arange(w) + 0.5, (jnp.arange(h) + 0.5)[:, None]
    column, right = _located(a * xs[None] + (b * ys + (c + 0.5)), w, margin)
    row, down = _located(d * xs[None] + (e * ys + (f + 0.5)), h, margin)
    right, down = right[:, :, None], down[:, :, None]

    def between(row):
        first, second = padded[row, column], padded[row, column + 1]
        return first + (second - first) * right

    upper, lower = between(row), between(row + 1)
    warped = jnp.rint(upper + (lower - upper) * down)
    warped = jnp.where(is_inverted > 0, 255 - warped, warped)
    if operation.noise:
        warped += operation.noise * jax.random.normal(context.key, image.shape)
    return _rounded(warped).astype(jnp.uint8)


def _located(position: jax.Array, side: int, margin: int) -> tuple[jax.Array, jax.Array]:
    """Returns the index before a position in the padded image, and the distance to it."""
    position = jnp.clip(position, 1 - margin, side + margin)
    index = jnp.floor(position)
    return index.astype(jnp.int32), position - index


def _cached_view(operation, image, context, view):
    return image[view.astype(jnp.int32)]


# By the names of `data.transforms.operations.OPERATIONS`. The others are left to the host.
OPERATIONS: dict[str, Callable[..., jax.Array]] = {
    "cached_view": _cached_view,
    "center_crop": _cut,
    "color_jitter": _color_jitter,
    "crop": _cut,
    "distort": _distort,
    "pad_to_square": _pad_to_square,
    "random_crop": _cut,
    "random_erasing": _random_erasing,
    "random_flip": _random_flip,
    "random_resized_crop": _random_resized_crop,
    "resize": _resize,
    "resize_shorter_side": _resize,
}
