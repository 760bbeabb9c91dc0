"""PostgreSQL: servers that go away, missing rights and extensions, several writers, filters."""

import contextlib
import os
import subprocess
import sys
import threading
import time

import numpy as np
import postgres
import psycopg
import pytest
from index_loops import NaiveIndex, same, unit_vectors

from dmljax import index
from dmljax.index import postgres_tables as tables

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
    assert [hit.id for hit in reader.search(UNIT[:1], 2)[0]] == ["a", "b"]  # repeated once
    # A write is not repeated by itself: it might have happened.
    refuses("cannot be reached", lambda: store.add(["c"], UNIT[2:3]))
    store.add(["c"], UNIT[2:3], replace=True)
    assert store.count() == reader.count() == 3
    server.stop()
    refuses("cannot be reached", reader.count)
    refuses("cannot be reached", lambda: store.delete(["a"]))
    refuses("cannot be reached", lambda: index.open(place))
    server.start()
    assert reader.count() == 3 and store.version == 2
    store.close()
    reader.close()


def test_the_second_of_two_creations_at_a_time_is_refused(server, place, monkeypatch):
    results, create_generation = [], tables.create_generation

    def create():
        try:
            index.create(place, model=MODEL, dimension=DIMENSION).close()
            results.append("created")
        except (OSError, ValueError) as error:
            results.append(str(error))

    thread = threading.Thread(target=create)

    def create_when_the_thread_waits(*arguments):
        monkeypatch.undo()
        thread.start()
        waiting = "select 1 from pg_stat_activity where wait_event_type = 'Lock'"
        with psycopg.connect(server.address, autocommit=True) as other:
            while not other.execute(waiting).fetchone():
                time.sleep(0.01)
        create_generation(*arguments)

    monkeypatch.setattr(tables, "create_generation", create_when_the_thread_waits)
    create()
    thread.join()
    created, refusal = sorted(results, key=len)
    assert created == "created" and "exists already: open it" in refusal


def test_a_restart_in_the_middle_of_a_search(server, place):
    with index.create(place, model=MODEL, dimension=DIMENSION) as store:
        store.add(["a"], UNIT[:1])
    results = []
    with index.open(place) as reader:
        table = place.rpartition("=")[2]
        with contextlib.closing(psycopg.connect(server.address)) as connection:
            connection.execute(f"lock table {table}_1_items in access exclusive mode")
            thread = threading.Thread(target=lambda: results.append(reader.search(UNIT[:1], 1)))
            thread.start()
            waiting = "select 1 from pg_stat_activity where wait_event = 'relation'"
            with psycopg.connect(server.address, autocommit=True) as other:
                while not other.execute(waiting).fetchone():
                    time.sleep(0.01)
            server.stop()
        server.start()
        thread.join()
    assert [hit.id for hit in results[0][0]] == ["a"]


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
    for _ in range(40):
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


def test_filtered_queries_of_the_graph_return_all_that_match(server, place):
    rng, naive = np.random.default_rng(0), NaiveIndex()
    vectors = unit_vectors(rng, 1500, DIMENSION)
    ids, metadata = [str(i) for i in range(1500)], [{"part": i % 100} for i in range(1500)]
    with index.create(place, model=MODEL, dimension=DIMENSION) as store:
        for some in (naive, store):
            some.add(ids, vectors, metadata)
        facts = store.build(approximate=True)
        assert facts["approximate"]["recall@10"] >= 0.95
        queries = unit_vectors(rng, 5, DIMENSION)
        with psycopg.connect(server.address) as connection:
            # As the planner does in a large table: it uses the graph, which returns few that match.
            connection.execute("alter role app set enable_seqscan = off")
            connection.execute("alter role app set enable_bitmapscan = off")
        try:
            with index.open(place) as reader:
                near, exact = (reader.search(queries, 10, exact=e) for e in (False, True))
                shared = sum(
                    len({h.id for h in a} & {h.id for h in b})
                    for a, b in zip(near, exact, strict=True)
                )
                assert shared >= 45
                results = reader.search(queries, 15, where={"part": 7})
                assert [len(hits) for hits in results] == [15] * 5
                same(results, naive.search(queries, 15, where={"part": 7}))
        finally:
            with psycopg.connect(server.address) as connection:
                connection.execute("alter role app reset all")
        store.delete(ids[:700])
        naive.delete(ids[:700])
        same(store.search(queries, 5, exact=True), naive.search(queries, 5))
        store.compact()
        assert store.facts()["approximate"]["items"] == 800 and store.check() == []


def test_a_graph_of_distances(server, place):
    rng = np.random.default_rng(0)
    vectors = (300 * rng.normal(size=(1200, DIMENSION)) + 1e5).astype(np.float32)
    with index.create(place, model=MODEL, dimension=DIMENSION, similarity="euclidean") as store:
        store.add([str(i) for i in range(1200)], vectors)
        assert store.build(approximate=True)["approximate"]["recall@10"] >= 0.95
        assert store.check() == []
        with psycopg.connect(server.address) as connection:
            connection.execute("alter role app set enable_seqscan = off")
        try:
            with index.open(place) as reader:
                near, exact = (reader.search(vectors[:20], 10, exact=e) for e in (False, True))
        finally:
            with psycopg.connect(server.address) as connection:
                connection.execute("alter role app reset all")
    shared = sum(
        len({h.id for h in a} & {h.id for h in b}) for a, b in zip(near, exact, strict=True)
    )
    assert shared >= 190
    assert [hits[0][:2] for hits in exact] == [(str(i), 0.0) for i in range(20)]


