"""Data sets in one NumPy file, and everything that can be wrong with it."""

import data_fixtures as make
import numpy as np
import pytest

from dmljax.data import datasets


def test_split_by_fraction_or_by_class_is_test(tmp_path):
    images = np.arange(6 * 4 * 5, dtype=np.uint8).reshape(6, 4, 5)
    labels = np.array([3, 3, 7, 7, 11, 11])
    np.savez(tmp_path / "a.npz", images=images, labels=labels)
    dataset = datasets.npz(path=tmp_path / "a.npz", split=0.34)
    assert dataset.train.names == ("3",) and dataset.test.names == ("7", "11")
    assert (
        dataset.test.records.shape == (4, 4, 5, 1)
        and (dataset.test.records[..., 0] == images[2:]).all()
    )
    names, is_test = np.array(["a", "b"]), np.array([True, False])
    np.savez(
        tmp_path / "b.npz",
        images=images,
        labels=labels % 2,
        class_names=names,
        class_is_test=is_test,
    )
    dataset = datasets.npz(path=tmp_path / "b.npz")
    assert dataset.train.names == ("b",) and dataset.test.names == ()


_PIXELS = np.zeros((2, 3, 3), np.uint8)


def _faulty(labels=(0, 1), **arrays):
    return {"images": _PIXELS, "labels": np.array(labels), **arrays}


@pytest.mark.parametrize(
    "arrays, match",
    [
        (
            _faulty(images=np.zeros((2, 3, 8, 9), np.uint8)),
            r"\(2, 3, 8, 9\) have 9 channels, .*; move .* last: np.moveaxis\(images, 1, -1\)",
        ),
        (
            _faulty(images=np.zeros((2, 8, 8, 5), np.uint8)),
            "have 5 channels, and 1 or 3 are needed$",
        ),
        (_faulty(images=np.zeros((2, 0, 0, 3), np.uint8)), r"\(2, 0, 0, 3\) have no pixels"),
        (_faulty(["a", "b"]), "2 integers, not <U1 .* class_names, labels = np.unique"),
        (_faulty([-1, 0]), "1 label below 0, such as -1: leave these images out"),
        (_faulty([3, 9], class_names=["a", "b"]), "from 3 to 9, but class_names has 2 names: add"),
        (_faulty([0, 2**32], class_names=["a", "b"]), "run from 0 to 4294967296, but"),
        (_faulty(class_names=["a", "b", "a"]), "class_names has 'a' more than once: give"),
        (_faulty(class_is_test=[0, 7]), "class_is_test has values such as 7: write True for each"),
        (_faulty(class_is_test=["0", "1"]), "class_is_test has values such as 1: write True"),
        ({"images": np.zeros((2, 3, 3), np.uint8)}, "no 'labels'; it has images"),
        ({"images": np.zeros((2, 3, 3)), "labels": np.zeros(2, int)}, "must be uint8"),
        ({"images": np.zeros((2, 3, 3), np.uint8), "labels": np.zeros(3, int)}, "2 integers"),
        (
            {"images": np.zeros((2, 3, 3), np.uint8), "labels": np.array([{}, {}], object)},
            "cannot be read.*allow_pickle=False",
        ),
        (
            {
                "images": np.zeros((2, 3, 3), np.uint8),
                "labels": np.arange(2),
                "class_is_test": np.zeros(3, bool),
            },
            "class_is_test has 3 entries for 2 classes",
        ),
    ],
)
def test_wrong_arrays_are_named(tmp_path, arrays, match):
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(ValueError, match=match) as error:
        datasets.npz(path=tmp_path / "a.npz")
    assert str(tmp_path / "a.npz") in str(error.value) and "\n" not in str(error.value)


def test_a_file_that_is_not_npz_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        datasets.npz(path=tmp_path / "no.npz")
    np.savez(tmp_path / "good.npz", images=_PIXELS, labels=np.arange(2))
    for data in (b"PK\3\4 junk", (tmp_path / "good.npz").read_bytes()[:300]):
        with pytest.raises(ValueError, match="cannot be read: it is damaged, or not a file of"):
            datasets.npz(path=make.put(tmp_path / "junk.npz", data))
