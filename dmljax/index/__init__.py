"""An index of embeddings that survives crashes: add, replace, delete, filter, search.

    from dmljax import index

    photos = index.create("photos.index", model=bundle.digest, dimension=bundle.dimension)
    photos.add(["a", "b"], bundle.embed(["a.jpg", "b.jpg"]), [{"year": 1999}, {"year": 2020}])
    photos.search(bundle.embed(["query.jpg"]), k=1, where={"year": {">": 2000}})

A path is a folder with an SQLite database and files derived from it. An address `postgresql://` is
a PostgreSQL server with pgvector. Both behave the same (`stores.py` lists the stores). Every index
is bound to the digest of the model that makes its vectors. The package imports neither jax nor
flax.
"""

import os
from collections.abc import Hashable

from dmljax.index import inputs
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
from dmljax.index.stores import store_of

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
    "signature",
]


def create(
    place: str | os.PathLike, *, model: str, dimension: int, similarity: str = "cosine"
) -> Index:
    """Makes an empty index, open for writing.

    `place` is a folder that does not exist yet, or an address postgresql://. `model` is the digest
    of the model, and `dimension` the length of its vectors. `similarity` is the one of the bundle:
    'cosine' of unit vectors, or 'euclidean', minus the distance of vectors of any length.
    """
    return store_of(place).create(place, inputs.check_settings(model, dimension, similarity))


def open(place: str | os.PathLike, *, model: str | None = None, write: bool = False) -> Index:
    """Opens an index. With `write` it can be changed, and other writers are kept out.

    `model` is the digest of the model whose vectors will be added or searched; the index of another
    model is refused with both digests.
    """
    index = store_of(place).open(place, write=write)
    try:
        if model is not None:
            inputs.check_model(model, index.model, index.place)
    except BaseException:
        index.close()
        raise
    return index


def reindex(
    place: str | os.PathLike,
    *,
    model: str,
    dimension: int,
    similarity: str = "cosine",
    continues: bool = True,
) -> Index:
    """Makes an index of another model beside the present one, which `switch` then replaces.

    Searches use the present index until then. If the process ends before the switch, a second call
    with the same model continues with the items that were added, unless `continues` is False.
    """
    settings = inputs.check_settings(model, dimension, similarity)
    return store_of(place).reindex(place, settings, continues=continues)


def signature(place: str | os.PathLike) -> Hashable:
    """A value that changes when another index is put in this place; None if there is none."""
    return store_of(place).signature(place)
