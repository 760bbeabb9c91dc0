"""What an index refuses or cannot do: one line each."""


class InvalidInput(ValueError):
    """Vectors, ids, metadata, a filter or a number that the index does not take."""


class UnknownId(InvalidInput):
    """No item has the id."""


class DuplicateId(InvalidInput):
    """An item with the id exists already."""


class OtherModel(ValueError):
    """The index holds vectors of another model."""


class Locked(OSError):
    """Another process writes to the index."""


class Damaged(OSError):
    """The database is not what was written. Derived files are rebuilt and never raise this."""


class Unavailable(OSError):
    """The disk is full, the server is away, or permission is missing. The call changed nothing."""


class Superseded(ValueError):
    """`reindex` has replaced the index since it was opened."""
