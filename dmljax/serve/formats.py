"""Bodies of requests and answers: JSON, msgpack, raw float32, images, multipart."""

import asyncio
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import msgspec
import numpy as np
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from dmljax.serve import counting
from dmljax.serve.budget import Claim
from dmljax.serve.errors import Refused
from dmljax.serve.settings import Limits

_T = TypeVar("_T")
JSON, MSGPACK, FLOATS = "application/json", "application/msgpack", "application/octet-stream"
_MSGPACK_NAMES = (MSGPACK, "application/x-msgpack", "application/vnd.msgpack")
_BYTES_OF_VALUE = 100  # at most, about, in a list or an object of Python
_PIECE = 1 << 16
_RAW_NAMES = ("application/octet-stream", "application/x-www-form-urlencoded", "")


def content_type(headers: Mapping[str, str]) -> str:
    """The type of a body, in lower case and without parameters."""
    return headers.get("content-type", "").partition(";")[0].strip().lower()


def is_image(kind: str) -> bool:
    """Whether a body of this type is the bytes of an image; Pillow looks at the bytes."""
    return kind.startswith("image/") or kind in _RAW_NAMES


def decode(kind: str, body: bytes, type_: type[_T], claim: Claim, *, most: int) -> _T:
    """The object in a body of JSON or msgpack, of at most `most` values."""
    if kind == JSON:
        copies, count = 3, counting.of_json(body)
    else:
        copies, count = 1, counting.of_msgpack(body, most=most)
    if kind in (JSON, *_MSGPACK_NAMES):
        if count > most:
            raise Refused(413, f"the body has more than {most:,} values, the limit")
        claim.take(copies * len(body) + _BYTES_OF_VALUE * count)
    if kind == JSON:
        return _convert(_json(body), type_)
    if kind not in _MSGPACK_NAMES:
        raise Refused(
            415, f"the body has an unknown Content-Type: send an image, {JSON} or {MSGPACK}"
        )
    try:
        content = msgspec.msgpack.decode(body)
    except Exception:  # many kinds of errors, and some have no text
        raise Refused(400, "the body is not msgpack") from None
    return _convert(content, type_)


def query(options: Iterable[tuple[str, str]], type_: type[_T]) -> _T:
    """The options in the query of an address. Values are JSON, or text where they are not.

    The option `id` may be repeated.
    """
    values: dict[str, Any] = {}
    for name, text in options:
        if name == "id":
            values.setdefault(name, []).append(text)
            continue
        if name in values:
            raise Refused(400, f"the option {_short(name)} is given twice")
        try:
            values[name] = json.loads(text)
        except (ValueError, RecursionError):
            values[name] = text
    return _convert(values, type_)


def _json(body: bytes) -> Any:
    try:
        return json.loads(body.decode("utf-8"), parse_constant=_no_constant)
    except RecursionError:
        raise Refused(400, "the body is not JSON: it is nested too deeply") from None
    except UnicodeDecodeError:
        raise Refused(400, "the body is not JSON: it is not UTF-8") from None
    except ValueError as error:
        raise Refused(400, f"the body is not JSON: {str(error)[:120]}") from None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")


def _convert(content: Any, type_: type[_T]) -> _T:
    """`content` as a type of `api`. Values that an index would refuse have the status 422."""
    try:
        return msgspec.convert(content, type_)
    except msgspec.ValidationError as error:
        text = re.sub(r"`([a-z |]+)`", _in_words, str(error))
        text = re.sub("Object missing required field `(.*?)`", r"\1 is missing", text)
        if "unknown field" in text:
            text += f"; possible: {', '.join(getattr(type_, '__struct_fields__', ())) or 'none'}"
        raise Refused(422 if _OF_ITEMS.search(text) else 400, ascii(text)[1:-1][:500]) from None


def _in_words(match: re.Match[str]) -> str:
    """The types in a message of msgspec, such as `int | null`; other names stay as they are."""
    names = match[1].split(" | ")
    return " or ".join(map(_WORDS.get, names)) if _WORDS.keys() >= set(names) else match[0]


