"""The service under attack: what other clients notice, and what memory it takes.

`python benchmarks/siege.py` runs all known attacks in rotation for an hour, while 16 ordinary
clients use the service, behind nginx with `launch/serve.nginx.conf` (`--direct`: without). The
memory of the service, its workers and nginx may reach 2 GiB: a control group limits it where that
is possible, else it is watched. The program prints its measurements, and ends with status 1 if a
bound is broken: the service restarted, an ordinary client got a status above 499 other than 503
with Retry-After, its 99th percentile is above a second, or the memory at the end is more than 10 %
above that at the start.
"""

import argparse
import asyncio
import base64
import collections
import contextlib
import io
import json
import os
import pathlib
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import zlib

import numpy as np
import service
from PIL import Image

from dmljax.serve.settings import Limits

ROOT = pathlib.Path(__file__).parents[1]
_STEP = 8.0  # seconds of an attack in the rotation
_REST = 6.0  # seconds without attacks, at the start and at the end
_OTHER = "127.0.0.2"  # an address that ordinary clients do not have
_GROUPS = pathlib.Path("/sys/fs/cgroup")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bundle", help="a bundle; by default one of a glyphs-sized net")
    parser.add_argument("--seconds", type=float, default=3600.0, help="of attacks")
    parser.add_argument("--clients", type=int, default=16, help="ordinary clients")
    parser.add_argument(
        "--memory", type=int, default=2 << 30, help="bytes that the service may take"
    )
    parser.add_argument("--p99", type=float, default=1.0, help="bound in seconds")
    parser.add_argument("--direct", action="store_true", help="attack without nginx in front")
    parser.add_argument("--growth", type=float, default=0.1, help="bound of the memory at the end")
    parser.add_argument("--attack", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.attack:
        attack(args.attack, args.seconds)
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        bundle = pathlib.Path(args.bundle) if args.bundle else service.glyphs_bundle(folder)
        return asyncio.run(siege(bundle, folder, args))


async def siege(bundle: pathlib.Path, folder: pathlib.Path, args: argparse.Namespace) -> int:
    server = Server(bundle, filled_index(bundle, folder), folder, args.memory, args.direct)
    try:
        await server.ready()
        memory = [server.memory()]
        watch = asyncio.create_task(server.watch(memory))
        results = Results()
        ends: list[bool] = []
        clients = [
            asyncio.create_task(client(server, i, results, ends)) for i in range(args.clients)
        ]
        await asyncio.sleep(_REST)
        first = server.memories()
        results.clear()
        command = [sys.executable, __file__, f"--attack={server.port}", f"--seconds={args.seconds}"]
        attackers = await asyncio.create_subprocess_exec(*command)
        await attackers.wait()
        times, statuses = list(results.times), dict(results.statuses)
        await asyncio.sleep(_REST)
        ends.append(True)
        await asyncio.gather(*clients)
        await asyncio.sleep(_REST)
        last = server.memories()
        watch.cancel()
    finally:
        server.stop()
    p50, p99 = (float(np.quantile(times, q)) for q in (0.5, 0.99))
    wrong = {s: n for s, n in statuses.items() if s != 503 and (s >= 500 or s == 0)}
    print(
        f"memory limit: {'control group' if server.group else 'watched'}, {args.memory >> 20} MiB"
    )
    print(f"restarts: {server.restarts}")
    print(f"answers to ordinary clients: {sum(statuses.values()):,}, by status {statuses}")
    print(f"5xx other than 503 with Retry-After, or no answer (0): {sum(wrong.values())}")
    print(f"repeated on a new connection: {results.repeated}")
    print(f"p50 {1000 * p50:.0f} ms, p99 {1000 * p99:.0f} ms, longest {1000 * max(times):.0f} ms")
    texts = [f"{sum(sizes)} MiB {tuple(sizes)}" for sizes in (first, last)]
    print(f"memory: {texts[0]} at the start, {max(memory)} MiB at most, {texts[1]} at the end")
    has_grown = sum(last) > (1 + args.growth) * sum(first)
    broken = [
        text
        for text, is_broken in (
            ("the service restarted or took more memory than its limit", server.restarts > 0),
            ("ordinary clients got errors", bool(wrong)),
            (f"p99 is above {args.p99:g} s", p99 > args.p99),
            (f"memory grew by more than {args.growth:.0%}", has_grown),
        )
        if is_broken
    ]
    for text in broken:
        print(f"broken: {text}")
    return 1 if broken else 0


def filled_index(bundle: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """Builds an index: 2,000 items with little metadata, and 1,001 with 20 kB of it."""
    from dmljax import bundle as bundles
    from dmljax import index as indexes

    model = bundles.load(bundle)
    vectors = np.random.default_rng(0).normal(size=(3001, model.dimension))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    ids = [f"small-{i}" for i in range(2000)] + [f"large-{i}" for i in range(1001)]
    metadata = [{"folder": f"f{i % 7}"} for i in range(2000)] + [{"text": "x" * 20_000}] * 1001
    place = folder / "siege.index"
    with indexes.create(place, model=model.digest, dimension=model.dimension) as index:
        for start in range(0, 3001, 500):
            part = slice(start, start + 500)
            index.add(ids[part], vectors[part], metadata[part])
    return place


class Server:
    """The service as a process, which is started again if it ends, and nginx in front of it."""

    def __init__(
        self,
        bundle: pathlib.Path,
        index: pathlib.Path,
        folder: pathlib.Path,
        memory: int,
        direct: bool,
    ):
        self._words = [sys.executable, "-m", "dmljax.main", "serve", str(bundle)]
        self._words += [f"--index={index}", "--quiet"]
        self._log, self._memory = folder / "log.txt", memory
        self.restarts, self._port = 0, 0
        self.group = _group(memory)
        self._start()
        self.port, self._proxy = self._port, None
        if not direct:
            self.port = free_port()
            self._proxy = proxied(folder, service_port=self._port, port=self.port)

    def _start(self) -> None:
        with self._log.open("a") as log:
            self.process = subprocess.Popen(
                [*self._words, f"--port={self._port}"],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
            )
        if self.group:
            (self.group / "cgroup.procs").write_text(str(self.process.pid))
        assert self.process.stdout is not None
        match = re.search(r"http://\S+:(\d+)", self.process.stdout.readline())
        assert match, self._log.read_text()
        self._port = int(match[1])

    async def ready(self) -> None:
        while True:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
                answer = await ask(reader, writer, request("GET", "/readyz"))
                writer.close()
                if answer[0] == 200:
                    return
            await asyncio.sleep(0.2)

    def memory(self) -> int:
        """Returns the MiB of the service, its workers and nginx."""
        return sum(self.memories())

    def memories(self) -> list[int]:
        """Returns the MiB of each process of the service and of nginx."""
        roots = [self.process.pid] + ([self._proxy.pid] if self._proxy else [])
        sizes = []
        for root in roots:
            with contextlib.suppress(OSError):
                children = pathlib.Path(f"/proc/{root}/task/{root}/children").read_text().split()
                for process in (root, *children):
                    with contextlib.suppress(OSError):
                        status = pathlib.Path(f"/proc/{process}/status").read_text()
                        match = re.search(r"VmRSS:\s+(\d+)", status)
                        sizes.append(int(match[1]) >> 10 if match else 0)
        return sizes

    async def watch(self, memory: list[int]) -> None:
        while True:
            await asyncio.sleep(0.2)
            memory.append(self.memory())
            if memory[-1] > self._memory >> 20 and not self.group:
                print(f"{memory[-1]} MiB are more than the limit", flush=True)
                self.process.kill()
            if self.process.poll() is not None:
                self.restarts += 1
                print(f"the service ended with {self.process.returncode}", flush=True)
                self._start()

    def stop(self) -> None:
        if self._proxy:
            self._proxy.terminate()
            self._proxy.wait()
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(30)
        finally:
            self.process.kill()
            self.process.wait()
            if self.group:
                self.group.rmdir()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def proxied(
    folder: pathlib.Path, *, service_port: int, port: int, seconds: int = 10
) -> subprocess.Popen:
    """Starts nginx with `launch/serve.nginx.conf`, these two ports, and this patience."""
    text = (ROOT / "launch" / "serve.nginx.conf").read_text()
    text = text.replace("listen 8080;", f"listen {port};")
    text = text.replace("server 127.0.0.1:8000;", f"server 127.0.0.1:{service_port};")
    text = text.replace("_timeout 10s;", f"_timeout {seconds}s;")
    if os.getuid() == 0:  # else its worker could not enter the folder of temporary files
        text = f"user root;\n{text}"
    (folder / "nginx.conf").write_text(text)
    command = ["nginx", "-p", folder, "-c", folder / "nginx.conf"]
    with (folder / "nginx.log").open("w") as log:
        return subprocess.Popen(command, stderr=log)


def _group(memory: int) -> pathlib.Path | None:
    """Creates a control group with this limit; returns None where that is not possible."""
    group = _GROUPS / f"siege-{os.getpid()}"
    if not (_GROUPS / "cgroup.controllers").exists():
        return None
    try:
        group.mkdir()
        (group / "memory.max").write_text(str(memory))
        (group / "memory.swap.max").write_text("0")
    except OSError:
        with contextlib.suppress(OSError):
            group.rmdir()
        return None
    return group


class Results:
    """Times in seconds and statuses; 0 is an answer that did not come."""

    def __init__(self):
        self.clear()

    def clear(self) -> None:
        self.times: list[float] = []
        self.statuses: collections.Counter = collections.Counter()
        self.repeated = 0


def request(method: str, path: str, body: bytes = b"", kind: str = "") -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    return (head + (f"Content-Type: {kind}\r\n" if kind else "") + "\r\n").encode() + body


async def ask(reader, writer, data: bytes) -> tuple[int, bool, bool]:
    """Returns the status, and the presence of Retry-After and of Connection: close."""
    writer.write(data)
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = re.search(rb"content-length: (\d+)", head)
    await reader.readexactly(int(length[1]) if length else 0)
    return int(head[9:12]), b"retry-after:" in head, b"connection: close" in head


async def client(server: Server, number: int, results: Results, ends: list[bool]) -> None:
    """Sends ordinary requests one after the other on one connection."""
    rng, requests, connection = random.Random(number), ordinary_requests(), None
    while not ends:
        data = rng.choice(requests)
        start, status = time.perf_counter(), 0
        for attempt in range(2):
            try:
                if connection is None:
                    connection = await asyncio.open_connection("127.0.0.1", server.port)
                status, retry, closed = await ask(*connection, data)
                if status == 503 and not retry:
                    status = 599
                if closed:
                    connection[1].close()
                    connection = None
                break
            except (OSError, asyncio.IncompleteReadError):  # closed while it waited, as it may be
                results.repeated += attempt == 0
                connection = None
        results.times.append(time.perf_counter() - start)
        results.statuses[status] += 1
        await asyncio.sleep(0.3 if status == 503 else 0.05)
    if connection is not None:
        connection[1].close()


def _encoded(pixels: np.ndarray, format: str, **options) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format, **options)
    return file.getvalue()


def ordinary_requests() -> list[bytes]:
    rng = np.random.default_rng(0)
    small = _encoded(rng.integers(0, 256, (28, 28), np.uint8), "PNG")
    photo = rng.integers(0, 256, (20, 30, 3), np.uint8).repeat(15, 0).repeat(15, 1)
    ids = [f"small-{i}" for i in range(0, 2000, 400)]
    return [
        request("POST", "/embed", small),
        request("POST", "/embed", _encoded(photo, "JPEG")),
        request("POST", "/search?k=5", small),
        *(request("GET", f"/search?id={name}&k=5") for name in ids),
        request("GET", "/search?id=small-7&where=" + '{"folder":"f3"}'),
        request("GET", "/items?id=small-9"),
        request("GET", "/healthz"),
    ]


def attack(port: int, seconds: float) -> None:
    """Runs each attack for some seconds, and then all of them together."""
    attacks = prepared_attacks()
    step = min(_STEP, seconds / (len(attacks) + 1))
    end, turn = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        place = turn % (len(attacks) + 1)
        running = [attacks[place]] * 3 if place < len(attacks) else attacks
        stop = min(end, time.monotonic() + step)
        threads = [
            threading.Thread(target=_repeat, args=(one, port, stop), daemon=True) for one in running
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, stop - time.monotonic()) + 1)
        turn += 1


