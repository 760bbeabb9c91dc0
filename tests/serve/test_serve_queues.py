"""Each client gets the same share of the work."""

import asyncio

import numpy as np
import pytest

from dmljax.serve.guard import client_of
from dmljax.serve.queues import FairQueue, Turns


def _order(queue, accept_fn=lambda job: True):
    jobs = []
    while (job := queue.take(accept_fn)) is not None:
        jobs.append(job)
    return jobs


def test_jobs_of_clients_are_taken_in_turn():
    queue = FairQueue()
    for i in range(64):
        queue.put("many", f"many {i}")
    assert [queue.take() for _ in range(3)] == ["many 0", "many 1", "many 2"]
    queue.put("one", "one")
    queue.put("two", "two")
    order = _order(queue)
    assert max(order.index("one"), order.index("two")) <= 2
    assert [job for job in order if job.startswith("many")] == [f"many {i}" for i in range(3, 64)]
    assert not len(queue)


def test_shares_are_equal_in_work_and_not_in_jobs():
    queue, rng = FairQueue(), np.random.default_rng(0)
    works = {"large": 8.0, "mixed": None, "small": 0.5}
    got = dict.fromkeys(works, 0.0)
    for client, work in works.items():
        for _ in range(2000):
            seconds = work or float(rng.uniform(0.1, 10))
            queue.put(client, (client, seconds), work=seconds)
    for _ in range(1000):
        client, seconds = queue.take()
        got[client] += seconds
    assert max(got.values()) - min(got.values()) <= 2 * 10


def test_a_client_that_asks_again_and_again_gets_no_more_than_one_that_waits():
    """Each waits for its answer before the next request, and one of them needs much more work."""
    queue, counts = FairQueue(), {"slow": 0, "quick": 0}
    for client, work in (("slow", 10.0), ("quick", 1.0)):
        queue.put(client, client, work=work)
    for _ in range(220):
        client = queue.take()
        counts[client] += 1
        queue.put(client, client, work=10.0 if client == "slow" else 1.0)
    assert counts["quick"] == pytest.approx(200, abs=12)


def test_a_client_whose_last_job_may_not_have_ended_comes_after_a_new_one():
    queue = FairQueue()
    queue.put("slow", "slow", work=10.0)
    assert _order(queue) == ["slow"] and not len(queue)
    queue.put("slow", "slow")
    queue.put("new", "new")
    assert _order(queue) == ["new", "slow"]


def test_a_new_client_gets_no_more_for_the_time_before():
    queue = FairQueue()
    for _ in range(1000):
        queue.put("old", "old", work=5.0)
        queue.take()
    for i in range(10):
        queue.put("new", f"new {i}", work=5.0)
    queue.put("old", "old", work=5.0)
    assert _order(queue).index("old") <= 2


def test_what_is_refused_keeps_its_turn_and_what_has_ended_goes():
    queue = FairQueue()
    for client, job, due in (("a", 1, 2.0), ("a", 2, 1.0), ("b", 3, 0.0), ("c", 4, 0.0)):
        queue.put(client, job, due=due)
    assert queue.take(lambda job: job == 1) == 1
    assert queue.take(lambda job: False) is None and len(queue) == 3
    queue.discard(lambda job: job == 3)
    assert len(queue) == 2
    assert _order(queue) == [4, 2]
    queue.put("b", 5)
    assert _order(queue) == [5]


def test_blocks_of_clients_take_turns_and_a_cancelled_one_keeps_no_place():
    async def main():
        turns, order, ends = Turns(2), [], asyncio.Event()

        async def call(client, name):
            async with turns.turn(client, work=1.0):
                order.append(name)
                await ends.wait()
                await asyncio.sleep(0)

        tasks = [asyncio.create_task(call("many", i)) for i in range(20)]
        await asyncio.sleep(0)
        assert order == [0, 1]
        tasks.append(asyncio.create_task(call("one", "one")))
        await asyncio.sleep(0)
        tasks[0].cancel()  # it runs: another one gets its turn
        tasks[5].cancel()  # it waits
        await asyncio.sleep(0)
        tasks[2].cancel()  # it has got its turn, or waits
        await asyncio.sleep(0)
        ends.set()
        await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 20)
        assert order.index("one") <= 4 and 5 not in order and len(order) >= 18
        async with turns.turn("a", work=1.0), turns.turn("b", work=1.0):
            waits = asyncio.create_task(call("c", "last"))
            await asyncio.sleep(0)
            assert order[-1] != "last"
        await waits
        assert order[-1] == "last"

    asyncio.run(main())


@pytest.mark.parametrize(
    "address, sent, client",
    [
        ("10.0.0.1", None, "10.0.0.1"),
        ("10.0.0.1", "192.0.2.7", "192.0.2.7"),
        ("10.0.0.1", "forged, 192.0.2.7", "192.0.2.7"),
        ("10.0.0.1", " ", "10.0.0.1"),
        ("2001:db8:0:1:2::3", None, "2001:db8:0:1::/64"),
        ("10.0.0.1", "2001:db8:0:1:ffff::", "2001:db8:0:1::/64"),
        ("::ffff:10.0.0.1", None, "::ffff:10.0.0.1"),
    ],
)
def test_who_a_client_is(address, sent, client):
    headers = {} if sent is None else {b"x-real-ip": sent}
    assert client_of({"client": (address, 1)}, headers, b"x-real-ip") == client
    assert client_of({"client": (address, 1)}, headers, b"") == client_of(
        {"client": (address, 1)}, {}, b"x-real-ip"
    )
