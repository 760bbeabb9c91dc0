"""What the page says about classes, labels and the embedding, from the functions of `metrics`.

The functions take the arrays of a split (`Data`) and the results of the searches. They return
plain dicts: the numbers and the items that the page shows, and no more of them than it can show.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image

from dmljax import metrics, retrieval
from dmljax.data.decode import UnreadableImage
from dmljax.data.splits import Search, Split
from dmljax.report import sprites

__all__ = [
    "NEIGHBORS",
    "Data",
    "class_table",
    "confusions",
    "duplicates",
    "embedding",
    "gray_copies",
    "histograms",
    "hubs",
    "leaks",
    "neighborhoods",
    "suspects",
]

NEIGHBORS = 10
_FMRS = tuple(sorted({1 / (m * 10**e) for e in range(1, 7) for m in (1, 2, 5)}, reverse=True)[:16])
_MOST_LISTED = 200
_MOST_CONFUSIONS = 60
_MOST_HUBS = 12
_LEAST_WRONG = 10  # queries of other classes that find an item, from which on it is a hub
_NEAR = 0.99  # duplicates are nearer than this share of the best partners within a class
_GRAY_SIDE = 16  # pixels of the gray copies
_FLAT = 3  # dimensions up to which closeness says little about images


@dataclasses.dataclass(frozen=True)
class Data:
    """The embeddings `x [n d]` of a split, and the search that its protocol describes."""

    x: np.ndarray
    split: Split
    search: Search
    devices: Sequence[Any] | None = None

    @classmethod
    def of(
        cls, embeddings: np.ndarray, split: Split, *, devices: Sequence[Any] | None = None
    ) -> Data:
        x = np.asarray(embeddings)
        if x.ndim != 2 or len(x) != len(split):
            raise ValueError(
                f"embeddings of shape {x.shape} and {len(split)} labels: give one row and one "
                "label for each image"
            )
        if not np.issubdtype(x.dtype, np.floating):
            raise ValueError(f"embeddings are {x.dtype}: give floating-point numbers")
        x = x.astype(np.float32, copy=False)
        return cls(x, split, split.search(x), devices)

    @property
    def labels(self) -> np.ndarray:
        return self.split.labels

    @property
    def names(self) -> Sequence[str]:
        return self.split.names

    @property
    def readable(self) -> np.ndarray:
        return self.search.readable

    @property
    def queries(self) -> np.ndarray:
        return self.search.queries

    @property
    def pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """The embeddings and the labels of the queries, which every search starts with."""
        return self.search.embeddings, self.search.labels

    @property
    def gallery_labels(self) -> np.ndarray | None:
        return self.search.options.get("gallery_labels")

    @property
    def is_flat(self) -> bool:
        """Whether there are so few dimensions that closeness says little about the images."""
        return self.x.shape[1] <= _FLAT

    @property
    def has_unit_norms(self) -> bool:
        """Whether Euclidean and cosine neighbors are the same."""
        norms = np.linalg.norm(self.x[self.readable], axis=1)
        return bool(len(norms)) and bool(np.abs(norms - 1).max() < 1e-3)

    def items_at(self, places: np.ndarray) -> np.ndarray:
        """Rows of the split from places in the gallery; -1 stays -1."""
        places = np.asarray(places)
        return np.where(places >= 0, self.search.items[np.maximum(places, 0)], -1)

    def compact(self, rows: np.ndarray) -> np.ndarray:
        """Rows of the split as small unsigned integers, with n for -1."""
        n = len(self.labels)
        return np.where(rows < 0, n, rows).astype(np.uint16 if n < 65535 else np.uint32)


def neighborhoods(
    data: Data, *, similarity_fn: retrieval.SimilarityFn = retrieval.euclidean
) -> metrics.Neighborhoods:
    """The nearest items, by the distance that the scores use."""
    return metrics.neighborhoods(
        *data.pairs,
        k=NEIGHBORS,
        similarity_fn=retrieval.cosine if data.has_unit_norms else similarity_fn,
        devices=data.devices,
        **data.search.options,
    )


def histograms(data: Data) -> metrics.SimilarityHistograms:
    return metrics.similarity_histograms(*data.pairs, **data.search.options)


def class_table(data: Data, per_query: Mapping[str, np.ndarray], map_at_r: np.ndarray):
    """One row for every name: counts, scores, tightness and the next class; NaN without images.

    `map_at_r [n]` chooses the example of a class: its worst query.
    """
    table = metrics.class_table(
        *data.pairs,
        per_query["R@1"],
        per_query["MAP@R"],
        devices=data.devices,
        **data.search.options,
    )
    count = len(data.names)
    rows: dict[str, Any] = {"count": np.bincount(data.labels, minlength=count).astype(np.uint32)}
    queries = np.zeros(count, np.uint32)
    queries[table.labels] = table.queries
    rows["queries"] = queries
    columns = {
        "recall": table.recall_at_1,
        "map_at_r": table.map_at_r,
        "upper": table.upper,
        "inside": table.inside,
        "next_similarity": table.next_similarity,
    }
    for name, values in columns.items():
        rows[name] = np.full(count, np.nan, np.float32)
        rows[name][table.labels] = values
    following = np.full(count, count, np.uint32)
    has_next = table.next_class >= 0
    following[table.labels[has_next]] = table.labels[table.next_class[has_next]]
    order = np.concatenate(
        [table.labels[table.order], np.setdiff1d(np.arange(count), table.labels)]
    )
    rows["order"] = order.astype(np.uint32)
    if len(table.labels) > 2:
        rows["next"] = following
    else:
        del rows["next_similarity"]
    example = np.full(count, len(data.labels), np.uint32)
    by_score = np.argsort(-map_at_r[data.queries], kind="stable")  # the worst is written last
    example[data.search.labels[by_score]] = data.queries[by_score]
    rows["example"] = example
    return rows


def confusions(
    data: Data, per_query: Mapping[str, np.ndarray], near: metrics.Neighborhoods
) -> dict[str, Any]:
    """Which class is taken for which, with pairs of a query and what was nearest."""
    mixed = metrics.confusions(
        data.search.labels, per_query["R@1"], near.other, gallery_labels=data.gallery_labels
    )
    pairs = []
    for k in range(min(len(mixed.labels), _MOST_CONFUSIONS)):
        queries = mixed.examples[k][mixed.examples[k] >= 0]
        nearest = data.items_at(near.other[queries])
        pairs.append(
            {
                "a": int(mixed.labels[k]),
                "b": int(mixed.taken_for[k]),
                "count": int(mixed.counts[k]),
                "of": int(mixed.queries[k]),
                "back": int(mixed.reverse[k]),
                "close": int(mixed.threats[k]),
                "examples": np.stack([data.queries[queries], nearest], axis=1).tolist(),
            }
        )
    return {"pairs": pairs, "total": len(mixed.labels)}


def suspects(
    data: Data,
    per_query: Mapping[str, np.ndarray],
    near: metrics.Neighborhoods,
    histograms: metrics.SimilarityHistograms,
) -> dict[str, Any]:
    """Images whose label is perhaps wrong, with the best partners of both classes."""
    found = metrics.suspected_labels(near, histograms, per_query["R@1"], dimension=data.x.shape[1])
    own, other = data.items_at(near.own), data.items_at(near.other)
    listed = [
        {
            "item": int(data.queries[row]),
            "own": int(own[row]),
            "other": int(other[row]),
            "to_own": float(near.own_similarity[row]),
            "to_other": float(near.other_similarity[row]),
        }
        for row in found.items[:_MOST_LISTED]
    ]
    note = (
        "Its best partner of its own class is no nearer than a stranger would be by luck, and an "
        "image of another class is as near as real partners are. Swaps between classes that look "
        "alike are mostly not found."
    )
    if listed:
        return {"suspects": listed, "suspects_note": note}
    return (
        {"refusal": f"Suspected labels are not listed: {found.refusal}."} if found.refusal else {}
    )


def hubs(data: Data, near: metrics.Neighborhoods) -> dict[str, Any]:
    """Images that very many queries find wrongly. Also `counts` and `wrong` of all images."""
    items = data.search.items
    near_hubs = metrics.hubs(near.nearest, data.search.labels, gallery_labels=data.gallery_labels)
    counts, wrong = np.zeros((2, len(data.labels)), np.int64)
    counts[items], wrong[items] = near_hubs.counts, near_hubs.wrong
    listed = []
    for place in near_hubs.order[:_MOST_HUBS]:
        if near_hubs.wrong[place] < _LEAST_WRONG:
            break
        finds = (near.nearest == place).any(axis=1)
        finds &= data.search.labels != data.labels[items[place]]
        listed.append(
            {
                "item": int(items[place]),
                "found": int(near_hubs.counts[place]),
                "wrong": int(near_hubs.wrong[place]),
                "queries": data.queries[finds][:8].tolist(),
            }
        )
    note = (
        "How often an image is among the ten nearest of a query is "
        f"{'skewed' if near_hubs.skewness > 1 else 'even'} here (skewness "
        f"{near_hubs.skewness:.2f}), and {100 * near_hubs.never_found:.1f} % of the images are "
        "never found. A diagnosis, not a fault."
    )
    return {
        "counts": counts,
        "wrong": wrong,
        "skewness": near_hubs.skewness,
        "never_found": near_hubs.never_found,
        "hubs": listed,
        "hubs_note": note,
    }


GrayFn = Callable[[np.ndarray], np.ndarray]  # rows [m] -> small gray copies [m 16 16]


def gray_copies(read_fn: Callable[[int], np.ndarray] | None) -> GrayFn | None:
    """Gray copies of the middle square of images, to compare pixels.

    An image that cannot be read gives a constant copy, which correlates with nothing.
    """
    if read_fn is None:
        return None

    def gray_fn(rows: np.ndarray) -> np.ndarray:
        copies = np.zeros((len(rows), _GRAY_SIDE, _GRAY_SIDE), np.float32)
        for copy, row in zip(copies, rows, strict=True):
            with contextlib.suppress(UnreadableImage, OSError):
                picture = Image.fromarray(sprites.cover(read_fn(int(row)), 4 * _GRAY_SIDE))
                copy[:] = np.asarray(picture.convert("L").resize((_GRAY_SIDE, _GRAY_SIDE)))
        return copies

    return gray_fn


def duplicates(data: Data, near: metrics.Neighborhoods, gray_fn: GrayFn | None) -> dict[str, Any]:
    """Pairs of almost the same picture with two labels: near in the embedding, and equal pixels.

    Without pictures, only the embedding is compared.
    """
    own = near.own_similarity[np.isfinite(near.own_similarity)]
    if not len(own):
        return {}
    threshold = float(np.quantile(own, _NEAR))
    queries, items = data.queries, data.search.items
    pairs = metrics.near_duplicates(
        *data.pairs,
        threshold=threshold,
        gray_fn=None if gray_fn is None else lambda places: gray_fn(queries[places]),
        gallery_gray_fn=None if gray_fn is None else lambda places: gray_fn(items[places]),
        devices=data.devices,
        **data.search.options,
    )
    listed = [
        {"a": int(queries[a]), "b": int(items[b]), "similarity": float(s)}
        for a, b, s in zip(pairs.queries, pairs.items, pairs.similarities, strict=True)
    ]
    note = (
        f"Mutual nearest neighbors of two classes, with a cosine of at least {threshold:.3f} (99 % "
        "of the best partners within a class are farther)"
    )
    note += ". No pixels were compared." if gray_fn is None else " and almost the same pixels."
    return {"duplicates": listed[:_MOST_LISTED], "duplicates_note": note} if listed else {}


def leaks(
    data: Data,
    near: metrics.Neighborhoods,
    gray_fn: GrayFn | None,
    training: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Test images that are also among the training images, by the same rule as duplicates.

    `training` has `embeddings`, `labels`, `names` and `read_fn(row) -> uint8 [h w c]` of training
    images, and `total`, how many there are in all.
    """
    own = near.own_similarity[np.isfinite(near.own_similarity)]
    if gray_fn is None or training is None or not len(own) or not len(training["labels"]):
        return {}
    pairs = metrics.near_duplicates(
        *data.pairs,
        gallery=training["embeddings"],
        gallery_labels=np.asarray(training["labels"]) + len(data.names),
        threshold=float(np.quantile(own, _NEAR)),
        gray_fn=lambda places: gray_fn(data.queries[places]),
        gallery_gray_fn=gray_copies(training["read_fn"]),
        devices=data.devices,
    )
    listed = [
        {
            "item": int(data.queries[a]),
            "train_class": str(training["names"][training["labels"][b]]),
            "similarity": float(s),
        }
        for a, b, s in zip(pairs.queries, pairs.items, pairs.similarities, strict=True)
    ]
    note = "Near a training image in the embedding, and almost the same pixels."
    if len(training["labels"]) < training["total"]:
        note += (
            f" Compared with {len(training['labels']):,} of {training['total']:,} training images."
        )
    return {"leaks": listed[:_MOST_LISTED], "leaks_note": note} if listed else {}


