"""Images are decoded by worker processes, which can be killed. The workers do not import jax.

An image that takes too long costs its worker, which is replaced, but never a thread of the service.
Large images leave one worker to the others, so a few huge files do not hold up everybody.

`concurrent.futures` cannot kill a stuck worker. pebble (5.2) can, but its pool breaks for good when
a worker dies while it is idle. So this module talks to its workers over their stdin and stdout.
"""

import asyncio
import contextlib
import ctypes
import json
import logging
import os
import pathlib
import resource
import signal
import struct
import sys
from collections.abc import Callable

import numpy as np
from PIL import ImageOps, PngImagePlugin

from dmljax.bundle import preprocessing
from dmljax.bundle.errors import KINDS, BadImage
from dmljax.bundle.preprocessing import Preprocessing
from dmljax.data.decode import file_bytes
from dmljax.files import machine
from dmljax.files.reading import json_value
from dmljax.serve.api import Refused

_log = logging.getLogger("dmljax.serve")
# A question: whether it asks for a small picture instead of the input of the net, whether the image
# may be a large one, and the length of the image. An answer: a status, and the length of its text.
_QUESTION, _ANSWER = struct.Struct("<??Q"), struct.Struct("<BQ")
_DONE, _REFUSED, _LARGE, _NO_MEMORY, _TOO_SLOW = range(5)
_LARGE_PIXELS = 4_000_000
_BYTES_PER_PIXEL = 20  # at most: the decoder's own form, Pillow's and numpy's together
_SPARE_BYTES = 128 << 20  # memory of a worker for the encoded image and small ones
_SHARE_OF_MEMORY = 0.5  # of the free memory, for all workers together
_START_SECONDS, _PAUSE_SECONDS = 60.0, 1.0
_SIDE, _QUALITY = 384, 88  # of the JPEG of a small picture
_OUT_OF_MEMORY_SCORE = "500"  # where memory runs out, the system ends a worker first
_KEPT_BYTES, _BLOCK_BYTES = 8 << 20, 4 << 20  # freed memory that stays, and blocks that do not
_TEXT_BYTES = 1 << 20  # of all texts in a PNG, which Pillow unfolds


class _TooLarge(BadImage):
    """An image that is decoded only in the turn of large images."""


