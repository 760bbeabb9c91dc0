"""Pictures of a run: its curves, the neighbors of queries, a map and a movie of the embedding."""

from __future__ import annotations

import colorsys
import pathlib
from collections.abc import Callable, Sequence

import numpy as np
from matplotlib import colormaps  # not later: matplotlib may change the environment at its import
from PIL import Image, ImageDraw, ImageFont

from dmljax import retrieval
from dmljax.data.files import atomic_writer
from dmljax.data.splits import Split
from dmljax.report import figures

__all__ = ["curves", "embedding_map", "frame", "movie", "neighbors"]

_RIGHT, _WRONG, _INK = "#2a9d5c", "#d1495b", "#333333"


def curves(lines: Sequence[dict], path: pathlib.Path) -> None:
    """Draws the training loss on the left and the scores on the right, by the lines of a run."""
    figure, (left, right) = figures.figure(10, 4, ncols=2)
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


def neighbors(
    embeddings: np.ndarray,
    split: Split,
    read_fn: Callable[[int], np.ndarray],
    path: pathlib.Path,
    *,
    queries: int = 8,
    k: int = 8,
    seed: int = 0,
) -> None:
    """Draws queries on the left and the nearest images beside them: green is right, red is wrong.

    `read_fn(row)` reads an image of the split. Rows of NaN, images that could not be read, are
    left out.
    """
    readable = np.isfinite(embeddings).all(axis=1)
    query = readable if split.query is None else readable & split.query
    gallery = readable if split.gallery is None else readable & split.gallery
    rng = np.random.default_rng(seed)
    candidates = np.flatnonzero(query)
    rows = rng.choice(candidates, min(queries, len(candidates)), replace=False)
    items = np.flatnonzero(gallery)
    nearest, _ = retrieval.nearest(embeddings[rows], embeddings[items], k=min(k + 1, len(items)))
    side, edge, head = 96, 4, 30
    step = side + 2 * edge + 6
    page = Image.new("RGB", ((k + 1) * step + 20, len(rows) * step + head + 6), "white")
    lefts = [6] + [x * step + 20 for x in range(1, k + 1)]  # a gap after the query
    for text, left in (("query", lefts[0]), ("nearest", lefts[1])):
        ImageDraw.Draw(page).text((left, 8), text, fill=_INK, font=ImageFont.load_default(14))
    for y, (row, near) in enumerate(zip(rows, items[nearest], strict=True)):
        near = [i for i in near if i != row][:k]
        for left, i in zip(lefts, (row, *near), strict=False):
            color = _RIGHT if split.labels[i] == split.labels[row] else _WRONG
            picture = _framed(read_fn(int(i)), side, edge, _INK if left == lefts[0] else color)
            page.paste(picture, (left, y * step + head))
    page.save(path)


def _framed(image: np.ndarray, side: int, width: int, color) -> Image.Image:
    """`image`, its longer side resized to `side` pixels, in a frame `width` pixels wide."""
    picture = Image.fromarray(image[:, :, 0] if image.shape[2] == 1 else image).convert("RGB")
    # Small images are magnified pixel by pixel.
    is_small = max(picture.size) < side
    resample = Image.Resampling.NEAREST if is_small else Image.Resampling.BOX
    factor = side / max(picture.size)
    picture = picture.resize([max(1, round(factor * n)) for n in picture.size], resample)
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
    """Draws images of a few classes at the positions of t-SNE (van der Maaten & Hinton, 2008).

    Two-dimensional embeddings are the positions themselves. The color of a frame is the class.
    """
    rng = np.random.default_rng(seed)
    readable = np.flatnonzero(np.isfinite(embeddings).all(axis=1))
    labels = np.unique(split.labels[readable])
    chosen = rng.choice(labels, min(classes, len(labels)), replace=False)
    rows = readable[np.isin(split.labels[readable], chosen)]
    if len(rows) > images:
        rows = rng.choice(rows, images, replace=False)
    positions = _plane(embeddings[rows], seed)
    side, edge, head = 1200, 24, 40
    low, high = positions.min(axis=0), positions.max(axis=0)
    positions = (positions - low) / np.maximum(high - low, 1e-6)
    page = Image.new("RGB", (side, side + head), "white")
    title = f"{len(chosen)} classes of the test split"
    font = ImageFont.load_default(20)
    ImageDraw.Draw(page).text((side / 2, 12), title, fill=_INK, font=font, anchor="mt")
    hues = [colorsys.hsv_to_rgb(i / len(chosen), 0.9, 0.9) for i in range(len(chosen))]
    colors = {c: tuple(round(255 * v) for v in hue) for c, hue in zip(chosen, hues, strict=True)}
    for row, (x, y) in zip(rows, positions, strict=True):
        picture = _framed(read_fn(int(row)), 34, 3, colors[split.labels[row]])
        width, height = side - 2 * edge - np.array(picture.size)
        page.paste(picture, (int(edge + x * width), int(head + edge + (1 - y) * height)))
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
    """Draws up to `classes` classes as points. The axes span all values.

    Two-dimensional embeddings are the positions themselves; of others, t-SNE places at most
    `points`.
    """
    rng = np.random.default_rng(seed)
    readable = np.flatnonzero(np.isfinite(embeddings).all(axis=1))
    labels = np.unique(split.labels[readable])
    chosen = np.sort(rng.choice(labels, min(classes, len(labels)), replace=False))
    rows = readable[np.isin(split.labels[readable], chosen)]
    if embeddings.shape[1] > 2 and len(rows) > points:
        rows = np.sort(rng.choice(rows, points, replace=False))
    positions = _plane(embeddings[rows], seed)
    low, high = positions.min(axis=0), positions.max(axis=0)
    positions = (positions - low) / np.maximum(high - low, 1e-12)
    figure, axes = figures.figure(6.4, 5.6)
    colors = colormaps["tab10" if len(chosen) <= 10 else "tab20"].colors
    for i, label in enumerate(chosen):
        of_class = positions[split.labels[rows] == label]
        axes.scatter(
            *of_class.T, s=9, lw=0, alpha=0.7, color=colors[i % 20], label=split.names[label]
        )
    axes.set(xlim=(-0.03, 1.03), ylim=(-0.03, 1.03), xticks=[], yticks=[], title=title)
    axes.legend(
        loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=8, markerscale=2
    )
    # A run that is killed continues with the frames that exist, so none may be incomplete.
    with atomic_writer(path, "wb") as file:
        figure.savefig(file, dpi=110, format="png")


def movie(
    folder: pathlib.Path, path: pathlib.Path, *, frame_ms: int = 200, last_frame_ms: int = 3000
) -> None:
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


def _plane(x: np.ndarray, seed: int) -> np.ndarray:
    """Positions in the plane: two dimensions as they are, more by t-SNE."""
    if x.shape[1] <= 2:
        return np.pad(x, ((0, 0), (0, 2 - x.shape[1])))
    from sklearn.manifold import TSNE

    perplexity = min(20, max(1, (len(x) - 1) / 4))
    return TSNE(perplexity=perplexity, init="pca", random_state=seed).fit_transform(x)
