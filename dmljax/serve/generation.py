"""The bundle and the index that requests use, and their replacement while requests run.

A request keeps the generation with which it began. The service opens and compiles a new generation
beside the present one. Then new requests use the new one, and the old one is closed when its last
request ends. If the new one cannot be used, the present one stays.
"""

import asyncio
import collections
import contextlib
import dataclasses
import gc
import json
import logging
import math
import pathlib
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from dmljax import bundle as bundles
from dmljax import index as indexes
from dmljax.bundle.errors import naming
from dmljax.data.decode import file_bytes, to_pil
from dmljax.files import allocator
from dmljax.index import Index, folder
from dmljax.index.base import stopped_when
from dmljax.index.sources import Sources
from dmljax.serve.batching import Batcher
from dmljax.serve.budget import Budget, Claim
from dmljax.serve.errors import Refused
from dmljax.serve.metrics import Metrics
from dmljax.serve.pictures import Pictures
from dmljax.serve.queues import Turns
from dmljax.serve.settings import Settings, read_tokens
from dmljax.serve.workers import Decoders, Turn, Work, default_count, work

_log = logging.getLogger("dmljax.serve")
_T = TypeVar("_T")
# A small image is decoded in the thread of the requests, if one of this size takes no longer than
# `_SMALL_SECONDS` here, and if its header promises no more than `_MOST_SECONDS`. The way to another
# process and back would take longer.
_SMALL_BYTES, _SMALL_SIDE, _SMALL_SECONDS = 1 << 16, 128, 1e-3
_MOST_SECONDS = 4e-3  # of `work`, which is on the slow side: one text of a PNG, but not two
_SMALL_FORMATS = ("PNG", "JPEG")
_TRIM_SECONDS, _TRIM_BYTES = 2.0, 32 << 20
_NO_INDEX = "no index"
_SEARCHERS = 2  # threads
_SHARE_OF_CLIENTS = 0.75  # of the places, which clients that have some may fill
_VERIFY_SECONDS = 1  # between two thousands of items whose checksums are compared


@dataclasses.dataclass(eq=False)
class _Model:
    """A bundle with its batcher, shared by generations that differ in their index."""

    bundle: bundles.Bundle
    signature: Any
    seconds: dict[int, float] = dataclasses.field(default_factory=dict)
    small_pixels: int = 0  # of images that are decoded in the thread of the requests
    batcher: Batcher | None = None
    task: asyncio.Task | None = None
    generations: int = 0

    def __post_init__(self):
        self.spec = json.dumps(self.bundle.preprocess.to_json()).encode()

    def compile(self) -> None:
        """Compiles all sizes, compares with the stored examples, and times each size."""
        self.bundle.compile()
        self.bundle.check()
        for size in self.bundle.batch_sizes:
            images = np.zeros((size, *self.bundle.input_shape), np.uint8)
            self.seconds[size] = _shortest(self.bundle.embed_prepared, images)
        pixels = np.random.default_rng(0).integers(0, 256, (_SMALL_SIDE,) * 2 + (3,), np.uint8)
        if _shortest(self.bundle.prepare, file_bytes(to_pil(pixels), "PNG")) <= _SMALL_SECONDS:
            self.small_pixels = _SMALL_SIDE**2


@dataclasses.dataclass(eq=False)
class Generation:
    """A bundle and an index that belong together."""

    model: _Model
    index: indexes.Index | None
    pictures: Pictures
    index_signature: Any
    requests: int = 0
    retired: bool = False

    @property
    def bundle(self) -> bundles.Bundle:
        return self.model.bundle

    @property
    def batcher(self) -> Batcher:
        assert self.model.batcher is not None
        return self.model.batcher


