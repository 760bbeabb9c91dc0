"""Fine-tuning in steps; each is kept only if it helps: frozen, head, all layers, mix.

Each step is one run, or several runs with other values (learning rates, shares of a mix), in their
own folders below the folder of the ladder. Classes that are held out from training choose. The same
command continues a killed ladder: finished runs are read, the others are ordinary runs.
"""

import math
import os
import pathlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from dmljax.config.build import build, digests_of
from dmljax.config.data import data_of
from dmljax.config.fields import complete, options_of
from dmljax.files import result as results
from dmljax.files.result import Result
from dmljax.files.run_folder import RunFolder
from dmljax.files.writing import write_json
from dmljax.metrics import level_text
from dmljax.report import compare_page, comparison, page, scores_file
from dmljax.runs import folder, frozen, training
from dmljax.runs import page as run_page
from dmljax.train import hosts
from dmljax.train.options import SECTIONS

_SCORE = "MAP@R"
_OWN_FIELDS = ("name", "rates", "shares")  # of a step, besides fields of the config
_FEWEST_CLASSES = 4  # two to hold out and two to train on
_NOTHING_HELD_OUT = {"held_out": None, "select": "last"}


class _Row(NamedTuple):
    """A step of the ladder; `folder` is "" for the frozen backbone, which the first run scores."""

    name: str
    folder: str
    held_out: float | None
    test: dict[str, float | None]
    difference: str = ""
    minutes: float = 0.0
    is_kept: bool = True
    note: str = ""

    @property
    def rank(self) -> float:
        """The held-out score, by which the ladder chooses; -inf without one."""
        return -math.inf if self.held_out is None else self.held_out


def run(
    config: Any, workdir: str | os.PathLike, *, overwrite: bool = False, source: str = ""
) -> dict[str, float | None]:
    """Runs all missing steps, and returns the test scores of the step that counts."""
    workdir = pathlib.Path(workdir)
    config = complete(config)
    base, steps, images, classes = _parts(config)
    if base["held_out"] is None or classes < _FEWEST_CLASSES:
        _say(
            "no classes are held out (held_out=None, or fewer than 4 training classes): the "
            "ladder has only its first step, and nothing is chosen"
        )
        base, steps = base | _NOTHING_HELD_OUT, [steps[0] | _NOTHING_HELD_OUT]
    for step in steps:  # An error of a later step shows before the first one trains.
        build(_of_step(base, step, images))
    digests = digests_of(config)
    with folder.claimed(workdir, config, digests, overwrite=overwrite):
        rows: list[_Row] = []
        for step in steps:
            rows += _climb(_of_step(base, step, images), step, rows, workdir, overwrite, source)
        best = max(rows[1:], key=lambda row: row.rank)
        start, weights = base["start"] and base["start"]["name"], base["net"].get("weights")
        advice = frozen.bundle_advice(start, weights)

        def finish() -> None:
            print("\n".join(_table(rows, best, advice)))
            content = {"chosen": best.folder, "rows": [row._asdict() for row in rows]}
            _write_results(workdir, rows, best, digests._asdict())
            write_json(RunFolder(workdir).ladder, {**content, "frozen": advice})
            if base["pictures"] is not None:
                _write_page(workdir, rows, best)

        hosts.on_process_0(finish)
    scores = results.read(workdir / best.folder).scores
    return {k.removeprefix("test/"): v for k, v in scores.items() if k.startswith("test/")}


def configs(config: Any) -> list[tuple[str, dict[str, Any]]]:
    """Returns the config of every step that trains by its name; `[("", config)]` without a ladder.

    Each starts where the ladder starts, because its real start does not exist yet.
    """
    config = complete(config)
    if not config["ladder"]:
        return [("", _without_ladder(config))]
    base, steps, images, _ = _parts(config)
    return [(s["name"], _of_step(base, s, images)) for s in steps if "shares" not in s]


def _say(line: str) -> None:
    if jax.process_index() == 0:
        print(line, flush=True)


def _parts(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]], int, int]:
    """Returns the config without its ladder, the checked steps, and counts of images and classes.

    The counts are those of all training images, held-out classes included.
    """
    base, steps = _without_ladder(config), [dict(step) for step in config["ladder"]]
    names = [step.get("name") for step in steps]
    if len(set(names)) < len(names) or not all(isinstance(name, str) for name in names):
        raise ValueError(
            f"ladder: every step needs its own name, for its folder, got {names}: write "
            "dict(name='head', ...)"
        )
    for number, step in enumerate(steps):
        if problem := _problem(number, step):
            raise ValueError(f"ladder.{number} ({step['name']}): {problem}")
    everything = {**config, **_NOTHING_HELD_OUT, "ladder": ()}
    train = data_of(options_of(everything, ("dataset",)))[0].train
    return base, steps, len(train), len(train.names)


