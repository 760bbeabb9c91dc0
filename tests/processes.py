"""The command in processes of its own, to be waited for, signalled and killed."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from system import write_config

from dmljax.runs import folder as run_folder
from dmljax.train import journal

ROOT = pathlib.Path(__file__).parents[1]
# A run that is long enough to be interrupted, with frequent checkpoints.
LONG = {"steps": 50, "evaluate": {"every": 25, "ks": [1], "clustering": None, "batch_size": 16}}
LONG |= {"checkpoint": {"every": 5, "keep": 2}}


def environment(**variables):
    """The variables of a process. None leaves one out."""
    values = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    return {name: value for name, value in values.items() if value is not None}


def command(*words, cwd=None, **variables):
    """`dmljax WORDS`, waited for."""
    return _ended("-m", "dmljax.main", *words, cwd=cwd, env=environment(**variables))


def python(code, *words, cwd=None, status=0, **variables):
    """`python -c CODE WORDS`, waited for. Fails if it ends with another status."""
    done = _ended("-c", code, *words, cwd=cwd, env=environment(**variables))
    assert done.returncode == status, done.stdout + done.stderr
    return done


def _ended(*words, **options):
    # Less than the time after which a hanging test ends its worker.
    options |= {"capture_output": True, "text": True, "timeout": 500}
    return subprocess.run([sys.executable, *map(str, words)], **options)


@contextlib.contextmanager
def started(folder, workdir, config, *flags, processes=None, shell=""):
    """The command, or `launch/local.sh` with `processes`; what it prints is in `folder/out.txt`.

    `shell` runs before the command, for instance to set a limit or a variable.
    """
    file = write_config(folder, config)
    words = [sys.executable, "-m", "dmljax.main", f"--config={file}"]
    if processes is not None:
        words = [str(ROOT / "launch" / "local.sh"), str(processes), file]
    devices = "1" if processes is None else "2"
    with (folder / "out.txt").open("w") as out:
        process = subprocess.Popen(
            ["bash", "-c", f'{shell}exec "$@"', "-", *words, f"--workdir={workdir}", *flags],
            stdout=out,
            stderr=out,
            env=environment(PYTHON=sys.executable, JAX_NUM_CPU_DEVICES=devices),
            cwd=folder,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        for pid in [*children(process.pid), process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


@contextlib.contextmanager
def mounted(folder, options):
    """A file system of its own at `folder`, such as one of `size=500k`."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("needs to mount a small file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def children(parent):
    """The processes of a launcher, that of number 0 first."""
    numbered = []
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            words = (folder / "cmdline").read_text().split("\0")
            if int(fields[1]) == parent and "dmljax.main" in words:
                number = [w for w in words if w.startswith("--process=")]
                numbered.append((number, int(folder.name)))
    return [pid for _, pid in sorted(numbered)]


def until_step(workdir, step, process):
    """Waits until the run has reported `step`."""
    until(lambda: reported(workdir, step), process, workdir.parent)


def until(fn, process, folder, *, pause=0.05):
    """Waits until `fn()` is true. Fails if the process ends before that."""
    for _ in range(round(120 / pause)):
        if fn():
            return
        assert process.poll() is None, (folder / "out.txt").read_text()
        time.sleep(pause)
    raise AssertionError("the run did not reach this state: " + (folder / "out.txt").read_text())


def wait_for(condition, *, seconds=30, what="it"):
    """Waits until `condition()` is true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what} did not happen"
        time.sleep(0.05)


def reported(workdir, step):
    with contextlib.suppress(ValueError):  # a line may be half written
        return any(
            x["step"] >= step and "loss" in x for x in journal.read(workdir / "metrics.jsonl")
        )


def ends(process, status, folder, *, within=200):
    """Waits for the process to end, checks its exit status, and returns what it printed."""
    try:
        ended = process.wait(timeout=within)
    except subprocess.TimeoutExpired:
        ended = f"no end within {within} seconds"
    assert ended == status, (folder / "out.txt").read_text()
    return (folder / "out.txt").read_text()


def same_after_a_kill(folder, config, step, *flags):
    """Fails unless a run that is killed after `step` ends as one that nothing interrupts.

    `flags` are those of the continued run. Returns what the undisturbed run printed; the folder of
    the other is `folder/killed`.
    """
    with started(folder, folder / "undisturbed", config) as process:
        undisturbed = ends(process, 0, folder)
    with started(folder, folder / "killed", config) as process:
        until_step(folder / "killed", step, process)
    with started(folder, folder / "killed", config, *flags) as process:
        assert "continuing from step" in ends(process, 0, folder)
    same_run(folder / "killed", folder / "undisturbed")
    return undisturbed


def state(workdir):
    """The newest checkpoint, as arrays of NumPy."""
    return jax.tree.map(np.asarray, run_folder.reopen(workdir)[1])


def same(a, b):
    """Fails unless two trees are bitwise equal."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


def same_run(one, other):
    """Fails unless two runs have bitwise the same checkpoint and the same reports."""
    same(state(one), state(other))
    assert (one / "metrics.jsonl").read_bytes() == (other / "metrics.jsonl").read_bytes()
