"""Errors of an index. Their messages are one line."""


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