def _without_ladder(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name != "ladder"}


def _problem(number: int, step: Mapping[str, Any]) -> str:
    """Describes what is wrong with a step; "" if nothing is."""
    rates, shares, steps = step.get("rates", []), step.get("shares", []), step.get("steps")
    if not (isinstance(rates, list) and isinstance(shares, list)):
        return f"rates and shares must be lists of numbers, got {rates if shares == [] else shares}"
    if shares and (number < 2 or not all(0 <= share <= 1 for share in shares)):
        return "shares from 0 to 1 mix the two steps before it, so two steps must come first"
    if isinstance(steps, dict) and not (steps and all(str(key).isdecimal() for key in steps)):
        return (
            f"the keys of steps={steps} must be counts of training images, such as "
            "{'1': 60, '1000': '3 epochs'}"
        )
    return ""


def _of_step(base: Mapping[str, Any], step: Mapping[str, Any], images: int) -> dict[str, Any]:
    """Returns the config of a step; fields of sections are changed one by one."""
    changes = {name: value for name, value in step.items() if name not in _OWN_FIELDS}
    changes |= {name: {**base[name], **changes[name]} for name in SECTIONS if name in changes}
    length = changes.get("steps", base["steps"])
    if isinstance(length, dict):  # such as {'1': 80, '1000': '4 epochs'}, by training images
        fits = [least for least in length if int(least) <= images]
        length = length[max(fits, key=int) if fits else min(length, key=int)]
    return {**base, **changes, "steps": length}


def _climb(
    config: dict[str, Any],
    step: Mapping[str, Any],
    rows: Sequence[_Row],
    workdir: pathlib.Path,
    overwrite: bool,
    source: str,
) -> list[_Row]:
    """Runs what is missing of a step; returns its row, after the first step the frozen one too."""
    folders = [workdir / row.folder for row in rows if row.folder]
    name, chosen, copied = step["name"], dict[str, Any](), None
    if folders:
        chosen = {"start": {"name": str(folders[-1])}}
        chosen["net"] = {k: v for k, v in config["net"].items() if k != "weights"}
        # Only the first step scores the backbone. All others are compared with the same scores.
        chosen["evaluate"] = {**config["evaluate"], "frozen": False}
        copied = RunFolder(folders[-1]).frozen
    values: Sequence[float | None] = step.get("shares") or step.get("rates") or [None]
    finished: dict[str, Result] = {}
    for value in values:
        changes, place = dict(chosen), name if value is None else f"{name}-{value:g}"
        if value is not None:
            changes["pictures"] = None
        if "shares" in step:
            mix = {"mixed_with": str(folders[-2]), "mixed_fraction": value}
            changes |= {"start": {**chosen["start"], **mix}, "steps": 0}
        elif value is not None:
            changes["optimizer"] = {**config["optimizer"], "rate": value}
        finished[place] = _run({**config, **changes}, workdir / place, copied, overwrite, source)
    scores = {place: result.scores.get(f"val/{_SCORE}") for place, result in finished.items()}
    best = max(scores, key=lambda place: scores[place] or 0.0)
    minutes, note = sum(result.wall_seconds for result in finished.values()) / 60, ""
    if len(scores) > 1:
        kind = "share of the step before" if "shares" in step else "rate"
        tried = (f"{v:g}: {_percent(x)}" for v, x in zip(values, scores.values(), strict=True))
        note = f"{kind} {best.removeprefix(f'{name}-')} of ({', '.join(tried)})"
    first = [] if rows else [_frozen_row(finished[best])]
    row = _row(name, best, finished[best], max(x.rank for x in [*rows, *first]))
    return [*first, row._replace(minutes=minutes, note=note)]


