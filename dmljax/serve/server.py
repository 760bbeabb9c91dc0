"""One process of the service: its socket, its signals and its end."""

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
import types

import uvicorn

from dmljax.files import allocator
from dmljax.serve import app
from dmljax.serve.generation import Service
from dmljax.serve.protocol import Protocol
from dmljax.serve.settings import Settings

_log = logging.getLogger("dmljax.serve")
_BACKLOG = 1024
_LEAST_DRAIN = 1  # seconds; the last one is for closing the index
_STATUS_OF_SIGNAL = 128
_KEPT, _LARGE = 16 << 20, 4 << 20  # bytes of freed memory that are kept, and blocks that are not


class _Server(uvicorn.Server):
    """Also ends if the service cannot start, and in time whatever still runs.

    On SIGHUP, it looks for a new bundle and index.
    """

    def __init__(self, config: uvicorn.Config, service: Service):
        super().__init__(config)
        self._service = service

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, self._service.request_reload)

    def handle_exit(self, sig: int, frame: types.FrameType | None) -> None:
        super().handle_exit(sig, frame)
        seconds = max(self._service.settings.limits.drain_seconds, _LEAST_DRAIN)
        end = threading.Timer(seconds, self._end, [sig])
        end.daemon = True
        end.start()

    def _end(self, sig: int) -> None:
        """Threads that compute or search cannot be stopped, and Python would wait for them."""
        _log.warning("the process ends, although requests or threads still run")
        self._service.kill()
        os._exit(_STATUS_OF_SIGNAL + sig)

    async def on_tick(self, counter: int) -> bool:
        if self._service.failure is not None:
            return True
        return await super().on_tick(counter)


def run(settings: Settings) -> int:
    """Serves until SIGTERM or SIGINT, then answers the requests in progress; the exit status."""
    settings.check()
    logging.basicConfig(
        stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s", level=logging.WARNING
    )
    logging.getLogger("dmljax.serve").setLevel(logging.INFO)
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    allocator.keep_at_most(_KEPT, large=_LARGE)
    service = Service(settings)
    limits = settings.limits
    Protocol.head_seconds, Protocol.write_seconds = limits.body_seconds, limits.write_seconds
    Protocol.most_connections = limits.connections
    listening = _listen(settings.host, settings.port)
    config = uvicorn.Config(
        app.create(service),
        http=Protocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=_BACKLOG,
        timeout_keep_alive=limits.idle_seconds,
        timeout_graceful_shutdown=max(0, limits.drain_seconds - _LEAST_DRAIN),
    )
    host, port = listening.getsockname()[:2]
    name = f"[{host}]" if ":" in host else host
    print(f"http://{name}:{port}  (process {os.getpid()}; Ctrl-C ends it)", flush=True)
    try:
        _Server(config, service).run(sockets=[listening])
    except KeyboardInterrupt:
        return 0
    if service.failure is not None:
        raise service.failure
    return 0


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM
        )[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(_BACKLOG)  # before the address is printed, so that clients can connect
    except OSError as error:
        raise OSError(
            f"--host={host} --port={port} cannot be used: {error.strerror or error}"
        ) from None
    return listening
