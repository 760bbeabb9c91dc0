"""Facts from the files of a run folder: curves, scores of an evaluation, and the provenance.

It opens neither checkpoints nor images. A missing or damaged file leaves its part out.
"""

import dataclasses
import itertools
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dmljax.config.fields import PATHS
from dmljax.files import reading
from dmljax.files.run_folder import Result, RunFolder, read_if_any
from dmljax.hints import shown_duration

_COLUMNS = 560  # pixels of a chart: each column keeps the smallest and the largest value
_MOST_POINTS = 2000
_SHOWN = ("R@1", "MAP@R")
_OTHERS = ("NMI", "F1", "RP", "MRR")
_TITLES = {"val": "held-out", "frozen": "frozen: test", "frozen_val": "frozen: held-out"}
_FROZEN = {"frozen": "frozen", "frozen_val": "val, frozen"}
# Values that every run logs in addition to the terms of its loss.
_DIAGNOSTICS: tuple[str, ...] = ("step", "loss", "gradient_norm", "positive_distance")
_DIAGNOSTICS += ("negative_distance", "active_positives", "active_negatives", "active_triplets")
# Fields of the config that name files of one machine.
_PATHS = frozenset(itertools.chain.from_iterable(PATHS.values()))


@dataclasses.dataclass(frozen=True)
class Files:
    """The contents of the files of a run folder; a missing file is empty."""

    name: str
    config: Mapping[str, Any]
    lines: Sequence[Mapping[str, Any]]  # of metrics.jsonl
    speed: Sequence[Mapping[str, Any]]
    result: Result | None

    def scores_at(self, step: int) -> dict[str, dict[str, float]]:
        """Returns the scores of one evaluation, {split: {score: value}}, test first.

        The scores of the frozen backbone, which has no steps, are included.
        """
        scores: dict[str, dict[str, float]] = {}
        for line in self.lines:
            for name, value in line.items():
                split, _, score = name.partition("/")
                if score and (split in _FROZEN or line["step"] == step):
                    scores.setdefault(_FROZEN.get(split, split), {})[score] = value
        order = ("test", "frozen", "val", "val, frozen")
        return {split: scores[split] for split in order if split in scores}

    def prefixes(self, step: int, width: int) -> dict[str, Any] | None:
        """Returns the main test scores, in percent, of every prefix and of the whole `width`."""
        test = self.scores_at(step).get("test", {})
        ends = (name.partition("/")[0] for name in test if name.startswith("prefix_"))
        widths = sorted({int(end.removeprefix("prefix_")) for end in ends} - {width})
        if not widths:
            return None
        scores = []
        for name in _SHOWN:
            keys = [*(f"prefix_{w}/{name}" for w in widths), name]
            if all(_is_number(test.get(key)) for key in keys):
                scores.append({"name": name, "values": [100 * test[key] for key in keys]})
        return {"widths": [*widths, width], "scores": scores} if scores else None

    def curves(
        self, chosen: int | None, reloads: Sequence[int] = (), *, shown: str = "R@1"
    ) -> dict[str, Any] | None:
        """Returns the training loss and its terms, and the scores of every split in percent."""
        loss = [(x["step"], x["loss"]) for x in self.lines if "loss" in x]
        names = dict.fromkeys([*_SHOWN, shown, *_OTHERS])
        ends = tuple(f"/{name}" for name in names)
        keys = dict.fromkeys(
            key for x in self.lines for key in x if key.endswith(ends) and not key.startswith("raw")
        )
        last = max((x["step"] for x in self.lines), default=0)
        scores = []
        for key in sorted(keys, key=lambda key: _rank(key, [*names])):
            points = [(x["step"], 100 * x[key]) for x in self.lines if _is_number(x.get(key))]
            split, _, score = key.partition("/")
            name = _TITLES.get(split, split)
            is_shown = score in (*_SHOWN, shown)
            if split in _FROZEN:  # a level line
                points = [(step, points[0][1]) for step in (0, last)] if points else []
            scores.append({"name": f"{name} {score}", "shown": is_shown, **_columns(points)})
        if not loss and not scores:
            return None
        levels = [100 * x["raw/R@1"] for x in self.lines if _is_number(x.get("raw/R@1"))]
        marks = [{"step": step, "text": "best reloaded"} for step in reloads]
        if chosen is not None and len({x["step"] for x in self.lines if "test/R@1" in x}) > 1:
            marks.append({"step": chosen, "text": f"step {chosen:,}"})
        terms = dict.fromkeys(k for x in self.lines if "loss" in x for k in x)
        return {
            "loss": _columns(loss),
            "terms": [
                {
                    "name": name.replace("_", " "),
                    **_columns(
                        [(x["step"], x[name]) for x in self.lines if _is_number(x.get(name))]
                    ),
                }
                for name in terms
                if name not in _DIAGNOSTICS
            ],
            "scores": scores,
            "baseline": levels[-1] if levels else None,
            "baseline_name": "raw pixels" if levels else None,
            "marks": marks,
        }

    def warning(self) -> str | None:
        """Returns a sentence if the checkpoint was chosen by scores of the test classes."""
        if self.result is not None and self.result.chosen and self.result.chosen.uses_test:
            return "The checkpoint was chosen on the test classes: these scores are too good."
        return None

    def provenance(self) -> dict[str, Any]:
        """Builds the section about the run: rows, the config and the chart of its speed."""
        result, rows = self.result, []

        def add(name: str, value: Any) -> None:
            if value not in (None, "", {}):
                rows.append([name, str(value)])

        if result is not None:
            add("Checkpoint", result.chosen and result.chosen.sentence)
            add("Config", ":".join(filter(None, (result.config, result.argument))))
            counts = (
                f"{split}: {data['images']:,} images of {data['classes']:,} classes"
                for split, data in result.data.items()
            )
            add("Data", "; ".join(counts))
            add("Pretraining", _last_part(result.pretraining) or "none")
        add("Seed", self.config.get("seed"))
        add("Steps", self.config.get("steps"))
        if result is not None:
            for name, digest in result.digests.items():
                add(f"SHA-256 of the {name}", digest)
            if result.code is not None:
                changed = ", with changed files" if result.code["dirty"] else ""
                add("Revision of dmljax", f"{result.code['revision']}{changed}")
            versions = (f"{name} {number}" for name, number in result.versions.items())
            add("Versions", ", ".join(versions))
            devices, processes = result.devices, result.devices["processes"]
            text = f"{devices['count']} x {devices['kind']}"
            add("Devices", text + (f", {processes} processes" if processes > 1 else ""))
            add("Time", shown_duration(result.wall_seconds))
        speeds = [x["images_per_second"] for x in self.speed if "images_per_second" in x]
        if speeds:
            add("Speed", f"{np.median(speeds):,.0f} images a second (median)")
        for name, text in (("memory_gib", "Memory"), ("device_memory_gib", "Memory of a device")):
            values = [x[name] for x in self.speed if name in x]
            if values:
                add(text, f"{max(values):.1f} GiB at most")
        if unreadable := sum(x.get("unreadable", 0) for x in self.speed[-1:]):
            add("Unreadable", f"{int(unreadable):,} training images")
        config = without_paths(self.config)
        return {
            "rows": rows,
            "config": json.dumps(config, indent=2, sort_keys=True) if config else None,
            "speed": self._speed_chart(),
        }

    def _speed_chart(self) -> dict[str, Any] | None:
        points = [
            (x["step"], x["images_per_second"]) for x in self.speed if "images_per_second" in x
        ]
        if len(points) < 2:
            return None
        waits = [
            x["input_wait_seconds"] / x["step_seconds"] for x in self.speed if "step_seconds" in x
        ]
        columns = _columns(points)
        return {
            "steps": columns["steps"],
            "images_per_second": columns["values"],
            "note": f"{100 * float(np.median(waits)):.0f} % of the time of a step is waiting for "
            "input (median).",
        }


