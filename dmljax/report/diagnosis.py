"""The sections of a page about classes, labels and the embedding, as plain dicts.

The functions take the arrays of a split (`Data`) and the results of the searches. They return
the numbers and the items that the page shows.
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
from dmljax.report import findings, sprites
from dmljax.report.findings import GrayFn

NEIGHBORS = 10
_FMRS = tuple(sorted({1 / (m * 10**e) for e in range(1, 7) for m in (1, 2, 5)}, reverse=True)[:16])
_MOST_LISTED = 200
_MOST_CONFUSIONS, _FEWEST_CONFUSED, _EXAMPLES = 60, 2, 6
_MOST_HUBS = 12
_LEAST_WRONG = 10  # a hub is found by at least this many queries of other classes
_NEAR = 0.99  # duplicates are nearer than this fraction of the best partners within a class
_GRAY_SIDE = 16  # pixels of the gray copies
_CLASSES_FMR = 1e-2  # false match rate at which the thresholds of the classes are compared
_KNOWN_REFUSED = 0.05  # fraction of known queries that the threshold for strangers refuses
_MOST_CLASS_PAIRS = 400_000_000  # pairs that are counted class by class in a few seconds


@dataclasses.dataclass(frozen=True)
class Data:
    """The embeddings `x [n d]` of a split, its search, and the `similarity_fn` of the scores."""

    x: np.ndarray
    split: Split
    search: Search
    devices: Sequence[Any] | None = None
    similarity_fn: retrieval.SimilarityFn = retrieval.euclidean

    @classmethod
    def of(cls, embeddings: np.ndarray, split: Split, **options: Any) -> Data:
        x = np.asarray(embeddings)
        if x.ndim != 2 or len(x) != len(split) or x.dtype.kind != "f":
            raise ValueError(
                f"embeddings must be floating-point numbers [{len(split)}, dimensions], one row "
                f"and one label for each image, got {x.dtype} of shape {x.shape}"
            )
        x = x.astype(np.float32, copy=False)
        return cls(x, split, split.search(x), **options)

    @property
    def pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """The embeddings and the labels of the queries."""
        return self.search.embeddings, self.search.labels

    @property
    def is_by_cosine(self) -> bool:
        """Whether the neighbors of the scores are those by cosine, as for vectors of length 1."""
        norms = np.linalg.norm(self.x[self.search.readable], axis=1)
        has_unit_norms = bool(len(norms)) and bool(np.abs(norms - 1).max() < 1e-3)
        return self.similarity_fn is retrieval.cosine or has_unit_norms

    def items_at(self, indices: np.ndarray) -> np.ndarray:
        """Returns rows of the split from indices in the gallery; -1 stays -1."""
        indices = np.asarray(indices)
        return np.where(indices >= 0, self.search.items[np.maximum(indices, 0)], -1)

    def compact(self, rows: np.ndarray) -> np.ndarray:
        """Returns rows of the split as small unsigned integers, with n for -1."""
        n = len(self.split)
        return np.where(rows < 0, n, rows).astype(np.uint16 if n < 65535 else np.uint32)


def ranked_by(
    embeddings: np.ndarray, similarity_fn: retrieval.SimilarityFn = retrieval.euclidean
) -> str:
    """Describes the distance that ranks the embeddings `[n d]`, and their norms if they matter."""
    if similarity_fn is retrieval.cosine:
        return "cosine"
    x = np.asarray(embeddings, np.float32)
    norms = np.linalg.norm(x[np.isfinite(x).all(axis=1)], axis=1)
    if not len(norms):
        return "Euclidean distance"
    low, high = norms.min(), norms.max()
    if high - low <= 2e-3 * high:
        return f"Euclidean distance (all norms are {high:.3g}, so cosine gives the same ranks)"
    return f"Euclidean distance (norms from {low:.3g} to {high:.3g}, so cosine gives other ranks)"


def neighborhoods(
    data: Data, *, similarity_fn: retrieval.SimilarityFn | None = None
) -> metrics.Neighborhoods:
    """Searches the nearest items, by the similarity of the scores or by another one."""
    if data.is_by_cosine:
        similarity_fn = retrieval.cosine
    return metrics.neighborhoods(
        *data.pairs,
        k=NEIGHBORS,
        similarity_fn=similarity_fn or data.similarity_fn,
        devices=data.devices,
        **data.search.options,
    )


def histograms(data: Data) -> metrics.SimilarityHistograms:
    return metrics.similarity_histograms(*data.pairs, **data.search.options)


def class_table(
    data: Data, per_query: Mapping[str, np.ndarray], map_at_r: np.ndarray
) -> dict[str, np.ndarray]:
    """Builds one row per class: counts, scores, tightness and the next class; NaN without images.

    `map_at_r [n]` chooses the example of a class: its worst query.
    """
    count = len(data.split.names)
    table = findings.class_table(
        *data.pairs,
        per_query["R@1"],
        per_query["MAP@R"],
        count=count,
        devices=data.devices,
        **data.search.options,
    )
    if count < 3:
        del table["next"], table["next_similarity"]
    example = np.full(count, len(data.split))
    # The query with the worst score is written last, so it is the example.
    by_score = np.argsort(-map_at_r[data.search.queries], kind="stable")
    example[data.search.labels[by_score]] = data.search.queries[by_score]
    table |= {"count": np.bincount(data.split.labels, minlength=count), "example": example}
    return {
        name: values.astype(np.float32 if values.dtype.kind == "f" else np.uint32)
        for name, values in table.items()
    }


def confusions(
    data: Data, per_query: Mapping[str, np.ndarray], near: metrics.Neighborhoods
) -> dict[str, Any]:
    """Builds the pairs of confused classes, with examples: a query and its nearest item."""
    recalls, labels = per_query["R@1"], data.search.labels
    confused = findings.confusions(
        labels, recalls, near.other, gallery_labels=data.search.item_labels
    )
    sizes = np.bincount(labels[~np.isnan(recalls)], minlength=len(data.split.names))
    pairs = []
    for (a, b), queries in list(confused.items())[:_MOST_CONFUSIONS]:
        if len(queries) < _FEWEST_CONFUSED:
            break
        nearest = data.items_at(near.other[queries[:_EXAMPLES]])
        pairs.append(
            {
                "a": a,
                "b": b,
                "count": len(queries),
                "of": int(sizes[a]),
                "back": len(confused.get((b, a), ())),
                "examples": np.stack(
                    [data.search.queries[queries[:_EXAMPLES]], nearest], axis=1
                ).tolist(),
            }
        )
    return {"pairs": pairs}


def suspects(
    data: Data,
    per_query: Mapping[str, np.ndarray],
    near: metrics.Neighborhoods,
    histograms: metrics.SimilarityHistograms,
) -> dict[str, Any]:
    """Lists images whose label may be wrong, with the best partners of both classes."""
    suspected, refusal = findings.suspected_labels(
        near, histograms, per_query["R@1"], dimension=data.x.shape[1]
    )
    own, other = data.items_at(near.own), data.items_at(near.other)
    listed = [
        {
            "item": int(data.search.queries[row]),
            "own": int(own[row]),
            "other": int(other[row]),
            "to_own": float(near.own_similarity[row]),
            "to_other": float(near.other_similarity[row]),
        }
        for row in suspected[:_MOST_LISTED]
    ]
    note = (
        "Its best partner of its own class is not nearer than a stranger would be by chance, and "
        "an image of another class is as near as real partners are. Most swaps between classes "
        "that look alike are not found."
    )
    if refusal:
        return {"refusal": f"Suspected labels are not listed: {refusal}."}
    return {"suspects": listed, "suspects_note": note} if listed else {}


def hubs(data: Data, near: metrics.Neighborhoods) -> dict[str, Any]:
    """Lists images that many queries find wrongly, and `counts` and `wrong` of all images."""
    items = data.search.items
    labels = {"labels": data.search.labels, "gallery_labels": data.search.item_labels}
    found, found_wrong = findings.hub_counts(near.nearest, **labels)
    skewness, never_found = findings.skewness(found), np.mean(found == 0)
    counts, wrong = np.zeros((2, len(data.split)), np.int64)
    counts[items], wrong[items] = found, found_wrong
    listed = []
    for index in np.lexsort((np.arange(len(found)), -found, -found_wrong))[:_MOST_HUBS]:
        if found_wrong[index] < _LEAST_WRONG:
            break
        finds = (near.nearest == index).any(axis=1)
        finds &= data.search.labels != data.split.labels[items[index]]
        listed.append(
            {
                "item": int(items[index]),
                "found": int(found[index]),
                "wrong": int(found_wrong[index]),
                "queries": data.search.queries[finds][:8].tolist(),
            }
        )
    note = (
        f"How often an image is among the {NEIGHBORS} nearest of a query is "
        f"{'skewed' if skewness > 1 else 'even'} here (skewness {skewness:.2f}), and "
        f"{100 * never_found:.1f} % of the images are never found. A diagnosis, not a fault."
    )
    return {
        "counts": counts,
        "wrong": wrong,
        "skewness": skewness,
        "hubs": listed,
        "hubs_note": note,
    }


def gray_copies(read_fn: Callable[[int], np.ndarray] | None) -> GrayFn | None:
    """Returns a function that makes gray copies of the middle square of images.

    An unreadable image gives a constant copy, which correlates with nothing.
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