def test_extension_and_rights(server):
    with psycopg.connect(server.address, autocommit=True) as connection:
        connection.execute("create role guest login")
        connection.execute("create database empty")
    guest = _address(server, role="guest", database="empty", more="&table=photos")
    call = lambda: index.create(guest, model=MODEL, dimension=8)  # noqa: E731
    refuses("pgvector is missing.*CREATE EXTENSION vector", call)
    owner = _address(server, database="empty", more="&table=photos")
    index.create(owner, model=MODEL, dimension=DIMENSION).close()
    refuses("lacks rights", lambda: index.open(guest))
    refuses("lacks rights", lambda: index.create(guest + "2", model=MODEL, dimension=8))
    with psycopg.connect(_address(server, database="empty"), autocommit=True) as connection:
        for table in ("photos", "photos_1_settings", "photos_1_items", "photos_1_fields"):
            connection.execute(f"grant select on {table} to guest")
    with index.open(owner, write=True) as store:
        store.add(["a"], UNIT[:1])
    with index.open(guest) as store:
        assert [hit.id for hit in store.search(UNIT[:1], 1)[0]] == ["a"]
    with index.open(guest, write=True) as store:
        refuses("lacks rights", lambda: store.add(["b"], UNIT[1:2]))
        assert store.count() == 1
    nobody = _address(server, role="nobody")
    refuses('cannot be reached.*"nobody" does not exist', lambda: index.open(nobody))
    missing = _address(server, database="missing")
    refuses('"missing" does not exist', lambda: index.open(missing))


def test_a_table_of_another_dimension_or_no_index(server, place):
    index.create(place, model=MODEL, dimension=DIMENSION).close()
    table = place.rpartition("=")[2]
    with psycopg.connect(server.address, autocommit=True) as connection:
        connection.execute(f"alter table {table}_1_items alter vector type vector(7)")
        connection.execute("create table other (x integer)")
    refuses("7 dimensions, the index has 8", lambda: index.open(place), index.Damaged)
    for name in ("other", "t-1", "T", "x" * 41, ""):
        other = f"{server.address}&table={name}"
        refuses("table", lambda other=other: index.open(other), index.InvalidInput)
    refuses("is no index", lambda: index.open(place + "0"), FileNotFoundError)
    refuses("exists already", lambda: index.create(place, model=MODEL, dimension=8), ValueError)


def test_a_statement_timeout(server, place):
    with index.create(place, model=MODEL, dimension=DIMENSION) as store:
        store.add(["a"], UNIT[:1])
    options = place + "&options=-c%20statement_timeout%3D200"
    table = place.rpartition("=")[2]
    with index.open(options, write=True) as store:
        with psycopg.connect(server.address) as connection:
            connection.execute(f"lock table {table}_1_items in access exclusive mode")
            refuses("took too long", lambda: store.search(UNIT[:1], 1))
            refuses("took too long", lambda: store.add(["b"], UNIT[1:2]))
        assert store.count() == 1 and store.version == 1


def test_several_writers_and_a_reindex(server, place):
    rng = np.random.default_rng(0)
    one = index.create(place, model=MODEL, dimension=DIMENSION)
    two = index.open(place, model=MODEL, write=True)
    one.add(["a"], UNIT[:1])
    two.add(["b"], UNIT[1:2])
    assert one.count() == two.count() == one.version == 2
    call = lambda: index.reindex(place, model=OTHER, dimension=4)  # noqa: E731
    refuses("is being written by the session", call, index.Locked)
    one.close()
    two.close()
    reader = index.open(place)
    with index.reindex(place, model=OTHER, dimension=4) as new:
        refuses("is being written", lambda: index.open(place, write=True), index.Locked)
        new.add([str(i) for i in range(10)], unit_vectors(rng, 10, 4))
    with index.reindex(place, model=OTHER, dimension=4) as new:
        assert new.count() == 10  # as far as it was filled
        assert not reader.superseded
        new.switch()
        assert reader.superseded and not new.superseded
        refuses("present index already", new.switch, index.InvalidInput)
    assert [hit.id for hit in reader.search(UNIT[:1], 2)[0]] == ["a", "b"]
    refuses(f"{OTHER}, not of {MODEL}", lambda: index.open(place, model=MODEL), index.OtherModel)
    with index.open(place, model=OTHER, write=True) as store:
        assert (store.count(), store.dimension) == (10, 4)
        store.compact()  # deletes the previous generation
    refuses("open the index again", reader.count, index.Superseded)
    reader.close()


def test_passwords_are_not_shown(server):
    address = "postgresql://app:secret@127.0.0.1:1/postgres?connect_timeout=1"
    refuses("cannot be reached", lambda: index.open(address))
    with pytest.raises(index.Unavailable) as caught:
        index.open(address)
    assert "secret" not in str(caught.value)
