"""The memory that all requests in flight may take together, asked for before it is taken.

Bodies, parsed values, decoded images and answers are counted, each with the bytes that it takes at
most. What is refused for lack of memory gets 503 and may try again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from dmljax.serve.errors import Refused

_SMALL = 1 << 20
_SHARE_OF_LARGE = 0.75  # the rest is for requests that take no more than a MiB


class Budget:
    """A number of bytes; each request holds a `Claim` on some of them. Threads may share it."""

    def __init__(self, limit: int):
        self._limit, self._used, self._most = limit, 0, 0
        self._lock = threading.Lock()
        self._arriving: dict[Claim, Callable[[], None]] = {}

    @property
    def used(self) -> int:
        return self._used

    def most_used(self) -> int:
        """The most that was taken at a time since the last call."""
        with self._lock:
            most, self._most = self._most, self._used
            return most

    def claim(self, client: str = "") -> Claim:
        """A claim on nothing yet; a context manager that gives back what was taken."""
        return Claim(self, client)

    def most_of_large(self) -> int:
        """What requests may hold together that take more than a MiB."""
        return int(_SHARE_OF_LARGE * self._limit)

    def take(self, claim: Claim, count: int) -> bool:
        """Adds to the claim if there is so much, or if a larger body that still arrives gives way.

        Otherwise clients that send slowly would keep what others need.
        """
        with self._lock:
            needed = claim.held + count
            limit = self._limit if needed <= _SMALL else self.most_of_large()
            while self._used + count > limit:
                largest = max(self._arriving, key=lambda x: x.held, default=claim)
                if largest.held <= needed:
                    return False
                self._arriving.pop(largest)()
                self._used -= largest.held
                largest.held = 0
            self._used += count
            self._most = max(self._most, self._used)
            claim.held += count
            return True

    def release(self, claim: Claim) -> None:
        with self._lock:
            self._arriving.pop(claim, None)
            self._used -= claim.held
            claim.held = 0

    def arrives(self, claim: Claim, stop_fn: Callable[[], None] | None) -> None:
        """The body of this claim begins to arrive, and may be stopped; None: it is complete."""
        with self._lock:
            self._arriving.pop(claim, None)
            if stop_fn is not None:
                self._arriving[claim] = stop_fn


class Claim:
    """The bytes that one request of a client holds."""

    def __init__(self, budget: Budget, client: str):
        self._budget, self.client, self.held = budget, client, 0

    def take(self, count: int) -> None:
        """Takes `count` more bytes, or refuses the request."""
        if (needed := self.held + count) > (most := self._budget.most_of_large()):
            raise Refused(
                413, f"the request needs {needed:,} bytes of memory: the limit is {most:,}"
            )
        if not self.try_to_take(count):
            raise Refused(503, "the service has no memory for this at present", retry_after=1)

    def try_to_take(self, count: int) -> bool:
        return self._budget.take(self, count)

    def arrives(self, stop_fn: Callable[[], None] | None) -> None:
        """From now on `stop_fn` may be called, in any thread, to stop the body; None: no more."""
        self._budget.arrives(self, stop_fn)

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, *error: object) -> None:
        self._budget.release(self)
