"""Decoding in workers: images and faults that stop one of them stop nobody else."""

import asyncio
import functools
import io
import os
import pathlib
import signal
import subprocess
import sys
import zlib

import numpy as np
import pytest
from PIL import Image
from service_cases import environment, png, until

from dmljax.bundle import preprocessing
from dmljax.bundle.errors import BadImage
from dmljax.serve.api import Refused
from dmljax.serve.decoding import Decoders, default_count

pytestmark = pytest.mark.xdist_group("serve")


def _noise(side, format="PNG", **options):
    file = io.BytesIO()
    pixels = np.random.default_rng(side).integers(0, 256, (side, side), np.uint8)
    Image.fromarray(pixels).save(file, format, **options)
    return file.getvalue()


def _blank(side):
    file = io.BytesIO()
    Image.new("RGB", (side, side)).save(file, "PNG")
    return file.getvalue()


def _with_texts(image, count):
    """Returns a PNG with texts that unfold to a MiB each."""
    body = b"zTXta\0\0" + zlib.compress(bytes(1 << 20))
    text = (len(body) - 4).to_bytes(4, "big") + body + zlib.crc32(body).to_bytes(4, "big")
    end_of_header = 33
    return image[:end_of_header] + count * text + image[end_of_header:]


def _workers(pid):
    """Returns the processes that decode."""
    children = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    names = {int(x): pathlib.Path(f"/proc/{x}/cmdline").read_bytes() for x in children}
    return {x for x, name in names.items() if b"dmljax.serve.decoding" in name}


def _decoded(count, calls_fn, *, pixels=25_000_000, seconds=60.0):
    """Returns what `calls_fn(decoders)` returns with `count` workers, and the count of new ones."""
    preprocess, restarts = preprocessing.from_transform("unchanged", (8, 8, 1)), []

    async def main():
        decoders = Decoders(
            count,
            preprocess,
            pixels=pixels,
            seconds=seconds,
            restart_fn=lambda: restarts.append(1),
        )
        await decoders.start()
        try:
            return await calls_fn(decoders)
        finally:
            await decoders.stop()

    return asyncio.run(main()), len(restarts)


def test_an_image_that_takes_too_long_costs_its_worker_alone():
    """The answer does not wait for the next worker, which takes seconds on a busy machine."""

    async def start_after(event, start_fn):
        await event.wait()
        await start_fn()

    async def calls(decoders):
        is_answered = asyncio.Event()
        for worker in decoders._workers:
            os.kill(worker._process.pid, signal.SIGSTOP)  # as if it computed for hours
            worker.start = functools.partial(start_after, is_answered, worker.start)
        requests = (decoders.prepare([_noise(200)]) for _ in decoders._workers)
        for error in await asyncio.gather(*requests, return_exceptions=True):
            assert isinstance(error, Refused) and error.status == 413
            assert str(error) == "an image takes longer than 0.2 s to decode"
        is_answered.set()
        for worker in decoders._workers:
            worker._seconds = 60
        await asyncio.gather(*(decoders.prepare([_noise(202)]) for _ in range(4)))

    assert _decoded(2, calls, seconds=0.2)[1] == 2


def test_a_worker_that_is_gone_is_replaced_before_the_next_image():
    async def calls(decoders):
        os.kill(decoders._workers[0]._process.pid, signal.SIGKILL)
        assert (await decoders.picture(png(1)))[:2] == b"\xff\xd8"
        with pytest.raises(BadImage, match="cannot be read"):  # its texts are not unfolded
            await decoders.prepare([_with_texts(png(2), 50)])

    assert _decoded(1, calls)[1] == 1


def test_large_images_and_requests_with_many_images_let_others_pass():
    """Sends them first; still one worker is free for the others."""
    order = []

    async def calls(decoders):
        async def decode(name, images):
            assert all(x.shape == (8, 8, 1) for x in await decoders.prepare(images))
            order.append(name)

        tasks = [asyncio.create_task(decode("large", [_blank(2200)])) for _ in range(3)]
        tasks += [asyncio.create_task(decode("many", [_noise(800)] * 20))]
        await asyncio.sleep(0.1)
        tasks += [asyncio.create_task(decode("small", [_noise(200)])) for _ in range(5)]
        await asyncio.gather(*tasks)

    _decoded(2, calls)
    assert set(order[:5]) <= {"small", "large"} and order.count("small") == 5
    assert max(i for i, name in enumerate(order) if name == "small") <= 6


