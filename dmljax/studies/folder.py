"""The folder of a study: its index of runs, and what may change later."""

import contextlib
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dmljax.config import files as config_files
from dmljax.files import locks, reading
from dmljax.files.writing import make_folder, write_json
from dmljax.studies.outcomes import outcome, read_json
from dmljax.studies.plan import PlannedRun, is_movable
from dmljax.studies.study_file import Study

INDEX, _FORMAT = "index.json", 3
_TYPES = {"format": int, "name": str, "source": str, "runs": str, "rows": dict, "planned": list}
_RUN_TYPES = {"row": str, "seed": int, "fold": int | None, "digest": str, "after": list}
_RUNS = pathlib.Path("runs/by_digest")  # of all studies, unless a command line names another folder


def default_folder(study: Study) -> pathlib.Path:
    """Returns the folder of a study that the command line does not place elsewhere."""
    return pathlib.Path("runs/studies") / study.name


class StudyFolder:
    """`index.json` maps rows, seeds and folds to the folders of runs, and remembers the rows.

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
            self.check(study, runs)
            old = self._read()
            new = {run[:3]: run for run in runs}
            kept = [] if old is None else [x for x in self.planned() if x[:3] not in new]
            rows = _content(study)
            index = {
                "format": _FORMAT,
                "name": study.name,
                "source": study.source,
                "runs": str(self.runs),
                "rows": rows,
                "planned": [
                    run._asdict()
                    for run in (*runs, *kept)
                    if run.row in rows and run.seed in study.seeds_of(study.row(run.row))
                ],
            }
            if (index := json.loads(json.dumps(index))) != old:
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
        planned = self.planned()
        fixed = {run.row for run in planned if self._exists(run)}
        own = [run for run in planned if run.row in fixed]
        if changes := list(dict.fromkeys(_changes(study, old["rows"], own, runs))):
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

    def _exists(self, run: PlannedRun) -> bool:
        folder = self.runs / run.digest
        return folder.is_dir() and outcome(folder).state != "failed"

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
            for run in index["planned"]:
                reading.check_types(run, _RUN_TYPES)
                PlannedRun(**run)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{file} is damaged ({error}): delete it, and {effect}") from error
        return index


def _content(study: Study) -> dict[str, Any]:
    """Returns what decides the results of each row and its test, as JSON."""
    rows = {}
    for row in study.rows:
        overrides = {k: v for k, v in row.overrides.items() if not is_movable(k)}
        names = ("start_from", "by", "runs_of", "choose", "join", "baseline")
        fields = {name: getattr(row, name) for name in names}
        # The study file may be named from another folder.
        fields |= {"base": row.config.rpartition("/")[2], "test": study.test, "folds": study.folds}
        rows[row.name] = {**overrides, **fields}
    return json.loads(json.dumps(rows))


def _changes(
    study: Study, old: Mapping[str, Any], own: Sequence[PlannedRun], runs: Sequence[PlannedRun]
) -> Iterator[str]:
    """Yields the changes of a study that contradict the runs `own` of its index."""
    new, digest_of = _content(study), {run[:3]: run.digest for run in runs}
    for run in own:
        title = f"row {run.row!r}"
        if run.row not in new:
            yield f"{title}: it is gone"
        elif different := list(config_files.differences(old.get(run.row), new[run.row])):
            for path, before, now in different:
                yield f"{title}: {path} was {before!r} and is {now!r}"
        elif run.seed not in study.seeds_of(study.row(run.row)):
            yield f"{title}: seed {run.seed} is gone"
        elif not study.row(run.row).best_of and digest_of.get(run[:3], run.digest) != run.digest:
            yield f"{title}: its config, data or weights have changed"
