"""The loop that makes the runs of a study. Any number of processes may run it, on any host.

A worker takes the next run that is not over, locks its folder, and starts the ordinary command
line in another process. Other workers skip a locked run. The process of the run inherits the lock:
if the worker is killed, the run goes on; if both are killed, the next worker continues the run from
its checkpoint.
"""

import contextlib
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import IO, NamedTuple

from dmljax.files import reading
from dmljax.files.result import Result
from dmljax.files.writing import make_folder
from dmljax.studies import outcomes
from dmljax.studies.folder import Session
from dmljax.studies.plan import PlannedRun, check_names, words_of
from dmljax.studies.study_file import score_key

_MOST_KILLS = 2  # times that a killed run is started again
_KILLED = (137, -signal.SIGKILL)
_STOPPED = {130: signal.SIGINT, 143: signal.SIGTERM}
_DISK_FULL = ("No space left on device", "Disk quota exceeded", "File too large")
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 5.0
WatchFn = Callable[[], bool] | None  # called while a run lasts: whether to end it


class Stopped(Exception):
    """A signal ended the study; `status` is the exit status for it."""

    def __init__(self, status: int):
        super().__init__(f"stopped by {_STOPPED[status].name}")
        self.status = status


class _Ended(NamedTuple):
    status: int
    message: str  # the last line of stderr
    seconds: float


def command(run: PlannedRun, folder: pathlib.Path, words: Sequence[str] = ()) -> list[str]:
    """The command line of a run; `words` are flags that cannot change its result."""
    head = [sys.executable, "-m", "dmljax.main", "train", f"--config={run.config}"]
    words = [*words_of(words, run.after), *reading.trust_words()]
    return [*head, *run.flags, *words, f"--workdir={folder}"]


def run_verb(session: Session, *words: str, environment: Mapping[str, str]) -> str:
    """Runs `dmljax study WORDS` in another process; the last line of its errors, "" without any."""
    command = [sys.executable, "-m", "dmljax.main", "study", *words]
    command += [*session.words, *reading.trust_words()]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    lines = done.stderr.strip().splitlines() or ["no message"]
    return lines[-1] if done.returncode else ""


