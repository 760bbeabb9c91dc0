"""Searches in two stages: candidates by bits or by a prefix, compared by whole vectors."""

import itertools

import numpy as np
import postgres
import pytest
from index_loops import unit_vectors

from dmljax import index
from dmljax.index import codes, tuning
from dmljax.index.errors import InvalidInput
from dmljax.main import main

MODEL, DIMENSION, COUNT = "ab" * 32, 32, 600


@pytest.fixture(scope="module")
def vectors():
    """Vectors around centers. Their numbers lose variance, as those of trained prefixes do."""
    rng = np.random.default_rng(0)
    scale = (1 + np.arange(DIMENSION)) ** -0.5
    centers = rng.normal(size=(80, DIMENSION))[rng.integers(0, 80, COUNT + 100)]
    x = (centers + 0.5 * rng.normal(size=centers.shape)) * scale
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)


@pytest.fixture(scope="module")
def server():
    with postgres.server() as server:
        yield server


def _filled(place, vectors, count=COUNT):
    store = index.create(place, model=MODEL, dimension=DIMENSION)
    metadata = [{"tenth": i % 10, "hundredth": i % 100} for i in range(count)]
    store.add([str(i) for i in range(count)], vectors[:count], metadata)
    return store


@pytest.fixture
def store(tmp_path, vectors):
    with _filled(tmp_path / "photos.index", vectors) as store:
        yield store


def recall(store, queries, k=10, **kwargs):
    """The share of the exact neighbors that the search returns."""
    near, exact = (store.search(queries, k, exact=e, **kwargs) for e in (False, True))
    assert all(len(hits) == k for hits in near)
    both = zip(near, exact, strict=True)
    return np.mean([len({h.id for h in a} & {h.id for h in b}) / k for a, b in both])


def _naive_bits(vectors, query, allowed, count):
    """Rows in the order of the bits in which they differ from the query, by loops."""
    words = codes.encoded(np.vstack([query[None], vectors]), "bits")
    bits = [[int(w) >> i & 1 for w in row for i in range(64)] for row in words]
    distance = {
        row: sum(a != b for a, b in zip(bits[0], bits[1 + row], strict=True)) for row in allowed
    }
    return sorted(allowed, key=lambda row: (distance[row], row))[:count]


def _naive_prefix(vectors, query, allowed, count, dim=8):
    cut = [v[:dim] / np.linalg.norm(v[:dim]) for v in vectors.astype(np.float64)]
    short = query[:dim] / np.linalg.norm(query[:dim].astype(np.float64))
    return sorted(allowed, key=lambda row: (-round(float(cut[row] @ short), 6), row))[:count]


@pytest.mark.parametrize(("first", "naive"), [("bits", _naive_bits), (8, _naive_prefix)])
def test_a_search_is_the_loop_over_candidates(store, vectors, first, naive):
    facts = store.build(first=first)["approximate"]
    assert facts["first"] == first and facts["items"] == COUNT
    count = tuning.width_for(facts["candidates"], 5)
    for query in vectors[COUNT : COUNT + 4]:
        for where, allowed in ((None, range(COUNT)), ({"tenth": 3}, range(3, COUNT, 10))):
            rows = naive(vectors[:COUNT], query, allowed, count)
            values = vectors[:COUNT].astype(np.float64) @ query
            expected = sorted(rows, key=lambda row: (-values[row], row))[:5]
            hits = store.search(query[None], 5, where=where)[0]
            assert [hit.id for hit in hits] == [str(row) for row in expected]
            np.testing.assert_allclose([h.similarity for h in hits], values[expected], atol=1e-6)


def test_the_share_of_bits_that_differ_estimates_the_angle():
    x = unit_vectors(np.random.default_rng(1), 60, 300)
    x[:, 3:] *= 0.02  # almost all variance is in three numbers
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    words = codes.encoded(x, "bits")
    assert words.shape == (60, 8)  # 512 bits
    pairs = list(itertools.combinations(range(60), 2))
    angles = np.array([np.arccos(np.clip(x[i] @ x[j], -1, 1)) / np.pi for i, j in pairs])
    shares = np.array([np.bitwise_count(words[i] ^ words[j]).sum() / 512 for i, j in pairs])
    assert np.abs(shares - angles).max() < 0.09 and np.abs(shares - angles).mean() < 0.03


@pytest.mark.parametrize("first", ["bits", 16])
def test_changes_count_at_once_and_a_build_keeps_what_comes_first(store, vectors, first, tmp_path):
    queries = vectors[COUNT:]
    facts = store.build(first=first)["approximate"]
    assert facts["recall@10"] >= 0.95 and recall(store, queries) >= 0.95
    assert recall(store, queries, where={"hundredth": 7}, k=5) >= 0.95
    assert store.search(queries[:7], 9) == [store.search(q[None], 9)[0] for q in queries[:7]]
    reader = index.open(tmp_path / "photos.index")
    store.add([f"new{i}" for i in range(50)], queries[:50])
    deleted = [str(i) for i in range(0, COUNT, 7)]
    store.delete(deleted)
    for opened in (store, reader):
        near = opened.search(queries[:50], 5)
        assert [hits[0].id for hits in near] == [f"new{i}" for i in range(50)]
        assert not {hit.id for hits in near for hit in hits} & set(deleted)
        assert recall(opened, queries) >= 0.95
    assert store.build()["approximate"]["first"] == first
    assert store.facts()["approximate"]["items"] == store.count()
    store.compact()
    assert store.facts()["approximate"]["first"] == first and store.check() == []
    assert recall(reader, queries) >= 0.95
    reader.close()
    store.close()
    path = next((tmp_path / "photos.index").glob("*/codes-*.bin"))
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with index.open(tmp_path / "photos.index", write=True) as again:
        assert any("codes-" in problem for problem in again.check())
        assert recall(again, queries) == 1  # exact
        again.build()
        assert again.check() == [] and again.facts()["approximate"]["first"] == first
        assert again.build(approximate=False)["approximate"] is None
        assert again.build()["approximate"] is None


