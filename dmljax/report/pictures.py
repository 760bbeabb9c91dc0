"""A movie of the embedding: a frame of every evaluation, joined at the end of a run."""

import pathlib

import numpy as np
from matplotlib import colormaps  # not later: matplotlib may change the environment at its import
from matplotlib.figure import Figure
from PIL import Image

from dmljax.data.splits import Split
from dmljax.files.writing import atomic_writer
from dmljax.report import projection


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
    figure = Figure(figsize=(6.4, 5.6), layout="constrained")  # pyplot would change the backend
    axes = figure.subplots()
    colors = colormaps["tab10" if len(chosen) <= 10 else "tab20"]
    for i, label in enumerate(chosen):
        of_class = positions[split.labels[rows] == label]
        x, y = of_class.T
        name, color = split.names[label], colors(i % 20)
        axes.scatter(x, y, s=9, lw=0, alpha=0.7, color=color, label=name)
    axes.set(xlim=(-0.03, 1.03), ylim=(-0.03, 1.03), xticks=[], yticks=[], title=title)
    axes.legend(
        loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=8, markerscale=2
    )
    # A run that is killed continues with the frames that exist, so none may be incomplete.
    with atomic_writer(path, "wb") as file:
        figure.savefig(file, dpi=110, format="png")


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
