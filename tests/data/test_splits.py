"""Labels index the names of their split, and divided splits have no class in common."""

import re
import unicodedata

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from dmljax.data import splits

_NAMES = st.lists(st.text("abé\u0301中0123", min_size=1, max_size=3), min_size=1, max_size=30)


@hypothesis.given(_NAMES, st.floats(0, 1))
def test_divide_keeps_every_record_once_and_no_class_twice(strings, fraction):
    labels, names = splits.encode(strings)
    everything = splits.Split(list(range(len(strings))), labels, names)
    train, test = splits.divide(everything, train=fraction)
    assert not set(train.names) & set(test.names)
    assert sorted([*train.records, *test.records]) == list(range(len(strings)))
    assert len(train.names) == round(fraction * len(names))
    for split in (train, test):
        for record, label in zip(split.records, split.labels, strict=True):
            assert split.names[label] == unicodedata.normalize("NFC", strings[record])
        assert len(split.names) == len(set(split.labels.tolist()))


def test_numbers_are_sorted_by_value_and_accents_in_composed_form():
    assert splits.encode(["10", "9", "2"])[1] == ("2", "9", "10")
    labels, names = splits.encode(["e\u0301", "é", "a"])
    assert names == ("a", "é") and labels.tolist() == [1, 1, 0]


def test_divide_takes_names_of_classes_and_refuses_unknown_ones():
    labels, names = splits.encode("abcab")
    everything = splits.Split(list("01234"), labels, names, query=np.array([1, 0, 1, 0, 1], bool))
    train, test = splits.divide(everything, train=["b"])
    assert train.names == ("b",) and train.records == ("1", "4")
    assert test.names == ("a", "c") and test.labels.tolist() == [0, 1, 0]
    assert train.query.tolist() == [False, True]
    with pytest.raises(ValueError, match="'z'"):
        splits.divide(everything, train=["z"])
    with pytest.raises(ValueError, match=r"1\.5"):
        splits.divide(everything, train=1.5)
    with pytest.raises(ValueError, match="'b'"):
        splits.divide(everything, train="b")


def test_arrays_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="2 labels for 3 records"):
        splits.Split([1, 2, 3], [0, 0], ("a",))
    with pytest.raises(ValueError, match="0 to 1, but there are 1 names"):
        splits.Split([1, 2], [0, 1], ("a",))
    with pytest.raises(ValueError, match="1 query"):
        splits.Split([1, 2], [0, 0], ("a",), query=np.array([True]))


def test_select_is_lazy_on_records_that_can_only_be_indexed():
    class Source:
        reads = 0

        def __len__(self):
            return 10

        def __getitem__(self, i):
            Source.reads += 1
            return bytes([i])

    selected = splits.select(splits.select(Source(), np.array([5, 6, 7])), np.array([2, 0]))
    assert len(selected) == 2 and Source.reads == 0
    assert [selected[0], selected[1]] == [b"\7", b"\5"]


def _blocks(classes, **options):
    """The held-out classes of each of four folds."""
    folds = (splits.fold_of_classes(classes, fold=fold, **options) for fold in range(4))
    return [np.flatnonzero(is_held_out).tolist() for is_held_out in folds]


def test_folds_are_those_of_musgrave():
    """Of the training halves of CUB-200 (100 classes), Cars196 (98) and SOP (11,317 there)."""
    cub = [range(75, 100), range(25), range(25, 50), range(50, 75)]
    cars = [range(74, 98), range(24), range(25, 49), range(49, 73)]
    assert _blocks(100) == [list(block) for block in cub]
    assert _blocks(98) == [list(block) for block in cars]
    assert [len(block) for block in _blocks(11317)] == [2829] * 4
    assert _blocks(11317)[0] == list(range(8488, 11317))


def test_shuffled_folds_divide_the_classes():
    blocks = _blocks(100, seed=3)
    assert sorted(c for block in blocks for c in block) == list(range(100))
    assert blocks == _blocks(100, seed=3) != _blocks(100, seed=4)
    assert all(block != sorted(range(block[0], block[0] + 25)) for block in blocks)


