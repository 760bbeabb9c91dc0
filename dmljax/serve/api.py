"""The routes, the types of their bodies and of the options in their addresses, and refusals.

`decode` and `query` check requests against these types. The index itself checks `k`, `threshold`,
`where`, vectors and ids. A refusal is a status and one line.
"""

import json
import logging
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
from msgspec import Meta, Struct

from dmljax.bundle.errors import BadImage
from dmljax.index import DuplicateId, InvalidInput, OtherModel, Superseded, UnknownId

_log = logging.getLogger("dmljax.serve")
_T = TypeVar("_T")
# The page asks for the token itself; probes have none.
OPEN_ROUTES = ("/", "/healthz", "/readyz")
JSON = "application/json"
_MOST_VALUES = 1 << 20  # in a body: an empty text is three bytes there, and 50 in Python

_Images = Annotated[list[bytes], Meta(min_length=1)]  # base64
_Texts = Annotated[list[str], Meta(min_length=1)]
_Ids = Annotated[list[str], Meta(min_length=1)]
_Vectors = Annotated[list[list[float]], Meta(min_length=1)]


class Refused(Exception):
    """A request that is refused with a status and one line."""

    def __init__(self, status: int, reason: str, *, retry_after: int | None = None):
        super().__init__(reason)
        self.status, self.reason, self.retry_after = status, reason, retry_after


def refusal(error: Exception, *, place: str, request_id: str) -> Refused:
    """Returns the answer to a request that raised `error`, without the `place` of the index.

    Errors that the client cannot correct are logged in full, and answered without details.
    """
    match error:
        case Refused():
            return error
        case BadImage():
            return Refused(error.status, str(error))
        case InvalidInput():
            status = {UnknownId: 404, DuplicateId: 409}.get(type(error), 422)
            return Refused(status, str(error).replace(place, "the index"))
        case TimeoutError():
            return Refused(504, "the request took too long", retry_after=1)
        case OSError() | OtherModel() | Superseded():
            _log.error("%s: %s", request_id, error)
            return Refused(503, "the index is not available at present", retry_after=5)
    _log.error("%s: %s", request_id, error, exc_info=error)
    return Refused(500, f"internal error; the log of the service has it under {request_id}")


class Request(Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields of a body, or the options in the query of an address."""


class EmbedRequest(Request):
    images: _Images | None = None
    texts: _Texts | None = None

    def __post_init__(self):
        if (self.images is None) == (self.texts is None):
            raise ValueError("give images or texts")


class Options(Request):
    """How to search; the arguments of `Index.search`."""

    k: int | None = None
    allow_fewer: bool | None = None
    threshold: float | str | None = None  # also the name of one of the bundle
    where: Any = None


class SearchRequest(Options):
    images: _Images | None = None
    vectors: _Vectors | None = None
    ids: _Ids | None = None
    texts: _Texts | None = None

    def __post_init__(self):
        if [self.images, self.vectors, self.ids, self.texts].count(None) != 3:
            raise ValueError("give one of images, vectors, ids and texts")


class StoredSearch(Options, kw_only=True):
    id: _Ids


class ItemsRequest(Request):
    id: _Ids | None = None
    limit: Annotated[int, Meta(ge=1, le=100)] = 24  # number of random items
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    vectors: bool = False


class IdsRequest(Request):
    id: _Ids


class NewItem(Request):
    id: str
    image: bytes | None = None
    vector: list[float] | None = None
    metadata: dict[str, Any] | None = None

    def __post_init__(self):
        if (self.image is None) == (self.vector is None):
            raise ValueError("an item has an image or a vector")


class AddRequest(Request):
    items: Annotated[list[NewItem], Meta(min_length=1)]
    replace: bool = False


class Route(NamedTuple):
    """The method `handler` of `app.Handlers`, and what it takes.

    With `images`, the body may also be the bytes of one image.
    """

    handler: str
    query: type[Request] = Request
    body: type[Request] | None = None
    images: bool = False
    status: int = 200


ROUTES: Mapping[str, Mapping[str, Route]] = {
    "/": {"GET": Route("page")},
    "/embed": {"POST": Route("embed", body=EmbedRequest, images=True)},
    "/search": {
        "GET": Route("search_stored", StoredSearch),
        "POST": Route("search", Options, SearchRequest, images=True),
    },
    "/items": {
        "GET": Route("items", ItemsRequest),
        "POST": Route("add", body=AddRequest, status=201),
        "DELETE": Route("delete", IdsRequest),
    },
    "/items/image": {"GET": Route("picture", IdsRequest)},
    "/info": {"GET": Route("info")},
    "/healthz": {"GET": Route("alive")},
    "/readyz": {"GET": Route("alive")},
    "/metrics": {"GET": Route("metrics")},
}


def decode(body: bytes | bytearray, type_: type[_T]) -> _T:
    """Returns the object in a body of JSON; its types are checked while it is parsed."""
    if body.count(b",") > _MOST_VALUES:
        raise Refused(413, f"the body has more than {_MOST_VALUES:,} values: send fewer")
    try:
        return msgspec.json.decode(body, type=type_)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        text = ascii(str(error))[1:-1][:300]
        if "unknown field" in text:
            text += f"; possible: {', '.join(getattr(type_, '__struct_fields__', ())) or 'none'}"
        raise Refused(400, text) from None


def query(options: Iterable[tuple[str, str]], type_: type[_T]) -> _T:
    """Returns the options in the query of an address. Values are JSON, or text where they are not.

    Only the option `id` may be repeated.
    """
    values: dict[str, Any] = {}
    for name, text in options:
        if name == "id":
            values.setdefault(name, []).append(text)
        elif name in values:
            raise Refused(400, f"the option {ascii(name)[:60]} is given twice")
        else:
            try:
                values[name] = json.loads(text)
            except (ValueError, RecursionError):
                values[name] = text
    return decode(json.dumps(values).encode(), type_)
