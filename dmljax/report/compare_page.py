"""The page that compares runs: the page of the first run, with a section of all differences.

It reads the files `scores.safetensors` and `report.html` of the runs, and needs no images and nets.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dmljax.report import comparison, page, scores_file
from dmljax.report import run as run_files
from dmljax.report.facts import Facts, from_tree

__all__ = ["FILE", "facts_of", "write"]

FILE = "comparison.html"
_MOST_LISTED = 120
_MOST_OF_A_CLASS = 4
_MOST_CURVES = 4  # the page has as many dashes and colors


def write(
    runs: Mapping[str, str | os.PathLike], *, fields: Sequence[Sequence[str]] = ()
) -> pathlib.Path:
    """Writes `comparison.html` into the folder of the first run, and returns its path.

    `runs`: {shown name: folder}. `fields`: one row for each field of the config that differs, with
    its value in every run.
    """
    folder = pathlib.Path(next(iter(runs.values())))
    return page.write(facts_of(runs, fields=fields), folder / FILE)


def facts_of(
    runs: Mapping[str, str | os.PathLike], *, fields: Sequence[Sequence[str]] = ()
) -> Facts:
    """The facts of the first run's page, with the section that compares."""
    names = list(runs)
    scores = {name: scores_file.read(folder) for name, folder in runs.items()}
    result = comparison.compare_runs(scores)
    first_page = _page(runs[names[0]])
    first, pages = from_tree(first_page), {names[0]: first_page}
    for name in names[1:]:
        with contextlib.suppress(FileNotFoundError, page.NotAPage):
            pages[name] = _page(runs[name])
    rows = []
    for score, of_runs in result.scores.items():
        best = max(run.mean for run in of_runs.values())
        rows.append({"score": score, "cells": [_cell(run, best) for run in of_runs.values()]})
    curves = []
    for name, folder in list(runs.items())[:_MOST_CURVES]:
        scores_of_run = (run_files.read(folder).curves(None) or {"scores": ()})["scores"]
        curves += [{**c, "name": name} for c in scores_of_run if c["name"] == "test R@1"]
    section = {
        "runs": [{"name": name} for name in names],
        "rows": rows,
        "note": " ".join(result.notes),
        "lines": [result.mcnemar_note(name) for name in result.mcnemar],
        "changes": [
            _changes(index, scores[names[0]], scores[name], first_page, pages.get(name))
            for index, name in enumerate(names)
            if index
        ],
        "curves": curves,
        "maps": _maps(pages),
        "config": [list(row) for row in fields],
    }
    difference = result.scores["R@1"][names[1]].comparison
    assert difference is not None  # only the first run has none
    headline = f"R@1 {100 * difference.difference:+.1f}, {difference.verdict}".replace("-", "−")
    if len(names) > 2:
        headline = "R@1 " + ", ".join(f"{100 * r.mean:.1f}" for r in result.scores["R@1"].values())
    return dataclasses.replace(
        first,
        title=" and ".join(names) if len(names) == 2 else ", ".join(names),
        headline=headline,
        rule=f"All other sections show {names[0]}: {first.rule}",
        comparison=section,
    )


def _page(folder: str | os.PathLike) -> dict[str, Any]:
    """The page of a run."""
    path = pathlib.Path(folder) / "report.html"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: make it by `dmljax report {folder}`")
    return page.read(path)


def _maps(pages: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For every run the places of test images on its map, and whether their nearest is right.

    Empty unless two runs have a map.
    """
    maps = []
    for name, tree in pages.items():
        if "x" in tree["items"]:
            items = tree["items"]
            rows = items["readable"] > 0
            arrays = {field: items[field][rows] for field in ("x", "y", "hits")}
            maps.append({"name": name, **arrays})
    return maps if len(maps) > 1 else []


def _cell(run: comparison.RunScore, best: float) -> dict[str, Any]:
    cell: dict[str, Any] = {"value": run.mean, "is_best": run.mean == best}
    if run.comparison is not None:
        compared = run.comparison
        cell |= {
            "difference": compared.difference,
            "low": compared.low,
            "high": compared.high,
            "p": comparison.p_text(compared.p),
            "verdict": compared.verdict,
        }
    return cell


def _changes(
    index: int,
    first: scores_file.QueryScores,
    other: scores_file.QueryScores,
    first_page: Mapping[str, Any],
    other_page: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Queries that are right in one of two runs only, by class, the largest change first."""
    changes = comparison.class_changes(first, other)
    n = len(first_page["items"]["labels"])

    def nearest(tree: Mapping[str, Any] | None, item: int) -> int:
        if tree is None or len(tree["items"]["labels"]) != n:
            return n
        return int(tree["items"]["neighbors"][item, 0])

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
