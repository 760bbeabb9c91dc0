"""Images are decoded by a few processes, which can be killed.

An image that takes too long costs its process, which is replaced, and no thread of the service.
Each client gets the same share of the processes (`queues`). Of one client, the next image is the
one with the earliest due time: the time of its request, and a multiple of the work of the images of
this request up to it. So requests with many or large images let others pass, and wait no longer
than that themselves. One process takes no large images, and all together take no more memory than
one image may.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pathlib
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from dmljax.bundle import headers
from dmljax.bundle.errors import KINDS, BadImage
from dmljax.bundle.preprocessing import MAX_PIXELS
from dmljax.files import cores
from dmljax.files.memory import free_memory
from dmljax.serve import decoding
from dmljax.serve.budget import Budget, Claim
from dmljax.serve.errors import Refused
from dmljax.serve.queues import FairQueue

_log = logging.getLogger("dmljax.serve")
_PATIENCE = 4  # seconds that others may pass, for a second of work
_LARGE_SECONDS = 0.25
_LEAST_SECONDS = 1e-3  # for the way to a process and back
# Seconds of decoding, on the slow side of what was measured with two shared cores.
_SECONDS_OF_PIXEL, _SECONDS_OF_SCAN, _SECONDS_OF_BYTE = 15e-9, 1.5e-9, 10e-9
_SECONDS_OF_TEXT = 2.5e-3  # of a PNG: up to a MiB
# Bytes for a pixel while it is decoded, as measured: the file's own form, Pillow's, numpy's.
_BYTES_OF_PIXEL, _BYTES_OF_BUFFERED_PIXEL = 15, 20
_RECEIVED = 1 << 18
_PAUSE = 1.0  # seconds before another try to start a process
_START_SECONDS = 60.0
_LOOK_SECONDS = 0.05
_BYTES_OF_PROCESS = 1 << 26  # without an image
_SHARE_OF_PROCESSES = 0.5  # of the memory that requests leave; the net and compiling take the rest


def default_count(request_bytes: int, root: pathlib.Path = pathlib.Path("/")) -> int:
    """How many processes decode by default: one for each core, at least two.

    They are fewer if the memory that is free, also by the limit of a container, is too small for
    them beside `request_bytes` of all requests.
    """
    free = max(0, free_memory(root) - request_bytes)
    return max(2, min(cores.count(root), int(_SHARE_OF_PROCESSES * free) // _BYTES_OF_PROCESS))


class Work(NamedTuple):
    """What it takes to decode an image, by its header."""

    format: str | None
    pixels: int
    seconds: float
    memory: int

    @property
    def is_large(self) -> bool:
        return self.seconds > _LARGE_SECONDS


def work(image: bytes) -> Work:
    """The most that the header promises; of an unknown header, the most that is accepted."""
    facts = headers.facts(image)
    pixels = MAX_PIXELS if facts.pixels is None else min(facts.pixels, MAX_PIXELS)
    scans = min(facts.scans, headers.MAX_SCANS)
    seconds = pixels * (_SECONDS_OF_PIXEL + scans * _SECONDS_OF_SCAN)
    seconds += len(image) * _SECONDS_OF_BYTE + facts.texts * _SECONDS_OF_TEXT
    is_buffered = facts.format == "WEBP" or scans > 1
    memory = pixels * (_BYTES_OF_BUFFERED_PIXEL if is_buffered else _BYTES_OF_PIXEL)
    return Work(facts.format, pixels, seconds, memory + len(image))


class Turn:
    """The images of one request of a client: each waits for the work of those before it."""

    def __init__(self, client: str):
        self.client, self._due = client, time.monotonic()

    def due(self, seconds: float) -> float:
        """When an image of so much work is due."""
        self._due += _PATIENCE * seconds
        return self._due


class _Job(NamedTuple):
    image: bytes
    spec: bytes
    work: Work
    result: asyncio.Future


class Decoders:
    """Processes that decode; `start` gives them work.

    Args:
        count: how many.
        seconds: that an image may take.
        memory: that an image may take, and that all images may take together.
        budget: has the memory of all requests.
        restart_fn: called for each process that is replaced.
    """

    def __init__(
        self,
        count: int,
        *,
        seconds: float,
        memory: int,
        budget: Budget,
        restart_fn: Callable[[], None],
    ):
        self._seconds, self._memory, self._restart_fn = seconds, memory, restart_fn
        self._budget = budget
        self._waiting: FairQueue[_Job] = FairQueue()
        self._changed = asyncio.Condition()
        self._most_large = max(1, count - 1)
        self._large = self._used = 0
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: list[asyncio.Task] = []
        self._processes = [_Process(memory) for _ in range(count)]

    async def start(self) -> None:
        """Returns when all processes can decode."""
        await asyncio.gather(*map(self._started, self._processes))
        self._tasks = [asyncio.create_task(self._serve(x)) for x in self._processes]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.kill()
        for process in self._processes:
            await asyncio.to_thread(process.wait)

    def kill(self) -> None:
        """Ends all processes at once."""
        for process in self._processes:
            process.kill()

    async def prepare(
        self, image: bytes, work: Work, turn: Turn, *, spec: bytes, shape: tuple[int, ...]
    ) -> np.ndarray:
        """The input of the net, `uint8` in this `shape`; `spec` is the preprocessing as JSON."""
        pixels = await self._decoded(image, work, turn, spec)
        return np.frombuffer(pixels, np.uint8).reshape(shape)

    async def small(self, image: bytes, client: str) -> bytes:
        """A small JPEG."""
        return bytes(await self._decoded(image, work(image), Turn(client), b""))

    async def _decoded(self, image: bytes, work: Work, turn: Turn, spec: bytes) -> bytearray:
        if problem := headers.problem(image):
            raise BadImage(problem, kind="format")
        result = asyncio.get_running_loop().create_future()
        seconds = max(work.seconds, _LEAST_SECONDS)
        job = _Job(image, spec, work, result)
        self._waiting.put(turn.client, job, work=seconds, due=turn.due(seconds))
        await self._notify()
        return await result

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _take(self) -> tuple[_Job, Claim] | None:
        """The first job for which there is memory, and its claim."""
        claim = self._budget.claim()

        def accept(job: _Job) -> bool:
            memory = min(job.work.memory, self._memory)
            if self._used + memory > self._memory:
                return False
            if job.work.is_large and self._large >= self._most_large:
                return False
            if not claim.try_to_take(memory):
                self._look_again()
                return False
            self._large += job.work.is_large
            self._used += memory
            return True

        self._waiting.discard(lambda job: job.result.done())
        job = self._waiting.take(accept)
        return None if job is None else (job, claim)

    def _look_again(self) -> None:
        """Nobody says when other requests give memory back."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_LOOK_SECONDS, self._look)

    def _look(self) -> None:
        self._timer = None
        self._notifying = asyncio.create_task(self._notify())

    async def _serve(self, process: _Process) -> None:
        """Gives one image after the other to a process, and replaces the process if it must."""
        while True:
            await self._started(process)
            async with self._changed:
                job, claim = await self._changed.wait_for(self._take)
            try:
                with claim:
                    result: bytearray | Exception = await self._ask(process, job)
            finally:
                self._large -= job.work.is_large
                self._used -= min(job.work.memory, self._memory)
            if not job.result.done():
                if isinstance(result, Exception):
                    job.result.set_exception(result)
                else:
                    job.result.set_result(result)
            await self._notify()

    async def _started(self, process: _Process) -> None:
        while not process.is_ready:
            try:
                async with asyncio.timeout(_START_SECONDS):
                    await process.ready()
            except (OSError, TimeoutError) as error:
                _log.error("a process that decodes images does not start: %s", error)
                process.kill()
                await asyncio.sleep(_PAUSE)
                process.start()

    async def _ask(self, process: _Process, job: _Job) -> bytearray | Exception:
        for _ in range(2):
            try:
                async with asyncio.timeout(self._seconds):
                    status, payload = await process.ask(job.image, job.spec, job.work.pixels)
                break
            except TimeoutError:
                await self._replace(process)
                return Refused(413, f"an image takes longer than {self._seconds:g} s to decode")
            except OSError:  # a decoder crashed, or the process had ended before
                await self._replace(process)
                await self._started(process)
            except asyncio.CancelledError:
                process.kill()
                raise
        else:
            return BadImage("the image cannot be read: its decoder ended", kind="unreadable")
        if status == decoding.DONE:
            return payload
        if status == decoding.TOO_LARGE:
            return Refused(413, f"an image takes more than {self._memory:,} bytes to decode")
        kind, _, text = payload.decode(errors="replace").partition(" ")
        return BadImage(text, kind=kind if kind in KINDS else "unreadable")

    async def _replace(self, process: _Process) -> None:
        self._restart_fn()
        process.kill()
        await asyncio.to_thread(process.wait)  # the system takes its memory back
        process.start()