def _run(
    config: dict[str, Any],
    workdir: pathlib.Path,
    copied: pathlib.Path | None,
    overwrite: bool,
    source: str,
) -> Result:
    """Returns the result of the run in `workdir`, which is finished or starts or continues now."""
    files, result = RunFolder(workdir), results.read_if_any(workdir)
    if copied is not None and copied.is_dir():
        hosts.on_process_0(lambda: shutil.copytree(copied, files.frozen, dirs_exist_ok=True))
    is_finished = result is not None and result.status == "finished"
    if result is not None and is_finished and result.digests == digests_of(config)._asdict():
        return result
    _say(f"\n== {workdir.name}")
    if result is None or overwrite:  # Otherwise the run in `workdir` may be refused.
        hosts.on_process_0(lambda: RunFolder(workdir.parent).ladder.unlink(missing_ok=True))
    training.run(config, workdir, overwrite=overwrite, source=source)
    return results.read(workdir)


def _frozen_row(result: Result) -> _Row:
    test = {name: result.scores.get(f"frozen/{name}") for name in frozen.SCORES}
    return _Row("frozen", "", result.scores.get(f"frozen_val/{_SCORE}"), test)


def _row(name: str, place: str, result: Result, best: float) -> _Row:
    """Returns the row of a run; `best` is the highest held-out score before it."""
    held_out = result.scores.get(f"val/{_SCORE}")
    test = {score: result.scores.get(f"test/{score}") for score in frozen.SCORES}
    against = [frozen.Against(**row) for row in result.against_frozen]
    against = [row for row in against if (row.split, row.name) == ("test", _SCORE)]
    if held_out is not None:
        is_kept = held_out > best
    else:  # `dmljax export` compares it with the frozen backbone on the test split.
        is_worse = any(row.is_missing or row.is_worse for row in against)
        is_kept = f"val/{_SCORE}" not in result.scores and not is_worse
    difference = "".join(row.range_text for row in against)
    return _Row(name, place, held_out, test, difference, is_kept=is_kept)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"


def _table(rows: Sequence[_Row], best: _Row, advice: str) -> Iterator[str]:
    """Yields the table of all steps, and the conclusion."""
    yield ""
    titles = "".join(f"{f'test {name}':>12s}" for name in frozen.SCORES)
    yield f"{'':8s}{'held-out':>10s}{titles}{'minus frozen':>22s}{'minutes':>9s}"
    for row in rows:
        kept = "" if not row.folder else "kept" if row.is_kept else "not kept"
        values = "".join(f"{_percent(value):>12s}" for value in row.test.values())
        yield (
            f"{row.name:8s}{_percent(row.held_out):>10s}{values}{row.difference:>22s}"
            f"{row.minutes:9.1f}  {kept}{f'; {row.note}' if row.note else ''}"
        )
    range_ = f"test {_SCORE}, {level_text()} range"
    yield f"held-out: {_SCORE} of the classes that choose; minus frozen: {range_}"
    split = "on the test split" if best.held_out is None else "on held-out classes"
    if not best.is_kept:
        yield f"nothing is better than the frozen backbone {split}: {advice}"
    elif best.held_out is None:
        yield f"no classes are held out, so nothing chooses: `dmljax export` takes {best.name}"
    else:
        yield f"{best.name} is the best {split}, and is what `dmljax export` takes"


def _write_results(
    workdir: pathlib.Path, rows: Sequence[_Row], best: _Row, digests: dict[str, str | None]
) -> None:
    """Writes result and scores of the best step into the folder of the ladder."""
    result, seconds = results.read(workdir / best.folder), 60 * sum(row.minutes for row in rows)
    results.write(workdir, result._replace(wall_seconds=seconds, digests=digests))
    shutil.copyfile(RunFolder(workdir / best.folder).scores, RunFolder(workdir).scores)


def _write_page(workdir: pathlib.Path, rows: Sequence[_Row], best: _Row) -> None:
    """Writes the page of the best step with a comparison of all, best first."""
    first = workdir / rows[1].folder
    places = {r.name: workdir / r.folder if r.folder else RunFolder(first).frozen for r in rows}
    ordered = [row for row in rows if RunFolder(places[row.name]).scores.exists()]
    ordered.sort(key=lambda row: row is not best)
    if len(ordered) < 2:
        return
    if not RunFolder(places[best.name]).page.exists():
        run_page.write_again(places[best.name])
    places = {row.name: places[row.name] for row in ordered}
    scores = {name: scores_file.read(path) for name, path in places.items()}
    content = compare_page.facts_of(
        places,
        result=comparison.compare_runs(scores, average=results.read(first).average),
        fields=[
            ["minutes", *(f"{row.minutes:.1f}" for row in ordered)],
            [f"held-out {_SCORE}", *(_percent(row.held_out) for row in ordered)],
        ],
    )
    print(f"report: {page.write(content, RunFolder(workdir).page)}")
