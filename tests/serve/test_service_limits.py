"""What one client may cost: time, memory and connections that others need."""

import asyncio
import contextlib
import pathlib
import re
import socket
import time

import msgpack
import numpy as np
import pytest
from service_cases import png, served

from dmljax import bundle as bundles
from dmljax import index as indexes
from dmljax.serve.generation import Service
from dmljax.serve.guard import Guard
from dmljax.serve.settings import Limits, Settings

pytestmark = pytest.mark.xdist_group("serve")


def test_the_search_of_a_request_that_ended_is_stopped(bundle_folder, index_folder):
    numbers = "with recursive x(n) as (select 1 union all select n + 1 from x) "

    async def main():
        service = Service(Settings(str(bundle_folder), index=str(index_folder)))
        index = service._first.index

        def endless():
            return index._read(lambda c: c.execute(numbers + "select max(n) from x").fetchone())

        requests = [asyncio.wait_for(service.on_index(endless), 0.3) for _ in range(8)]
        results = await asyncio.gather(*requests, return_exceptions=True)
        assert all(isinstance(result, TimeoutError) for result in results)
        assert await asyncio.wait_for(service.on_index(index.count), 5) == 20
        await service.stop()

    asyncio.run(main())


def test_a_request_ends_at_its_limit_but_not_in_the_middle_of_its_answer(bundle_folder):
    """With routes that take four times as long as a request may."""
    limits = Limits(request_seconds=0.25)

    async def answered(service, path):
        sent = []

        async def app(scope, receive, send):
            if scope["path"] == "/readyz":
                await send({"type": "http.response.start", "status": 200, "headers": []})
            await asyncio.sleep(1)
            await send({"type": "http.response.body", "body": b"whole", "more_body": False})

        async def send(message):
            sent.append(message)

        scope = {"type": "http", "method": "GET", "path": path, "client": ("127.0.0.1", 1)}
        scope |= {"headers": [(b"host", b"localhost")]}
        await Guard(app, service, frozenset(["/healthz", "/readyz"]))(scope, None, send)
        return sent[0]["status"], sent[-1]["body"]

    async def main():
        service = Service(Settings(str(bundle_folder), limits=limits))
        status, body = await answered(service, "/healthz")
        assert status == 504 and b"the request took too long" in body
        assert await answered(service, "/readyz") == (200, b"whole")
        await service.stop()

    asyncio.run(main())


@pytest.fixture(scope="module")
def narrow(bundle_folder, tmp_path_factory):
    """A service with little memory, and 40 items of 20 kB of metadata each."""
    folder = tmp_path_factory.mktemp("narrow")
    place = folder / "large.index"
    model = bundles.load(bundle_folder)
    vectors = np.eye(model.dimension)[np.arange(40) % model.dimension]
    with indexes.create(place, model=model.digest, dimension=model.dimension) as index:
        index.add([f"i{i}" for i in range(40)], vectors, [{"text": "x" * 20_000}] * 40)
    words = ("--max-decode-bytes=20000000", "--max-memory-bytes=40000000")
    words += ("--max-answer-bytes=1000000", "--max-values=10000")
    with served(folder, bundle_folder, f"--index={place}", *words) as running:
        yield running


def test_answers_that_would_be_too_large_are_refused(narrow):
    narrow.request("POST", "/search", {"ids": ["i0"], "k": 20})
    before = _memory(narrow)
    for method, path, body in (
        ("POST", "/search", {"ids": ["i1"] * 64, "k": 39}),
        ("POST", "/search", {"ids": ["i1"] * 256, "k": 1000, "allow_fewer": True}),
        ("GET", "/items?id=" + "&id=".join(["i1"] * 60), None),
    ):
        for _ in range(3):
            answer = narrow.request(method, path, body)
            assert answer.status == 413, (path, answer.body[:100])
            assert "the answer would be larger than" in answer.json["error"]
    assert _memory(narrow) - before < 40
    hits = narrow.request("POST", "/search", {"ids": ["i1"], "k": 39}).json["results"][0]["hits"]
    assert len(hits) == 39 and all(hit["metadata"] == {"text": "x" * 20_000} for hit in hits)


def test_answers_in_pieces_are_the_same_as_whole_ones(narrow):
    body = {"ids": ["i1", "i2", "i3"], "k": 5}
    many = narrow.request("POST", "/search", body)
    assert len(many.body) > 1 << 18
    each = [narrow.request("POST", "/search", body | {"ids": [x]}) for x in body["ids"]]
    assert many.json["results"] == [answer.json["results"][0] for answer in each]
    packed = narrow.request("POST", "/search", body, headers={"Accept": "application/msgpack"})
    assert msgpack.unpackb(packed.body) == many.json
    listed = narrow.request("GET", "/items?id=i1&id=i2&vectors=true").json["items"]
    assert [item["id"] for item in listed] == ["i1", "i2"] and listed[0]["vector"][1] == 1


def test_bodies_of_many_values_are_refused(narrow):
    headers = {"Content-Type": "application/msgpack"}
    for count, status in ((9_000, 400), (11_000, 413), (10_000_000, 413)):
        body = b"\x81\xa6images\xdd" + count.to_bytes(4, "big") + b"\x90" * count
        answer = narrow.request("POST", "/embed", body, headers=headers)
        assert answer.status == status, answer.body
    answer = narrow.request("POST", "/search", {"ids": [""] * 11_000})
    assert answer.status == 413 and "more than 10,000 values" in answer.json["error"]


