"""PostgreSQL: servers that go away, missing rights and extensions, several writers, filters."""

import os
import subprocess
import sys

import numpy as np
import postgres
import psycopg
import pytest
from index_loops import NaiveIndex, same, unit_vectors

from dmljax import index

MODEL, OTHER = "ab" * 32, "cd" * 32
DIMENSION = 8
UNIT = np.eye(DIMENSION, dtype=np.float32)


@pytest.fixture(scope="module")
def server():
    with postgres.server() as server:
        yield server


@pytest.fixture
def place(server, request):
    return f"{server.address}&table=t{abs(hash(request.node.name)) % 10**9}"


def _address(server, *, role="app", database="postgres", more=""):
    return server.address.replace("app@/postgres", f"{role}@/{database}") + more


def refuses(message, call, error=index.Unavailable):
    with pytest.raises(error, match=message) as caught:
        call()
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_a_server_that_restarts_and_one_that_is_away(server, place):
    store = index.create(place, model=MODEL, dimension=DIMENSION)
    reader = index.open(place)
    store.add(["a", "b"], UNIT[:2])
    server.stop()
    server.start()
    # A call is not repeated by itself, but the next one connects again.
    refuses("connect", lambda: reader.search(UNIT[:1], 2))
    assert [hit.id for hit in reader.search(UNIT[:1], 2)[0]] == ["a", "b"]
    refuses("connect", lambda: store.add(["c"], UNIT[2:3]))
    store.add(["c"], UNIT[2:3], replace=True)
    assert store.count() == reader.count() == 3
    server.stop()
    refuses("connect", reader.count)
    refuses("connect", lambda: store.delete(["a"]))
    refuses("connect", lambda: index.open(place))
    server.start()
    assert reader.count() == 3 and store.version == 2
    store.close()
    reader.close()


def test_what_was_added_survives_a_kill_of_the_server_and_of_a_client(server, place):
    code = """
import sys, numpy as np
from dmljax import index
from index_loops import unit_vectors
store = index.create(sys.argv[1], model="ab" * 32, dimension=8)
vectors = unit_vectors(np.random.default_rng(0), 100_000)
for i in range(5000):
    store.add([f"{i}-{j}" for j in range(20)], vectors[20 * i : 20 * i + 20])
    print(i, flush=True)
"""
    here = os.path.dirname(__file__)
    root = os.path.dirname(os.path.dirname(here))
    process = subprocess.Popen(
        [sys.executable, "-c", code, place],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": f"{root}:{here}"},
    )
    for _ in range(20):
        line = process.stdout.readline()
    process.kill()
    line = [line, *process.stdout][-1]
    process.wait()
    process.stdout.close()
    server.stop("immediate")  # kills all processes of the server
    server.start()
    reported = int(line) + 1
    with index.open(place) as store:
        count = store.count()
        assert count in (20 * reported, 20 * reported + 20)
        items = [item for batch in store.scan() for item in batch]
        assert [item.id for item in items] == [f"{i // 20}-{i % 20}" for i in range(count)]
        vectors = unit_vectors(np.random.default_rng(0), 100_000)[:count]
        np.testing.assert_array_equal(np.stack([item.vector for item in items]), vectors)
        assert store.check() == []


def test_an_hnsw_index_belongs_to_the_database(server, place):
    """Searches use it where the planner does; dmljax neither makes nor tunes it."""
    rng, naive = np.random.default_rng(0), NaiveIndex()
    vectors, ids = unit_vectors(rng, 1500, DIMENSION), [str(i) for i in range(1500)]
    queries, table = unit_vectors(rng, 20, DIMENSION), place.rpartition("=")[2]
    with index.create(place, model=MODEL, dimension=DIMENSION) as store:
        for some in (naive, store):
            some.add(ids, vectors)
        with psycopg.connect(server.address) as connection:
            create = f"create index on {table}_1_items using hnsw (vector vector_cosine_ops)"
            connection.execute(create)
        assert store.facts()["search"] == "by hnsw of the database"
        # As the planner does in a large table.
        near = f"{place}&options=-c%20enable_seqscan%3Doff%20-c%20hnsw.ef_search%3D100"
        exact = f"{place}&options=-c%20enable_indexscan%3Doff"
        with index.open(exact) as one, index.open(near) as other:
            same(one.search(queries, 10), naive.search(queries, 10))
            answers = zip(one.search(queries, 10), other.search(queries, 10), strict=True)
            shared = [len({h.id for h in a} & {h.id for h in b}) for a, b in answers]
            assert sum(shared) >= 190
            statement = f"explain select row from {table}_1_items order by vector <=> %s::vector "
            statement += "fetch first 16 rows with ties"
            with other._transaction() as cursor:
                plan = cursor.execute(statement, ([1.0] * 8,)).fetchall()
            assert "Index Scan using" in str(plan)
        store.delete(ids[:700])
        naive.delete(ids[:700])
        store.compact()
        assert store.facts()["items"] == 800 and store.check() == []
    with index.open(exact) as store:
        same(store.search(queries, 5), naive.search(queries, 5))


