"""Views of a method for the page of a run: attention, masks, cosines, points, as small records.

`views` chooses a few images of a split and makes a view of every kind of `methods.base.Inspect`
that the method offers. Each view has 'kind', 'title', perhaps 'note', and by kind:

* 'matrix': `items [n]`, `values [layers n n]`, `rows` and `columns` (their names)
* 'maps': `items [n]`, `values` int8 `[n m h w]`, `shape (m, h, w)`: signed, 127 is an image's peak
* 'histograms': `edges [bins + 1]`, `counts {name: [bins]}`, `means {name: mean}`, `axis`
* 'points': `x`, `y [n]`, `group [n]` of `groups`, `kind_of [n]` (0 disc, 1 cross), `names` of both

`items` are rows of the split.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jaxtyping import Float

_IMAGES_WITH_MASKS = 8
_CHANNELS = 2  # channels of masks that get a view of their own
_LAYERS = 4


def views(
    *,
    labels: np.ndarray,
    parts: Mapping[str, np.ndarray],
    inspect_fns: Mapping[str, Callable],
    read_fn: Callable[[np.ndarray], np.ndarray],
    rows: np.ndarray | None = None,
) -> list[dict[str, Any]]:
    """Makes the views of all kinds that the method offers.

    * `labels [n]` and `parts {name: [n d]}`: of the split; the parts are from `Inspect.parts`.
    * `inspect_fns {kind: images [k h w c] -> {name: array}}`: the other functions of `Inspect`,
      with parameters bound. A kind that is missing is left out.
    * `read_fn(rows [k]) -> images uint8 [k h w c]` reads images of the split.
    * `rows`: the rows of the split that may be chosen, such as the readable ones; by default all.
    """
    rows = np.arange(len(labels)) if rows is None else np.asarray(rows)
    labels = np.asarray(labels)[rows]
    result: list[dict[str, Any]] = []
    if not len(rows):
        return result
    if "batch_attention" in inspect_fns:
        chosen = _rows_of_classes(labels, classes=8, per_class=4)
        for name, attention in inspect_fns["batch_attention"](read_fn(rows[chosen])).items():
            result.append(attention_view(name, attention, rows[chosen], labels[chosen]))
    if "spatial_masks" in inspect_fns:
        count = min(_IMAGES_WITH_MASKS, len(rows))
        chosen = rows[np.sort(np.random.default_rng(0).choice(len(rows), count, replace=False))]
        for name, masks in inspect_fns["spatial_masks"](read_fn(chosen)).items():
            result.append(masks_view(name, masks, chosen))
            for channel in _channels_of_learners(masks):
                result.append(masks_view(name, masks, chosen, channel=channel))
    if len({part.shape for part in parts.values()}) == 1 and len(parts) > 1:
        stacked = np.stack([part[rows] for part in parts.values()], axis=1)
        result.append(cosines_view(cosines_of_pairs(stacked, labels)))
    if "synthetic_features" in inspect_fns:
        chosen = _rows_of_classes(labels, classes=8, per_class=8)
        features = inspect_fns["synthetic_features"](read_fn(rows[chosen]))
        for title, names in _SYNTHETIC.items():
            real, synthetic = (features[name] for name in names)
            result.append(points_view(title, real, synthetic, labels[chosen], names=names))
    return result


def _rows_of_classes(labels: np.ndarray, *, classes: int, per_class: int) -> np.ndarray:
    """Draws a few classes, and returns the rows of the first images of each."""
    rng = np.random.default_rng(0)
    all_classes, counts = np.unique(labels, return_counts=True)
    full_classes = all_classes[counts >= min(per_class, counts.max())]
    chosen = rng.choice(full_classes, min(classes, len(full_classes)), replace=False)
    return np.concatenate([np.flatnonzero(labels == c)[:per_class] for c in chosen])


def attention_view(
    name: str, attention: np.ndarray, items: np.ndarray, labels: np.ndarray
) -> dict[str, Any]:
    """Shows attention among images as a 'matrix', sorted by label: rows receive, columns send.

    `attention` is `[n n]`, or `[layers heads n n]`: then each layer shows the mean of its heads.
    """
    maps = np.asarray(attention, np.float32)
    maps = maps[None] if maps.ndim == 2 else maps.mean(axis=1)
    n = len(items)
    if maps.shape[1:] != (n, n):
        raise ValueError(f"attention among {maps.shape[1]} images must be among {n} images")
    order = np.argsort(labels, kind="stable")
    return {
        "kind": "matrix",
        "title": f"{name.replace('_', ' ').capitalize()} in a batch of {n} images",
        "note": "Images are sorted by class. Bright: the row's image listens to the column's.",
        "items": np.asarray(items)[order].astype(np.int32),
        "values": maps[:_LAYERS, order][:, :, order],
        "rows": "receiver",
        "columns": "sender",
    }


def _channels_of_learners(masks: Float[np.ndarray, "n m h w c"]) -> list[int]:
    """Returns the channels in which the masks of the learners differ most."""
    if masks.shape[1] < 2 or masks.shape[4] < 2:
        return []
    spread = np.asarray(masks, np.float64).std(axis=1).mean(axis=(0, 1, 2))
    return np.argsort(-spread, kind="stable")[:_CHANNELS].tolist()


def masks_view(
    name: str,
    masks: Float[np.ndarray, "n m h w c"],
    items: np.ndarray,
    *,
    channel: int | None = None,
) -> dict[str, Any]:
    """Shows the mask of each learner as 'maps'.

    A map is the mean over channels, or one `channel` as in figure 6 of Kim et al. (ECCV 2018),
    minus the mean over the learners. Every image has its own scale.
    """
    maps = np.asarray(masks, np.float64)
    maps = maps.mean(axis=4) if channel is None else maps[..., channel]
    maps = maps - maps.mean(axis=1, keepdims=True)
    peaks = np.maximum(np.abs(maps).max(axis=(1, 2, 3), keepdims=True), 1e-12)
    return {
        "kind": "maps",
        "title": f"{name.replace('_', ' ').capitalize()}: where each learner looks"
        + ("" if channel is None else f" in channel {channel}"),
        "items": np.asarray(items, np.int32),
        "values": np.rint(127 * maps / peaks).astype(np.int8),
        "shape": [int(size) for size in maps.shape[1:]],
    }


def cosines_of_pairs(
    parts: Float[np.ndarray, "n m d"], labels: Any, *, limit: int = 1000, seed: int = 0
) -> dict[str, np.ndarray]:
    """Computes cosines of three kinds of pairs, as in figure 5 of Kim et al. (ECCV 2018).

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


