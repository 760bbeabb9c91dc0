"""Fine-tuning in steps; each is kept only if it helps: frozen, head, all layers, mix.

Every step is a run in a folder of its own, below the folder of the ladder, and is scored on classes
that are held out from training. The best one counts, the frozen backbone included. A killed ladder
goes on with the same command: finished steps are read, the others are ordinary runs.
"""

import functools
import math
import os
import pathlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from dmljax.adapt import interpolated
from dmljax.config.build import build, digests_of
from dmljax.config.data import data_of
from dmljax.config.fields import complete
from dmljax.config.resolve import resolve
from dmljax.files import reading
from dmljax.files import result as results
from dmljax.files.result import Result
from dmljax.files.writing import make_folder, write_json
from dmljax.metrics import level_text
from dmljax.report import compare_page, comparison, page, scores_file
from dmljax.runs import folder, frozen, training
from dmljax.runs import page as run_page
from dmljax.train import hosts, optimizers
from dmljax.train.evaluation import MAIN, Evaluator
from dmljax.train.options import SECTIONS

_SCORE = "MAP@R"
_NO_FIELDS = ("name", "rates", "shares")  # what a step has beside fields of the config
_FEWEST_CLASSES = 4  # two to hold out and two to train on


class _Row(NamedTuple):
    """A step of the ladder; `folder` is "" for the frozen backbone, whose run is the first step."""

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
    """Climbs the ladder of a config, and returns the test scores of the step that counts."""
    workdir = pathlib.Path(workdir)
    config = complete(config)
    base = {name: value for name, value in config.items() if name != "ladder"}
    steps = _checked(config["ladder"])
    classes, images = _sizes(base)
    reason = ""
    if classes < _FEWEST_CLASSES:
        reason = f"{classes} training classes are too few to hold some out"
    elif base["held_out"] is None:
        reason = "no classes are held out (held_out=None)"
    if reason:
        _say(f"{reason}: the ladder has only its first step, and nothing is chosen")
        nothing_held_out = {"held_out": None, "select": "last"}
        base |= nothing_held_out
        steps = [steps[0] | nothing_held_out]
    for step in steps:  # An error of a later step shows before the first one trains.
        build(_changed(base, _fields(step, base, images)))
    digests = digests_of(config)
    with folder.claimed(workdir, config, digests, overwrite=overwrite):
        rows = _climb(base, steps, workdir, images=images, overwrite=overwrite, source=source)
        best = max((row for row in rows if row.folder), key=_held_out_of)
        finish = functools.partial(
            _finish,
            workdir,
            rows,
            best,
            digests=digests._asdict(),
            advice=frozen.bundle_advice(_start_folder(base), base["net"].get("weights")),
        )
        hosts.on_process_0(lambda: finish(has_page=base["pictures"] is not None))
    result = results.read(workdir / best.folder)
    return {k.removeprefix("test/"): v for k, v in result.scores.items() if k.startswith("test/")}


def _start_folder(config: Mapping[str, Any]) -> str | None:
    return config["start"] and config["start"]["name"]


def _say(line: str) -> None:
    if jax.process_index() == 0:
        print(line, flush=True)


def configs(config: Any) -> list[tuple[str, dict[str, Any]]]:
    """The config of every step that trains, by its name; of other configs `[("", config)]`.

    Each starts where the ladder starts, as its real start does not exist yet.
    """
    config = complete(config)
    base = {name: value for name, value in config.items() if name != "ladder"}
    if not config["ladder"]:
        return [("", base)]
    _, images = _sizes(base)
    steps = [step for step in _checked(config["ladder"]) if "shares" not in step]
    return [(step["name"], _changed(base, _fields(step, base, images))) for step in steps]