def embedding(
    data: Data, histograms: metrics.SimilarityHistograms, hubness: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Histograms of pairs with thresholds, the spectrum, and numbers with their meaning."""
    result: dict[str, Any] = {
        "positives": histograms.positives.astype(np.float64),
        "negatives": histograms.negatives.astype(np.float64),
        "thresholds": [],
    }
    for fmr in metrics.offered_fmrs(histograms, _FMRS):
        threshold = metrics.threshold_at_fmr(histograms, fmr)
        fnmr = metrics.fnmr_at(histograms, threshold)
        result["thresholds"].append({"fmr": fmr, "threshold": threshold, "fnmr": fnmr})
    x = data.x[data.readable]
    numbers = [
        (
            "Alignment",
            f"{metrics.alignment(histograms):.3f}",
            "mean squared distance of two images of one class; smaller is closer",
        ),
        (
            "Uniformity",
            f"{metrics.uniformity(histograms):.2f}",
            "0 if all embeddings are equal; smaller is more even",
        ),
        (
            "Density",
            f"{metrics.density(x, data.labels[data.readable]):.2f}",
            "distance within a class / between classes; classes of one image are left out",
        ),
    ]
    if not data.is_flat:
        shares = metrics.spectrum(x)
        result["spectrum"] = shares.astype(np.float32)
        numbers += [
            (
                "Effective rank",
                f"{metrics.effective_rank(shares):.1f} of {x.shape[1]}",
                "how many directions are in use",
            ),
            (
                "Participation",
                f"{metrics.participation(shares):.1f} of {x.shape[1]}",
                "the same, weak directions count less",
            ),
            (
                "Spectral decay",
                f"{metrics.rho_spectrum(x):.2f}",
                "distance from an even spectrum (mode 1: no value dropped); smaller is more even",
            ),
        ]
    if hubness:
        skewness = f"{hubness['skewness']:.2f}"
        numbers.append(("Hubness", skewness, "skewness of how often images are found"))
    result["numbers"] = [
        [name, value.replace("-", "−"), meaning]
        for name, value, meaning in numbers
        if "nan" not in value
    ]
    return result
