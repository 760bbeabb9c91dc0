"""The table for Embedding Atlas: its columns, against loops."""

import io

import numpy as np
import pytest
from PIL import Image
from pyarrow import parquet

from dmljax.data.splits import Split
from dmljax.report import atlas


def _images(n):
    return np.random.default_rng(0).integers(0, 256, (n, 6, 5, 3)).astype(np.uint8)


@pytest.mark.parametrize("records", ["pixels", "files"])
def test_table(tmp_path, records, monkeypatch):
    monkeypatch.setattr(atlas, "_CHUNK", 9)
    images, embeddings = _images(30), np.random.default_rng(1).standard_normal((30, 4))
    embeddings[4] = np.nan
    paths = tuple(str(tmp_path / f"{i}.png") for i in range(30))
    for path, image in zip(paths, images, strict=True):
        Image.fromarray(image).save(path)
    labels, query = np.arange(30) % 3, np.arange(30) < 11
    split = Split(images if records == "pixels" else paths, labels, ("a", "b", "é"), query=query)
    path = tmp_path / "x.parquet"
    count = atlas.write(
        path, embeddings, split, ids=[f"i{i}" for i in range(30)], read_fn=lambda i: images[i]
    )
    table = parquet.read_table(path)
    kept = [i for i in range(30) if i != 4]
    rows = table.to_pylist()
    assert count == len(rows) == 29 and [r["id"] for r in rows] == [f"i{i}" for i in kept]
    assert str(table.schema.field("x").type) == str(table.schema.field("y").type) == "double"
    units = embeddings[kept] / np.linalg.norm(embeddings[kept], axis=1, keepdims=True)
    cosines = units @ units.T
    np.fill_diagonal(cosines, -np.inf)
    for place, (i, row) in enumerate(zip(kept, rows, strict=True)):
        assert row["label"] == split.names[labels[i]] and row["query"] == query[i]
        assert np.isfinite([row["x"], row["y"]]).all()
        near = np.argsort(-cosines[place])[:10]
        assert row["neighbors"]["ids"] == near.tolist()
        np.testing.assert_allclose(
            row["neighbors"]["distances"], 1 - cosines[place, near], atol=1e-6
        )
        with Image.open(io.BytesIO(row["image"]["bytes"])) as image:
            np.testing.assert_array_equal(np.asarray(image), images[i])
    assert len({(r["x"], r["y"]) for r in rows}) == 29


@pytest.mark.parametrize("n", [1, 2])
def test_one_image_has_no_neighbors_and_two_have_each_other(tmp_path, n):
    split = Split(_images(n), np.zeros(n, int), ("a",))
    path = tmp_path / "x.parquet"
    atlas.write(path, np.eye(n, 4), split, ids=["0", "1"][:n], read_fn=lambda i: split.records[i])
    rows = parquet.read_table(path).to_pylist()
    assert [row["neighbors"]["ids"] for row in rows] == ([[]] if n == 1 else [[1], [0]])


def test_a_fault_leaves_no_table(tmp_path):
    split = Split(_images(5), np.zeros(5, int), ("a",))

    def fail(row):
        raise OSError("moved")

    with pytest.raises(OSError, match="moved"):
        atlas.write(tmp_path / "x.parquet", np.eye(5), split, ids=list("abcde"), read_fn=fail)
    assert not list(tmp_path.iterdir())
