"""The runs of a study: checks of all rows, the command of every run, the digest of its folder."""

import dataclasses
import hashlib
import inspect
import itertools
import json
import pathlib
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from dmljax.config import fields, scores
from dmljax.config import files as config_files
from dmljax.config.fields import options_of
from dmljax.files import reading
from dmljax.files.run_folder import first_best
from dmljax.studies.outcomes import Outcome, outcome
from dmljax.studies.study_file import Row, Study, flags
from dmljax.train.options import Spec

_DIGITS = 12  # of a digest, in the name of a folder


@dataclasses.dataclass(frozen=True)
class PlannedRun:
    """One run: `dmljax train --config=CONFIG FLAGS --workdir=FOLDER`.

    `digest` names the folder. `after` are the digests of the runs that this one reads: the run that
    it starts from, or the nets of an ensemble, which has no `config`.
    """

    row: str
    seed: int
    fold: int | None
    config: str
    flags: tuple[str, ...]
    digest: str
    after: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[str, int, int | None]:
        return self.row, self.seed, self.fold

    @property
    def title(self) -> str:
        """The name of the run for a reader."""
        return f"{self.row}, seed {self.seed}{'' if self.fold is None else f', fold {self.fold}'}"

    def command(self, runs: pathlib.Path, words: Sequence[str] = ()) -> list[str]:
        """Returns the command line of the run; `words` are flags that cannot change its result."""
        head = [sys.executable, "-m", "dmljax.main"]
        tail = [*_words_of(words, self.after), *reading.trust_words()]
        tail.append(f"--workdir={runs / self.digest}")
        if not self.config:
            return [*head, "study", "join", *(str(runs / x) for x in self.after), *tail]
        return [*head, "train", f"--config={self.config}", *self.flags, *tail]


def check_rows(study: Study) -> dict[str, dict[str, Any]]:
    """Returns the completed configs of all rows with runs of their own, except `best_of` rows.

    Raises for what would end a run at its start, for scores that no run would have, and for two
    rows with the same config.
    """
    configs: dict[str, dict[str, Any]] = {}
    rows_by_content: dict[str, str] = {}
    for row in study.rows:
        if row.best_of:
            _check(study, _as_candidate(study, row), study.scores)
        elif row.runs_of is None:
            chosen_by = {other.by for other in study.rows if row.name in other.best_of}
            config = configs[row.name] = _check(study, row, chosen_by or study.scores)
            content = json.dumps([_with_defaults(config), row.start_from, row.seeds], default=repr)
            if (other := rows_by_content.setdefault(content, row.name)) != row.name:
                raise ValueError(
                    f"the rows {other!r} and {row.name!r} have the same config: change one of them"
                )
        elif row.choose and row.choose != "last":
            origin = _as_candidate(study, study.row(row.runs_of))
            _check(study, _changed(origin, row.name, {"select": row.choose}), ())
    return configs


def _with_defaults(config: Mapping[str, Any]) -> list[Any]:
    """Returns the fields that can change a result, with the defaults of all named functions."""
    options, content = options_of(config), fields.essential(config)
    for name in content:
        if isinstance(spec := getattr(options, name), Spec):
            parameters = inspect.signature(spec.partial.func).parameters.values()
            defaults = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
            values = defaults | {key: fields.short(value) for key, value in spec.items()}
            content[name] = {k: getattr(values[k], "__name__", values[k]) for k in sorted(values)}
    return sorted(content.items())


def _as_candidate(study: Study, row: Row) -> Row:
    """Returns a `best_of` row with the config of its first candidate."""
    if not row.best_of:
        return row
    return _changed(_as_candidate(study, study.row(row.best_of[0])), row.name, row.overrides)


def _changed(row: Row, name: str, overrides: Mapping[str, Any]) -> Row:
    return dataclasses.replace(row, name=name, overrides={**row.overrides, **overrides})


def _check(study: Study, row: Row, wanted: Collection[str]) -> dict[str, Any]:
    """Returns the completed config of a row; raises if a run would end at its start.

    Also raises if a run would not compute the `wanted` scores.
    """
    try:
        start = {} if row.start_from is None else {"start.name": row.start_from}
        config = fields.complete(config_files.read(row.config, flags({**row.overrides, **start})))
        held_out = config["held_out"]
        if study.folds is not None:
            if held_out is not None:
                raise ValueError(
                    f"folds={study.folds} and held_out={held_out['name']} both hold classes out"
                )
            held_out = study.fold(0)
        scores.check({**config, "held_out": held_out}, wanted)
    except (ValueError, TypeError, OSError) as error:
        raise ValueError(f"row {row.name!r}: {error}") from error
    return config


def is_movable(field: str) -> bool:
    """Returns whether a field of the config cannot change a result."""
    return any(field == name or field.startswith(f"{name}.") for name in fields.MOVABLE)


def check_flags(words: Sequence[str]) -> None:
    """Raises for flags of the command line that would change the rows."""
    for word in words:
        field = word.removeprefix("--config.").partition("=")[0]
        if not is_movable(field):
            raise ValueError(
                f"{word} would change every row of the study: write it into the study file. The "
                f"command line may set {', '.join(fields.MOVABLE)}"
            )


