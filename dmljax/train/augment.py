"""The operations of a transform on a device: what `data.transforms` does to pixels, in the step.

The numbers of an operation are drawn on the host (`data.transforms.plan`), as for the host form.
Resizing has the weights of Pillow as whole numbers, and its order of the two axes, between which it
rounds: so every device computes the same pixels as the host. Tables of weights for every length
that a box may have are on the device.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dmljax.data.transforms import colors, resampling
from dmljax.data.transforms.plan import Program, is_box

_Table = dict[str, np.ndarray]


def tables(program: Program) -> list[_Table]:
    """For each step, what it needs beside its numbers: for `scale`, the weights by lengths."""
    return [
        _weights(sorted(pairs), **dict(step.constants)) if pairs else {}
        for step, pairs in zip(program.steps, program.resizings, strict=True)
    ]


def _weights(pairs: list[tuple[int, int]], **options: Any) -> _Table:
    """`starts [p target]` and `weights [p target taps]` of the pairs with these `keys [p]`."""
    entries = [resampling.taps(*pair, **options) for pair in pairs]
    shape = tuple(np.max([entry.weights.shape for entry in entries], axis=0))
    starts = np.zeros((len(pairs), shape[0]), np.int32)
    weights = np.zeros((len(pairs), *shape), np.int32)
    for i, entry in enumerate(entries):
        n, k = entry.weights.shape
        starts[i, :n], weights[i, :n, :k] = entry.starts, entry.weights
    keys = np.array([_key(*pair) for pair in pairs], np.int32)
    return {"keys": keys, "starts": starts, "weights": weights}


def _key(length: Any, target: Any) -> Any:
    return length * (1 << 15) + target


def apply(
    program: Program,
    tables: list[dict[str, jax.Array]],
    images: jax.Array,
    scalars: jax.Array,
    arrays: Sequence[jax.Array] = (),
    *,
    together: int | None = None,
) -> jax.Array:
    """The images `[b ...]` after all steps of a program, `together` at a time, or one by one.

    `images` have the largest shape, with anything beyond their own; `scalars [b k]` and `arrays`
    are what `Program.draw` gives. Rows of zeros give an image, too: padding.
    """
    # Looked up before the loop over images: within it, XLA would look them up for every pixel.
    numbers = jax.vmap(lambda *rows: _numbers(program, tables, *rows))(scalars, *arrays)

    def of_image(rows):
        image, numbers = rows
        for step, step_numbers, bound in zip(
            program.steps, numbers, program.bounds[1:], strict=True
        ):
            if step.name == "cut":
                if step_numbers:
                    image = jax.lax.dynamic_slice(image, (*step_numbers, 0), bound)
            elif step.name == "scale":
                image = _scaled(image, *step_numbers, **dict(step.constants))
            else:
                image = OPERATIONS[step.name](image, *step_numbers, **dict(step.constants))
        return image

    return jax.lax.map(of_image, (images, numbers), batch_size=together)


def _numbers(
    program: Program, tables: list[dict[str, jax.Array]], scalars: jax.Array, *arrays: jax.Array
) -> list[tuple[Any, ...]]:
    """The numbers of each step with an image; for `scale`, places and weights of pixels.

    A cut before it is part of the places, and has no numbers.
    """
    numbers: list[tuple[Any, ...]] = []
    origin: tuple[Any, ...] = (0, 0)
    remaining = list(arrays)
    for i, step in enumerate(program.steps):
        scalar_count, array_count = program.layouts[i]
        of_step: tuple[Any, ...] = tuple(scalars[j] for j in range(scalar_count))
        scalars = scalars[scalar_count:]
        if step.name == "cut":
            of_step = tuple(number.astype(jnp.int32) for number in of_step)
            if is_box(program.steps, i):
                of_step, origin = (), of_step
        elif step.name == "scale":
            sizes = [number.astype(jnp.int32) for number in of_step]
            before, after = program.bounds[i : i + 2]
            of_step = (
                resampling.columns_first(*sizes),
                *(
                    _places(tables[i], origin[axis], sizes[axis::2], before[axis], after[axis])
                    for axis in (0, 1)
                ),
            )
            origin = (0, 0)
        numbers.append((*of_step, *remaining[:array_count]))
        remaining = remaining[array_count:]
    return numbers


def _places(
    table: dict[str, jax.Array], origin: Any, lengths: list[jax.Array], side: int, new_side: int
) -> tuple[jax.Array, jax.Array]:
    """For an axis, the places `[new_side taps]` of pixels and their weights."""
    row = jnp.searchsorted(table["keys"], _key(*lengths))
    starts, weights = table["starts"][row, :new_side], table["weights"][row, :new_side]
    # Pixels beyond the image have the weight 0.
    places = origin + starts[:, None] + jnp.arange(weights.shape[1])[None]
    return jnp.minimum(places, side - 1), weights


def _scaled(
    image: jax.Array,
    columns_first: jax.Array,
    *passes: tuple[jax.Array, jax.Array],
    antialias: bool = True,
    filter: str = "bilinear",
) -> jax.Array:
    """The image with each axis resized by places and weights; zeros beyond the target."""
    del filter  # it is in the weights
    pixels = image.astype(jnp.int32)
    if not antialias:
        total = _summed(_summed(pixels, *passes[0], axis=0), *passes[1], axis=1)
        return ((total + (1 << 15)) >> 16).astype(jnp.uint8)

    def along(axis, pixels):
        total = _summed(pixels, *passes[axis], axis=axis)
        return jnp.clip((total + (1 << 21)) >> 22, 0, 255)

    pixels = jax.lax.cond(
        columns_first, lambda x: along(1, along(0, x)), lambda x: along(0, along(1, x)), pixels
    )
    return pixels.astype(jnp.uint8)


def _summed(pixels: jax.Array, places: jax.Array, weights: jax.Array, *, axis: int) -> jax.Array:
    """Sums of pixels at `places [n taps]` of an axis with `weights`."""
    rows = pixels.swapaxes(0, axis)  # on CPUs, whole rows are taken several times as fast
    total = sum(rows[places[:, k]] * weights[:, k, None, None] for k in range(places.shape[1]))
    return jnp.asarray(total).swapaxes(0, axis)


def _row(features: jax.Array, index: jax.Array) -> jax.Array:
    return features[index.astype(jnp.int32)]


def _mirror(image: jax.Array, is_mirrored: jax.Array) -> jax.Array:
    return jnp.where(is_mirrored > 0, image[:, ::-1], image)


def _paste(
    image: jax.Array,
    height: jax.Array,
    width: jax.Array,
    top: jax.Array,
    left: jax.Array,
    *,
    size: int,
    fill: int,
) -> jax.Array:
    rows, columns = jnp.arange(size) - top.astype(int), jnp.arange(size) - left.astype(int)
    moved = jnp.take(image, jnp.clip(rows, 0, image.shape[0] - 1), axis=0)
    moved = jnp.take(moved, jnp.clip(columns, 0, image.shape[1] - 1), axis=1)
    inside = _between(rows, 0, height)[:, None] & _between(columns, 0, width)[None]
    return jnp.where(inside[:, :, None], moved, jnp.uint8(fill))


def _erase(
    image: jax.Array,
    top: jax.Array,
    left: jax.Array,
    height: jax.Array,
    width: jax.Array,
    *,
    fill: tuple[int, ...],
) -> jax.Array:
    h, w, channels = image.shape
    inside = _between(jnp.arange(h), top, top + height)[:, None]
    inside &= _between(jnp.arange(w), left, left + width)[None]
    return jnp.where(inside[:, :, None], jnp.array(fill[:channels], jnp.uint8)[None, None], image)


def _between(places: jax.Array, start: Any, stop: Any) -> jax.Array:
    return (places >= start) & (places < stop)


def _recolor(
    image: jax.Array,
    brightness: jax.Array,
    contrast: jax.Array,
    saturation: jax.Array,
    hue_shift: jax.Array,
    *order: jax.Array,
    changes_hue: bool,
) -> jax.Array:
    """As Pillow: colors are whole numbers after each change, and enhancers round down."""

    def with_contrast(pixels):
        gray = _gray(pixels)
        mean = (2 * gray.sum() + gray.size) // (2 * gray.size)
        return _blended(mean, pixels, contrast)

    changes = (
        lambda pixels: _blended(jnp.int32(0), pixels, brightness),
        with_contrast,
        lambda pixels: _blended(_gray(pixels)[:, :, None], pixels, saturation),
        (lambda pixels: _with_hue(pixels, hue_shift)) if changes_hue else (lambda pixels: pixels),
    )
    pixels = image.astype(jnp.int32)
    for place in order:
        pixels = jax.lax.switch(place.astype(jnp.int32), changes, pixels)
    return pixels.astype(jnp.uint8)


def _gray(pixels: jax.Array) -> jax.Array:
    """The luma of ITU-R 601-2, in whole numbers as Pillow's mode L."""
    red, green, blue = jnp.moveaxis(pixels, 2, 0)
    return (red * 19595 + green * 38470 + blue * 7471 + (1 << 15)) >> 16


