"""Decoding in processes: images and faults that stop one of them stop nobody else."""

import asyncio
import concurrent.futures
import contextlib
import io
import json
import os
import pathlib
import select
import signal
import socket
import subprocess
import sys
import time
import zlib

import msgpack
import numpy as np
import pytest
from PIL import Image
from service_cases import environment, indexed, png, served

from dmljax.bundle import headers, preprocessing
from dmljax.serve import generation
from dmljax.serve.budget import Budget
from dmljax.serve.settings import Settings
from dmljax.serve.workers import Decoders, Turn, default_count, work

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
    """A PNG with texts that unfold to a MiB each."""
    body = b"zTXta\0\0" + zlib.compress(bytes(1 << 20))
    text = (len(body) - 4).to_bytes(4, "big") + body + zlib.crc32(body).to_bytes(4, "big")
    end_of_header = 33
    return image[:end_of_header] + count * text + image[end_of_header:]


def _children(pid):
    """Processes that decode."""
    children = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    names = {int(x): pathlib.Path(f"/proc/{x}/cmdline").read_bytes() for x in children}
    return {x for x, name in names.items() if b"dmljax.serve.decoding" in name}


@pytest.fixture(scope="module")
def strict(bundle_folder, tmp_path_factory):
    """A service whose decoders get little time and memory."""
    folder = tmp_path_factory.mktemp("strict")
    words = ("--decoders=2", "--decode-seconds=3", "--max-decode-bytes=60000000")
    place = indexed(bundle_folder, folder, 5)
    with served(folder, bundle_folder, f"--index={place}", *words) as running:
        yield running


def _restarts(server):
    figures = server.request("GET", "/metrics").body.decode().splitlines()
    return float(
        next(x for x in figures if x.startswith("dmljax_decoder_restarts_total ")).split()[1]
    )


def test_an_image_that_takes_too_long_costs_its_process_alone(strict):
    before = _children(strict.process.pid)
    assert len(before) == 2
    for pid in before:
        os.kill(pid, signal.SIGSTOP)  # as if it computed for hours
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        # A small one that takes long to read is no small one.
        images = _noise(200), _with_texts(png(2), 50)
        slow = [pool.submit(strict.request, "POST", "/embed", x) for x in images]
        assert strict.request("POST", "/embed", png(1)).status == 200  # a small one needs no other
        for answer in slow:
            assert answer.result().status == 413
            assert answer.result().json["error"] == "an image takes longer than 3 s to decode"
    assert strict.request("POST", "/embed", _noise(202)).status == 200
    assert _restarts(strict) == 2
    assert not before & _children(strict.process.pid)


def test_a_process_that_is_gone_is_replaced_before_the_next_image(strict):
    for pid in _children(strict.process.pid):
        os.kill(pid, signal.SIGKILL)
    assert strict.request("POST", "/embed", _noise(200)).status == 200


def test_an_image_that_takes_too_much_memory_is_refused(strict):
    answer = strict.request("POST", "/embed", _blank(5000))
    assert answer.status == 413 and "more than 60,000,000 bytes to decode" in answer.json["error"]
    assert strict.request("POST", "/embed", _noise(200)).status == 200


def test_slow_kinds_of_images_are_refused(strict):
    jpeg = _noise(300, "JPEG", progressive=True)
    scan = jpeg[jpeg.rfind(b"\xff\xda") : -2]
    for body, text in (
        (jpeg[:-2] + scan * headers.MAX_SCANS + jpeg[-2:], "scans: the limit is 100"),
        (b"P3\n2 2\n255\n" + b"1 2 3 " * 4, "binary PPM"),
    ):
        answer = strict.request("POST", "/embed", body)
        assert answer.status == 415 and text in answer.json["error"]


def _waiting(server):
    name = b"\ndmljax_waiting_images "
    return float(server.request("GET", "/metrics").body.partition(name)[2].split()[0])


