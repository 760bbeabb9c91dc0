"""A movie of the embedding: a frame of every evaluation, joined at the end of a run."""

import math
import pathlib

import numpy as np
from PIL import Image, ImageColor, ImageDraw

from dmljax.data.glyphs import font
from dmljax.data.splits import Split
from dmljax.files.writing import atomic_writer
from dmljax.report import projection

_LEFT, _TOP, _SIDE = 16, 40, 560  # pixels of the square of points
_NAMES = 320  # largest width of the names; longer ones are cut
_RADIUS, _SCALE = 3, 4  # of a point; points are drawn larger, then reduced to smooth their edges


def frame(embeddings: np.ndarray, split: Split, path: pathlib.Path, *, title: str) -> None:
    """Draws up to 20 classes as points at their `projection.map_positions`.

    Of embeddings with more than two dimensions, at most 1,000 images are drawn.
    """
    rng = np.random.default_rng(0)
    readable = np.flatnonzero(np.isfinite(embeddings).all(axis=1))
    labels = np.unique(split.labels[readable])
    chosen = np.sort(rng.choice(labels, min(20, len(labels)), replace=False))
    rows = readable[np.isin(split.labels[readable], chosen)]
    if embeddings.shape[1] > 2 and len(rows) > 1000:
        rows = np.sort(rng.choice(rows, 1000, replace=False))
    positions = projection.map_positions(embeddings[rows], split.labels[rows])
    low, high = positions.min(axis=0), positions.max(axis=0)
    positions = (positions - low) / np.maximum(high - low, 1e-12)
    corner, scale = np.array([_LEFT + 8, _TOP + 8]), _SIDE - 16
    centers = corner + scale * np.stack([positions[:, 0], 1 - positions[:, 1]], axis=1)
    letters = font("DejaVuSans", 12)
    width = min(_NAMES, max(letters.getlength(split.names[label]) for label in chosen))
    size = (_LEFT + _SIDE + 34 + math.ceil(width), _TOP + _SIDE + 16)
    picture = Image.new("RGB", [_SCALE * x for x in size], "white")
    draw = ImageDraw.Draw(picture)
    box = [_LEFT, _TOP, _LEFT + _SIDE, _TOP + _SIDE]
    draw.rectangle([_SCALE * x for x in box], outline="black", width=_SCALE)
    legend_top = _TOP + (_SIDE - 20 * len(chosen)) / 2
    for i, label in enumerate(chosen):
        # Neighbors on the color wheel differ in lightness, too.
        color = ImageColor.getrgb(f"hsl({360 * i / len(chosen):.0f}, 65%, {40 + 20 * (i % 2)}%)")
        legend = [[_LEFT + _SIDE + 16, legend_top + 20 * i + 10]]
        for center in [*centers[split.labels[rows] == label], *legend]:
            x, y = center
            draw.circle((_SCALE * x, _SCALE * y), _SCALE * _RADIUS, fill=color)
    picture = picture.resize(size, Image.Resampling.BOX)
    draw = ImageDraw.Draw(picture)
    middle = (_LEFT + _SIDE / 2, _TOP / 2)
    draw.text(middle, title, "black", font("DejaVuSans", 18), anchor="mm")
    for i, label in enumerate(chosen):
        place = (_LEFT + _SIDE + 26, legend_top + 20 * i + 10)
        name = split.names[label]
        while letters.getlength(name) > _NAMES:
            name = name.rstrip("…")[:-1] + "…"
        draw.text(place, name, "black", letters, anchor="lm")
    # A run that is killed continues with the frames that exist, so none may be incomplete.
    with atomic_writer(path, "wb") as file:
        picture.save(file, "PNG")


def movie(folder: pathlib.Path, path: pathlib.Path, *, frame_ms: int, last_frame_ms: int) -> None:
    """Joins the frames of `folder`, in the order of their names, to an animated GIF."""
    files = sorted(folder.glob("*.png"))
    if not files:
        return
    frames = []
    for file in files:
        with Image.open(file) as picture:
            frames.append(picture.convert("RGB").quantize(128, dither=Image.Dither.NONE))
    durations = [frame_ms] * (len(frames) - 1) + [last_frame_ms]
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=durations, loop=0)
