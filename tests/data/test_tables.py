"""Tables of images in CSV and Parquet, and everything that can be wrong with them."""

import data_fixtures as make
import pytest

from dmljax.data import datasets, decode


def _rows(**extra):
    names = [f"img/{i}.jpg" for i in range(6)]
    return [
        {"path": n, "label": "xxyyzz"[i], **{k: v[i] for k, v in extra.items()}}
        for i, n in enumerate(names)
    ]


def _parquet(file, rows):
    """A Parquet file of rows of which `make.write_table` made the images."""
    import pyarrow
    from pyarrow import parquet

    make.write_table(file.parent / "images.csv", _rows())
    parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return file


def test_a_table_needs_path_and_label_and_may_have_other_columns(tmp_path):
    file = make.write_table(tmp_path / "plain.csv", _rows())
    dataset = datasets.table(path=file, split=0.34)
    assert dataset.train.names == ("x",) and dataset.test.names == ("y", "z")
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


def test_parquet_equals_csv(tmp_path):
    rows = _rows(split=["train"] * 2 + ["test"] * 4)
    for row, label in zip(rows, [9, 9, 10, 10, 2, 2], strict=True):
        row["label"] = label
    csv = datasets.table(path=make.write_table(tmp_path / "t.csv", rows))
    other = datasets.table(path=_parquet(tmp_path / "t.parquet", rows))
    for from_csv, from_parquet in zip(csv, other, strict=True):
        assert from_csv.names == from_parquet.names
        assert from_csv.records == from_parquet.records
        assert (from_csv.labels == from_parquet.labels).all()
    assert csv.test.names == ("2", "10")
    with pytest.raises(ValueError, match="not Parquet"):
        datasets.table(path=make.put(tmp_path / "junk.parquet", b"PAR1 no"))


@pytest.mark.parametrize("missing", [None, float("nan")])
def test_null_and_nan_of_parquet_are_empty_cells(tmp_path, missing):
    groups = [missing, missing, 1.0, 1.0, missing, missing]
    rows = _rows(split=["train"] * 2 + ["test"] * 4, group=groups, role=[missing] * 6)
    test = datasets.table(path=_parquet(tmp_path / "t.parquet", rows)).test
    assert test.groups.tolist() == [0, 0, -1, -1] and not test.query.any()
    for name in ("path", "label"):
        rows = [{**row, name: missing if i == 4 else float(i)} for i, row in enumerate(_rows())]
        with pytest.raises(ValueError, match=f"row 5 has an empty {name}"):
            datasets.table(path=_parquet(tmp_path / "gap.parquet", rows))


def test_labels_of_parquet_have_no_blanks_and_whole_floats_are_integers(tmp_path):
    def names(labels):
        rows = [{**row, "label": label} for row, label in zip(_rows(), labels, strict=True)]
        splits = datasets.table(path=_parquet(tmp_path / "t.parquet", rows))
        return splits.train.names, splits.test.names

    assert names(["x", "x ", "y", " y", "z", "z"]) == (("x", "y"), ("z",))
    assert names([1, 1, 2, 2, 10, 10]) == (("1", "2"), ("10",))
    assert names([1.0, 1.0, 2.0, 2.0, 10.0, 10.0]) == (("1", "2"), ("10",))
    assert names([1.5, 1.5, 2.0, 2.0, -3.0, -3.0]) == (("-3", "1.5"), ("2",))


def test_column_names_and_the_root_can_be_changed(tmp_path):
    rows = [{"path": r["path"], "what": r["label"]} for r in _rows()]
    file = make.write_table(tmp_path / "t.csv", rows)
    moved = tmp_path / "lists" / "t.csv"
    moved.parent.mkdir()
    file.rename(moved)
    dataset = datasets.table(path=moved, root=tmp_path, columns={"label": "what"})
    assert dataset.train.names == ("x", "y")
    with pytest.raises(ValueError, match=r"row 1: .* is not a file in .*lists, which root="):
        datasets.table(path=moved, columns={"label": "what"})
    with pytest.raises(ValueError, match="columns= has no key 'lable': did you mean 'label'"):
        datasets.table(path=moved, columns={"lable": "what"})


@pytest.mark.parametrize(
    "change, match",
    [
        (lambda r: [{"path": x["path"]} for x in r], "no column 'label'. It has: path. Rename"),
        (lambda r: [*r, r[2]], r"'img/2.jpg' twice, in rows 3 and 7"),
        (lambda r: [{**x, "box": "9 9 1 1"} for x in r], "row 1: box '9 9 1 1' is not"),
        (lambda r: [{**x, "box": "0 0 inf inf"} for x in r], "row 1: box '0 0 inf inf' is not"),
        (lambda r: [{**x, "split": "val"} for x in r], "row 1: split 'val' is none of 'train'"),
        (lambda r: [{**x, "role": "probe"} for x in r], "row 1: role 'probe'"),
        (lambda r: [{**r[0], "label": ""}, *r[1:]], "row 1 has an empty label"),
    ],
)
def test_wrong_cells_are_named(tmp_path, change, match):
    file = make.write_table(tmp_path / "t.csv", change(_rows()))
    with pytest.raises(ValueError, match=match):
        datasets.table(path=file)


@pytest.mark.parametrize("delimiter", [";", "\t"])
def test_cells_may_be_separated_by_semicolons_or_tabs(tmp_path, delimiter):
    rows = [{"what": row.pop("label"), "kind, or not": "a,b", **row} for row in _rows()]
    comma = make.write_table(tmp_path / "comma.csv", rows)
    lines = [list(rows[0]), *(row.values() for row in rows)]
    text = "\r\n".join(delimiter.join(map('"{}"'.format, line)) for line in lines)
    other = make.put(tmp_path / "other.csv", text.encode("utf-8-sig"))
    for split, same in zip(
        *(datasets.table(path=x, columns={"label": "what"}) for x in (comma, other)), strict=True
    ):
        assert split.records == same.records and split.names == same.names
        assert (split.labels == same.labels).all()


@pytest.mark.parametrize(
    "text, match",
    [
        (b"", "is empty"),
        (b"path,label\n", "has no rows"),
        (b"path,label\na.jpg\n", "t.csv:2 has 1 cells, not 2"),
        (b"path,label,label\na,b,c\n", "names a column twice"),
        (b"path,label\n\xff\xfe,b\n", "not a CSV in UTF-8"),
        (
            b"Path,label\na,b\n",
            r"'path': did you mean 'Path'\? It has: Path, label. .* by columns={'path': 'its name",
        ),
        (b"path,label\nno.jpg,b\n", "row 1: 'no.jpg' is not a file in "),
    ],
)
def test_malformed_files_are_named(tmp_path, text, match):
    with pytest.raises(ValueError, match=match) as error:
        datasets.table(path=make.put(tmp_path / "t.csv", text))
    assert "\n" not in str(error.value)


def test_one_image_may_have_several_boxes(tmp_path):
    rows = [
        {"path": "a.jpg", "label": "x", "box": "0 0 9 9"},
        {"path": "a.jpg", "label": "y", "box": "9 9 20 20"},
    ]
    dataset = datasets.table(path=make.write_table(tmp_path / "t.csv", rows), split=1.0)
    assert len(dataset.train) == 2
