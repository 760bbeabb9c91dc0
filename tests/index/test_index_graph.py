"""The approximate search: recall, later changes, filters, and when it is not used."""

import sys

import numpy as np
import pytest
from index_loops import unit_vectors
from processes import python

from dmljax import index
from dmljax.index import graph, tuning

MODEL = "ab" * 32
DIMENSION = 16
COUNT = 1500


@pytest.fixture(scope="module")
def vectors():
    rng = np.random.default_rng(0)
    centers = unit_vectors(rng, 80, DIMENSION)[rng.integers(0, 80, COUNT + 200)]
    x = centers + 0.1 * rng.normal(size=centers.shape)
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)


@pytest.fixture
def store(tmp_path, vectors):
    with index.create(tmp_path / "photos.index", model=MODEL, dimension=DIMENSION) as store:
        metadata = [{"tenth": i % 10, "fiftieth": i % 50} for i in range(COUNT)]
        store.add([str(i) for i in range(COUNT)], vectors[:COUNT], metadata)
        facts = store.build(approximate=True, recall=0.98)
        assert facts["approximate"]["items"] == COUNT
        assert facts["approximate"]["recall@10"] >= 0.98
        yield store


def recall(store, queries, k=10, **kwargs):
    """The share of the exact neighbors that the approximate search returns."""
    near, exact = (store.search(queries, k, exact=e, **kwargs) for e in (False, True))
    assert all(len(hits) == k for hits in near)
    shares = [
        len({h.id for h in a} & {h.id for h in b}) / k for a, b in zip(near, exact, strict=True)
    ]
    return np.mean(shares)


def test_recall_and_similarities(store, vectors):
    queries = vectors[COUNT : COUNT + 100]
    assert recall(store, queries) >= 0.97
    assert recall(store, queries, k=200) >= 0.9
    for where in ({"tenth": 3}, {"tenth": [1, 2, 3, 4]}):
        assert recall(store, queries, where=where) >= 0.97
    assert recall(store, queries, where={"fiftieth": 7}) == 1  # so few are compared exactly
    near, exact = (store.search(queries, 1, exact=e) for e in (False, True))
    same = [a for a, b in zip(near, exact, strict=True) if a == b]  # similarities bit for bit
    assert len(same) >= 97


def test_distances_have_a_graph_as_good(tmp_path, vectors):
    stretched = (vectors * np.linspace(1, 50, COUNT + 200)[:, None] + 3).astype(np.float32)
    stretched[7] = 1e6  # beyond half precision
    place = tmp_path / "photos.index"
    with index.create(place, model=MODEL, dimension=DIMENSION, similarity="euclidean") as store:
        store.add([str(i) for i in range(COUNT)], stretched[:COUNT])
        assert store.build(approximate=True, recall=0.98)["approximate"]["recall@10"] >= 0.98
        assert recall(store, stretched[COUNT:]) >= 0.97
        assert store.search(stretched[7:8], 1, exact=True)[0][0] == ("7", 0.0, {})
    with index.open(place) as store:
        assert recall(store, stretched[COUNT:]) >= 0.97


def test_the_graph_is_used(store, vectors, monkeypatch):
    calls = []
    nearest = graph.Graph.nearest
    monkeypatch.setattr(
        graph.Graph, "nearest", lambda self, *a: calls.append(len(a[0])) or nearest(self, *a)
    )
    store.search(vectors[:3], 5)
    assert calls == [3]
    store.search(vectors[:3], 5, exact=True)
    store.search(vectors[:3], 5, where={"fiftieth": 7})
    assert calls == [3]


