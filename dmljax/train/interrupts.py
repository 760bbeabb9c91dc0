"""SIGTERM and Ctrl-C end a run within seconds; a second signal ends the process at once.

During training the run stops after the current step. An evaluation is cut short, and the run
repeats it when the same command continues. All processes of a run stop at the same point.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import jax
import numpy as np

from dmljax import retrieval
from dmljax.train import hosts
from dmljax.train.devices import Shardings, put

_SIGNAL, _STATUS = "signal", "exit status"  # what processes post for each other
_POLL_SECONDS = 0.5


class Stopped(BaseException):
    """A signal has ended an evaluation. No `except Exception` may catch this on the way up."""


class Interrupts:
    """Handles signals while its `with` block runs, and agrees with the other processes of the run.

    Processes of one run get a signal at different times, or only one of them gets it, and all must
    stop at the same point, because they wait for each other in collectives.

    * Training: each process sends the signal that it has received along with the batch (`row`). The
      step returns the largest of all processes, which comes back with the metrics (`set_agreed`).
      No process waits for this.
    * Evaluation, in a block of `stoppable`: embedding sends the same row. Ranking and clustering
      have no collectives: a process posts its signal, the others look for it between tiles, and
      each leaves its tiles. All processes call `agree` before the next collective.
    * The report at the end: `report`.
    """

    def __init__(self, shards: Shardings):
        self._shards, self._received, self._agreed = shards, 0, 0
        self._posted, self._next_poll = 0, 0.0
        self._rows = functools.cache(self._make_row)

    def __enter__(self) -> Interrupts:
        signals = (signal.SIGTERM, signal.SIGINT)
        self._old_handlers = {s: signal.signal(s, self._handle) for s in signals}
        return self

    def _handle(self, number, frame):
        if self._received:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self._received = number

    def __exit__(self, *_) -> None:
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)

    def row(self) -> jax.Array:
        """Returns the signal that this process has received, or 0, once for each of its devices."""
        return self._rows(int(self._received))

    def _make_row(self, number: int) -> jax.Array:
        devices = len(self._shards.mesh.local_devices)
        return put({"signal": np.full(devices, number, np.int32)}, self._shards.rows)["signal"]

    def set_agreed(self, number: int) -> None:
        """Takes the signal that a step has returned on every process."""
        self._agreed = self._agreed or number

    def agree_by_row(self, row: np.ndarray) -> None:
        """Agrees by the rows of all processes, which came back with an embedded batch."""
        self.set_agreed(int(row.max()))
        if self._agreed:
            raise Stopped

    @property
    def requested(self) -> bool:
        """True if the run must stop after this step."""
        if jax.process_count() == 1:
            self._agreed = self._agreed or int(self._received)
        return self._agreed > 0

    @contextlib.contextmanager
    def stoppable(self) -> Iterator[None]:
        """Raises `Stopped` out of the block, on every process, after a signal to any of them."""
        with retrieval.stoppable(self._check):
            try:
                yield
            except Stopped:
                if not self._agreed:
                    self._exchange()
                raise
        self.agree()

    def _check(self) -> None:
        """Raises `Stopped` on this process, if any process is known to have a signal."""
        if self._received or self._is_posted():
            raise Stopped

    def agree(self) -> None:
        """Raises `Stopped` on every process after a signal to any. All processes must call this."""
        if not self._agreed:
            self._exchange()
        if self._agreed:
            raise Stopped

    def _exchange(self) -> None:
        number = int(self._received) or int(self._is_posted())
        self._agreed = hosts.highest(number, waiting_fn=self._post)

    def summed(self, array: np.ndarray) -> np.ndarray:
        """Calls `hosts.summed`, unless the processes agree to stop."""
        self.agree()
        return hosts.summed(array)

    def _post(self) -> None:
        """Tells the other processes of a signal that this one has received."""
        if self._received:
            hosts.post(_SIGNAL, int(self._received))

    def _is_posted(self) -> int:
        """Returns the signal that a process has posted, or 0; asks process 0 twice a second."""
        if jax.process_count() > 1:
            self._post()
            if not self._posted and time.monotonic() >= self._next_poll:
                self._posted = hosts.posted(_SIGNAL)
                self._next_poll = time.monotonic() + _POLL_SECONDS
        return self._posted

    def report(self, fn: Callable[[], Any]) -> None:
        """Calls `fn` on process 0 while the others wait, however long it takes.

        The state must be saved. A signal to any process ends all of them at once, wherever `fn` is.
        """

        def call():
            is_done = threading.Event()
            watcher = threading.Thread(target=self._watch, args=(is_done,), daemon=True)
            watcher.start()
            try:
                fn()
            finally:
                is_done.set()
                watcher.join()

        hosts.on_process_0(call, waiting_fn=self._follow)

    def _watch(self, is_done: threading.Event) -> None:
        """Ends process 0 after a signal. Files are written as a whole, or not at all."""
        while not is_done.wait(_POLL_SECONDS / 2):
            if number := int(self._received) or self._is_posted():
                print("stopped after training; the same command repeats the report", flush=True)
                if jax.process_count() > 1:
                    hosts.post(_STATUS, 128 + number)
                    jax.distributed.shutdown()
                hosts.leave(128 + number)

    def _follow(self) -> None:
        """Ends a process that waits for process 0, if process 0 ends."""
        self._post()
        if status := hosts.posted(_STATUS):
            raise SystemExit(status)

    def leave(self) -> NoReturn:
        """Ends the process with the usual exit status of the signal."""
        raise SystemExit(128 + self._agreed)
