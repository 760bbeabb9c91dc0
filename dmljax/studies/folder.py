"""The folder of a study: its index of runs."""

import contextlib
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dmljax.files import locks, reading
from dmljax.files.writing import make_folder, write_json
from dmljax.studies.outcomes import read_json
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
    """`index.json` maps rows, seeds and folds to the folders of runs. Several processes may use it.

    It also has the content of every row: a row that has changed in the study file has no runs until
    they are planned again.
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
        """Adds runs to the index of a study.

        A new run replaces the run of the same row, seed and fold.
        """
        with self._claimed():
            old = self._read()
            if old is not None and old["name"] != study.name:
                raise ValueError(
                    f"{self.path} holds the study {old['name']!r} ({old['source']}), not "
                    f"{study.name!r}: choose another --workdir"
                )
            new = {run[:3]: run._asdict() for run in runs}
            kept = [] if old is None else [x for x in self.planned(study) if x[:3] not in new]
            index = {
                "format": _FORMAT,
                "name": study.name,
                "source": study.source,
                "runs": str(self.runs),
                "rows": _content(study),
                "planned": [*new.values(), *(run._asdict() for run in kept)],
            }
            if (index := json.loads(json.dumps(index))) != old:
                write_json(self.path / INDEX, index, indent=1)

    def planned(self, study: Study) -> list[PlannedRun]:
        """Returns the runs in the index whose rows and seeds are those of the study file."""
        index = self._read()
        if index is None:
            raise FileNotFoundError(f"{self.path} holds no study: start it by `dmljax study run`")
        rows = _content(study)
        return [
            PlannedRun(**{**run, "flags": tuple(run["flags"]), "after": tuple(run["after"])})
            for run in index["planned"]
            if (row := run["row"]) in rows
            and index["rows"].get(row) == rows[row]
            and run["seed"] in study.seeds_of(study.row(row))
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
            for run in index["planned"]:
                reading.check_types(run, _RUN_TYPES)
                PlannedRun(**run)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{file} is damaged ({error}): delete it, and {effect}") from error
        return index


def _content(study: Study) -> Mapping[str, Any]:
    """Returns what decides the results of each row, as JSON."""
    rows = {}
    for row in study.rows:
        overrides = {k: v for k, v in row.overrides.items() if not is_movable(k)}
        fields = {name: getattr(row, name) for name in ("start_from", "by", "runs_of", "join")}
        # The study file may be named from another folder.
        base = row.config.rpartition("/")[2]
        rows[row.name] = {"base": base, "folds": study.folds, **fields, **overrides}
    return json.loads(json.dumps(rows))
