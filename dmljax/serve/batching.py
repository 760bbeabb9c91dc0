"""Micro-batches: images of many requests in one batch of the net.

Requests put decoded images into a queue. A task takes waiting images, up to the largest batch, and
one thread runs the net. While it runs, the next batch gathers by itself, so batches grow with the
load, and a single client does not wait.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Executor
from typing import NamedTuple

import numpy as np

_LEAST_FILLED = 0.75  # of a batch


class _Waiting(NamedTuple):
    image: np.ndarray
    result: asyncio.Future
    since: float


def batch_length(waiting: int, sizes: Collection[int]) -> int:
    """Returns how many of the `waiting` images to take: a batch has at most a quarter of padding.

    A batch is padded to the next of the `sizes`. Of 17 images, it takes 16, and of 15 all.
    """
    fitting = [size for size in sizes if _LEAST_FILLED * size <= waiting]
    return min(waiting, max(fitting, default=min(sizes)))


class Batcher:
    """Embeds images in batches; `run` is its task.

    Args:
        embed_fn: returns embeddings [n d] of prepared images [n h w c]; runs in the `executor`.
        sizes: the batch sizes.
        executor: one thread.
        measure_fn: gets the length of each batch, its longest wait and the time of the net.
    """

    def __init__(
        self,
        embed_fn: Callable[[np.ndarray], np.ndarray],
        *,
        sizes: Collection[int],
        executor: Executor,
        measure_fn: Callable[[int, float, float], None],
    ):
        self._embed_fn, self._sizes, self._executor = embed_fn, sizes, executor
        self._measure_fn = measure_fn
        self._queue: list[_Waiting] = []
        self._arrival = asyncio.Event()

    async def embed(self, images: Sequence[np.ndarray]) -> np.ndarray:
        """Returns embeddings [n d] of prepared images."""
        loop, now = asyncio.get_running_loop(), time.perf_counter()
        results = [loop.create_future() for _ in images]
        self._queue += [_Waiting(x, r, now) for x, r in zip(images, results, strict=True)]
        self._arrival.set()
        try:
            return np.stack([await result for result in results])
        finally:
            for result in results:  # the images of a request that ended leave the queue
                result.cancel()

    async def run(self) -> None:
        """Embeds what arrives until the task is cancelled."""
        while True:
            await self._arrival.wait()
            batch = self._take()
            self._arrival.clear()
            if self._queue:
                self._arrival.set()
            if batch:
                await self._embed(batch)

    def _take(self) -> list[_Waiting]:
        waiting = [x for x in self._queue if not x.result.done()]
        length = batch_length(len(waiting), self._sizes) if waiting else 0
        self._queue = waiting[length:]
        return waiting[:length]

    async def _embed(self, batch: list[_Waiting]) -> None:
        start = time.perf_counter()
        images = np.stack([waiting.image for waiting in batch])
        try:
            rows = await asyncio.get_running_loop().run_in_executor(
                self._executor, self._embed_fn, images
            )
        except Exception as error:
            for waiting in batch:
                if not waiting.result.done():
                    waiting.result.set_exception(error)
            return
        for waiting, row in zip(batch, rows, strict=True):
            if not waiting.result.done():
                waiting.result.set_result(row)
        since = min(waiting.since for waiting in batch)
        self._measure_fn(len(batch), start - since, time.perf_counter() - start)
