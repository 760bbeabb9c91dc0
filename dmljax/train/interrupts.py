"""SIGTERM and Ctrl-C end a run after the current step; a second signal ends the process at once."""

from __future__ import annotations

import functools
import os
import signal

import jax
import numpy as np

from dmljax.train.devices import Shardings, put

__all__ = ["Interrupts"]


class Interrupts:
    """Handles signals while its `with` block runs, and agrees with the other processes of the run.

    Processes of one run get a signal at different steps, or only one of them gets it, and all must
    stop after the same step. So each process sends the signal that it has received along with the
    batch (`row`); the step returns the largest of all processes, which comes back with the metrics
    (`hear`). No process waits for this. A run of one process skips it.
    """

    def __init__(self, shards: Shardings):
        self._shards, self._received, self._agreed = shards, 0, 0
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
        """The signal that this process has received, or 0, once for each of its devices."""
        return self._rows(int(self._received))

    def _make_row(self, number: int) -> jax.Array:
        devices = len(self._shards.mesh.local_devices)
        return put({"signal": np.full(devices, number, np.int32)}, self._shards.rows)["signal"]

    def hear(self, number: int) -> None:
        """Takes the signal that came back with a step."""
        self._agreed = self._agreed or number

    @property
    def requested(self) -> bool:
        """Whether the run is to stop after this step."""
        if jax.process_count() == 1:
            self._agreed = self._agreed or int(self._received)
        return self._agreed > 0

    def leave(self) -> None:
        """Ends the process with the usual exit status of the signal."""
        raise SystemExit(128 + self._agreed)
