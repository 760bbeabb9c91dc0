"""Kills, a full disk, damaged and missing files: nothing acknowledged is lost, nothing crashes."""

import contextlib
import json
import os
import pathlib
import re
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time

import numpy as np
import pytest
from index_loops import NaiveIndex, same, unit_vectors

from dmljax import index
from dmljax.index.base import STOP_FN

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
ENVIRONMENT = os.environ | {"PYTHONPATH": f"{ROOT}:{HERE}"}
MODEL, OTHER = "ab" * 32, "cd" * 32
DIMENSION = 8


def filled(place, count=50, *, seed=0):
    """Fills and closes an index of random vectors, with its matrix; returns the naive one."""
    rng = np.random.default_rng(seed)
    naive = NaiveIndex()
    with index.create(place, model=MODEL, dimension=DIMENSION) as store:
        ids, vectors = [str(i) for i in range(count)], unit_vectors(rng, count, DIMENSION)
        for some in (naive, store):
            some.add(ids, vectors, [{"n": i} for i in range(count)])
        store.compact()
    return naive


def equal(place, naive, **kwargs):
    """Checks that the index opens, and answers as the naive one."""
    queries = unit_vectors(np.random.default_rng(1), 3, DIMENSION)
    with index.open(place, **kwargs) as store:
        assert store.count() == len(naive.items)
        same(store.search(queries, 5), naive.search(queries, 5))


def python(code, *words, **kwargs):
    """Runs code in another process."""
    command = [sys.executable, "-c", code, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, **kwargs)


def execute(place, *statements):
    """Runs SQL on the database of an index that nobody has opened."""
    with contextlib.closing(sqlite3.connect(place / "generation-1" / "items.db")) as connection:
        rows = [connection.execute(statement).fetchall() for statement in statements]
        connection.commit()
    return rows[-1]


