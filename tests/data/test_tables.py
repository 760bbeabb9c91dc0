"""Own images: folders, tables and arrays, and everything that can be wrong with them."""

import os
import unicodedata

import data_fixtures as make
import numpy as np
import pytest

from dmljax.data import datasets, decode


def test_folder_takes_half_of_the_classes_a_fraction_or_names(tmp_path):
    make.class_folders(tmp_path, {"c": 2, "a": 1, "b": 3, "d": 2})
    make.put(tmp_path / "a" / "deeper" / "x.png", make.png(1).getvalue())
    make.put(tmp_path / "a" / "notes.txt", b"no image")
    make.put(tmp_path / "a" / "._x.jpg", b"what some systems leave beside an image")
    found = datasets.folder(root=tmp_path)
    assert found.train.names == ("a", "b") and found.test.names == ("c", "d")
    assert len(found.train) == 5 and len(found.test) == 4
    assert datasets.folder(root=tmp_path, split=0.25).train.names == ("a",)
    assert datasets.folder(root=tmp_path, split=("d", "b")).train.names == ("b", "d")
    with pytest.raises(ValueError, match="no class is called 'z'"):
        datasets.folder(root=tmp_path, split=["z"])


def test_folder_with_its_own_halves(tmp_path):
    make.class_folders(tmp_path / "train", {"a": 2, "b": 1})
    make.class_folders(tmp_path / "test", {"c": 2})
    found = datasets.folder(root=tmp_path)
    assert found.train.names == ("a", "b") and found.test.names == ("c",)
    make.class_folders(tmp_path / "query", {"c": 1, "d": 1})
    with pytest.raises(ValueError, match="both query/ and gallery/"):
        datasets.folder(root=tmp_path)
    make.class_folders(tmp_path / "gallery", {"c": 3, "d": 2})
    found = datasets.folder(root=tmp_path)
    assert found.train.names == ("a", "b")
    assert found.test.query.tolist() == [True] * 2 + [False] * 5
    assert (found.test.gallery == ~found.test.query).all()
    assert found.test.labels.tolist() == [0, 1, 0, 0, 0, 1, 1]


def test_folder_names_in_any_script_and_form(tmp_path):
    names = ["été", unicodedata.normalize("NFD", "œuvré"), "猫", "Ω 1", "кот"]
    make.class_folders(tmp_path, {name: 2 for name in names})
    os.makedirs(os.fsencode(tmp_path) + b"/\xff\xfe")  # not text in any encoding
    with open(os.fsencode(tmp_path) + b"/\xff\xfe/\xe9.jpg", "wb") as file:
        file.write(make.jpeg(9))
    found = datasets.folder(root=tmp_path, split=1.0).train
    assert len(found) == 11 and len(found.names) == 6
    assert all(decode.read(record).shape == (30, 40, 3) for record in found.records)
    assert set(found.names) >= {unicodedata.normalize("NFC", name) for name in names}


def test_symlink_loops_end_and_links_are_followed(tmp_path, caplog):
    photos = tmp_path / "photos"
    make.class_folders(photos, {"a": 2, "b": 2})
    (photos / "a" / "again").symlink_to(photos / "a")
    (photos / "b" / "up").symlink_to(photos)
    elsewhere = make.class_folders(tmp_path / "elsewhere", {"c": 3})
    (photos / "c").symlink_to(elsewhere / "c")
    (photos / "a" / "dangling.jpg").symlink_to(tmp_path / "nothing.jpg")
    found = datasets.folder(root=photos, split=["a"])
    assert len(found.test.names) == 2 and found.test.names == ("b", "c")
    assert (found.test.labels == 1).sum() == 3
    assert "not followed" in caplog.text
    with pytest.raises(decode.UnreadableImage, match="No such file"):
        decode.read(found.train.records[-1])


def test_folder_errors_name_the_value_and_the_fix(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        datasets.folder(root=tmp_path / "nothing")
    with pytest.raises(NotADirectoryError, match="is a file, not a folder"):
        datasets.folder(root=make.put(tmp_path / "file.jpg", make.jpeg()))
    with pytest.raises(FileNotFoundError, match=r"\(1 images lie in it directly\).*folder of its"):
        datasets.folder(root=tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="no folder of images"):
        datasets.folder(root=tmp_path)


def test_folder_that_may_not_be_read():
    with make.ordinary_user() as (root, drop):
        make.class_folders(root, {"a": 1, "b": 1})
        (root / "a").chmod(0)
        with drop(), pytest.raises(PermissionError, match=r"a may not be read.*chmod"):
            datasets.folder(root=root)


def _rows(**extra):
    names = [f"img/{i}.jpg" for i in range(6)]
    return [
        {"path": n, "label": "xxyyzz"[i], **{k: v[i] for k, v in extra.items()}}
        for i, n in enumerate(names)
    ]


def test_table_plain_and_with_everything(tmp_path):
    file = make.write_table(tmp_path / "plain.csv", _rows())
    found = datasets.table(path=file, split=0.34)
    assert found.train.names == ("x",) and found.test.names == ("y", "z")
    rows = _rows(
        split=["train"] * 2 + ["test"] * 4,
        role=["", "", "query", "gallery", "both", "gallery"],
        box=["0 0 10 10"] * 5 + ["1,2,30,20"],
        superlabel=["p", "p", "q", "q", "q", "p"],
        group=["", "", "cam1", "cam1", "cam2", ""],
    )
    test = datasets.table(path=make.write_table(tmp_path / "all.csv", rows)).test
    assert test.query.tolist() == [True, False, True, False]
    assert test.gallery.tolist() == [False, True, True, True]
    assert test.boxes[-1].tolist() == [1, 2, 30, 20]
    assert test.superlabels.tolist() == [1, 1, 1, 0]
    assert test.groups.tolist() == [0, 0, 1, -1]
    assert decode.read(test.records[0]).shape == (30, 40, 3)


def test_table_from_parquet_equals_csv(tmp_path):
    import pyarrow
    from pyarrow import parquet

    rows = _rows(split=["train"] * 2 + ["test"] * 4)
    for row, label in zip(rows, [9, 9, 10, 10, 2, 2], strict=True):
        row["label"] = label
    csv = datasets.table(path=make.write_table(tmp_path / "t.csv", rows))
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "t.parquet")
    other = datasets.table(path=tmp_path / "t.parquet")
    for one, two in zip(csv, other, strict=True):
        assert one.names == two.names and one.records == two.records
        assert (one.labels == two.labels).all()
    assert csv.test.names == ("2", "10")
    with pytest.raises(ValueError, match="not Parquet"):
        datasets.table(path=make.put(tmp_path / "junk.parquet", b"PAR1 no"))


