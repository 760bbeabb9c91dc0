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
from dmljax.config.fields import complete
from dmljax.config.registry import options_of
from dmljax.data.splits import Split
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
    note: str
    folder: str
    held_out: float | None
    test: dict[str, float | None]
    difference: str
    minutes: float
    is_kept: bool


def run(
    config: Any, workdir: str | os.PathLike, *, overwrite: bool = False, source: str = ""
) -> dict[str, float | None]:
    """Runs all missing steps, and returns the test scores of the step that counts."""
    workdir = pathlib.Path(workdir)
    config = complete(config)
    base, steps, train = _parts(config)
    images = len(train)
    if reason := _nothing_chooses(base, len(train.names)):
        _say(f"{reason}: the ladder has only its first step, and nothing is chosen")
        base, steps = base | _NOTHING_HELD_OUT, [steps[0] | _NOTHING_HELD_OUT]
    for step in steps:  # An error of a later step shows before the first one trains.
        build(_of_step(base, step, images))
    digests = digests_of(config)
    with folder.claimed(workdir, config, digests, overwrite=overwrite):
        rows: list[_Row] = []
        for step in steps:
            rows += _climb(_of_step(base, step, images), step, rows, workdir, overwrite, source)
        best = max(rows[1:], key=_held_out)
        advice = frozen.bundle_advice(
            base["start"] and base["start"]["name"], base["net"].get("weights")
        )

        def finish() -> None:
            print("\n".join(_table(rows, best, advice)))
            _write(
                workdir,
                rows,
                best,
                digests._asdict(),
                advice,
                has_page=base["pictures"] is not None,
            )

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
    base, steps, train = _parts(config)
    return [(s["name"], _of_step(base, s, len(train))) for s in steps if "shares" not in s]


def _say(line: str) -> None:
    if jax.process_index() == 0:
        print(line, flush=True)


def _parts(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]], Split]:
    """Returns the config without its ladder, the checked steps, and all training images."""
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
    return base, steps, data_of(options_of(base | _NOTHING_HELD_OUT, ("dataset",)))[0].train


def _without_ladder(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name != "ladder"}


def _problem(number: int, step: Mapping[str, Any]) -> str:
    """Describes what is wrong with a step; "" if nothing is."""
    for field in ("rates", "shares"):
        if field in step and not isinstance(step[field], list):
            return f"{field} must be a list of numbers, got {step[field]!r}"
    if "shares" in step and number < 2:
        return f"shares mix the two steps before it, and there are {number}: put it later"
    if wrong := [share for share in step.get("shares", ()) if not 0 <= share <= 1]:
        return f"a share must be between 0 and 1, got {wrong[0]}"
    table = step.get("steps")
    if isinstance(table, dict) and not (table and all(str(key).isdecimal() for key in table)):
        return (
            f"the keys of steps={table} must be counts of training images, such as "
            "{'1': 60, '1000': '3 epochs'}"
        )
    return ""


def _nothing_chooses(base: Mapping[str, Any], classes: int) -> str:
    """Describes why no held-out classes can choose a step; "" if they can."""
    if classes < _FEWEST_CLASSES:
        return f"{classes} training classes are too few to hold some out"
    if base["held_out"] is None:
        return "no classes are held out (held_out=None)"
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
    folders = [row.folder for row in rows if row.folder]
    name, chosen = step["name"], dict[str, Any]()
    if folders:
        chosen = {"start": {"name": str(workdir / folders[-1])}}
        chosen["net"] = {k: v for k, v in config["net"].items() if k != "weights"}
        # Only the first step scores the backbone. All others are compared with the same scores.
        chosen["evaluate"] = {**config["evaluate"], "frozen": False}
    values: Sequence[float | None] = step.get("shares") or step.get("rates") or [None]
    finished: dict[str, Result] = {}
    for value in values:
        changes = dict(chosen)
        if "shares" in step:
            mix = {"mixed_with": str(workdir / folders[-2]), "mixed_fraction": value}
            changes |= {"start": {**chosen["start"], **mix}, "steps": 0}
        elif value is not None:
            changes["optimizer"] = {**config["optimizer"], "rate": value}
        if value is not None:
            changes["pictures"] = None
        place = name if value is None else f"{name}-{value:g}"
        copied = RunFolder(workdir / folders[-1]).frozen if folders else None
        finished[place] = _run({**config, **changes}, workdir / place, copied, overwrite, source)
    scores = {place: result.scores.get(f"val/{_SCORE}") for place, result in finished.items()}
    best = max(scores, key=lambda place: scores[place] or 0.0)
    minutes = sum(result.wall_seconds for result in finished.values()) / 60
    note = ""
    if len(scores) > 1:
        kind = "share of the step before" if "shares" in step else "rate"
        tried = (f"{v:g}: {_percent(x)}" for v, x in zip(values, scores.values(), strict=True))
        note = f"{kind} {best.removeprefix(f'{name}-')} of ({', '.join(tried)})"
    first = [] if rows else [_frozen_row(finished[best])]
    row = _row(name, note, best, finished[best], minutes, max(map(_held_out, [*rows, *first])))
    return [*first, row]


