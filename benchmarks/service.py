"""Compares the service with a plain handler that embeds one by one: p50, p99, throughput.

`python benchmarks/service.py` prints one table. Both servers are processes on uvicorn with the same
bundle, of 30 steps of `configs/glyphs.py`, and are measured in turns, so that they meet the same
noise. A client sends its next image when it has its answer.
`--minutes=10` instead loads the service at 80 % of its throughput, and reports errors and memory.
"""

import argparse
import asyncio
import io
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np
from PIL import Image

ROOT = pathlib.Path(__file__).parents[1]
_LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)
_HEAD = b"POST /embed HTTP/1.1\r\nHost: localhost\r\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bundle", help="a bundle; by default one of a glyphs-sized net")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each server")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--minutes", type=float, help="soak instead")
    parser.add_argument("--plain", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.plain:
        plain(args.plain)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        bundle = pathlib.Path(args.bundle) if args.bundle else glyphs_bundle(folder)
        if args.minutes:
            asyncio.run(soak(bundle, args.minutes))
        else:
            asyncio.run(compare(bundle, args.clients, args.seconds, args.rounds))


def glyphs_bundle(folder: pathlib.Path) -> pathlib.Path:
    """Exports the bundle of a short run of `configs/glyphs.py`."""
    run = [f"--config={ROOT / 'configs' / 'glyphs.py'}", f"--workdir={folder / 'run'}"]
    run += ["--config.steps=30", "--config.evaluate.every=30", "--config.pictures=None"]
    export = ["export", folder / "run", f"--out={folder / 'net.bundle'}"]
    for words in (run, export):
        command = [sys.executable, "-m", "dmljax.main", *map(str, words)]
        subprocess.run(command, cwd=ROOT, check=True, stdout=sys.stderr)
    return folder / "net.bundle"


def plain(path: str) -> None:
    """Runs a server whose handler embeds the image of each request by itself."""
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    from dmljax import bundle as bundles

    model = bundles.load(path, batch_sizes=(1,))
    model.compile()

    def embed(image: bytes) -> list[list[float]]:
        return model.embed([image]).tolist()

    async def handler(request: Request) -> JSONResponse:
        image = await request.body()
        return JSONResponse({"embeddings": await asyncio.to_thread(embed, image)})

    import socket

    # With the protocol 0 asyncio would leave Nagle's algorithm on, and answers would wait 40 ms.
    listening = socket.socket(proto=socket.IPPROTO_TCP)
    listening.bind(("127.0.0.1", 0))
    listening.listen(1024)
    print(f"http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
    app = Starlette(routes=[Route("/embed", handler, methods=["POST"])])
    config = uvicorn.Config(app, http="h11", loop="asyncio", access_log=False, log_level="error")
    uvicorn.Server(config).run(sockets=[listening])


class Server:
    """One of the two, as a process."""

    def __init__(self, words: list[str]):
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment)
        assert self.process.stdout is not None
        match = re.search(r"http://\S+:(\d+)", self.process.stdout.readline())
        assert match, "the server did not start"
        self.port = int(match[1])

    def memory(self) -> float:
        """Megabytes of the process."""
        status = pathlib.Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1000

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()


def start(bundle: pathlib.Path) -> dict[str, Server]:
    service = [sys.executable, "-m", "dmljax.main", "serve", str(bundle), "--port=0", "--quiet"]
    plain = [sys.executable, __file__, f"--plain={bundle}"]
    return {"service": Server(service), "plain": Server(plain)}


def images(count: int = 64) -> list[bytes]:
    rng = np.random.default_rng(0)
    encoded = []
    for _ in range(count):
        file = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, (28, 28), dtype=np.uint8)).save(file, "PNG")
        encoded.append(file.getvalue())
    return encoded


