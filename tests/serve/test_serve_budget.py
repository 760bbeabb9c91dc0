"""The memory of all requests together, and how many values a body has."""

import json
import tracemalloc

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmljax.serve import counting, formats
from dmljax.serve.budget import Budget
from dmljax.serve.errors import Refused

MIB = 1 << 20


def test_requests_share_the_memory_and_give_it_back():
    budget = Budget(16 * MIB)
    with budget.claim() as first, budget.claim() as second:
        first.take(8 * MIB)
        second.take(3 * MIB)
        with pytest.raises(Refused) as refused:
            second.take(2 * MIB)
        assert refused.value.status == 503 and refused.value.retry_after
        assert budget.used == 11 * MIB
        # A quarter is left for small requests.
        with budget.claim() as small:
            small.take(MIB)
    assert budget.used == 0
    with budget.claim() as claim, pytest.raises(Refused) as refused:
        claim.take(13 * MIB)
    assert refused.value.status == 413 and budget.used == 0


def test_the_largest_body_that_arrives_gives_way_to_smaller_ones():
    budget, stopped = Budget(16 * MIB), []
    with budget.claim() as slow, budget.claim() as slower, budget.claim() as answer:
        answer.take(5 * MIB)
        slow.arrives(lambda: stopped.append("slow"))
        slow.take(3 * MIB)
        slower.arrives(lambda: stopped.append("slower"))
        slower.take(4 * MIB)
        with budget.claim() as claim:
            claim.take(2 * MIB)
            assert stopped == ["slower"] and slower.held == 0
            with pytest.raises(Refused):  # larger than what arrives
                answer.take(4 * MIB)
        slow.arrives(None)  # it is complete, and may not be stopped any more
        with budget.claim() as claim, pytest.raises(Refused):
            claim.take(6 * MIB)
        assert stopped == ["slower"]
    assert budget.used == 0


def _count(value):
    if isinstance(value, dict):
        return 1 + sum(_count(k) + _count(v) for k, v in value.items())
    return 1 + sum(map(_count, value)) if isinstance(value, list) else 1


_SIZES = st.sampled_from([0, 1, 3, 31, 32, 255, 256, 70_000])
_LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.integers(-130, 300)
    | st.floats()
    | _SIZES.map(lambda n: "x" * n)
    | _SIZES.map(lambda n: b"\xdd" * n)
    | st.sampled_from([1, 2, 4, 8, 16, 17, 300, 70_000]).map(
        lambda n: msgpack.ExtType(5, b"\x90" * n)
    )
)
_VALUES = st.recursive(
    _LEAVES, lambda x: st.lists(x) | st.dictionaries(st.text(max_size=40), x), max_leaves=20
)


@settings(max_examples=40, deadline=None)
@given(_VALUES, st.sampled_from([1, 20, 70_000]))
def test_values_of_msgpack_are_counted_as_they_are_parsed(value, repeats):
    repeated = value if repeats == 1 else [None] * repeats + [value]
    expected = _count(repeated)
    assert counting.of_msgpack(msgpack.packb(repeated), most=1 << 30) == expected


@given(st.binary(max_size=200))
def test_what_is_not_msgpack_is_counted_to_its_end(data):
    assert counting.of_msgpack(data, most=1 << 30) <= len(data)


@settings(max_examples=50, deadline=None)
@given(
    st.recursive(
        st.none() | st.floats() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
    )
)
def test_json_has_no_more_values_than_are_counted(value):
    keys = json.dumps(value).count('": ')
    assert _count(value) - keys <= counting.of_json(json.dumps(value).encode())


@pytest.mark.parametrize(
    ("kind", "repeated"),
    [(formats.MSGPACK, "90"), (formats.MSGPACK, "90a0ccff"), (formats.JSON, b"[],".hex())],
)
def test_bodies_of_many_values_are_refused_before_they_are_parsed(kind, repeated):
    body = bytes.fromhex(repeated) * 300_000
    budget = Budget(1 << 30)
    tracemalloc.start()
    with budget.claim() as claim, pytest.raises(Refused) as refused:
        formats.decode(kind, body, dict, claim, most=1 << 17)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert refused.value.status == 413 and "values" in refused.value.reason
    assert peak < MIB


def test_the_memory_of_values_is_asked_for():
    with Budget(1 << 22).claim() as claim, pytest.raises(Refused) as refused:
        formats.decode(formats.MSGPACK, msgpack.packb([[]] * 100_000), list, claim, most=1 << 21)
    assert refused.value.status == 413 and "memory" in refused.value.reason