def _copies(
    data: Data,
    near: metrics.Neighborhoods,
    gray_fn: GrayFn | None,
    gallery_gray_fn: GrayFn | None,
    **search: Any,
) -> tuple[float, list[tuple[int, int, float]]]:
    """Returns a threshold, and pairs above it: row of the split, index in the gallery, cosine."""
    own = near.own_similarity[np.isfinite(near.own_similarity)]
    if not len(own):
        return float("nan"), []
    threshold, queries = float(np.quantile(own, _NEAR)), data.search.queries
    pairs = findings.near_duplicates(
        *data.pairs,
        threshold=threshold,
        gray_fn=None if gray_fn is None else lambda indices: gray_fn(queries[indices]),
        gallery_gray_fn=gallery_gray_fn,
        devices=data.devices,
        **search,
    )
    rows = zip(*pairs, strict=True)
    return threshold, [(int(queries[a]), int(b), float(cosine)) for a, b, cosine in rows]


def duplicates(data: Data, near: metrics.Neighborhoods, gray_fn: GrayFn | None) -> dict[str, Any]:
    """Lists pairs of almost the same picture with two labels: near embeddings and equal pixels.

    Without pictures, only the embedding is compared.
    """
    items = data.search.items
    item_gray_fn = None if gray_fn is None else lambda indices: gray_fn(items[indices])
    threshold, pairs = _copies(data, near, gray_fn, item_gray_fn, **data.search.options)
    listed = [{"a": a, "b": int(items[b]), "similarity": cosine} for a, b, cosine in pairs]
    note = (
        f"Mutual nearest neighbors of two classes, with a cosine of at least {threshold:.3f} "
        f"({100 * _NEAR:g} % of the best partners within a class are farther)"
    )
    note += ". No pixels were compared." if gray_fn is None else " and almost the same pixels."
    return {"duplicates": listed[:_MOST_LISTED], "duplicates_note": note} if listed else {}


