"""What one client may cost: time, memory and places that others need."""

import asyncio
import contextlib
import pathlib
import re
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
from service_cases import raw, until
from starlette.requests import Request

from dmljax import index as indexes
from dmljax.serve import app
from dmljax.serve.service import Metrics, Service
from dmljax.serve.settings import Limits, Settings

pytestmark = pytest.mark.xdist_group("serve")


class _Slow:
    """Requests whose handlers wait for `ends`; bodies arrive when they are asked for."""

    def __init__(self, limits):
        service = Service.__new__(Service)  # without a bundle
        service.settings, service.metrics = Settings("none", limits=limits), Metrics()
        service.tokens, service.index = (), None
        self._requests = app._Requests(service)
        self._requests._handlers = types.SimpleNamespace(
            info=self._handle, embed=self._handle, alive=self._handle_at_once
        )
        self.ends, self.leaves, self.bodies_read = asyncio.Event(), asyncio.Event(), 0

    async def _handle(self, *arguments):
        await self.ends.wait()
        return {}

    async def _handle_at_once(self, options):
        return {}

    async def respond(self, method, path, **headers):
        messages = [{"type": "http.request", "body": b"x", "more_body": False}]

        async def receive():
            if messages:
                self.bodies_read += 1
                return messages.pop()
            await self.leaves.wait()
            return {"type": "http.disconnect"}

        sent = {"host": "localhost"} | {k.replace("_", "-"): v for k, v in headers.items()}
        scope = {"type": "http", "method": method, "path": path, "query_string": b""}
        scope["headers"] = [(k.encode(), v.encode()) for k, v in sent.items()]
        return await self._requests.respond(Request(scope, receive))


def test_a_request_ends_at_its_limit():
    async def main():
        answer = await _Slow(Limits(seconds=0.2)).respond("GET", "/info")
        assert answer.status_code == 504 and b"took too long" in answer.body
        assert answer.headers["Retry-After"] == "1"

    asyncio.run(main())


def test_further_requests_are_refused_but_for_probes():
    async def main():
        slow = _Slow(Limits(requests=3))
        tasks = [asyncio.create_task(slow.respond("GET", "/info")) for _ in range(5)]
        await asyncio.sleep(0.1)
        assert (await slow.respond("GET", "/healthz")).status_code == 200
        slow.ends.set()
        answers = await asyncio.gather(*tasks)
        assert [x.status_code for x in answers] == [200] * 3 + [503] * 2
        assert b"too many requests" in answers[-1].body
        assert answers[-1].headers["Retry-After"] == "1"
        assert (await slow.respond("GET", "/info")).status_code == 200

    asyncio.run(main())


def test_large_bodies_wait_before_they_are_read():
    async def main():
        slow = _Slow(Limits())
        large = {"content_length": "2000000"}, {"transfer_encoding": "chunked"}
        tasks = [
            asyncio.create_task(slow.respond("POST", "/embed", **large[i % 2])) for i in range(9)
        ]
        await asyncio.sleep(0.1)
        assert slow.bodies_read == app._LARGE_REQUESTS
        small = asyncio.create_task(slow.respond("POST", "/embed", content_length="1"))
        await asyncio.sleep(0.1)
        assert slow.bodies_read == app._LARGE_REQUESTS + 1
        slow.ends.set()
        answers = await asyncio.gather(small, *tasks)
        assert {x.status_code for x in answers} == {200} and slow.bodies_read == 10

    asyncio.run(main())


def test_a_request_ends_when_its_client_is_gone():
    async def main():
        slow = _Slow(Limits())
        task = asyncio.create_task(slow.respond("POST", "/embed", content_length="1"))
        await asyncio.sleep(0.1)
        assert not task.done()
        slow.leaves.set()
        assert (await asyncio.wait_for(task, 5)).status_code == 504

    asyncio.run(main())


def test_the_search_of_a_request_that_ended_is_stopped(tmp_path):
    numbers = "with recursive x(n) as (select 1 union all select n + 1 from x) "
    service = Service.__new__(Service)  # without a bundle
    service._searchers = ThreadPoolExecutor(2)

    async def main(index):
        def endless():
            with index._transaction() as connection:
                connection.execute(numbers + "select max(n) from x").fetchone()

        requests = [asyncio.wait_for(service.on_index(endless), 0.3) for _ in range(8)]
        results = await asyncio.gather(*requests, return_exceptions=True)
        assert all(isinstance(result, TimeoutError) for result in results)
        assert await asyncio.wait_for(service.on_index(index.count), 20) == 0

    with indexes.create(tmp_path / "a.index", model="ab" * 32, dimension=2) as index:
        asyncio.run(main(index))


def _memory(server):
    """Returns the resident memory of the service in MB."""
    status = pathlib.Path(f"/proc/{server.process.pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024


def test_memory_of_large_requests_is_given_back(server):
    """Values of another type are refused before they take memory."""
    headers = {"Content-Type": "application/json"}
    server.request("POST", "/search", b"{}", headers=headers)
    before = _memory(server)
    for body in (
        b'{"ids": ["' + b"x" * 30_000_000 + b'"]}',
        b'{"images": [' + b"[]," * 10_000_000 + b"[]]}",
        b'{"vectors": [[' + b"0," * 15_000_000 + b"0]]}",
    ):
        assert server.request("POST", "/search", body, headers=headers).status in (400, 413, 422)
    until(lambda: _memory(server) - before < 30, seconds=10)


def test_a_body_beyond_the_limit_is_refused(server):
    head = b"POST /embed HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    assert b" 413 " in raw(server, head + b"Content-Length: 99999999999\r\n\r\n")
    chunk = b"100000\r\n" + bytes(1 << 20) + b"\r\n"
    with contextlib.suppress(ConnectionError):  # the answer may be lost with the unread bytes
        assert b" 413 " in raw(server, head + b"Transfer-Encoding: chunked\r\n\r\n" + 40 * chunk)
    assert server.request("GET", "/readyz").status == 200