def test_extension_and_rights(server):
    with psycopg.connect(server.address, autocommit=True) as connection:
        connection.execute("create role guest login")
        connection.execute("create database empty")
    guest = _address(server, role="guest", database="empty", more="&table=photos")
    call = lambda: index.create(guest, model=MODEL, dimension=8)  # noqa: E731
    refuses("permission denied to create extension", call)
    owner = _address(server, database="empty", more="&table=photos")
    index.create(owner, model=MODEL, dimension=DIMENSION).close()
    refuses("permission denied", lambda: index.open(guest))
    refuses("permission denied", lambda: index.create(guest + "2", model=MODEL, dimension=8))
    with psycopg.connect(_address(server, database="empty"), autocommit=True) as connection:
        for table in ("photos", "photos_1_settings", "photos_1_items"):
            connection.execute(f"grant select on {table} to guest")
    with index.open(owner, write=True) as store:
        store.add(["a"], UNIT[:1])
    with index.open(guest) as store:
        assert [hit.id for hit in store.search(UNIT[:1], 1)[0]] == ["a"]
    with index.open(guest, write=True) as store:
        refuses("permission denied", lambda: store.add(["b"], UNIT[1:2]))
        assert store.count() == 1
    nobody = _address(server, role="nobody")
    refuses('"nobody" does not exist', lambda: index.open(nobody))
    missing = _address(server, database="missing")
    refuses('"missing" does not exist', lambda: index.open(missing))


def test_a_table_that_is_not_an_index(server, place):
    index.create(place, model=MODEL, dimension=DIMENSION).close()
    with psycopg.connect(server.address, autocommit=True) as connection:
        connection.execute("create table other (x integer)")
    for name in ("other", "t-1", "T", "x" * 41, ""):
        other = f"{server.address}&table={name}"
        refuses("table", lambda other=other: index.open(other), index.InvalidInput)
    refuses("is not an index", lambda: index.open(place + "0"), FileNotFoundError)
    refuses("exists already", lambda: index.create(place, model=MODEL, dimension=8), ValueError)


def test_a_statement_timeout(server, place):
    with index.create(place, model=MODEL, dimension=DIMENSION) as store:
        store.add(["a"], UNIT[:1])
    options = place + "&options=-c%20statement_timeout%3D200"
    table = place.rpartition("=")[2]
    with index.open(options, write=True) as store:
        with psycopg.connect(server.address) as connection:
            connection.execute(f"lock table {table}_1_items in access exclusive mode")
            refuses("statement timeout", lambda: store.search(UNIT[:1], 1))
            refuses("statement timeout", lambda: store.add(["b"], UNIT[1:2]))
        assert store.count() == 1 and store.version == 1


def test_several_writers_and_a_reindex(place):
    one = index.create(place, model=MODEL, dimension=DIMENSION)
    two = index.open(place, model=MODEL, write=True)
    one.add(["a"], UNIT[:1])
    two.add(["b"], UNIT[1:2])
    assert one.count() == two.count() == one.version == 2
    call = lambda: index.reindex(place, model=OTHER, dimension=4)  # noqa: E731
    refuses("is being written by another session", call, index.Locked)
    one.close()
    two.close()
    with index.open(place) as reader:
        with index.reindex(place, model=OTHER, dimension=4) as new:
            refuses("is being written", lambda: index.open(place, write=True), index.Locked)
            new.switch()
        assert [hit.id for hit in reader.search(UNIT[:1], 2)[0]] == ["a", "b"]
        with index.open(place, model=OTHER, write=True) as store:
            store.compact()  # deletes the previous generation
        refuses("open the index again", reader.count, index.Superseded)


def test_passwords_are_not_shown():
    address = "postgresql://app:secret@127.0.0.1:1/postgres?connect_timeout=1"
    with pytest.raises(index.Unavailable, match=r"postgresql://127\.0\.0\.1:1/") as caught:
        index.open(address)
    assert "secret" not in str(caught.value)
