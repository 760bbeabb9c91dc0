"""Several processes of one run start, agree and end together.

Every process runs the same steps on its own rows of each batch. Only process 0 writes files:
`on_process_0` calls a function there, and gives its result to the other processes.
"""

import itertools
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

_HEARTBEAT_SECONDS = 30  # after which the others notice that a process has died
_SHUTDOWN_SECONDS = 300  # timeout of a process that has ended and waits for the others
_WAIT_MILLISECONDS = 500


class Process0Failed(Exception):
    """Process 0 has failed, and reports the reason itself."""


def start(
    *,
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    detect: bool = False,
) -> bool:
    """Joins the other processes of the run. Returns False if the arguments name no other process.

    With `detect`, jax asks Slurm, a TPU pod or Kubernetes for the arguments that are None.
    """
    flags = {"--coordinator": coordinator, "--processes": processes, "--process": process}
    missing = [] if detect else [flag for flag, value in flags.items() if value is None]
    if len(missing) == len(flags):
        return False
    if missing:
        raise ValueError(f"{' and '.join(missing)} must be given too, or --distributed")
    # The service's handler would swallow SIGTERM until training begins. The train loop handles the
    # signal itself (`interrupts`).
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            coordinator,
            processes,
            process,
            heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=_SHUTDOWN_SECONDS,
        )
    except ValueError as error:
        raise ValueError(
            f"cannot join the other processes: {error} Where neither Slurm nor a TPU pod says who "
            "takes part, give --coordinator=HOST:PORT, --processes and --process"
        ) from error
    return True


def on_process_0(fn: Callable[[], Any], *, waiting_fn: Callable[[], None] = lambda: None) -> Any:
    """Calls `fn` on process 0, and returns its result (plain JSON) on every process.

    All processes must call this. The others wait without a limit, and call `waiting_fn` twice a
    second. If `fn` raises an error, process 0 raises it, and the others raise `Process0Failed`.
    """
    if jax.process_count() == 1:
        return fn()
    key = f"dmljax/answer/{next(_calls)}"
    if jax.process_index():
        answer = json.loads(_wait(key, waiting_fn))
        if not answer:
            raise Process0Failed
        return answer[0]
    answer = []
    try:
        answer = [fn()]
    finally:
        _client().key_value_set(key, json.dumps(answer))
    return answer[0]


def highest(number: int, *, waiting_fn: Callable[[], None] = lambda: None) -> int:
    """Returns the highest number of all processes. All must call this; waits as `on_process_0`."""
    if jax.process_count() == 1:
        return number
    folder = f"dmljax/highest/{next(_calls)}/"
    if jax.process_index():
        _client().key_value_set(f"{folder}{jax.process_index()}", str(number))

    def highest_of_all() -> int:
        others = [_wait(f"{folder}{i}", waiting_fn) for i in range(1, jax.process_count())]
        _client().key_value_delete(folder)
        return max([number, *map(int, others)])

    return on_process_0(highest_of_all, waiting_fn=waiting_fn)


def post(name: str, number: int) -> None:
    """Leaves a number for the other processes, which read it by `posted`."""
    _client().key_value_set(f"dmljax/{name}", str(number), allow_overwrite=True)


def posted(name: str) -> int:
    """Reads the number that a process has left under a name; 0 without one."""
    try:
        return int(_client().key_value_try_get(f"dmljax/{name}"))
    except jax.errors.JaxRuntimeError as error:
        if "NOT_FOUND" not in str(error):
            raise
        return 0


_calls = itertools.count()  # the same on every process, as all of them make the same calls


def _client() -> Any:
    """Returns the key-value store of process 0, for which jax lacks a public name."""
    from jax._src import distributed

    return distributed.global_state.client


def _wait(key: str, waiting_fn: Callable[[], None]) -> str:
    """Waits for a value without a timeout, unlike a collective, and handles signals meanwhile."""
    while True:
        try:
            return _client().blocking_key_value_get(key, _WAIT_MILLISECONDS)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
        waiting_fn()


def summed(array: np.ndarray) -> np.ndarray:
    """Sums an array of float64 over all processes, in their order; all must call this."""
    if jax.process_count() == 1:
        return array
    from jax.experimental import multihost_utils

    # As whole numbers: jax would round float64 to float32.
    parts = np.asarray(multihost_utils.process_allgather(array.view(np.uint32)))
    return parts.view(np.float64).sum(axis=0)


def check_shared(file: pathlib.Path, *, option: str = "--workdir", patience: float = 30.0) -> None:
    """Raises unless this process, too, sees a file that process 0 has written.

    `option` is what names its folder.
    """
    deadline = time.monotonic() + patience  # network file systems show new files late
    while not file.exists():
        if time.monotonic() > deadline:
            raise ValueError(
                f"process {jax.process_index()} on {os.uname().nodename} does not see {file}: "
                f"{option} must be a folder that all hosts share"
            )
        time.sleep(0.2)


def leave(status: int) -> None:
    """Ends this process at once. A normal exit would wait for processes that wait for this one."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
