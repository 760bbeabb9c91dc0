"""Bodies of requests and answers: JSON, msgpack, raw float32, images, multipart."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from typing import Any, NoReturn

import msgpack
import numpy as np
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from dmljax.serve.errors import Refused
from dmljax.serve.settings import Limits

__all__ = ["FLOATS", "JSON", "MSGPACK", "binary", "encode", "fields", "images_of", "vectors_of"]

JSON, MSGPACK, FLOATS = "application/json", "application/msgpack", "application/octet-stream"
_MSGPACK_NAMES = (MSGPACK, "application/x-msgpack", "application/vnd.msgpack")
_RAW_NAMES = ("application/octet-stream", "application/x-www-form-urlencoded", "")


def content_type(headers: Mapping[str, str]) -> str:
    """The type of a body, in lower case and without parameters."""
    return headers.get("content-type", "").partition(";")[0].strip().lower()


def is_image(kind: str) -> bool:
    """Whether a body of this type is the bytes of an image; Pillow looks at the bytes."""
    return kind.startswith("image/") or kind in _RAW_NAMES


def fields(kind: str, body: bytes, *, names: tuple[str, ...]) -> dict[str, Any]:
    """The object in a body of JSON or msgpack; only `names` may occur in it."""
    if kind == JSON:
        content = _json(body)
    elif kind in _MSGPACK_NAMES:
        content = _msgpack(body)
    else:
        raise Refused(
            415, f"the body has an unknown Content-Type: send an image, {JSON} or {MSGPACK}"
        )
    if not isinstance(content, dict):
        raise Refused(400, "the body is not an object with named fields")
    for name in content:
        if name not in names:
            raise Refused(400, f"the field {_short(name)} is unknown; possible: {', '.join(names)}")
    return content


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


def _msgpack(body: bytes) -> Any:
    try:
        return msgpack.unpackb(body, raw=False, strict_map_key=True, ext_hook=_no_extension)
    except Exception:  # many kinds of errors, and some have no text
        raise Refused(400, "the body is not msgpack") from None


def _no_extension(code: int, data: bytes) -> NoReturn:
    raise ValueError("extension types are not taken")


def binary(value: Any, name: str) -> bytes:
    """Bytes of msgpack, or base64 text of JSON."""
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise Refused(400, f"{name} is not base64 text (nor bytes of msgpack)")
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        raise Refused(400, f"{name} is not base64") from None


def vectors_of(value: Any, dimension: int, *, most: int) -> np.ndarray:
    """Vectors [n, dimension]: lists of numbers, or the bytes of float32, little-endian."""
    if isinstance(value, bytes):
        if not value or len(value) % (4 * dimension):
            raise Refused(
                400, f"{len(value)} bytes are no float32 vectors of {dimension} dimensions"
            )
        vectors = np.frombuffer(value, "<f4").reshape(-1, dimension)
    else:
        if not isinstance(value, list) or not value:
            raise Refused(400, "vectors is not a list of lists of numbers")
        if len(value) > most:
            raise Refused(413, f"there are {len(value)} vectors: the limit is {most}")
        for row in value:
            if not isinstance(row, list) or len(row) != dimension:
                size = f" of {len(row)}" if isinstance(row, list) else ""
                raise Refused(
                    422, f"a vector is not a list of {dimension} numbers: {_kind(row)}{size}"
                )
            if not all(type(x) in (float, int) for x in row):
                raise Refused(422, "a vector has a value that is no number")
        try:
            vectors = np.array(value, np.float64)
        except (OverflowError, ValueError):
            raise Refused(422, "a vector has a number beyond float64") from None
    if len(vectors) > most:
        raise Refused(413, f"there are {len(vectors)} vectors: the limit is {most}")
    return vectors


async def images_of(kind: str, headers: Headers, body: bytes, limits: Limits) -> list[bytes]:
    """The images of a body that is an image, or multipart with images."""
    if kind == "multipart/form-data":
        return await _multipart(headers, body, limits)
    return [body]


class _InMemory(MultiPartParser):
    spool_max_size = 1 << 40  # the body is in memory already


async def _multipart(headers: Headers, body: bytes, limits: Limits) -> list[bytes]:
    _, options = parse_options_header(headers.get("content-type", ""))
    if not options.get(b"boundary"):
        raise Refused(400, "the Content-Type multipart/form-data has no boundary")

    async def stream():
        yield body

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
        return msgpack.packb(content, default=lambda x: x.astype("<f4").tobytes()), MSGPACK
    text = json.dumps(content, default=lambda x: x.tolist(), separators=(",", ":"))
    return text.encode(), JSON


def _kind(value: Any) -> str:
    return type(value).__name__


def _short(value: Any) -> str:
    return ascii(value)[:60]
