"""One process of the service: its socket, its signals and its end."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from dmljax.serve import app
from dmljax.serve.generation import Service
from dmljax.serve.settings import Settings

__all__ = ["run"]

_HEAD_BYTES = 32 << 10
_BACKLOG = 1024


class _Protocol(H11Protocol):
    """HTTP/1.1 that closes a connection whose head of a request does not arrive in time."""

    head_seconds = 20.0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._timer: asyncio.TimerHandle | None = None
        self._time_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._time_head()

    def _time_head(self) -> None:
        if self.conn.their_state is h11.IDLE:
            if self._timer is None:
                self._timer = self.loop.call_later(self.head_seconds, self._expire)
        elif self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        self._timer = None
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        super().connection_lost(exc)


class _Server(uvicorn.Server):
    """Ends also when the service cannot start, and looks for changes on SIGHUP."""

    def __init__(self, config: uvicorn.Config, service: Service):
        super().__init__(config)
        self._service = service

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, self._service.wish_reload)

    async def on_tick(self, counter: int) -> bool:
        if self._service.failure is not None:
            return True
        return await super().on_tick(counter)


def run(settings: Settings) -> int:
    """Serves until SIGTERM or SIGINT, then answers what was begun; the exit status."""
    settings.check()
    logging.basicConfig(
        stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s", level=logging.WARNING
    )
    logging.getLogger("dmljax.serve").setLevel(logging.INFO)
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    service = Service(settings)
    limits = settings.limits
    _Protocol.head_seconds = limits.body_seconds
    listening = _listen(settings.host, settings.port)
    config = uvicorn.Config(
        app.create(service),
        http=_Protocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        limit_concurrency=limits.connections,
        backlog=_BACKLOG,
        timeout_keep_alive=limits.idle_seconds,
        timeout_graceful_shutdown=limits.drain_seconds,
        h11_max_incomplete_event_size=_HEAD_BYTES,
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
        listening.listen(_BACKLOG)  # who reads the printed address can connect
    except OSError as error:
        raise OSError(
            f"--host={host} --port={port} cannot be used: {error.strerror or error}"
        ) from None
    return listening
