"""A picture of the attention over a batch."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping

import numpy as np

__all__ = ["attention_picture", "draw"]


def draw(
    folder: pathlib.Path,
    *,
    labels: np.ndarray,
    embeddings: Mapping[str, np.ndarray],
    read_fn: Callable,
    show_fn: Callable,
    classes: int = 8,
    per_class: int = 4,
) -> list[str]:
    """The attention among a few images of a few classes, as in a batch."""
    del embeddings
    rng = np.random.default_rng(0)
    found, counts = np.unique(labels, return_counts=True)
    full = found[counts >= min(per_class, counts.max())]
    chosen = rng.choice(full, min(classes, len(full)), replace=False)
    rows = np.concatenate([np.flatnonzero(labels == c)[:per_class] for c in chosen])
    images = read_fn(rows)
    names = []
    for kind, attention in show_fn(images).items():
        names.append(f"{kind}.png")
        attention_picture(images, attention, folder / names[-1], labels=labels[rows])
    return names


def attention_picture(
    images: np.ndarray,
    attention: np.ndarray,
    path: str | pathlib.Path,
    *,
    labels: np.ndarray | None = None,
) -> None:
    """Who hears whom: receivers down the side, senders along the top, the attention between.

    `images` are `uint8 [n h w c]` and `attention` is `[n n]`, or `[layers heads n n]`: then each
    layer is a map of its own, the mean of its heads. With `labels` the images are sorted by them,
    and lines part the classes.
    """
    images, maps = np.asarray(images), np.asarray(attention, np.float32)
    maps = maps[None] if maps.ndim == 2 else maps.mean(axis=1)
    n = len(images)
    if maps.shape[1:] != (n, n):
        raise ValueError(f"attention among {maps.shape[1]} images does not suit {n} images")
    order = np.arange(n) if labels is None else np.argsort(labels, kind="stable")
    bounds = [] if labels is None else 0.5 + np.flatnonzero(np.diff(np.asarray(labels)[order]))
    images, maps = images[order], maps[:, order][:, :, order]
    if images.shape[3] == 1:
        images = np.repeat(images, 3, axis=3)

    from matplotlib.figure import Figure

    # Strips as long as the map, of thumbnails at which a bird is still a bird.
    side = min(14.0, max(4.0, 0.32 * n))
    strip = side / n
    size = (len(maps) * (side + strip) + 1.2, side + strip + 0.6)
    figure = Figure(figsize=size, layout="constrained")
    rows = figure.subplots(
        2,
        2 * len(maps),
        width_ratios=[strip, side] * len(maps),
        height_ratios=[strip, side],
        squeeze=False,
    )
    figure.get_layout_engine().set(w_pad=0.02, h_pad=0.02, wspace=0, hspace=0)
    extent = (-0.5, n - 0.5)
    # Not from 0 on: early, and with many images, all of it lies around 1 / n.
    scale = {"vmin": maps.min(), "vmax": maps.max()}
    for layer, values in enumerate(maps):
        corner, top, left, middle = rows[:, 2 * layer : 2 * layer + 2].ravel()
        corner.set_axis_off()
        across, down = np.concatenate(list(images), axis=1), np.concatenate(list(images))
        top.imshow(across, extent=(*extent, 0, 1), aspect="auto")
        left.imshow(down, extent=(0, 1, n - 0.5, -0.5), aspect="auto")
        shown = middle.imshow(values, cmap="magma", aspect="auto", **scale)
        middle.vlines(bounds, *extent, color="white", lw=0.6)
        middle.hlines(bounds, *extent, color="white", lw=0.6)
        middle.set(xlim=extent, ylim=extent[::-1])
        for axis in (top, left, middle):
            axis.set(xticks=[], yticks=[])
            axis.spines[:].set_visible(False)
        heard = "heard" if len(maps) == 1 else f"heard, layer {layer + 1}"
        top.set_title(heard, fontsize=9, loc="left")
        left.set_ylabel("hears", fontsize=9)
    label = f"attention ({maps.mean():.2g} on average)"
    figure.colorbar(shown, ax=rows[1, -1], label=label, shrink=0.6, pad=0.02)
    figure.savefig(path, dpi=110)
