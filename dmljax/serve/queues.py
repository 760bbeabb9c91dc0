"""Whose job is next: each client gets the same share of the work, whatever it has sent.

This is start-time fair queueing (Goyal, Vin and Cheng, 1996). The start of a job is the end of the
client's last one, and at least the start of the job that was taken last. The client with the
earliest start is next. Times are seconds of work, not of a clock. A new client gets no more work
for the time before it came, and waits for at most one job of a client that sent a thousand.
"""

import asyncio
import bisect
import contextlib
import heapq
import itertools
from collections.abc import AsyncIterator, Callable
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")
_REMEMBERED = 1000  # clients without a job, of which the last one may not have ended yet


class _Waiting(NamedTuple):
    due: float
    number: int
    work: float
    job: object


class FairQueue(Generic[T]):
    """Jobs of clients. Of one client, the job with the lowest `due` comes first."""

    def __init__(self):
        self._jobs: dict[str, list[_Waiting]] = {}
        # The clients of `_jobs` by start; a client whose jobs are all gone stays until its turn.
        self._starts: list[tuple[float, int, str]] = []
        self._ends: dict[str, float] = {}  # of the last job of each client
        self._start = 0.0  # of the job that was taken last
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return sum(map(len, self._jobs.values()))

    def put(self, client: str, job: T, *, work: float = 1.0, due: float = 0.0) -> None:
        """Adds a job that takes `work` seconds, or other units of work."""
        number = next(self._numbers)
        if client not in self._jobs:
            self._jobs[client] = []
            start = max(self._start, self._ends.get(client, 0.0))
            heapq.heappush(self._starts, (start, number, client))
        bisect.insort(self._jobs[client], _Waiting(due, number, work, job))

    def take(self, accept_fn: Callable[[T], bool] = lambda job: True) -> T | None:
        """Removes and returns the next job that is accepted; None if there is none."""
        refused = []
        try:
            while self._starts:
                start, _, client = entry = heapq.heappop(self._starts)
                jobs = self._jobs[client]
                for i, waiting in enumerate(jobs):
                    if accept_fn(waiting.job):
                        del jobs[i]
                        self._has_begun(client, start, waiting.work)
                        return waiting.job
                if jobs:
                    refused.append(entry)
                else:
                    del self._jobs[client]
            return None
        finally:
            for entry in refused:
                heapq.heappush(self._starts, entry)

    def _has_begun(self, client: str, start: float, work: float) -> None:
        self._start = max(self._start, start)
        self._ends[client] = start + work
        heapq.heappush(self._starts, (start + work, next(self._numbers), client))
        if len(self._ends) > _REMEMBERED + len(self._jobs):
            self._ends = {x: end for x, end in self._ends.items() if end > self._start}

    def discard(self, ended_fn: Callable[[T], bool]) -> None:
        """Removes the jobs that have ended."""
        for client, jobs in self._jobs.items():
            self._jobs[client] = [waiting for waiting in jobs if not ended_fn(waiting.job)]


class Turns:
    """At most `count` blocks run at a time. Those that wait get their turns as in `FairQueue`."""

    def __init__(self, count: int):
        self._free = count
        self._waiting: FairQueue[asyncio.Future] = FairQueue()

    @contextlib.asynccontextmanager
    async def turn(self, client: str, *, work: float) -> AsyncIterator[None]:
        if self._free:
            self._free -= 1
        else:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.put(client, turn, work=work)
            try:
                await turn
            except asyncio.CancelledError:
                if not turn.cancelled():  # it had got its turn already
                    self._pass_on()
                raise
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        self._waiting.discard(asyncio.Future.done)
        if (turn := self._waiting.take()) is None:
            self._free += 1
        else:
            turn.set_result(None)