class Decoders:
    """Worker processes that decode images; all methods belong to one event loop.

    Args:
        count: number of workers; 0 takes one per core, at least two, as far as memory allows.
        preprocess: makes the input of the net from the decoded pixels.
        pixels: limit on the pixels of an image.
        seconds: time limit for an image.
        restart_fn: called for each worker that is replaced.
    """

    def __init__(
        self,
        count: int,
        preprocess: Preprocessing,
        *,
        pixels: int,
        seconds: float,
        restart_fn: Callable[[], None],
    ):
        self._shape, self._seconds = preprocess.shape, seconds
        memory = _BYTES_PER_PIXEL * pixels + _SPARE_BYTES
        count = count or default_count(memory)
        arguments = (str(memory), str(pixels), json.dumps(preprocess.to_json()))
        self._workers = [_Worker(arguments, seconds, restart_fn) for _ in range(count)]
        self._idle: asyncio.Queue[_Worker] = asyncio.Queue()
        self._large = asyncio.Semaphore(max(1, count - 1))
        self._at_a_time = max(1, count // 2)  # images of one request
        self._tasks: set[asyncio.Task] = set()

    async def start(self) -> None:
        """Starts the workers; returns when all are ready."""
        await asyncio.gather(*(worker.start() for worker in self._workers))
        for worker in self._workers:
            self._idle.put_nowait(worker)

    async def stop(self) -> None:
        """Ends the workers, whatever they do."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*(worker.stop() for worker in self._workers))

    async def prepare(self, encoded: list[bytes]) -> list[np.ndarray]:
        """Returns inputs of the net, `uint8 [height width channels]`, for the images of a request.

        The first image that is refused ends the request; of several, the error has its number.
        """
        turn = asyncio.Semaphore(self._at_a_time)

        async def prepare(number: int, image: bytes) -> np.ndarray:
            async with turn:
                try:
                    data = await self._decode(image)
                except BadImage as error:
                    name = f"image number {number}: " if len(encoded) > 1 else ""
                    raise BadImage(f"{name}{error}", kind=error.kind) from None
                return np.frombuffer(data, np.uint8).reshape(self._shape)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(prepare(i, x)) for i, x in enumerate(encoded)]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    async def picture(self, image: bytes) -> bytes:
        """Returns a small JPEG of an image."""
        return await self._decode(image, is_picture=True)

    async def _decode(self, image: bytes, *, is_picture: bool = False) -> bytes:
        status, data = await self._ask(image, is_picture, may_be_large=False)
        if status == _LARGE:
            async with self._large:
                status, data = await self._ask(image, is_picture, may_be_large=True)
        if status == _DONE:
            return data
        reasons = {
            _TOO_SLOW: f"an image takes longer than {self._seconds:g} s to decode",
            _NO_MEMORY: "an image takes too much memory to decode: send a smaller one",
        }
        if status in reasons:
            raise Refused(413, reasons[status])
        kind, _, text = data.decode(errors="replace").partition(" ")
        raise BadImage(text, kind=kind if kind in KINDS else "unreadable")

    async def _ask(self, image: bytes, is_picture: bool, may_be_large: bool) -> tuple[int, bytes]:
        """Asks the next idle worker, which goes on by itself if the request ends meanwhile."""
        worker, answer = await self._idle.get(), asyncio.get_running_loop().create_future()
        question = _QUESTION.pack(is_picture, may_be_large, len(image))
        task = asyncio.create_task(self._work(worker, question, image, answer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await answer

    async def _work(
        self, worker: "_Worker", question: bytes, image: bytes, answer: asyncio.Future
    ) -> None:
        """Answers the request at once, and replaces a worker that was too slow after it."""
        status, data = await worker.ask(question, image)
        if not answer.done():  # the request has ended
            answer.set_result((status, data))
        if status == _TOO_SLOW:
            await worker.replace()
        self._idle.put_nowait(worker)


class _Worker:
    """A process that runs `main` with these `arguments`, and is replaced when it ends."""

    def __init__(self, arguments: tuple[str, ...], seconds: float, restart_fn: Callable[[], None]):
        self._arguments, self._seconds, self._restart_fn = arguments, seconds, restart_fn

    async def start(self) -> None:
        path = os.pathsep.join(part for part in sys.path if part)
        variables = {"PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
        while True:
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", __name__, *self._arguments),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    env=os.environ | variables,
                )
                assert self._process.stdin is not None and self._process.stdout is not None
                self._questions, self._answers = self._process.stdin, self._process.stdout
                async with asyncio.timeout(_START_SECONDS):
                    await self._answers.readexactly(_ANSWER.size)
                return
            except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
                _log.error("a worker that decodes images does not start: %s", error)
                await asyncio.sleep(_PAUSE_SECONDS)

    async def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()  # the system takes its memory back

    async def ask(self, question: bytes, image: bytes) -> tuple[int, bytes]:
        """Returns a status and what belongs to it. A worker that ends is replaced and asked again.

        After `_TOO_SLOW` it must be replaced.
        """
        for _ in range(2):
            try:
                async with asyncio.timeout(self._seconds):
                    self._questions.write(question)
                    self._questions.write(image)
                    await self._questions.drain()
                    head = await self._answers.readexactly(_ANSWER.size)
                    status, length = _ANSWER.unpack(head)
                    return status, await self._answers.readexactly(length)
            except TimeoutError:
                return _TOO_SLOW, b""
            except (OSError, asyncio.IncompleteReadError):
                await self.replace()
        return _REFUSED, b"unreadable the image cannot be read: its decoder ended"

    async def replace(self) -> None:
        """Kills the process and starts another one."""
        self._restart_fn()
        await self.stop()
        await self.start()


def default_count(memory: int) -> int:
    """Returns the number of workers that fit the cores and the free memory; at least two.

    `memory` is what one of them may take. Limits of a container count.
    """
    fitting = int(_SHARE_OF_MEMORY * machine.free_memory()) // memory
    return max(2, min(machine.core_count(), fitting))


def main(memory: int, pixels: int, spec: str) -> None:
    """Answers the questions on stdin until it is closed: the program of a worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the service
    _end_with_parent()
    _limit(memory)
    PngImagePlugin.MAX_TEXT_MEMORY = _TEXT_BYTES
    preprocess = preprocessing.parse(json_value(spec.encode()))
    questions, answers, sys.stdout = sys.stdin.buffer, sys.stdout.buffer, sys.stderr
    answers.write(_ANSWER.pack(_DONE, 0))
    answers.flush()
    while len(head := questions.read(_QUESTION.size)) == _QUESTION.size:
        is_picture, may_be_large, length = _QUESTION.unpack(head)
        most = pixels if may_be_large else min(pixels, _LARGE_PIXELS)
        status, data = _answer(
            questions.read(length), preprocess, is_picture=is_picture, most=most, limit=pixels
        )
        answers.write(_ANSWER.pack(status, len(data)) + data)
        answers.flush()


def _answer(
    image: bytes, preprocess: Preprocessing, *, is_picture: bool, most: int, limit: int
) -> tuple[int, bytes]:
    def check_size(height: int, width: int) -> None:
        if height * width > limit:
            text = f"the image has {height * width:,} pixels: the limit is {limit:,}"
            raise BadImage(text, kind="too_large")
        if height * width > most:
            raise _TooLarge("the image is large", kind="too_large")
        if not is_picture:
            preprocess.check_size(height, width)

    try:
        if is_picture:
            return _DONE, _small_picture(image, check_size)
        side = preprocess.least_side
        decoded = preprocessing.pixels(image, check_size_fn=check_size, least_side=side)
        return _DONE, preprocess(decoded).tobytes()
    except _TooLarge:
        return _LARGE, b""
    except MemoryError:
        return _NO_MEMORY, b""
    except BadImage as error:
        if isinstance(error.__cause__, MemoryError):
            return _NO_MEMORY, b""
        return _REFUSED, f"{error.kind} {error}".encode()
    except Exception as error:  # damaged data raises almost anything
        return _REFUSED, f"unreadable the image cannot be read: {type(error).__name__}".encode()


def _small_picture(image: bytes, check_size_fn: Callable[[int, int], None]) -> bytes:
    """Returns a JPEG with sides of at most `_SIDE` pixels."""
    with preprocessing.opened(image) as picture:
        check_size_fn(picture.height, picture.width)
        picture.draft("RGB", (_SIDE, _SIDE))  # decodes a large JPEG at a fraction of its size
        small = ImageOps.exif_transpose(picture).convert("RGB")
        small.thumbnail((_SIDE, _SIDE))
    return file_bytes(small, "JPEG", quality=_QUALITY)


def _limit(memory: int) -> None:
    """Limits this process to `memory` bytes more than it has now."""
    machine.limit_freed_memory(_KEPT_BYTES, large=_BLOCK_BYTES)
    with contextlib.suppress(OSError):
        pathlib.Path("/proc/self/oom_score_adj").write_text(_OUT_OF_MEMORY_SCORE)
    with contextlib.suppress(OSError, ValueError):
        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
        most = pages * os.sysconf("SC_PAGE_SIZE") + memory
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _end_with_parent() -> None:
    """Lets the system end this process with the service, also in the middle of an image."""
    with contextlib.suppress(OSError, AttributeError):
        set_parent_death_signal = 1
        ctypes.CDLL("libc.so.6").prctl(set_parent_death_signal, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
