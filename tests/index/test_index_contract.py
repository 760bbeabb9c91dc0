"""Both stores behave as the naive index: a random history of calls, compared after each of them."""

import numpy as np
import postgres
import pytest
from index_loops import NaiveIndex, random_vectors, same, unit_vectors

from dmljax import index
from dmljax.index.base import File

MODEL, OTHER = "ab" * 32, "cd" * 32
DIMENSION = 8
FILTERS = (
    None,
    {"color": "red"},
    {"color": ["red", "blue"], "year": {">=": 1990}},
    {"year": {">": 1985, "<=": 2001.5}},
    {"flag": True},
    {"flag": 1},
    {"year": None},
    {"color": {"<": "é"}},
    {"year": [1990, "1990", None]},
    {"weiß 漢": "ẞ"},
    {"price": 0.1},
    {"color": {">=": ["c", 5]}, "year": {">=": [1990, "1990"]}},
    {"C:\\temp\t": "ẞ"},
)


@pytest.fixture(scope="module")
def server():
    with postgres.server() as server:
        yield server


# Where the tests make an index, for every store: (pytest's request, a name) -> the place.
PLACES = {
    "folder": lambda request, name: request.getfixturevalue("tmp_path") / f"{name}.index",
    "postgres": lambda request, name: f"{request.getfixturevalue('server').address}&table={name}",
}


@pytest.fixture(params=PLACES)
def place(request):
    """Returns a place for an index: a folder, a table of a real server."""
    return PLACES[request.param](request, f"t{abs(hash(request.node.name)) % 10**9}")


def _metadata(rng):
    item = {
        "color": str(rng.choice(["red", "blue", "éclair", "it's", "1990"])),
        "flag": [True, False, 1, 0][rng.integers(4)],
        "nested": {"list": [1, {"x": None}], "text": '"quoted" \\ / \n'},
        "price": [0.1, 1e300, 1e-300, 2**53 + 1, -0.5, 1e23][rng.integers(6)],
        "weiß 漢": "ẞ",
        "C:\\temp\t": "ẞ",
    }
    if rng.random() < 0.8:
        item["year"] = [int(rng.integers(1980, 2010)), 1990.0, "1990", None][rng.integers(4)]
    return item


