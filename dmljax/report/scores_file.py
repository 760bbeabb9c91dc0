"""`scores.safetensors`: the scores of every query of a run, which a comparison of runs reads."""

import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from dmljax import metrics, retrieval
from dmljax.data.digest import digest
from dmljax.data.splits import Split, Splits
from dmljax.files import reading
from dmljax.files.run_folder import RunFolder
from dmljax.files.writing import atomic_writer

FILE, FORMAT = RunFolder("").scores.name, "1"
_ARRAYS = {
    "queries": np.uint32,
    "labels": np.int32,
    "first": np.uint32,
    "recall_at_1": np.float32,
    "r_precision": np.float32,
    "map_at_r": np.float32,
}


class QueryScores(NamedTuple):
    """One row for each readable query of a split.

    `queries` are the indices of the images in the split, and `first` the ranks of their first
    positives, from 1. A query without a positive has rank 0 and NaN scores. `items` is the digest
    of the split (its images, labels and names), and `data` the digest of the whole data set.
    """

    queries: np.ndarray
    labels: np.ndarray
    first: np.ndarray
    recall_at_1: np.ndarray
    r_precision: np.ndarray
    map_at_r: np.ndarray
    classes: tuple[str, ...]
    items: str = ""
    data: str = ""
    split: str = ""
    step: int | None = None

    @property
    def values(self) -> dict[str, np.ndarray]:
        """The scores by their display names."""
        is_scored = self.first > 0
        ranks = np.where(is_scored, self.first, 1)
        return {
            "R@1": self.recall_at_1,
            "MAP@R": self.map_at_r,
            "RP": self.r_precision,
            "MRR": np.where(is_scored, 1 / ranks, np.nan),
        }


def score(
    embeddings: np.ndarray,
    split: Split,
    *,
    data: str = "",
    name: str = "test",
    step: int | None = None,
    devices: Sequence[Any] | None = None,
    similarity_fn: retrieval.SimilarityFn = retrieval.euclidean,
) -> QueryScores:
    """Computes the scores of every query of a split, by its queries, gallery and groups.

    `data` is the digest of the data set, `name` the name of the split, and `step` the step of
    training that gave the embeddings. `similarity_fn` is as in `metrics.per_query`.
    """
    search = split.search(embeddings)
    fns = {name: metrics.RANKING_FNS[name] for name in ("MRR", "RP", "MAP@R")}
    values = metrics.per_query(
        search.embeddings,
        search.labels,
        ks=(),
        metric_fns=fns,
        similarity_fn=similarity_fn,
        devices=devices,
        **search.options,
    )
    is_scored = ~np.isnan(values["MRR"])
    first = np.rint(1 / np.where(is_scored, values["MRR"], 1)).astype(np.uint32)
    return unscored(embeddings, split)._replace(
        first=np.where(is_scored, first, 0).astype(np.uint32),
        recall_at_1=np.where(is_scored, first == 1, np.nan).astype(np.float32),
        r_precision=values["RP"].astype(np.float32),
        map_at_r=values["MAP@R"].astype(np.float32),
        items=digest(Splits(Split((), np.zeros(0, np.int32), ()), split)),
        data=data,
        split=name,
        step=step,
    )


def unscored(embeddings: np.ndarray, split: Split) -> QueryScores:
    """Returns the rows of `score` without scores, for images with unknown labels."""
    search = split.search(embeddings)
    missing = np.full(len(search.queries), np.nan, np.float32)
    return QueryScores(
        queries=search.queries.astype(np.uint32),
        labels=search.labels.astype(np.int32),
        first=np.zeros(len(missing), np.uint32),
        recall_at_1=missing,
        r_precision=missing,
        map_at_r=missing,
        classes=tuple(split.names),
    )


def write(folder: str | os.PathLike, scores: QueryScores) -> pathlib.Path:
    """Writes the file into the folder of a run atomically, and returns its path."""
    path = pathlib.Path(folder) / FILE
    metadata = {
        "format": FORMAT,
        "classes": json.dumps(scores.classes),
        "items": scores.items,
        "data": scores.data,
        "split": scores.split,
        "step": json.dumps(scores.step),
    }
    arrays = {name: np.ascontiguousarray(getattr(scores, name), t) for name, t in _ARRAYS.items()}
    with atomic_writer(path, "wb") as file:
        file.write(save(arrays, metadata=metadata))
    return path


def read(folder: str | os.PathLike) -> QueryScores:
    """Reads the scores of the queries of a finished run."""
    path = pathlib.Path(folder) / FILE
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} holds no {FILE}: finish the run with `dmljax train`, or write the file of a "
            f"finished run with `dmljax report {folder}`"
        )
    try:
        with safe_open(path, "np") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise ValueError("its format is of another version of dmljax")
            arrays = {name: file.get_tensor(name) for name in _ARRAYS}
        return QueryScores(
            **arrays,
            classes=tuple(reading.json_value(metadata["classes"])),
            items=metadata["items"],
            data=metadata["data"],
            split=metadata["split"],
            step=reading.json_value(metadata["step"]),
        )
    except (SafetensorError, ValueError, KeyError) as error:
        raise ValueError(
            f"{path} is damaged ({error}): `dmljax report {folder}` writes it again"
        ) from error


def difference(a: QueryScores, b: QueryScores) -> str:
    """Describes in what two test sets differ; "" if their queries are the same."""
    sizes = {
        "split": (a.split, b.split),
        "number of classes": (len(a.classes), len(b.classes)),
        "number of queries": (len(a.queries), len(b.queries)),
    }
    if reasons := [f"the {name} ({x} and {y})" for name, (x, y) in sizes.items() if x != y]:
        return ", and in ".join(reasons)
    is_same = a.classes == b.classes and a.items == b.items
    for x, y in ((a.queries, b.queries), (a.labels, b.labels), (a.first > 0, b.first > 0)):
        is_same = is_same and np.array_equal(x, y)
    return "" if is_same else "the images, the labels, the names of classes, or the protocol"
