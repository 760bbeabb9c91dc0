"""Runs what is missing of a study. Any number of processes may do this, on any host.

A process takes the next run that is not over, locks its folder, and starts the ordinary command
line in a child process, because it holds no device itself. Other processes skip a locked run. The
child inherits the lock: if the parent is killed, the run goes on; if both are killed, the next
process continues the run from its checkpoint.
"""

import collections
import contextlib
import errno
import os
import pathlib
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from typing import IO

from dmljax.files import reading
from dmljax.files.run_folder import Result, RunFolder
from dmljax.files.writing import make_folder
from dmljax.hints import check_known, shown_duration
from dmljax.studies import outcomes, plan, table
from dmljax.studies.folder import StudyFolder
from dmljax.studies.outcomes import Outcome
from dmljax.studies.plan import PlannedRun, Planner, check_flags
from dmljax.studies.study_file import Study, score_key
from dmljax.studies.table import Table

_MOST_KILLS = 2  # restarts of a killed run by one process
_KILLED = 128 + signal.SIGKILL
_STOPPED = {130: signal.SIGINT, 143: signal.SIGTERM}
_DISK_FULL = ("No space left on device", "Disk quota exceeded", "File too large")
_PAUSE = 1.0  # seconds between looks at the runs of other processes


class Stopped(Exception):
    """A signal ended the study; `status` is the exit status for it."""

    def __init__(self, status: int):
        super().__init__(f"stopped by {_STOPPED[status].name}")
        self.status = status


