"""A search whose points depend on the values of earlier ones: Optuna by ask and tell.

The database holds points, states and held-out scores, and no test score. Every trial has a lock
file in the folder of the study, which the kernel releases when the worker ends. A worker adopts a
trial that the database calls running and whose lock is free, and continues its run from the
checkpoint. The number of the trial seeds its sampler. So an interrupted search asks for the same
points as an uninterrupted one, and parallel workers ask for different points.
"""

import contextlib
import functools
import hashlib
import json
import os
import pathlib
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from dmljax.files import locks, reading
from dmljax.files.result import Result, first_best
from dmljax.studies import outcomes, plan
from dmljax.studies.folder import Session, StudyFolder
from dmljax.studies.plan import PlannedRun
from dmljax.studies.study_file import Search
from dmljax.studies.worker import WatchFn, Worker

try:
    import optuna
    import sqlalchemy.exc
except ImportError as error:
    raise ImportError(
        f"search.method='tpe' needs {error.name}: pip install 'dmljax[search]'. random, sobol and "
        "grid need nothing"
    ) from error

_PATIENCE = 600.0  # seconds that a database may be away
_PAUSE = 1.0
_ASK, _LOCKS, _DATABASE = "ask.lock", "trials", "search.db"
_AWAY = (
    sqlalchemy.exc.OperationalError,
    sqlalchemy.exc.InterfaceError,
    optuna.exceptions.StorageInternalError,
)
Value = TypeVar("Value")


class SeededByTrial(optuna.samplers.BaseSampler):
    """A new sampler for every trial, seeded by the seed of the search and the trial's number."""

    def __init__(self, make_fn: Callable[[int], optuna.samplers.BaseSampler], seed: int):
        self._make = functools.lru_cache(maxsize=4)(
            lambda number: make_fn((seed * 1_000_003 + number) % 2**32)
        )

    def infer_relative_search_space(self, study, trial):
        return self._make(trial.number).infer_relative_search_space(study, trial)

    def sample_relative(self, study, trial, search_space):
        return self._make(trial.number).sample_relative(study, trial, search_space)

    def sample_independent(self, study, trial, param_name, param_distribution):
        sampler = self._make(trial.number)
        return sampler.sample_independent(study, trial, param_name, param_distribution)

    def before_trial(self, study, trial):
        self._make(trial.number).before_trial(study, trial)

    def after_trial(self, study, trial, state, values):
        self._make(trial.number).after_trial(study, trial, state, values)


def create(session: Session) -> None:
    """Creates the database and the search in it, before any worker opens it."""
    with session.folder.claimed():
        opened = _open(session, create=True)
        if not _patient(opened.get_trials):
            for point in session.search.first:
                _patient(functools.partial(opened.enqueue_trial, dict(point)))


def _open(session: Session, *, create: bool = False) -> optuna.Study:
    """The search in its database. Unless `create`, a search that is not there raises ValueError."""
    options, storage = session.search, session.storage
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    pruner: optuna.pruners.BasePruner = optuna.pruners.NopPruner()
    if options.pruner == "asha":
        pruner = optuna.pruners.SuccessiveHalvingPruner()
    sampler = SeededByTrial(lambda seed: optuna.samplers.TPESampler(seed=seed), options.seed)
    url = storage or f"sqlite:///{session.folder.path / _DATABASE}"
    url = url.replace("postgresql://", "postgresql+psycopg://", 1)
    arguments: dict[str, Any] = {"pool_pre_ping": True}
    if url.startswith("sqlite"):
        arguments = {"connect_args": {"timeout": 60, "factory": _Connection}}

    def open_study() -> optuna.Study:
        # Two studies in a shared database must have different names.
        name = f"{session.study.name}-{options.score}-{_digest(options)}"
        if not create and not _has_tables(url, arguments):
            raise KeyError(name)  # before Optuna creates the tables
        common: dict[str, Any] = {"study_name": name, "sampler": sampler, "pruner": pruner}
        common["storage"] = optuna.storages.RDBStorage(url, engine_kwargs=arguments)
        if not create:
            return optuna.load_study(**common)
        return optuna.create_study(**common, direction="maximize", load_if_exists=True)

    try:
        return _patient(open_study)
    except KeyError as error:
        shown = sqlalchemy.make_url(url).render_as_string(hide_password=True)
        raise ValueError(
            f"there is no search {error.args[0]} in {shown}: give the --storage with which the "
            "study was started, or start it by dmljax study run"
        ) from None
    except sqlalchemy.exc.ArgumentError as error:
        raise ValueError(f"--storage={storage} is not a URL of a database: {error}") from error
    except sqlalchemy.exc.SQLAlchemyError as error:
        raise OSError(
            f"the database of the search cannot be opened: {_first_line(error)}"
        ) from error