@pytest.mark.parametrize("similarity", ["cosine", "euclidean"])
def test_a_random_history_is_that_of_the_naive_index(place, similarity):
    rng = np.random.default_rng(0)
    naive = NaiveIndex(similarity)
    store = index.create(place, model=MODEL, dimension=DIMENSION, similarity=similarity)
    least = {"cosine": 0.3, "euclidean": -7.0}[similarity]
    reader = index.open(place, model=MODEL)
    for step in range(20):
        action = rng.choice(["add", "add", "replace", "delete", "compact", "reopen"])
        if action in ("add", "replace"):
            count = int(rng.integers(1, 12))
            ids = [f"{step}-{i} ‘ö’" for i in range(count)]
            if action == "replace" and naive.items:
                stored = list(naive.items)
                ids[: count // 2] = rng.permutation(stored)[: count // 2].tolist()
                ids = list(dict.fromkeys(ids))
            vectors = random_vectors(rng, len(ids), DIMENSION, similarity)
            if rng.random() < 0.3:  # equal vectors: the earlier item comes first
                vectors[:] = vectors[0]
            metadata = [_metadata(rng) for _ in ids] if rng.random() < 0.9 else None
            naive.add(ids, vectors, metadata, replace=action == "replace")
            store.add(ids, vectors, metadata, replace=action == "replace")
        elif action == "delete" and naive.items:
            ids = rng.permutation(list(naive.items))[: rng.integers(1, 6)].tolist()
            naive.delete(ids)
            store.delete(ids)
        elif action == "compact":
            store.compact()
        elif action == "reopen":
            store.close()
            store = index.open(place, model=MODEL, write=True)
        assert store.count() == reader.count() == len(naive.items)
        if not naive.items:
            continue
        queries = random_vectors(rng, 3, DIMENSION, similarity)
        queries[0] = next(iter(naive.items.values()))[0]
        where = FILTERS[step % len(FILTERS)]
        if where is not None and not set(where) <= store.fields():
            where = None
        for opened in (store, reader):
            k = int(rng.integers(1, 12))
            same(
                opened.search(queries, k, where=where, allow_fewer=True),
                naive.search(queries, k, where=where),
            )
            same(
                opened.search(queries, 5, threshold=least, allow_fewer=True),
                naive.search(queries, 5, threshold=least),
            )
            ids = rng.permutation(list(naive.items))[:2].tolist()
            same(
                opened.search_ids(ids, k, where=where, allow_fewer=True),
                naive.search_ids(ids, k, where=where),
            )
            assert opened.contains([ids[0], "other", ids[0]]) == [True, False, True]
            for item in opened.get(ids):
                vector, metadata = naive.items[item.id]
                np.testing.assert_array_equal(item.vector, vector)
                assert item.metadata == metadata
            if where is not None:
                expected = naive.search(queries[:1], len(naive.items), where=where)
                assert opened.count(where) == len(expected[0])
    scanned = [item for batch in reader.scan(7) for item in batch]
    assert [item.id for item in scanned] == list(naive.items)
    for item in scanned:
        np.testing.assert_array_equal(item.vector, naive.items[item.id][0])
        assert item.metadata == naive.items[item.id][1]
    assert store.check() == []
    assert store.similarity == reader.similarity == similarity
    store.close()
    reader.close()


def test_many_queries_give_bit_for_bit_what_single_ones_do(place):
    rng = np.random.default_rng(1)
    with index.create(place, model=MODEL, dimension=DIMENSION) as store:
        store.add([str(i) for i in range(1500)], unit_vectors(rng, 1500, DIMENSION))
        queries = unit_vectors(rng, 70, DIMENSION)
        together = store.search(queries, 10)
        assert together == [store.search(query[None], 10)[0] for query in queries]
        store.compact()
        assert together == store.search(queries, 10)


def test_the_version_counts_changes_and_readers_see_them_at_once(place):
    rng = np.random.default_rng(2)
    with (
        index.create(place, model=MODEL, dimension=DIMENSION) as store,
        index.open(place) as reader,
    ):
        assert store.version == reader.version == 0
        store.add(["a", "b"], unit_vectors(rng, 2, DIMENSION))
        assert store.version == reader.version == 1
        assert {hit.id for hit in reader.search(unit_vectors(rng, 1, DIMENSION), 2)[0]} == {
            "a",
            "b",
        }
        store.delete(["a"])
        assert reader.version == 2 and reader.count() == 1
        with pytest.raises(index.InvalidInput, match="write=True"):
            reader.delete(["b"])


def _refuses(store, error, call):
    """Checks that the call raises an error of one line and changes nothing."""
    before = store.version, store.count(), store.fields()
    with pytest.raises(error) as caught:
        call()
    assert "\n" not in str(caught.value)
    assert (store.version, store.count(), store.fields()) == before


def test_a_call_happens_completely_or_not_at_all(place):
    unit = np.eye(DIMENSION, dtype=np.float32)
    with index.create(place, model=MODEL, dimension=DIMENSION) as store:
        store.add(["a", "b"], unit[:2], [{"x": 1}, None])
        for error, call in (
            (index.DuplicateId, lambda: store.add(["c", "b"], unit[:2], [{"y": 1}, None])),
            (index.UnknownId, lambda: store.delete(["a", "c"])),
            (index.UnknownId, lambda: store.get(["a", "c"])),
            (index.InvalidInput, lambda: store.add(["c"], 2 * unit[:1])),
            (index.InvalidInput, lambda: store.search(unit[:1], 3)),
            (index.InvalidInput, lambda: store.search(unit[:1], 1, where={"y": 1})),
            (index.InvalidInput, lambda: store.count({"y": 1})),
        ):
            _refuses(store, error, call)
        scan = store.scan(1)
        first = next(scan)
        store.add(["c"], unit[2:3])
        assert [item.id for batch in (first, *scan) for item in batch] == ["a", "b"]
        assert store.search(unit[1:2], 1) == [[("b", 1.0, {})]]
        facts = store.facts()
        assert (facts["items"], facts["version"], facts["search"]) == (3, 2, "exact")
    with pytest.raises(index.InvalidInput, match="is closed"):
        store.count()


def test_image_files_belong_to_their_items(place):
    unit, file, other = np.eye(DIMENSION), File("/photos", "12 34"), File("/more", None)
    with index.create(place, model=MODEL, dimension=DIMENSION) as store:
        store.add(["a", "b", "c"], unit[:3], files=[file, other, None])
        assert store.files() == {"a": file, "b": other}
        assert store.files(["b", "c", "x"]) == {"b": other}
        store.add(["a", "b"], unit[:2], replace=True, files=[None, file])
        assert store.files() == {"b": file}
        store.delete(["b"])
        assert store.files() == {}


def test_places_models_and_writers(place):
    unit = np.eye(DIMENSION, dtype=np.float32)
    with pytest.raises(FileNotFoundError, match="not an index of dmljax"):
        index.open(place)
    store = index.create(place, model=MODEL, dimension=DIMENSION)
    store.add(["a"], unit[:1])
    with pytest.raises(index.InvalidInput, match="exists already"):
        index.create(place, model=MODEL, dimension=DIMENSION)
    with pytest.raises(index.OtherModel, match=f"{MODEL}, not of {OTHER}"):
        index.open(place, model=OTHER)
    with pytest.raises(index.Locked, match="being written"):
        index.reindex(place, model=OTHER, dimension=4)
    store.close()
    with index.reindex(place, model=OTHER, dimension=4) as new:
        new.add(["b", "c"], unit[:2, :4])
    with index.reindex(place, model=OTHER, dimension=4) as new:
        assert new.count() == 2  # as far as it was filled
        with index.open(place, model=MODEL) as reader:
            assert reader.count() == 1 and not reader.superseded  # until the switch
            new.switch()
            assert reader.superseded and not new.superseded
        with pytest.raises(index.InvalidInput, match="present index already"):
            new.switch()
    with index.open(place, model=OTHER, write=True) as store:
        assert (store.count(), store.dimension) == (2, 4)


def test_an_index_is_discarded_as_a_whole(place):
    """Includes its next generation. Then the place is free."""
    settings = {"dimension": DIMENSION}
    with index.create(place, model=MODEL, **settings) as store:
        store.add(["a"], np.eye(DIMENSION)[:1])
    with index.reindex(place, model=OTHER, **settings) as store:
        store.add(["b"], np.eye(DIMENSION)[:1])
    with index.open(place) as store, pytest.raises(index.InvalidInput, match="open for reading"):
        store.discard()
    with index.open(place, write=True) as store:
        store.discard()
        with pytest.raises(index.InvalidInput, match="is closed"):
            store.discard()
    for call in (index.open, lambda x: index.reindex(x, model=OTHER, **settings)):
        with pytest.raises(FileNotFoundError):
            call(place)
    with index.create(place, model=OTHER, **settings) as store:
        assert store.count() == 0
    with index.reindex(place, model=MODEL, **settings) as store:
        assert store.count() == 0