def test_later_changes_count_at_once(store, vectors, tmp_path):
    reader = index.open(tmp_path / "photos.index")
    new = vectors[COUNT : COUNT + 150]
    store.add([f"new{i}" for i in range(150)], new, [{"tenth": 3}] * 150)
    deleted = [str(i) for i in range(0, COUNT, 9)]
    store.delete(deleted)
    store.add(["1"], new[:1], [{"tenth": 4}], replace=True)
    for opened in (store, reader):
        assert recall(opened, new) >= 0.97
        assert [hits[0].id for hits in opened.search(new[1:], 1)] == [
            f"new{i}" for i in range(1, 150)
        ]
        hits = [hit for hits in opened.search(vectors[:COUNT:9], 10) for hit in hits]
        assert not {hit.id for hit in hits} & set(deleted)
        assert [hit.id for hit in opened.search(new[:1], 2)[0]] == ["new0", "1"]
        assert opened.search(vectors[1:2], 1)[0][0].id != "1"
    facts = store.build(approximate=True)  # adds what is new, and takes out what is deleted
    assert facts["approximate"]["items"] == store.count() == len(reader)
    assert facts["approximate"]["recall@10"] >= 0.97
    for opened in (store, reader):
        assert recall(opened, new) >= 0.97
    store.compact()
    assert recall(store, new) >= 0.97 and recall(reader, new) >= 0.97
    assert store.check() == []
    assert store.build()["approximate"]["items"] == store.count()  # a graph stays
    assert store.build(approximate=False)["approximate"] is None
    assert store.build()["approximate"] is None
    assert recall(store, new) == recall(reader, new) == 1
    reader.close()


