"""What answers the routes of `api`."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import importlib.resources
import json
import re
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Router

from dmljax.hints import hint
from dmljax.index import Index, InvalidInput
from dmljax.serve import api, formats
from dmljax.serve.api import Route
from dmljax.serve.errors import Refused
from dmljax.serve.generation import Generation, Service
from dmljax.serve.guard import Guard, read_body
from dmljax.serve.metrics import CONTENT_TYPE
from dmljax.serve.settings import Limits

__all__ = ["create"]

_T = TypeVar("_T")
_DEFAULT_K = 10
_MOST_LISTED = 100
_SCANNED = 5000  # items from which a random choice is exact


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
        call = _Call(route, Request(scope, receive), service.settings.limits)
        response = call.respond(await getattr(handlers, route.handler)(call))
        await response(scope, receive, send)

    return Guard(dispatch, service, frozenset(api.ROUTES))


class _Call:
    """A request of a route: its options, and its body when it is needed."""

    def __init__(self, route: Route, request: Request, limits: Limits):
        self._route, self._limits, self._headers = route, limits, request.headers
        self._request = request
        self.options: Any = formats.query(request.query_params.multi_items(), route.query)

    async def body(self) -> Any:
        """The body as the type of the route, with the options of the address that it leaves out."""
        limits, kind = self._limits, formats.content_type(self._headers)
        most = limits.image_bytes if formats.is_image(kind) else limits.body_bytes
        data = await read_body(self._request, most=most, seconds=limits.body_seconds)
        assert self._route.body is not None
        if self._route.images and (formats.is_image(kind) or kind == "multipart/form-data"):
            images = await formats.images_of(kind, self._headers, data, limits)
            body: Any = self._route.body(images=images)
        else:
            body = formats.decode(kind, data, self._route.body)
        for name in self.options.__struct_fields__:
            if getattr(body, name) is UNSET:
                setattr(body, name, getattr(self.options, name))
        return body

    def respond(self, answer: Any) -> Response:
        """An answer in the format that the client asks for."""
        accept = self._headers.get("accept", "")
        if isinstance(answer, Response):
            return answer
        if isinstance(answer, api.Embeddings) and accept.startswith(formats.FLOATS):
            shape = ",".join(map(str, answer.embeddings.shape))
            headers = {"X-Shape": shape, "X-Model": answer.model}
            data = answer.embeddings.astype("<f4", copy=False).tobytes()
            return Response(data, media_type=formats.FLOATS, headers=headers)
        data, kind = formats.encode(answer, accept)
        return Response(data, status_code=self._route.status, media_type=kind)


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
                state = api.IndexState(*counts, generation.verified, generation.damaged)
            return api.Info(
                model=bundle.digest,
                dimension=bundle.dimension,
                similarity=bundle.similarity,
                thresholds=bundle.thresholds,
                batch_sizes=bundle.batch_sizes,
                input_shape=bundle.input_shape,
                index=state,
                text=bundle.has_text,
                add=settings.allow_add,
                delete=settings.allow_delete,
            )

    async def embed(self, call: _Call) -> api.Embeddings:
        with self._service.use() as generation:
            embeddings = await self._embed(generation, (await call.body()).images)
            return api.Embeddings(embeddings, generation.bundle.digest)

    async def _embed(self, generation: Generation, images: list[bytes]) -> np.ndarray:
        _limited(images, "images", self._limits.images)
        return await self._service.embed(generation, images)

    async def search(self, call: _Call) -> api.Results:
        with self._service.use() as generation:
            index = _index(generation)
            body = await call.body()
            if body.ids is not UNSET:
                return await self._hits(generation, body, ids=body.ids)
            if body.images is not UNSET:
                vectors = await self._embed(generation, body.images)
            elif body.texts is not UNSET:
                _limited(body.texts, "texts", self._limits.queries)
                vectors = await self._service.embed_text(generation, body.texts)
            else:
                most = self._limits.queries
                vectors = formats.vectors_of(body.vectors, index.dimension, most=most)
            return await self._hits(generation, body, vectors=vectors)

    async def search_stored(self, call: _Call) -> api.Results:
        with self._service.use() as generation:
            return await self._hits(generation, call.options, ids=call.options.id)

    async def _hits(
        self,
        generation: Generation,
        options: api.Options,
        *,
        vectors: np.ndarray | None = None,
        ids: Sequence[str] = (),
    ) -> api.Results:
        index = _index(generation)
        _limited(ids, "ids", self._limits.queries)
        names = api.Options.__struct_fields__
        arguments = {x: getattr(options, x) for x in names if getattr(options, x) is not UNSET}
        arguments = {"k": _DEFAULT_K, "allow_fewer": "k" not in arguments} | arguments
        threshold = _threshold(arguments.get("threshold"), generation.bundle.thresholds)
        arguments["threshold"] = threshold
        start = time.perf_counter()

        def search() -> tuple[Any, int]:
            if vectors is None:
                return index.search_ids(ids, **arguments), index.version
            return index.search(vectors, **arguments), index.version

        results, version = await self._service.on_index(search)
        self._service.metrics.search_seconds.observe(time.perf_counter() - start)
        pictures = generation.pictures
        exact = results.exact
        answers = [
            [api.Hit(x.id, float(x.similarity), x.metadata, x.id in pictures) for x in hits]
            for hits in results
        ]
        results = [api.Result(bool(hits), hits) for hits in answers]
        return api.Results(results, threshold, generation.bundle.digest, version, exact)

    async def items(self, call: _Call) -> api.Items:
        options = call.options
        with self._service.use() as generation:
            index = _index(generation)
            if options.id is not UNSET:
                _limited(options.id, "ids", self._limits.items)
                items = await self._service.on_index(index.get, options.id)
            else:
                if not 1 <= options.limit <= _MOST_LISTED:
                    raise Refused(422, f"limit={options.limit}: choose 1 to {_MOST_LISTED}")
                items = await self._service.on_index(_some, index, options.limit, options.seed)
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
            embedded = iter(await self._embed(generation, images) if images else ())
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

            return api.Added(len(ids), await self._service.on_index(add))

    async def delete(self, call: _Call) -> api.Deleted:
        if not self._service.settings.allow_delete:
            raise Refused(403, "deleting is off: the service is started without --allow-delete")
        with self._service.use() as generation:
            index = _index(generation)
            ids = _limited(call.options.id, "ids", self._limits.items)

            def delete() -> int:
                index.delete(ids)
                return index.version

            return api.Deleted(len(ids), await self._service.on_index(delete))

    async def picture(self, call: _Call) -> Response:
        name, data = call.options.id[0], None
        with self._service.use() as generation:
            # Files of the folder that belong to no item, such as a deleted one, are not shown.
            if name in generation.pictures and await self._service.on_index(
                _index(generation).contains, [name]
            ) == [True]:
                data = await self._service.on_decoder(generation.pictures.read, name)
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


def _some(index: Index, limit: int, seed: int) -> list[Any]:
    """Items chosen at random: exactly where there are few, else those near random vectors."""
    rng = np.random.default_rng(seed)
    count = index.count()
    if not count:
        return []
    if count <= _SCANNED:
        items = next(iter(index.scan(_SCANNED)), [])
        return [items[i] for i in rng.permutation(len(items))[:limit]]
    vectors = rng.normal(size=(limit, index.dimension))
    if index.similarity == "cosine":
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    else:  # random vectors with the mean and the deviation of the first items
        first = np.stack([item.vector for item in next(iter(index.scan(_SCANNED)))])
        vectors = first.mean(axis=0) + first.std(axis=0) * vectors
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
                f"{hint(value[:60], thresholds)}"
            )
        return thresholds[value]
    return value
