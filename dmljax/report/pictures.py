"""Pictures of a run: its curves, what a query finds, a map of the embedding, a movie of it."""

from __future__ import annotations

import colorsys
import os
import pathlib
from collections.abc import Callable, Sequence

import numpy as np
from matplotlib import colormaps  # not later: matplotlib may change the environment at its import
from PIL import Image, ImageDraw, ImageFont

from dmljax import retrieval
from dmljax.data.splits import Split

__all__ = ["curves", "embedding_map", "frame", "movie", "neighbours"]

_RIGHT, _WRONG, _INK = "#2a9d5c", "#d1495b", "#333333"


def _figure(width: float, height: float, **kwargs):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(**kwargs)


def curves(lines: Sequence[dict], path: pathlib.Path) -> None:
    """Loss and what the loss says of itself on the left, scores on the right."""
    figure, (left, right) = _figure(10, 4, ncols=2)
    train = [line for line in lines if "loss" in line]
    if train:
        left.plot([x["step"] for x in train], [x["loss"] for x in train], color=_INK, lw=1)
    left.set(title="training loss", xlabel="step")
    names = {k for line in lines for k in line if "/R@" in k or k.endswith(("/MAP@R", "/NMI"))}
    for name in sorted(names):
        points = [(x["step"], x[name]) for x in lines if name in x]
        right.plot(*zip(*points, strict=True), marker="o", ms=3, lw=1.2, label=name)
    right.set(title="scores", xlabel="step", ylim=(0, 1))
    if names:
        right.legend(fontsize=8, frameon=False)
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def neighbours(
    embeddings: np.ndarray,
    split: Split,
    read_fn: Callable[[int], np.ndarray],
    path: pathlib.Path,
    *,
    queries: int = 8,
    k: int = 8,
    seed: int = 0,
) -> None:
    """Queries on the left, the nearest images beside them: green is right, red is wrong."""
    good = np.isfinite(embeddings).all(axis=1)
    asked = good if split.query is None else good & split.query
    offered = good if split.gallery is None else good & split.gallery
    rng = np.random.default_rng(seed)
    pool = np.flatnonzero(asked)
    rows = rng.choice(pool, min(queries, len(pool)), replace=False)
    items = np.flatnonzero(offered)
    found, _ = retrieval.nearest(embeddings[rows], embeddings[items], k=min(k + 1, len(items)))
    side, edge, head = 96, 4, 30
    step = side + 2 * edge + 6
    page = Image.new("RGB", ((k + 1) * step + 20, len(rows) * step + head + 6), "white")
    lefts = [6] + [x * step + 20 for x in range(1, k + 1)]  # the query stands apart
    for text, left in (("query", lefts[0]), ("nearest", lefts[1])):
        ImageDraw.Draw(page).text((left, 8), text, fill=_INK, font=ImageFont.load_default(14))
    for y, (row, near) in enumerate(zip(rows, items[found], strict=True)):
        near = [i for i in near if i != row][:k]
        for left, i in zip(lefts, (row, *near), strict=False):
            color = _RIGHT if split.labels[i] == split.labels[row] else _WRONG
            picture = _framed(read_fn(int(i)), side, edge, _INK if left == lefts[0] else color)
            page.paste(picture, (left, y * step + head))
    page.save(path)


def _framed(image: np.ndarray, side: int, width: int, color) -> Image.Image:
    """`image` within a square of `side` pixels, and a frame of `width` around it."""
    picture = Image.fromarray(image[:, :, 0] if image.shape[2] == 1 else image).convert("RGB")
    # The smallest images stay as they are, pixel by pixel.
    grown = Image.Resampling.NEAREST if max(picture.size) < side else Image.Resampling.BOX
    share = side / max(picture.size)
    picture = picture.resize([max(1, round(share * n)) for n in picture.size], grown)
    framed = Image.new("RGB", tuple(n + 2 * width for n in picture.size), color)
    framed.paste(picture, (width, width))
    return framed


