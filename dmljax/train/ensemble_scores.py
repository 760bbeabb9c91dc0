"""Scores of an ensemble by the mean of its learners' distances."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from dmljax import metrics, retrieval
from dmljax.data.splits import Split

__all__ = ["mean_distance_scores"]


def mean_distance_scores(
    parts: Mapping[str, np.ndarray],
    split: Split,
    *,
    ks: Sequence[int],
    ranking_fns: Mapping[str, Callable],
    average: str = "queries",
) -> dict[str, float]:
    """Retrieval scores of the parts {name: [n d]} of a method, by `retrieval.mean_distance_ranks`.

    Queries and gallery are those of the split. Images that could not be read are left out.
    """
    learners = np.stack(list(parts.values()), axis=1)  # [n m d]
    search = split.search(learners)
    score_fns = {f"R@{k}": partial(metrics.recall_at_k, k=k) for k in ks if k <= search.candidates}
    score_fns |= ranking_fns
    values = {name: np.full(len(search.labels), np.nan) for name in score_fns}
    for block in retrieval.mean_distance_ranks(search.embeddings, search.labels, **search.options):
        for name, score_fn in score_fns.items():
            takes_labels = "labels" in inspect.signature(score_fn).parameters
            options = {"labels": search.labels[block.queries]} if takes_labels else {}
            values[name][block.queries] = score_fn(block.ranks, **options)
    return {
        name: metrics.average(array, search.labels, over=average) for name, array in values.items()
    }
