"""The stores of indexes: which class keeps an index in which place.

A further store is one file and one row of `STORES`. The file has a subclass of `base.Index`, whose
abstract methods are the contract; `tests/index/test_index_contract.py` tests it.
"""

import importlib
import os

from dmljax.index.base import Index

# What stands before "://" in an address, and the module and the class of the store. A place without
# it is a path.
STORES = {
    "": "dmljax.index.embedded:EmbeddedIndex",
    "postgresql": "dmljax.index.postgres:PostgresIndex",
    "postgres": "dmljax.index.postgres:PostgresIndex",
}


def store_of(place: str | os.PathLike) -> type[Index]:
    """The class of the store of an index at `place`."""
    before, separator, _ = os.fspath(place).partition("://")
    scheme = before if separator else ""
    if scheme not in STORES:
        known = ", ".join(f"{name}://" for name in STORES if name)
        raise ValueError(f"{scheme}:// is no place of an index: choose a folder, or {known}")
    module, _, name = STORES[scheme].partition(":")
    return getattr(importlib.import_module(module), name)
