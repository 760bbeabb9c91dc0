"""Batches of the service: how many images they take, and what errors and leaving clients do."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmljax.serve.batching import Batcher, batch_length


@given(st.integers(1, 200), st.sets(st.sampled_from([1, 4, 16, 32, 64]), min_size=1))
def test_a_batch_is_the_largest_that_is_nearly_full(waiting, sizes):
    length = batch_length(waiting, sizes)
    assert 1 <= length <= min(waiting, max(sizes))
    padded = min(size for size in sizes if size >= length)
    assert length >= 0.75 * padded or padded == min(sizes)
    assert not any(padded < size <= waiting / 0.75 for size in sizes)


_continue = threading.Event()


def _embed(images):
    if (images == 9).any():
        _continue.wait(20)
    if (images == 255).any():
        raise RuntimeError("the net failed")
    return images.reshape(len(images), -1)[:, :2].astype(np.float32)


def _image(value):
    return np.full((2, 2, 1), value, np.uint8)


def _run(coroutine_fn):
    """Returns the result of `coroutine_fn` with a running batcher, and the batch lengths."""
    lengths = []

    async def main(pool):
        batcher = Batcher(
            _embed,
            sizes=(1, 4),
            executor=pool,
            measure_fn=lambda length, waited, net: lengths.append(length),
        )
        task = asyncio.create_task(batcher.run())
        try:
            return await asyncio.wait_for(coroutine_fn(batcher), 20)
        finally:
            task.cancel()

    with ThreadPoolExecutor(1) as pool:
        return asyncio.run(main(pool)), lengths


def test_requests_get_their_own_rows_from_batches_of_the_largest_size():
    _continue.set()

    async def ask(batcher):
        requests = [[_image(i)] * (1 + i % 3) for i in range(20)]
        return await asyncio.gather(*(batcher.embed(images) for images in requests))

    answers, lengths = _run(ask)
    for i, rows in enumerate(answers):
        assert rows.shape == (1 + i % 3, 2) and (rows == i).all()
    assert sum(lengths) == sum(len(rows) for rows in answers)
    assert max(lengths) == 4 and len(lengths) <= 11


def test_an_error_of_the_net_is_that_of_its_batch_alone():
    async def ask(batcher):
        with pytest.raises(RuntimeError, match="the net failed"):
            await batcher.embed([_image(255)])
        return await batcher.embed([_image(7)])

    assert (_run(ask)[0] == 7).all()


def test_images_of_a_client_that_is_gone_are_left_out():
    async def ask(batcher):
        first = asyncio.create_task(batcher.embed([_image(9)]))
        await asyncio.sleep(0.05)  # the net is busy with it
        gone, stays = (asyncio.create_task(batcher.embed([_image(i)] * i)) for i in (3, 1))
        await asyncio.sleep(0.05)
        gone.cancel()
        _continue.set()
        assert (await first == 9).all()
        return await stays

    _continue.clear()
    rows, lengths = _run(ask)
    assert (rows == 1).all() and lengths == [1, 1]