def read(folder: str | os.PathLike) -> Files:
    """Reads the files of a run folder."""
    files = RunFolder(folder)
    return Files(
        name=files.path.absolute().name or "run",
        config=reading.json_object_or_empty(files.config),
        lines=reading.json_lines(files.metrics),
        speed=reading.json_lines(files.speed),
        result=read_if_any(folder),
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and bool(np.isfinite(value))


def _rank(key: str, names: Sequence[str]) -> tuple[int, int, str]:
    """Returns the sort key of curves: main scores first, the test split before others."""
    split, _, score = key.partition("/")
    index = names.index(score) if score in names else len(names)
    order = ["test", "frozen", "val", "frozen_val"]
    return index, order.index(split) if split in order else len(order), key


def _columns(points: Sequence[tuple[float, float]]) -> dict[str, np.ndarray]:
    """Returns steps and values, reduced to the extremes of each pixel column if there are many."""
    steps = np.array([step for step, _ in points], np.float64)
    values = np.array([value for _, value in points], np.float64)
    if len(points) > _MOST_POINTS:
        columns = np.minimum(
            ((steps - steps[0]) / max(steps[-1] - steps[0], 1) * _COLUMNS).astype(int), _COLUMNS - 1
        )
        kept = []
        for column in np.unique(columns):
            rows = np.flatnonzero(columns == column)
            kept += sorted({rows[np.argmin(values[rows])], rows[np.argmax(values[rows])]})
        steps, values = steps[kept], values[kept]
    return {"steps": steps.astype(np.float32), "values": values.astype(np.float32)}


def _last_part(path: Any) -> str:
    return pathlib.PurePath(str(path)).name if path else ""


def without_paths(config: Any, name: str = "") -> Any:
    """Returns the config with only the last parts of its paths, because people share this file."""
    if isinstance(config, Mapping):
        return {key: without_paths(value, key) for key, value in config.items()}
    if isinstance(config, list | tuple):
        return [without_paths(value, name) for value in config]
    if isinstance(config, str) and (name in _PATHS or os.path.isabs(config)):
        return _last_part(config)
    return config
