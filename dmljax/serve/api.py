"""The routes: what each takes and answers, said once.

Requests are checked against these types (`formats.decode`, `formats.query`), and `/openapi.json` is
derived from them. The index itself checks `k`, `threshold`, `where`, vectors and ids.
"""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from dmljax.index import inputs
from dmljax.serve.settings import Settings

# The page asks for the token itself; probes have none.
OPEN_ROUTES = ("/", "/healthz", "/readyz", "/openapi.json")

Vector = list[float] | bytes  # bytes are float32, little-endian
Images = Annotated[list[bytes], Meta(min_length=1, description="base64 in JSON")]
Ids = Annotated[list[str], Meta(min_length=1, description="ids of stored items")]

_JSON, _JPEG, _FLOATS = "application/json", "image/jpeg", "application/octet-stream"
_BINARY = {"schema": {"type": "string", "format": "binary"}}
_COUNT = {"type": "integer", "minimum": 1, "maximum": inputs.LARGEST_K}
_NAMED = {"type": ["number", "string"]}


def _schema(text: str, extra: dict[str, Any] | None = None) -> Meta:
    return Meta(description=text, extra_json_schema=extra)


class Request(Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of a body, or options in the query of an address."""


Texts = Annotated[list[str], Meta(min_length=1, description="if the bundle embeds words")]


class EmbedRequest(Request):
    images: Images | UnsetType = UNSET
    texts: Texts | UnsetType = UNSET

    def __post_init__(self):
        if (self.images is UNSET) == (self.texts is UNSET):
            raise ValueError("give images or texts")


class Options(Request):
    """How to search. The index checks the values that have any type here."""

    k: Annotated[
        Any, _schema(f"how many; fewer are an error. By default up to {inputs.DEFAULT_K}", _COUNT)
    ] = UNSET
    allow_fewer: Annotated[bool, _schema("fewer than k are no error")] | UnsetType = UNSET
    threshold: Annotated[Any, _schema("least similarity, or its name: fmr=1e-3", _NAMED)] = UNSET
    where: Annotated[Any, _schema("conditions on metadata", {"type": "object"})] = UNSET


class SearchRequest(Options):
    images: Images | UnsetType = UNSET
    vectors: Annotated[list[list[float]], Meta(min_length=1)] | bytes | UnsetType = UNSET
    ids: Ids | UnsetType = UNSET
    texts: Texts | UnsetType = UNSET

    def __post_init__(self):
        if [self.images, self.vectors, self.ids, self.texts].count(UNSET) != 3:
            raise ValueError("give one of images, vectors, ids and texts")


class StoredSearch(Options, kw_only=True):
    id: Ids


class ItemsRequest(Request):
    id: Ids | UnsetType = UNSET
    limit: Annotated[int, Meta(ge=0, description="how many, 1 to 100")] = 24
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1, description="another choice")] = 0
    vectors: Annotated[bool, Meta(description="also the vectors")] = False


class IdsRequest(Request):
    id: Ids


class NewItem(Request):
    id: str
    image: bytes | UnsetType = UNSET
    vector: Vector | UnsetType = UNSET
    metadata: dict[str, Any] | None = None

    def __post_init__(self):
        if (self.image is UNSET) == (self.vector is UNSET):
            raise ValueError("an item has an image or a vector")


class AddRequest(Request):
    items: Annotated[list[NewItem], Meta(min_length=1)]
    replace: bool = False


class Embeddings(Struct):
    embeddings: list[list[float]]
    model: str


class Hit(Struct):
    id: str
    similarity: float
    metadata: dict[str, Any]
    picture: bool


class Result(Struct):
    match: bool
    hits: list[Hit]


class Results(Struct):
    results: list[Result]
    threshold: float | None
    model: str
    version: int
    k: int  # how many were asked for; a result may have fewer hits


class Item(Struct):
    id: str
    metadata: dict[str, Any]
    picture: bool
    vector: list[float] | UnsetType = UNSET


class Items(Struct):
    items: list[Item]


class Added(Struct):
    added: int
    version: int


class Deleted(Struct):
    deleted: int
    version: int


class IndexState(Struct):
    items: int
    version: int


class Info(Struct):
    model: str
    dimension: int
    similarity: str
    thresholds: dict[str, float]
    false_match_rates: dict[str, float]  # of the thresholds, as the export has measured them
    batch_sizes: list[int]
    input_shape: list[int]
    index: IndexState | None
    text: bool
    add: bool
    delete: bool


class Status(Struct):
    status: str


class Refusal(Struct):
    error: str
    request_id: str


class Route(NamedTuple):
    """What the method `handler` of `app` answers: a type in JSON or msgpack, or another format.

    With `images` the body may also be an image, or a form of images.
    """

    handler: str
    summary: str
    answer: type[Struct] | str
    query: type[Request] = Request
    body: type[Request] | None = None
    images: bool = False
    status: int = 200


_SEARCHED = "The most similar items of images, vectors, stored items or texts"
_STORED, _LISTED = "The most similar items of stored items", "Items by id, or some at random"
_ADDED = "Adds items: all or none (with --allow-add)"
_DELETED = "Deletes items: all or none (with --allow-delete)"
_EMBEDDED = "Embeddings of images or texts"
ROUTES: Mapping[str, Mapping[str, Route]] = {
    "/": {"GET": Route("page", "The page", "text/html")},
    "/embed": {"POST": Route("embed", _EMBEDDED, Embeddings, body=EmbedRequest, images=True)},
    "/search": {
        "GET": Route("search_stored", _STORED, Results, StoredSearch),
        "POST": Route("search", _SEARCHED, Results, Options, SearchRequest, images=True),
    },
    "/items": {
        "GET": Route("items", _LISTED, Items, ItemsRequest),
        "POST": Route("add", _ADDED, Added, body=AddRequest, status=201),
        "DELETE": Route("delete", _DELETED, Deleted, IdsRequest),
    },
    "/items/image": {"GET": Route("picture", "A small picture of an item", _JPEG, IdsRequest)},
    "/info": {"GET": Route("info", "Model, thresholds, size of the index", Info)},
    "/healthz": {"GET": Route("alive", "200 while the process lives", Status)},
    "/readyz": {"GET": Route("ready", "200 when requests are answered, else 503", Status)},
    "/metrics": {"GET": Route("metrics", "Figures for Prometheus", "text/plain")},
    "/openapi.json": {"GET": Route("openapi", "This description", _JSON)},
}


def description(settings: Settings) -> dict[str, Any]:
    """The routes of a service with these settings, in the format of OpenAPI 3.1."""
    routes = [route for methods in ROUTES.values() for route in methods.values()]
    types = [Refusal, *(t for route in routes for t in (route.query, route.body, route.answer))]
    types = [*dict.fromkeys(t for t in types if isinstance(t, type))]
    references, schemas = msgspec.json.schema_components(
        types, ref_template="#/components/schemas/{name}"
    )
    reference = dict(zip(types, references, strict=True))

    def content(type_: type) -> dict[str, Any]:
        return {kind: {"schema": reference[type_]} for kind in (_JSON, "application/msgpack")}

    def operation(path: str, route: Route) -> dict[str, Any]:
        answer = {route.answer: _BINARY} if isinstance(route.answer, str) else content(route.answer)
        if route.answer is Embeddings:
            answer[_FLOATS] = _BINARY
        refused = {"description": "refused, in one line"}
        refused["content"] = {_JSON: {"schema": reference[Refusal]}}
        responses = {str(route.status): {"description": "done", "content": answer}}
        options = schemas[route.query.__name__]
        result = {
            "summary": route.summary,
            "responses": responses | {"default": refused},
            "parameters": [
                _parameter(name, schema, required=name in options["required"])
                for name, schema in options["properties"].items()
            ],
        }
        if route.body is not None:
            body = content(route.body)
            if route.images:
                form = {"type": "object", "additionalProperties": _BINARY["schema"]}
                body |= {_FLOATS: _BINARY, "image/*": _BINARY}
                body["multipart/form-data"] = {"schema": form}
            result["requestBody"] = {"required": True, "content": body}
        if settings.token_file is not None and path not in OPEN_ROUTES:
            result["security"] = [{"token": []}]
        return result

    paths = {
        path: {method.lower(): operation(path, route) for method, route in methods.items()}
        for path, methods in ROUTES.items()
    }
    limits = ", ".join(f"{k} {v:.15g}" for k, v in dataclasses.asdict(settings.limits).items())
    text = f"Embeds images and finds similar stored items. Limits: {limits}"
    components = {"schemas": schemas}
    if settings.token_file is not None:
        components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "dmljax", "version": "1", "description": text},
        "paths": paths,
        "components": components,
    }


def _parameter(name: str, schema: dict[str, Any], *, required: bool) -> dict[str, Any]:
    """An option in the query of the address; an object is written as JSON."""
    value: dict[str, Any] = {"schema": schema}
    if schema.get("type") == "object":
        value = {"content": {_JSON: value}}
    return {"name": name, "in": "query", "required": required, **value}