@pytest.mark.parametrize("image", [_noise(300), _blank(300)], ids=["large body", "small body"])
def test_images_of_a_client_that_is_gone_are_not_decoded(strict, image):
    body = msgpack.packb({"images": [image] * 30})
    head = f"POST /embed HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    head += "Content-Type: application/msgpack\r\n\r\n"
    for pid in _children(strict.process.pid):
        os.kill(pid, signal.SIGSTOP)
    with socket.create_connection(("127.0.0.1", strict.port), timeout=20) as connection:
        connection.sendall(head.encode() + body)
        for _ in range(100):
            if (waiting := _waiting(strict)) == 30:
                break
            time.sleep(0.02)
    assert waiting == 30
    for _ in range(100):  # long before all would be refused, after three seconds each
        if not _waiting(strict):
            break
        time.sleep(0.02)
    assert not _waiting(strict)
    for pid in _children(strict.process.pid):
        os.kill(pid, signal.SIGCONT)
    assert strict.request("POST", "/embed", _noise(200)).status == 200


def test_pictures_are_decoded_there_too(strict):
    for pid in _children(strict.process.pid):
        os.kill(pid, signal.SIGSTOP)
    # Each of the two processes costs one request at most.
    statuses = [strict.request("GET", "/items/image?id=cats/01.png").status for _ in range(3)]
    assert statuses[0] == 404 and statuses[-1] == 200


@contextlib.contextmanager
def _asked(server, image, count, *, address="127.0.0.1", headers=""):
    """Connections from an address, each with a request that waits for its answer."""
    head = f"POST /embed HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(image)}\r\n{headers}"
    with contextlib.ExitStack() as stack:
        connections = []
        for _ in range(count):
            connection = socket.create_connection(
                ("127.0.0.1", server.port), timeout=60, source_address=(address, 0)
            )
            connections.append(stack.enter_context(connection))
            connection.sendall(head.encode() + b"\r\n" + image)
        yield connections


def _until_waiting(server, count):
    for _ in range(1000):
        if _waiting(server) == count:
            return
        time.sleep(0.02)
    raise AssertionError(f"{_waiting(server)} images wait, and not {count}")


def test_a_client_with_many_requests_does_not_make_another_one_wait(bundle_folder, tmp_path):
    """Two clients at two addresses, and then two whose addresses are in a header of a proxy."""
    image, proxy = _noise(500), "X-Real-IP: 192.0.2.{}\r\n"
    words = ("--decoders=1", "--decode-seconds=60", "--client-header=X-Real-IP")
    with served(tmp_path, bundle_folder, *words, "--max-waiting=80") as server:
        for many, one in (
            ({"address": "127.0.0.2"}, {}),
            ({"headers": proxy.format(1)}, {"headers": proxy.format(2)}),
        ):
            (decoder,) = _children(server.process.pid)
            os.kill(decoder, signal.SIGSTOP)
            with _asked(server, image, 60, **many) as others:
                _until_waiting(server, 60)
                with _asked(server, image, 1, **many) as refused:
                    assert b" 503 " in refused[0].recv(1000)  # the last places are for others
                with _asked(server, image, 1, **one) as asked:
                    _until_waiting(server, 61)
                    os.kill(decoder, signal.SIGCONT)
                    assert b" 200 " in asked[0].recv(1000)
                    # What has been answered until now. The other 58 have still to be decoded.
                    answered, _, _ = select.select(others, [], [], 0)
                    assert len(answered) < 30
                assert all(b" 200 " in x.recv(1000) for x in others)


def _decoders(count):
    budget = Budget(1 << 31)
    return Decoders(count, seconds=60, memory=1 << 30, budget=budget, restart_fn=lambda: None)


def _prepared(images, count=1):
    """Numbers of the images in the order in which they are decoded; `images` are lists."""
    preprocess = preprocessing.from_transform("unchanged", (8, 8, 1))
    spec = json.dumps(preprocess.to_json()).encode()
    order = []

    async def decode(decoders, turn, name, image):
        result = await decoders.prepare(image, work(image), turn, spec=spec, shape=(8, 8, 1))
        assert result.shape == (8, 8, 1)
        order.append(name)

    async def main():
        decoders = _decoders(count)
        calls = []
        for request, encoded in images.items():
            turn = Turn("client")
            calls += [decode(decoders, turn, request, image) for image in encoded]
        tasks = [asyncio.create_task(call) for call in calls]
        await asyncio.sleep(0)  # all wait before the first one is decoded
        await decoders.start()
        try:
            await asyncio.gather(*tasks)
        finally:
            await decoders.stop()

    asyncio.run(main())
    return order


def test_a_request_with_many_images_lets_others_pass():
    image = _noise(500)
    order = _prepared({"many": [image] * 20, "one": [image], "two": [image] * 2})
    assert order.index("one") < 6 and order[6:].count("two") < 2
    assert order.count("many") == 20


