"""Checks of every request: limits, tokens, ids; errors of one line, figures, headers of answers."""

import asyncio
import contextlib
import functools
import hmac
import ipaddress
import itertools
import logging
import re
import secrets
import time
import urllib.parse
from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse, Response

from dmljax.serve.api import OPEN_ROUTES
from dmljax.serve.budget import Claim
from dmljax.serve.errors import Refused, refusal
from dmljax.serve.generation import Service
from dmljax.serve.metrics import METHODS
from dmljax.serve.settings import is_loopback

_log = logging.getLogger("dmljax.serve.requests")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_QUIET_ROUTES = ("/healthz", "/readyz", "/metrics")
_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"x-frame-options", b"DENY"),
]


class Guard:
    """An ASGI application around another one, `app`, whose routes are `routes`."""

    def __init__(self, app: Any, service: Service, routes: frozenset[str]):
        self._app, self._service, self._routes = app, service, routes
        self._client_header = (service.settings.client_header or "").lower().encode()
        self._running = 0
        # Unique without a call of the operating system for each request.
        self._prefix, self._numbers = secrets.token_hex(4), itertools.count(1)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1000})
            else:
                await self._app(scope, receive, send)
            return
        start = time.perf_counter()
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        request_id = headers.get(b"x-request-id", "")
        if not _REQUEST_ID.fullmatch(request_id):
            request_id = f"{self._prefix}{next(self._numbers):08x}"
        route = scope["path"] if scope["path"] in self._routes else "other"
        method = scope["method"] if scope["method"] in METHODS else "other"
        status, limits = 0, self._service.settings.limits
        ending: Ending | None = None

        async def answer(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                if ending is not None:
                    ending.cancel()  # the protocol limits the time to send
                status = message["status"]
                sent = message["headers"]
                if not any(name == b"cache-control" for name, _ in sent):
                    sent = [*sent, (b"cache-control", b"no-store")]
                identity = (b"x-request-id", request_id.encode())
                message = {**message, "headers": [*sent, identity, *_HEADERS]}
            await send(message)

        self._running += 1
        metrics = self._service.metrics
        metrics.running.set(self._running)
        try:
            try:
                self._check(scope, headers, route)
                async with asyncio.timeout(limits.request_seconds) as timeout:
                    ending = Ending(timeout)
                    client = client_of(scope, headers, self._client_header)
                    with self._service.budget.claim(client) as claim:
                        shared = {"claim": claim, "ending": ending}
                        await self._app(scope | shared, receive, answer)
            except Exception as error:
                refused = ending.reason if ending else None
                ending = None
                if status:
                    raise  # the answer has begun
                if refused is None or not isinstance(error, TimeoutError):
                    place = str(self._service.settings.index or "the index")
                    refused = refusal(error, place=place, request_id=request_id)
                await _response(refused, request_id)(scope, receive, answer)
        finally:
            self._running -= 1
            metrics.running.set(self._running)
            seconds = time.perf_counter() - start
            metrics.requests.labels(route, method, str(status)).inc()
            metrics.request_seconds.labels(route).observe(seconds)
            if self._service.settings.log_requests and route not in _QUIET_ROUTES:
                milliseconds = f"{1000 * seconds:.1f} ms"
                _log.info("%s %s %s %d %s", request_id, method, route, status, milliseconds)

    def _check(self, scope: Any, headers: Mapping[bytes, str], route: str) -> None:
        settings = self._service.settings
        if scope.get("state", {}).get("crowded") and route not in _QUIET_ROUTES:
            raise Refused(503, "too many connections at a time: try again", retry_after=1)
        if self._running > settings.limits.requests and route not in _QUIET_ROUTES:
            raise Refused(503, "too many requests at a time: try again", retry_after=1)
        self._check_origin(scope, headers)
        tokens = self._service.tokens
        if tokens and route not in OPEN_ROUTES:
            sent = headers.get(b"authorization", "").encode("latin-1", "replace")
            kind, _, token = sent.partition(b" ")
            # Compare with all tokens, so that the time does not reveal a match.
            matches = [hmac.compare_digest(token.strip(), expected) for expected in tokens]
            if kind.lower() != b"bearer" or not any(matches):
                raise Refused(401, "a token is needed: Authorization: Bearer TOKEN")

    def _check_origin(self, scope: Any, headers: Mapping[bytes, str]) -> None:
        """Refuses requests that a page of another site makes a local browser send."""
        host = headers.get(b"host", "")
        origin = headers.get(b"origin")
        foreign = origin is not None and _place(origin) != host
        # Browsers send no Origin with the GET of an image, a script or a link, but they say who
        # asks (Fetch Metadata Request Headers, W3C): "none" is the user, and "same-site" may be
        # another program at another port of this machine.
        if headers.get(b"sec-fetch-site", "none") not in ("same-origin", "none"):
            foreign |= not _opens_page(scope, headers)
        if foreign:
            raise Refused(403, "requests from pages of other sites are refused")
        # Without a token only names of this machine are accepted: another name that points here is
        # an attempt to read through a browser (DNS rebinding).
        if not self._service.tokens and not is_loopback(_name(host)):
            raise Refused(403, "the Host header does not name this machine")


def client_of(scope: Any, headers: Mapping[bytes, str], header: bytes) -> str:
    """Who sent a request: its address, or what the proxy in front has put into a header.

    Of several addresses in the header, the last one is that which the proxy has added; a client may
    have written the others.
    """
    sent = headers.get(header, "").rpartition(",")[2].strip()
    return _network(sent or (scope.get("client") or ("",))[0])


@functools.lru_cache(1024)
def _network(address: str) -> str:
    """The address; of IPv6 its first 64 bits, since one machine can use all that begin so."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is None:
        return str(ipaddress.ip_network((int(ip) >> 64 << 64, 64)))
    return address


def _opens_page(scope: Any, headers: Mapping[bytes, str]) -> bool:
    """Whether a tab of a browser opens the page of the service, for instance by a link."""
    kind = headers.get(b"sec-fetch-mode"), headers.get(b"sec-fetch-dest")
    return (scope["method"], scope["path"], kind) == ("GET", "/", ("navigate", "document"))


def _place(origin: str) -> str | None:
    """Host and port of an Origin header; None if it is malformed or names no host."""
    try:
        return urllib.parse.urlsplit(origin).netloc or None
    except ValueError:
        return None


@functools.lru_cache(64)
def _name(host: str) -> str:
    try:
        return urllib.parse.urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _response(refused: Refused, request_id: str) -> Response:
    content = {"error": refused.reason, "request_id": request_id}
    response = JSONResponse(content, status_code=refused.status)
    if refused.retry_after is not None:
        response.headers["Retry-After"] = str(refused.retry_after)
    if refused.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    if refused.status in (408, 413, 503):  # the rest of the body is not read
        response.headers["Connection"] = "close"
    return response


class Ending:
    """Ends a request before its answer. Without a `reason` the request took too long.

    One timeout serves all reasons: several would be a tenth of the time of a small request.
    """

    def __init__(self, timeout: asyncio.Timeout):
        self._timeout = timeout
        self.reason: Refused | None = None

    def end(self, reason: Refused) -> None:
        """Ends the request, if it has no answer yet; for the thread of the event loop."""
        self.reason = self.reason or reason
        if self._timeout.when() is not None:
            with contextlib.suppress(RuntimeError):  # it has ended in the meantime
                self._timeout.reschedule(0)

    def cancel(self) -> None:
        """Lets the request take as long as it needs."""
        self._timeout.reschedule(None)


def client_left() -> Refused:
    return Refused(400, "the client went away")


async def read_body(
    receive: Any, length: str | None, claim: Claim, ending: Ending, *, most: int, seconds: float
) -> bytes:
    """The body, refused as soon as it is larger than `most` bytes or too slow.

    Its bytes are taken from the `claim`. A body that arrives while others need the memory may have
    to go.
    """
    body = bytearray()
    too_large = Refused(413, f"the body is larger than the limit of {most:,} bytes")
    if length is not None and (not length.isdecimal() or int(length[:20]) > most):
        raise too_large
    loop = asyncio.get_running_loop()

    def stop() -> None:
        reason = "others needed the memory of this body: try again"
        ending.reason = Refused(503, reason, retry_after=1)
        loop.call_soon_threadsafe(ending.end, ending.reason)

    slow = Refused(408, f"the body did not arrive within {seconds:g} seconds")
    timer = loop.call_later(seconds, ending.end, slow)
    claim.arrives(stop)
    try:
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise client_left()
            chunk = message.get("body", b"")
            claim.take(len(chunk))
            body += chunk
            if len(body) > most:
                raise too_large
            if not message.get("more_body"):
                break
    finally:
        timer.cancel()
        claim.arrives(None)
    if ending.reason is not None:
        raise ending.reason
    return bytes(body)