def _run(
    config: dict[str, Any],
    workdir: pathlib.Path,
    copied: pathlib.Path | None,
    overwrite: bool,
    source: str,
) -> Result:
    """Returns the result of the run in `workdir`, which is finished or starts or continues now."""
    files = RunFolder(workdir)
    if copied is not None and copied.is_dir():
        hosts.on_process_0(lambda: shutil.copytree(copied, files.frozen, dirs_exist_ok=True))
    result = results.read_if_any(workdir)
    if (
        result is not None
        and result.status == "finished"
        and result.digests == digests_of(config)._asdict()
    ):
        return result
    _say(f"\n== {workdir.name}")
    if result is None or overwrite:  # Otherwise the run in `workdir` may be refused.
        hosts.on_process_0(lambda: RunFolder(workdir.parent).ladder.unlink(missing_ok=True))
    training.run(config, workdir, overwrite=overwrite, source=source)
    return results.read(workdir)


def _held_out(row: _Row) -> float:
    return -math.inf if row.held_out is None else row.held_out


def _frozen_row(result: Result) -> _Row:
    scores = result.scores
    test = {name: scores.get(f"frozen/{name}") for name in frozen.SCORES}
    return _Row("frozen", "", "", scores.get(f"frozen_val/{_SCORE}"), test, "", 0.0, True)


def _row(name: str, note: str, place: str, result: Result, minutes: float, best: float) -> _Row:
    """Returns the row of a run; `best` is the highest held-out score before it."""
    held_out = result.scores.get(f"val/{_SCORE}")
    test = {score: result.scores.get(f"test/{score}") for score in frozen.SCORES}
    against = [frozen.Against(**row) for row in result.against_frozen]
    against = [row for row in against if (row.split, row.name) == ("test", _SCORE)]
    difference = "".join(frozen.range_text(x.difference, x.low, x.high) for x in against)
    if held_out is not None:
        is_kept = held_out > best
    else:  # `dmljax export` compares it with the frozen backbone on the test split.
        is_worse = any(row.difference is None or row.is_worse for row in against)
        is_kept = f"val/{_SCORE}" not in result.scores and not is_worse
    return _Row(name, note, place, held_out, test, difference, minutes, is_kept)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"


def _table(rows: Sequence[_Row], best: _Row, advice: str) -> Iterator[str]:
    """Yields the table of all steps, and the conclusion."""
    yield ""
    titles = "".join(f"{f'test {name}':>12s}" for name in frozen.SCORES)
    yield f"{'':8s}{'held-out':>10s}{titles}{'minus frozen':>22s}{'minutes':>9s}"
    for row in rows:
        kept = "" if not row.folder else "kept" if row.is_kept else "not kept"
        yield (
            f"{row.name:8s}{_percent(row.held_out):>10s}"
            + "".join(f"{_percent(value):>12s}" for value in row.test.values())
            + f"{row.difference:>22s}{row.minutes:9.1f}  {kept}"
            + (f"; {row.note}" if row.note else "")
        )
    range_ = f"test {_SCORE}, {level_text()} range"
    yield f"held-out: {_SCORE} of the classes that choose; minus frozen: {range_}"
    if best.held_out is None:
        yield (
            f"no classes are held out, so nothing chooses: `dmljax export` takes {best.name}"
            if best.is_kept
            else f"{best.name} is worse than the frozen backbone on the test split: {advice}"
        )
    elif best.is_kept:
        yield f"{best.name} is the best on held-out classes, and is what `dmljax export` takes"
    else:
        yield f"nothing is better than the frozen backbone on held-out classes: {advice}"


def _write(
    workdir: pathlib.Path,
    rows: Sequence[_Row],
    best: _Row,
    digests: dict[str, str | None],
    advice: str,
    *,
    has_page: bool,
) -> None:
    """Writes result, scores, `ladder.json` and the page into the folder of the ladder."""
    files, of_best = RunFolder(workdir), RunFolder(workdir / best.folder)
    seconds = 60 * sum(row.minutes for row in rows)
    result = results.read(of_best.path)
    results.write(workdir, result._replace(wall_seconds=seconds, digests=digests))
    shutil.copyfile(of_best.scores, files.scores)
    content = {"chosen": best.folder, "rows": [row._asdict() for row in rows], "frozen": advice}
    write_json(files.ladder, content)
    # The page of the best step with a comparison of all, best first.
    first = RunFolder(workdir / rows[1].folder)
    places = {row.name: workdir / row.folder if row.folder else first.frozen for row in rows}
    places = {name: path for name, path in places.items() if RunFolder(path).scores.exists()}
    ordered = sorted((r for r in rows if r.name in places), key=lambda row: row is not best)
    if not has_page or len(ordered) < 2:
        return
    if not of_best.page.exists():
        run_page.write_again(of_best.path)
    places = {row.name: places[row.name] for row in ordered}
    scores = {name: scores_file.read(path) for name, path in places.items()}
    facts = compare_page.facts_of(
        places,
        result=comparison.compare_runs(scores, average=results.read(first.path).average),
        fields=[
            ["minutes", *(f"{row.minutes:.1f}" for row in ordered)],
            [f"held-out {_SCORE}", *(_percent(row.held_out) for row in ordered)],
        ],
    )
    print(f"report: {page.write(facts, files.page)}")
