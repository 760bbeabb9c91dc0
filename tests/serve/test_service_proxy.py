"""`launch/serve.nginx.conf`: what nginx keeps from the service, where it is installed."""

import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest
from service_cases import ROOT, Server, behind_nginx, environment, png, raw

from dmljax.serve.settings import Limits

pytestmark = [
    pytest.mark.xdist_group("serve"),
    pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed"),
]


@pytest.fixture(scope="module")
def proxy(server, tmp_path_factory):
    with behind_nginx(tmp_path_factory.mktemp("nginx"), server) as running:
        yield running


def test_answers_come_through_unchanged(proxy, server):
    for path in ("/", "/info", "/items/image?id=cats/01.png", "/search?id=cats/02.png&k=3"):
        answers = [x.request("GET", path, headers={"X-Request-Id": "a"}) for x in (proxy, server)]
        assert answers[0].status == 200 and answers[0].body == answers[1].body
    image = png(1, 700)
    headers = {"Origin": proxy.url, "Sec-Fetch-Site": "same-origin"}  # as the page sends it
    answer = proxy.request("POST", "/embed", image, headers=headers)
    assert answer.status == 200
    assert answer.json["embeddings"] == server.request("POST", "/embed", image).json["embeddings"]
    assert proxy.request("GET", "/search").json["error"].startswith("Object missing")


def test_the_limit_of_bodies_is_that_of_the_service(proxy):
    head = b"POST /embed HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
    with contextlib.ExitStack() as stack:
        (connection,) = _open(stack, proxy, head % (Limits().body_bytes + 1), 1)
        answer = connection.recv(1000)
    assert answer.startswith(b"HTTP/1.1 413")
    assert "larger than the limit" in json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    body = bytes(Limits().body_bytes)
    assert proxy.request("POST", "/embed", body).status == 415  # it reaches the service


def test_what_is_not_a_request_is_refused_in_one_line(proxy):
    for data in (b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 40_000):
        answer = raw(proxy, data)
        assert answer.startswith(b"HTTP/1.1 400")
        assert "HTTP/1.1" in json.loads(answer.partition(b"\r\n\r\n")[2])["error"]


def test_a_service_that_is_away_gets_503(proxy, tmp_path):
    away = Server(None, 1, None)  # nobody listens on port 1
    with behind_nginx(tmp_path, away) as running:
        answer = running.request("GET", "/info")
        assert answer.status == 503 and "away" in answer.json["error"]
        assert answer.headers["Retry-After"] == "5"


def _open(stack, proxy, data, count, address="127.0.0.1"):
    """Opens connections from an address, and sends the same on each."""
    connections = []
    for _ in range(count):
        connection = socket.create_connection(
            ("127.0.0.1", proxy.port), timeout=20, source_address=(address, 0)
        )
        connections.append(stack.enter_context(connection))
        connection.sendall(data)
    return connections


def _connections_to(port):
    """Returns the number of open connections to a port of this machine."""
    lines = pathlib.Path("/proc/net/tcp").read_text().splitlines()[1:]
    rows = [line.split() for line in lines]
    return sum(row[2].endswith(f":{port:04X}") and row[3] == "01" for row in rows)


def test_slow_clients_do_not_reach_the_service(proxy, server):
    """Sends heads and bodies that do not end, and reads nothing."""
    head = b"POST /embed HTTP/1.1\r\nHost: localhost\r\n"
    unfinished = head + b"Content-Length: 100000\r\n\r\n" + bytes(1000)
    ask = b"GET /items?limit=20&vectors=true HTTP/1.1\r\nHost: localhost\r\n\r\n"
    before = _connections_to(server.port)
    with contextlib.ExitStack() as stack:
        slow = _open(stack, proxy, head, 300) + _open(stack, proxy, unfinished, 20)
        _open(stack, proxy, ask * 1000, 5)
        assert proxy.request("POST", "/embed", png(1)).status == 200
        assert _connections_to(server.port) - before < 20
        for connection in slow:  # closed after three seconds
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(100) == b""


def test_an_address_has_a_limit_of_requests_in_flight(proxy, server):
    ask = b"GET /info HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    with contextlib.ExitStack() as stack:
        os.kill(server.process.pid, signal.SIGSTOP)
        try:
            held = _open(stack, proxy, ask, 32, "127.0.0.2")
            time.sleep(0.5)
            refused, other = (_open(stack, proxy, ask, 1, f"127.0.0.{i}")[0] for i in (2, 3))
            answer = refused.recv(1000)
            assert answer.startswith(b"HTTP/1.1 503") and b"Retry-After: 1\r\n" in answer
            assert "from this address" in json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
        finally:
            os.kill(server.process.pid, signal.SIGCONT)
        assert all(x.recv(1000).startswith(b"HTTP/1.1 200") for x in (other, *held))


@pytest.mark.slow
def test_no_attack_stops_the_service_or_other_clients(bundle_folder):
    """Runs `benchmarks/siege.py` briefly, with bounds that a busy machine keeps."""
    command = [sys.executable, ROOT / "benchmarks" / "siege.py", f"--bundle={bundle_folder}"]
    command += ["--seconds=25", "--p99=15", "--growth=0.5"]
    completed = subprocess.run(command, capture_output=True, text=True, env=environment(), cwd=ROOT)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert "restarts: 0\n" in completed.stdout
    count = re.search(r"answers to ordinary clients: ([\d,]+)", completed.stdout)[1]
    assert int(count.replace(",", "")) > 300
