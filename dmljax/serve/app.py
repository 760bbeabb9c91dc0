"""The ASGI application: checks of every request, and what answers the routes of `api`."""

import asyncio
import base64
import contextlib
import functools
import hashlib
import hmac
import importlib.resources
import itertools
import logging
import re
import secrets
import time
import urllib.parse
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Router

from dmljax.files import machine
from dmljax.index import Index, inputs
from dmljax.index.nearest import SIMILARITIES
from dmljax.serve import api
from dmljax.serve.api import Refused, refusal
from dmljax.serve.pictures import Pictures
from dmljax.serve.service import CONTENT_TYPE, METHODS, Service
from dmljax.serve.settings import is_loopback

_log = logging.getLogger("dmljax.serve.requests")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_PROBES = ("/healthz", "/readyz", "/metrics")  # answered at any load, and not logged
_RAW_KINDS = ("application/octet-stream", "application/x-www-form-urlencoded", "")
_LARGE_BODY = 1 << 20
_LARGE_REQUESTS = 4  # that are read and answered at a time; others wait before they are read
_TRIM_SECONDS = 1.0
_SCANNED = 500  # a random choice from fewer items is exact
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Frame-Options": "DENY",
}


def create(service: Service, *, ready_fn: Callable[[], None] = lambda: None) -> Any:
    """Returns the ASGI application of a service; it calls `ready_fn` before the first request."""
    requests = _Requests(service)

    @contextlib.asynccontextmanager
    async def lifespan(app: Router) -> AsyncIterator[None]:
        await service.start()
        ready_fn()
        yield
        await service.stop()

    lifespan_app = Router(lifespan=lifespan)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await lifespan_app(scope, receive, send)
            return
        response = await requests.respond(Request(scope, receive))
        await response(scope, receive, send)

    return app