def _blended(plain: jax.Array, pixels: jax.Array, share: jax.Array) -> jax.Array:
    """`share` of the pixels and the rest of `plain`."""
    blend = plain.astype(jnp.float32) + share * (pixels - plain).astype(jnp.float32)
    return jnp.clip(jnp.trunc(blend), 0, 255).astype(jnp.int32)


def _with_hue(pixels: jax.Array, shift: jax.Array) -> jax.Array:
    """The pixels with `shift` added to their hue; hue and saturation have 256 levels."""
    red, green, blue = jnp.moveaxis(pixels, 2, 0)
    value = pixels.max(axis=2)
    chroma = value - pixels.min(axis=2)
    # The hue is a sixth of the circle times `sector` plus `ahead / chroma`.
    is_red, is_green = red == value, green == value
    sector = jnp.where(is_red, 0, jnp.where(is_green, 2, 4))
    ahead = jnp.where(is_red, green - blue, jnp.where(is_green, blue - red, red - green))
    circle = 6 * jnp.maximum(chroma, 1)
    hue, remainder = jnp.divmod(255 * ((sector * chroma + ahead) % circle), circle)
    hue = jnp.where(remainder == 0, jnp.array(colors.hues(), jnp.int32)[hue], hue)
    saturation = 255 * chroma // jnp.maximum(value, 1)
    hue = jnp.where(chroma > 0, hue, 0)
    angle = ((hue + shift.astype(jnp.int32)) % 256) * 6
    corner = angle // 255
    share, rest = saturation * (angle - corner * 255), 255 * 255

    def darker(amount):  # value * (1 - amount), rounded
        return (2 * value * (rest - amount) + rest) // (2 * rest)

    low, falling = darker(255 * saturation), darker(share)
    rising = darker(255 * saturation - share)
    corner = (corner % 6)[:, :, None]
    choices = (
        (value, rising, low),
        (falling, value, low),
        (low, value, rising),
        (low, falling, value),
        (rising, low, value),
        (value, low, falling),
    )
    return jnp.select(
        [corner == i for i in range(6)], [jnp.stack(channels, axis=2) for channels in choices]
    )


