"""Checks of the caller's arguments, and the errors of an index, whose messages are one line.

A call that is refused stores nothing.
"""

import json
import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dmljax.hints import hint
from dmljax.index.nearest import SIMILARITIES, Similarity
from dmljax.vectors import UNIT_TOLERANCE

_NO_THRESHOLDS = (
    ", which has none (they need unit vectors, and 16 test classes or 8 classes held out of "
    "training): give a similarity, such as 0.8"
)
LARGEST_K = 1000
DEFAULT_K = 10  # of `dmljax search` and the service, which also accept fewer items
_LARGEST_DIMENSION = 16_000  # of a column of pgvector
_ID_BYTES = 512
_METADATA_BYTES = 64 * 1024
_METADATA_DEPTH = 8
_EXACT_NORM = 1e-6  # as far as float32 rounds a unit vector
_LONGEST = 1e15  # its square is far below the largest float32


class InvalidInput(ValueError):
    """The index does not accept vectors, ids, metadata, a filter or a number."""


class UnknownId(InvalidInput):
    """An id does not exist."""


class DuplicateId(InvalidInput):
    """An id exists already."""


class OtherModel(ValueError):
    """The index holds vectors of another model."""


class Locked(OSError):
    """Another process writes to the index."""


class Damaged(OSError):
    """The database differs from what was written. Derived files are made again instead."""


class Unavailable(OSError):
    """The disk is full, the server is away, or permission is missing. The call changed nothing."""


class Superseded(ValueError):
    """`reindex` has replaced the index since it was opened."""


class Settings(NamedTuple):
    """The model of an index and its vectors. They never change."""

    model: str
    dimension: int
    similarity: str


def check_settings(model: Any, dimension: Any, similarity: Any) -> Settings:
    """Checks the digest of a model, the length of its vectors, and their similarity."""
    if not isinstance(model, str) or not re.fullmatch(r"[0-9a-f]{8,128}", model):
        raise InvalidInput(f"model={shorten(model)} is not a digest: pass the digest of the bundle")
    if similarity not in SIMILARITIES:
        choices = " or ".join(SIMILARITIES)
        raise InvalidInput(f"similarity={shorten(similarity)} is unknown: choose {choices}")
    return Settings(model, _whole_number("dimension", dimension, _LARGEST_DIMENSION), similarity)


def check_format(version: Any, supported: int, place: Any) -> None:
    """Refuses an index in a format that this version of dmljax does not read."""
    if version != supported:
        advice = "update dmljax, or make the index again"
        raise InvalidInput(f"{place} has format {version}, dmljax reads {supported}: {advice}")


def check_model(model: Any, stored: str, place: str) -> None:
    """Refuses the digest of another model than the one whose vectors are stored."""
    if check_settings(model, 1, "cosine").model != stored:
        raise OtherModel(
            f"{place} holds vectors of the model {stored}, not of {model}: use the bundle that "
            "made them, or embed the images again: dmljax index reindex"
        )


def check_ids(ids: Any, *, distinct: bool = True, first: int = 0) -> list[str]:
    """Checks ids: short, printable text in normal form NFC. Errors number them from `first`."""
    if isinstance(ids, str | bytes):
        raise InvalidInput(f"ids is one string, {shorten(ids)}: pass a list of ids")
    ids, so_far = list(ids), set()
    for number, name in enumerate(ids, start=first):
        if problem := _problem_of_id(name):
            raise InvalidInput(f"id {shorten(name)} (number {number}) {problem}")
        if distinct and name in so_far:
            raise DuplicateId(f"id {shorten(name)} occurs twice in one call")
        so_far.add(name)
    return ids


def _problem_of_id(name: Any) -> str | None:
    if not isinstance(name, str):
        return f"is of type {type(name).__name__}: ids are text"
    if not name:
        return "is empty"
    if len(name) > _ID_BYTES or len(name.encode(errors="ignore")) > _ID_BYTES:
        return f"has {len(name)} characters: {_ID_BYTES} bytes in UTF-8 are the limit"
    if not is_unicode(name) or any(unicodedata.category(character) == "Cc" for character in name):
        return "contains a control character, or half of a surrogate pair"
    if not unicodedata.is_normalized("NFC", name):
        return "is not in normal form NFC: apply unicodedata.normalize('NFC', id)"
    return None


def check_vectors(
    vectors: Any,
    dimension: int,
    similarity: Similarity,
    *,
    count: int | None = None,
    first: int = 0,
) -> np.ndarray:
    """Returns vectors [n, dimension] in float32; checks that there are `count`, unless it is None.

    Errors number the vectors from `first`. Where a similarity needs unit vectors, a vector is
    divided by its length if the length differs from 1 by more than float32 rounds (vectors in
    float16 do), and refused if it differs by more than 0.001. Others have any length that float32
    can compare.
    """
    try:
        array = np.asarray(vectors)
    except ValueError as error:
        raise InvalidInput(f"vectors are not an array: {error}") from None
    problem = ""
    if array.dtype not in (np.float16, np.float32, np.float64):
        problem = f"vectors are of type {array.dtype}: pass float32, float16 or float64"
    elif array.ndim != 2 or array.shape[1] != dimension or not len(array):
        shape = f"pass [n, {dimension}], one vector at least"
        problem = f"vectors have the shape {array.shape}: {shape}"
    elif count is not None and len(array) != count:
        problem = f"there are {len(array)} vectors for {count} ids"
    if problem:
        raise InvalidInput(problem)
    with np.errstate(over="ignore", invalid="ignore"):  # reported below
        norms = np.sqrt(np.einsum("nd,nd->n", array, array, dtype=np.float64))
        valid = np.abs(norms - 1) <= UNIT_TOLERANCE if similarity.needs_unit else norms <= _LONGEST
    if not valid.all():
        number = int(valid.argmin())
        advice = "1: divide it by its length" if similarity.needs_unit else f"at most {_LONGEST:g}"
        problem = f"has the length {norms[number]:.6g}, not {advice}"
        if not np.isfinite(array[number]).all():
            problem = "contains NaN or infinity"
        raise InvalidInput(f"vector number {first + number} {problem}")
    inexact = np.abs(norms - 1) > _EXACT_NORM
    result = np.array(array, np.float32, order="C")
    if similarity.needs_unit and inexact.any():
        result[inexact] = array[inexact] / norms[inexact, None]
    return result