def test_images_beyond_the_limits_are_refused():
    async def calls(decoders):
        with pytest.raises(BadImage, match="has 4,840,000 pixels: the limit is 4,800,000"):
            await decoders.prepare([_blank(2200)])
        with pytest.raises(BadImage, match=r"image number 1: .*pixels"):
            await decoders.prepare([_noise(20), _blank(2200)])
        decoders._workers[0]._seconds = 1e-4
        with pytest.raises(Refused, match="longer"):
            await decoders.prepare([_blank(2100)])
        decoders._workers[0]._seconds = 60
        return await decoders.prepare([_blank(2100)])

    assert _decoded(1, calls, pixels=4_800_000)[0][0].shape == (8, 8, 1)


def test_the_memory_of_a_worker_is_limited():
    async def calls(decoders):
        decoders._workers[0]._arguments = (str(30 << 20), *decoders._workers[0]._arguments[1:])
        await decoders._workers[0].replace()
        with pytest.raises(Refused, match="too much memory"):
            await decoders.prepare([_blank(4000)])
        return await decoders.prepare([_noise(200)])

    assert _decoded(1, calls)[0][0].shape == (8, 8, 1)


def _is_gone(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


_STUCK = """
import time, types
from concurrent.futures import ThreadPoolExecutor
from dmljax.bundle import preprocessing
from dmljax.serve import batching, decoding, server, service
from dmljax.serve.settings import Limits, Settings

class Service(service.Service):
    def __init__(self, settings):  # without a bundle
        self.settings, self.metrics, self.tokens = settings, service.Metrics(), ()
        self.index, self._net = types.SimpleNamespace(close=print), ThreadPoolExecutor(1)
        self._searchers = ThreadPoolExecutor(1)
        self._searchers.submit(time.sleep, 600)
        self._batcher = batching.Batcher(None, sizes=(1,), executor=self._net, measure_fn=None)
        preprocess = preprocessing.from_transform("unchanged", (8, 8, 1))
        self._decoders = decoding.Decoders(2, preprocess, pixels=9, seconds=1, restart_fn=print)

server.Service, service._CLOSE_SECONDS = Service, 1.0
server.run(Settings("none", port=0, limits=Limits(seconds=2)))
"""


def test_the_end_comes_in_time_whatever_runs():
    """Threads run on, for which Python would wait."""
    command = [sys.executable, "-c", _STUCK]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment(), text=True) as process:
        try:
            assert process.stdout.readline().startswith("http://")
            workers = _workers(process.pid)
            process.send_signal(signal.SIGTERM)
            process.wait(30)
            until(lambda: len(workers) == 2 and all(map(_is_gone, workers)))
        finally:
            process.kill()


_STARTED = """
import asyncio
from dmljax.bundle import preprocessing
from dmljax.serve.decoding import Decoders

async def main():
    preprocess = preprocessing.from_transform("unchanged", (8, 8, 1))
    decoders = Decoders(2, preprocess, pixels=9, seconds=60, restart_fn=print)
    await decoders.start()
    print(*(worker._process.pid for worker in decoders._workers), flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_the_workers_end_with_a_service_that_is_killed():
    command = [sys.executable, "-c", _STARTED]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment(), text=True) as process:
        workers = [int(pid) for pid in process.stdout.readline().split()]
        os.kill(min(workers), signal.SIGSTOP)
        process.kill()
    until(lambda: len(workers) == 2 and all(map(_is_gone, workers)))


@pytest.mark.parametrize("free, expected", [(99 << 30, 64), (4 << 30, 4), (9 << 20, 2)])
def test_the_default_number_of_workers_fits_cores_and_memory(monkeypatch, free, expected):
    monkeypatch.setattr("dmljax.files.machine.core_count", lambda: 64)
    monkeypatch.setattr("dmljax.files.machine.free_memory", lambda: free)
    assert default_count(500 << 20) == expected