class Service:
    """The state that all requests share: the present generation, threads, tokens, metrics."""

    def __init__(self, settings: Settings):
        settings.check()
        self.settings, self.metrics = settings, Metrics()
        self.tokens = read_tokens(settings.token_file)
        # On startup, errors end the process before it listens.
        self._first: Generation | None = self._open(None)
        self.current: Generation | None = None
        self._net = ThreadPoolExecutor(1, "net")
        limits = settings.limits
        self.budget = Budget(limits.memory_bytes)
        self._decoders = Decoders(
            settings.decoders or default_count(limits.memory_bytes),
            seconds=limits.decode_seconds,
            memory=limits.decode_bytes,
            budget=self.budget,
            restart_fn=self.metrics.decoder_restarts.inc,
        )
        self._searchers = ThreadPoolExecutor(_SEARCHERS, "index")
        self._turns = Turns(_SEARCHERS)
        self._converters = ThreadPoolExecutor(2, "convert")
        self._tasks: list[asyncio.Task] = []
        self._reload_requested = asyncio.Event()
        self._reloading = asyncio.Lock()
        self.failure: BaseException | None = None
        self.waiting_images = self.waiting_large = 0
        self._waiting_of: collections.Counter[str] = collections.Counter()  # by client
        self._failed_signature: Any = None

    def _open(self, present: Generation | None) -> Generation:
        """A generation of the bundle and the index on the disk; shares what did not change."""
        settings = self.settings
        signature = _signature(settings.bundle)
        if present is not None and present.model.signature == signature:
            model = present.model
        else:
            bundle = bundles.load(
                settings.bundle, program=settings.program, batch_sizes=settings.batch_sizes
            )
            model = _Model(bundle, signature)
        if settings.index is None:
            return Generation(model, None, Pictures(None), _NO_INDEX)
        place = indexes.signature(settings.index)
        write = settings.allow_add or settings.allow_delete
        # The service is the only writer, so nobody else has changed its index.
        if write and present is not None and present.index is not None:
            same = present.index_signature == place and present.model.bundle.digest
            if same == model.bundle.digest:
                return Generation(model, present.index, self._pictures(present.index), place)
        index = indexes.open(settings.index, model=model.bundle.digest, write=write)
        try:
            return Generation(model, index, self._pictures(index), place)
        except BaseException:
            index.close()
            raise

    def _pictures(self, index: Index) -> Pictures:
        assert self.settings.index is not None
        sources = Sources(self.settings.index, index.generation)
        return Pictures(self.settings.images, sources)

    async def start(self) -> None:
        """Begins to compile; requests are answered when that is done."""
        self._tasks.append(asyncio.create_task(self._begin()))

    async def _begin(self) -> None:
        try:
            assert self._first is not None
            await self._decoders.start()  # before it is timed how long images take
            await self._prepare(self._first)
        except Exception as error:  # otherwise the process would wait forever
            self.failure = error
            return
        self._switch(self._first)
        self._first = None
        # The objects of the start stay until the end. Garbage collection that visits them stops all
        # requests for a tenth of a second; without them it takes milliseconds.
        gc.collect()
        gc.freeze()
        self._tasks.append(asyncio.create_task(self._watch()))
        self._tasks.append(asyncio.create_task(self._trim()))

    async def stop(self) -> None:
        """Closes everything; all requests have ended."""
        for task in self._tasks:
            task.cancel()
        generation, self.current = self.current or self._first, None
        if generation is not None:
            self._retire(generation)
        await self._decoders.stop()
        for pool in (self._net, self._searchers, self._converters):
            await asyncio.to_thread(pool.shutdown)

    def kill(self) -> None:
        """Ends the processes that decode, before this one ends."""
        self._decoders.kill()

    async def _prepare(self, generation: Generation) -> None:
        """Compiles a new model, and searches once, so that the first request need not wait."""
        model = generation.model
        if model.batcher is None:
            await asyncio.to_thread(model.compile)
            model.batcher = Batcher(
                model.bundle.embed_prepared,
                seconds=model.seconds,
                executor=self._net,
                wait=self.settings.batch_wait,
                measure_fn=self.metrics.batch,
            )
            model.task = asyncio.create_task(model.batcher.run())
        if generation.index is not None:
            await asyncio.to_thread(_warm, generation.index)

    def _switch(self, generation: Generation) -> None:
        old, self.current = self.current, generation
        generation.model.generations += 1
        self.metrics.ready.set(1)
        self.metrics.opened.set(time.time())
        new = "a new bundle, index or list of pictures is in use"
        _log.info("ready" if old is None else new)
        if old is not None:
            old.retired = True
            if not old.requests:
                self._retire(old)

    def _retire(self, generation: Generation) -> None:
        model, index = generation.model, generation.index
        model.generations -= 1
        if model.generations <= 0 and model.task is not None:
            model.task.cancel()
        shared = self.current is not None and self.current.index is index
        if index is not None and not shared:
            self._searchers.submit(index.close)

    def _discard(self, generation: Generation) -> None:
        """Closes a generation that was never used, except for parts that the present one uses."""
        generation.model.generations += 1
        self._retire(generation)

    @contextlib.contextmanager
    def use(self) -> Iterator[Generation]:
        """The present generation, which stays open within the block."""
        generation = self.current
        if generation is None:
            raise Refused(503, "the service is starting: the net is being compiled", retry_after=2)
        generation.requests += 1
        try:
            yield generation
        finally:
            generation.requests -= 1
            if generation.retired and not generation.requests:
                self._retire(generation)

    def request_reload(self) -> None:
        """Looks at the bundle, the index, the pictures and the tokens now (SIGHUP)."""
        self._reload_requested.set()

    async def _trim(self) -> None:
        """Gives memory back after times in which requests took much of it."""
        while True:
            await asyncio.sleep(_TRIM_SECONDS)
            if self.budget.most_used() > _TRIM_BYTES:
                await asyncio.to_thread(allocator.trim)

    async def _watch(self) -> None:
        while True:
            asked = True
            try:
                async with asyncio.timeout(self.settings.watch_seconds):
                    await self._reload_requested.wait()
            except TimeoutError:
                asked = False
            self._reload_requested.clear()
            try:
                await self.reload(asked=asked)
            except Exception as error:
                _log.error("reload: %s", error, exc_info=error)

    async def reload(self, *, asked: bool) -> None:
        """Switches to a new bundle or index, if there is one."""
        async with self._reloading:
            present = self.current
            assert present is not None
            signature = await asyncio.to_thread(self._signatures)
            old = (present.model.signature, present.index_signature)
            superseded = present.index is not None and await self.on_index(_superseded, present)
            if not asked and not superseded and signature in (old, self._failed_signature):
                return
            if any(part is None for part in signature):
                return  # in the middle of a rename
            generation = None
            try:
                if asked:
                    self.tokens = read_tokens(self.settings.token_file)
                generation = await asyncio.to_thread(self._open, present)
                await self._prepare(generation)
            except Exception as error:  # whatever a damaged bundle or index raises
                if generation is not None:
                    self._discard(generation)
                self._failed_signature = signature
                self.metrics.reloads.labels("failed").inc()
                text = " ".join(str(error).split())
                if not isinstance(error, ValueError | OSError):
                    text = f"{type(error).__name__}: {text}"
                _log.error("the present bundle and index stay in use: %s", text)
                return
            self._failed_signature = None
            self.metrics.reloads.labels("ok").inc()
            self._switch(generation)

    def _signatures(self) -> tuple[Any, Any]:
        settings = self.settings
        index = _NO_INDEX
        if settings.index is not None:
            index = indexes.signature(settings.index)
        return _signature(settings.bundle), index

    async def on_index(
        self, function: Callable[..., _T], *arguments: Any, client: str = "", work: float = 1.0
    ) -> _T:
        """What the function returns; if the request ends before that, its statement is stopped.

        Clients take turns; `work` is how much the call takes in comparison with others.
        """
        ended = threading.Event()

        def call() -> _T:
            with stopped_when(ended.is_set):
                return function(*arguments)

        async with self._turns.turn(client, work=work):
            try:
                return await asyncio.get_running_loop().run_in_executor(self._searchers, call)
            finally:
                ended.set()

    async def convert(self, function: Callable[..., _T], *arguments: Any) -> _T:
        """What a function of `formats` returns; it runs beside the requests."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._converters, function, *arguments)

    async def picture(self, generation: Generation, name: str, claim: Claim) -> bytes | None:
        """A small JPEG of the picture of an item; None if there is none that can be read."""
        pictures = generation.pictures
        if (kept := pictures.kept(name)) is not None:
            return kept
        try:
            data = await asyncio.to_thread(pictures.read, name)
            small = await self._decoders.small(data, claim.client)
        except (OSError, ValueError, Refused):  # deleted or damaged since it was listed
            return None
        pictures.keep(name, small)
        return small

    @contextlib.contextmanager
    def _admitted(self, client: str, count: int, large: int = 0) -> Iterator[None]:
        limit = self.settings.limits.waiting_images
        # Large images take the half of the places, so that there is one for other clients. The last
        # places are for clients that have none.
        most = int(_SHARE_OF_CLIENTS * limit) if self._waiting_of[client] else limit
        is_full = self.waiting_images and self.waiting_images + count > most
        if is_full or (self.waiting_large and self.waiting_large + large > limit // 2):
            raise Refused(503, "too many images or texts are waiting: try again", retry_after=1)
        self.waiting_images += count
        self.waiting_large += large
        self._waiting_of[client] += count
        self.metrics.waiting_images.set(self.waiting_images)
        try:
            yield
        finally:
            self.waiting_images -= count
            self.waiting_large -= large
            self._waiting_of[client] -= count
            if not self._waiting_of[client]:
                del self._waiting_of[client]
            self.metrics.waiting_images.set(self.waiting_images)

    async def embed(self, generation: Generation, images: list[bytes], claim: Claim) -> np.ndarray:
        """Embeddings [n d] of encoded images; refused as a whole if one is refused."""
        for image in images:
            if len(image) > (limit := self.settings.limits.image_bytes):
                raise Refused(413, f"an image has {len(image):,} bytes: the limit is {limit:,}")
        claim.take(len(images) * math.prod(generation.bundle.input_shape))
        works = [work(image) for image in images]
        with self._admitted(claim.client, len(images), sum(x.is_large for x in works)):
            batcher, turn = generation.batcher, Turn(claim.client)
            batcher.announced += len(images)
            try:
                calls = [
                    self._prepared(generation, image, work, turn)
                    for image, work in zip(images, works, strict=True)
                ]
                prepared = [await calls[0]] if len(calls) == 1 else await _all(calls)
            finally:
                batcher.announced -= len(images)
            return await batcher.embed(prepared, client=claim.client)

    async def embed_text(
        self, generation: Generation, texts: list[str], claim: Claim
    ) -> np.ndarray:
        """Vectors [n d] of texts, computed in the thread of the net."""
        bundle = generation.bundle
        if not bundle.has_text:
            raise Refused(422, "this service compares images only: its bundle has no text")
        loop = asyncio.get_running_loop()
        with self._admitted(claim.client, len(texts)):
            try:
                return await loop.run_in_executor(self._net, bundle.embed_text, texts)
            except ValueError as error:
                raise Refused(422, str(error)) from error

    async def _prepared(
        self, generation: Generation, image: bytes, work: Work, turn: Turn
    ) -> np.ndarray:
        start, model = time.perf_counter(), generation.model
        is_small = len(image) <= _SMALL_BYTES and work.pixels <= model.small_pixels
        is_small = is_small and work.format in _SMALL_FORMATS
        if is_small and work.seconds <= _MOST_SECONDS:
            prepared = model.bundle.prepare_small(image, most_pixels=work.pixels)
        else:
            prepared = None
        if prepared is None:
            prepared = await self._decoders.prepare(
                image, work, turn, spec=model.spec, shape=model.bundle.input_shape
            )
        self.metrics.decode_seconds.observe(time.perf_counter() - start)
        return prepared


async def _all(images: list[Coroutine[Any, Any, np.ndarray]]) -> list[np.ndarray]:
    """The results for several images; the first error cancels the others, and names its image."""

    async def numbered(number: int, image: Coroutine[Any, Any, np.ndarray]) -> np.ndarray:
        with naming(f"image number {number}"):
            return await image

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(numbered(i, x)) for i, x in enumerate(images)]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def _shortest(function: Callable[[Any], Any], argument: Any) -> float:
    """The shortest time of 3 to 30 calls, within half a second if three calls take less.

    Other work of the machine makes single calls longer while a service starts.
    """
    times: list[float] = []
    end = time.perf_counter() + 0.5
    while len(times) < 3 or (len(times) < 30 and time.perf_counter() < end):
        start = time.perf_counter()
        function(argument)
        times.append(time.perf_counter() - start)
    return min(times)


def _signature(bundle: str) -> Any:
    return folder.signature(pathlib.Path(bundle), "manifest.json")


def _superseded(generation: Generation) -> bool:
    try:
        return generation.index is not None and generation.index.superseded
    except (OSError, ValueError):
        return False  # in the middle of a rename, or a server that is away


def _warm(index: indexes.Index) -> None:
    """Searches once, which reads the files that searches need."""
    if index.count():
        vector = np.zeros((1, index.dimension), np.float32)
        vector[0, 0] = 1
        with contextlib.suppress(indexes.Damaged):  # of one item: its reader is told
            index.search(vector, 1, allow_fewer=True)