def test_bodies_that_do_not_end_leave_memory_to_others(narrow):
    """Each of the clients sends the most of 8 MB, and stops."""
    before, connections = _memory(narrow), []
    head = b"POST /embed HTTP/1.1\r\nHost: localhost\r\nContent-Length: 8000000\r\n\r\n"
    try:
        for _ in range(12):
            connection = socket.create_connection(("127.0.0.1", narrow.port), timeout=20)
            connections.append(connection)
            with contextlib.suppress(ConnectionError):  # refused already
                connection.sendall(head + bytes(7_000_000))
            assert narrow.request("POST", "/embed", png(1)).status == 200
            assert narrow.request("POST", "/search", {"ids": ["i0"], "k": 3}).status == 200
        assert _memory(narrow) - before < 90
        answers = b""
        for connection in connections:
            connection.settimeout(0.2)
            with contextlib.suppress(OSError):
                answers += connection.recv(1 << 16)
    finally:
        for connection in connections:
            connection.close()
    assert answers.count(b"HTTP/1.1 503") >= 5 and b"retry-after: 1" in answers


def test_memory_of_a_large_request_is_given_back(server):
    """The settings that make training faster would keep it."""
    body = b'{"ids": ["' + b"x" * 30_000_000 + b'"]}'
    headers = {"Content-Type": "application/json"}
    server.request("POST", "/search", b"{}", headers=headers)
    before = _memory(server)
    for _ in range(2):
        assert server.request("POST", "/search", body, headers=headers).status == 422
    assert _memory(server) - before < 30


@contextlib.contextmanager
def _connected(server, data, count):
    """So many connections on which `data` was sent."""
    with contextlib.ExitStack() as stack:
        connections = []
        for _ in range(count):
            connection = socket.create_connection(("127.0.0.1", server.port), timeout=20)
            connections.append(stack.enter_context(connection))
            connection.sendall(data)
        yield connections


def test_more_connections_than_the_limit(bundle_folder, tmp_path):
    head = b"POST /embed HTTP/1.1\r\nHost: localhost\r\n"
    with served(tmp_path, bundle_folder, "--max-connections=5") as server:
        # Connections without a request give way, the oldest one first.
        with _connected(server, head, 12) as idle:
            assert server.request("POST", "/embed", png(1)).status == 200
            with contextlib.suppress(ConnectionError):
                assert idle[0].recv(100) == b""
        # Where all have a request, others are refused.
        with _connected(server, head + b"Content-Length: 100\r\n\r\nabc", 5):
            time.sleep(0.3)
            answer = server.request("POST", "/embed", png(1))
            assert answer.status == 503 and "too many connections" in answer.json["error"]
            assert answer.headers["Retry-After"] == "1"
            assert answer.json["request_id"] == answer.headers["X-Request-Id"]
            assert server.request("GET", "/healthz").status == 200
        time.sleep(0.3)
        assert server.request("POST", "/embed", png(1)).status == 200
        # Refused ones, from which the service still reads, give way, too.
        for data in (head + b"X: " + b"y" * 40_000, head + b"Content-Length: 99000000\r\n\r\nabc"):
            with _connected(server, data, 6) as refused:
                for connection in refused[-3:]:
                    assert connection.recv(100).startswith(b"HTTP/1.1 4")
                assert server.request("POST", "/embed", png(1)).status == 200


def _memory(server):
    """Resident memory of the service, in MB."""
    status = pathlib.Path(f"/proc/{server.process.pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024


def _send(connection, data, *, seconds):
    """Sends until the service takes no more for a second, and says how much it took."""
    connection.setblocking(False)
    sent, last = 0, time.monotonic()
    end = last + seconds
    while sent < len(data) and time.monotonic() < min(last + 1, end):
        try:
            sent += connection.send(data[sent : sent + (1 << 16)])
            last = time.monotonic()
        except BlockingIOError:
            time.sleep(0.01)
    return sent


def test_requests_that_are_sent_without_reading_wait_in_the_socket(server):
    ask = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    server.request("GET", "/healthz")
    before = _memory(server)
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        sent = _send(connection, ask * (20_000_000 // len(ask)), seconds=30)
        assert _memory(server) - before < 30
        assert sent < 20_000_000
        assert server.request("GET", "/readyz").status == 200
    # A client that reads gets every answer of one long packet.
    count = 3000
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        last = ask.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
        body = b"POST /search HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        body += b"Content-Length: 60\r\n\r\n" + b'{"ids": ["cats/01.png"]}'.ljust(60)
        connection.sendall((ask * 100 + body) * (count // 101) + last)
        answers = b""
        while chunk := connection.recv(1 << 16):
            answers += chunk
    assert answers.count(b"HTTP/1.1 200") == count // 101 * 101 + 1


def test_a_client_that_takes_no_answer_is_cut_off(server):
    ask = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"
    size = len(server.request("GET", "/openapi.json").body)
    count = 20_000_000 // size
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        connection.sendall(ask * count)
        time.sleep(4)
        connection.settimeout(20)
        received = 0
        try:
            while chunk := connection.recv(1 << 16):
                received += len(chunk)
        except ConnectionError:
            pass
    assert received < 15_000_000
    # A client that reads slowly gets everything.
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        last = ask.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
        connection.sendall(ask * (count - 1) + last)
        received, start = 0, time.monotonic()
        while chunk := connection.recv(1 << 18):
            received += len(chunk)
            time.sleep(max(0, start + received / 8e6 - time.monotonic()))
    assert received > count * size and time.monotonic() - start > 2