def leaks(
    data: Data,
    near: metrics.Neighborhoods,
    gray_fn: GrayFn | None,
    training: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Lists test images that are also among the training images, by the rule of duplicates.

    `training` has `embeddings`, `labels`, `names` and `read_fn(row) -> uint8 [h w c]` of training
    images, and `total`, the count of all training images.
    """
    if gray_fn is None or training is None or not len(training["labels"]):
        return {}
    labels = np.asarray(training["labels"])
    gallery = {"gallery": training["embeddings"], "gallery_labels": labels + len(data.split.names)}
    _, pairs = _copies(data, near, gray_fn, gray_copies(training["read_fn"]), **gallery)
    listed = [
        {"item": a, "train_class": str(training["names"][labels[b]]), "similarity": cosine}
        for a, b, cosine in pairs
    ]
    note = "Near a training image in the embedding, and almost the same pixels."
    if len(labels) < training["total"]:
        note += f" Compared with {len(labels):,} of {training['total']:,} training images."
    return {"leaks": listed[:_MOST_LISTED], "leaks_note": note} if listed else {}


def embedding(
    data: Data,
    histograms: metrics.SimilarityHistograms,
    near: metrics.Neighborhoods,
    hubness: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Builds histograms of pairs with thresholds, the spectrum, and numbers with their meaning."""
    numbers: list[list[str]] = []
    result: dict[str, Any] = {
        "positives": histograms.positives.astype(np.float64),
        "negatives": histograms.negatives.astype(np.float64),
        "thresholds": [],
        "numbers": numbers,
    }
    for fmr in metrics.offered_fmrs(histograms, _FMRS):
        threshold = metrics.threshold_at_fmr(histograms, fmr)
        fnmr = metrics.fnmr_at(histograms, threshold)
        result["thresholds"].append({"fmr": fmr, "threshold": threshold, "fnmr": fnmr})

    def add(name: str, value: str, meaning: str) -> None:
        if "nan" not in value:
            numbers.append([name, value.replace("-", "−"), meaning])

    x, labels = (y[data.search.readable] for y in (data.x, data.split.labels))
    text = "mean squared distance of two images of one class; smaller is closer"
    add("Alignment", f"{metrics.alignment(histograms):.3f}", text)
    text = "0 if all embeddings are equal; smaller is more even"
    add("Uniformity", f"{metrics.uniformity(histograms):.2f}", text)
    text = "distance within a class / between classes, without classes of one image"
    add("Density", f"{metrics.density(x, labels):.2f}", text)
    if x.shape[1] > findings.FLAT:
        fractions = metrics.spectrum(x)
        result["spectrum"] = fractions.astype(np.float32)
        rank, participation = metrics.effective_rank(fractions), metrics.participation(fractions)
        add("Effective rank", f"{rank:.1f} of {x.shape[1]}", "count of directions in use")
        text = "the same, with less weight for weak directions"
        add("Participation", f"{participation:.1f} of {x.shape[1]}", text)
        decay = metrics.rho_spectrum(x)
        reason = "fewer images than" if len(x) < x.shape[1] else "no variance in some"
        value = f"{decay:.2f}" if np.isfinite(decay) else f"not defined: {reason} dimensions"
        text = "distance from an even spectrum (mode 1: no value dropped); smaller is more even"
        add("Spectral decay", value, text)
    if hubness:
        text = "skewness of how often images are found"
        add("Hubness", f"{hubness['skewness']:.2f}", text)
    pairs = len(data.search.labels) * len(data.search.items)
    has_both_rates = len(metrics.offered_fmrs(histograms, (0.1, _CLASSES_FMR))) == 2
    if has_both_rates and pairs <= _MOST_CLASS_PAIRS:
        of_classes = metrics.class_histograms(*data.pairs, **data.search.options)
        text = "OPIS: how differently one threshold suits the classes; 0 if it suits all equally"
        add("Threshold inconsistency", f"{metrics.opis(of_classes):.4f}", text)
        thresholds = metrics.class_thresholds(of_classes, _CLASSES_FMR)
        low, high = np.nanquantile(thresholds, [0.1, 0.9])
        text = "cosine that 1 in 100 pairs of a class with others reaches, for the middle 80 % of "
        add("Thresholds of classes", f"{low:.2f} to {high:.2f}", f"{text}the classes")
    threshold = metrics.threshold_at_refusal(near, _KNOWN_REFUSED)
    refused = 100 * metrics.stranger_rates(near, threshold).strangers_refused
    text = "fraction of queries whose class is not in the collection, at a threshold that refuses "
    text += f"{100 * _KNOWN_REFUSED:.0f} % of the others"
    add("Strangers refused", f"{refused:.1f} % at cosine {threshold:.2f}", text)
    return result
