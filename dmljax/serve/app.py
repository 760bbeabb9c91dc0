"""The routes."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import importlib.resources
import json
import re
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Router

from dmljax.hints import hint
from dmljax.index import Index, InvalidInput
from dmljax.serve import formats
from dmljax.serve.errors import Refused
from dmljax.serve.generation import Generation, Service
from dmljax.serve.guard import Guard, read_body
from dmljax.serve.metrics import CONTENT_TYPE
from dmljax.serve.openapi import description

__all__ = ["create"]

_DEFAULT_K = 10
_MOST_LISTED = 100
_SCANNED = 5000  # items from which a random choice is exact
_SEARCH_FIELDS = ("images", "vectors", "ids", "k", "threshold", "where", "exact", "allow_fewer")
_SEARCH_OPTIONS = ("k", "threshold", "where", "exact", "allow_fewer")


def create(service: Service) -> Guard:
    """The ASGI application of a service, to be run by uvicorn or another server."""
    routes = _Routes(service)

    @contextlib.asynccontextmanager
    async def lifespan(app: Router) -> AsyncIterator[None]:
        await service.start()
        yield
        await service.stop()

    handlers = {
        "/": {"GET": routes.page},
        "/embed": {"POST": routes.embed},
        "/search": {"GET": routes.search_stored, "POST": routes.search},
        "/items": {"GET": routes.items, "POST": routes.add, "DELETE": routes.delete},
        "/items/image": {"GET": routes.picture},
        "/info": {"GET": routes.info},
        "/healthz": {"GET": routes.alive},
        "/readyz": {"GET": routes.ready},
        "/metrics": {"GET": routes.metrics},
        "/openapi.json": {"GET": routes.openapi},
    }
    lifespan_app = Router(lifespan=lifespan)

    async def dispatch(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await lifespan_app(scope, receive, send)
            return
        methods = handlers.get(scope["path"])
        if methods is None:
            raise Refused(404, "there is no such route; /openapi.json lists them")
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        if method not in methods:
            raise Refused(405, f"this route has {', '.join(methods)}")
        response = await methods[method](Request(scope, receive))
        await response(scope, receive, send)

    return Guard(dispatch, service, frozenset(handlers))


class _Routes:
    """The handlers. They raise `Refused` and errors of the index and of images."""

    def __init__(self, service: Service):
        self._service, self._limits = service, service.settings.limits
        page = importlib.resources.files("dmljax.serve").joinpath("page.html").read_text("utf-8")
        self._page = page.encode()
        self._policy = _policy(page)
        self._description = json.dumps(description(service.settings)).encode()

    async def page(self, request: Request) -> Response:
        headers = {"Content-Security-Policy": self._policy, "Cache-Control": "no-cache"}
        return Response(self._page, media_type="text/html; charset=utf-8", headers=headers)

    async def alive(self, request: Request) -> Response:
        return _json({"status": "alive"})

    async def ready(self, request: Request) -> Response:
        with self._service.use():
            return _json({"status": "ready"})

    async def metrics(self, request: Request) -> Response:
        metrics = self._service.metrics
        generation = self._service.current
        if generation is not None and generation.index is not None:
            with self._service.use() as generation:
                index = generation.index
                assert index is not None
                count, version = await self._service.on_index(_state, index)
            metrics.items.set(count)
            metrics.version.set(version)
        return Response(metrics.text(), media_type=CONTENT_TYPE)

    async def openapi(self, request: Request) -> Response:
        return Response(self._description, media_type="application/json")

    async def info(self, request: Request) -> Response:
        settings = self._service.settings
        with self._service.use() as generation:
            bundle, index = generation.bundle, generation.index
            content = {
                "model": bundle.digest,
                "dimension": bundle.dimension,
                "similarity": bundle.similarity,
                "thresholds": bundle.thresholds,
                "batch_sizes": bundle.batch_sizes,
                "input_shape": bundle.input_shape,
                "index": None,
                "add": settings.allow_add,
                "delete": settings.allow_delete,
            }
            if index is not None:
                count, version = await self._service.on_index(_state, index)
                content["index"] = {"items": count, "version": version}
            return self._answer(request, content)

    async def embed(self, request: Request) -> Response:
        with self._service.use() as generation:
            kind, body = await self._body(request)
            _query(request, ())
            if formats.is_image(kind) or kind == "multipart/form-data":
                images = await formats.images_of(kind, request.headers, body, self._limits)
            else:
                images = self._images(formats.fields(kind, body, names=("images",)).get("images"))
            embeddings = await self._service.embed(generation, images)
            model = generation.bundle.digest
        if request.headers.get("accept", "").startswith(formats.FLOATS):
            headers = {"X-Shape": ",".join(map(str, embeddings.shape)), "X-Model": model}
            data = embeddings.astype("<f4", copy=False).tobytes()
            return Response(data, media_type=formats.FLOATS, headers=headers)
        return self._answer(request, {"embeddings": embeddings, "model": model})

    async def search(self, request: Request) -> Response:
        with self._service.use() as generation:
            index = _index(generation)
            kind, body = await self._body(request)
            options = _query(request, _SEARCH_OPTIONS)
            images: list[bytes] = []
            vectors, ids = None, None
            if formats.is_image(kind) or kind == "multipart/form-data":
                images = await formats.images_of(kind, request.headers, body, self._limits)
            else:
                content = formats.fields(kind, body, names=_SEARCH_FIELDS)
                if len(content.keys() & {"images", "vectors", "ids"}) != 1:
                    raise Refused(400, "give one of images, vectors and ids")
                if "images" in content:
                    images = self._images(content["images"])
                elif "vectors" in content:
                    most = self._limits.queries
                    vectors = formats.vectors_of(content["vectors"], index.dimension, most=most)
                else:
                    ids = _list(content["ids"], "ids", most=self._limits.queries)
                options |= {name: content[name] for name in _SEARCH_OPTIONS if name in content}
            if images:
                vectors = await self._service.embed(generation, images)
            return await self._hits(request, generation, options, vectors=vectors, ids=ids)

    async def search_stored(self, request: Request) -> Response:
        options = _query(request, ("id", *_SEARCH_OPTIONS))
        ids = request.query_params.getlist("id")
        options.pop("id", None)
        if not ids:
            raise Refused(400, "id is missing: /search?id=ID, or POST an image")
        with self._service.use() as generation:
            _index(generation)
            ids = _list(ids, "ids", most=self._limits.queries)
            return await self._hits(request, generation, options, vectors=None, ids=ids)

    async def _hits(
        self,
        request: Request,
        generation: Generation,
        options: dict[str, Any],
        *,
        vectors: np.ndarray | None,
        ids: list[str] | None,
    ) -> Response:
        index = _index(generation)
        exact, fewer = options.get("exact", False), options.get("allow_fewer", "k" not in options)
        if not isinstance(exact, bool) or not isinstance(fewer, bool):
            raise Refused(400, "exact and allow_fewer are true or false")
        threshold = _threshold(options.get("threshold"), generation.bundle.thresholds)
        arguments = {
            "where": options.get("where"),
            "exact": exact,
            "threshold": threshold,
            "allow_fewer": fewer,
        }
        k = options.get("k", _DEFAULT_K)
        start = time.perf_counter()

        def search() -> tuple[Any, int]:
            if ids is not None:
                return index.search_ids(ids, k, **arguments), index.version
            return index.search(vectors, k, **arguments), index.version

        results, version = await self._service.on_index(search)
        self._service.metrics.search_seconds.observe(time.perf_counter() - start)
        pictures = generation.pictures
        content = {
            "results": [
                {
                    "match": bool(hits),
                    "hits": [
                        {
                            "id": hit.id,
                            "similarity": float(hit.similarity),
                            "metadata": hit.metadata,
                            "picture": hit.id in pictures,
                        }
                        for hit in hits
                    ],
                }
                for hits in results
            ],
            "threshold": threshold,
            "model": generation.bundle.digest,
            "version": version,
        }
        return self._answer(request, content)

    async def items(self, request: Request) -> Response:
        options = _query(request, ("id", "limit", "seed", "vectors"))
        ids = request.query_params.getlist("id")
        with self._service.use() as generation:
            index = _index(generation)
            if ids:
                ids = _list(ids, "ids", most=self._limits.items)
                items = await self._service.on_index(index.get, ids)
            else:
                limit, seed = _number(options, "limit", 24), _number(options, "seed", 0)
                if not 1 <= limit <= _MOST_LISTED:
                    raise Refused(422, f"limit={limit}: choose 1 to {_MOST_LISTED}")
                items = await self._service.on_index(_some, index, limit, seed)
            with_vectors = options.get("vectors", False) is True
            content = [
                {
                    "id": item.id,
                    "metadata": item.metadata,
                    "picture": item.id in generation.pictures,
                    **({"vector": item.vector} if with_vectors else {}),
                }
                for item in items
            ]
            return self._answer(request, {"items": content})

    async def add(self, request: Request) -> Response:
        if not self._service.settings.allow_add:
            raise Refused(403, "adding is off: the service is started without --allow-add")
        with self._service.use() as generation:
            index = _index(generation)
            kind, body = await self._body(request)
            _query(request, ())
            content = formats.fields(kind, body, names=("items", "replace"))
            items = _list(content.get("items"), "items", most=self._limits.items, kind=dict)
            replace = content.get("replace", False)
            if not isinstance(replace, bool):
                raise Refused(400, "replace is true or false")
            vectors = await self._vectors_of_items(generation, items)
            ids = [item.get("id") for item in items]
            metadata = [item.get("metadata") for item in items]

            def add() -> int:
                index.add(ids, vectors, metadata, replace=replace)
                return index.version

            version = await self._service.on_index(add)
            return self._answer(request, {"added": len(ids), "version": version}, status=201)

    async def _vectors_of_items(self, generation: Generation, items: list[Any]) -> np.ndarray:
        images = []
        for item in items:
            for name in item:
                if name not in ("id", "image", "vector", "metadata"):
                    raise Refused(400, f"an item has the unknown field {ascii(name)[:60]}")
            if ("image" in item) == ("vector" in item):
                raise Refused(400, "an item has an image or a vector")
            if "image" in item:
                images.append(formats.binary(item["image"], "image"))
        if len(images) > self._limits.images:
            limit = self._limits.images
            raise Refused(413, f"there are {len(images)} images: the limit is {limit}")
        embedded = iter(await self._service.embed(generation, images) if images else ())
        dimension = generation.bundle.dimension
        rows = []
        for item in items:
            if "image" in item:
                rows.append(next(embedded))
            else:
                vector = item["vector"]
                vector = vector if isinstance(vector, bytes) else [vector]
                rows.append(formats.vectors_of(vector, dimension, most=1)[0])
        return np.stack([np.asarray(row, np.float64) for row in rows])

    async def delete(self, request: Request) -> Response:
        if not self._service.settings.allow_delete:
            raise Refused(403, "deleting is off: the service is started without --allow-delete")
        _query(request, ("id",))
        ids = request.query_params.getlist("id")
        if not ids:
            raise Refused(400, "id is missing: DELETE /items?id=ID")
        with self._service.use() as generation:
            index = _index(generation)
            ids = _list(ids, "ids", most=self._limits.items)

            def delete() -> int:
                index.delete(ids)
                return index.version

            version = await self._service.on_index(delete)
            return self._answer(request, {"deleted": len(ids), "version": version})

    async def picture(self, request: Request) -> Response:
        _query(request, ("id",))
        name = request.query_params.get("id", "")
        data = None
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

    async def _body(self, request: Request) -> tuple[str, bytes]:
        limits = self._limits
        kind = formats.content_type(request.headers)
        most = limits.image_bytes if formats.is_image(kind) else limits.body_bytes
        return kind, await read_body(request, most=most, seconds=limits.body_seconds)

    def _images(self, value: Any) -> list[bytes]:
        values = _list(value, "images", most=self._limits.images, kind=(str, bytes))
        return [formats.binary(image, "an image") for image in values]

    def _answer(self, request: Request, content: Any, *, status: int = 200) -> Response:
        data, kind = formats.encode(content, request.headers.get("accept", ""))
        return Response(data, status_code=status, media_type=kind)


def _json(content: Any) -> Response:
    return Response(json.dumps(content), media_type="application/json")


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


def _query(request: Request, names: tuple[str, ...]) -> dict[str, Any]:
    """The options in the query of the address. Values are JSON, or text where they are not."""
    options: dict[str, Any] = {}
    for name, text in request.query_params.multi_items():
        if name not in names:
            possible = f"; possible: {', '.join(names)}" if names else ""
            raise Refused(400, f"the option {ascii(name)[:60]} is unknown{possible}")
        if name == "id":
            continue
        if name in options:
            raise Refused(400, f"the option {name} is given twice")
        try:
            options[name] = json.loads(text)
        except (ValueError, RecursionError):
            options[name] = text
    return options


def _number(options: Mapping[str, Any], name: str, default: int) -> int:
    value = options.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise Refused(400, f"{name} is not a whole number from 0 on")
    return value


def _list(value: Any, name: str, *, most: int, kind: Any = str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise Refused(400, f"{name} is not a list with one entry at least")
    if len(value) > most:
        raise Refused(413, f"there are {len(value)} {name}: the limit is {most}")
    if not all(isinstance(entry, kind) for entry in value):
        raise Refused(400, f"an entry of {name} is of another type")
    return value


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
