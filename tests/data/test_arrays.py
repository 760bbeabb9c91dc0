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
        (_faulty(images=np.zeros((2, 3, 8, 9), np.uint8)), r"\(2, 3, 8, 9\); for"),
        (
            _faulty(images=np.zeros((2, 0, 0, 3), np.uint8)),
            r"pixels, got .* \(2, 0, 0, 3\)",
        ),
        (_faulty(images=np.zeros((2, 3, 3))), "must be uint8"),
        (_faulty(["a", "b"]), "2 integers, got <U1 .* class_names, labels = np.unique"),
        (_faulty([0, 0, 0]), "2 integers"),
        (_faulty([-1, 0]), "from -1 to 0, but must be 0 or more.*leave out"),
        (_faulty([3, 9], class_names=["a", "b"]), "from 3 to 9, but must .* index 2 names"),
        (_faulty([0, 2**32], class_names=["a", "b"]), "run from 0 to 4294967296, but"),
        (_faulty(class_names=["a", "b", "a"]), "class_names has 'a' more than once: give"),
        (_faulty(class_is_test=[0, 7]), "class_is_test must be True or False for each of 2"),
        (_faulty(class_is_test=["0", "1"]), "class_is_test must be True or False"),
        (_faulty(class_is_test=np.zeros(3, bool)), "class_is_test must be True or False"),
        ({"images": _PIXELS}, "no array 'labels'"),
        ({"images": _PIXELS, "labels": np.array([{}, {}], object)}, "allow_pickle=False"),
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
    np.save(tmp_path / "array.npy", _PIXELS)
    good, array = ((tmp_path / name).read_bytes() for name in ("good.npz", "array.npy"))
    for data in (b"PK\3\4 junk", b"", b"junk", good[:300], array):
        with pytest.raises(ValueError, match=r"is not a correct file of numpy\.savez"):
            datasets.npz(path=make.put(tmp_path / "junk.npz", data))
