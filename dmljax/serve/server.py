"""One process of the service: its socket, its log and its end."""

import contextlib
import logging
import os
import socket
import sys

import uvicorn

from dmljax.files import machine
from dmljax.serve import app
from dmljax.serve.service import Service
from dmljax.serve.settings import Settings

_BACKLOG = 1024
_IDLE_SECONDS = 75  # of a connection; longer than a proxy keeps one for its next request
_KEPT, _LARGE = 16 << 20, 4 << 20  # bytes of freed memory that are kept, and blocks that are not


def run(settings: Settings) -> int:
    """Serves until SIGTERM or SIGINT, and then until the requests in flight are answered.

    Returns 0 after SIGINT, and 1 if it could not start. After SIGTERM the process ends by that
    signal, as uvicorn does.
    """
    settings.check()
    logging.basicConfig(
        stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s", level=logging.WARNING
    )
    logging.getLogger("dmljax.serve").setLevel(logging.INFO)
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    machine.limit_freed_memory(_KEPT, large=_LARGE)
    listening = _bound(settings.host, settings.port)
    service = Service(settings)
    host, port = listening.getsockname()[:2]
    name = f"[{host}]" if ":" in host else host

    def ready() -> None:
        listening.listen(_BACKLOG)  # before the address is printed, so that clients can connect
        print(f"http://{name}:{port}  (process {os.getpid()}; Ctrl-C ends it)", flush=True)

    config = uvicorn.Config(
        app.create(service, ready_fn=ready),
        http="h11",
        loop="asyncio",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=_BACKLOG,
        timeout_keep_alive=_IDLE_SECONDS,
        timeout_graceful_shutdown=round(settings.limits.seconds) + 1,
    )
    process = uvicorn.Server(config)
    with contextlib.suppress(KeyboardInterrupt):
        process.run(sockets=[listening])
    return 0 if process.started else 1


def _bound(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM
        )[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
    except OSError as error:
        raise OSError(
            f"--host={host} --port={port} cannot be used: {error.strerror or error}"
        ) from None
    return listening