class _Requests:
    """Checks requests and calls their handlers. Every error becomes one line of JSON."""

    def __init__(self, service: Service):
        self._service, self._handlers = service, Handlers(service)
        self._limits = service.settings.limits
        self._large = asyncio.Semaphore(_LARGE_REQUESTS)
        self._running = 0
        # Unique without a call of the operating system for each request.
        self._prefix, self._numbers = secrets.token_hex(4), itertools.count(1)

    async def respond(self, request: Request) -> Response:
        """Returns the answer to a request, whatever happens."""
        start = time.perf_counter()
        request_id = request.headers.get("x-request-id", "")
        if not _REQUEST_ID.fullmatch(request_id):
            request_id = f"{self._prefix}{next(self._numbers):08x}"
        try:
            async with asyncio.timeout(self._limits.seconds) as timeout:
                response = await self._answer(request, timeout)
        except Exception as error:
            place = str(self._service.settings.index or "the index")
            response = _refused(refusal(error, place=place, request_id=request_id), request_id)
        response.headers.setdefault("Cache-Control", "no-store")
        response.headers.update(_HEADERS | {"X-Request-Id": request_id})
        route = path if (path := request.scope["path"]) in api.ROUTES else "other"
        method = request.method if request.method in METHODS else "other"
        seconds, status = time.perf_counter() - start, response.status_code
        self._service.metrics.request(route, method, status, seconds)
        if not self._service.settings.quiet and route not in _PROBES:
            milliseconds = f"{1000 * seconds:.1f} ms"
            _log.info("%s %s %s %d %s", request_id, method, route, status, milliseconds)
        return response

    async def _answer(self, request: Request, timeout: asyncio.Timeout) -> Response:
        self._check_sender(request)
        methods = api.ROUTES.get(request.scope["path"])  # the path of `url` depends on Host
        if methods is None:
            raise Refused(404, "this route does not exist; docs/serve.md lists the routes")
        route = methods.get("GET" if request.method == "HEAD" else request.method)
        if route is None:
            raise Refused(405, f"this route has {', '.join(methods)}")
        async with self._place(request):
            options = api.query(request.query_params.multi_items(), route.query)
            handler = getattr(self._handlers, route.handler)
            if route.body is None:
                answer = await handler(options)
            else:
                body = await self._body(request, route, options)
                with _ending_with_client(request, timeout):
                    answer = await handler(options, body)
        if isinstance(answer, Response):
            return answer
        data = msgspec.json.encode(answer, enc_hook=lambda x: x.tolist())
        return Response(data, status_code=route.status, media_type=api.JSON)

    @contextlib.asynccontextmanager
    async def _place(self, request: Request) -> AsyncIterator[None]:
        """Holds a place among the requests in flight. Large bodies wait before they are read."""
        is_large = (length := _length(request)) is None or length > _LARGE_BODY
        async with self._large if is_large else contextlib.nullcontext():
            if self._running >= self._limits.requests and request.scope["path"] not in _PROBES:
                raise Refused(503, "too many requests at a time: try again", retry_after=1)
            self._running += 1
            self._service.metrics.running.set(self._running)
            try:
                yield
            finally:
                self._running -= 1
                self._service.metrics.running.set(self._running)
                if is_large:  # its memory goes back to the system, when nothing refers to it
                    asyncio.get_running_loop().call_later(_TRIM_SECONDS, machine.trim_memory)

    async def _body(self, request: Request, route: api.Route, options: Any) -> Any:
        """Returns the body as the type of the route, with the `options` that it leaves out."""
        most, data, size = self._limits.body_bytes, bytearray(), _length(request) or 0
        try:
            chunks = request.stream()
            while size <= most and (chunk := await anext(chunks, None)) is not None:
                data += chunk
                size = max(size, len(data))
        except ClientDisconnect:
            raise Refused(400, "the client went away") from None
        if size > most:
            raise Refused(413, f"the body is larger than the limit of {most:,} bytes")
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        assert route.body is not None
        if kind == api.JSON:
            body: Any = api.decode(data, route.body)
        elif route.images and (kind.startswith("image/") or kind in _RAW_KINDS):
            body = route.body(images=[bytes(data)])
        else:
            raise Refused(
                415, f"Content-Type must be {api.JSON}, or that of an image, got {kind[:60]!a}"
            )
        for name in options.__struct_fields__:
            if getattr(body, name) is None:
                setattr(body, name, getattr(options, name))
        return body

    def _check_sender(self, request: Request) -> None:
        """Refuses requests without a token, and those that a page of another site sends."""
        headers, tokens = request.headers, self._service.tokens
        host, origin = headers.get("host", ""), headers.get("origin")
        foreign = origin is not None and (_split(origin).netloc or None) != host
        # Browsers send no Origin with the GET of an image, a script or a link, but they say who
        # asks (Fetch Metadata Request Headers, W3C): "none" is the user, and "same-site" may be
        # another program at another port of this machine. A link may open the page.
        if headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
            kind = headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest")
            opens_page = request.method == "GET" and request.scope["path"] == "/"
            foreign |= not opens_page or kind != ("navigate", "document")
        if foreign:
            raise Refused(403, "requests from pages of other sites are refused")
        # Without a token only names of this machine are accepted: another name that points here is
        # an attempt to read through a browser (DNS rebinding).
        if not tokens and not is_loopback(_split(f"//{host}").hostname or ""):
            raise Refused(403, "the Host header does not name this machine")
        if tokens and request.scope["path"] not in api.OPEN_ROUTES:
            sent = headers.get("authorization", "").encode("latin-1", "replace")
            scheme, _, token = sent.partition(b" ")
            # Compare with all tokens, so that the time does not reveal a match.
            matches = [hmac.compare_digest(token.strip(), expected) for expected in tokens]
            if scheme.lower() != b"bearer" or not any(matches):
                raise Refused(401, "a token is needed: Authorization: Bearer TOKEN")


@contextlib.contextmanager
def _ending_with_client(request: Request, timeout: asyncio.Timeout) -> Iterator[None]:
    """Lets the timeout of the block end now if the client goes away: nobody needs the answer."""

    def end(watch: asyncio.Future) -> None:
        with contextlib.suppress(asyncio.CancelledError, RuntimeError):  # the block has ended
            watch.result()
            timeout.reschedule(0)

    watch = asyncio.ensure_future(request.receive())  # after the body only the end can come
    watch.add_done_callback(end)
    try:
        yield
    finally:
        watch.cancel()


def _length(request: Request) -> int | None:
    """Returns the length of the body; None where the head does not say it."""
    text = request.headers.get("content-length", "0")
    is_known = text.isdecimal() and "transfer-encoding" not in request.headers
    return int(text[:20]) if is_known else None


