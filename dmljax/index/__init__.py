"""An index of embeddings that survives crashes: add, replace, delete, filter, search exactly.

    from dmljax import index

    photos = index.create("photos.index", model=bundle.digest, dimension=bundle.dimension)
    photos.add(["a", "b"], bundle.embed(["a.jpg", "b.jpg"]), [{"year": 1999}, {"year": 2020}])
    photos.search(bundle.embed(["query.jpg"]), k=1, where={"year": {">": 2000}})

A path is a folder with an SQLite database and a file of vectors. An address `postgresql://`
is a PostgreSQL server with pgvector. Both behave the same. Every index is bound to the digest of
the model that makes its vectors. The package imports neither jax nor flax.
"""

import os
from typing import Any

from dmljax.index import inputs
from dmljax.index.base import Index
from dmljax.index.embedded import EmbeddedIndex
from dmljax.index.inputs import (
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
    "Index",
    "InvalidInput",
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
    """Makes an empty index, open for writing.

    `place` is a folder that does not exist yet, or an address postgresql://. `model` is the digest
    of the model, and `dimension` the length of its vectors. `similarity` is the one of the bundle,
    a name in `nearest.SIMILARITIES`.
    """
    return _store(place).create(place, inputs.check_settings(model, dimension, similarity))


def open(place: str | os.PathLike, *, model: str | None = None, write: bool = False) -> Index:
    """Opens an index. With `write` it can be changed, and other writers are excluded.

    `model` is the digest of the model whose vectors will be added or searched; the index of another
    model is refused with both digests.
    """
    index = _store(place).open(place, write=write)
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
    """Makes an index of another model next to the present one, which `switch` then replaces.

    Searches use the present index until then. If the process ends before the switch, a second call
    with the same model continues with the items that were added.
    """
    return _store(place).reindex(place, inputs.check_settings(model, dimension, similarity))


def _store(place: str | os.PathLike) -> Any:
    """Returns the class that keeps an index at `place`; PostgreSQL is imported on demand."""
    scheme, separator, _ = os.fspath(place).partition("://")
    if not separator:
        return EmbeddedIndex
    if scheme not in ("postgresql", "postgres"):
        raise ValueError(f"{scheme}:// cannot hold an index: choose a folder, or postgresql://")
    from dmljax.index.postgres import PostgresIndex

    return PostgresIndex
