"""HTTP/1.1 of one connection: uvicorn's, with limits on the head of a request."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

__all__ = ["Protocol"]

_HEAD_BYTES = 32 << 10


class Protocol(HttpToolsProtocol):
    """Closes a connection whose next head does not arrive in time, or is too large."""

    head_seconds = 20.0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(_Transport(transport, self.loop))
        self._in_message = False  # from the end of a head to the end of the body
        # Bytes since the parser last gave a head, a part of a body or the end of a body: bytes of a
        # head that is not complete, empty lines before it, or trailers, which are not read.
        self._unused = 0
        self._timer: asyncio.TimerHandle | None = None
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        self._unused += len(data)
        super().data_received(data)
        if self._unused > _HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"the head of the request is larger than {_HEAD_BYTES} bytes")
        if self._in_message or not self._unused:
            self._stop_timer()
        else:
            self._start_timer()

    def on_message_begin(self) -> None:
        self._unused = max(self._unused, 1)  # also where it follows another one in the same data
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_message:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_message, self._unused = True, 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unused = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_message, self._unused = False, 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuses what cannot be parsed in the form of all other refusals."""
        reason = "this is no request of HTTP/1.1" if msg.startswith("Invalid HTTP") else msg
        body = json.dumps({"error": reason}).encode()
        head = (
            "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self.head_seconds, self._expire)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        self._timer = None
        if self.cycle is not None and not self.cycle.response_complete:
            self._start_timer()  # an earlier request is still being answered
        else:
            self.transport.close()


class _Transport:
    """Sends what is written within one turn of the event loop together.

    uvicorn writes the head and the body of an answer one after the other, and each write is a call
    of the operating system.
    """

    def __init__(self, transport: Any, loop: asyncio.AbstractEventLoop):
        self._transport, self._loop = transport, loop
        self._written: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._written:
            self._loop.call_soon(self._flush)
        self._written.append(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._written:
            self._transport.write(b"".join(self._written))
            self._written.clear()
