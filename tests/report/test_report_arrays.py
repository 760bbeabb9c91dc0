"""Embeddings and labels from files."""

import io

import numpy as np
import pytest
from safetensors.numpy import save_file

from dmljax.report import arrays


@pytest.fixture
def vectors(tmp_path):
    path = tmp_path / "x.npy"
    np.save(path, np.random.default_rng(0).standard_normal((6, 4)))
    return path


@pytest.mark.parametrize(
    ("name", "labels", "codes", "names"),
    [
        ("y.npy", np.array([7, 7, 30, 7, 4, 4]), [1, 1, 2, 1, 0, 0], ("4", "7", "30")),
        ("y.npy", np.array(["b", "a", "b", "a", "é", "a"]), [1, 0, 1, 0, 2, 0], ("a", "b", "é")),
        ("y.txt", "b\na\nb\na\na\nb\n", [1, 0, 1, 0, 0, 1], ("a", "b")),
    ],
)
def test_labels(vectors, tmp_path, name, labels, codes, names):
    path = tmp_path / name
    path.write_text(labels) if isinstance(labels, str) else np.save(path, labels)
    embeddings, split = arrays.read(vectors, path)
    assert embeddings.dtype == np.float32 and embeddings.shape == (6, 4)
    assert split.labels.tolist() == codes and split.names == names


def test_items_of_embed(vectors, tmp_path):
    path = tmp_path / "items.safetensors"
    items = {"labels": np.array([0, 1, 0, 1, 0, 1]), "query": np.arange(6) < 3}
    items["groups"] = np.array([4, -1, 4, 5, 5, -1])
    save_file(items | {"gallery": ~items["query"]}, path, metadata={"classes": '["a", "b"]'})
    _, split = arrays.read(vectors, path)
    assert split.names == ("a", "b") and split.query.tolist() == [True] * 3 + [False] * 3
    assert split.gallery.tolist() == [False] * 3 + [True] * 3
    assert split.groups.tolist() == [4, -1, 4, 5, 5, -1]


def _npy(content):
    return lambda path: np.save(path, content, allow_pickle=True)


def _npz():
    file = io.BytesIO()
    np.savez(file, a=1)
    return file.getvalue()


X, Y = _npy(np.ones((6, 4))), _npy(np.arange(6))


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (X, _npy(np.arange(5)), "has 6 rows, but .*y.npy has 5 labels"),
        (_npy(np.ones(6)), Y, r"must hold floating-point .*, got float64 of shape \(6,\)"),
        (_npy(np.ones((6, 4), int)), Y, "must hold floating-point numbers .*, got int64"),
        (_npy(np.full((6, 4), np.nan)), Y, "every row of .* holds a NaN"),
        (X, _npy(np.ones(6)), "one integer or name .* got float64"),
        (X, _npy(np.array([None] * 6)), "y.npy is not an array of numbers or names"),
        (lambda path: path.write_text("1 2"), Y, "x.npy is not an array .* by numpy.save"),
        (lambda path: path.write_bytes(_npz()), Y, "x.npy is not an array"),
    ],
)
def test_wrong_files(tmp_path, x, y, message):
    x(tmp_path / "x.npy")
    y(tmp_path / "y.npy")
    with pytest.raises(ValueError, match=message):
        arrays.read(tmp_path / "x.npy", tmp_path / "y.npy")


def test_missing_files(vectors, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"No such file.*y.npy"):
        arrays.read(vectors, tmp_path / "y.npy")
    with pytest.raises(FileNotFoundError, match=r"No such file.*none.npy"):
        arrays.read(tmp_path / "none.npy", vectors)
