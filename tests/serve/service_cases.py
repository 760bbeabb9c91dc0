"""A tiny bundle, an index of pictures, and the service as a process, also behind nginx."""

import contextlib
import http.client
import io
import json
import pathlib
import re
import socket
import subprocess
import sys
import time

import forged
import numpy as np
import processes
from PIL import Image
from processes import ROOT
from system import load_module, tiny

from dmljax import bundle as bundles
from dmljax import index as indexes
from dmljax.bundle import exporting
from dmljax.index.base import File
from dmljax.runs import training

siege = load_module(ROOT / "benchmarks" / "siege.py")
TOKEN = "a-token-of-many-letters"
VARIABLES = {"JAX_NUM_CPU_DEVICES": "1", "JAX_NUMPY_RANK_PROMOTION": None}
HOSTILE = '<script>document.title = "taken"</script>'


def exported(folder: pathlib.Path) -> pathlib.Path:
    """Exports the bundle of a run of two steps."""
    evaluate = {"every": 2, "ks": [1], "batch_size": 16, "clustering": None}
    training.run(tiny(folder, steps=2, evaluate=evaluate), folder / "run")
    bundle = exporting.export(folder / "run", folder / "tiny.bundle", batch_sizes=(1, 4, 16))
    # The run has too few classes to choose thresholds.
    forged.change_manifest(bundle, thresholds={"fmr=1e-2": {"cosine": 0.9, "test": {"fmr": 0.013}}})
    return bundle


def png(number: int, side: int = 16) -> bytes:
    """Returns a picture of random blocks of colors."""
    blocks = np.random.default_rng(number).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(blocks).resize((side, side), Image.Resampling.NEAREST).save(file, "PNG")
    return file.getvalue()


def indexed(bundle: pathlib.Path, folder: pathlib.Path, count: int = 20) -> pathlib.Path:
    """Builds an index of pictures next to their folder; item 3 has hostile metadata."""
    images = folder / "images"
    (images / "cats").mkdir(parents=True)
    ids = [f"cats/{i:02d}.png" for i in range(count)]
    for i, name in enumerate(ids):
        (images / name).write_bytes(png(i))
    model = bundles.load(bundle)
    vectors = model.embed([png(i) for i in range(count)])
    metadata = [{"number": i, "folder": "cats"} for i in range(count)]
    metadata[3]["note"] = HOSTILE
    place = folder / "photos.index"
    with indexes.create(
        place, model=model.digest, dimension=model.dimension, similarity=model.similarity
    ) as index:
        files = [File(str(images.resolve()), None)] * count
        index.add(ids, vectors, metadata, files=files)
    return place


class Answer:
    """Status, headers and body of an answer."""

    def __init__(self, response):
        self.status, self.headers, self.body = response.status, response.headers, response.read()

    @property
    def json(self):
        return json.loads(self.body)


class Server:
    """A running service."""

    def __init__(self, process, port, log):
        self.process, self.port, self._log = process, port, log
        self.url = f"http://127.0.0.1:{port}"

    def request(self, method, path, body=None, *, headers=None, timeout=60):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        with contextlib.closing(connection):
            if isinstance(body, dict | list):
                body, headers = (
                    json.dumps(body),
                    {"Content-Type": "application/json"} | (headers or {}),
                )
            connection.request(method, path, body, headers or {})
            return Answer(connection.getresponse())

    def log(self):
        return self._log.read_text()


def environment():
    return processes.environment(**VARIABLES)


@contextlib.contextmanager
def served(folder: pathlib.Path, *words):
    """Starts the service at a free port, and yields it when it is ready."""
    log = folder / f"log-{time.monotonic_ns()}.txt"
    command = [sys.executable, "-m", "dmljax.main", "serve", *map(str, words), "--port=0"]
    with log.open("w") as stream:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=stream, text=True, cwd=ROOT, env=environment()
        )
    try:
        line = process.stdout.readline()
        match = re.search(r"http://\S+:(\d+)", line)
        assert match, log.read_text()
        yield Server(process, int(match[1]), log)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@contextlib.contextmanager
def behind_nginx(folder: pathlib.Path, server: Server):
    """Starts nginx with the configuration of `launch`, and yields the service as it shows it."""
    port = siege.free_port()
    process = siege.proxied(folder, service_port=server.port, port=port, seconds=3)
    try:
        for _ in range(200):
            with contextlib.suppress(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port)).close()
                break
            time.sleep(0.05)
        yield Server(process, port, folder / "nginx.log")
    finally:
        process.terminate()
        process.wait()


def raw(server: Server, data: bytes, *, seconds: float = 10) -> bytes:
    """Returns what the service answers to bytes, until it closes the connection."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=seconds) as connection:
        connection.sendall(data)
        answer = b""
        while chunk := connection.recv(65536):
            answer += chunk
        return answer


def metric(server: Server, name: str) -> float:
    """Returns a value of `/metrics`; `name` includes the labels."""
    lines = server.request("GET", "/metrics").body.decode().splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(f"{name} "))


def until(fn, seconds: float = 60) -> None:
    """Waits until `fn()` is true."""
    end = time.monotonic() + seconds
    while not fn():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)
