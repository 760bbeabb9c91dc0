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
    with pytest.raises(ValueError, match="labels run from"):
        np.savez(tmp_path / "c.npz", images=images, labels=labels, class_names=names)
        datasets.npz(path=tmp_path / "c.npz")
    dataset = datasets.npz(path=tmp_path / "b.npz")
    assert dataset.train.names == ("b",) and dataset.test.names == ()


@pytest.mark.parametrize(
    "arrays, match",
    [
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
    with pytest.raises(ValueError, match=match):
        datasets.npz(path=tmp_path / "a.npz")


def test_a_file_that_is_not_npz_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        datasets.npz(path=tmp_path / "no.npz")
    with pytest.raises(ValueError, match="cannot be read"):
        datasets.npz(path=make.put(tmp_path / "junk.npz", b"PK\3\4 junk"))
