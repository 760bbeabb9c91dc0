"""Downloads: once, continued, checked, and never half a file."""

import concurrent.futures
import hashlib
import http.server
import threading

import numpy as np
import pytest

from dmljax import nets
from dmljax.weights import PUBLISHED, License, Published, download, fetch, file_name, preprocessing


class _Server(http.server.ThreadingHTTPServer):
    """Serves one file: at most `cut` bytes per request, from an offset if `ranges`."""

    def __init__(self, data):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.data, self.cut, self.ranges, self.status = data, None, True, 200
        self.wrong_range = False
        self.requested_ranges = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def url(self, name):
        return f"http://127.0.0.1:{self.server_address[1]}/{name}"


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        server = self.server
        requested = self.headers.get("Range")
        server.requested_ranges.append(requested)
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
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: server.cut])

    def log_message(self, *_):
        pass


LICENSE = License("MIT", "yes", "keep the text")
_DATA = np.random.default_rng(0).bytes(300_000)


@pytest.fixture
def server(monkeypatch):
    server = _Server(_DATA)
    digest = f"sha256:{hashlib.sha256(_DATA).hexdigest()[:8]}"
    published = Published("resnet18", server.url("net-file.pth"), digest, 1, LICENSE, "")
    monkeypatch.setitem(PUBLISHED, "local", published)
    yield server
    server.shutdown()
    server.server_close()


def test_a_file_is_downloaded_once(server, tmp_path):
    folder = tmp_path / "a" / "b"
    path = fetch("local", folder=folder)
    assert path == folder / "net-file.pth" and path.read_bytes() == _DATA
    assert fetch("local", folder=folder) == path and server.requested_ranges == [None]
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
        assert (tmp_path / "net-file.pth.part").stat().st_size == size
        assert not (tmp_path / "net-file.pth").exists()
    path = fetch("local", folder=tmp_path)
    assert path.read_bytes() == _DATA
    assert server.requested_ranges == [None, "bytes=100000-", "bytes=200000-"]


def test_a_server_without_ranges_starts_again(server, tmp_path):
    server.ranges = False
    (tmp_path / "net-file.pth.part").write_bytes(b"x" * 5000)
    assert fetch("local", folder=tmp_path).read_bytes() == _DATA
    assert server.requested_ranges == ["bytes=5000-"]


def test_processes_that_fetch_at_once_download_once(server, tmp_path):
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(lambda _: fetch("local", folder=tmp_path), range(4)))
    assert set(paths) == {tmp_path / "net-file.pth"} and paths[0].read_bytes() == _DATA
    assert server.requested_ranges == [None]
    assert [p.name for p in tmp_path.iterdir()] == ["net-file.pth"]


@pytest.mark.parametrize("length", [len(_DATA), len(_DATA) + 10])
def test_a_part_that_is_complete_or_too_long_becomes_the_file(server, tmp_path, length):
    (tmp_path / "net-file.pth.part").write_bytes((_DATA + b"0123456789")[:length])
    assert fetch("local", folder=tmp_path).read_bytes() == _DATA
    assert len(server.requested_ranges) == (1 if length == len(_DATA) else 2)


def test_a_part_of_another_file_is_detected_and_deleted(server, tmp_path):
    (tmp_path / "net-file.pth.part").write_bytes(b"x" * 5000)
    with pytest.raises(ValueError, match="is damaged or another file"):
        fetch("local", folder=tmp_path)
    assert not (tmp_path / "net-file.pth").exists()
    assert fetch("local", folder=tmp_path).read_bytes() == _DATA


def test_a_server_that_sends_other_bytes_is_refused(server, tmp_path):
    server.wrong_range = True
    (tmp_path / "net-file.pth.part").write_bytes(_DATA[:5000])
    with pytest.raises(ConnectionError, match="other bytes than"):
        fetch("local", folder=tmp_path)


def test_a_corrupted_download_is_refused(server, tmp_path):
    server.data = _DATA[:1000] + b"?" + _DATA[1001:]
    with pytest.raises(ValueError, match="is damaged or another file: its SHA256"):
        fetch("local", folder=tmp_path)
    assert not (tmp_path / "net-file.pth").exists()


def test_a_download_without_a_digest_starts_again(server, tmp_path, monkeypatch):
    published = PUBLISHED["local"]._replace(digest="")
    monkeypatch.setitem(PUBLISHED, "local", published)
    (tmp_path / "net-file.pth.part").write_bytes(b"x" * 5000)
    warnings = []
    monkeypatch.setattr(download.logging, "warning", lambda text, *a: warnings.append(text % a))
    assert fetch("local", folder=tmp_path).read_bytes() == _DATA
    assert server.requested_ranges == [None]
    assert "no digest is published" in warnings[0]
    assert hashlib.sha256(_DATA).hexdigest() in warnings[0]


def test_without_a_network_the_message_says_which_file_goes_where(server, tmp_path, monkeypatch):
    url = server.url("net-file.pth")
    server.shutdown()
    server.server_close()
    monkeypatch.setitem(PUBLISHED, "local", PUBLISHED["local"]._replace(url=url))
    with pytest.raises(ConnectionError, match="refused") as error:
        fetch("local", folder=tmp_path)
    assert f"get {url} elsewhere and put it at {tmp_path / 'net-file.pth'}" in str(error.value)


def test_a_file_that_the_server_lacks_is_refused(server, tmp_path):
    server.status = 404
    with pytest.raises(ConnectionError, match="Not Found"):
        fetch("local", folder=tmp_path)


def test_a_gated_file_says_where_to_ask_and_another_address_is_tried(server, tmp_path, monkeypatch):
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


SELL = ("yes", "under these terms", "no", "not stated")


def test_the_table_of_published_files_is_consistent():
    for name, published in PUBLISHED.items():
        assert published.net in nets.__all__ and published.license.sell in SELL
        normalize = published.preprocessing.normalize
        if name != "openclip_l14_laion2b":  # its net has other files with CLIP's mean
            assert getattr(nets, published.net)().expected_normalization == normalize
        assert isinstance(normalize, dict) or normalize in preprocessing.INPUTS
        algorithm, _, digits = published.digest.partition(":")
        assert (algorithm, len(digits) >= 8) in [("sha256", True), ("sha1", True), ("", False)]
        file = published.urls[0].rpartition("/")[2]
        assert file_name(name).endswith((".pth", ".pt", ".safetensors", ".onnx", ".caffemodel"))
        if algorithm == "sha256" and len(digits) < 64 and file.endswith(".pth"):
            assert f"-{digits}" in file, name
    files = [file_name(name) for name in PUBLISHED]
    assert len(set(files)) == len(files)