_PAIR_NAMES = {
    "positive": "one learner, two images of a class",
    "negative": "one learner, images of two classes",
    "self": "one image, two learners",
}


def cosines_view(cosines: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Shows the result of `cosines_of_pairs` as 'histograms'."""
    edges = np.linspace(-1, 1, 81)
    shown = {label: cosines[name] for name, label in _PAIR_NAMES.items() if len(cosines[name])}
    return {
        "kind": "histograms",
        "title": "Cosines between learners and between images",
        "note": "Learners of one image should differ: their cosines should not be near 1.",
        "edges": edges.astype(np.float32),
        "counts": {
            label: np.histogram(np.clip(values, -1, 1), edges)[0].astype(np.float32)
            for label, values in shown.items()
        },
        "means": {label: float(np.mean(values)) for label, values in shown.items()},
        "axis": "cosine",
    }


_SYNTHETIC = {
    "Features and their reconstruction": ("features", "reconstruction"),
    "Invariant embeddings and synthetic ones": ("z_invariant", "synthetic"),
}


def points_view(
    title: str,
    real: Float[np.ndarray, "n d"],
    synthetic: Float[np.ndarray, "n d"],
    labels: np.ndarray,
    *,
    names: tuple[str, str],
) -> dict[str, Any]:
    """Shows real and synthetic vectors of the same images as 'points'.

    The first two principal components of the real vectors span the plane.
    """
    project = _principal_plane(np.asarray(real, np.float64))
    positions = np.concatenate([project(np.asarray(x, np.float64)) for x in (real, synthetic)])
    classes, groups = np.unique(labels, return_inverse=True)
    return {
        "kind": "points",
        "title": title,
        "x": positions[:, 0].astype(np.float32),
        "y": positions[:, 1].astype(np.float32),
        "group": np.tile(groups, 2).astype(np.uint16),
        "groups": len(classes),
        "kind_of": np.repeat([0, 1], len(labels)).astype(np.uint8),
        "names": [name.replace("_", " ") for name in names],
    }


def _principal_plane(x: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """Returns a function that projects `[n d]` onto two principal components of `x`: `[n 2]`."""
    mean = x.mean(axis=0)
    _, _, components = np.linalg.svd(x - mean, full_matrices=False)
    plane = components[:2]
    plane = np.pad(plane, ((0, 2 - len(plane)), (0, 0)))
    return lambda y: (y - mean) @ plane.T