def _words_of(words: Sequence[str], after: Sequence[str]) -> list[str]:
    """Returns the flags for a run; a run that starts from another one takes its weights."""
    return [w for w in words if not after or not w.startswith("--config.net.weights=")]


class Planner:
    """Plans the runs of a study in the folder `runs`, with flags of the command line.

    A run that reads other runs can be planned once those are finished: its digest depends on them.
    """

    def __init__(self, study: Study, runs: pathlib.Path, words: Sequence[str] = ()):
        self._study, self._runs, self._words = study, runs, tuple(words)
        self._planned: dict[tuple[str, int, int | None], PlannedRun] = {}
        self._data_digests: dict[str, str] = {}

    def runs_of(self, rows: Iterable[Row]) -> list[PlannedRun]:
        """Returns the runs of rows that can be planned now.

        The first seed of every row comes first, so tables fill evenly.
        """
        rows = [row for row in rows if row.runs_of is None or row.join]
        seeds = dict.fromkeys(seed for row in rows for seed in self._study.seeds_of(row))
        folds = (None, *range(self._study.folds or 0))
        planned = (
            self._plan(row, seed, fold)
            for seed, fold, row in itertools.product(seeds, folds, rows)
            if seed in self._study.seeds_of(row) and fold in self._folds(row)
        )
        return [run for run in planned if run is not None]

    def _folds(self, row: Row) -> Sequence[int | None]:
        return range(self._study.folds) if self._study.folds and not row.join else [None]

    def _plan(self, row: Row, seed: int, fold: int | None) -> PlannedRun | None:
        run = self._planned.get((row.name, seed, fold))
        if run is None:
            run = (self._ensemble if row.join else self._training)(row, seed, fold)
            if run is not None:
                self._planned[run.key] = run
        return run

    def _training(self, row: Row, seed: int, fold: int | None) -> PlannedRun | None:
        if (chosen := self._chosen(row)) is None:
            return None
        overrides: dict[str, Any] = {**chosen.overrides, "seed": seed}
        after: tuple[str, ...] = ()
        if fold is not None:
            overrides["held_out"] = self._study.fold(fold)
        if chosen.start_from is not None:
            start = self._plan(self._study.row(chosen.start_from), seed, fold)
            if start is None or self._outcome(start).state != "finished":
                return None
            after = (start.digest,)
            overrides["start.name"] = str(self._runs / start.digest)
        words = flags(overrides)
        config = config_files.read(chosen.config, [*words, *_words_of(self._words, after)])
        digest = self._digest(config)[:_DIGITS]
        return PlannedRun(row.name, seed, fold, chosen.config, tuple(words), digest, after)

    def _digest(self, config: dict[str, Any]) -> str:
        from dmljax.config import build  # here: it imports jax

        key = json.dumps(config["dataset"], sort_keys=True)
        run_digests = build.digests_of(config, data=self._data_digests.get(key))
        self._data_digests[key] = run_digests.data
        return run_digests.run

    def _chosen(self, row: Row) -> Row | None:
        """Returns the row with the config of its best candidate; None until all of them are over.

        The value of a candidate is the mean score of its runs. The first of equals is the best.
        """
        if not row.best_of:
            return row
        values: dict[int, float] = {}
        for number, name in enumerate(row.best_of):
            candidate = self._study.row(name)
            count = len(self._study.seeds_of(candidate)) * len(self._folds(candidate))
            outcomes = [self._outcome(run) for run in self.runs_of([candidate])]
            if len(outcomes) < count or not all(x.is_over for x in outcomes):
                return None
            found = [x.result.scores.get(row.by) for x in outcomes if x.result is not None]
            scores = [x for x in found if x is not None]
            if len(scores) == count:
                values[number] = sum(scores) / count
        if (best := first_best(values)) is None:
            return None
        chosen = self._chosen(self._study.row(row.best_of[best]))
        assert chosen is not None  # all of its runs are over
        return _changed(chosen, row.name, row.overrides)

    def _ensemble(self, row: Row, seed: int, fold: int | None) -> PlannedRun | None:
        """Returns the run that scores several trained nets as one; None until all are finished."""
        origin = self._study.row(row.runs_of or "")
        members = [seed]
        if isinstance(row.join, int):
            first = self._study.seeds_of(row).index(seed) * row.join
            members = list(self._study.seeds_of(origin)[first : first + row.join])
        nets = [self._plan(origin, s, f) for s in members for f in self._folds(origin)]
        if any(net is None or self._outcome(net).state != "finished" for net in nets):
            return None
        after = tuple(net.digest for net in nets if net is not None)
        digest = hashlib.sha256("join".join(after).encode()).hexdigest()[:_DIGITS]
        return PlannedRun(row.name, seed, fold, "", (), digest, after)

    def _outcome(self, run: PlannedRun) -> Outcome:
        return outcome(self._runs / run.digest)
