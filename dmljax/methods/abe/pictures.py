"""Pictures of what the learners of ABE see and of how far they agree."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jaxtyping import Float

__all__ = ["cosines", "draw", "draw_cosines", "draw_masks"]


def draw(
    folder: pathlib.Path,
    *,
    labels: np.ndarray,
    embeddings: Mapping[str, np.ndarray],
    read_fn: Callable,
    show_fn: Callable,
    masked: bool,
    images: int = 8,
) -> list[str]:
    """The masks of a few images, where there are any, and cosines of several learners."""
    names = []
    if masked:
        rows = np.random.default_rng(0).choice(len(labels), min(images, len(labels)), replace=False)
        chosen = read_fn(rows)
        draw_masks(show_fn(chosen)["masks"], chosen, folder / "masks.png")
        names.append("masks.png")
    if parts := [part for name, part in embeddings.items() if name]:
        draw_cosines(cosines(np.stack(parts, axis=1), labels), folder / "cosines.png")
        names.append("cosines.png")
    return names


_COLORS = {"self": "#3a6ea5", "positive": "#2a9d5c", "negative": "#d1495b"}


def cosines(
    learners: Float[np.ndarray, "n m d"], labels: Any, *, limit: int = 1000, seed: int = 0
) -> dict[str, np.ndarray]:
    """Cosines of three kinds of pairs, the paper's figure 5.

    "self": one image, two learners. "positive" and "negative": two images of one class or of two,
    one learner. Of `limit` images at most, drawn by `seed`.
    """
    learners, labels = np.asarray(learners, np.float64), np.asarray(labels)
    rows = np.arange(len(learners))
    if len(rows) > limit:
        rows = np.sort(np.random.default_rng(seed).choice(rows, limit, replace=False))
    x, labels = learners[rows], labels[rows]
    x = x / np.maximum(np.linalg.norm(x, axis=2, keepdims=True), 1e-12)
    first, second = np.triu_indices(x.shape[1], 1)
    i, j = np.triu_indices(len(x), 1)
    same = labels[i] == labels[j]
    between = np.stack([(part @ part.T)[i, j] for part in np.moveaxis(x, 1, 0)])  # [m pairs]
    return {
        "self": np.sum(x[:, first] * x[:, second], axis=2).ravel(),
        "positive": between[:, same].ravel(),
        "negative": between[:, ~same].ravel(),
    }


def draw_cosines(cosines: dict[str, np.ndarray], path: str | os.PathLike) -> None:
    """Histograms of `cosines`, each of area 1."""
    figure, axes = _figure(6.5, 3.6)
    for name, values in cosines.items():
        if len(values):
            label = f"{name} pairs, mean {np.mean(values):.2f}"
            bins = np.linspace(-1, 1, 81)
            axes.hist(
                np.clip(values, -1, 1),
                bins=bins,
                density=True,
                histtype="stepfilled",
                alpha=0.45,
                color=_COLORS[name],
                edgecolor=_COLORS[name],
                label=label,
            )
    axes.set(xlabel="cosine", ylabel="density", xlim=(-1, 1))
    axes.legend(frameon=False, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def draw_masks(
    masks: Float[np.ndarray, "n m h w c"],
    images: Any,
    path: str | os.PathLike,
    *,
    channel: int | None = None,
) -> None:
    """Every image (uint8) and, beside it, what each learner's mask lets through of it.

    One `channel`, as in the paper's figure 6, or the mean over all. Where a learner lets through
    more than the learners do on average is red, where less is blue; the scale is each image's own.
    """
    masks, images = np.asarray(masks, np.float64), np.asarray(images)
    maps = masks.mean(axis=4) if channel is None else masks[..., channel]  # [n m h w]
    maps = maps - maps.mean(axis=1, keepdims=True)
    n, m = maps.shape[:2]
    figure, axes = _figure(
        1.15 * (m + 1) + 0.2, 1.15 * n + 0.3, nrows=n, ncols=m + 1, squeeze=False
    )
    for line, image, row in zip(axes, images, maps, strict=True):
        peak = max(np.abs(row).max(), 1e-12)
        grey = image.mean(axis=2)
        h, w = grey.shape
        box = (-0.5, w - 0.5, h - 0.5, -0.5)
        line[0].imshow(image[:, :, 0] if image.shape[2] == 1 else image, cmap="gray", vmax=255)
        for axis, part in zip(line[1:], row, strict=True):
            # Washed out, so that colours show on dark images too.
            axis.imshow(grey, cmap="gray", vmin=-128, vmax=255, extent=box)
            axis.imshow(
                part,
                cmap="RdBu_r",
                vmin=-peak,
                vmax=peak,
                alpha=0.6,
                extent=box,
                interpolation="bilinear",
            )
        for axis in line:
            axis.set(xticks=[], yticks=[])
            axis.spines[:].set_visible(False)
    axes[0][0].set_title("image", fontsize=9)
    for i, axis in enumerate(axes[0][1:]):
        axis.set_title(f"learner {i}", fontsize=9)
    figure.savefig(path, dpi=110)


def _figure(width: float, height: float, **kwargs):
    from matplotlib.figure import Figure  # of pyplot, a notebook would see its backend changed

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(**kwargs)
