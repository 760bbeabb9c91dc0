"""Refusals of requests: a status and one line."""

import logging

from dmljax.bundle.errors import BadImage
from dmljax.index import DuplicateId, InvalidInput, OtherModel, Superseded, UnknownId

_log = logging.getLogger("dmljax.serve")


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