def test_a_graph_of_low_recall_is_not_used(store, vectors, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(tuning, "tune", lambda *a: (16, {"stored": 1.0, "between": 0.5}))
    store.build(approximate=True)
    monkeypatch.setattr(graph.Graph, "search", None)
    assert recall(store, vectors[COUNT : COUNT + 10]) == 1
    assert "recall@10 is 0.500 for between vectors" in caplog.text


def test_without_usearch(store, vectors, tmp_path, monkeypatch, caplog):
    store.close()
    monkeypatch.setitem(sys.modules, "usearch.index", None)
    with index.open(tmp_path / "photos.index", write=True) as again:
        assert "pip install 'dmljax[index]'" in caplog.text
        assert recall(again, vectors[:10]) == 1
        with pytest.raises(ImportError, match=r"pip install 'dmljax\[index\]'"):
            again.build(approximate=True)
        assert again.build()["approximate"] is None


def test_a_few_items_have_a_graph_too(tmp_path):
    for count in (0, 1, 2, 11):
        place = tmp_path / str(count)
        with index.create(place, model=MODEL, dimension=DIMENSION) as store:
            vectors = unit_vectors(np.random.default_rng(0), 11, DIMENSION)
            if count:
                store.add([str(i) for i in range(count)], vectors[:count])
            store.build(approximate=True)
            hits = store.search(vectors, 20, allow_fewer=True)
            assert [len(h) for h in hits] == [count] * 11
            assert [h[0].id for h in hits[:count]] == [str(i) for i in range(count)]


def test_the_smallest_width_that_is_good_enough_is_chosen():
    truth = {"stored": [list(range(11)), list(range(20, 31))], "between": [list(range(40, 51))]}
    own = {"stored": [0, 20], "between": [-1]}
    neighbors = {"stored": {16: 10, 32: 11}, "between": {16: 2, 32: 8}}  # stored ones: and itself
    widths = []

    def search(kind, width):
        widths.append((kind, width))
        return [rows[: neighbors[kind].get(width, 11)] for rows in truth[kind]]

    assert tuning.tune(search, truth, own, 0.95) == (64, {"stored": 1.0, "between": 1.0})
    assert widths == [(kind, width) for width in (16, 32, 64) for kind in truth]
    width, recalls = tuning.tune(search, truth, own, 0.8)
    assert width == 32 and recalls == {"stored": 1.0, "between": pytest.approx(0.8)}
    neighbors["between"] = dict.fromkeys((16, 32, 64, 128, 256, 512), 3)
    width, recalls = tuning.tune(search, truth, own, 0.95)
    assert width == 512 and recalls["between"] == pytest.approx(0.3)
    nothing = {"stored": []}
    assert tuning.tune(lambda *_: [], nothing, nothing, 0.95) == (16, {"stored": 1.0})
    alone = {"stored": [[0]]}, {"stored": [0]}  # one item has no neighbors
    assert tuning.tune(lambda *_: [[0]], *alone, 0.95) == (16, {"stored": 1.0})
    # A search for more rows than the width needs a larger one.
    assert tuning.width_for(64, 10) == 64 and tuning.width_for(64, 200) == 300


def tight(count, classes, dimension, rng):
    """Unit vectors in narrow classes: a graph of few links leads to none that is far away."""
    x = np.repeat(unit_vectors(rng, classes, dimension), -(-count // classes), axis=0)[:count]
    x = x + 0.02 * rng.normal(size=x.shape)
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)


def test_the_recall_holds_for_queries_that_are_no_items(tmp_path, monkeypatch):
    """Of stored vectors a narrow search finds all neighbors, of vectors of other classes few."""
    monkeypatch.setattr(tuning, "CONNECTIVITY", 4)
    rng = np.random.default_rng(0)
    items = tight(4000, 400, 32, rng)
    between = items[rng.permutation(4000)[:200]] + items[rng.permutation(4000)[:200]]
    between /= np.linalg.norm(between, axis=1, keepdims=True)
    with index.create(tmp_path / "photos.index", model=MODEL, dimension=32) as store:
        store.add([str(i) for i in range(len(items))], items)
        facts = store.build(approximate=True, recall=0.3)["approximate"]
        assert set(facts["recalls"]) == {"stored", "perturbed", "between"}
        assert facts["recall@10"] == min(facts["recalls"].values()) >= 0.3 == facts["wanted"]
        assert facts["recalls"]["stored"] - facts["recall@10"] > 0.1
        assert not store.search_ids(["1"], 3).exact
        assert not store.search(items[:3], 3).exact and store.search(items[:3], 3, exact=True).exact
        narrow = recall(store, between, k=10)
        facts = store.build(approximate=True, recall=0.9)["approximate"]
        assert facts["search width"] > 16
        if facts["recall@10"] >= 0.9:
            assert not store.search(between, 10).exact and recall(store, between) > narrow
        store.compact()  # keeps what was asked for
        assert store.facts()["approximate"]["wanted"] == 0.9
        with pytest.raises(index.InvalidInput, match="recall=2"):
            store.build(recall=2)


def test_a_recall_that_no_width_reaches_makes_every_search_exact(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(tuning, "CONNECTIVITY", 2)
    rng = np.random.default_rng(0)
    items = unit_vectors(rng, 2500, 48)
    with index.create(tmp_path / "photos.index", model=MODEL, dimension=48) as store:
        store.add([str(i) for i in range(len(items))], items)
        facts = store.build(approximate=True, recall=1)["approximate"]
        assert facts["recall@10"] < 1 and facts["search width"] == 512
        answers = store.search(unit_vectors(rng, 20, 48), 10)
        assert answers.exact and recall(store, unit_vectors(rng, 20, 48)) == 1
        assert "below 1.0: every search is exact" in caplog.text


def test_queries_that_resemble_no_item_are_compared_with_every_item(tmp_path, monkeypatch):
    """The recall that was measured says nothing about them."""
    monkeypatch.setattr(tuning, "CONNECTIVITY", 4)
    rng = np.random.default_rng(0)
    items, strangers = tight(4000, 400, 32, rng), unit_vectors(rng, 100, 32)
    with index.create(tmp_path / "photos.index", model=MODEL, dimension=32) as store:
        store.add([str(i) for i in range(len(items))], items)
        store.build(approximate=True, recall=0.3)
        best = [hits[0].similarity for hits in store.search(strangers, 10, exact=True)]
        strangers = strangers[np.argsort(best)[:50]]
        answers = store.search(strangers, 10)
        assert answers.exact and answers == store.search(strangers, 10, exact=True)
        mixed = store.search(np.concatenate([strangers, items[:2]]), 10)
        assert not mixed.exact and mixed[:50] == answers
        monkeypatch.setattr(tuning, "is_strange", lambda *_: False)
        assert recall(store, strangers) < 0.9  # without that


_EXPORTS = """
import sys
import numpy as np
from dmljax import index
with index.create(sys.argv[1], model="ab" * 32, dimension=8) as store:
    store.add([str(i) for i in range(8)], np.eye(8, dtype=np.float32))
    store.build(approximate=True)
    assert store.search(np.eye(8, dtype=np.float32)[:1], 1)[0][0].id == "0"
import jax
exported = jax.export.export(jax.jit(lambda x: 2 * x))(jax.ShapeDtypeStruct((3,), "float32"))
print(len(exported.mlir_module_serialized) > 100)
"""


def test_a_program_can_be_exported_after_a_graph_was_used(tmp_path):
    """usearch that is imported before jaxlib takes this from it."""
    done = python(_EXPORTS, tmp_path / "photos.index", JAX_PLATFORMS="cpu")
    assert done.stdout == "True\n"
