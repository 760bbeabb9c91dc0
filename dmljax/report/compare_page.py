"""The page that compares runs: the page of one of them, with a section of all differences.

It reads `scores.safetensors` and `report.html` of each run, and needs neither images nor nets. It
also compares embeddings `[n d]` of several models for the same images.
"""

import contextlib
import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dmljax import retrieval
from dmljax.data.splits import Split
from dmljax.report import comparison, diagnosis, facts, page, scores_file
from dmljax.report import run as run_files
from dmljax.report.facts import Facts, from_tree
from dmljax.report.scores_file import QueryScores

FILE = "comparison.html"
_MOST_LISTED = 120
_MOST_OF_A_CLASS = 4
_MOST_CURVES = 4  # the page has as many dashes and colors


def write(runs: Mapping[str, str | os.PathLike]) -> pathlib.Path:
    """Writes `comparison.html` into the folder of the first run, and returns its path.

    `runs` are `{display name: folder}`.
    """
    folder = pathlib.Path(next(iter(runs.values())))
    return page.write(facts_of(runs), folder / FILE)


def facts_of(
    runs: Mapping[str, str | os.PathLike],
    *,
    result: comparison.RunComparison | None = None,
    fields: Sequence[Sequence[str]] | None = None,
) -> Facts:
    """Reads the facts of the first run's page, and adds the section of the comparison.

    `result` is the comparison, by default of the files of the runs; `fields` is as for `of_pages`.
    Any run but the first may lack a page; then its pictures are missing.
    """
    (first, folder), *others = runs.items()
    pages = {first: from_tree(page.read(folder))}
    for name, folder in others:
        with contextlib.suppress(FileNotFoundError, page.NotAPage):
            pages[name] = from_tree(page.read(folder))
    curves = []
    for name, folder in list(runs.items())[:_MOST_CURVES]:
        scores_of_run = (run_files.read(folder).curves(None) or {"scores": ()})["scores"]
        curves += [{**c, "name": name} for c in scores_of_run if c["name"] == "test R@1"]
    result = comparison.read(runs) if result is None else result
    return of_pages(pages, result, fields=fields, curves=curves)


def of_pages(
    pages: Mapping[str, Facts],
    result: comparison.RunComparison,
    *,
    shown: str | None = None,
    fields: Sequence[Sequence[str]] | None = None,
    fields_title: str = "About the runs",
    curves: Sequence[Mapping[str, Any]] = (),
) -> Facts:
    """Adds the section of the comparison to the page of the run `shown`, by default the first.

    `pages` are the pages of the runs by their names in `result`; the first run must have one.
    `fields` are the rows of the table of differences, by default those of the configs, and
    `fields_title` is its title.
    """
    names = list(result.runs)
    shown = names[0] if shown is None else shown
    rows = []
    for score, of_runs in result.scores.items():
        best = max(run.mean for run in of_runs.values())
        rows.append({"score": score, "cells": [_cell(run, best) for run in of_runs.values()]})
    changes_fn = functools.partial(comparison.class_changes, result.runs[result.first])
    section = {
        "runs": [{"name": name} for name in names],
        "rows": rows,
        "note": " ".join(result.notes),
        "lines": [result.mcnemar_note(name) for name in result.mcnemar],
        "changes": [
            _changes(index, changes_fn(result.runs[name]), pages[names[0]], pages.get(name))
            for index, name in enumerate(names[1:], start=1)
        ],
        "curves": curves,
        "maps": _maps(pages),
        "config": result.field_rows if fields is None else fields,
        "config_title": None if fields is None else fields_title,
    }
    difference = result.scores["R@1"][names[1]].comparison
    assert difference is not None  # only the first run has none
    headline = f"R@1 {100 * difference.difference:+.1f}, {difference.verdict}".replace("-", "−")
    if len(names) > 2:
        headline = "R@1 " + ", ".join(f"{100 * r.mean:.1f}" for r in result.scores["R@1"].values())
    content = pages[shown]
    return dataclasses.replace(
        content,
        title=" and ".join(names) if len(names) == 2 else ", ".join(names),
        headline=headline,
        rule=f"All other sections show {shown}" + (f": {content.rule}" if content.rule else "."),
        comparison=section,
    )