class Executor:
    """Runs a study in its folder; `words` are flags of the command line for all runs."""

    def __init__(self, study: Study, folder: StudyFolder, words: Sequence[str] = ()):
        check_flags(words)
        self.study, self.folder, self.words = study, folder, tuple(words)
        self._planner = Planner(study, folder.runs, words)
        self._is_checked = False
        self._kills: collections.Counter[str] = collections.Counter()
        self._process: subprocess.Popen[bytes] | None = None
        self._signal = 0

    def plan(self, only: Collection[str] = ()) -> list[PlannedRun]:
        """Checks every row, and plans the runs of the rows `only` and of the rows they need."""
        if not self._is_checked:
            plan.check_rows(self.study)
            self._is_checked = True
        names = {row.name for row in self.study.rows}
        check_known("--only: no row is named", only, names)
        needed = self.study.needed(set(only or names))
        return self._planner.runs_of(row for row in self.study.rows if row.name in needed)

    def outcome(self, run: PlannedRun) -> Outcome:
        """Returns the outcome of a run, which may be running now."""
        return outcomes.outcome(self.folder.runs / run.digest)

    def table(self) -> Table:
        """Returns the table of the runs that are finished now.

        Raises for a study file that contradicts the runs in its folder.
        """
        self.folder.check(self.study)
        runs = []
        for run in self.folder.planned():
            files = RunFolder(self.folder.runs / run.digest)
            config = reading.config_of_run(files.path) if files.config.exists() else None
            runs.append(table.Run(run, self.outcome(run), config))
        return table.make(self.study, runs)

    def run(self, only: Collection[str] = (), *, wait: bool = True, retry: bool = False) -> int:
        """Makes all missing runs that no other process makes; returns how many failed.

        Waits for the runs of other processes, unless `wait=False`. With `retry`, failed runs run
        again. Raises `Stopped` at a signal.
        """
        waiting_for = 0
        self.folder.check(self.study, self.plan(only))
        for path in (self.folder.path, self.folder.runs):
            outcomes.check_locks(path)
        with self._handling_signals():
            while True:
                runs = self.plan(only)
                self.folder.record(self.study, runs)
                failed = [run for run in runs if self.outcome(run).has_failed]
                for run in failed if retry else ():
                    outcomes.forget_failure(self.folder.runs / run.digest)
                retry = False
                missing = [run for run in runs if not self.outcome(run).is_over]
                if not missing:
                    return len(failed)
                if any([self._attempt(run, runs) for run in missing]):
                    continue
                if not wait:
                    return len(failed)
                if waiting_for != len(missing):
                    print(f"waiting for runs of other processes: {len(missing)}", flush=True)
                waiting_for = len(missing)
                time.sleep(_PAUSE)

    def _attempt(self, run: PlannedRun, runs: Sequence[PlannedRun]) -> bool:
        """Makes a run unless another process makes it; returns whether its state changed."""
        self._check_signal()
        folder = self.folder.runs / run.digest
        try:
            make_folder(folder)
            with outcomes.locked(folder) as lock:
                if lock is None:
                    return False
                if not outcomes.outcome(folder).is_over:
                    self._make(run, folder, lock, runs)
                return True
        except OSError as error:
            if error.strerror is None or error.strerror not in _DISK_FULL:
                raise
            raise OSError(
                f"{folder} cannot be written ({error.strerror}): free space on its disk and "
                "repeat the command"
            ) from error

    def _make(
        self, run: PlannedRun, folder: pathlib.Path, lock: IO[str], runs: Sequence[PlannedRun]
    ) -> None:
        start = time.perf_counter()
        status, message = self._run_child(run, folder, lock)
        if any(text in message for text in _DISK_FULL):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        state = outcomes.outcome(folder)
        status = 128 - status if status < 0 else status  # as a shell reports a signal
        if status in _STOPPED:
            self._check_signal()
            raise Stopped(status)
        if status == 0 and state.result is not None:
            duration = shown_duration(time.perf_counter() - start)
            text = f"{self._scores(run, state.result)}, {duration}"
        else:
            if status == _KILLED:
                self._kills[run.digest] += 1
                if self._kills[run.digest] <= _MOST_KILLS:
                    text = "its process was killed (out of memory?); it restarts"
                    print(f"{run.title}: {text}", flush=True)
                    return
                message = f"its process was killed {_MOST_KILLS + 1} times (out of memory?)"
            message = message or state.message or f"it ended without a result, status {status}"
            if not state.is_over:
                outcomes.mark_failed(folder, message, exit_status=status)
            text = f"failed: {message}"
        over = {x.digest: self.outcome(x).is_over for x in runs}
        print(f"[{sum(over.values())}/{len(over)}] {run.title}: {text}", flush=True)

    def _run_child(self, run: PlannedRun, folder: pathlib.Path, lock: IO[str]) -> tuple[int, str]:
        """Runs the command of a run; returns its exit status and the last line of its errors.

        `output.txt` gets its standard output, and at the end its errors.
        """
        words = run.command(self.folder.runs, self.words)
        # Not on the disk, which may be full; and not a pipe, which would end with this process.
        memory = next(filter(os.path.isdir, ["/dev/shm"]), None)
        with (
            tempfile.TemporaryFile(dir=memory) as errors,
            RunFolder(folder).output.open("a") as output,
        ):
            output.write(f"$ {shlex.join(words)}\n")
            output.flush()
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                pass_fds=(lock.fileno(),),
                start_new_session=True,  # signals reach the run through this process alone
            )
            if self._signal:
                self._stop_child()
            status = self._process.wait()
            self._process = None
            errors.seek(0)
            text = errors.read().decode(errors="replace")
            with contextlib.suppress(OSError):
                output.write(text)
        lines = [line for line in text.splitlines() if line.strip()]
        return status, lines[-1].removeprefix("error: ") if lines else ""

    def _scores(self, run: PlannedRun, result: Result) -> str:
        """Returns the first scores of a finished run; of a candidate, the score that chooses."""
        # Who chooses must not see test scores.
        choosing = {row.by for row in self.study.rows if run.row in row.best_of}
        values = [(x, result.scores.get(score_key(x))) for x in choosing or self.study.scores[:3]]
        return ", ".join(f"{s} {100 * v:.1f}" for s, v in values if v is not None) or "finished"

    @contextlib.contextmanager
    def _handling_signals(self) -> Iterator[None]:
        """Passes SIGINT, SIGTERM and SIGHUP on to the run, which saves and ends."""
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        old = {number: signal.signal(number, self._handle) for number in numbers}
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)

    def _handle(self, number: int, frame: object) -> None:
        self._signal = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
        self._stop_child()

    def _stop_child(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                # For Ctrl-C too: before its handlers are set, Python can lose a KeyboardInterrupt.
                self._process.send_signal(signal.SIGTERM)

    def _check_signal(self) -> None:
        if self._signal:
            raise Stopped(128 + self._signal)
