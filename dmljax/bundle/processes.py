"""Modules of dmljax that run in a process of their own."""

import os
import pathlib
import signal
import subprocess
import sys


def run_module(module: str, *words: str | os.PathLike) -> str | None:
    """Runs a module of dmljax in a new process; the last line of its errors if it fails."""
    root = str(pathlib.Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    command, environment = [sys.executable, "-m", module, *words], os.environ | {"PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode < 0:
        return f"its process crashed ({signal.Signals(-done.returncode).name})"
    lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    return lines[-1] if done.returncode else None
