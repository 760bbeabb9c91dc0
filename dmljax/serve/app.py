"""What answers the routes of `api`."""

import asyncio
import base64
import contextlib
import functools
import hashlib
import importlib.resources
import itertools
import json
import re
import threading
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from msgspec import UNSET
from starlette.datastructures import Headers, QueryParams
from starlette.responses import Response
from starlette.routing import Router

from dmljax.hints import NO_THRESHOLDS, hint
from dmljax.index import Index, InvalidInput, inputs
from dmljax.serve import api, formats
from dmljax.serve.api import Route
from dmljax.serve.budget import Claim
from dmljax.serve.errors import Refused
from dmljax.serve.generation import Generation, Service
from dmljax.serve.guard import Guard, client_left, read_body
from dmljax.serve.metrics import CONTENT_TYPE

_T = TypeVar("_T")
_MOST_LISTED = 100
_SCANNED = 5000  # items from which a random choice is exact
_BATCH = 100  # items that are in memory at a time for that
_UNWATCHED_SECONDS = 0.2  # before the connection of a client that waits is watched
_SMALL = 1 << 16  # bytes of bodies and answers that are converted with the request
_PIECE = 1 << 16  # bytes of an answer that wait for the client
# Bytes of a hit or an item beside its id and metadata: in the answer, and as objects.
_BYTES_OF_HIT, _OBJECTS_OF_HIT = 100, 600
_OBJECTS = 4  # bytes of objects and of the answer for a byte of metadata
_DIGITS = 24  # characters of a number in JSON, and bytes of it in a list


