"""Transforms on a device: every operation of `data.transforms` as a function of the same name.

The host draws the numbers of a transform (`Transform.draws`), and the step changes the pixels. Both
forms share every draw except noise, which the device makes from a seed. Pixels equal the host's up
to a few gray levels: only the result of an operation is rounded, and `jax.image` resizes.
"""

import itertools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dmljax.data.transforms.operations import Shape
from dmljax.data.transforms.transform import Transform


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
    names = [type(operation).__name__ for operation in transform.operations]
    for name, operation in zip(names, transform.operations, strict=True):
        if name not in OPERATIONS:
            raise _refusal(transform, f"only the host computes {operation.to_json()['name']}")
    by_shape = [transform.shapes(shape) for shape in distinct]
    after = [sorted(set(column)) for column in zip(*by_shape, strict=True)]
    if len(after[-1]) > 1:
        raise ValueError(
            f"images of one batch have the shapes {after[-1][:3]}: choose a transform that "
            "returns images of one size, such as --config.transform=standard_train"
        )
    if "distort" in names and len(after[names.index("distort")]) > 1:  # It looks at the borders.
        raise _refusal(transform, "distort gets images of several sizes")
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


def _scaled(
    image: jax.Array,
    box: Any,
    size: Any,
    shape: tuple[int, ...],
    *,
    corner: tuple[Any, ...] = (0, 0),
    antialias: bool = True,
    filter: str = "bilinear",
) -> jax.Array:
    """Resizes the `box` of an image to `size`, at `corner` of an array of `shape`.

    Pixels outside of the box have no influence: a mask of the box is resized in the same way, and
    divides the result.
    """
    top, left, height, width = box
    scale = jnp.stack([size[0] / height, size[1] / width]).astype(jnp.float32)
    translation = jnp.stack([corner[0] - top * scale[0], corner[1] - left * scale[1]])
    inside = _box(image, *box)
    pixels = jnp.concatenate([jnp.where(inside, image, 0), inside], axis=2).astype(jnp.float32)
    pixels = jax.image.scale_and_translate(
        pixels,
        (*shape[:2], pixels.shape[2]),
        (0, 1),
        scale,
        translation,
        method="cubic" if filter == "bicubic" else "linear",
        antialias=antialias,
    )
    weight = pixels[:, :, -1:]
    return _rounded(pixels[:, :, :-1] / jnp.where(weight == 0, 1, weight))


def _rounded(pixels: jax.Array) -> jax.Array:
    return jnp.clip(jnp.floor(pixels + 0.5), 0, 255).astype(jnp.uint8)


def _filter(operation: Any) -> dict[str, Any]:
    return {"antialias": operation.antialias, "filter": operation.filter}


def _resize(operation, image, context):
    box = (0, 0, context.height, context.width)
    return _scaled(image, box, context.new, context.bound, **_filter(operation))


def _random_resized_crop(operation, image, context, *box):
    side = (operation.size, operation.size)
    return _scaled(image, box, side, side, **_filter(operation))


def _pad_to_square(operation, image, context, top, left, height, width):
    side = (operation.size, operation.size)
    box = (0, 0, context.height, context.width)
    scaled = _scaled(image, box, (height, width), side, corner=(top, left))
    inside = _box(scaled, top, left, height, width)
    return jnp.where(inside, scaled, jnp.uint8(operation.fill))


def _box(image: jax.Array, top: Any, left: Any, height: Any, width: Any) -> jax.Array:
    """Returns a mask `[h w 1]` of a box in an image."""
    h, w = image.shape[:2]
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
    color = jnp.array(operation.fill[: image.shape[2]], jnp.uint8)[None, None]
    return jnp.where(_box(image, top, left, height, width), color, image)


def _color_jitter(operation, image, context, brightness, contrast, saturation, hue_shift, *order):
    is_image = _box(image, 0, 0, context.height, context.width)

    def with_contrast(pixels):
        mean = jnp.mean(_gray(pixels), where=is_image)
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
    return _rounded(pixels)


def _gray(pixels: jax.Array) -> jax.Array:
    """Returns the luma of ITU-R 601-2, `[h w 1]`."""
    return jnp.matmul(pixels, jnp.array([[0.299], [0.587], [0.114]]), precision="highest")


def _blended(plain: Any, pixels: jax.Array, fraction: jax.Array) -> jax.Array:
    return jnp.clip(jnp.trunc(plain + fraction * (pixels - plain)), 0, 255)  # as Pillow rounds


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
    return value[:, :, None] - chroma[:, :, None] * fraction


def _distort(operation, image, context, a, b, c, d, e, f, is_inverted):
    h, w = image.shape[:2]
    pixels = image.astype(jnp.float32)
    sides = jnp.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
    edge = jnp.sort(sides, axis=0)[h + w]
    ys, xs = jnp.meshgrid(jnp.arange(h) + 0.5, jnp.arange(w) + 0.5, indexing="ij")
    positions = [d * xs + e * ys + (f - 0.5), a * xs + b * ys + (c - 0.5)]
    mode = "constant" if operation.outside == "median" else "nearest"

    def warp(channel):  # with 0 outside of it
        return jax.scipy.ndimage.map_coordinates(channel, positions, order=1, mode=mode)

    warped = jax.vmap(warp, in_axes=2, out_axes=2)(pixels - edge[None, None])
    warped = jnp.rint(warped + edge[None, None])
    warped = jnp.where(is_inverted > 0, 255 - warped, warped)
    if operation.noise:
        warped += operation.noise * jax.random.normal(context.key, image.shape)
    return _rounded(warped)


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