def _repeat(one, port: int, stop: float) -> None:
    while (left := stop - time.monotonic()) > 0:
        with contextlib.suppress(OSError):
            one(port, left)


def _connect(port: int, seconds: float, *sources: str) -> socket.socket:
    """Connects from one of the addresses; by default also that of the ordinary clients."""
    source = random.choice(sources or ("127.0.0.1", _OTHER)), 0
    address = "127.0.0.1", port
    return socket.create_connection(address, timeout=max(0.1, seconds), source_address=source)


def _sends(*requests: bytes):
    """Sends each request on a connection of its own, and reads the answer."""

    def one(port: int, seconds: float) -> None:
        for data in requests:
            with _connect(port, seconds) as connection:
                connection.sendall(data)
                while chunk := connection.recv(1 << 20):
                    if chunk.endswith((b"}", b"\n")):
                        break

    return one


def _sends_on(data: bytes):
    """Sends on and on, and reads nothing."""

    def one(port: int, seconds: float) -> None:
        with _connect(port, seconds) as connection:
            stop = time.monotonic() + seconds
            while time.monotonic() < stop:
                connection.sendall(data)

    return one


def _holds(data: bytes, count: int, *sources: str):
    """Opens many connections, sends the same on each, and waits."""

    def one(port: int, seconds: float) -> None:
        with contextlib.ExitStack() as stack:
            stop = time.monotonic() + seconds
            for _ in range(count):
                connection = stack.enter_context(_connect(port, seconds, *sources))
                with contextlib.suppress(OSError):
                    connection.sendall(data)
                if time.monotonic() > stop:
                    return
            time.sleep(max(0.0, stop - time.monotonic()))

    return one