def _warp(image: jax.Array, *numbers: jax.Array, outside: str) -> jax.Array:
    a, b, c, d, e, f, is_inverted, *grain = numbers
    h, w, _ = image.shape
    pixels = image.astype(jnp.float32)
    margin = int(outside == "median")
    if margin:
        sides = jnp.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
        edge = jnp.sort(sides, axis=0)[h + w]
    else:
        edge = jnp.zeros(image.shape[2], jnp.float32)
    padded = jnp.broadcast_to(edge[None, None], (h + 3, w + 3, image.shape[2]))
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
    for noise in grain:
        warped = jnp.clip(jnp.rint(warped + noise), 0, 255)
    return warped.astype(jnp.uint8)


def _located(position: jax.Array, side: int, margin: int) -> tuple[jax.Array, jax.Array]:
    """The index before a position in the padded image, and the distance to it."""
    position = jnp.clip(position, 1 - margin, side + margin)
    index = jnp.floor(position)
    return index.astype(jnp.int32), position - index


# By the names of the functions of `data.transforms` that are an `operation`. `cut` and `scale`,
# which go together, are in `apply`.
OPERATIONS: dict[str, Callable[..., jax.Array]] = {
    "erase": _erase,
    "mirror": _mirror,
    "paste": _paste,
    "recolor": _recolor,
    "row": _row,
    "warp": _warp,
}
