"""Pictures of what goes on inside a method, one for each kind of array of `methods.base.Inspect`.

`draw` chooses a few images of a split and draws every kind that the method offers. The other
functions each draw one kind from arrays alone.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jaxtyping import Float

from dmljax.report import figures

__all__ = [
    "batch_attention",
    "cosines_of_pairs",
    "draw",
    "part_cosines",
    "spatial_masks",
    "synthetic_features",
]

_PAIR_COLORS = {"self": "#3a6ea5", "positive": "#2a9d5c", "negative": "#d1495b"}
_IMAGES_WITH_MASKS = 8


def draw(
    folder: pathlib.Path,
    *,
    labels: np.ndarray,
    parts: Mapping[str, np.ndarray],
    inspect_fns: Mapping[str, Callable],
    read_fn: Callable[[np.ndarray], np.ndarray],
) -> list[str]:
    """Draws every kind that there is into `folder` and returns the names of the files.

    * `labels [n]` and `parts {name: [n d]}`: of the split; the parts are those of `Inspect.parts`.
    * `inspect_fns {kind: images [k h w c] -> {name: array}}`: the other functions of `Inspect`,
      with parameters bound. A kind that is missing is not drawn.
    * `read_fn(rows [k]) -> images uint8 [k h w c]` reads images of the split.
    """
    names = []
    if "spatial_masks" in inspect_fns:
        count = min(_IMAGES_WITH_MASKS, len(labels))
        images = read_fn(np.random.default_rng(0).choice(len(labels), count, replace=False))
        for name, masks in inspect_fns["spatial_masks"](images).items():
            names.append(f"{name}.png")
            spatial_masks(masks, images, folder / names[-1])
    if len({part.shape for part in parts.values()}) == 1 and len(parts) > 1:
        stacked = np.stack(list(parts.values()), axis=1)
        names.append("cosines.png")
        part_cosines(cosines_of_pairs(stacked, labels), folder / names[-1])
    if "batch_attention" in inspect_fns:
        rows = _rows_of_classes(labels, classes=8, per_class=4)
        images = read_fn(rows)
        for name, attention in inspect_fns["batch_attention"](images).items():
            names.append(f"{name}.png")
            batch_attention(images, attention, folder / names[-1], labels=labels[rows])
    if "synthetic_features" in inspect_fns:
        rows = _rows_of_classes(labels, classes=8, per_class=8)
        features = inspect_fns["synthetic_features"](read_fn(rows))
        names.append("synthetic.png")
        synthetic_features(features, labels[rows], folder / names[-1])
    return names


def _rows_of_classes(labels: np.ndarray, *, classes: int, per_class: int) -> np.ndarray:
    """Rows of a few classes, which are drawn, with the first images of each."""
    rng = np.random.default_rng(0)
    all_classes, counts = np.unique(labels, return_counts=True)
    full_classes = all_classes[counts >= min(per_class, counts.max())]
    chosen = rng.choice(full_classes, min(classes, len(full_classes)), replace=False)
    return np.concatenate([np.flatnonzero(labels == c)[:per_class] for c in chosen])


def spatial_masks(
    masks: Float[np.ndarray, "n m h w c"],
    images: Any,
    path: str | os.PathLike,
    *,
    channel: int | None = None,
) -> None:
    """Draws every image (uint8) and, beside it, what the mask of each learner lets through.

    Shows one `channel`, as figure 6 of Kim et al. (ECCV 2018), or the mean over all. Red marks
    where a learner lets through more than the learners do on average, blue marks where less. Every
    image has its own scale.
    """
    masks, images = np.asarray(masks, np.float64), np.asarray(images)
    maps = masks.mean(axis=4) if channel is None else masks[..., channel]  # [n m h w]
    maps = maps - maps.mean(axis=1, keepdims=True)
    n, m = maps.shape[:2]
    figure, axes = figures.figure(
        1.15 * (m + 1) + 0.2, 1.15 * n + 0.3, nrows=n, ncols=m + 1, squeeze=False
    )
    for row_axes, image, learner_maps in zip(axes, images, maps, strict=True):
        peak = max(np.abs(learner_maps).max(), 1e-12)
        gray = image.mean(axis=2)
        h, w = gray.shape
        extent = (-0.5, w - 0.5, h - 0.5, -0.5)
        picture = image[:, :, 0] if image.shape[2] == 1 else image
        row_axes[0].imshow(picture, cmap="gray", vmax=255)
        for axis, values in zip(row_axes[1:], learner_maps, strict=True):
            # The image is washed out, so that colors show on dark images too.
            axis.imshow(gray, cmap="gray", vmin=-128, vmax=255, extent=extent)
            axis.imshow(
                values,
                cmap="RdBu_r",
                vmin=-peak,
                vmax=peak,
                alpha=0.6,
                extent=extent,
                interpolation="bilinear",
            )
        for axis in row_axes:
            axis.set(xticks=[], yticks=[])
            axis.spines[:].set_visible(False)
    axes[0][0].set_title("image", fontsize=9)
    for i, axis in enumerate(axes[0][1:]):
        axis.set_title(f"learner {i}", fontsize=9)
    figure.savefig(path, dpi=110)


def cosines_of_pairs(
    parts: Float[np.ndarray, "n m d"], labels: Any, *, limit: int = 1000, seed: int = 0
) -> dict[str, np.ndarray]:
    """Cosines of three kinds of pairs, as in figure 5 of Kim et al. (ECCV 2018).

    "self": one image, two parts. "positive" and "negative": one part, two images of the same class
    or of two classes. If there are more than `limit` images, `seed` draws that many.
    """
    parts, labels = np.asarray(parts, np.float64), np.asarray(labels)
    rows = np.arange(len(parts))
    if len(rows) > limit:
        rows = np.sort(np.random.default_rng(seed).choice(rows, limit, replace=False))
    x, labels = parts[rows], labels[rows]
    x = x / np.maximum(np.linalg.norm(x, axis=2, keepdims=True), 1e-12)
    first, second = np.triu_indices(x.shape[1], 1)
    i, j = np.triu_indices(len(x), 1)
    same = labels[i] == labels[j]
    between_images = np.stack([(y @ y.T)[i, j] for y in np.moveaxis(x, 1, 0)])  # [m pairs]
    return {
        "self": np.sum(x[:, first] * x[:, second], axis=2).ravel(),
        "positive": between_images[:, same].ravel(),
        "negative": between_images[:, ~same].ravel(),
    }


def part_cosines(cosines: Mapping[str, np.ndarray], path: str | os.PathLike) -> None:
    """Draws histograms of `cosines_of_pairs`, each of area 1."""
    figure, axes = figures.figure(6.5, 3.6)
    for name, values in cosines.items():
        if len(values):
            axes.hist(
                np.clip(values, -1, 1),
                bins=np.linspace(-1, 1, 81),
                density=True,
                histtype="stepfilled",
                alpha=0.45,
                color=_PAIR_COLORS[name],
                edgecolor=_PAIR_COLORS[name],
                label=f"{name} pairs, mean {np.mean(values):.2f}",
            )
    axes.set(xlabel="cosine", ylabel="density", xlim=(-1, 1))
    axes.legend(frameon=False, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def batch_attention(
    images: np.ndarray,
    attention: np.ndarray,
    path: str | os.PathLike,
    *,
    labels: np.ndarray | None = None,
) -> None:
    """Draws a map of attention: receivers down the side, senders along the top.

    `images` are `uint8 [n h w c]`. `attention` is `[n n]`, or `[layers heads n n]`: then every
    layer has a map of its own, the mean over its heads. With `labels`, images are sorted by label,
    and white lines separate the classes.
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

    # Strips of thumbnails as long as the map, large enough to recognize a bird.
    side = min(14.0, max(4.0, 0.32 * n))
    strip = side / n
    figure, axes = figures.figure(
        len(maps) * (side + strip) + 1.2,
        side + strip + 0.6,
        nrows=2,
        ncols=2 * len(maps),
        width_ratios=[strip, side] * len(maps),
        height_ratios=[strip, side],
        squeeze=False,
    )
    figure.get_layout_engine().set(w_pad=0.02, h_pad=0.02, wspace=0, hspace=0)
    extent = (-0.5, n - 0.5)
    # The scale does not start at 0: early in training all values are close to 1 / n.
    scale = {"vmin": maps.min(), "vmax": maps.max()}
    for layer, values in enumerate(maps):
        corner, top, left, middle = axes[:, 2 * layer : 2 * layer + 2].ravel()
        corner.set_axis_off()
        top.imshow(np.concatenate(list(images), axis=1), extent=(*extent, 0, 1), aspect="auto")
        left.imshow(np.concatenate(list(images)), extent=(0, 1, n - 0.5, -0.5), aspect="auto")
        heatmap = middle.imshow(values, cmap="magma", aspect="auto", **scale)
        middle.vlines(bounds, *extent, color="white", lw=0.6)
        middle.hlines(bounds, *extent, color="white", lw=0.6)
        middle.set(xlim=extent, ylim=extent[::-1])
        for axis in (top, left, middle):
            axis.set(xticks=[], yticks=[])
            axis.spines[:].set_visible(False)
        title = "sender" if len(maps) == 1 else f"sender, layer {layer + 1}"
        top.set_title(title, fontsize=9, loc="left")
        left.set_ylabel("receiver", fontsize=9)
    label = f"attention ({maps.mean():.2g} on average)"
    figure.colorbar(heatmap, ax=axes[1, -1], label=label, shrink=0.6, pad=0.02)
    figure.savefig(path, dpi=110)