def _malformed(port: int, seconds: float) -> None:
    rng = random.Random()
    starts = (b"", b"GET /", b"POST /search HTTP/1.1\r\nHost: localhost\r\n", b"\x16\x03\x01")
    with _connect(port, seconds) as connection:
        connection.sendall(rng.choice(starts) + rng.randbytes(rng.randrange(3000)) + b"\r\n\r\n")
        connection.settimeout(0.2)
        connection.recv(1 << 16)


def prepared_attacks() -> list:
    """Returns the attacks: what was found in November 2026, at the limits of the service."""
    text, limits = "application/json", Limits()
    tiny = _encoded(np.zeros((8, 8), np.uint8), "PNG")
    body = b"zTXta\0\0" + zlib.compress(bytes(1 << 20))  # a text of a MiB in a PNG
    part = (len(body) - 4).to_bytes(4, "big") + body + zlib.crc32(body).to_bytes(4, "big")
    texts = tiny[:33] + 50 * part + tiny[33:]
    side = int(limits.pixels**0.5)
    gray = _encoded(np.zeros((side, side), np.uint8), "JPEG", progressive=True)
    scan = gray[gray.rfind(b"\xff\xda") : -2]
    many_scans, most_scans = (gray[:-2] + scan * n + gray[-2:] for n in (1300, 85))
    large = _encoded(np.zeros((side, side), np.uint8), "PNG")
    medium = _encoded(np.zeros((1900, 1900), np.uint8), "PNG")
    webp = _encoded(np.zeros((side, side, 3), np.uint8), "WEBP", lossless=True, method=0)
    images = [large] * (limits.entries - 1) + [webp], [medium] * limits.entries
    embeds = [{"images": [base64.b64encode(x).decode() for x in row]} for row in images]
    lists = b'{"images": [' + b"[]," * ((limits.body_bytes - 100) // 3) + b"[]]}"
    numbers = b'{"vectors": [[' + b"0," * ((limits.body_bytes - 100) // 2) + b"0]]}"
    k = limits.hits // 2
    searches = [{"ids": ["large-1"] * n, "k": k} for n in (2, limits.entries)]
    filters = [{"folder": [None] * 1000}, {"folder": [f"f{i}" for i in range(1000)]}]
    searches += [{"ids": ["small-1"], "k": 3, "where": x} for x in filters]
    searches, embeds = ([json.dumps(x).encode() for x in rows] for rows in (searches, embeds))
    head = b"POST /embed HTTP/1.1\r\nHost: localhost\r\n"
    length = b"Content-Length: %d\r\n\r\n" % limits.body_bytes
    unfinished = head + b"Content-Type: application/json\r\n" + length
    unfinished += bytes(limits.body_bytes * 5 // 6)
    return [
        _sends_on(request("GET", "/healthz") * 2000),
        _sends_on(request("GET", "/items?limit=100") * 50),
        _holds(head, 400),
        _holds(unfinished, 14),
        _sends(request("POST", "/embed", many_scans), request("POST", "/embed", most_scans)),
        _sends(*(request("POST", "/embed", body, text) for body in embeds)),
        _holds(request("POST", "/embed", large), 64, _OTHER),
        _holds(request("POST", "/embed", texts), 64, _OTHER),
        _sends(request("POST", "/embed", b"P3\n1000 1000\n255\n" + b"#\n" * 500_000)),
        _sends(*(request("POST", "/search", body, text) for body in searches[:2])),
        _sends(request("POST", "/embed", lists, text), request("POST", "/search", numbers, text)),
        _sends(*(request("POST", "/search", body, text) for body in searches[2:])),
        _malformed,
    ]


if __name__ == "__main__":
    sys.exit(main())