class _Connection(sqlite3.Connection):
    """A connection whose commits are on the disk when they return, also in the folder's names."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.execute("pragma synchronous=extra")


def _has_tables(url: str, arguments: dict[str, Any]) -> bool:
    """Whether the database may hold searches. Opening a missing SQLite file would create it."""
    parsed = sqlalchemy.make_url(url)
    if parsed.get_backend_name() == "sqlite" and not os.path.isfile(parsed.database or ""):
        return False
    database = sqlalchemy.create_engine(url, **arguments)
    try:
        return sqlalchemy.inspect(database).has_table("studies")
    finally:
        database.dispose()


def _digest(search: Search) -> str:
    content = {k: v for k, v in search._asdict().items() if k != "trials"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:8]


def _first_line(error: BaseException) -> str:
    return str(error.__cause__ or error).partition("\n")[0]


def _patient(fn: Callable[[], Value], *, patience: float = _PATIENCE) -> Value:
    """`fn()`, repeated while the database is away."""
    end, warned = time.monotonic() + patience, False
    while True:
        try:
            return fn()
        except _AWAY as error:
            if time.monotonic() > end:
                reason = _first_line(error)
                raise OSError(
                    f"the database of the search was away for {patience:.0f} s: {reason}"
                ) from error
            if not warned:
                print(f"waiting for the database of the search: {_first_line(error)}", flush=True)
            warned = True
            time.sleep(_PAUSE)


def _trials(session: Session) -> list[optuna.trial.FrozenTrial]:
    """All trials; none if the study was not started yet."""
    if session.storage is None and not (session.folder.path / _DATABASE).exists():
        return []
    return _patient(_open(session).get_trials)


def is_over(session: Session) -> bool:
    """Whether all trials are over."""
    trials = _trials(session)
    return sum(trial.state.is_finished() for trial in trials) >= session.search.trials


def best_point(session: Session) -> dict[str, Any] | None:
    """The point of the best complete trial, the first of equals."""
    complete = {t.number: t for t in _trials(session) if t.state.name == "COMPLETE"}
    values = {n: trial.value for n, trial in complete.items() if trial.value is not None}
    best = first_best(values)
    return None if best is None else dict(complete[best].params)


def work(session: Session, worker: Worker, *, wait: bool = True) -> None:
    """One worker of a search: adopts trials of killed workers, asks for new ones, tells values."""
    opened = _open(session)
    (session.folder.path / _LOCKS).mkdir(parents=True, exist_ok=True)
    while True:
        worker.check_signal()
        with _next_trial(opened, session) as trial:
            if trial is not None:
                _make(trial, opened, session, worker)
                continue
        running = [t for t in _patient(opened.get_trials) if t.state.name == "RUNNING"]
        if not running or not wait:
            return
        time.sleep(_PAUSE)


@contextlib.contextmanager
def _next_trial(opened: optuna.Study, session: Session) -> Iterator[optuna.Trial | None]:
    """A trial whose lock this worker holds: an abandoned or a new one; None if there is none."""
    folder, search = session.folder, session.search
    with contextlib.ExitStack() as stack:
        with locks.lock(folder.path / _ASK, wait=True):
            trials = _patient(opened.get_trials)
            trial = None
            for old in trials:
                if old.state.name == "RUNNING" and _locked(stack, folder, old.number):
                    trial = _patient(functools.partial(optuna.Trial, opened, old._trial_id))
                    break
            asked = [t for t in trials if t.state.name != "WAITING"]
            if trial is None and len(asked) < search.trials:
                trial = _patient(opened.ask)
                _locked(stack, folder, trial.number)
            if trial is not None:  # under the lock, so that two workers never sample at once
                _patient(lambda: _sample(trial, search.space))
        yield trial


def _locked(stack: contextlib.ExitStack, folder: StudyFolder, number: int) -> bool:
    """Locks a trial until the stack ends; False if another worker has it."""
    try:
        stack.enter_context(locks.lock(folder.path / _LOCKS / f"{number:04}.lock"))
    except locks.Taken:
        return False
    return True


def _sample(trial: optuna.Trial, space: Mapping[str, tuple]) -> None:
    """Draws the parameters that the trial does not have yet."""
    for field, (kind, *values) in space.items():
        if kind == "choice":
            trial.suggest_categorical(field, values)
        elif kind in ("int", "log_int"):
            trial.suggest_int(field, *values, log=kind == "log_int")
        else:
            trial.suggest_float(field, *values, log=kind == "log")


def _make(trial: optuna.Trial, opened: optuna.Study, session: Session, worker: Worker) -> None:
    """Makes the runs of a trial, and tells the engine its held-out score and nothing else."""
    options, number = session.search, trial.number
    runs = session.extend([plan.row_of_trial(options, number, trial.params)])
    results: list[Result] = []
    for run in runs:
        watch_fn = None
        if options.pruner is not None and len(runs) == 1:
            folder = session.folder.run_folder(run.digest)
            watch_fn = functools.partial(_should_stop, trial, folder, options)
        outcome = _outcome(run, session, worker, watch_fn)
        if outcome is None:
            _tell(opened, number, None, optuna.trial.TrialState.PRUNED)
            worker.say(f"{run.title}: pruned")
            return
        if outcome.result is None:
            _tell(opened, number, None, optuna.trial.TrialState.FAIL)
            return
        results.append(outcome.result)
        if options.pruner is not None and len(runs) > 1:
            value = outcomes.mean_score(results, options.score)
            if _report(trial, value, len(results)) and len(results) < len(runs):
                _tell(opened, number, None, optuna.trial.TrialState.PRUNED)
                worker.say(f"{run.title}: pruned after {len(results)} of {len(runs)} runs")
                return
    _tell(opened, number, outcomes.mean_score(results, options.score), None)


def _outcome(
    run: PlannedRun, session: Session, worker: Worker, watch_fn: WatchFn
) -> outcomes.Outcome | None:
    """The outcome of a run that this worker makes, or waits for; None if `watch_fn` stopped it."""
    while True:
        worker.check_signal()
        outcome = session.outcome(run)
        if outcome.is_over:
            return outcome
        if not worker.attempt(run, watch_fn=watch_fn):
            time.sleep(_PAUSE)  # an orphan of a killed worker still trains
        elif worker.was_stopped:
            return None


def _should_stop(trial: optuna.Trial, folder: pathlib.Path, options: Search) -> bool:
    """Reports new evaluations of a run; whether the pruner ends the run."""
    for row in reading.json_lines(folder / "metrics.jsonl"):
        value = row.get(options.score)
        if value is not None and row["step"] and _report(trial, value, row["step"]):
            return True
    return False


def _report(trial: optuna.Trial, value: float, step: int) -> bool:
    """Tells the engine an intermediate value of a step once; whether to stop."""
    reported = _patient(lambda: trial.study._storage.get_trial(trial._trial_id))
    if step in reported.intermediate_values:
        return False
    _patient(lambda: trial.report(value, step))
    return _patient(trial.should_prune)


def _tell(
    opened: optuna.Study, number: int, value: float | None, state: optuna.trial.TrialState | None
) -> None:
    _patient(lambda: opened.tell(number, value, state=state, skip_if_finished=True))
