"""Fine-tuning in steps; each is kept only if it helps: frozen, head, all layers, mix.

Each step is one run, or several runs with other values (learning rates, shares of a mix), in their
own folders below the folder of the ladder. Classes that are held out from training choose. The same
command continues a killed ladder: finished runs are read, the others are ordinary runs.
"""

import dataclasses
import functools
import math
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import jax

from dmljax.config.build import build, digests_of
from dmljax.config.data import data_of
from dmljax.config.fields import complete, options_of
from dmljax.files import run_folder as results
from dmljax.files import schema
from dmljax.files.run_folder import Result, RunFolder
from dmljax.files.writing import write_json
from dmljax.hints import check_all
from dmljax.metrics import level_text
from dmljax.report import compare_page, comparison, page, scores_file
from dmljax.runs import folder, frozen, training
from dmljax.runs import page as run_page
from dmljax.train import hosts
from dmljax.train.options import SECTIONS

_SCORE = "MAP@R"
_OWN_FIELDS = ("name", "rates", "shares", "steps")  # of a step, besides fields of the config
_Count = Annotated[str, schema.Limit(str.isdecimal, "a count of training images, such as '1000'")]
_FEWEST_CLASSES = 4  # two to hold out and two to train on
_NOTHING_HELD_OUT = {"held_out": None, "select": "last"}


class _Step(NamedTuple):
    """A step of the ladder: the rates or shares that it tries, and its config.

    `steps` may depend on the count of training images: {'1': 80, '1000': '4 epochs'}.
    """

    name: str
    rates: Sequence[float] = ()
    shares: Sequence[Annotated[float, schema.between(0, 1)]] = ()
    steps: int | str | dict[_Count, Any] | None = None
    config: dict[str, Any] = {}  # noqa: RUF012


class _Row(NamedTuple):
    """A step that ran; `folder` is "" for the frozen backbone, which the first run scores."""

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
    workdir, config = pathlib.Path(workdir), complete(config)
    steps = _steps(config)
    for step in steps:  # An error of a later step shows before the first one trains.
        build(step.config)
    digests = digests_of(config)

    def run_fn(config: dict[str, Any], path: pathlib.Path) -> Result:
        result = results.read_if_any(path)
        if result and (result.status, result.digests) == ("finished", digests_of(config)._asdict()):
            return result
        _say(f"\n== {path.name}")
        if result is None or overwrite:  # Otherwise the run in `path` may be refused.
            hosts.on_process_0(lambda: RunFolder(workdir).ladder.unlink(missing_ok=True))
        training.run(config, path, overwrite=overwrite, source=source)
        return results.read(path)

    with folder.claimed(workdir, config, digests, overwrite=overwrite):
        rows: list[_Row] = []
        for step in steps:
            rows += _climb(step, rows, workdir, run_fn)
        best = max(rows[1:], key=lambda row: row.rank)
        chosen = results.read(workdir / best.folder)
        start, weights = config["start"] and config["start"]["name"], config["net"].get("weights")
        advice = frozen.bundle_advice(start, weights)

        def finish() -> None:
            print("\n".join(_table(rows, best, advice)))
            seconds = 60 * sum(row.minutes for row in rows)
            results.write(
                workdir,
                dataclasses.replace(chosen, wall_seconds=seconds, digests=digests._asdict()),
            )
            shutil.copyfile(RunFolder(workdir / best.folder).scores, RunFolder(workdir).scores)
            content = {"chosen": best.folder, "rows": [row._asdict() for row in rows]}
            write_json(RunFolder(workdir).ladder, {**content, "frozen": advice})
            if config["pictures"] is not None:
                _write_page(workdir, rows, best)

        hosts.on_process_0(finish)
    return {k.removeprefix("test/"): v for k, v in chosen.scores.items() if k.startswith("test/")}


def configs(config: Any) -> list[tuple[str, dict[str, Any]]]:
    """Returns the config of every step that trains by its name; `[("", config)]` without a ladder.

    Each starts where the ladder starts, because its real start does not exist yet.
    """
    config = complete(config)
    if not config["ladder"]:
        return [("", _without_ladder(config))]
    return [(step.name, step.config) for step in _steps(config) if not step.shares]


def _say(line: str) -> None:
    if jax.process_index() == 0:
        print(line, flush=True)


def _without_ladder(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name != "ladder"}


def _steps(config: Mapping[str, Any]) -> list[_Step]:
    """Returns the checked steps; only the first one if no classes can be held out."""
    steps = []
    for number, fields in enumerate(config["ladder"]):
        own = {name: fields[name] for name in _OWN_FIELDS if name in fields}
        steps.append(schema.parse(_Step, own, f"ladder.{number}")._replace(config=fields))
    names = [step.name for step in steps]
    mixes = any(step.shares for step in steps[:2])
    check_all(
        {
            f"ladder: every step needs its own name, got {names}": len(set(names)) < len(names),
            "ladder: shares mix the two steps before it, so two steps must come first": mixes,
        }
    )
    # All training images count, those of held-out classes too.
    everything = {**config, **_NOTHING_HELD_OUT, "ladder": ()}
    train = data_of(options_of(everything, ("dataset",)))[0].train
    base, changes = _without_ladder(config), dict[str, Any]()
    if base["held_out"] is None or len(train.names) < _FEWEST_CLASSES:
        _say(
            "no classes are held out (held_out=None, or fewer than 4 training classes): the "
            "ladder has only its first step, and nothing is chosen"
        )
        steps, changes = steps[:1], _NOTHING_HELD_OUT
    return [step._replace(config=_config(base, step, len(train)) | changes) for step in steps]


