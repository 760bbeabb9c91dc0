"""Bad vectors, ids, metadata, filters and numbers: one line each, and nothing is stored."""

import re

import numpy as np
import pytest
from index_loops import unit_vectors

from dmljax import index
from dmljax.index import database, filters

MODEL = "ab" * 32
DIMENSION = 8
UNIT = np.eye(DIMENSION, dtype=np.float32)

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture
def store(tmp_path):
    with index.create(tmp_path / "photos.index", model=MODEL, dimension=DIMENSION) as store:
        store.add(["a", "b"], UNIT[:2], [{"color": "red", "year": 1990}, {"color": "blue"}])
        yield store


def refuses(store, message, call, error=index.InvalidInput):
    """Checks that the call raises one line with the message and changes nothing."""
    version, count = store.version, store.count()
    with pytest.raises(error, match=message) as caught:
        call()
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500
    assert (store.version, store.count()) == (version, count)
    assert store.check() == []


def _changed(value):
    vectors = UNIT[2:5].copy()
    vectors[1, 1] = value
    return vectors


VECTORS = {
    "other dimension": (np.eye(9, dtype=np.float32)[:3], r"shape \(3, 9\): pass \[n, 8\]"),
    "one axis": (UNIT[2], "shape"),
    "integers": (np.eye(8, dtype=np.int8)[:3], "type int8"),
    "objects": (UNIT[:3].astype(object), "type object"),
    "ragged": ([[1.0], [1.0, 2.0]], "not an array"),
    "NaN": (_changed(np.nan), "number 1 contains NaN or infinity"),
    "zero": (UNIT[:3] * [[1], [0], [1]], "number 1 has the length 0, not 1"),
    "not unit": (UNIT[:3] * [[1], [1.002], [1]], r"number 1 has the length 1.002, not 1"),
    "huge": (UNIT[:3].astype(np.float64) * 1e300, "number 0 has the length"),
    "no rows": (UNIT[:0], r"shape \(0, 8\)"),
    "other count": (UNIT[:2], "2 vectors for 3 ids"),
}


@pytest.mark.parametrize("name", VECTORS)
def test_vectors(store, name):
    vectors, message = VECTORS[name]
    ids = ["x", "y", "z"] if name != "no rows" else []
    refuses(store, message, lambda: store.add(ids, vectors))
    if name != "other count":
        refuses(store, message, lambda: store.search(vectors, 1))


def test_vectors_of_float16_and_float64_are_stored_as_unit_vectors(store):
    vectors = unit_vectors(np.random.default_rng(0), 3, DIMENSION)
    store.add(["h"], vectors[:1].astype(np.float16))
    store.add(["d"], vectors[1:2].astype(np.float64))
    store.add(["f"], vectors[2:3])
    half, double, single = (item.vector for item in store.get(["h", "d", "f"]))
    np.testing.assert_allclose(np.linalg.norm(half.astype(np.float64)), 1, atol=1e-7)
    np.testing.assert_allclose(half, vectors[0], atol=1e-3)
    np.testing.assert_array_equal(double, vectors[1])
    np.testing.assert_array_equal(single, vectors[2])


IDS = {
    "empty": ("", "is empty"),
    "long": ("x" * 513, "513 characters"),
    "long in bytes": ("漢" * 171, "171 characters: 512 bytes"),
    "NUL": ("a\0b", "control character"),
    "escape": ("\x1b[31m", "control character"),
    "lone surrogate": ("\ud800", "surrogate"),
    "not NFC": ("e\u0301", "NFC"),
    "number": (3, "type int"),
}


@pytest.mark.parametrize("name", IDS)
def test_ids(store, name):
    identifier, message = IDS[name]
    refuses(store, message, lambda: store.add(["new", identifier], UNIT[:2]))
    for call in (store.delete, store.get, lambda ids: store.search_ids(ids, 1)):
        refuses(store, message, lambda call=call: call(["a", identifier]))


def test_ids_are_opaque_text(store, tmp_path):
    ids = ["../../etc/passwd", "/etc/passwd", "a'; drop table items; --", "<script>", "%s", "?1"]
    ids += ["漢字 ü 🦊", "a b", "$.x", '"', "\\", "x" * 512]
    before = {path for path in tmp_path.rglob("*") if not path.name.endswith(("-wal", "-shm"))}
    vectors = unit_vectors(np.random.default_rng(0), len(ids), DIMENSION)
    store.add(ids, vectors, [{"name": name} for name in ids])
    assert [item.id for item in store.get(ids)] == ids
    for name, vector in zip(ids, vectors, strict=True):
        hit = store.search(vector[None], 1, where={"name": name})[0][0]
        assert hit.id == name and hit.metadata == {"name": name}
    after = {path for path in tmp_path.rglob("*") if not path.name.endswith(("-wal", "-shm"))}
    assert after == before
    store.delete(ids)
    assert store.count() == 2


