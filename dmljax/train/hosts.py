"""Several processes, one run: how they start, agree, and end together.

Every process does the same steps on its own rows of each batch. Files are the affair of process 0:
`first` lets it act and tells the others what came of it.
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

__all__ = ["Elsewhere", "first", "leave", "shared", "start"]

_HEARTBEAT = 30  # seconds until a process that went without a word is missed
_BYTES = 4096


class Elsewhere(Exception):
    """Process 0 has failed, and says why itself."""


def start(
    *,
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    detect: bool = False,
) -> bool:
    """Joins the other processes; False where nothing says that there are any.

    With `detect`, what is not given comes from Slurm, a TPU pod or Kubernetes, as jax finds it.
    """
    given = {"--coordinator": coordinator, "--processes": processes, "--process": process}
    missing = [name for name, value in given.items() if value is None]
    if not detect and len(missing) == len(given):
        return False
    if not detect and missing:
        raise ValueError(f"{' and '.join(missing)} must be given too, or --distributed")
    # Its handler of SIGTERM would swallow the signal until training begins; the train loop agrees
    # on the step to stop after by itself.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            coordinator, processes, process, heartbeat_timeout_seconds=_HEARTBEAT
        )
    except ValueError as error:
        raise ValueError(
            f"cannot join the other processes: {error} Where neither Slurm nor a TPU pod says who "
            "takes part, give --coordinator=HOST:PORT, --processes and --process"
        ) from error
    return True


def first(fn: Callable[[], Any]) -> Any:
    """What `fn()` returns (plain JSON) or raises on process 0, on every process.

    A meeting point: all processes must get here.
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
        raise Elsewhere
    return answer["value"]


def _broadcast(value: Any) -> Any:
    from jax.experimental import multihost_utils

    text = json.dumps(value).encode()
    if len(text) > _BYTES:
        raise ValueError(f"{len(text)} bytes are too many to tell the other processes")
    row = np.zeros(_BYTES, np.uint8)
    row[: len(text)] = np.frombuffer(text, np.uint8)
    found = multihost_utils.broadcast_one_to_all(row)
    return json.loads(bytes(np.asarray(found)).rstrip(b"\0"))


def shared(file: pathlib.Path, *, patience: float = 30.0) -> None:
    """Raises unless this process, too, sees a file that process 0 has written."""
    until = time.monotonic() + patience  # network file systems tell late
    while not file.exists():
        if time.monotonic() > until:
            raise ValueError(
                f"process {jax.process_index()} on {os.uname().nodename} does not see {file}: "
                "--workdir must be a folder that all hosts share"
            )
        time.sleep(0.2)


def leave(status: int) -> None:
    """Ends this process now: waiting for the others, who may wait for us, would never end."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
