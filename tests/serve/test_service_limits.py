"""What one client may cost: time, memory and connections that others need."""

import asyncio
import pathlib
import re
import socket
import time

import pytest

from dmljax.serve.generation import Service
from dmljax.serve.settings import Settings

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