def test_duplicates_and_unknown_ids(store):
    duplicate = index.DuplicateId
    refuses(store, "'x' occurs twice", lambda: store.add(["x", "x"], UNIT[:2]), duplicate)
    refuses(
        store, "'b' exists already.*replace", lambda: store.add(["c", "b"], UNIT[:2]), duplicate
    )
    refuses(store, "'x' occurs twice", lambda: store.add(["x", "x"], UNIT[:2], replace=True))
    unknown = index.UnknownId
    refuses(store, "no item has the id 'x'", lambda: store.delete(["a", "x"]), unknown)
    refuses(store, "'x' and 1 more", lambda: store.get(["x", "a", "y"]), unknown)
    refuses(store, "'x'", lambda: store.search_ids(["a", "x"], 1), unknown)
    refuses(store, "one string", lambda: store.delete("ab"))
    store.add(["b"], UNIT[3:4], replace=True)
    assert store.get(["b"])[0].metadata == {}  # replaced as a whole


def _nested(depth):
    value = {"x": 1}
    for _ in range(depth - 1):
        value = {"x": value}
    return value


METADATA = {
    "a list": ([[1]], "type list, not an object"),
    "one object": ({"x": 1}, "must be a list of 1 objects"),
    "other count": ([{}, {}], "must be a list of 1 objects"),
    "too deep": ([_nested(9)], "deeper than 8"),
    "endless": ([_nested(5000)], "deeper than 8"),
    "too large": ([{"x": "y" * 65536}], "65544 bytes"),
    "NaN": ([{"x": float("nan")}], "number nan"),
    "large integer": ([{"x": 2**63}], "beyond 64 bits"),
    "array": ([{"x": np.float32(1)}], "a float32"),
    "key": ([{1: "x"}], "field 1, has a name that is not text"),
    "NUL": ([{"x": "\0"}], "NUL"),
    "surrogate": ([{"x": "\udfff"}], "invalid Unicode"),
}


@pytest.mark.parametrize("name", METADATA)
def test_metadata(store, name):
    metadata, message = METADATA[name]
    refuses(store, message, lambda: store.add(["new"], UNIT[:1], metadata))


def test_metadata_comes_back_as_it_was(store):
    metadata = {"html": "<script>alert(1)</script>", "deep": _nested(7), "empty": {}, "list": []}
    metadata |= {"big": 2**63 - 1, "small": -(2**63), "float": 1e300, "tiny": 5e-324, "": None}
    store.add(["new"], UNIT[:1], [metadata])
    assert store.get(["new"])[0].metadata == metadata


SEARCHES = {
    "k = 0": ({"k": 0}, "k=0: choose a whole number from 1 to 1000"),
    "k > count": ({"k": 3}, "there are 2 items to search: choose k=1 to 2"),
    "k > limit": ({"k": 1001, "allow_fewer": True}, "from 1 to 1000"),
    "k of another type": ({"k": 1.0}, "whole number"),
    "unknown field": ({"where": {"colour": "red"}}, "field 'colour': did you mean 'color'"),
    "surrogate in a field": ({"where": {"\ud800": 1}}, r"no filter can name the field '\ud800'"),
    "quoted field": ({"where": {'x"': 1}}, "no filter can name"),
    "not a dict": ({"where": "color = 'red'"}, "not an object of fields"),
    "operator": ({"where": {"year": {"like": 1}}}, "operator 'like'"),
    "no operator": ({"where": {"year": {}}}, "range of 'year' is empty"),
    "range of a list": ({"where": {"year": {"<": [[1]]}}}, "compared with a list"),
    "range of two numbers": ({"where": {"year": {"<": [1, 2]}}}, "is not a number or a text"),
    "no values": ({"where": {"year": []}}, "'year' has 0 values: give 1 to 1000"),
    "many values": ({"where": {"year": list(range(1001))}}, "1001 values"),
    "many conditions": ({"where": {f"f{i}": i for i in range(101)}}, "101 conditions"),
    "values in all": (
        {"where": {f"f{i}": list(range(1000)) for i in range(11)}},
        "11000 values in all",
    ),
    "object": ({"where": {"year": [{"<": 1}]}}, "compared with a dict"),
    "NaN": ({"where": {"year": float("nan")}}, "compared with the number nan"),
    "large": ({"where": {"year": 2**63}}, "beyond 64 bits"),
    "surrogate": ({"where": {"color": "\ud800"}}, "invalid Unicode"),
    "threshold": (
        {"threshold": 1.5},
        "threshold=1.5: choose a number from -1 to 1, because the similarity of this index is",
    ),
    "threshold of another type": ({"threshold": "fmr=1e-3"}, "choose a number from"),
}


