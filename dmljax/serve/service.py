"""The bundle and the index of a service, and the threads and processes that use them."""

import asyncio
import contextlib
import gc
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from dmljax import bundle as bundles
from dmljax import index as indexes
from dmljax.index.base import STOP_FN
from dmljax.serve.api import Refused
from dmljax.serve.batching import Batcher
from dmljax.serve.decoding import Decoders
from dmljax.serve.metrics import Metrics
from dmljax.serve.pictures import Pictures
from dmljax.serve.settings import Settings, read_tokens

_log = logging.getLogger("dmljax.serve")
_T = TypeVar("_T")
_FOLLOW_SECONDS = 2.0  # between two looks at which generation of the index counts
_CLOSE_SECONDS = 3.0
_SEARCHERS = 2  # threads
_SHARE_OF_SECONDS = 0.5  # of the time of a request, for one image to be decoded


class Service:
    """The state that all requests share. To construct it loads and compiles everything."""

    def __init__(self, settings: Settings):
        settings.check()
        self.settings, self.metrics = settings, Metrics()
        self.tokens = read_tokens(settings.token_file)
        self.bundle = bundles.load(settings.bundle, program=settings.program)
        self.index: indexes.Index | None = None
        self.pictures = Pictures(None)
        if settings.index is not None:
            self.index, self.pictures = self._open()
        self.bundle.compile()
        self.bundle.check()
        self._net = ThreadPoolExecutor(1, "net")
        self._searchers = ThreadPoolExecutor(_SEARCHERS, "index")
        self._batcher = Batcher(
            self.bundle.embed_prepared,
            sizes=self.bundle.batch_sizes,
            executor=self._net,
            measure_fn=self.metrics.batch,
        )
        self._decoders = Decoders(
            settings.decoders,
            self.bundle.preprocess,
            pixels=settings.limits.pixels,
            seconds=_SHARE_OF_SECONDS * settings.limits.seconds,
            restart_fn=self.metrics.decoder_restarts.inc,
        )
        self._tasks: list[asyncio.Task] = []

    async def start(self) -> None:
        """Starts the workers and the tasks; then requests can be answered."""
        await self._decoders.start()
        self._tasks = [asyncio.create_task(self._batcher.run())]
        if self.index is not None:
            self._tasks.append(asyncio.create_task(self._follow()))
        # Garbage collection that visits the objects of the start would stop all requests for a
        # tenth of a second.
        gc.collect()
        gc.freeze()

    async def stop(self) -> None:
        """Closes everything; all requests have ended."""
        for task in self._tasks:
            task.cancel()
        await self._decoders.stop()
        if self.index is not None:  # a search that is stuck does not hold up the end
            closing = asyncio.create_task(self.on_index(self.index.close))
            await asyncio.wait([closing], timeout=_CLOSE_SECONDS)
        for pool in (self._net, self._searchers):
            pool.shutdown(wait=False)

    def _open(self) -> tuple[indexes.Index, Pictures]:
        settings = self.settings
        assert settings.index is not None
        write = settings.allow_add or settings.allow_delete
        index = indexes.open(settings.index, model=self.bundle.digest, write=write)
        try:
            pictures = Pictures(settings.images, index.files())
            if index.count():  # the first search reads the files that searches need
                vector = np.eye(1, index.dimension, dtype=np.float32)
                with contextlib.suppress(indexes.Damaged):  # one item; its reader is told
                    index.search(vector, 1, allow_fewer=True)
            return index, pictures
        except BaseException:
            index.close()
            raise

    async def _follow(self) -> None:
        """Switches to the index that has replaced the present one in its folder (`reindex`).

        Requests that began with the old one may use it until their time is over.
        """
        problem = ""
        while True:
            await asyncio.sleep(_FOLLOW_SECONDS)
            old = self.index
            assert old is not None
            try:
                if not await self.on_index(lambda index: index.superseded, old):
                    continue
                self.index, self.pictures = new = await asyncio.to_thread(self._open)
            except (OSError, ValueError) as error:
                if str(error) != problem:
                    _log.error("the present index stays in use: %s", error)
                problem = str(error)
                continue
            _log.info("generation %d of the index is in use", new[0].generation)
            loop = asyncio.get_running_loop()
            loop.call_later(self.settings.limits.seconds, self._searchers.submit, old.close)

    async def on_index(self, function: Callable[..., _T], *arguments: Any) -> _T:
        """Calls a function in a thread for searches; it is stopped if the request ends."""
        ended = threading.Event()

        def call() -> _T:
            token = STOP_FN.set(ended.is_set)
            try:
                return function(*arguments)
            finally:
                STOP_FN.reset(token)

        try:
            return await asyncio.get_running_loop().run_in_executor(self._searchers, call)
        finally:
            ended.set()

    async def embed(self, images: list[bytes]) -> np.ndarray:
        """Returns embeddings [n d] of encoded images, or refuses all if one is refused."""
        start = time.perf_counter()
        prepared = await self._decoders.prepare(images)
        self.metrics.decode_seconds.observe(time.perf_counter() - start)
        return await self._batcher.embed(prepared)

    async def embed_text(self, texts: list[str]) -> np.ndarray:
        """Returns vectors [n d] of texts, computed in the thread of the net."""
        if not self.bundle.has_text:
            raise Refused(422, "the bundle of this service embeds images only")
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._net, self.bundle.embed_text, texts)
        except ValueError as error:
            raise Refused(422, str(error)) from error

    async def picture(self, name: str) -> bytes | None:
        """Returns a small JPEG of an item; None if its picture cannot be read."""
        try:
            data = await asyncio.to_thread(self.pictures.read, name)
            return await self._decoders.picture(data)
        except (OSError, ValueError, Refused):  # deleted or damaged since it was listed
            return None