def _refused(refused: Refused, request_id: str) -> Response:
    content = {"error": refused.reason, "request_id": request_id}
    response = JSONResponse(content, status_code=refused.status)
    if refused.retry_after is not None:
        response.headers["Retry-After"] = str(refused.retry_after)
    if refused.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


@functools.lru_cache(256)
def _split(address: str) -> urllib.parse.SplitResult:
    """Returns the parts of an address; they are empty where it is malformed."""
    try:
        return urllib.parse.urlsplit(address)
    except ValueError:
        return urllib.parse.urlsplit("")


class Handlers:
    """What answers the routes, each with the options of the address and the body."""

    def __init__(self, service: Service):
        self._service, self._limits = service, service.settings.limits
        page = importlib.resources.files("dmljax.serve").joinpath("page.html").read_text("utf-8")
        self._page, self._policy = page.encode(), _policy(page)

    async def page(self, options: api.Request) -> Response:
        headers = {"Content-Security-Policy": self._policy, "Cache-Control": "no-cache"}
        return Response(self._page, media_type="text/html; charset=utf-8", headers=headers)

    async def alive(self, options: api.Request) -> dict[str, str]:
        return {"status": "ready"}

    async def metrics(self, options: api.Request) -> Response:
        metrics = self._service.metrics
        if self._service.index is not None:
            count, version = await self._service.on_index(_state, self._service.index)
            metrics.items.set(count)
            metrics.version.set(version)
        return Response(metrics.text(), media_type=CONTENT_TYPE)

    async def info(self, options: api.Request) -> dict[str, Any]:
        service, bundle, state = self._service, self._service.bundle, None
        if service.index is not None:
            count, version = await service.on_index(_state, service.index)
            state = {"items": count, "version": version}
        return {
            "model": bundle.digest,
            "dimension": bundle.dimension,
            "similarity": bundle.similarity,
            "is_distance": SIMILARITIES[bundle.similarity].is_distance,
            "default_k": inputs.DEFAULT_K,
            "largest_k": inputs.LARGEST_K,
            "thresholds": bundle.thresholds,
            "false_match_rates": bundle.false_match_rates,
            "batch_sizes": bundle.batch_sizes,
            "input_shape": bundle.input_shape,
            "index": state,
            "text": bundle.has_text,
            "add": service.settings.allow_add,
            "delete": service.settings.allow_delete,
        }

    async def embed(self, options: api.Request, body: api.EmbedRequest) -> dict[str, Any]:
        return {"embeddings": await self._embeddings(body), "model": self._service.bundle.digest}

    async def _embeddings(self, body: api.EmbedRequest | api.SearchRequest) -> Any:
        if body.images is not None:
            return await self._service.embed(self._limited(body.images, "images"))
        return await self._service.embed_text(self._limited(body.texts, "texts"))

    async def search(self, options: api.Options, body: api.SearchRequest) -> dict[str, Any]:
        self._index()
        if body.ids is not None:
            return await self._hits(body, ids=body.ids)
        if body.vectors is not None:
            return await self._hits(body, vectors=body.vectors)
        return await self._hits(body, vectors=await self._embeddings(body))

    async def search_stored(self, options: api.StoredSearch) -> dict[str, Any]:
        return await self._hits(options, ids=options.id)

    async def _hits(
        self, options: api.Options, *, vectors: Any = None, ids: Sequence[str] = ()
    ) -> dict[str, Any]:
        index, pictures, bundle = self._index(), self._service.pictures, self._service.bundle
        count = len(self._limited(ids if vectors is None else vectors, "queries"))
        k = inputs.DEFAULT_K if options.k is None else options.k
        if count * k > self._limits.hits:
            raise Refused(
                413, f"k={k} for {count} queries: the limit is {self._limits.hits:,} hits in all"
            )
        allow_fewer = options.k is None if options.allow_fewer is None else options.allow_fewer
        threshold = inputs.threshold(options.threshold, bundle.thresholds)

        def search() -> dict[str, Any]:
            arguments = {"where": options.where, "threshold": threshold, "allow_fewer": allow_fewer}
            if vectors is None:
                results = index.search_ids(ids, k, **arguments)
            else:
                results = index.search(vectors, k, **arguments)
            answers = [[_shown(hit, pictures) for hit in hits] for hits in results]
            return {
                "results": [{"match": bool(hits), "hits": hits} for hits in answers],
                "threshold": threshold,
                "model": bundle.digest,
                "version": index.version,
                "k": k,
            }

        start = time.perf_counter()
        results = await self._service.on_index(search)
        self._service.metrics.search_seconds.observe(time.perf_counter() - start)
        return results

    async def items(self, options: api.ItemsRequest) -> dict[str, Any]:
        index, pictures = self._index(), self._service.pictures
        if options.id is None:
            call = functools.partial(_random_items, index, options.limit, options.seed)
        else:
            call = functools.partial(index.get, self._limited(options.id, "ids"))
        items = [_shown(item, pictures) for item in await self._service.on_index(call)]
        if not options.vectors:
            items = [{k: v for k, v in item.items() if k != "vector"} for item in items]
        return {"items": items}

    async def add(self, options: api.Request, body: api.AddRequest) -> dict[str, int]:
        self._check_allowed("add")
        index, items = self._index(), self._limited(body.items, "items")
        images = [item.image for item in items if item.image is not None]
        embedded = iter(await self._service.embed(images) if images else ())
        vectors = [next(embedded) if x.vector is None else x.vector for x in items]

        def add() -> dict[str, int]:
            ids, metadata = [item.id for item in items], [item.metadata for item in items]
            index.add(ids, vectors, metadata, replace=body.replace)
            return {"added": len(ids), "version": index.version}

        return await self._service.on_index(add)

    async def delete(self, options: api.IdsRequest) -> dict[str, int]:
        self._check_allowed("delete")
        index, ids = self._index(), self._limited(options.id, "ids")

        def delete() -> dict[str, int]:
            index.delete(ids)
            return {"deleted": len(ids), "version": index.version}

        return await self._service.on_index(delete)

    async def picture(self, options: api.IdsRequest) -> Response:
        index, name, data = self._index(), options.id[0], None
        # Files of the folder that belong to no item, such as a deleted one, are not shown.
        is_listed = name in self._service.pictures
        if is_listed and await self._service.on_index(index.contains, [name]) == [True]:
            data = await self._service.picture(name)
        if data is None:
            raise Refused(404, "the item has no picture")
        headers = {
            "Content-Disposition": "inline",
            "Cache-Control": "private, max-age=300",
            "Content-Security-Policy": "default-src 'none'; sandbox",
        }
        return Response(data, media_type="image/jpeg", headers=headers)

    def _index(self) -> Index:
        if self._service.index is None:
            raise Refused(404, "the service has no index: start it with --index")
        return self._service.index

    def _check_allowed(self, action: str) -> None:
        if not getattr(self._service.settings, f"allow_{action}"):
            raise Refused(403, f"this is off: the service is started without --allow-{action}")

    def _limited(self, values: Any, name: str) -> Any:
        if len(values) > (most := self._limits.entries):
            raise Refused(413, f"there are {len(values)} {name}: the limit is {most}")
        return values