@pytest.mark.parametrize("name", SEARCHES)
def test_searches(store, name):
    keywords, message = SEARCHES[name]
    keywords = {"k": 1} | keywords
    refuses(store, re.escape(message), lambda: store.search(UNIT[:1], **keywords))
    if name != "k > count":
        refuses(store, re.escape(message), lambda: store.search_ids(["a"], **keywords))
    if "where" in keywords:
        refuses(store, re.escape(message), lambda: store.count(keywords["where"]))


def test_k_beyond_the_count_and_an_empty_index(store):
    assert len(store.search(UNIT[:1], 10, allow_fewer=True)[0]) == 2
    assert len(store.search(UNIT[:1], 10, where={"color": "red"})[0]) == 1
    assert store.search(UNIT[:1], 10, where={"color": "green"}) == [[]]
    refuses(store, "there are 1 items", lambda: store.search_ids(["a"], 2))
    assert [h.id for h in store.search_ids(["a"], 1)[0]] == ["b"]
    store.delete(["a"])
    refuses(store, "there are 0 items", lambda: store.search_ids(["b"], 1))
    assert store.search_ids(["b"], 1, allow_fewer=True) == [[]]
    store.delete(["b"])
    refuses(store, "there are 0 items", lambda: store.search(UNIT[:1], 1))
    assert store.search(UNIT[:2], 1, allow_fewer=True) == [[], []]


def test_no_match(store):
    query = UNIT[:1] * np.float32(0.6) + UNIT[2:3] * np.float32(0.8)
    assert [hit.id for hit in store.search(query, 2, threshold=0.5)[0]] == ["a"]
    least = store.search(query, 1)[0][0].similarity
    assert [hit.id for hit in store.search(query, 2, threshold=least)[0]] == ["a"]
    assert store.search(query, 2, threshold=0.7) == [[]]


def test_a_filter_is_never_part_of_the_statement():
    value = "x' or 1=1 --"
    conditions = filters.parse({value: [value, 1], "b": {"<": value}})
    text, parameters = filters.to_sql(conditions, database.DIALECT)
    assert value not in text and parameters.count(value) == 2


def test_another_model_dimension_or_similarity(tmp_path, store):
    other = "cd" * 32
    store.close()
    with pytest.raises(index.OtherModel, match=f"{MODEL}, not of {other}.*index reindex"):
        index.open(tmp_path / "photos.index", model=other)
    with pytest.raises(index.InvalidInput, match="not a digest"):
        index.open(tmp_path / "photos.index", model="a/b")
    for keywords, message in (
        ({"dimension": 0}, "dimension=0: choose a whole number from 1 to"),
        ({"dimension": 65536}, "from 1 to 16000"),
        ({"dimension": 8.0}, "whole number"),
        ({"similarity": "euclid"}, "similarity='euclid' is unknown: choose cosine or euclidean"),
        ({"model": "latest"}, "not a digest"),
    ):
        with pytest.raises(index.InvalidInput, match=message):
            index.create(tmp_path / "new.index", **({"model": MODEL, "dimension": 8} | keywords))
    assert not (tmp_path / "new.index").exists()


def test_create_refuses_what_exists(tmp_path):
    (tmp_path / "folder" / "other").mkdir(parents=True)
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    index.create(tmp_path / "photos.index", model=MODEL, dimension=8).close()
    for name in ("folder", "file", "link", "photos.index"):
        with pytest.raises(index.InvalidInput, match="already"):
            index.create(tmp_path / name, model=MODEL, dimension=8)


def test_a_repeated_value_of_a_filter_counts_once():
    values = [None, 1, True, 1.0, "1", False, 0] * 1000
    (condition,) = filters.parse({"n": values})
    assert [(filters.kind(v), v) for v in condition.values] == [
        ("null", None),
        ("number", 1),
        ("bool", True),
        ("text", "1"),
        ("bool", False),
        ("number", 0),
    ]