class _Client(asyncio.Protocol):
    """Sends one request after the other over one connection, with little work of its own."""

    def __init__(self, requests: list[bytes], end: float, pause: float):
        self.requests, self.end, self.pause = requests, end, pause
        self.times: list[float] = []
        self.statuses: dict[int, int] = {}
        self.loop = asyncio.get_running_loop()
        self.done = self.loop.create_future()
        self.due = time.perf_counter()

    def connection_made(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        self.next()

    def next(self) -> None:
        if not self.pause:
            self.send()
            return
        self.due += self.pause
        self.loop.call_later(max(0.0, self.due - time.perf_counter()), self.send)

    def send(self) -> None:
        self.answer, self.expected = b"", 0
        self.start = time.perf_counter()
        self.transport.write(self.requests[len(self.times) % len(self.requests)])

    def data_received(self, data: bytes) -> None:
        self.answer += data
        if not self.expected:
            head = self.answer.find(b"\r\n\r\n")
            if head < 0:
                return
            length = _LENGTH.search(self.answer, 0, head)
            self.expected = head + 4 + int(length[1])
        if len(self.answer) >= self.expected:
            now = time.perf_counter()
            self.times.append(now - self.start)
            status = int(self.answer[9:12])
            self.statuses[status] = self.statuses.get(status, 0) + 1
            if now < self.end:
                self.next()
            else:
                self.transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)


async def load(port: int, clients: int, seconds: float, *, rate: float = 0.0):
    """Times of requests, statuses, and requests a second."""
    requests = [_HEAD + b"Content-Length: %d\r\n\r\n" % len(x) + x for x in images()]
    begin = time.perf_counter()
    pause = clients / rate if rate else 0.0
    running = []
    for i in range(clients):
        client = _Client(requests[i:] + requests[:i], begin + seconds, pause)
        await client.loop.create_connection(lambda c=client: c, "127.0.0.1", port)
        running.append(client)
    statuses: dict[int, int] = {}
    for client in running:
        await client.done
        for status, count in client.statuses.items():
            statuses[status] = statuses.get(status, 0) + count
    times = [t for client in running for t in client.times]
    return times, statuses, len(times) / (time.perf_counter() - begin)


async def ready(server: Server) -> None:
    for _ in range(1200):
        try:
            _, statuses, _ = await load(server.port, 1, 0.2)
            if set(statuses) == {200}:
                return
        except (OSError, asyncio.IncompleteReadError):
            pass
        await asyncio.sleep(0.1)
    raise RuntimeError("the server did not become ready")


async def compare(bundle: pathlib.Path, clients: list[int], seconds: float, rounds: int) -> None:
    servers = start(bundle)
    try:
        for server in servers.values():
            await ready(server)
        print("| clients | server | requests/s | p50 ms | p99 ms | of plain |")
        print("|---|---|---|---|---|---|")
        for count in clients:
            rates: dict[str, list[float]] = {name: [] for name in servers}
            times: dict[str, list[float]] = {name: [] for name in servers}
            for _ in range(rounds):
                for name, server in servers.items():
                    taken, statuses, rate = await load(server.port, count, seconds)
                    assert set(statuses) == {200}, statuses
                    times[name] += taken
                    rates[name].append(rate)
            base = statistics.median(rates["plain"])
            for name in servers:
                p50, p99 = (1000 * np.quantile(times[name], q) for q in (0.5, 0.99))
                rate = statistics.median(rates[name])
                row = f"{rate:.0f} | {p50:.1f} | {p99:.1f} | {rate / base:.2f}"
                print(f"| {count} | {name} | {row} |")
    finally:
        for server in servers.values():
            server.stop()


async def soak(bundle: pathlib.Path, minutes: float) -> None:
    """Loads the service at 80 % of its throughput with 64 clients."""
    service = [sys.executable, "-m", "dmljax.main", "serve", str(bundle), "--port=0", "--quiet"]
    server = Server(service)
    try:
        await ready(server)
        _, _, full = await load(server.port, 64, 10)
        first = server.memory()
        facts, end = [], time.perf_counter() + 60 * minutes
        while time.perf_counter() < end:
            seconds = min(30.0, max(1.0, end - time.perf_counter()))
            times, statuses, rate = await load(server.port, 64, seconds, rate=0.8 * full)
            p99 = 1000 * float(np.quantile(times, 0.99))
            facts.append({"rate": rate, "p99 ms": p99, "statuses": statuses, "MB": server.memory()})
            print(json.dumps(facts[-1]), flush=True)
        errors = sum(n for f in facts for status, n in f["statuses"].items() if status != 200)
        print(f"{sum(sum(f['statuses'].values()) for f in facts):,} requests, {errors} errors, ")
        print(f"{first:.0f} MB before, {facts[-1]['MB']:.0f} MB after")
    finally:
        server.stop()


if __name__ == "__main__":
    main()