def create(service: Service) -> Guard:
    """The ASGI application of a service, to be run by uvicorn or another server."""
    handlers = _Handlers(service)

    @contextlib.asynccontextmanager
    async def lifespan(app: Router) -> AsyncIterator[None]:
        await service.start()
        yield
        await service.stop()

    lifespan_app = Router(lifespan=lifespan)

    async def dispatch(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await lifespan_app(scope, receive, send)
            return
        methods = api.ROUTES.get(scope["path"])
        if methods is None:
            raise Refused(404, "there is no such route; /openapi.json lists them")
        route = methods.get("GET" if scope["method"] == "HEAD" else scope["method"])
        if route is None:
            raise Refused(405, f"this route has {', '.join(methods)}")
        call = _Call(route, scope, receive, service)
        try:
            response = await call.respond(await getattr(handlers, route.handler)(call))
        finally:
            call.end_watch()
        await response(scope, receive, send)

    return Guard(dispatch, service, frozenset(api.ROUTES))


class _Call:
    """A request of a route: its options, and its body when it is needed."""

    def __init__(self, route: Route, scope: Any, receive: Any, service: Service):
        self._route, self._service, self._receive = route, service, receive
        self._headers = Headers(scope=scope)
        self.claim, self._ending = scope["claim"], scope["ending"]
        self._watch: asyncio.TimerHandle | asyncio.Task | None = None
        self.size = _Size(self.claim, service.settings.limits.answer_bytes)
        options = QueryParams(scope["query_string"]).multi_items()
        self.options: Any = formats.query(options, route.query)

    def _start_watch(self) -> None:
        """Ends the request if the client goes away: nobody needs its answer."""

        async def watch() -> None:
            await self._receive()  # after the body there is only the end of the connection
            self._ending.end(client_left())

        self._watch = asyncio.create_task(watch())

    def end_watch(self) -> None:
        if self._watch is not None:
            self._watch.cancel()

    async def body(self) -> Any:
        """The body as the type of the route, with the options of the address that it leaves out."""
        limits, kind = self._service.settings.limits, formats.content_type(self._headers)
        most = limits.image_bytes if formats.is_image(kind) else limits.body_bytes
        data = await read_body(
            self._receive,
            self._headers.get("content-length"),
            self.claim,
            self._ending,
            most=most,
            seconds=limits.body_seconds,
        )
        # Answers that come at once are not watched, since a task takes time.
        loop = asyncio.get_running_loop()
        self._watch = loop.call_later(_UNWATCHED_SECONDS, self._start_watch)
        assert self._route.body is not None
        if self._route.images and formats.is_image(kind):
            body: Any = self._route.body(images=[data])
        elif self._route.images and kind == "multipart/form-data":
            self.claim.take(2 * len(data))
            ended = threading.Event()
            try:
                images = await self._service.convert(
                    formats.images_of_form, self._headers, data, limits, ended.is_set
                )
            finally:
                ended.set()
            body = self._route.body(images=images)
        else:
            decode = functools.partial(formats.decode, most=limits.values)
            arguments = kind, data, self._route.body, self.claim
            is_small = len(data) <= _SMALL
            body = (
                decode(*arguments) if is_small else await self._service.convert(decode, *arguments)
            )
        for name in self.options.__struct_fields__:
            if getattr(body, name) is UNSET:
                setattr(body, name, getattr(self.options, name))
        return body

    async def respond(self, answer: Any) -> Response:
        """An answer in the format that the client asks for."""
        accept = self._headers.get("accept", "")
        if isinstance(answer, Response):
            return answer
        if isinstance(answer, api.Embeddings) and accept.startswith(formats.FLOATS):
            shape = ",".join(map(str, answer.embeddings.shape))
            headers = {"X-Shape": shape, "X-Model": answer.model}
            data = answer.embeddings.astype("<f4", copy=False).tobytes()
            return _Answer(data, media_type=formats.FLOATS, headers=headers)
        if self.size.bytes <= _SMALL:
            data, kind = formats.encode(answer, accept)
        else:
            data, kind = await self._service.convert(formats.encode, answer, accept)
        return _Answer(data, status_code=self._route.status, media_type=kind)


class _Answer(Response):
    """A response that is written piece by piece, as the client takes it."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = memoryview(self.body)
        if len(body) <= _PIECE:
            await super().__call__(scope, receive, send)
            return
        start = {"type": "http.response.start", "status": self.status_code}
        await send(start | {"headers": self.raw_headers})
        for position in range(0, len(body), _PIECE):
            piece = bytes(body[position : position + _PIECE])
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class _Handlers:
    """What answers the routes. Handlers raise `Refused` and errors of the index and of images."""

    def __init__(self, service: Service):
        self._service, self._limits = service, service.settings.limits
        page = importlib.resources.files("dmljax.serve").joinpath("page.html").read_text("utf-8")
        self._page = page.encode()
        self._policy = _policy(page)
        self._description = json.dumps(api.description(service.settings)).encode()

    async def page(self, call: _Call) -> Response:
        headers = {"Content-Security-Policy": self._policy, "Cache-Control": "no-cache"}
        return Response(self._page, media_type="text/html; charset=utf-8", headers=headers)

    async def alive(self, call: _Call) -> api.Status:
        return api.Status("alive")

    async def ready(self, call: _Call) -> api.Status:
        with self._service.use():
            return api.Status("ready")

    async def metrics(self, call: _Call) -> Response:
        metrics = self._service.metrics
        generation = self._service.current
        if generation is not None and generation.index is not None:
            with self._service.use() as generation:
                count, version = await self._service.on_index(_state, _index(generation))
            metrics.items.set(count)
            metrics.version.set(version)
        return Response(metrics.text(), media_type=CONTENT_TYPE)

    async def openapi(self, call: _Call) -> Response:
        return Response(self._description, media_type="application/json")

    async def info(self, call: _Call) -> api.Info:
        settings = self._service.settings
        with self._service.use() as generation:
            bundle, index = generation.bundle, generation.index
            state = None
            if index is not None:
                counts = await self._service.on_index(_state, index)
                state = api.IndexState(*counts)
            return api.Info(
                model=bundle.digest,
                dimension=bundle.dimension,
                similarity=bundle.similarity,
                thresholds=bundle.thresholds,
                false_match_rates=bundle.false_match_rates,
                batch_sizes=bundle.batch_sizes,
                input_shape=bundle.input_shape,
                index=state,
                text=bundle.has_text,
                add=settings.allow_add,
                delete=settings.allow_delete,
            )

    async def embed(self, call: _Call) -> api.Embeddings:
        with self._service.use() as generation:
            embeddings = await self._embeddings(generation, await call.body(), call.claim)
            return api.Embeddings(embeddings, generation.bundle.digest)

    async def _embeddings(
        self, generation: Generation, body: api.EmbedRequest | api.SearchRequest, claim: Claim
    ) -> np.ndarray:
        if body.texts is UNSET:
            return await self._embed(generation, body.images, claim)
        _limited(body.texts, "texts", self._limits.queries)
        return await self._service.embed_text(generation, body.texts, claim)

    async def _embed(self, generation: Generation, images: list[bytes], claim: Claim) -> np.ndarray:
        _limited(images, "images", self._limits.images)
        return await self._service.embed(generation, images, claim)

    async def search(self, call: _Call) -> api.Results:
        with self._service.use() as generation:
            index = _index(generation)
            body = await call.body()
            if body.ids is not UNSET:
                return await self._hits(generation, body, call, ids=body.ids)
            if body.vectors is UNSET:
                vectors = await self._embeddings(generation, body, call.claim)
            else:
                most = self._limits.queries
                vectors = formats.vectors_of(body.vectors, index.dimension, most=most)
            return await self._hits(generation, body, call, vectors=vectors)

    async def search_stored(self, call: _Call) -> api.Results:
        with self._service.use() as generation:
            return await self._hits(generation, call.options, call, ids=call.options.id)

    async def _hits(
        self,
        generation: Generation,
        options: api.Options,
        call: _Call,
        *,
        vectors: np.ndarray | None = None,
        ids: Sequence[str] = (),
    ) -> api.Results:
        index = _index(generation)
        _limited(ids, "ids", self._limits.queries)
        names = api.Options.__struct_fields__
        arguments = {x: getattr(options, x) for x in names if getattr(options, x) is not UNSET}
        arguments = {"k": inputs.DEFAULT_K, "allow_fewer": "k" not in arguments} | arguments
        threshold = _threshold(arguments.get("threshold"), generation.bundle.thresholds)
        arguments["threshold"] = threshold
        start = time.perf_counter()

        pictures, size = generation.pictures, call.size
        count = len(ids) if vectors is None else len(vectors)
        k = arguments["k"]
        if isinstance(k, int) and 0 < k <= inputs.LARGEST_K:  # else the index refuses it
            size.count_hits(count * k)

        def search() -> tuple[list[api.Result], int]:
            with contextlib.nullcontext():
                if vectors is None:
                    results = index.search_ids(ids, **arguments)
                else:
                    results = index.search(vectors, **arguments)
            answers = [
                [api.Hit(x.id, float(x.similarity), x.metadata, x.id in pictures) for x in hits]
                for hits in results
            ]
            return [api.Result(bool(hits), hits) for hits in answers], index.version

        results, version = await self._service.on_index(
            search, client=call.claim.client, work=count
        )
        self._service.metrics.search_seconds.observe(time.perf_counter() - start)
        return api.Results(results, threshold, generation.bundle.digest, version, k)

    async def items(self, call: _Call) -> api.Items:
        options = call.options
        with self._service.use() as generation:
            index = _index(generation)
            size = call.size
            if options.id is not UNSET:
                count = len(_limited(options.id, "ids", self._limits.items))
            elif 1 <= (count := options.limit) <= _MOST_LISTED:
                pass
            else:
                raise Refused(422, f"limit={count}: choose 1 to {_MOST_LISTED}")
            size.count_hits(count)
            if options.vectors:
                size.count_text(count * index.dimension * _DIGITS)

            def read() -> list[Any]:
                if options.id is UNSET:
                    return _some(index, count, options.seed, size)
                with contextlib.nullcontext():
                    return index.get(options.id)

            items = await self._service.on_index(read, client=call.claim.client)
            return api.Items(
                [
                    api.Item(
                        item.id,
                        item.metadata,
                        item.id in generation.pictures,
                        item.vector if options.vectors else UNSET,
                    )
                    for item in items
                ]
            )

    async def add(self, call: _Call) -> api.Added:
        if not self._service.settings.allow_add:
            raise Refused(403, "adding is off: the service is started without --allow-add")
        with self._service.use() as generation:
            index = _index(generation)
            body = await call.body()
            items = _limited(body.items, "items", self._limits.items)
            images = [item.image for item in items if item.image is not UNSET]
            embedded = iter(await self._embed(generation, images, call.claim) if images else ())
            vectors = [
                next(embedded)
                if item.vector is UNSET
                else formats.vectors_of(
                    item.vector if isinstance(item.vector, bytes) else [item.vector],
                    index.dimension,
                    most=1,
                )[0]
                for item in items
            ]
            arrays = np.stack([np.asarray(vector, np.float64) for vector in vectors])
            ids, metadata = [item.id for item in items], [item.metadata for item in items]

            def add() -> int:
                index.add(ids, arrays, metadata, replace=body.replace)
                return index.version

            return api.Added(len(ids), await self._service.on_index(add, client=call.claim.client))

    async def delete(self, call: _Call) -> api.Deleted:
        if not self._service.settings.allow_delete:
            raise Refused(403, "deleting is off: the service is started without --allow-delete")
        with self._service.use() as generation:
            index = _index(generation)
            ids = _limited(call.options.id, "ids", self._limits.items)

            def delete() -> int:
                index.delete(ids)
                return index.version

            return api.Deleted(
                len(ids), await self._service.on_index(delete, client=call.claim.client)
            )

    async def picture(self, call: _Call) -> Response:
        name, data = call.options.id[0], None
        with self._service.use() as generation:
            # Files of the folder that belong to no item, such as a deleted one, are not shown.
            if name in generation.pictures and await self._service.on_index(
                _index(generation).contains, [name]
            ) == [True]:
                data = await self._service.picture(generation, name, call.claim)
        if data is None:
            raise Refused(404, "there is no picture of this item")
        headers = {
            "Content-Disposition": "inline",
            "Cache-Control": "private, max-age=300",
            "Content-Security-Policy": "default-src 'none'; sandbox",
        }
        return Response(data, media_type="image/jpeg", headers=headers)


def _policy(page: str) -> str:
    """The policy of the page: its own script and style, and nothing of other hosts."""

    def digest(tag: str) -> str:
        match = re.search(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        assert match is not None
        return base64.b64encode(hashlib.sha256(match.group(1).encode()).digest()).decode()

    return (
        "default-src 'self'; img-src 'self' blob: data:; "
        f"script-src 'sha256-{digest('script')}'; style-src 'sha256-{digest('style')}'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'"
    )


def _index(generation: Generation) -> Index:
    if generation.index is None:
        raise Refused(404, "the service has no index: it only embeds")
    return generation.index


def _state(index: Index) -> tuple[int, int]:
    return index.count(), index.version


class _Size:
    """The size of an answer, while it is found out; the memory for it is taken from a claim."""

    def __init__(self, claim: Claim, most: int):
        self._claim, self._most, self.bytes = claim, most, 0

    def count_hits(self, count: int) -> None:
        self._count(_BYTES_OF_HIT * count, _OBJECTS_OF_HIT * count)

    def count_text(self, count: int) -> None:
        self._count(count, _OBJECTS * count)

    def _count(self, of_answer: int, of_memory: int) -> None:
        self.bytes += of_answer
        if self.bytes > self._most:
            raise Refused(
                413,
                f"the answer would be larger than the limit of {self._most:,} bytes: ask for "
                "fewer items, or in several requests",
            )
        self._claim.take(of_memory)


def _some(index: Index, limit: int, seed: int, size: _Size) -> list[Any]:
    """Items chosen at random: exactly where there are few, else those near random vectors."""
    rng = np.random.default_rng(seed)
    count = index.count()
    if not count:
        return []
    if count <= _SCANNED:
        chosen = {int(row): i for i, row in enumerate(rng.permutation(count)[:limit])}
        items: dict[int, Any] = {}
        rows = itertools.chain.from_iterable(index.scan(_BATCH))
        for row, item in enumerate(rows):
            if row in chosen:
                size.count_text(len(item.id) + len(json.dumps(item.metadata)))
                items[chosen[row]] = item
        return [items[i] for i in sorted(items)]
    vectors = rng.normal(size=(limit, index.dimension))
    if index.similarity == "cosine":
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    else:  # random vectors with the mean and the deviation of the first items
        first = np.stack([item.vector for item in next(iter(index.scan(_SCANNED)))])
        vectors = first.mean(axis=0) + first.std(axis=0) * vectors
    with contextlib.nullcontext():
        hits = index.search(vectors, 1, allow_fewer=True)
    return index.get(list(dict.fromkeys(hit.id for row in hits for hit in row)))


def _limited(values: Sequence[_T], name: str, most: int) -> Sequence[_T]:
    if len(values) > most:
        raise Refused(413, f"there are {len(values)} {name}: the limit is {most}")
    return values


def _threshold(value: Any, thresholds: Mapping[str, float]) -> Any:
    """A similarity: `value`, or the similarity of the threshold `value`. The index checks it."""
    if isinstance(value, str):
        if value not in thresholds:
            raise InvalidInput(
                f"threshold {ascii(value)[:60]} is neither a similarity nor one of the bundle"
                f"{hint(value[:60], thresholds) if thresholds else NO_THRESHOLDS}"
            )
        return thresholds[value]
    return value