def scores_of(
    models: Mapping[str, np.ndarray], images: Split, **options: Any
) -> dict[str, QueryScores]:
    """Computes the scores of the queries of each model, with options of `scores_file.score`."""
    for embeddings in models.values():
        if reason := images.missing_positives(embeddings):
            raise ValueError(f"there is nothing to score: {reason}")
    return {name: scores_file.score(x, images, **options) for name, x in models.items()}


def compare(
    models: Mapping[str, np.ndarray],
    images: Split,
    *,
    similarity_fn: retrieval.SimilarityFn = retrieval.euclidean,
) -> comparison.RunComparison:
    """Compares the embeddings of each model with those of the first one, the baseline."""
    ranked = {name: diagnosis.ranked_by(x, similarity_fn) for name, x in models.items()}
    note = " ".join(f"{name} is ranked by {text}." for name, text in ranked.items())
    if len(set(ranked.values())) == 1:
        note = f"Ranked by {next(iter(ranked.values()))}."
    result = comparison.compare_runs(scores_of(models, images, similarity_fn=similarity_fn))
    return result._replace(rank_note=note)


def facts_of_models(
    models: Mapping[str, np.ndarray],
    images: Split,
    result: comparison.RunComparison,
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
    content = of_pages(
        pages,
        result,
        shown=shown,
        fields=[["dimensions", *(f"{x.shape[1]:,}" for x in models.values())]],
        fields_title="About the embeddings",
    )
    return dataclasses.replace(content, headline=result.worse_note(shown) or content.headline)


def _maps(pages: Mapping[str, Facts]) -> list[dict[str, Any]]:
    """Returns positions and hits of the test images of every run; empty for fewer than two maps."""
    maps = []
    for name, content in pages.items():
        items = content.items
        if items is not None and items.x is not None and items.y is not None:
            rows = items.readable > 0
            arrays = {"x": items.x[rows], "y": items.y[rows], "hits": items.hits[rows]}
            maps.append({"name": name, **arrays})
    return maps if len(maps) > 1 else []


def _cell(run: comparison.RunScore, best: float) -> dict[str, Any]:
    cell: dict[str, Any] = {"value": run.mean, "is_best": run.mean == best}
    if run.comparison is not None:
        cell |= run.comparison._asdict() | {"p": comparison.p_text(run.comparison.p)}
    return cell


def _changes(
    index: int,
    changes: list[comparison.ClassChange],
    first_page: Facts,
    other_page: Facts | None,
) -> dict[str, Any]:
    """Lists queries that are right in only one of two runs, by class, the largest change first."""
    assert first_page.items is not None
    n = len(first_page.items.labels)

    def nearest(content: Facts | None, item: int) -> int:
        if content is None or content.items is None or len(content.items.labels) != n:
            return n
        return int(content.items.neighbors[item, 0])

    def listed(items: np.ndarray, sizes: np.ndarray) -> list[dict[str, Any]]:
        return [
            {
                "item": int(item),
                "of_class": int(size),
                "found": [nearest(first_page, int(item)), nearest(other_page, int(item))],
            }
            for item, size in list(zip(items, sizes, strict=True))[:_MOST_LISTED]
        ]

    lists: dict[str, Any] = {}
    for key, side in (("won", "only_second"), ("lost", "only_first")):
        queries = [getattr(change, side) for change in changes]
        counts = [len(rows) for rows in queries]
        shown = [rows[:_MOST_OF_A_CLASS] for rows in queries]
        items = np.concatenate(shown) if shown else np.zeros(0, int)
        sizes = np.repeat(counts, [len(rows) for rows in shown])
        lists |= {key: listed(items, sizes), f"{key}_count": sum(counts)}
    return {"run": index, **lists}
