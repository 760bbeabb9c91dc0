"""A server of the page of a run that is still training, for this machine only."""

import dataclasses
import http.server
import os
import pathlib
import threading
import time
from collections.abc import Sequence

from absl import logging

from dmljax.report import page
from dmljax.report import run as run_files
from dmljax.report.facts import Facts
from dmljax.runs import folder as run_folder
from dmljax.runs import page as run_page
from dmljax.train.evaluation import Evaluation, Evaluator

_SECONDS_BETWEEN_LOOKS = 2.0


class LivePage:
    """The page of a run as it is now. `refresh` makes it again if there is a new evaluation."""

    def __init__(self, folder: str | os.PathLike, *, overrides: Sequence[str] = ()):
        self._folder = pathlib.Path(folder)
        if not (self._folder / "config.json").is_file():
            raise FileNotFoundError(f"{folder} holds no run: there is no {folder}/config.json")
        self._overrides = overrides
        self._seen: tuple[int, bool] | None = None
        self.version, self.html = 0, b""

    def refresh(self) -> bool:
        """Whether the page has changed."""
        files = run_files.read(self._folder)
        has_checkpoint = any((self._folder / "checkpoints").glob("[0-9]*"))
        now = files.evaluations, has_checkpoint
        if now == self._seen:
            return False
        facts = self._facts(files) if files.evaluations and has_checkpoint else None
        if facts is None:
            headline = "" if files.evaluations else "no evaluation yet"
            facts = Facts(title=files.name, headline=headline, curves=files.curves(None))
        self._show(facts)
        self._seen = now
        return True

    def _facts(self, files: run_files.Files) -> Facts | None:
        """The facts of the newest checkpoint, or None while it is being written."""
        try:
            run, state = run_folder.reopen(self._folder, overrides=self._overrides)
            evaluation = Evaluation({}, Evaluator(run).embeddings(state, run.test))
            return run_page.facts_of(run, state, evaluation, self._folder)
        except Exception as error:  # the server goes on, and looks again at the next evaluation
            logging.warning("the page shows the curves only: %s: %s", type(error).__name__, error)
            return None

    def _show(self, facts: Facts) -> None:
        self.version += 1
        facts = dataclasses.replace(facts, version=self.version)
        self.html = page.html_of(facts, live=True).encode()


def serve(folder: str | os.PathLike, *, port: int, overrides: Sequence[str] = ()) -> None:
    """Serves the page until the process is interrupted."""
    live = LivePage(folder, overrides=overrides)
    try:
        server = _server(live, port)
    except OSError as error:
        raise ValueError(
            f"port {port} cannot be used ({error.strerror}): choose another one by --port, or "
            "--port=0 for any free one"
        ) from error
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(f"http://127.0.0.1:{server.server_port}/ shows {folder}; Ctrl-C ends it", flush=True)
    try:
        while True:
            if live.refresh():
                print(f"page {live.version}: {len(live.html) / 1e6:.1f} MB", flush=True)
            time.sleep(_SECONDS_BETWEEN_LOOKS)
    except KeyboardInterrupt:
        pass
    finally:
        server.shutdown()


def _server(live: LivePage, port: int) -> http.server.ThreadingHTTPServer:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            # A page of another site must not read this one by a name that points here.
            host = (self.headers.get("Host") or "").rpartition(":")[0]
            if host not in ("127.0.0.1", "localhost"):
                self._answer(403, b"only for this machine", "text/plain")
            elif self.path == "/version":
                self._answer(200, str(live.version).encode(), "text/plain")
            elif self.path == "/":
                waiting = b"<!DOCTYPE html><meta http-equiv=refresh content=1><p>The page is made."
                self._answer(200, live.html or waiting, "text/html; charset=utf-8")
            else:
                self._answer(404, b"there is one page: /", "text/plain")

        def _answer(self, status: int, content: bytes, kind: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *arguments) -> None:
            """Requests are not printed."""

    return http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
