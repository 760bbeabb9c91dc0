"""Worker processes and shared memory end with their parent, however it ends."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

_slow = pytest.mark.slow
_SCRIPT = """
import functools, sys
import numpy as np
from dmljax.data import pipeline, sampling, splits, transforms

def main():
    images = np.zeros((64, 64, 64, 3), np.uint8)
    batches = pipeline.train(
        splits.Split(images, np.arange(64) % 16, tuple("abcdefghijklmnop")),
        sample_fn=functools.partial(sampling.class_balanced, classes=16, per_class=2),
        transform_fn=transforms.random_flip,
        seed=0,
        workers=2,
    )
    for _ in range(3):
        next(batches)
    print("ready", flush=True)
    if sys.argv[1] == "close":
        batches.close()
        return
    if sys.argv[1] == "raise":
        raise ValueError("on purpose")
    while True:
        next(batches)

if __name__ == "__main__":
    main()
"""


def _session(sid):
    """Processes of a session, without zombies."""
    processes = []
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (OSError, ProcessLookupError):
            continue
        if int(fields[3]) == sid and fields[0] != "Z":
            processes.append(int(stat.parent.name))
    return processes


def _segments():
    return set(os.listdir("/dev/shm"))


@pytest.mark.skipif(not pathlib.Path("/proc").is_dir(), reason="counts processes in /proc")
@pytest.mark.parametrize(
    "how",
    ["SIGKILL", *(pytest.param(h, marks=_slow) for h in ("SIGTERM", "SIGINT", "close", "raise"))],
)
def test_no_process_and_no_shared_memory_remains(tmp_path, how):
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    before = _segments()
    root = str(pathlib.Path(__file__).parents[2])
    parent = subprocess.Popen(
        [sys.executable, str(script), how],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": root},
        text=True,
    )
    try:
        assert parent.stdout.readline().strip() == "ready"
        if how.startswith("SIG"):
            assert len(_session(parent.pid)) >= 3  # the parent and two workers
            os.kill(parent.pid, getattr(signal, how))
        parent.wait(30)
        deadline = time.monotonic() + 20
        while _session(parent.pid) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert not _session(parent.pid), "worker processes are still running"
        # Other tests that run at the same time create and remove segments too.
        remaining, deadline = _segments() - before, time.monotonic() + 60
        while remaining and time.monotonic() < deadline:
            time.sleep(0.2)
            remaining &= _segments()
        assert not remaining, "shared memory has not been released"
    finally:
        for pid in _session(parent.pid):
            os.kill(pid, signal.SIGKILL)
        parent.stdout.close()


def test_full_shared_memory_is_one_line(tmp_path):
    """/dev/shm of this test has 256 kB, where a batch has 393 kB."""
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    mount = "mount -t tmpfs -o size=256k tmpfs /dev/shm"
    if subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("mounting needs the rights of the administrator")
    command = f"{mount} && {sys.executable} {script} close"
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", command], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1 and "ready" not in done.stdout
    assert "OSError: /dev/shm is full, through which processes send the images" in done.stderr
