"""Several processes, one run: how they start, agree, and end together.

Every process runs the same steps on its own rows of each batch. Process 0 alone handles files:
`on_process_0` calls a function there and hands its result to the others.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

__all__ = ["Process0Failed", "check_shared", "leave", "on_process_0", "start", "summed"]

_HEARTBEAT_SECONDS = 30  # after which other processes notice that a process has died
_MESSAGE_BYTES = 4096


class Process0Failed(Exception):
    """Process 0 has failed, and reports the reason itself."""


def start(
    *,
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    detect: bool = False,
) -> bool:
    """Joins the other processes of the run. Returns False if no argument names them.

    With `detect`, jax asks Slurm, a TPU pod or Kubernetes for the arguments that are None.
    """
    flags = {"--coordinator": coordinator, "--processes": processes, "--process": process}
    missing = [flag for flag, value in flags.items() if value is None]
    if not detect and len(missing) == len(flags):
        return False
    if not detect and missing:
        raise ValueError(f"{' and '.join(missing)} must be given too, or --distributed")
    # The service's handler would swallow SIGTERM until training begins. The train loop handles the
    # signal itself (`interrupts`).
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            coordinator, processes, process, heartbeat_timeout_seconds=_HEARTBEAT_SECONDS
        )
    except ValueError as error:
        raise ValueError(
            f"cannot join the other processes: {error} Where neither Slurm nor a TPU pod says who "
            "takes part, give --coordinator=HOST:PORT, --processes and --process"
        ) from error
    return True


def on_process_0(fn: Callable[[], Any]) -> Any:
    """Calls `fn` on process 0, and returns its result (plain JSON) on every process.

    All processes must call this. If `fn` raises an error, process 0 raises it, and the
    others raise `Process0Failed`.
    """
    if jax.process_count() == 1:
        return fn()
    answer, error = {}, None
    if jax.process_index() == 0:
        try:
            answer = {"value": fn()}
        except Exception as caught:
            answer, error = {"failed": True}, caught
    answer = _broadcast(answer)
    if error is not None:
        raise error
    if "failed" in answer:
        raise Process0Failed
    return answer["value"]


def _broadcast(value: Any) -> Any:
    from jax.experimental import multihost_utils

    text = json.dumps(value).encode()
    if len(text) > _MESSAGE_BYTES:
        raise ValueError(f"{len(text)} bytes are too many to tell the other processes")
    row = np.zeros(_MESSAGE_BYTES, np.uint8)
    row[: len(text)] = np.frombuffer(text, np.uint8)
    received = multihost_utils.broadcast_one_to_all(row)
    return json.loads(bytes(np.asarray(received)).rstrip(b"\0"))


def summed(array: np.ndarray) -> np.ndarray:
    """The sum of an array of float64 over all processes, in their order; all must call this."""
    if jax.process_count() == 1:
        return array
    from jax.experimental import multihost_utils

    # As whole numbers: jax would round float64 to float32.
    parts = np.asarray(multihost_utils.process_allgather(array.view(np.uint32)))
    return parts.view(np.float64).sum(axis=0)


def check_shared(file: pathlib.Path, *, patience: float = 30.0) -> None:
    """Raises unless this process, too, sees a file that process 0 has written."""
    deadline = time.monotonic() + patience  # network file systems show new files late
    while not file.exists():
        if time.monotonic() > deadline:
            raise ValueError(
                f"process {jax.process_index()} on {os.uname().nodename} does not see {file}: "
                "--workdir must be a folder that all hosts share"
            )
        time.sleep(0.2)


def leave(status: int) -> None:
    """Ends this process at once. A normal exit would wait for processes that wait for this one."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