@pytest.mark.parametrize("kills", [12, pytest.param(300, marks=pytest.mark.slow)])
def test_kills(tmp_path, kills):
    command = [sys.executable, str(HERE / "kill_index.py"), str(tmp_path), f"--kills={kills}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{kills} kills" in done.stdout and "the child failed" not in done.stdout


def test_a_killed_creation_is_no_index_and_is_repeated(tmp_path):
    code = """
import os, sys, pathlib
from dmljax import index
from dmljax.index import folder
folder.point = lambda *a: os.kill(os.getpid(), 9)
index.create(sys.argv[1], model="ab" * 32, dimension=8)
"""
    place = tmp_path / "photos.index"
    assert python(code, place).returncode == -9
    with pytest.raises(FileNotFoundError, match="not an index of dmljax"):
        index.open(place)
    with index.create(place, model=MODEL, dimension=DIMENSION) as store:
        with pytest.raises(index.InvalidInput, match="exists already"):
            index.create(place, model=MODEL, dimension=DIMENSION)
        store.add(["a"], np.eye(8)[:1])
    (place / "index.json").unlink()  # a killed `discard`
    index.create(place, model=MODEL, dimension=DIMENSION).close()
    with index.open(place) as store:
        assert store.count() == 0


def _flip(content):
    return content[:1000] + bytes([content[1000] ^ 16]) + content[1001:]


DAMAGES = {
    "flipped": (_flip, "item '31' is not what was added"),
    "truncated": (lambda content: content[: len(content) // 2], "is missing or too short"),
    "random": (lambda content: np.random.default_rng(0).bytes(len(content)), "item '0' is not"),
    "of another index": (None, "item '0' is not what was added"),
    "deleted": (None, "is missing or too short"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_of_vectors_is_noticed(tmp_path, damage):
    place, query = tmp_path / "photos.index", np.eye(DIMENSION, dtype=np.float32)[:1]
    naive = filled(place)
    path, (change_fn, message) = place / "generation-1" / "vectors-0.bin", DAMAGES[damage]
    content = path.read_bytes()
    if change_fn is not None:
        path.write_bytes(change_fn(content))
    elif damage == "deleted":
        path.unlink()
    else:
        filled(tmp_path / "other.index", seed=1)
        shutil.copy(tmp_path / "other.index" / "generation-1" / path.name, path)
    for read in (lambda store: store.search(query, 3), lambda store: list(store.scan())):
        with (
            pytest.raises(index.Damaged, match=f"{message}.*backup") as caught,
            index.open(place) as store,
        ):
            if "item" in message:
                assert f"{message[: message.index(' is')]} " in store.check()[0]
            read(store)
        assert "\n" not in str(caught.value)
    path.write_bytes(content + bytes(64))  # which a killed call left
    equal(place, naive)


def test_vectors_of_a_later_version_are_not_used_after_a_restore(tmp_path):
    place = tmp_path / "photos.index"
    naive = filled(place)
    backup = (place / "generation-1" / "items.db").read_bytes()
    for is_compacted in (False, True):
        with index.open(place, write=True) as store:
            store.delete([str(i) for i in range(25)])
            store.add(["other"], np.eye(DIMENSION, dtype=np.float32)[:1])
            if is_compacted:
                store.compact()
        (place / "generation-1" / "items.db").write_bytes(backup)
        (place / "generation-1" / "acknowledged").unlink()
        if is_compacted:
            with pytest.raises(index.Damaged, match=r"missing or too short.*backup"):
                equal(place, naive)
        else:
            equal(place, naive)


def test_a_deleted_wal_is_reported(tmp_path):
    place = tmp_path / "photos.index"
    code = """
import os, sys, numpy as np
from dmljax import index
store = index.open(sys.argv[1], write=True)
store.add(["new"], np.eye(8, dtype=np.float32)[:1])
os.kill(os.getpid(), 9)
"""
    naive = filled(place)
    assert python(code, place).returncode == -9
    wal = place / "generation-1" / "items.db-wal"
    assert wal.stat().st_size > 0
    content = wal.read_bytes()
    wal.unlink()
    for write in (False, True):
        with pytest.raises(index.Damaged, match=r"change 2 was acknowledged.*-wal.*backup"):
            index.open(place, write=write)
    wal.write_bytes(content)
    naive.add(["new"], np.eye(8, dtype=np.float32)[:1])
    equal(place, naive)
    wal.unlink(missing_ok=True)
    (place / "generation-1" / "acknowledged").unlink()  # the loss is accepted
    with index.open(place) as store:
        assert store.count() in (50, 51)


@pytest.mark.parametrize("bytes_left", [0, 100, 4096, 0.3, 0.7, 0.99])
def test_a_truncated_database_is_reported(tmp_path, bytes_left):
    place = tmp_path / "photos.index"
    filled(place, 200)
    path = place / "generation-1" / "items.db"
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(int(bytes_left * size) if isinstance(bytes_left, float) else bytes_left)
    for write in (False, True):
        with (
            pytest.raises(index.Damaged, match="backup") as caught,
            index.open(place, write=write) as store,
        ):
            list(store.scan())
        assert "\n" not in str(caught.value)


def test_a_missing_database_and_pointer_are_reported(tmp_path):
    place = tmp_path / "photos.index"
    filled(place)
    pointer = place / "index.json"
    content = pointer.read_bytes()
    for text, error, message in (
        ("{", index.Damaged, "damaged"),
        ('{"format": 2, "generation": "../other"}', index.Damaged, "damaged"),
        ('{"format": 1, "generation": "generation-1"}', index.InvalidInput, "update dmljax"),
    ):
        pointer.write_text(text)
        with pytest.raises(error, match=message):
            index.open(place)
    pointer.unlink()
    with pytest.raises(FileNotFoundError, match="not an index of dmljax"):
        index.open(place)
    pointer.write_bytes(content)
    (place / "generation-1" / "items.db").unlink()
    with pytest.raises(index.Damaged, match="backup"):
        index.open(place)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        index.open(tmp_path / "other.index")


@pytest.mark.parametrize("action", ["add", "compact"])
def test_a_full_disk_changes_nothing(tmp_path, action):
    from processes import mounted  # which the processes that import this file do not find

    with mounted(tmp_path / "small", "size=4m") as folder:
        place, rng, naive = folder / "photos.index", np.random.default_rng(0), NaiveIndex()
        with index.create(place, model=MODEL, dimension=DIMENSION) as store:
            batch, metadata = 1200 if action == "add" else 20, {"t": "x" * 50}
            with contextlib.suppress(index.Unavailable):
                for number in range(1000 if action == "add" else 30):
                    ids = [f"{number}-{i}" for i in range(batch)]
                    items = ids, unit_vectors(rng, batch, DIMENSION), [metadata] * batch
                    store.add(*items)
                    naive.add(*items)
            assert 2 < number < 999
            with contextlib.suppress(OSError), (folder / "other").open("wb") as file:
                while True:
                    file.write(b"x" * 4096)
                    file.flush()
            large = (
                [f"large{i}" for i in range(50)],
                unit_vectors(rng, 50),
                [{"t": "x" * 60_000}] * 50,
            )
            new = lambda: index.create(folder / "new", model=MODEL, dimension=8)  # noqa: E731
            for call in (lambda: store.add(*large), store.compact, new):
                with pytest.raises(OSError, match=r"disk is full|No space") as caught:
                    call()
                assert "\n" not in str(caught.value)
            queries = unit_vectors(rng, 3, DIMENSION)
            same(store.search(queries, 5), naive.search(queries, 5))
        equal(place, naive)
        (folder / "other").unlink()
        with index.open(place, write=action == "compact") as store:
            if action == "compact":
                store.compact()
            assert store.check() == []
        equal(place, naive)


def test_a_second_writer_is_told_who_writes(tmp_path):
    place = tmp_path / "photos.index"
    filled(place)
    code = "import sys; from dmljax import index; index.open(sys.argv[1], write=True)"
    with index.open(place, write=True) as store:
        writer = f"index.inputs.Locked: .* process {os.getpid()} on {os.uname().nodename}"
        assert re.search(writer, python(code, place).stderr.replace("\n", " "))
        store.add(["new"], np.eye(8, dtype=np.float32)[:1])
    assert python(code, place).returncode == 0


def test_readers_work_during_compaction_and_in_another_process(tmp_path):
    place = tmp_path / "photos.index"
    naive = filled(place, 3000)
    code = """
import sys, numpy as np
from dmljax import index
from index_loops import unit_vectors
query = unit_vectors(np.random.default_rng(1), 1)
with index.open(sys.argv[1]) as store:
    expected = store.search(query, 5)
    print("ready", flush=True)
    for i, line in enumerate(sys.stdin):
        assert store.search(query, 5) == expected and store.count() == 2000
        if i % 100 == 50:
            with index.open(sys.argv[1]) as other:
                assert other.search(query, 5) == expected
"""
    ids = [str(i) for i in range(1000)]
    queries = unit_vectors(np.random.default_rng(2), 3, DIMENSION)
    with index.open(place, write=True) as store, index.open(place) as reader:
        same(reader.search(queries, 5), naive.search(queries, 5))
        for some in (naive, store):
            some.delete(ids)
        command = [sys.executable, "-c", code, str(place)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, **pipes, env=ENVIRONMENT) as process:
            assert process.stdout.readline() == "ready\n"
            for _ in range(3):
                process.stdin.write("go\n" * 40)
                process.stdin.flush()
                store.compact()
        assert process.returncode == 0
        assert [path.name for path in place.rglob("vectors-*")] == ["vectors-2.bin"]
        same(reader.search(queries, 5), naive.search(queries, 5))  # it knows what was deleted
    equal(place, naive)


def replaced(place, times):
    """Replaces an index by its next generation, of ten items, again and again."""
    for _ in range(times):
        with index.reindex(place, model=OTHER, dimension=DIMENSION) as store:
            store.add([str(i) for i in range(10)], unit_vectors(np.random.default_rng(2), 10))
            store.switch()


def test_an_index_that_is_replaced_while_it_is_opened_is_opened_again(tmp_path, monkeypatch):
    place = tmp_path / "photos.index"
    filled(place)
    original = index.embedded.folder.name_of

    def then_replaced(number):
        monkeypatch.undo()
        replaced(place, 1)
        return original(number)

    monkeypatch.setattr(index.embedded.folder, "name_of", then_replaced)
    with index.open(place) as store:
        assert store.generation == 2 and store.count() == 10


def test_a_reader_of_deleted_files_is_told_to_open_the_index_again(tmp_path):
    place = tmp_path / "photos.index"
    filled(place)
    with index.open(place) as store:
        replaced(place, 1)
        with pytest.raises(index.Superseded, match="open it again"):
            list(store.scan())


_NOBODY = """
import mmap, os, sys
import dmljax.index.embedded  # before this process may no longer read the library
from dmljax import index
if os.getuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
"""


def _as_nobody(code, place):
    """Runs code in a process that may read a copy of the index, and not write it."""
    # Not in `tmp_path`: another pytest that starts takes the permission to enter its folder away.
    with tempfile.TemporaryDirectory() as folder:
        copy = shutil.copytree(place, pathlib.Path(folder, place.name))
        for path in [copy, *copy.rglob("*")]:
            path.chmod(0o555 if path.is_dir() else 0o444)
        copy.parent.chmod(0o755)
        try:
            return python(_NOBODY + code, copy)
        finally:
            for path in [copy, *(p for p in copy.rglob("*") if p.is_dir())]:
                path.chmod(0o755)


def test_a_folder_that_may_not_be_written_can_be_read(tmp_path):
    place = tmp_path / "photos.index"
    filled(place)
    code = """
with index.open(sys.argv[1]) as store:
    print(store.count(), len(store.search_ids(["3"], 5)[0]))
try:
    index.open(sys.argv[1], write=True)
except index.Unavailable as error:
    print(error)
"""
    done = _as_nobody(code, place)
    assert done.stdout.startswith("50 5\n"), done.stdout + done.stderr
    assert f"{place.name} cannot be written: Permission denied" in done.stdout


def test_a_switch_deletes_the_old_generation_and_keeps_its_readers(tmp_path):
    place = tmp_path / "photos.index"
    naive = filled(place)
    queries = unit_vectors(np.random.default_rng(3), 3, DIMENSION)
    with index.open(place) as reader:
        with index.reindex(place, model="ef" * 32, dimension=4) as new:
            new.add(["x"], np.eye(4)[:1])
        with index.reindex(place, model=OTHER, dimension=4) as new:
            assert new.count() == 0  # another model: it starts from an empty index
            new.switch()
        same(reader.search(queries, 5), naive.search(queries, 5))
    assert [path.name for path in place.glob("generation-*")] == ["generation-2"]
    assert json.loads((place / "index.json").read_text())["generation"] == "generation-2"


def test_an_error_that_is_no_damage_sends_nobody_to_a_backup(tmp_path):
    place = tmp_path / "photos.index"
    naive = filled(place)
    query = unit_vectors(np.random.default_rng(1), 1, DIMENSION)
    with index.open(place) as store:
        old = store._connection.setlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER, 3)
        with pytest.raises(index.Unavailable, match="too many SQL variables") as caught:
            store.search(query, 3, where={"n": list(range(9))})
        assert not re.search("damage|backup|recover", str(caught.value))
        store._connection.setlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER, old)
        same(store.search(query, 3), naive.search(query, 3))


def test_an_endless_statement_is_stopped_and_others_go_on(tmp_path):
    place = tmp_path / "photos.index"
    naive = filled(place)
    numbers = "with recursive x(n) as (select 1 union all select n + 1 from x) "
    query = unit_vectors(np.random.default_rng(1), 1, DIMENSION)
    with index.open(place) as store:
        start = time.monotonic()
        token = STOP_FN.set(lambda: time.monotonic() > start + 0.2)
        with (
            pytest.raises(index.Unavailable, match="stopped at its time limit"),
            store._transaction() as connection,
        ):
            connection.execute(numbers + "select max(n) from x").fetchone()
        STOP_FN.reset(token)
        same(store.search(query, 3), naive.search(query, 3))


def answers(place, *, write):
    """Yields what an index returns of its items: by id, in a scan, in searches."""
    queries = unit_vectors(np.random.default_rng(1), 3, DIMENSION)
    calls = (
        lambda store: store.get([str(i) for i in range(20)]),
        lambda store: list(store.scan()),
        lambda store: store.search(queries, 5),
        lambda store: store.search_ids(["3"], 5),
        lambda store: (store.model, store.dimension, store.similarity),
    )
    for i, call in enumerate(calls):
        with contextlib.suppress(OSError, ValueError), index.open(place, write=write) as store:
            yield i, repr(call(store))


def test_no_flipped_bit_of_an_item_is_served(tmp_path):
    place = tmp_path / "photos.index"
    filled(place, 20)
    folder, expected = place / "generation-1", dict(answers(place, write=False))
    contents = {name: (folder / name).read_bytes() for name in ("items.db", "vectors-0.bin")}
    rng, stored = np.random.default_rng(0), execute(place, "select id, metadata from items")
    values = [value.encode() for row in stored for value in row if len(value) > 2]
    flips = [("items.db", contents["items.db"].index(x) + 1) for x in values[:5]]
    flips += [("items.db", int(x)) for x in rng.integers(100, len(contents["items.db"]), 3)]
    flips += [("vectors-0.bin", int(x)) for x in rng.integers(20 * 4 * DIMENSION, size=5)]
    refused = noticed = 0
    for name, position in flips:
        changed = bytearray(contents[name])
        changed[position] ^= 1 << int(rng.integers(8))
        for file, content in contents.items():
            (folder / file).write_bytes(changed if file == name else content)
        for log in ("-wal", "-shm"):
            (folder / f"items.db{log}").unlink(missing_ok=True)
        given = dict(answers(place, write=False))
        assert given.items() <= expected.items()
        refused += len(given) < len(expected)
        try:
            with index.open(place) as store:
                noticed += bool(store.check())
        except (index.Damaged, index.Unavailable):
            noticed += 1
    assert refused >= 10 and noticed >= 10


def test_a_changed_item_is_named_and_can_be_added_again(tmp_path):
    place = tmp_path / "photos.index"
    naive = filled(place)
    with (place / "generation-1" / "vectors-0.bin").open("r+b") as file:
        file.seek(7 * 4 * DIMENSION)
        file.write(bytes(4 * DIMENSION))
    with index.open(place, write=True) as store:
        store.delete(["6"])
        naive.delete(["6"])
        for call in (lambda: store.get(["7"]), lambda: list(store.scan()), store.compact):
            with pytest.raises(index.Damaged, match=r"item '7' is not what .* replace=True"):
                call()
        assert [item.id for item in store.get(["5"])] == ["5"]
        vector, metadata = naive.items["7"]
        store.add(["7"], vector[None], [metadata], replace=True)
        naive.add(["7"], vector[None], [metadata], replace=True)
        store.compact()
        assert store.check() == []
    equal(place, naive)


@pytest.mark.parametrize(
    "message, statements",
    [  # damage can change types, since in SQLite they belong to values
        ("checksum differs", ["update items set id = x'6e' where row = 8"]),
        ("checksum differs", ["update items set metadata = x'6e' where row = 8"]),
        ("49 .* 50", ["delete from items where row = 8"]),
    ],
)
def test_a_changed_table_is_damage_in_one_line(tmp_path, message, statements):
    place = tmp_path / "photos.index"
    filled(place)
    execute(place, *statements)
    with index.open(place, write=True) as store:
        for read in (lambda: list(store.scan()), lambda: store.search(np.eye(8)[:1], 49)):
            with pytest.raises(index.Damaged, match=message) as damage:
                read()
            assert "\n" not in str(damage.value)


def test_a_writer_removes_what_killed_ones_left(tmp_path):
    place = tmp_path / "photos.index"
    naive = filled(place)
    folder = place / "generation-1"
    kept = {path.name for path in place.rglob("*")}
    left = ["vectors-3.bin.77.tmp"]
    for path in [*(folder / name for name in left), place / "index.json.77.tmp"]:
        path.write_bytes(b"x")
    (place / "generation-2.tmp").mkdir()
    equal(place, naive)  # a reader removes nothing
    assert {path.name for path in place.rglob("*")} >= {*kept, *left, "generation-2.tmp"}
    with index.open(place, write=True):
        assert {path.name for path in place.rglob("*")} - {"items.db-wal", "items.db-shm"} == kept
    equal(place, naive)


def test_changes_that_a_read_only_folder_hides_are_reported_in_one_line(tmp_path):
    place, copy = tmp_path / "photos.index", tmp_path / "copy.index"
    filled(place)
    with index.open(place, write=True) as store:
        store.add(["new"], np.eye(DIMENSION, dtype=np.float32)[:1])
        shutil.copytree(place, copy)
    (copy / "generation-1" / "items.db-shm").unlink()
    code = """
try:
    index.open(sys.argv[1])
except index.Unavailable as error:
    print(error)
"""
    done = _as_nobody(code, copy)
    assert re.search("the last changes are in items.db-wal, .*where it may be", done.stdout), done
    assert done.stdout.count("\n") == 1
    with index.open(copy) as store:
        assert store.contains(["new"]) == [True]