def test_table_with_other_column_names_and_root(tmp_path):
    rows = [{"path": r["path"], "what": r["label"]} for r in _rows()]
    file = make.write_table(tmp_path / "t.csv", rows)
    moved = tmp_path / "lists" / "t.csv"
    moved.parent.mkdir()
    file.rename(moved)
    found = datasets.table(path=moved, root=tmp_path, columns={"label": "what"})
    assert found.train.names == ("x", "y")
    with pytest.raises(FileNotFoundError, match="row 1 does not exist; paths start at"):
        datasets.table(path=moved, columns={"label": "what"})
    with pytest.raises(ValueError, match="names 'lable'; known are path, label"):
        datasets.table(path=moved, columns={"lable": "what"})


@pytest.mark.parametrize(
    "change, match",
    [
        (lambda r: [{"path": x["path"]} for x in r], "no column 'label'; it has path"),
        (lambda r: [*r, r[2]], r"'img/2.jpg' twice, in rows 3 and 7"),
        (lambda r: [{**x, "box": "9 9 1 1"} for x in r], "row 1: box '9 9 1 1' is not"),
        (lambda r: [{**x, "box": "0 0 inf inf"} for x in r], "row 1: box '0 0 inf inf' is not"),
        (lambda r: [{**x, "split": "val"} for x in r], "row 1: split 'val' is none of 'train'"),
        (lambda r: [{**x, "role": "probe"} for x in r], "row 1: role 'probe'"),
        (lambda r: [{**r[0], "label": ""}, *r[1:]], "row 1 has an empty label"),
    ],
)
def test_table_errors(tmp_path, change, match):
    file = make.write_table(tmp_path / "t.csv", change(_rows()))
    with pytest.raises(ValueError, match=match):
        datasets.table(path=file)


@pytest.mark.parametrize(
    "text, match",
    [
        (b"", "is empty"),
        (b"path,label\n", "has no rows"),
        (b"path,label\na.jpg\n", "t.csv:2 has 1 cells, not 2"),
        (b"path,label,label\na,b,c\n", "names a column twice"),
        (b"path,label\n\xff\xfe,b\n", "not a CSV in UTF-8"),
    ],
)
def test_table_torn(tmp_path, text, match):
    with pytest.raises(ValueError, match=match):
        datasets.table(path=make.put(tmp_path / "t.csv", text))


def test_one_image_may_hold_several_boxes(tmp_path):
    rows = [
        {"path": "a.jpg", "label": "x", "box": "0 0 9 9"},
        {"path": "a.jpg", "label": "y", "box": "9 9 20 20"},
    ]
    found = datasets.table(path=make.write_table(tmp_path / "t.csv", rows), split=1.0)
    assert len(found.train) == 2


def test_npz(tmp_path):
    images = np.arange(6 * 4 * 5, dtype=np.uint8).reshape(6, 4, 5)
    labels = np.array([3, 3, 7, 7, 11, 11])
    np.savez(tmp_path / "a.npz", images=images, labels=labels)
    found = datasets.npz(path=tmp_path / "a.npz", split=0.34)
    assert found.train.names == ("3",) and found.test.names == ("7", "11")
    assert (
        found.test.records.shape == (4, 4, 5, 1)
        and (found.test.records[..., 0] == images[2:]).all()
    )
    names, held_out = np.array(["a", "b"]), np.array([True, False])
    np.savez(
        tmp_path / "b.npz",
        images=images,
        labels=labels % 2,
        class_names=names,
        class_is_test=held_out,
    )
    with pytest.raises(ValueError, match="labels run from"):
        np.savez(tmp_path / "c.npz", images=images, labels=labels, class_names=names)
        datasets.npz(path=tmp_path / "c.npz")
    found = datasets.npz(path=tmp_path / "b.npz")
    assert found.train.names == ("b",) and found.test.names == ()


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
def test_npz_errors(tmp_path, arrays, match):
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(ValueError, match=match):
        datasets.npz(path=tmp_path / "a.npz")


def test_npz_that_is_none(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        datasets.npz(path=tmp_path / "no.npz")
    with pytest.raises(ValueError, match="cannot be read"):
        datasets.npz(path=make.put(tmp_path / "junk.npz", b"PK\3\4 junk"))