_WORDS = {"object": "an object", "array": "a list", "str": "text", "bytes": "base64 or bytes"}
_WORDS |= {"int": "a whole number", "float": "a number", "bool": "true or false", "null": "null"}
_OF_ITEMS = re.compile(
    r"^id is missing - at `\$\.items|`\$\.(vectors\[|items\[\d+\]\.(vector|id|metadata))"
)


def vectors_of(value: Sequence[Any] | bytes, dimension: int, *, most: int) -> np.ndarray:
    """Vectors [n, dimension]: lists of numbers, or the bytes of float32, little-endian."""
    if isinstance(value, bytes):
        if not value or len(value) % (4 * dimension):
            raise Refused(
                400, f"{len(value)} bytes are no float32 vectors of {dimension} dimensions"
            )
        value = np.frombuffer(value, "<f4").reshape(-1, dimension)
    elif wrong := [len(row) for row in value if len(row) != dimension]:
        raise Refused(422, f"a vector is not a list of {dimension} numbers: it has {wrong[0]}")
    if len(value) > most:
        raise Refused(413, f"there are {len(value)} vectors: the limit is {most}")
    return np.asarray(value)


class _InMemory(MultiPartParser):
    spool_max_size = 1 << 40  # the body is in memory already


def images_of_form(
    headers: Headers, body: bytes, limits: Limits, stop_fn: Callable[[], bool]
) -> list[bytes]:
    """The images in a body of multipart/form-data; it ends soon after `stop_fn()` is true."""
    return asyncio.run(_multipart(headers, body, limits, stop_fn))


async def _multipart(
    headers: Headers, body: bytes, limits: Limits, stop_fn: Callable[[], bool]
) -> list[bytes]:
    _, options = parse_options_header(headers.get("content-type", ""))
    if not options.get(b"boundary"):
        raise Refused(400, "the Content-Type multipart/form-data has no boundary")

    async def stream():
        for start in range(0, len(body), _PIECE):
            if stop_fn():
                raise TimeoutError
            yield body[start : start + _PIECE]

    parser = _InMemory(
        headers,
        stream(),
        max_files=limits.images,
        max_fields=limits.multipart_fields,
        max_part_size=1 << 16,
    )
    try:
        form = await parser.parse()
    except (MultiPartException, FormParserError, ValueError, KeyError) as error:
        text = getattr(error, "message", "") or "it is malformed"
        if "Too many files" in text:
            raise Refused(413, f"there are too many images: the limit is {limits.images}") from None
        raise Refused(400, f"the multipart body cannot be read: {text[:120]}") from None
    images = []
    for name, value in form.multi_items():
        if not isinstance(value, UploadFile):
            raise Refused(
                400,
                f"the part {_short(name)} has no file name: images are files, and options "
                "belong to the query of the address",
            )
        images.append(await value.read())
    await form.close()
    if not images:
        raise Refused(400, "the multipart body has no images")
    return images


def encode(content: Any, accept: str) -> tuple[bytes, str]:
    """The body of an answer and its type: msgpack where the client asks for it, else JSON.

    Arrays become bytes of float32 in msgpack, and lists in JSON.
    """
    if any(name in accept for name in _MSGPACK_NAMES):
        encoder = msgspec.msgpack.Encoder(enc_hook=lambda x: x.astype("<f4").tobytes())
        return encoder.encode(_in_pieces(content, encoder.encode)), MSGPACK
    encoder = msgspec.json.Encoder(enc_hook=lambda x: x.tolist())
    return encoder.encode(_in_pieces(content, encoder.encode)), JSON


def _in_pieces(content: Any, encode_fn: Callable[[Any], bytes]) -> Any:
    """The answer with the elements of its list encoded, one by one: other threads run meanwhile."""
    fields = {name: getattr(content, name) for name in content.__struct_fields__}
    lists = {name: value for name, value in fields.items() if type(value) is list}
    if not any(len(value) > 1 for value in lists.values()):
        return content
    pieces = {name: [msgspec.Raw(encode_fn(x)) for x in value] for name, value in lists.items()}
    return {name: value for name, value in (fields | pieces).items() if value is not msgspec.UNSET}


def _short(value: Any) -> str:
    return ascii(value)[:60]
