"""The folder of a study: its index of runs, and what may change later."""

import dataclasses
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from dmljax.config import files as config_files
from dmljax.files import reading
from dmljax.files.writing import lock, make_folder, write_json
from dmljax.studies.outcomes import outcome
from dmljax.studies.plan import PlannedRun, is_movable
from dmljax.studies.study_file import Study

INDEX = "index.json"
_RUNS = pathlib.Path("runs/by_digest")  # of all studies, unless a command line names another folder


def default_folder(study: Study) -> pathlib.Path:
    """Returns the folder of a study that the command line does not place elsewhere."""
    return pathlib.Path("runs/studies") / study.name


@dataclasses.dataclass(frozen=True)
class _Index:
    """The content of `index.json`; `rows` is `_content` of the study file."""

    format: Literal[3]
    runs: str
    rows: dict[str, Any]
    planned: tuple[PlannedRun, ...]


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
        if (index := self._read()) is None:
            return self._requested_runs or _RUNS
        if self._requested_runs not in (None, pathlib.Path(index.runs)):
            raise ValueError(
                f"{self.path} has its runs in {index.runs}, not in {self._requested_runs}: leave "
                "out --runs, or choose another --workdir"
            )
        return pathlib.Path(index.runs)

    def record(self, study: Study, runs: Sequence[PlannedRun]) -> None:
        """Adds runs to the index of a study; raises for what contradicts runs that exist already.

        A new run replaces the run of the same row, seed and fold: the best of more candidates may
        be another one.
        """
        try:
            make_folder(self.path)
            file = lock(self.path / "lock", wait=True)
        except OSError as error:
            raise OSError(f"{self.path} cannot be written: {error.strerror}") from error
        with file:
            self.check(study, runs)
            old, rows = self._read(), _content(study)
            by_key = {run.key: run for run in (*(old.planned if old is not None else ()), *runs)}
            planned = tuple(
                run
                for run in by_key.values()
                if run.row in rows and run.seed in study.seeds_of(study.row(run.row))
            )
            index = _Index(3, str(self.runs), rows, planned)
            if index != old:
                write_json(self.path / INDEX, dataclasses.asdict(index), indent=1)

    def check(self, study: Study, runs: Sequence[PlannedRun] = ()) -> None:
        """Raises for changes of a study file that contradict runs that exist already.

        They would give those runs another test or another name. A row may change until one of its
        runs exists, or if all of its runs have failed.
        """
        if (old := self._read()) is None:
            return
        fixed_rows = {run.row for run in old.planned if self._exists(run)}
        fixed = [run for run in old.planned if run.row in fixed_rows]
        if changes := list(dict.fromkeys(_changes(study, old.rows, fixed, runs))):
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
        return list(index.planned)

    def _exists(self, run: PlannedRun) -> bool:
        folder = self.runs / run.digest
        return folder.is_dir() and outcome(folder).state != "failed"

    def _read(self) -> _Index | None:
        path = self.path / INDEX
        try:
            return reading.json_file(path, _Index) if path.exists() else None
        except ValueError as error:
            raise ValueError(f"{error}: delete it, and the same command writes it again") from error


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
    study: Study, old: Mapping[str, Any], fixed: Sequence[PlannedRun], runs: Sequence[PlannedRun]
) -> Iterator[str]:
    """Yields the changes of a study that contradict the runs `fixed` of its index."""
    new, digest_of = _content(study), {run.key: run.digest for run in runs}
    for run in fixed:
        title = f"row {run.row!r}"
        if run.row not in new:
            yield f"{title}: it is gone"
        elif different := list(config_files.differences(old.get(run.row), new[run.row])):
            for path, before, now in different:
                yield f"{title}: {path} was {before!r} and is {now!r}"
        elif run.seed not in study.seeds_of(study.row(run.row)):
            yield f"{title}: seed {run.seed} is gone"
        elif not study.row(run.row).best_of and digest_of.get(run.key, run.digest) != run.digest:
            yield f"{title}: its config, data or weights have changed"
