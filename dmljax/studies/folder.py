"""The folder of a study: its index of runs, and what may change after the first run."""

import contextlib
import dataclasses
import functools
import json
import pathlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from dmljax.config import files as config_files
from dmljax.config.fields import essential
from dmljax.files import locks, reading
from dmljax.files.result import FILE
from dmljax.files.writing import make_folder, write_json
from dmljax.studies.outcomes import Outcome, outcome, read_json
from dmljax.studies.plan import PlannedRun, Planner
from dmljax.studies.study_file import Row, Search, Study

INDEX, FORMAT = "index.json", 1
_TYPES = {"name": str, "source": str, "runs": str, "comparison": dict, "rows": dict}
_TYPES |= {"planned": list}
_RUN_TYPES = {"row": str, "seed": int, "fold": int | None, "flags": list, "digest": str}
_RUNS = pathlib.Path("runs/by_digest")  # of all studies, unless a command line names another folder


def default_folder(study: Study) -> pathlib.Path:
    return pathlib.Path("runs/studies") / study.name


class StudyFolder:
    """`index.json` maps rows, seeds and folds to the folders of runs, and remembers the study.

    Several processes may open one study at a time: they agree, or are refused.
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

    def run_folder(self, digest: str) -> pathlib.Path:
        return self.runs / digest

    @contextlib.contextmanager
    def claimed(self) -> Iterator[None]:
        """Waits until no other process changes the index."""
        try:
            make_folder(self.path)
            file = locks.lock(self.path / "lock", wait=True)
        except OSError as error:
            raise OSError(f"{self.path} cannot be written: {error.strerror}") from error
        with file:
            yield

    def record(
        self, study: Study, configs: Mapping[str, Mapping[str, Any]], runs: Iterable[PlannedRun]
    ) -> None:
        """Writes the index of a study; refuses what contradicts runs that exist already."""
        index = _content(study, configs, runs, str(self.runs))
        with self.claimed():
            old = self._read()
            if old is not None:
                self._refuse_changes(old, index)
                if self._has_begun(old):
                    index["planned"] += _additions(old, index)
            if old != index:
                write_json(self.path / INDEX, index, indent=1)

    def check(self, study: Study, configs: Mapping[str, Mapping[str, Any]]) -> None:
        """Refuses what contradicts runs that exist already, as `record` does, and reads no data.

        A study file that was edited after its runs would give them another test or another name.
        """
        seeds = {row.name: study.seeds_of(row) for row in study.rows}
        runs = [run for run in self.planned() if run.seed in seeds.get(run.row, [run.seed])]
        self._refuse_changes(self._index(), _content(study, configs, runs, str(self.runs)))

    def extend(self, runs: Iterable[PlannedRun]) -> None:
        """Adds runs that could be planned only after others were finished.

        A new run replaces the run of the same row, seed and fold: the best of more trials may be
        another one.
        """
        with self.claimed():
            index = self._index()
            new = {_key(run._asdict()): json.loads(json.dumps(run._asdict())) for run in runs}
            planned = [new.pop(_key(run), run) for run in index["planned"]]
            index["planned"] = [*planned, *new.values()]
            write_json(self.path / INDEX, index, indent=1)

    def planned(self) -> list[PlannedRun]:
        """The runs of the index."""
        index = self._index()
        return [PlannedRun(**{**run, "flags": tuple(run["flags"])}) for run in index["planned"]]

    def _index(self) -> dict[str, Any]:
        index = self._read()
        if index is None:
            raise FileNotFoundError(f"{self.path} holds no study: start it by `dmljax study run`")
        return index

    def _read(self) -> dict[str, Any] | None:
        file, effect = self.path / INDEX, "the same command writes it again"
        index = read_json(file, effect, {"format": int})
        if index is None:
            return None
        if index["format"] != FORMAT:
            raise ValueError(f"{file} was written by another version of dmljax")
        try:
            reading.check_types(index, _TYPES)
            reading.check_types(index["comparison"], {"baseline": str | None})
            for row in index["rows"].values():
                reading.check_types(row, {"essential": dict})
            for run in index["planned"]:
                reading.check_types(run, _RUN_TYPES)
                PlannedRun(**run)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{file} is damaged ({error}): delete it, and {effect}") from error
        return index

    def _has_begun(self, index: Mapping[str, Any], *, but: Collection[str] = ()) -> bool:
        """Whether a run exists, of a row other than `but`."""
        runs = [run for run in index["planned"] if run["row"] not in but]
        return any((self.runs / run["digest"]).is_dir() for run in runs)

    def _failed_rows(self, index: Mapping[str, Any]) -> set[str]:
        """The rows of whose runs all that exist have failed, without a result."""
        has_failed: dict[str, bool] = {}
        for run in index["planned"]:
            folder = self.runs / run["digest"]
            if folder.is_dir():
                end = outcome(folder)
                is_lost = end.state == "failed" and not (folder / FILE).exists()
                has_failed[run["row"]] = is_lost and has_failed.get(run["row"], True)
        return {row for row, failed in has_failed.items() if failed}

    def _refuse_changes(self, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
        if old["name"] != new["name"]:
            raise ValueError(
                f"{self.path} holds the study {old['name']!r} ({old['source']}), not "
                f"{new['name']!r}: choose another --workdir"
            )
        failed = self._failed_rows(old)
        if not self._has_begun(old, but=failed):
            return
        comparison = {field: new["comparison"][field] for field in old["comparison"]}
        changes = _changes(old["comparison"], comparison)
        changes += [
            f"row {name!r}: baseline was {baseline!r} and is {new['baselines'][name]!r}"
            for name, baseline in old.get("baselines", {}).items()
            if name not in failed
            and baseline != new["baselines"].get(name, baseline)
            and old["comparison"]["baseline"] == new["comparison"]["baseline"]
        ]
        fixed = {name: row for name, row in old["rows"].items() if name not in failed}
        changes += list(_changed_rows(fixed, new["rows"]))
        digest_of = {_key(run): run["digest"] for run in new["planned"]}
        changed = {change.partition(":")[0] for change in changes}
        for run in old["planned"]:
            row = f"row {run['row']!r}"
            if run["row"] not in new["rows"] or run["row"] in failed or row in changed:
                continue
            if _key(run) not in digest_of:
                changes.append(f"{row}: seed {run['seed']} is gone")
            elif digest_of[_key(run)] != run["digest"]:
                changes.append(f"{row}: its data, weights or seeds have changed")
                changed.add(row)
        if changes:
            raise ValueError(
                f"the study has changed since its first run in {self.path}: "
                f"{'; '.join(changes[:5])}. Rows may be added; give a changed row a new name, or "
                "begin again in another --workdir"
            )


@dataclasses.dataclass(frozen=True)
class Session:
    """A study, its folder, and the flags of the command line that all of its runs get."""

    study: Study
    folder: StudyFolder
    words: tuple[str, ...]
    storage: str | None = None  # of a search, such as 'postgresql+psycopg://...'

    @functools.cached_property
    def planner(self) -> Planner:
        """Plans runs of the study with the flags of the command line."""
        return Planner(self.study, self.folder.runs, self.words)

    @property
    def search(self) -> Search:
        """The search of a study that has one."""
        assert self.study.search is not None
        return self.study.search

    def outcome(self, run: PlannedRun) -> Outcome:
        """The outcome of a run, which may be made at this moment."""
        return outcome(self.folder.run_folder(run.digest))

    def extend(self, rows: Iterable[Row]) -> list[PlannedRun]:
        """Plans the runs of rows that were not known in advance, and adds them to the index."""
        runs = self.planner.runs_of(rows)
        self.folder.extend(runs)
        return runs


def _content(
    study: Study,
    configs: Mapping[str, Mapping[str, Any]],
    runs: Iterable[PlannedRun],
    folder: str,
) -> dict[str, Any]:
    """The content of the index of a study whose runs are below `folder`."""
    index = {
        "format": FORMAT,
        "name": study.name,
        "source": study.source,
        "digest": study.digest,
        "runs": folder,
        "comparison": _comparison(study),
        "baselines": {row.name: row.baseline for row in study.rows},
        "rows": {name: {"essential": essential(dict(config))} for name, config in configs.items()},
        "planned": [run._asdict() for run in runs],
    }
    return json.loads(json.dumps(index))


def _comparison(study: Study) -> dict[str, Any]:
    """The fields of a study that may not change once a run exists."""
    search = None
    if study.search is not None:
        search = {k: v for k, v in study.search._asdict().items() if k != "trials"}
    names = ("baseline", "test", "folds")
    return {name: getattr(study, name) for name in names} | {"search": search}


def _changes(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    differences = config_files.differences(old, new)
    return [f"{path} was {a!r} and is {b!r}" for path, a, b in differences]


def _changed_rows(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    for name, row in old.items():
        if name not in new:
            yield f"row {name!r}: it is gone"
            continue
        if changes := _changes(essential(row["essential"]), new[name]["essential"]):
            yield f"row {name!r}: {', '.join(changes[:3])}"


def _additions(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Runs that `extend` has added, and that a plan made in advance does not have."""
    # A row of the old file that the new one lacks has failed.
    names = {*old["rows"], *new["rows"], *(run["row"] for run in new["planned"])}
    return [run for run in old["planned"] if run["row"] not in names]


def _key(run: Mapping[str, Any]) -> tuple[Any, ...]:
    return run["row"], run["seed"], run["fold"]