class _Process:
    """A process of `decoding`, and the socket to it."""

    def __init__(self, memory: int):
        self._memory = memory
        self.start()

    def start(self) -> None:
        self.is_ready = False
        self._socket, other = socket.socketpair()
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-m", decoding.__name__, str(other.fileno()), str(self._memory)],
                pass_fds=[other.fileno()],
                stdin=subprocess.DEVNULL,
                env=_environment(),
            )
        self._socket.setblocking(False)

    async def ready(self) -> None:
        await self._answer()
        self.is_ready = True

    async def ask(self, image: bytes, spec: bytes, pixels: int) -> tuple[int, bytearray]:
        head = decoding.QUESTION.pack(len(spec), len(image), pixels)
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self._socket, head + spec)
        await loop.sock_sendall(self._socket, image)
        return await self._answer()

    async def _answer(self) -> tuple[int, bytearray]:
        loop, data = asyncio.get_running_loop(), bytearray()
        length = decoding.ANSWER.size
        while len(data) < length:
            if not (received := await loop.sock_recv(self._socket, _RECEIVED)):
                raise ConnectionError("it ended")
            data += received
            if len(data) >= decoding.ANSWER.size:
                status, size = decoding.ANSWER.unpack_from(data)
                length = decoding.ANSWER.size + size
        del data[: decoding.ANSWER.size]
        return status, data

    def kill(self) -> None:
        with contextlib.suppress(OSError):
            self._process.kill()
        self._socket.close()

    def wait(self) -> None:
        self._process.wait()


def _environment() -> dict[str, str]:
    """The same modules as here, and no threads that would only take memory."""
    path = os.pathsep.join(part for part in sys.path if part)
    return os.environ | {"PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
