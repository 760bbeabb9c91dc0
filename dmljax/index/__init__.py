"""An index of embeddings that survives crashes: add, replace, delete, filter, search.

    from dmljax import index

    photos = index.create("photos.index", model=bundle.digest, dimension=bundle.dimension)
    photos.add(["a", "b"], bundle.embed(["a.jpg", "b.jpg"]), [{"year": 1999}, {"year": 2020}])
    photos.search(bundle.embed(["query.jpg"]), k=1, where={"year": {">": 2000}})

A path is a folder with an SQLite database and files derived from it. An address that begins with
`postgresql://` is a PostgreSQL server with pgvector, and behaves the same. Every index is bound to
the digest of the model that makes its vectors. The package imports neither jax nor flax.
"""

from __future__ import annotations

import os
import pathlib
from typing import Any

from dmljax.index import embedded, inputs
from dmljax.index.base import Hit, Index, Item
from dmljax.index.errors import (
    Damaged,
    DuplicateId,
    InvalidInput,
    Locked,
    OtherModel,
    Superseded,
    Unavailable,
    UnknownId,
)

__all__ = [
    "Damaged",
    "DuplicateId",
    "Hit",
    "Index",
    "InvalidInput",
    "Item",
    "Locked",
    "OtherModel",
    "Superseded",
    "Unavailable",
    "UnknownId",
    "create",
    "open",
    "reindex",
]


def create(
    place: str | os.PathLike, *, model: str, dimension: int, similarity: str = "cosine"
) -> Index:
    """A new, empty index, open for writing.

    `place` is a folder that does not exist yet, or an address postgresql://. `model` is the digest
    of the model, and `dimension` the length of its vectors. `similarity` is that of the bundle:
    'cosine' of unit vectors, or 'euclidean', minus the distance of vectors of any length.
    """
    return _store(place).create(
        _location(place),
        model=inputs.check_digest(model),
        dimension=inputs.check_dimension(dimension),
        similarity=inputs.check_similarity(similarity),
    )


def open(place: str | os.PathLike, *, model: str | None = None, write: bool = False) -> Index:
    """An existing index. With `write` it can be changed, and other writers are kept out.

    `model` is the digest of the model whose vectors will be added or searched; the index of another
    model is refused with both digests.
    """
    index = _store(place).open(_location(place), write=write)
    try:
        if model is not None:
            inputs.check_model(model, index.model, index.place)
    except BaseException:
        index.close()
        raise
    return index


def reindex(
    place: str | os.PathLike, *, model: str, dimension: int, similarity: str = "cosine"
) -> Index:
    """An index of another model beside the one at `place`, which `switch` puts in its place.

    Searches use the present index until then. If the process ends before, `reindex` with the same
    model returns the index as far as it was filled.
    """
    return _store(place).reindex(
        _location(place),
        model=inputs.check_digest(model),
        dimension=inputs.check_dimension(dimension),
        similarity=inputs.check_similarity(similarity),
    )


def _is_address(place: str | os.PathLike) -> bool:
    return str(place).startswith(("postgresql://", "postgres://"))


def _location(place: str | os.PathLike) -> str | pathlib.Path:
    return str(place) if _is_address(place) else pathlib.Path(place)


def _store(place: str | os.PathLike) -> Any:
    """The module of the store at `place`."""
    if not _is_address(place):
        return embedded
    try:
        from dmljax.index import postgres
    except ImportError as error:
        raise ImportError(
            f"PostgreSQL needs psycopg and pgvector ({error}): pip install 'dmljax[postgres]'"
        ) from None
    return postgres
