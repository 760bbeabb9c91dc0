"""Embeddings `[n d]` of several models for the same images, compared on the same queries."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from dmljax import retrieval
from dmljax.data.splits import Split
from dmljax.report import compare_page, comparison, diagnosis, facts, scores_file
from dmljax.report.comparison import RunComparison
from dmljax.report.facts import Facts
from dmljax.report.scores_file import QueryScores


def scores_of(
    models: Mapping[str, np.ndarray],
    images: Split,
    *,
    similarity_fn: retrieval.SimilarityFn = retrieval.euclidean,
) -> dict[str, QueryScores]:
    """Computes the scores of all queries for each model."""
    for embeddings in models.values():
        if reason := images.missing_positives(embeddings):
            raise ValueError(f"there is nothing to score: {reason}")
    return {
        name: scores_file.score(x, images, similarity_fn=similarity_fn)
        for name, x in models.items()
    }


def compare(
    models: Mapping[str, np.ndarray],
    images: Split,
    *,
    similarity_fn: retrieval.SimilarityFn = retrieval.euclidean,
) -> RunComparison:
    """Compares the embeddings of each model with those of the first one, the baseline."""
    ranked = {name: diagnosis.ranked_by(x, similarity_fn) for name, x in models.items()}
    note = " ".join(f"{name} is ranked by {text}." for name, text in ranked.items())
    if len(set(ranked.values())) == 1:
        note = f"Ranked by {next(iter(ranked.values()))}."
    result = comparison.compare_runs(scores_of(models, images, similarity_fn=similarity_fn))
    return result._replace(rank_note=note)


def facts_of(
    models: Mapping[str, np.ndarray],
    images: Split,
    result: RunComparison,
    *,
    similarity_fn: retrieval.SimilarityFn = retrieval.euclidean,
    files: Sequence[str] | None = None,
    read_fn: Callable[[int], np.ndarray] | None = None,
) -> Facts:
    """Computes the facts of the last model, with its comparison to the baseline.

    `result` is from `compare` with the same `similarity_fn`. If the model is worse, the headline
    says by how much.
    """
    *_, shown = models
    pages = {
        name: facts.make(
            embeddings,
            images,
            title=name,
            files=files,
            read_fn=read_fn if name == shown else None,
            query_scores=result.runs[name],
            similarity_fn=similarity_fn,
        )
        for name, embeddings in models.items()
    }
    content = compare_page.of_pages(
        pages,
        result,
        shown=shown,
        fields=[["dimensions", *(f"{x.shape[1]:,}" for x in models.values())]],
        fields_title="About the embeddings",
    )
    return dataclasses.replace(content, headline=result.worse_note(shown) or content.headline)