def _checked(ladder: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    for number, step in enumerate(ladder):
        if not isinstance(step.get("name"), str):
            raise ValueError(f"ladder.{number} has no name: write dict(name='head', ...)")
        if "shares" in step and number < 2:
            raise ValueError(
                f"ladder.{number} ({step['name']}) mixes the two steps before it, and there are "
                f"{number}: put it later"
            )
        for field in ("rates", "shares"):
            values = step.get(field, ())
            if not isinstance(values, list) and values != ():
                raise ValueError(
                    f"ladder.{number}: {field} must be a list of numbers, not {values}"
                )
        table = step.get("steps")
        if isinstance(table, dict) and not (table and all(str(key).isdecimal() for key in table)):
            raise ValueError(
                f"ladder.{number}: steps={table} needs numbers of training images as its keys, "
                "such as {'1': 60, '1000': '3 epochs'}"
            )
        if wrong := [share for share in step.get("shares", ()) if not 0 <= share <= 1]:
            raise ValueError(f"ladder.{number}: a share is between 0 and 1, not {wrong[0]}")
    if len({step["name"] for step in ladder}) < len(ladder):
        raise ValueError("ladder: every step needs a name of its own, for its folder")
    return [dict(step) for step in ladder]


def _sizes(base: Mapping[str, Any]) -> tuple[int, int]:
    """The training classes and images of the data set."""
    train = data_of(resolve({**base, "held_out": None}, ("dataset",))).train
    return len(train.names), len(train)


def _climb(
    base: dict[str, Any],
    steps: Sequence[Mapping[str, Any]],
    workdir: pathlib.Path,
    *,
    images: int,
    overwrite: bool,
    source: str,
) -> list[_Row]:
    """Runs all steps; the rows of the table, the frozen backbone first."""
    options: dict[str, Any] = {"overwrite": overwrite, "source": source}
    rows: list[_Row] = []
    folders: list[str] = []  # of the steps so far
    for changes in steps:
        name = changes["name"]
        step_config = _changed(base, _fields(changes, base, images))
        if folders:
            options["before"] = workdir / folders[-1]
            step_config["start"] = {"name": str(options["before"])}
            step_config["net"] = {k: v for k, v in step_config["net"].items() if k != "weights"}
        if "shares" in changes:
            chosen = _mixed(step_config, workdir, name, folders[-2:], changes["shares"], options)
        else:
            chosen = _best_rate(step_config, workdir, name, changes.get("rates", ()), options)
        step_folder, note, seconds = chosen
        result = results.read(workdir / step_folder)
        if not rows:
            rows.append(_frozen_row(result))
        best = max(map(_held_out_of, rows))
        rows.append(_row(name, note, step_folder, result, seconds, best))
        folders.append(step_folder)
    return rows


def _changed(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The config with other fields; fields of sections are changed one by one."""
    sections = {name: {**base[name], **changes[name]} for name in SECTIONS if name in changes}
    return {**base, **changes, **sections}


def _fields(step: Mapping[str, Any], base: Mapping[str, Any], images: int) -> dict[str, Any]:
    """The fields of the config that a step changes."""
    fields = {name: value for name, value in step.items() if name not in _NO_FIELDS}
    return {**fields, "steps": _length(fields.get("steps", base["steps"]), images)}


def _length(steps: Any, images: int) -> Any:
    """The length for a number of images, of a table such as {'100': 80, '1000': '4 epochs'}."""
    if not isinstance(steps, dict):
        return steps
    fits = [least for least in steps if int(least) <= images]
    return steps[max(fits, key=int)] if fits else steps[min(steps, key=int)]


def _run(
    config: dict[str, Any], workdir: pathlib.Path, place: str, options: Mapping[str, Any]
) -> Result:
    """The result of the run in `place`, which is finished or begun now."""
    target = workdir / place
    # Only the first step scores the backbone. All others are compared with the same scores.
    if "before" in options:
        config = _changed(config, {"evaluate": {"frozen": False}})
        source = options["before"] / frozen.FOLDER
        hosts.on_process_0(lambda: _copy(source, target / frozen.FOLDER))
    result, digests = results.read_if_any(target), digests_of(config)._asdict()
    if result is not None and result.status == "finished" and result.digests == digests:
        return result
    _say(f"\n== {place}")
    if result is None or options["overwrite"]:  # Otherwise the run in `place` may be refused.
        hosts.on_process_0(lambda: (workdir / reading.LADDER).unlink(missing_ok=True))
    training.run(config, target, overwrite=options["overwrite"], source=options["source"])
    return results.read(target)


def _copy(source: pathlib.Path, target: pathlib.Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, dirs_exist_ok=True)


def _best_rate(
    config: dict[str, Any],
    workdir: pathlib.Path,
    name: str,
    rates: Sequence[float],
    options: Mapping[str, Any],
) -> tuple[str, str, float]:
    """Runs a step with every rate: folder and note of the best one, and the seconds of all."""
    if not rates:
        return name, "", _run(config, workdir, name, options).wall_seconds
    scores: dict[float, float] = {}
    seconds = 0.0
    for rate in rates:
        place = f"{name}-{rate:g}"
        optimizer = {**config["optimizer"], "rate": rate}
        candidate = {**config, "optimizer": optimizer, "pictures": None}
        result = _run(candidate, workdir, place, options)
        scores[rate] = _held_out(result) or 0.0
        seconds += result.wall_seconds
    best = max(rates, key=lambda rate: scores[rate])
    tried = ", ".join(f"{rate:g}" for rate in rates)
    note = f"{'' if any(scores.values()) else 'nothing chooses: '}rate {best:g} of {tried}"
    return f"{name}-{best:g}", note, seconds


def _mixed(
    config: dict[str, Any],
    workdir: pathlib.Path,
    name: str,
    places: Sequence[str],
    shares: Sequence[float],
    options: Mapping[str, Any],
) -> tuple[str, str, float]:
    """A run of no steps with the average of two steps that is best on held-out classes."""
    file = workdir / name / "shares.json"
    about = {place: results.read(workdir / place).digests["run"] for place in places}
    known = reading.json_file(file) if file.exists() else {}
    values = {float(share): value for share, value in known.get("scores", {}).items()}
    if known.get("runs") != about or list(values) != list(shares):
        values = _mixed_scores([workdir / place for place in places], shares)
        hosts.on_process_0(lambda: _write(file, {"runs": about, "scores": values}))
    best = max(values, key=lambda share: values[share])
    start = {**config["start"], "mixed_with": str(workdir / places[0]), "mixed_share": best}
    config = {**config, "start": start, "steps": 0}
    result = _run(config, workdir, name, options)
    tried = ", ".join(f"{share:g}: {100 * value:.1f}" for share, value in values.items())
    return name, f"{best:g} of the step before ({tried})", result.wall_seconds


def _write(file: pathlib.Path, content: Any) -> None:
    make_folder(file.parent)
    write_json(file, content)


def _mixed_scores(folders: Sequence[pathlib.Path], shares: Sequence[float]) -> dict[float, float]:
    """The score of held-out classes for every share of the first of two runs."""
    (_, other), (run, state) = (folder.reopen(place) for place in folders)
    evaluator = Evaluator(run)
    assert run.held_out is not None
    averages = [optimizers.averaged(x.params, x.opt_state) for x in (state, other)]
    statistics = [x.model_state.get("batch_stats", {}) for x in (state, other)]
    values = {}
    for share in shares:
        params = interpolated(*averages, share=share)
        model_state = state.model_state
        if statistics[0]:
            mixed = interpolated(*statistics, share=share)
            model_state = {**model_state, "batch_stats": mixed}
        # The average of the optimizer, if there is one, would be taken instead of the parameters.
        mixed_state = state._replace(params=params, model_state=model_state, opt_state=())
        embeddings = evaluator.embeddings(mixed_state, run.held_out)[MAIN]
        scores = evaluator.main_scores(embeddings, run.held_out, clustering=False)
        values[share] = scores[_SCORE]
    return values


def _held_out(result: Result) -> float | None:
    return result.scores.get(f"val/{_SCORE}")


def _held_out_of(row: _Row) -> float:
    return -math.inf if row.held_out is None else row.held_out


def _frozen_row(result: Result) -> _Row:
    scores = result.scores
    test = {name: scores.get(f"frozen/{name}") for name in frozen.SCORES}
    return _Row("frozen", "", "", scores.get(f"frozen_val/{_SCORE}"), test, "", 0.0, True)


def _row(name: str, note: str, place: str, result: Result, seconds: float, best: float) -> _Row:
    held_out = _held_out(result)
    test = {score: result.scores.get(f"test/{score}") for score in frozen.SCORES}
    against = [frozen.Against(**row) for row in result.against_frozen]
    against = [row for row in against if (row.split, row.name) == ("test", _SCORE)]
    difference = "".join(frozen.range_text(x.difference, x.low, x.high) for x in against)
    if held_out is not None:
        is_kept = held_out > best
    else:  # `dmljax export` compares it with the frozen backbone on the test split.
        is_worse = any(row.difference is None or row.is_worse for row in against)
        is_kept = f"val/{_SCORE}" not in result.scores and not is_worse
    return _Row(name, note, place, held_out, test, difference, seconds / 60, is_kept)


def _finish(
    workdir: pathlib.Path,
    rows: Sequence[_Row],
    best: _Row,
    *,
    digests: dict[str, str | None],
    advice: str,
    has_page: bool,
) -> None:
    """Prints the table, and writes page, result and `ladder.json` into the folder of the ladder."""
    for line in _table(rows, best, advice):
        print(line)
    result = results.read(workdir / best.folder)
    minutes = sum(row.minutes for row in rows)
    results.write(workdir, result._replace(wall_seconds=60 * minutes, digests=digests))
    shutil.copyfile(workdir / best.folder / scores_file.FILE, workdir / scores_file.FILE)
    content = {"chosen": best.folder, "rows": [row._asdict() for row in rows], "frozen": advice}
    write_json(workdir / reading.LADDER, content)
    if has_page and (path := _page(workdir, rows, best)):
        print(f"report: {path}")


def _table(rows: Sequence[_Row], best: _Row, advice: str) -> Iterator[str]:
    yield ""
    yield (
        f"{'':8s}{'held-out':>10s}"
        + "".join(f"{f'test {name}':>12s}" for name in frozen.SCORES)
        + f"{'minus frozen':>22s}{'minutes':>9s}"
    )
    for row in rows:
        values = (None if x is None else 100 * x for x in (row.held_out, *row.test.values()))
        cells = ["-" if x is None else f"{x:.1f}" for x in values]
        kept = "kept" if row.is_kept else "not kept"
        yield (
            f"{row.name:8s}{cells[0]:>10s}"
            + "".join(f"{cell:>12s}" for cell in cells[1:])
            + f"{row.difference:>22s}{row.minutes:9.1f}  {kept if row.folder else ''}"
            + (f"; {row.note}" if row.note else "")
        )
    yield (
        f"held-out: {_SCORE} of the classes that choose; minus frozen: test {_SCORE}, "
        f"{level_text()} range"
    )
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


def _page(workdir: pathlib.Path, rows: Sequence[_Row], best: _Row) -> pathlib.Path | None:
    """The page of the best step with a comparison of all, best first."""
    first = next(row.folder for row in rows if row.folder)
    folders = {}
    for row in sorted(rows, key=lambda row: row is not best):
        place = workdir / row.folder if row.folder else workdir / first / frozen.FOLDER
        if (place / scores_file.FILE).exists():
            folders[row.name] = place
    if len(folders) < 2:
        return None
    if not (workdir / best.folder / run_page.FILE).exists():
        run_page.write_again(workdir / best.folder)
    by_name = {row.name: row for row in rows}
    held_out = (by_name[name].held_out for name in folders)
    fields = [
        ["minutes", *(f"{by_name[name].minutes:.1f}" for name in folders)],
        [f"held-out {_SCORE}", *("-" if x is None else f"{100 * x:.1f}" for x in held_out)],
    ]
    scores = {name: scores_file.read(place) for name, place in folders.items()}
    average = results.read(workdir / first).average
    result = comparison.compare_runs(scores, average=average)
    content = compare_page.facts_of(folders, result=result, fields=fields)
    return page.write(content, workdir / run_page.FILE)