class Worker:
    """Makes runs one after another.

    `environment` are variables of every run, such as the devices of this worker.
    """

    def __init__(
        self,
        session: Session,
        *,
        environment: Mapping[str, str] | None = None,
        wait: bool = True,
    ):
        self._session, self._runs, self._wait = session, session.folder.runs, wait
        self.environment = {**os.environ, **(environment or {})}
        self._process: subprocess.Popen | None = None
        self._signal = 0
        self.was_stopped = False  # whether `watch_fn` ended the last run

    def handle(self, number: int, frame: object) -> None:
        """Handles a signal: tells the run to save and end."""
        self._signal = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
        self.stop_run()

    def stop_run(self) -> None:
        """Asks the current run to save and end."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                # For Ctrl-C too: before its handlers are set, Python can lose a KeyboardInterrupt.
                self._process.send_signal(signal.SIGTERM)

    def make_all(self, runs: Iterable[PlannedRun]) -> int:
        """Makes all runs that no other worker makes; how many failed.

        Waits for the runs of other workers, unless `wait=False`.
        """
        runs, pause, waiting_for = list(runs), _FIRST_PAUSE, -1
        while True:
            unfinished, progress = {}, False
            for run in runs:
                self.check_signal()
                if not self._session.outcome(run).is_over:
                    if self.attempt(run, among=runs):
                        progress = True
                    else:
                        unfinished[run.digest] = run
            if progress:
                pause = _FIRST_PAUSE
                continue
            if not unfinished or not self._wait:
                states = {run.digest: self._session.outcome(run) for run in runs}
                return sum(state.has_failed for state in states.values())
            if waiting_for != len(unfinished):
                waiting_for = len(unfinished)
                runs_word = "run" if waiting_for == 1 else "runs"
                self.say(f"waiting for {waiting_for} {runs_word} of other workers")
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE)

    def _head(self, run: PlannedRun, among: Sequence[PlannedRun]) -> str:
        """A run with how many of the runs `among` are over now, such as '[3/30] dot, seed 0'."""
        states = {run.digest: self._session.outcome(run).is_over for run in among}
        return f"[{sum(states.values())}/{len(states)}] {run.title}" if states else run.title

    def attempt(
        self, run: PlannedRun, *, among: Sequence[PlannedRun] = (), watch_fn: WatchFn = None
    ) -> bool:
        """Makes a run unless another worker makes it or it must wait; whether the state changed.

        Its line says how many of the runs `among` are over. `watch_fn()` is called while the run
        lasts; once it returns True, the run is stopped.
        """
        check_names(run, self._session.study)
        folder = self._runs / run.digest
        try:
            make_folder(folder)
            with outcomes.locked(folder) as lock:
                if lock is None:
                    return False
                if outcomes.outcome(folder).is_over:
                    return True
                if not self._has_start(run, folder):
                    return False
                self._make(run, folder, lock, among, watch_fn)
                return True
        except OSError as error:
            if error.strerror is None or error.strerror not in _DISK_FULL:
                raise
            raise OSError(_full_disk(folder, error.strerror)) from error

    def _has_start(self, run: PlannedRun, folder: pathlib.Path) -> bool:
        """Whether a run may start; marks it as failed if the run that it starts from failed."""
        if run.after is None:
            return True
        start = outcomes.outcome(self._runs / run.after)
        if start.has_failed:
            outcomes.mark_failed(
                folder, f"the run {run.after}, from which it starts, failed", exit_status=1
            )
        return start.state == "finished"

    def _make(
        self,
        run: PlannedRun,
        folder: pathlib.Path,
        lock: IO[str],
        among: Sequence[PlannedRun],
        watch_fn: WatchFn,
    ) -> None:
        self.was_stopped = False
        ended = self._run(run, folder, lock, watch_fn)
        for reason in _DISK_FULL:
            if reason in ended.message:
                raise OSError(_full_disk(folder, reason))
        state = outcomes.outcome(folder)
        if ended.status == 0 and state.result is not None:
            head, time_text = self._head(run, among), duration(ended.seconds)
            self.say(f"{head}: {self._shown(run, state.result)}, {time_text}")
        elif ended.status == 0 and state.is_over:
            self.say(f"{self._head(run, among)}: failed: {state.message}")
        elif watch_fn is not None and ended.status in (*_STOPPED, -signal.SIGTERM):
            self.check_signal()
            self.was_stopped = True
        elif ended.status in _STOPPED or -ended.status in _STOPPED.values():
            self.check_signal()
            stopped = ended.status if ended.status > 0 else 128 - ended.status
            raise Stopped(stopped)
        elif ended.status in _KILLED and outcomes.count_kill(folder) <= _MOST_KILLS:
            self.say(f"{run.title}: its process was killed (out of memory?); it is started again")
        else:
            message = ended.message or f"it ended with exit status {ended.status}"
            if ended.status in _KILLED:
                message = f"its process was killed {_MOST_KILLS + 1} times (out of memory?)"
            if ended.status == 0:
                message = "it ended without a result"
            outcomes.mark_failed(folder, message, exit_status=ended.status)
            self.say(f"{self._head(run, among)}: failed: {message}")

    def _run(
        self, run: PlannedRun, folder: pathlib.Path, lock: IO[str], watch_fn: WatchFn
    ) -> _Ended:
        """Runs the command; stdout goes to `output.txt`, stderr follows when the run has ended."""
        words, start = command(run, folder, self._session.words), time.perf_counter()
        # Not on the disk, which may be full; and not a pipe, which would end with this worker.
        with _in_memory() as errors, (folder / "output.txt").open("a") as output:
            output.write(f"$ {shlex.join(words)}\n")
            output.flush()
            process = self._process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                env=self.environment,
                pass_fds=(lock.fileno(),),
                start_new_session=True,  # signals reach the run through this process alone
            )
            if self._signal:
                self.stop_run()
            status = self._wait_for(process, watch_fn)
            self._process = None
            errors.seek(0)
            text = errors.read().decode(errors="replace")
            with contextlib.suppress(OSError):
                output.write(text)
        lines = [line for line in text.splitlines() if line.strip()]
        message = lines[-1].removeprefix("error: ") if lines else ""
        return _Ended(status, message, time.perf_counter() - start)

    def _wait_for(self, process: subprocess.Popen[bytes], watch_fn: WatchFn) -> int:
        while True:
            try:
                return process.wait(timeout=None if watch_fn is None else 0.5)
            except subprocess.TimeoutExpired:
                if watch_fn is not None and watch_fn():
                    self.stop_run()
                    return process.wait()

    def say(self, text: str) -> None:
        print(text, flush=True)

    def check_signal(self) -> None:
        """Raises `Stopped` if this process was told to stop."""
        if self._signal:
            raise Stopped(128 + self._signal)

    def _shown(self, run: PlannedRun, result: Result) -> str:
        study = self._session.study
        scores: Sequence[str] = study.scores[:3]
        if study.search is not None and run.row not in {row.name for row in study.rows}:
            scores = [study.search.score]  # a trial: who searches sees no test score
        values = [(score, result.scores.get(score_key(score))) for score in scores]
        return ", ".join(f"{s} {100 * v:.1f}" for s, v in values if v is not None) or "finished"


def _in_memory() -> IO[bytes]:
    """A file in memory, where the system has such files."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("stderr"), "w+b")
    return tempfile.TemporaryFile()


def _full_disk(folder: pathlib.Path, reason: str) -> str:
    return f"{folder} cannot be written ({reason}): free space on its disk and repeat the command"


def duration(seconds: float) -> str:
    """Seconds for a reader: '42 s', '12 min', '3.4 h'."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
