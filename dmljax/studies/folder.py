"""The folder of a study: its index of runs, and what may change after the first run."""

import contextlib
import json
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from dmljax.config import files as config_files
from dmljax.config.fields import essential
from dmljax.files import locks, reading
from dmljax.files.run_folder import RunFolder
from dmljax.files.writing import make_folder, write_json
from dmljax.studies.outcomes import outcome, read_json
from dmljax.studies.plan import PlannedRun
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

    def record(
        self, study: Study, configs: Mapping[str, Mapping[str, Any]], runs: Sequence[PlannedRun]
    ) -> None:
        """Adds runs to the index of a study; raises for what contradicts runs that exist already.

        A new run replaces the run of the same row, seed and fold: the best of more candidates may
        be another one.
        """
        with self._claimed():
            old = self._read() or {"planned": []}
            self.check(study, configs, runs)
            new = {_key(run): run for run in json.loads(json.dumps([r._asdict() for r in runs]))}
            kept = [x for x in old["planned"] if _key(x) not in new and _is_of(x, study)]
            index = {
                "format": _FORMAT,
                "name": study.name,
                "source": study.source,
                "runs": str(self.runs),
                **_recorded(study, configs),
                "planned": [*new.values(), *kept],
            }
            if index != old:
                write_json(self.path / INDEX, index, indent=1)

    def check(
        self,
        study: Study,
        configs: Mapping[str, Mapping[str, Any]],
        runs: Sequence[PlannedRun] = (),
    ) -> None:
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
        if fixed := self._fixed_rows(old["planned"]):
            changes = list(_changes(study, old, _recorded(study, configs), runs, fixed))
            if changes:
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

    def _fixed_rows(self, planned: Sequence[Mapping[str, Any]]) -> set[str]:
        """Returns the rows with a run that exists and has not failed without a result."""
        rows = set()
        for run in planned:
            folder = self.runs / run["digest"]
            has_result = RunFolder(folder).result.exists()
            if has_result or (folder.is_dir() and outcome(folder).state != "failed"):
                rows.add(run["row"])
        return rows


def _recorded(study: Study, configs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Returns what the index remembers of a study file."""
    rows = {name: essential(dict(config)) for name, config in configs.items()}
    rows |= {r.name: {**r.overrides, "by": r.by} for r in study.rows if r.best_of}
    content = {
        "comparison": {name: getattr(study, name) for name in ("baseline", "test", "folds")},
        "baselines": {row.name: row.baseline for row in study.rows},
        "rows": rows,
    }
    return json.loads(json.dumps(content))


def _changes(
    study: Study,
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    runs: Iterable[PlannedRun],
    fixed: set[str],
) -> Iterator[str]:
    """Yields the changes of a study that contradict the runs of the rows `fixed`."""
    yield from _differences(old["comparison"], new["comparison"])
    has_baseline = old["comparison"]["baseline"] == new["comparison"]["baseline"]
    digest_of = {_key(run._asdict()): run.digest for run in runs}
    for name in old["baselines"]:
        if name not in fixed:
            continue
        if name not in new["baselines"]:
            yield f"row {name!r}: it is gone"
            continue
        before, now = old["baselines"][name], new["baselines"][name]
        if before != now and has_baseline:
            yield f"row {name!r}: baseline was {before!r} and is {now!r}"
        own = [run for run in old["planned"] if run["row"] == name]
        gone = sorted({run["seed"] for run in own} - set(study.seeds_of(study.row(name))))
        changes = list(_differences(old["rows"].get(name), new["rows"].get(name)))
        if changes:
            yield f"row {name!r}: {', '.join(changes[:3])}"
        elif gone:
            yield f"row {name!r}: seed {gone[0]} is gone"
        elif not study.row(name).best_of and any(
            run["digest"] != digest_of.get(_key(run), run["digest"]) for run in own
        ):
            yield f"row {name!r}: its data, weights or seeds have changed"


def _differences(old: Any, new: Any) -> Iterator[str]:
    for path, before, now in config_files.differences(old, new):
        yield f"{path} was {before!r} and is {now!r}"


def _key(run: Mapping[str, Any]) -> tuple[Any, ...]:
    return run["row"], run["seed"], run["fold"]


def _is_of(run: Mapping[str, Any], study: Study) -> bool:
    """Returns whether a run of the index belongs to the study as it is now."""
    names = {row.name for row in study.rows}
    return run["row"] in names and run["seed"] in study.seeds_of(study.row(run["row"]))
