"""HTTP/1.1 of one connection: uvicorn's, with limits on heads, waiting requests and answers.

uvicorn has no settings for these limits, so this subclass uses its internals; the tests of the
limits fail if a new uvicorn changes them. docs/security.md says why it is not Granian.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_HEAD_BYTES = 32 << 10
_QUEUED = 32  # requests of one connection that wait for the answer to an earlier one
_LINGER_SECONDS = 2  # for a client to stop sending, and to read why it was refused
_MORE = 2  # times as many connections as are served may be open, to be refused with an answer
_END_OF_HEAD = b"\r\n\r\n"


class Protocol(HttpToolsProtocol):
    """Closes a connection whose next head does not arrive in time, or is too large.

    At most 32 requests wait for the answer to an earlier one; then nothing more is read. A
    connection beyond `most_connections` closes the one that has longest been without a request. If
    all have one, its requests are marked `crowded`, and the service refuses them.
    """

    # Connections without a request, the longest waiting one first. The loop of the service is the
    # only thread that uses them.
    _idle: ClassVar[dict[Protocol, None]] = {}

    # `server.run` sets these three by the limits of the settings.
    most_connections = 1000
    head_seconds = 20.0
    write_seconds = 20.0

    def connection_made(self, transport: Any) -> None:
        wrapped = _Transport(transport, self.loop, self.write_seconds, lambda: self._is_cut_short)
        super().connection_made(wrapped)
        self._is_refused = False
        self._unparsed = b""  # what was read and waits until fewer requests are queued
        self._in_message = False  # from the end of a head to the end of the body
        # Bytes since the parser last gave a head, a part of a body or the end of a body: bytes of a
        # head that is not complete, empty lines before it, or trailers, which are not read.
        self._unused = 0
        self._timer: asyncio.TimerHandle | None = None
        self._start_timer()
        if len(self.connections) > self.most_connections and self._idle:
            next(iter(self._idle)).abort()
        elif len(self.connections) > _MORE * self.most_connections:
            self.abort()
            return
        self._idle[self] = None

    def abort(self) -> None:
        """Closes the connection at once."""
        self._idle.pop(self, None)
        self.connections.discard(self)
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Parses what was read, up to the request with which too many are queued.

        Nothing more is read until the rest is parsed, so a client that sends without reading waits.
        """
        if not self.transport.is_closing():
            self._unparsed += data
            self._parse()

    @property
    def _is_cut_short(self) -> bool:
        """Whether the client may go on sending what nobody reads."""
        return self._is_refused or self._in_message

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete and not self.transport.is_lost():
            self._idle[self] = None  # also while it lingers: it gives way to others
        if len(self.pipeline) <= _QUEUED // 2:
            self._parse()

    def _parse(self) -> None:
        data, start = self._unparsed, 0
        while start < len(data) and len(self.pipeline) < _QUEUED:
            if self.transport.is_closing():
                return
            end = _end_of_heads(data, start, _QUEUED - len(self.pipeline))
            self._parse_piece(data[start:end])
            start = end
        self._unparsed = data[start:]
        if not self.transport.is_closing():
            self.transport.hold(bool(self._unparsed), resume=not self.flow.read_paused)

    def _parse_piece(self, data: bytes) -> None:
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
        self._idle.pop(self, None)
        self.scope["state"]["crowded"] = len(self.connections) > self.most_connections
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
        self._is_refused = True
        self.transport.write(head.encode() + body)
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._idle.pop(self, None)
        self.transport.end()
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


def _end_of_heads(data: bytes, start: int, most: int) -> int:
    """Where a piece of `data` ends that has at most `most` heads: each ends with an empty line."""
    for _ in range(most):
        position = data.find(_END_OF_HEAD, start)
        if position < 0:
            return len(data)
        start = position + len(_END_OF_HEAD)
    return start


class _Transport:
    """Sends what is written within one turn of the event loop together, and not for ever.

    uvicorn writes the head and the body of an answer one after the other, and each write is a call
    of the operating system. A client that has not taken an answer after `write_seconds` is cut off,
    also where the connection is closing and only waits for that.

    Closing while bytes of the client are unread would reset the connection, and the client could
    lose the answer. Where `is_cut_short_fn()`, what arrives is dropped until the client closes,
    too, for two seconds at most.
    """

    def __init__(
        self,
        transport: Any,
        loop: asyncio.AbstractEventLoop,
        write_seconds: float,
        is_cut_short_fn: Callable[[], bool],
    ):
        self._transport, self._loop, self._write_seconds = transport, loop, write_seconds
        self._is_cut_short_fn = is_cut_short_fn
        self._written: list[bytes] = []
        self._held = self._has_ended = self._lingers = False
        self._total = self._mark = 0  # bytes that were written, and those that have to go in time
        self._timer: asyncio.TimerHandle | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        return self._lingers or self.is_lost()

    def is_lost(self) -> bool:
        """Whether nothing more can be read."""
        return self._transport.is_closing()

    def write(self, data: bytes) -> None:
        if self._has_ended or self._lingers:
            return
        if not self._written:
            self._loop.call_soon(self._flush)
        self._written.append(data)

    def hold(self, held: bool, *, resume: bool) -> None:
        """Reads nothing while `held`, whatever uvicorn wants; reads again after it, if `resume`."""
        if held and not self._held:
            self._transport.pause_reading()
        elif self._held and not held and resume:
            self._transport.resume_reading()
        self._held = held

    def resume_reading(self) -> None:
        if not self._held:
            self._transport.resume_reading()

    def close(self) -> None:
        self._flush()
        if self._lingers or self._transport.is_closing() or not self._is_cut_short_fn():
            self._transport.close()
            return
        self._lingers = True
        self._transport.write_eof()
        self._transport.resume_reading()
        self._loop.call_later(_LINGER_SECONDS, self._transport.close)

    def abort(self) -> None:
        """Closes the connection at once, also for what is written later."""
        self.end()
        self._transport.abort()

    def end(self) -> None:
        """Writes nothing more."""
        self._has_ended = True
        self._written.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _flush(self) -> None:
        if self._written and not self._has_ended:
            data = b"".join(self._written)
            self._written.clear()
            self._total += len(data)
            self._transport.write(data)
            self._start_timer()

    def _start_timer(self) -> None:
        if self._timer is None and self._transport.get_write_buffer_size():
            self._mark = self._total
            self._timer = self._loop.call_later(self._write_seconds, self._expire)

    def _expire(self) -> None:
        self._timer = None
        if self._total - self._transport.get_write_buffer_size() < self._mark:
            self.abort()
        else:
            self._start_timer()
