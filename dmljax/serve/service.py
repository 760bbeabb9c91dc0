"""The bundle and the index of a service, the threads and processes that use them, and metrics."""

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
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, exposition

from dmljax import bundle as bundles
from dmljax import index as indexes
from dmljax.index.base import STOP_FN
from dmljax.serve.api import Refused
from dmljax.serve.batching import Batcher
from dmljax.serve.decoding import Decoders
from dmljax.serve.pictures import Pictures
from dmljax.serve.settings import Settings, read_tokens

_log = logging.getLogger("dmljax.serve")
_T = TypeVar("_T")
_FOLLOW_SECONDS = 2.0  # between two looks at which generation of the index counts
_CLOSE_SECONDS = 3.0
_SEARCHERS = 2  # threads
_SHARE_OF_SECONDS = 0.5  # of the time of a request, for one image to be decoded
CONTENT_TYPE = exposition.CONTENT_TYPE_LATEST
METHODS = ("GET", "HEAD", "POST", "DELETE")
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """The counters, histograms and gauges in the text format of Prometheus.

    Labels have fixed sets of values.
    """

    def __init__(self):
        self._registry = registry = CollectorRegistry()

        def histogram(name: str, text: str, labels: tuple[str, ...] = (), buckets=_SECONDS):
            return Histogram(f"dmljax_{name}", text, labels, buckets=buckets, registry=registry)

        def counter(name: str, text: str, labels: tuple[str, ...] = ()):
            return Counter(f"dmljax_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str):
            return Gauge(f"dmljax_{name}", text, registry=registry)

        self._requests = counter("requests", "Requests", ("route", "method", "status"))
        self._request_seconds = histogram("request_seconds", "Time of a request", ("route",))
        self.decoder_restarts = counter("decoder_restarts", "Replaced workers that decode images")
        self.decode_seconds = histogram("decode_seconds", "Time to decode the images of a request")
        self._queue_seconds = histogram("queue_seconds", "Longest wait for the net in a batch")
        self._net_seconds = histogram("net_seconds", "Time of the net for a batch")
        self.search_seconds = histogram("search_seconds", "Time of a search of the index")
        self._batch_images = histogram("batch_images", "Images in a batch", (), _SIZES)
        self.running = gauge("running_requests", "Requests in flight")
        self.items = gauge("index_items", "Items in the index")
        self.version = gauge("index_version", "Changes of the index since its creation")

    def request(self, route: str, method: str, status: int, seconds: float) -> None:
        """Counts a request that was answered."""
        self._requests.labels(route, method, str(status)).inc()
        self._request_seconds.labels(route).observe(seconds)

    def batch(self, length: int, queued: float, net: float) -> None:
        """Counts a batch of the net."""
        self._batch_images.observe(length)
        self._queue_seconds.observe(queued)
        self._net_seconds.observe(net)

    def text(self) -> bytes:
        """Returns all metrics as text."""
        return exposition.generate_latest(self._registry)


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