def test_every_second_image_of_a_class_is_a_query():
    split = splits.Split(list("abcdefg"), [0, 1, 0, 2, 1, 0, 0], ("a", "b", "c"))
    divided = splits.queries_and_gallery(split)
    assert divided.query.tolist() == [False, False, True, False, True, False, True]
    assert (divided.gallery == ~divided.query).all()


@pytest.mark.parametrize("query", [None, [1, 1, 0, 1, 0]])
@pytest.mark.parametrize("gallery", [None, [0, 1, 1, 1, 1]])
@pytest.mark.parametrize("groups", [None, [3, -1, 3, 4, 4]])
def test_a_search_follows_the_protocol(query, gallery, groups):
    marks = {"query": query, "gallery": gallery}
    marks = {k: None if v is None else np.array(v, bool) for k, v in marks.items()}
    split = splits.Split(
        list("abcde"),
        [0, 1, 0, 1, 1],
        ("x", "y"),
        groups=None if groups is None else np.array(groups),
        **marks,
    )
    embeddings = np.arange(10.0).reshape(5, 2)
    embeddings[3, 1] = np.nan
    search = split.search(embeddings)
    queries = [i for i in range(5) if i != 3 and (query is None or query[i])]
    items = queries if gallery is None else [i for i in range(5) if i != 3 and gallery[i]]
    assert search.queries.tolist() == queries and search.items.tolist() == items
    assert search.readable.tolist() == [True, True, True, False, True]
    assert search.labels.tolist() == split.labels[queries].tolist()
    assert search.item_labels.tolist() == split.labels[items].tolist()
    np.testing.assert_array_equal(search.embeddings, embeddings[queries])
    expected = {}
    if groups is not None:
        expected["groups"] = split.groups[queries]
    if gallery is not None:
        expected |= {"gallery": embeddings[items], "gallery_labels": split.labels[items]}
        if groups is not None:
            expected["gallery_groups"] = split.groups[items]
    assert search.options.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(search.options[name], array)
    assert search.candidates == len(items) - (gallery is None)


@hypothesis.given(
    st.integers(0, 999), st.sampled_from(["", "groups", "query gallery", "query gallery groups"])
)
def test_missing_positives_are_those_of_a_double_loop(seed, fields):
    rng = np.random.default_rng(seed)
    n = 5
    marks = {"query": rng.random(n) < 0.5, "gallery": rng.random(n) < 0.5}
    marks |= {"groups": rng.integers(-1, 2, n)}
    marks = {name: marks[name] for name in fields.split()}
    split = splits.Split([b""] * n, rng.integers(0, 4, n), tuple("abcd"), **marks)
    every, embeddings = np.ones(n, bool), np.zeros((n, 2))
    for readable in (every, rng.random(n) < 0.7):
        embeddings[~readable, 1] = np.nan
        expected = any(
            split.labels[i] == split.labels[j]
            and ("gallery" in marks or i != j)
            and not ("groups" in marks and marks["groups"][i] == marks["groups"][j] != -1)
            for i in np.flatnonzero(readable & marks.get("query", every))
            for j in np.flatnonzero(readable & marks.get("gallery", every))
        )
        assert (split.missing_positives(embeddings) == "") == expected
        assert readable is not every or (split.missing_positives() == "") == expected


@pytest.mark.parametrize(
    "marks, reason",
    [
        ({"query": "0000", "gallery": "0000"}, "no image has the role 'query': give it to some"),
        ({"query": "1111", "gallery": "0000"}, "no image has the role 'gallery': give it to some"),
        ({"query": "1100", "gallery": "0011"}, "no query has an image of its class in the gallery"),
        ({"groups": "0000"}, "no image has another one of its class outside of its group: correct"),
        ({"groups": "0011", "query": "1010", "gallery": "0101"}, "in the gallery outside of its"),
    ],
)
def test_missing_positives_names_the_true_reason(marks, reason):
    arrays = {name: np.array(list(bits), int) for name, bits in marks.items()}
    for name in {"query", "gallery"} & set(arrays):
        arrays[name] = arrays[name] == 1
    split = splits.Split([b""] * 4, np.array([0, 0, 1, 1]), ("a", "b"), **arrays)
    assert re.search(reason, split.missing_positives())
    single = splits.Split([b""] * 2, np.arange(2), ("a", "b"), groups=np.zeros(2, int))
    assert single.missing_positives().startswith("no image has another one of its class")
