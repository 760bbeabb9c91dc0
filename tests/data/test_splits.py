"""Labels index the names of their split, and divided splits have no class in common."""

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


def test_divide_by_names_and_its_errors():
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