def check_metadata(metadata: Any, count: int, *, first: int = 0) -> list[str]:
    """Returns the metadata of `count` items as JSON objects; `{}` for each if it is None.

    Errors number them from `first`.
    """
    items = [{}] * count if metadata is None else metadata
    if isinstance(items, str | bytes | Mapping) or len(items := list(items)) != count:
        raise InvalidInput(f"metadata must be a list of {count} objects (dicts), one per id")
    texts = []
    for number, item in enumerate(items, start=first):
        item = {} if item is None else item
        if not (problem := _problem_of_metadata(item)):
            texts.append(
                json.dumps(item, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
            )
            if (size := len(texts[-1].encode())) > _METADATA_BYTES:
                problem = f" has {size} bytes of JSON: {_METADATA_BYTES} are the limit"
        if problem:
            raise InvalidInput(f"metadata of number {number}{problem}")
    return texts


def _problem_of_metadata(item: Any) -> str | None:
    if not isinstance(item, Mapping):
        return f" is of type {type(item).__name__}, not an object (a dict)"
    for field, value in item.items():
        if problem := problem_of_value({field: value}, _METADATA_DEPTH):
            return f", field {shorten(field)}, has {problem}"
    return None


def problem_of_value(value: Any, depth: int = 0) -> str | None:
    """Returns why JSON, or a store, cannot return a value as it is; None if it can.

    `depth` is the number of levels of lists and objects that are allowed.
    """
    match value:
        case str():
            return None if is_text(value) else "text with a NUL character or invalid Unicode"
        case int():
            return None if is_integer_of_64_bits(value) else "an integer beyond 64 bits"
        case float():
            return None if math.isfinite(value) else f"the number {value}, which JSON lacks"
        case dict() | list() | tuple() if depth:
            names, values = (value, value.values()) if isinstance(value, dict) else ((), value)
            if not all(isinstance(name, str) for name in names):
                return "a name that is not text"
            problems = (problem_of_value(x, depth - 1) for x in (*names, *values))
            return next(filter(None, problems), None)
        case dict() | list() | tuple():
            return f"a {type(value).__name__} that is nested deeper than {_METADATA_DEPTH} levels"
        case None:
            return None
    return f"a {type(value).__name__}; possible are dict, list, str, int, float, bool and None"


def is_unicode(text: str) -> bool:
    """Returns whether text can be encoded: it lacks halves of surrogate pairs."""
    return text == text.encode(errors="ignore").decode()


def is_text(value: str) -> bool:
    """Returns whether every store can hold a text."""
    return "\0" not in value and is_unicode(value)


def is_integer_of_64_bits(value: int) -> bool:
    return -(2**63) <= value < 2**63


def check_k(k: Any, count: int, *, allow_fewer: bool) -> None:
    """Checks the number of items to find, among `count`."""
    if _whole_number("k", k, LARGEST_K) > count and not allow_fewer:
        choice = f"choose k=1 to {count}" if count > 0 else "add some"
        raise InvalidInput(f"k={k}, but there are {max(count, 0)} items to search: {choice}")


def _whole_number(name: str, value: Any, largest: int) -> int:
    is_number = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not is_number or not 1 <= value <= largest:
        raise InvalidInput(f"{name}={shorten(value)}: choose a whole number from 1 to {largest}")
    return int(value)


def check_threshold(threshold: Any, similarity: Similarity) -> float:
    """Returns the least similarity of a match; minus infinity for None."""
    if threshold is None:
        return -math.inf
    low, high = similarity.limits
    is_number = isinstance(threshold, int | float | np.floating) and not isinstance(threshold, bool)
    if not is_number or not low <= threshold <= high:
        raise InvalidInput(
            f"threshold={shorten(threshold)}: choose a number from {low} to {high}, because the "
            f"similarity of this index is {similarity.description}"
        )
    return float(threshold)


def shorten(value: Any, limit: int = 80) -> str:
    """Returns `repr(value)`, with at most `limit` characters of it."""
    if isinstance(value, str | bytes) and len(value) > limit:
        return f"{value[:limit]!r}..."
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}..."


def names(values: Sequence[str]) -> str:
    """Returns the first of the `values` and the number of the others."""
    more = f" and {len(values) - 1} more" if len(values) > 1 else ""
    return f"{shorten(values[0])}{more}"


def threshold(value: Any, thresholds: Mapping[str, float]) -> Any:
    """Returns the lowest similarity of a hit: a number, or a threshold of the bundle by name."""
    if not isinstance(value, str):
        return value
    if value in thresholds:
        return thresholds[value]
    try:
        return float(value)
    except ValueError:
        raise InvalidInput(
            f"threshold {ascii(value)[:60]} is neither a similarity nor a threshold of the bundle"
            f"{hint(value[:60], thresholds) if thresholds else _NO_THRESHOLDS}"
        ) from None
