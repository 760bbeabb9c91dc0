"""Compiled programs: their count, their operations, and the folder that keeps them."""

import functools
import hashlib
import math
import os
import pathlib
import platform
from typing import Any, NamedTuple

import filelock
import jax
import jax.extend.core
from absl import logging

from dmljax import at_hand

_FOLDER = "jax_compilation_cache_dir"
_LIMITS = {  # Above 4 GiB, jax deletes the programs that were not used for the longest time.
    "jax_compilation_cache_max_size": 4 << 30,
    "jax_persistent_cache_min_compile_time_secs": 0.2,
}


class Compiled(NamedTuple):
    """What this process has compiled since the first call; `read` came from the folder."""

    programs: int
    read: int
    seconds: float


def compiled() -> Compiled:
    """Counts what this process has compiled since the first call."""
    counts = _listen()
    return Compiled(int(counts["programs"]), int(counts["read"]), counts["seconds"])


def sentence() -> str:
    """Returns a line about what was compiled so far."""
    programs, read, seconds = compiled()
    source = f", {read} of them read from {folder}" if (folder := _folder()) else ""
    return f"XLA compiled {programs} programs in {seconds:.1f} s{source}"


def keep_programs() -> None:
    """Keeps compiled programs in `at_hand.cache_folder`; logs a warning if it cannot.

    What the user has set (JAX_COMPILATION_CACHE_DIR and the other variables of jax) stays. Several
    processes with GPUs keep nothing in a folder that may be of one host: only process 0 writes
    there, and while XLA compiles, each process times a share of the kernels for all. If one reads
    what the others must compile, they may wait for its share for ever.
    """
    if _folder():
        return
    if jax.process_count() > 1 and jax.default_backend() == "gpu":
        logging.warning(
            "compiled programs of several processes are not kept: to keep them, set "
            "JAX_COMPILATION_CACHE_DIR to a folder that all hosts share"
        )
        return
    folder = at_hand.cache_folder() / "compiled" / _machine()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(folder / ".lockfile", timeout=10):  # the lock of jax
            _remove_torn(folder)
    except (OSError, filelock.Timeout) as error:
        logging.warning(f"compiled programs are not kept: {error}. Set DMLJAX_CACHE to a folder")
        return
    for name, value in {_FOLDER: str(folder), **_LIMITS}.items():
        if name.upper() not in os.environ:
            jax.config.update(name, value)


def _folder() -> str | None:
    return getattr(jax.config, _FOLDER)


def _remove_torn(folder: pathlib.Path) -> None:
    """Removes programs whose writer was killed: jax writes the file "-atime" after the program."""
    for path in folder.glob("*-cache"):
        if not path.with_name(path.name.removesuffix("-cache") + "-atime").exists():
            path.unlink()


def _machine() -> str:
    """Returns a name for the kind of machine: others cannot run its programs."""
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text().split("\n\n")[0].splitlines() if info.exists() else []
    flags = "".join(x for x in lines if x.startswith(("model name", "flags", "Features")))
    return f"{platform.machine()}-{hashlib.sha256(flags.encode()).hexdigest()[:8]}"


@functools.cache
def _listen() -> dict[str, float]:
    counts = {"programs": 0.0, "read": 0.0, "seconds": 0.0}

    def on_duration(event: str, duration_secs: float, **_: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            counts["programs"] += 1
            counts["seconds"] += duration_secs

    def on_event(event: str, **_: str | int) -> None:
        counts["read"] += event == "/jax/compilation_cache/cache_hits"

    jax.monitoring.register_event_duration_secs_listener(on_duration)
    jax.monitoring.register_event_listener(on_event)
    return counts


def multiply_adds(jaxpr: Any) -> int:
    """Counts the multiply-adds of all convolutions and products.

    A condition counts its largest branch. A `scan` counts each of its iterations, other loops count
    one. What every device computes counts for all devices.
    """
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "conv_general_dilated":
            kernel = equation.invars[1].aval.shape
            out = equation.params["dimension_numbers"].rhs_spec[0]
            total += equation.outvars[0].aval.size * math.prod(kernel) // kernel[out]
        elif equation.primitive.name == "dot_general":
            (axes, _), _ = equation.params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            total += equation.outvars[0].aval.size * math.prod(shape[axis] for axis in axes)
        inner = [multiply_adds(j) for j in jax.extend.core.jaxprs_in_params(equation.params)]
        match equation.primitive.name:
            case "cond":
                total += max(inner)
            case "scan":
                total += sum(inner) * equation.params["length"]
            case "shard_map":
                total += sum(inner) * equation.params["mesh"].size
            case _:
                total += sum(inner)
    return total
