"""The folder of a study: its index of runs, and what may change after the first run."""

import contextlib
import json
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from dmljax.config import files as config_files
from dmljax.files import locks, reading
from dmljax.files.writing import make_folder, write_json
from dmljax.studies.outcomes import outcome, read_json
from dmljax.studies.plan import PlannedRun, is_movable
from dmljax.studies.study_file import Study

INDEX, _FORMAT = "index.json", 2
_TYPES = {"format": int, "name": str, "source": str, "runs": str, "comparison": dict, "rows": dict}
_TYPES |= {"planned": list}
_RUN_TYPES = {"row": str, "seed": int, "fold": int | None, "digest": str, "after": list}
_RUNS = pathlib.Path("runs/by_digest")  # of all studies, unless a command line names another folder


def default_folder(study: Study) -> pathlib.Path:
    """Returns the folder of a study that the command line does not place elsewhere."""
    return pathlib.Path("runs/studies") / study.name


class StudyFolder:
    """`index.json` maps rows, seeds and folds to the folders of runs, and remembers the study.

    Several processes may open a study at the same time: they agree, or are refused.
    """

    def __init__(self, path: pathlib.Path, runs: pathlib.Path | None = None):
        self.path = path
        self._requested_runs = runs

    @property
    def runs(self) -> pathlib.Path:
        """The folder of the runs: the one in the index, or for a new study the requested one."""
        recorded = (self._read() or {}).get("runs")
        if recorded is None:
            return self._requested_runs or _RUNS
        if self._requested_runs not in (None, pathlib.Path(recorded)):
            raise ValueError(
                f"{self.path} has its runs in {recorded}, not in {self._requested_runs}: leave out "
                "--runs, or choose another --workdir"
            )
        return pathlib.Path(recorded)

    def record(self, study: Study, runs: Sequence[PlannedRun]) -> None:
        """Adds runs to the index of a study; raises for what contradicts runs that exist already.

        A new run replaces the run of the same row, seed and fold: the best of more candidates may
        be another one.
        """
        with self._claimed():
            old = self._read() or {"planned": []}
            self.check(study, runs)
            new = {_key(run): run for run in json.loads(json.dumps([r._asdict() for r in runs]))}
            kept = [x for x in old["planned"] if _key(x) not in new and _is_of(x, study)]
            index = {
                "format": _FORMAT,
                "name": study.name,
                "source": study.source,
                "runs": str(self.runs),
                **_recorded(study),
                "planned": [*new.values(), *kept],
            }
            if index != old:
                write_json(self.path / INDEX, index, indent=1)

    def check(self, study: Study, runs: Sequence[PlannedRun] = ()) -> None:
        """Raises for changes of a study file that contradict runs that exist already.

        They would give those runs another test or another name. A row may change until one of its
        runs exists, or if all of its runs have failed.
        """
        if (old := self._read()) is None:
            return
        if old["name"] != study.name:
            raise ValueError(
                f"{self.path} holds the study {old['name']!r} ({old['source']}), not "
                f"{study.name!r}: choose another --workdir"
            )
        if changes := list(_changes(study, old, self._fixed(old["planned"]), runs)):
            raise ValueError(
                f"the study has changed since its first run in {self.path}: "
                f"{'; '.join(changes[:5])}. Rows may be added; give a changed row a new name, "
                "or begin again in another --workdir"
            )

    def planned(self) -> list[PlannedRun]:
        """Returns the runs of the index."""
        index = self._read()
        if index is None:
            raise FileNotFoundError(f"{self.path} holds no study: start it by `dmljax study run`")
        return [
            PlannedRun(**{**run, "flags": tuple(run["flags"]), "after": tuple(run["after"])})
            for run in index["planned"]
        ]

    @contextlib.contextmanager
    def _claimed(self) -> Iterator[None]:
        """Waits until no other process changes the index."""
        try:
            make_folder(self.path)
            file = locks.lock(self.path / "lock", wait=True)
        except OSError as error:
            raise OSError(f"{self.path} cannot be written: {error.strerror}") from error
        with file:
            yield

    def _read(self) -> dict[str, Any] | None:
        file, effect = self.path / INDEX, "the same command writes it again"
        index = read_json(file, effect, _TYPES)
        if index is None:
            return None
        try:
            if index["format"] != _FORMAT:
                raise ValueError(f"its format is {index['format']}, not {_FORMAT}")
            reading.check_types(index["comparison"], {"baseline": str | None})
            for run in index["planned"]:
                reading.check_types(run, _RUN_TYPES)
                PlannedRun(**run)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{file} is damaged ({error}): delete it, and {effect}") from error
        return index

    def _fixed(self, planned: Iterable[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
        """Returns the runs of each row with a run that exists and has not failed."""
        runs_of: dict[str, list[Mapping[str, Any]]] = {}
        for run in planned:
            runs_of.setdefault(run["row"], []).append(run)
        return {name: runs for name, runs in runs_of.items() if any(map(self._exists, runs))}

    def _exists(self, run: Mapping[str, Any]) -> bool:
        folder = self.runs / run["digest"]
        return folder.is_dir() and outcome(folder).state != "failed"


def _recorded(study: Study) -> dict[str, Any]:
    """Returns what the index remembers of a study file: what decides the results of its rows."""
    rows = {}
    for row in study.rows:
        overrides = {k: v for k, v in row.overrides.items() if not is_movable(k)}
        fields = ("start_from", "by", "runs_of", "choose", "join", "baseline")
        # The study file may be named from another folder.
        config = row.config.rpartition("/")[2]
        rows[row.name] = {**overrides, "base": config, **{x: getattr(row, x) for x in fields}}
    comparison = {name: getattr(study, name) for name in ("baseline", "test", "folds")}
    return json.loads(json.dumps({"comparison": comparison, "rows": rows}))


def _changes(
    study: Study,
    old: Mapping[str, Any],
    fixed: Mapping[str, Sequence[Mapping[str, Any]]],
    runs: Iterable[PlannedRun],
) -> Iterator[str]:
    """Yields the changes of a study that contradict the runs of the rows `fixed`."""
    new = _recorded(study)
    if fixed:
        yield from _differences(old["comparison"], new["comparison"])
    digest_of = {_key(run._asdict()): run.digest for run in runs}
    for name, own in fixed.items():
        row = new["rows"].get(name)
        if row is None:
            yield f"row {name!r}: it is gone"
        elif changes := list(_differences(old["rows"].get(name), row)):
            yield f"row {name!r}: {', '.join(changes[:3])}"
        elif gone := sorted({x["seed"] for x in own} - set(study.seeds_of(study.row(name)))):
            yield f"row {name!r}: seed {gone[0]} is gone"
        # The best of more candidates may be another one.
        elif not study.row(name).best_of and any(
            digest_of.get(_key(run), run["digest"]) != run["digest"] for run in own
        ):
            yield f"row {name!r}: its config, data or weights have changed"


def _differences(old: Any, new: Any) -> Iterator[str]:
    for path, before, now in config_files.differences(old, new):
        yield f"{path} was {before!r} and is {now!r}"


def _key(run: Mapping[str, Any]) -> tuple[Any, ...]:
    return run["row"], run["seed"], run["fold"]


def _is_of(run: Mapping[str, Any], study: Study) -> bool:
    """Returns whether a run of the index belongs to the study as it is now."""
    names = {row.name for row in study.rows}
    return run["row"] in names and run["seed"] in study.seeds_of(study.row(run["row"]))