def _config(base: Mapping[str, Any], step: _Step, images: int) -> dict[str, Any]:
    """Returns the config of a step; fields of sections are changed one by one."""
    changes = {name: value for name, value in step.config.items() if name not in _OWN_FIELDS}
    changes |= {name: {**base[name], **changes[name]} for name in SECTIONS if name in changes}
    length = base["steps"] if step.steps is None else step.steps
    if isinstance(length, dict):
        fits = [least for least in length if int(least) <= images]
        length = length[max(fits, key=int) if fits else min(length, key=int)]
    return {**base, **changes, "steps": length}


def _climb(
    step: _Step,
    rows: Sequence[_Row],
    workdir: pathlib.Path,
    run_fn: Callable[[dict[str, Any], pathlib.Path], Result],
) -> list[_Row]:
    """Runs what is missing of a step; returns its row, after the first step the frozen one too."""
    folders, config = [workdir / row.folder for row in rows if row.folder], step.config
    if folders:
        net = {k: v for k, v in config["net"].items() if k != "weights"}
        # Only the first step scores the backbone. All others are compared with the same scores.
        evaluate = {**config["evaluate"], "frozen": False}
        config = {**config, "start": {"name": str(folders[-1])}, "net": net, "evaluate": evaluate}
    finished: dict[str, Result] = {}
    values: Sequence[float | None] = step.shares or step.rates or [None]
    for value in values:
        place, changes = step.name, dict[str, Any]()
        if value is not None:
            place, changes["pictures"] = f"{step.name}-{value:g}", None
        if step.shares:
            mix = {"mixed_with": str(folders[-2]), "mixed_fraction": value}
            changes |= {"start": {**config["start"], **mix}, "steps": 0}
        elif value is not None:
            changes["optimizer"] = {**config["optimizer"], "rate": value}
        if folders and (source := RunFolder(folders[-1]).frozen).is_dir():
            target = str(RunFolder(workdir / place).frozen)  # all processes get the result
            copy_fn = functools.partial(shutil.copytree, source, target, dirs_exist_ok=True)
            hosts.on_process_0(copy_fn)
        finished[place] = run_fn({**config, **changes}, workdir / place)
    scores = {place: result.scores.get(f"val/{_SCORE}") for place, result in finished.items()}
    best = max(scores, key=lambda place: scores[place] or 0.0)
    minutes, note = sum(result.wall_seconds for result in finished.values()) / 60, ""
    if len(scores) > 1:
        kind = "share of the step before" if step.shares else "rate"
        tried = (f"{v:g}: {_percent(x)}" for v, x in zip(values, scores.values(), strict=True))
        note = f"{kind} {best.removeprefix(f'{step.name}-')} of ({', '.join(tried)})"
    first = [] if rows else [_row("frozen", "", finished[best], "frozen_val", "frozen")]
    row = _row(step.name, best, finished[best], "val", "test")
    against = [frozen.Against(**x) for x in finished[best].against_frozen]
    against = [x for x in against if (x.split, x.name) == ("test", _SCORE)]
    if row.held_out is not None:
        is_kept = row.held_out > max(x.rank for x in [*rows, *first])
    else:  # `dmljax export` compares it with the frozen backbone on the test split.
        is_worse = any(x.is_missing or x.is_worse for x in against)
        is_kept = f"val/{_SCORE}" not in finished[best].scores and not is_worse
    difference = "".join(x.range_text for x in against)
    row = row._replace(difference=difference, minutes=minutes, is_kept=is_kept, note=note)
    return [*first, row]


def _row(name: str, place: str, result: Result, held_out: str, test: str) -> _Row:
    scores = {score: result.scores.get(f"{test}/{score}") for score in frozen.SCORES}
    return _Row(name, place, result.scores.get(f"{held_out}/{_SCORE}"), scores)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"


def _table(rows: Sequence[_Row], best: _Row, advice: str) -> Iterator[str]:
    """Yields the table of all steps, and the conclusion."""
    titles = "".join(f"{f'test {name}':>12s}" for name in frozen.SCORES)
    yield f"\n{'':8s}{'held-out':>10s}{titles}{'minus frozen':>22s}{'minutes':>9s}"
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


def _write_page(workdir: pathlib.Path, rows: Sequence[_Row], best: _Row) -> None:
    """Writes the page of the best step with a comparison of all, best first."""
    folders = {row.name: workdir / row.folder for row in rows}
    folders["frozen"] = RunFolder(workdir / rows[1].folder).frozen
    shown = {row.name: row for row in (best, *rows) if RunFolder(folders[row.name]).scores.exists()}
    if len(shown) < 2:
        return
    if not RunFolder(folders[best.name]).page.exists():
        run_page.write_again(folders[best.name])
    scores = {name: scores_file.read(folders[name]) for name in shown}
    average = results.read(folders[best.name]).average
    content = compare_page.facts_of(
        {name: folders[name] for name in shown},
        result=comparison.compare_runs(scores, average=average),
        fields=[
            ["minutes", *(f"{row.minutes:.1f}" for row in shown.values())],
            [f"held-out {_SCORE}", *(_percent(row.held_out) for row in shown.values())],
        ],
    )
    print(f"report: {page.write(content, RunFolder(workdir).page)}")