def embedding_map(
    embeddings: np.ndarray,
    split: Split,
    read_fn: Callable[[int], np.ndarray],
    path: pathlib.Path,
    *,
    classes: int = 24,
    images: int = 400,
    seed: int = 0,
) -> None:
    """Images of a few classes where t-SNE puts them (van der Maaten & Hinton, 2008).

    Two-dimensional embeddings are shown as they are. A frame's colour is the class.
    """
    rng = np.random.default_rng(seed)
    good = np.flatnonzero(np.isfinite(embeddings).all(axis=1))
    present = np.unique(split.labels[good])
    chosen = rng.choice(present, min(classes, len(present)), replace=False)
    rows = good[np.isin(split.labels[good], chosen)]
    if len(rows) > images:
        rows = rng.choice(rows, images, replace=False)
    places = _plane(embeddings[rows], seed)
    side, edge, head = 1200, 24, 40
    low, high = places.min(axis=0), places.max(axis=0)
    places = (places - low) / np.maximum(high - low, 1e-6)
    page = Image.new("RGB", (side, side + head), "white")
    title = f"{len(chosen)} classes of the test split"
    font = ImageFont.load_default(20)
    ImageDraw.Draw(page).text((side / 2, 12), title, fill=_INK, font=font, anchor="mt")
    hues = [colorsys.hsv_to_rgb(i / len(chosen), 0.9, 0.9) for i in range(len(chosen))]
    colors = {c: tuple(round(255 * v) for v in hue) for c, hue in zip(chosen, hues, strict=True)}
    for row, (x, y) in zip(rows, places, strict=True):
        picture = _framed(read_fn(int(row)), 34, 3, colors[split.labels[row]])
        room = side - 2 * edge - np.array(picture.size)
        page.paste(picture, (int(edge + x * room[0]), int(head + edge + (1 - y) * room[1])))
    page.save(path)


def frame(
    embeddings: np.ndarray,
    split: Split,
    path: pathlib.Path,
    *,
    title: str,
    classes: int = 20,
    points: int = 1000,
    seed: int = 0,
) -> None:
    """Points of up to `classes` classes, each axis from its least to its largest value.

    Two-dimensional embeddings are all shown as they are, up to that scale; of others t-SNE shows
    at most `points`.
    """
    rng = np.random.default_rng(seed)
    good = np.flatnonzero(np.isfinite(embeddings).all(axis=1))
    present = np.unique(split.labels[good])
    chosen = np.sort(rng.choice(present, min(classes, len(present)), replace=False))
    rows = good[np.isin(split.labels[good], chosen)]
    if embeddings.shape[1] > 2 and len(rows) > points:
        rows = np.sort(rng.choice(rows, points, replace=False))
    places = _plane(embeddings[rows], seed)
    low, high = places.min(axis=0), places.max(axis=0)
    places = (places - low) / np.maximum(high - low, 1e-12)
    figure, axes = _figure(6.4, 5.6)
    colors = colormaps["tab10" if len(chosen) <= 10 else "tab20"].colors
    for i, label in enumerate(chosen):
        mine = places[split.labels[rows] == label]
        axes.scatter(*mine.T, s=9, lw=0, alpha=0.7, color=colors[i % 20], label=split.names[label])
    axes.set(xlim=(-0.03, 1.03), ylim=(-0.03, 1.03), xticks=[], yticks=[], title=title)
    axes.legend(
        loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=8, markerscale=2
    )
    # Whole or not at all: a run that is killed goes on with the frames that are there.
    aside = path.with_suffix(".tmp.png")
    figure.savefig(aside, dpi=110)
    os.replace(aside, path)


def movie(folder: pathlib.Path, path: pathlib.Path, *, each: int = 200, last: int = 3000) -> None:
    """The frames of `folder` in the order of their names, for so many milliseconds."""
    files = sorted(f for f in folder.glob("*.png") if not f.name.endswith(".tmp.png"))
    if not files:
        return
    frames = []
    for file in files:
        with Image.open(file) as picture:
            frames.append(picture.convert("RGB").quantize(128, dither=Image.Dither.NONE))
    times = [each] * (len(frames) - 1) + [last]
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=times, loop=0)


def _plane(x: np.ndarray, seed: int) -> np.ndarray:
    """Two dimensions as they are; more by t-SNE."""
    if x.shape[1] <= 2:
        return np.pad(x, ((0, 0), (0, 2 - x.shape[1])))
    from sklearn.manifold import TSNE

    perplexity = min(20, max(1, (len(x) - 1) / 4))
    return TSNE(perplexity=perplexity, init="pca", random_state=seed).fit_transform(x)
