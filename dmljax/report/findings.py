"""What the diagnosis says about the embeddings of a split: classes, suspects, duplicates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from dmljax import metrics
from dmljax.data.splits import Split
from dmljax.report.diagnosis import Data
from dmljax.report.scores_file import QueryScores

__all__ = ["Findings", "findings", "gray"]

_SIDE = 16  # pixels of the images whose correlation tells duplicates
_NEAR = 0.99  # duplicates are nearer than this share of the pairs of nearest items of one class


class Findings(NamedTuple):
    """The results of `dmljax.metrics`. All item numbers are those of the split.

    `labels` are those of the split and `queries` the numbers of its queries: the rows of `near`.
    `unreadable` counts the images without an embedding.
    """

    labels: np.ndarray
    queries: np.ndarray
    scores: QueryScores
    near: metrics.Neighborhoods
    classes: metrics.ClassTable
    confusions: metrics.Confusions
    suspects: metrics.SuspectedLabels
    duplicates: metrics.NearDuplicates
    unreadable: int


def findings(
    embeddings: np.ndarray,
    split: Split,
    scores: QueryScores,
    *,
    read_fn: Callable[[int], np.ndarray] | None = None,
    devices: Sequence[Any] | None = None,
) -> Findings:
    """The findings about a split. `read_fn(row)` reads one of its images, for the duplicates."""
    data = Data.of(
        embeddings,
        split.labels,
        names=split.names,
        query=split.query,
        gallery=split.gallery,
        groups=split.groups,
        devices=devices,
    )
    rows, items, search = data.queries, data.items, data.search
    vectors, labels = data.query_vectors, data.query_labels
    item_labels = search.get("gallery_labels")
    recalls, precisions = scores.recall_at_1, scores.map_at_r
    near = metrics.neighborhoods(vectors, labels, devices=devices, **search)
    histograms = metrics.similarity_histograms(vectors, labels, **search)
    confusions = metrics.confusions(labels, recalls, near.other, gallery_labels=item_labels)
    suspects = metrics.suspected_labels(near, histograms, recalls, dimension=data.x.shape[1])
    pixels: dict[str, Any] = {}
    if read_fn is not None:
        pixels["gray_fn"] = lambda numbers: gray(read_fn, rows[numbers])
        if not data.within:
            pixels["gallery_gray_fn"] = lambda numbers: gray(read_fn, items[numbers])
    has_own = near.own >= 0
    threshold = float(np.quantile(near.own_similarity[has_own], _NEAR)) if has_own.any() else 1.0
    duplicates = metrics.near_duplicates(
        vectors, labels, threshold=threshold, devices=devices, **search, **pixels
    )
    return Findings(
        labels=split.labels,
        queries=rows,
        scores=scores,
        near=near._replace(
            nearest=_numbers(items, near.nearest),
            own=_numbers(items, near.own),
            other=_numbers(items, near.other),
        ),
        classes=metrics.class_table(
            vectors, labels, recalls, precisions, devices=devices, **search
        ),
        confusions=confusions._replace(examples=_numbers(rows, confusions.examples)),
        suspects=suspects._replace(items=rows[suspects.items]),
        duplicates=duplicates._replace(
            queries=rows[duplicates.queries], items=items[duplicates.items]
        ),
        unreadable=int((~data.readable).sum()),
    )


def gray(read_fn: Callable[[int], np.ndarray], rows: np.ndarray) -> np.ndarray:
    """These images in gray, `[n 16 16]`; NaN where an image can no longer be read."""
    images = np.full((len(rows), _SIDE, _SIDE), np.nan)
    for place, row in enumerate(rows):
        try:
            pixels = np.asarray(read_fn(int(row)))
        except (OSError, ValueError):
            continue
        picture = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
        size = (_SIDE, _SIDE)
        images[place] = np.asarray(picture.convert("L").resize(size, Image.Resampling.BOX))
    return images


def _numbers(rows: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Numbers in the split of places among its queries or gallery; -1 stays."""
    return np.where(places >= 0, rows[places], -1)