def test_few_items_and_candidates_that_are_not_good_enough(tmp_path, vectors, caplog):
    for count in (0, 1, 3):
        with index.create(tmp_path / str(count), model=MODEL, dimension=DIMENSION) as store:
            if count:
                store.add([str(i) for i in range(count)], vectors[:count])
            for first in ("bits", 4):
                store.build(first=first)
                hits = store.search(vectors[:3], 5, allow_fewer=True)
                assert [len(h) for h in hits] == [count] * 3
    with index.create(tmp_path / "poor", model=MODEL, dimension=DIMENSION) as store:
        rng = np.random.default_rng(0)
        store.add([str(i) for i in range(9000)], unit_vectors(rng, 9000, DIMENSION))
        assert store.build(first=1)["approximate"]["recall@10"] < 0.95
        assert recall(store, vectors[:20]) == 1
        assert "the recall@10 is 0." in caplog.text and "every search is exact" in caplog.text


@pytest.mark.parametrize("first", ["bits", 16])
def test_postgres_searches_in_two_stages(server, vectors, first, monkeypatch):
    monkeypatch.setattr("dmljax.index.postgres._QUERIES", 20)
    with _filled(f"{server.address}&table=two_{first}", vectors, 250) as store:
        store.build(approximate=True)
        facts = store.build(first=first)["approximate"]
        assert facts["first"] == first and facts["recall@10"] >= 0.9
        with store._snapshot() as cursor:
            cursor.execute("set local enable_seqscan = off")
            near = store._near(cursor, first, facts["candidates"], 10)
            exact = [hit.id for hit in store.search(vectors[:1], 10, exact=True)[0]]
            rows = store._nearest(cursor, vectors[0], 10, [], near)
            assert len({name for _, name, *_ in rows} & set(exact)) >= 8
            plan = cursor.execute(
                store._sql(
                    f"explain select row from {{items}} order by {near.distance.graph_column} "
                    f"{near.distance.operator} {near.distance.query.format('%s')} limit 5"
                ),
                (near.distance.query_type(vectors[0]),),
            ).fetchall()
            assert "_graph" in str(plan)  # the index of the codes answers
        assert recall(store, vectors[COUNT : COUNT + 20]) >= 0.9
        assert store.build()["approximate"]["first"] == first
        store.compact()
        assert store.facts()["approximate"]["first"] == first
        assert "first" not in store.build(approximate=True)["approximate"]


@pytest.mark.parametrize(
    ("first", "message"),
    [
        ("signs", "first='signs': choose 'bits' or a number such as 64"),
        (2.5, "choose 'bits' or a number"),
        (True, "choose 'bits' or a number"),
        (0, "a prefix has 1 to 31 of 32 numbers"),
        (32, "first=32: a prefix has 1 to 31 of 32 numbers"),
    ],
)
def test_what_cannot_come_first_is_one_line(store, unchecked, first, message):
    with pytest.raises(InvalidInput, match=message) as error:
        store.build(first=first)
    assert "\n" not in str(error.value) and store.facts()["approximate"] is None
    with pytest.raises(InvalidInput, match="give either approximate or first"):
        store.build(first="bits", approximate=True)


def test_distances_and_other_stores_have_no_codes(tmp_path, monkeypatch):
    place = tmp_path / "d.index"
    with index.create(place, model=MODEL, dimension=8, similarity="euclidean") as store:
        for first in ("bits", 4):
            with pytest.raises(InvalidInput, match="this index compares by Euclidean distance"):
                store.build(first=first)
    monkeypatch.setitem(index.stores.STORES, "memory", "memory_store:MemoryIndex")
    with (
        index.create("memory://two-stages", model=MODEL, dimension=8) as store,
        pytest.raises(InvalidInput, match="has no search in two stages"),
    ):
        store.build(first="bits")


def test_the_command_line(store, tmp_path, capsys):
    store.close()
    place = str(tmp_path / "photos.index")
    main(["index", "tune", place, "--first=bits"])
    assert "by bits, then whole vectors" in capsys.readouterr().out
    main(["index", "tune", place, "--first=8"])
    main(["index", "list", place])
    out = capsys.readouterr().out
    assert "by the first 8 numbers, then whole vectors" in out and "recall@10 0." in out
    main(["index", "export", place, str(tmp_path / "v.parquet")])
    main(
        [
            "index",
            "create",
            str(tmp_path / "b"),
            f"--import={tmp_path / 'v.parquet'}",
            "--first=bits",
        ]
    )
    with index.open(tmp_path / "b") as other:
        assert other.facts()["approximate"]["first"] == "bits"
    for words, message in (
        (["tune", place, "--first=64"], "first=64: a prefix has 1 to 31 of 32 numbers"),
        (["tune", place, "--first=8", "--graph=yes"], "leave out --graph"),
        (["list", place, "--first=8"], "--first does not belong to `dmljax index list`"),
        (
            ["create", str(tmp_path / "c"), f"--import={tmp_path / 'v.parquet'}", "--first=sign"],
            "first='sign': choose 'bits' or a number",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            main(["index", *words])
    assert not (tmp_path / "c").exists()