def _policy(page: str) -> str:
    """Returns the policy of the page: its own script and style, and nothing of other hosts."""
    parts = [re.search(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL) for tag in ("script", "style")]
    hashes = [hashlib.sha256(part[1].encode()).digest() for part in parts if part]
    script, style = (base64.b64encode(x).decode() for x in hashes)
    return (
        "default-src 'self'; img-src 'self' blob: data:; "
        f"script-src 'sha256-{script}'; style-src 'sha256-{style}'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'"
    )


def _state(index: Index) -> tuple[int, int]:
    return index.count(), index.version


def _shown(item: Any, pictures: Pictures) -> dict[str, Any]:
    """Returns an item or a hit as it is answered."""
    return item._asdict() | {"picture": item.id in pictures}


def _random_items(index: Index, limit: int, seed: int) -> list[Any]:
    """Returns random items; of many, those near random vectors with the statistics of some."""
    rng = np.random.default_rng(seed)
    items = next(index.scan(_SCANNED), [])
    if len(items) < _SCANNED:  # these are all
        return [items[i] for i in rng.permutation(len(items))[:limit]]
    first = np.stack([item.vector for item in items])
    vectors = first.mean(axis=0) + first.std(axis=0) * rng.normal(size=(limit, index.dimension))
    if SIMILARITIES[index.similarity].needs_unit:
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    hits = index.search(vectors, 1, allow_fewer=True)
    return index.get(list(dict.fromkeys(hit.id for row in hits for hit in row)))