_SYNTHETIC_PANELS = {
    "features": ("features", "reconstruction"),
    "embeddings": ("z_invariant", "synthetic"),
}


def synthetic_features(
    features: Mapping[str, Float[np.ndarray, "n d"]], labels: np.ndarray, path: str | os.PathLike
) -> None:
    """Draws real (dots) and synthetic (crosses) vectors of the same images in a plane.

    `features` are those of `Inspect.synthetic_features`. Left: features of the backbone and their
    reconstructions. Right: invariant embeddings, and the same plus a sample of the variation. The
    plane is that of the first two principal components of the real vectors.
    """
    from matplotlib import colormaps

    figure, axes = figures.figure(9, 4.4, ncols=len(_SYNTHETIC_PANELS))
    classes, class_indices = np.unique(labels, return_inverse=True)
    colors = np.asarray(colormaps["tab20"].colors)[class_indices % 20]
    for axis, (title, (real_name, synthetic_name)) in zip(
        axes, _SYNTHETIC_PANELS.items(), strict=True
    ):
        real, synthetic = (np.asarray(features[n], np.float64) for n in (real_name, synthetic_name))
        project = _principal_plane(real)
        axis.scatter(*project(real).T, s=14, c=colors, lw=0, label="real")
        axis.scatter(*project(synthetic).T, s=22, c=colors, marker="x", lw=0.9, label="synthetic")
        axis.set(title=f"{title} of {len(classes)} classes", xticks=[], yticks=[])
        axis.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)


def _principal_plane(x: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """The projection of vectors `[n d]` onto the first two principal components of `x`: `[n 2]`."""
    mean = x.mean(axis=0)
    _, _, components = np.linalg.svd(x - mean, full_matrices=False)
    plane = components[:2]
    plane = np.pad(plane, ((0, 2 - len(plane)), (0, 0)))
    return lambda y: (y - mean) @ plane.T