def test_a_process_is_left_for_images_that_are_not_large():
    """Large images come first here, and still one process takes the others."""
    large = _blank(5000)
    assert work(large).is_large and not work(_noise(500)).is_large
    assert work(_with_texts(_noise(500), 200)).is_large
    order = _prepared({"large": [large] * 2, "small": [_noise(500)] * 3}, count=2)
    assert order[-1] == "large"


def test_headers_that_promise_less_than_the_image_has_are_refused():
    jpeg = _noise(64, "JPEG")
    assert work(jpeg).pixels == 64 * 64
    promised = work(jpeg)._replace(pixels=63 * 64)

    async def main():
        decoders = _decoders(1)
        await decoders.start()
        preprocess = preprocessing.from_transform("unchanged", (8, 8, 1))
        spec = json.dumps(preprocess.to_json()).encode()
        try:
            with pytest.raises(ValueError, match="two sizes"):
                await decoders.prepare(jpeg, promised, Turn("client"), spec=spec, shape=(8, 8, 1))
        finally:
            await decoders.stop()

    asyncio.run(main())


def _is_gone(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def _wait_until_gone(pids):
    assert pids
    for _ in range(100):
        if all(map(_is_gone, pids)):
            return
        time.sleep(0.1)
    raise AssertionError("processes that decode are left")


_STUCK = """
import sys, time
from dmljax.serve import generation, server
from dmljax.serve.settings import Limits, Settings

class Service(generation.Service):
    def __init__(self, settings):
        super().__init__(settings)
        self._searchers.submit(time.sleep, 600)

server.Service = Service
server.run(Settings(sys.argv[1], port=0, limits=Limits(drain_seconds=2)))
"""


def test_the_end_comes_in_time_whatever_runs(bundle_folder):
    """A thread runs on, for which Python would wait."""
    process = subprocess.Popen(
        [sys.executable, "-c", _STUCK, bundle_folder],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
        text=True,
    )
    try:
        assert process.stdout.readline().startswith("http://")
        decoders = _children(process.pid)
        time.sleep(1)
        process.send_signal(signal.SIGTERM)
        start = time.monotonic()
        assert "the process ends, although" in process.communicate(timeout=30)[1]
        assert process.returncode == 128 + signal.SIGTERM
        assert time.monotonic() - start < 15
        _wait_until_gone(decoders)
    finally:
        process.kill()
        process.wait()


def test_the_processes_end_with_a_service_that_is_killed(bundle_folder, tmp_path):
    with served(tmp_path, bundle_folder) as server:
        decoders = _children(server.process.pid)
        os.kill(min(decoders), signal.SIGSTOP)
        server.process.kill()
        server.process.wait()
        _wait_until_gone(decoders)


def test_the_number_of_processes_is_checked(bundle_folder):
    with pytest.raises(ValueError, match="--decoders=0 must lie between 1 and 256"):
        Settings(str(bundle_folder), decoders=0).check()


@pytest.mark.parametrize(
    "processors, mib, expected",
    [("max", 99_999, 64), ("4", 99_999, 4), ("max", 4096, 20), ("1", 9, 2)],
)
def test_the_limits_of_a_container_limit_the_processes_that_decode(
    tmp_path, monkeypatch, processors, mib, expected
):
    """By default one for each core, if half of the memory that requests leave is enough."""
    monkeypatch.setattr("dmljax.files.cores._of_scheduler", lambda: 64)
    group = tmp_path / "sys/fs/cgroup"
    limit = processors if processors == "max" else f"{int(processors) * 100_000}"
    files = {"cpu.max": f"{limit} 100000", "memory.max": mib << 20, "memory.current": 0}
    for name, text in files.items():
        group.mkdir(parents=True, exist_ok=True)
        (group / name).write_text(f"{text}\n")
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    (tmp_path / "proc/meminfo").write_text(f"MemAvailable: {1 << 30} kB\n")
    assert default_count(3 << 29, tmp_path) == expected


def test_the_service_decodes_by_the_default_number_of_processes(bundle_folder, monkeypatch):
    counts = []
    monkeypatch.setattr(generation, "default_count", lambda request_bytes: request_bytes >> 20)
    monkeypatch.setattr(generation, "Decoders", lambda count, **_: counts.append(count))
    for decoders in (None, 3):
        generation.Service(Settings(str(bundle_folder), decoders=decoders))
    assert counts == [1536, 3]
