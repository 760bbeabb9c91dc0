"""`dmljax index` and `dmljax search`, with a tiny stand-in for the bundle."""

import json
import os
import shutil
import signal
import subprocess
import sys
import types
import unicodedata

import numpy as np
import postgres
import pyarrow as pa
import pytest
from PIL import Image
from processes import environment
from pyarrow import parquet

from dmljax import bundle as bundles
from dmljax import index, main
from dmljax.index import InvalidInput, inputs
from dmljax.index.base import File
from dmljax.serve import pictures


class Average(bundles.Bundle):
    """A bundle whose embedding is the mean color, as a direction."""

    digest, batch_sizes = "", (1, 4)
    dimension, similarity, input_shape = 3, "cosine", (2, 2, 3)
    thresholds = types.MappingProxyType({"fmr=1e-2": 0.9, "fmr=1e-3": 0.999})

    def __init__(self, digest="ab" * 32, shift=0.0):
        self.digest, self.shift = digest, shift

    def prepare(self, image):
        try:
            with Image.open(image) as opened:
                return np.asarray(opened.convert("RGB").resize((2, 2)))
        except OSError:
            raise ValueError(f"{image} is not an image") from None

    def embed_prepared(self, batch, *, prefix=None):
        assert prefix is None
        assert len(batch)
        x = batch.mean(axis=(1, 2), dtype=np.float64) + 1 + self.shift
        return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)


COLORS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255)}


@pytest.fixture
def images(tmp_path):
    """Three folders of three images of similar colors."""
    folder = tmp_path / "images"
    for name, color in COLORS.items():
        (folder / name).mkdir(parents=True)
        for i in range(3):
            pixels = np.array(color) * 0.8 + 15 * i
            Image.new("RGB", (4, 4), tuple(int(p) for p in pixels)).save(folder / name / f"{i}.png")
    return folder


@pytest.fixture(autouse=True)
def bundle(monkeypatch):
    """The path of a bundle is the digest's first two digits."""
    monkeypatch.setattr(bundles, "load", lambda path: Average(str(path) * 32, len(str(path))))


@pytest.fixture
def place(tmp_path):
    return tmp_path / "photos.index"


def run(*words):
    return main.main([str(word) for word in words])


@pytest.fixture
def indexed(images, place):
    """The index of the nine images."""
    run("index", "create", place, "--bundle=ab", f"--images={images}")
    return place


@pytest.fixture
def says(capsys):
    """Runs a command that must succeed, and finds a text in what it prints."""

    def check(text, *words):
        capsys.readouterr()
        assert run(*words) == 0
        assert text in capsys.readouterr().out

    return check


def test_indexes_a_folder_and_finds_what_is_similar(images, place, capsys, says):
    create = ["index", "create", place, "--bundle=ab", f"--images={images}"]
    says(f"added 9 images; {place} has 9", *create)
    query = images / "green" / "1.png"
    assert run("search", "ab", f"--index={place}", query, "--k=3") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == str(query) and len(lines) == 4
    assert lines[1].split() == ["1", "1.0000", "green/1.png", '{"folder":', '"green"}']
    assert all("green/" in line for line in lines[1:])
    # Again: only new images are embedded.
    Image.new("RGB", (4, 4), (250, 250, 0)).save(images / "yellow.png")
    says("added 1 image, 9 were there already", *create)
    says("added 10 images;", *create, "--replace")
    with index.open(place) as store:
        assert store.count() == 10 and store.check() == []


def test_search_by_id_filters_thresholds_and_json(images, indexed, capsys):
    capsys.readouterr()
    run("search", f"--index={indexed}", "--id=red/0.png", "--id=blue/0.png", "--k=1", "--json")
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["query"] == "red/0.png" and first["hits"][0]["id"] == "red/1.png"
    assert second["hits"][0]["metadata"] == {"folder": "blue"}
    query = images / "red" / "0.png"
    words = ["search", "ab", f"--index={indexed}", query]
    run(*words, "--where=folder=blue", "--where=folder=green")
    printed = capsys.readouterr().out
    assert printed.count("green/") == printed.count("blue/") == 3 and "red/1.png" not in printed
    run(*words, "--threshold=fmr=1e-3", "--json")
    near = json.loads(capsys.readouterr().out)["hits"]
    assert near and all(hit["similarity"] >= 0.999 for hit in near)
    run(*words, "--threshold=fmr=1e-3", "--where=folder=blue")
    assert "no match with a similarity of 0.9990 (fmr=1e-3)" in capsys.readouterr().out


def test_a_filter_finds_numbers_and_text_that_looks_like_one(place, capsys):
    folders = ["2020", "2021", "true", "1.50", "12345678901234567890123", "cats"]
    with index.create(place, model="ab" * 32, dimension=3) as store:
        metadata = [{"folder": name, "year": 2000 + i} for i, name in enumerate(folders)]
        store.add(folders, np.eye(3)[[0, 0, 0, 1, 1, 1]], metadata)
        store.add(["numbers"], np.eye(3)[:1], [{"folder": "x", "mixed": 2020}])
        store.add(["texts"], np.eye(3)[:1], [{"folder": "y", "mixed": "2020"}])

    def found(*where):
        words = [f"--where={condition}" for condition in where]
        run("search", f"--index={place}", "--id=cats", "--json", *words)
        return sorted(hit["id"] for hit in json.loads(capsys.readouterr().out)["hits"])

    for name in folders[:5]:
        assert found(f"folder={name}") == [name]
    assert found("folder=2020", "folder=true") == ["2020", "true"]
    assert found("mixed=2020") == ["numbers", "texts"]
    assert found("folder>=1.50", "folder<=1.50") == ["1.50"]
    assert found("year>=2001", "year<2003") == ["2021", "true"] and found('year="2001"') == []
    with pytest.raises(ValueError, match=r"no item has the field 'yaer'.*'year'"):
        found("yaer>=1")


def test_unreadable_images_are_named_and_left_out(images, place, capsys):
    (images / "text.png").write_text("no image")
    (images / "empty.jpg").write_bytes(b"")
    (images / "bad\nname.png").write_bytes((images / "red" / "0.png").read_bytes())
    assert run("index", "create", place, "--bundle=ab", f"--images={images}") == 1
    printed = capsys.readouterr()
    assert "added 9 images" in printed.out and "3 images left out" in printed.err
    for text in ("text.png is not an image", "empty.jpg is not", "contains a control character"):
        assert text in printed.err


def _known_files(place):
    with index.open(place) as store:
        return store.files()


def _files(place):
    with index.open(place) as store:
        return {item.id: item for items in store.scan() for item in items}


def test_a_file_that_has_changed_is_embedded_again(images, place, tmp_path, says):
    add = ["index", "add", place, "--bundle=ab", f"--images={images}"]
    run("index", "create", *add[2:])
    before, changed = _files(place), images / "red" / "0.png"
    new = (images / "blue" / "0.png").read_bytes()
    times = changed.stat().st_atime_ns, changed.stat().st_mtime_ns
    changed.write_bytes(new)
    (images / "red" / "1.png").write_bytes(new)
    os.utime(changed, ns=times)  # a copy may keep the time: then the size tells it
    says("added 0 images, embedded 2 changed images again, 7 were there already;", *add)
    after = _files(place)
    for name, item in after.items():
        expected = before["blue/0.png" if name in ("red/0.png", "red/1.png") else name]
        np.testing.assert_array_equal(item.vector, expected.vector)
        assert item.metadata == {"folder": name.partition("/")[0]}
    says("added 0 images, 9 were there already;", *add)
    # A folder that has moved with its times is not new, and neither is a file that is gone.
    images.rename(tmp_path / "moved")
    says("added 0 images, 9 were there already;", *add[:-1], f"--images={tmp_path / 'moved'}")


def test_unreadable_files_keep_their_old_vectors(images, place, capsys):
    add = ["index", "add", place, "--bundle=ab", f"--images={images}"]
    run("index", "create", *add[2:])
    before = _files(place)
    for name in ("red/0.png", "new.png"):
        (images / name).write_text("no image")
    capsys.readouterr()
    for _ in range(2):  # the next command says it again
        assert run(*add) == 1
        errors = capsys.readouterr().err
        assert errors.splitlines()[-1] == "2 images left out"
        assert errors.count("; its old vector stays\n") == 1
    np.testing.assert_array_equal(_files(place)["red/0.png"].vector, before["red/0.png"].vector)


def test_items_whose_files_are_gone_are_removed(images, indexed, tmp_path, says):
    for name in ("red/0.png", "blue/1.png"):
        (images / name).unlink()
    says("deleted 2 items", "index", "remove", indexed, f"--not-in={images}")
    with index.open(indexed) as store:
        stored = {item.id for items in store.scan() for item in items}
    assert stored == {path.relative_to(images).as_posix() for path in images.rglob("*.png")}
    says("deleted 0 items", "index", "remove", indexed, f"--not-in={images}")
    (tmp_path / "other").mkdir()
    other = f"--not-in={tmp_path / 'other'}"
    with pytest.raises(ValueError, match=r"^7 of 7 items have no file in .*: give all folders"):
        run("index", "remove", indexed, other)
    says("deleted 0 items", "index", "remove", indexed, other, f"--not-in={images}")
    for words in (["a", other], []):
        with pytest.raises(ValueError, match="needs ids, as"):
            run("index", "remove", indexed, *words)
    with pytest.raises(ValueError, match="--not-in=nowhere is not a folder"):
        run("index", "remove", indexed, "--not-in=nowhere")
    with index.open(indexed) as store:
        assert store.count() == len(stored)
    says("deleted 7 items", "index", "remove", indexed, other, "--yes")


def test_files_with_decomposed_names_are_not_gone(images, place, says):
    """macOS writes names in NFD; ids are in NFC."""
    names = [unicodedata.normalize("NFD", name) for name in ("kätzchen/ü1.png", "kätzchen/ü2.png")]
    (images / names[0]).parent.mkdir()
    for name in names:
        shutil.copy(images / "red" / "0.png", images / name)
    ids = [unicodedata.normalize("NFC", name) for name in names]
    run("index", "create", place, "--bundle=ab", f"--images={images}")
    assert not (images / ids[0]).exists()
    says("deleted 0 items", "index", "remove", place, f"--not-in={images}")
    shown = pictures.Pictures(images)
    assert shown.read(ids[1]) == (images / names[1]).read_bytes()
    (images / names[1]).unlink()
    assert run("index", "remove", place, f"--not-in={images}") == 0
    with index.open(place) as store:
        assert store.count() == 10 and store.contains(ids) == [True, False]


def test_a_folder_that_cannot_be_read_removes_nothing(images, indexed, monkeypatch):
    scandir = os.scandir

    def refused(path):
        if str(path).endswith("red"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(PermissionError, match=r"red"):
        run("index", "remove", indexed, f"--not-in={images}")
    monkeypatch.undo()
    with index.open(indexed) as store:
        assert store.count() == 9


def test_looks_after_an_index(images, indexed, tmp_path, capsys, says):
    capsys.readouterr()
    assert run("index", "list", indexed) == 0
    printed = capsys.readouterr().out
    assert "items        9" in printed and "search       exact" in printed
    says("deleted 2 items", "index", "remove", indexed, "red/0.png", "red/1.png")
    says("compacted: ", "index", "compact", indexed)
    assert run("index", "list", indexed, "--items") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == 'blue/0.png  {"folder": "blue"}' and len(lines) == 7
    says("ok: 7 items", "index", "check", indexed)
    with pytest.raises(index.UnknownId, match=r"'red/0\.png'"):
        run("index", "remove", indexed, "red/2.png", "red/0.png")
    file = tmp_path / "photos.parquet"
    says(f"wrote {file}: 7 items", "index", "export", indexed, file)
    table = parquet.read_table(file)
    assert table.column_names == ["id", "metadata", "vector"] and len(table) == 7
    assert table.schema.field("vector").type == pa.list_(pa.float32(), 3)
    other = tmp_path / "other.index"
    assert run("index", "create", other, f"--import={file}") == 0
    with index.open(indexed) as a, index.open(other) as b:
        for x, y in zip(next(a.scan()), next(b.scan()), strict=True):
            assert x.id == y.id and x.metadata == y.metadata
            np.testing.assert_array_equal(x.vector, y.vector)
    run("index", "compact", indexed)
    path = indexed / "generation-1" / "vectors-2.bin"
    path.write_bytes(b"x" * path.stat().st_size)
    assert run("index", "check", indexed) == 1
    assert "was changed" in capsys.readouterr().out


def test_imports_vectors_of_other_programs(place, tmp_path, says):
    file = tmp_path / "vectors.parquet"
    x = np.eye(3, dtype=np.float32)
    columns = {  # with the types of polars, and a column of pandas
        "id": pa.array(["a", "b", "c"], pa.large_string()),
        "embedding": pa.array(x.tolist(), pa.large_list(pa.float32())),
        "__index_level_0__": [3, 5, 9],
        "year": [1, 2, None],
    }
    parquet.write_table(pa.table(columns), file)
    with pytest.raises(ValueError, match=f"does not say which model.*BUNDLE --import={file}"):
        run("index", "create", place, f"--import={file}")
    assert run("index", "create", place, "--bundle=ab", f"--import={file}") == 0
    with index.open(place) as store:
        assert store.search(x[1:2], 1)[0][0] == ("b", 1.0, {"year": 2})
    for flags, line in (([], "0 vectors, 3 were there already"), (["--replace"], "3 vectors;")):
        says(f"added {line}", "index", "add", place, f"--import={file}", *flags)
    for columns, message in (
        ({"id": ["a"]}, r"needs the columns id .text. and vector"),
        ({"id": ["a"], "vector": [1.0]}, r"lists of numbers.*vector .double"),
        ({"id": ["a"], "vector": [[1.0, 0.0]]}, "2 dimensions"),
        ({"id": [1], "vector": [[1.0, 0.0, 0.0]]}, r"columns id .text.*id .int64"),
        ({"id": ["x"], "vector": [[1.0, 0.0, 0.0]], "metadata": ["{"]}, "not JSON in row 0"),
        ({"id": ["x", "y"], "vector": [[1.0, 0.0, 0.0], None]}, r"row 1 \(counted .* no vector"),
        # The lengths add up to two vectors of three numbers.
        ({"id": ["x", "y"], "vector": [[1.0, 0, 0, 0], [1.0, 0]]}, r"row 1 .* 2 numbers, not 4"),
    ):
        parquet.write_table(pa.table(columns), file)
        with pytest.raises(ValueError, match=message):
            run("index", "create", place, "--bundle=ab", f"--import={file}")
    file.write_text("x")
    with pytest.raises(ValueError, match="is not Parquet"):
        run("index", "add", place, f"--import={file}")
    with index.open(place) as store:
        assert store.count() == 3


BAD_ROWS = (
    (10_008, {"vector": [0.0, 0.0, 2.0]}, "vector number 10005 has the length 2, not 1"),
    (10_008, {"id": "n3"}, "the id 'n3' occurs twice$"),
    (8, {"vector": [0.0, 0.0, 0.0]}, "vector number 5 has the length 0, not 1"),
    (8, {"note": float("inf")}, "metadata of number 5, field 'note', has the number inf"),
)


def _vectors(file, count=10_008, **bad):
    """Writes vectors, the third last of which is `bad`; 10,008 are added in two batches."""
    columns = {"id": [f"n{i}" for i in range(count)], "vector": [[1.0, 0.0, 0.0]] * count}
    columns["note"] = [1.0] * count
    for name, value in bad.items():
        columns[name][count - 3] = value
    parquet.write_table(pa.table(columns), file)


@pytest.mark.parametrize(("count", "bad", "message"), BAD_ROWS)
def test_a_failed_import_leaves_no_new_index(place, tmp_path, count, bad, message):
    """The error names the file and the row."""
    file = tmp_path / "vectors.parquet"
    _vectors(file, count, **bad)
    with pytest.raises(index.InvalidInput, match=f"vectors.parquet.*: {message}"):
        run("index", "create", place, "--bundle=ab", f"--import={file}")
    assert not place.exists()
    _vectors(file, 8)
    assert run("index", "create", place, "--bundle=cd", f"--import={file}") == 0
    with index.open(place, model="cd" * 32) as store:
        assert store.count() == 8


@pytest.fixture(scope="module")
def server():
    with postgres.server() as server:
        yield server


def test_a_failed_import_leaves_no_tables_on_a_server(server, tmp_path):
    file, place = tmp_path / "vectors.parquet", f"{server.address}&table=failed"
    _vectors(file, vector=[0.0, 0.0, 2.0])
    with pytest.raises(index.InvalidInput, match="vector number 10005"):
        run("index", "create", place, "--bundle=ab", f"--import={file}")
    with pytest.raises(FileNotFoundError, match="does not exist"):
        run("index", "list", place)
    _vectors(file, 8)
    assert run("index", "create", place, "--bundle=cd", f"--import={file}") == 0


def test_no_line_has_the_password_of_a_server(server, images, capsys):
    address = server.address.replace("app@", "app:secret@") + "&table=secret"
    run("index", "create", address, "--bundle=ab", f"--images={images}")
    words = ["index", "reindex", address, f"--images={images}"]
    with pytest.raises(ValueError, match="of this bundle already") as refusal:
        run(*words, "--bundle=ab")
    assert run(*words, "--bundle=cd") == 0
    printed = capsys.readouterr().out
    assert "now has 9 items; it had 9" in printed
    assert "app:secret" not in f"{printed}{refusal.value}"


def test_a_failed_import_adds_nothing_and_a_killed_one_continues(images, place, tmp_path, says):
    file = tmp_path / "vectors.parquet"
    run("index", "create", place, "--bundle=ab", f"--images={images}")
    words = ["index", "add", place, "--bundle=ab", f"--import={file}"]
    _vectors(file, vector=[0.0, 0.0, 2.0])
    with pytest.raises(index.InvalidInput, match="vector number 10005"):
        run(*words)
    with index.open(place, write=True) as store:
        assert store.count() == 9
        store.add(["n0"], [[1.0, 0.0, 0.0]])
    _vectors(file)
    says("added 10,007 vectors, 1 were there already", *words)


def test_a_create_of_images_that_failed_is_continued(images, place, tmp_path):
    """A new index stays after an error only if it has items."""
    file, path = tmp_path / "list.parquet", str(images / "red" / "0.png")
    for count in (0, 1024):  # rows that are embedded before the one without a path
        ids, paths = [f"n{i}" for i in range(count + 1)], [path] * count
        table = pa.table({"id": ids, "path": pa.array([*paths, None], pa.string())})
        parquet.write_table(table, file, row_group_size=1024)
        words = ["index", "create", place, "--bundle=ab", f"--images={file}"]
        with pytest.raises(ValueError, match="a row without path or id"):
            run(*words)
        assert place.exists() == (count > 0)
    parquet.write_table(pa.table({"id": ids, "path": [*paths, path]}), file)
    assert run(*words) == 0
    with index.open(place) as store:
        assert store.count() == 1025


def test_a_query_that_is_no_image_is_named(images, indexed):
    for name in ("missing.png", "."):
        with pytest.raises(ValueError, match=f"{name} is not an image"):
            run("search", "ab", f"--index={indexed}", images / "red" / "0.png", name)


def test_an_index_of_another_bundle_is_refused_and_replaced(images, indexed, says):
    with index.open(indexed, write=True) as store:
        vector = store.get(["red/0.png"])[0].vector[None]
        store.add(["red/0.png"], vector, [{"folder": "red", "note": "kept"}], replace=True)
    words = [indexed, "--bundle=cd", f"--images={images}"]
    refusal = f"{'ab' * 32}, not of {'cd' * 32}.*index reindex"
    for verb in ("create", "add"):
        with pytest.raises(index.OtherModel, match=refusal):
            run("index", verb, *words)
    with pytest.raises(index.OtherModel, match=refusal):
        run("search", "cd", f"--index={indexed}", images / "red" / "0.png")
    says("now has 9 items; it had 9", "index", "reindex", *words)
    with index.open(indexed, model="cd" * 32) as store:
        assert store.get(["red/0.png"])[0].metadata == {"folder": "red", "note": "kept"}
    with pytest.raises(ValueError, match="of this bundle already: dmljax index add"):
        run("index", "reindex", *words)


def test_a_new_index_that_lacks_items_replaces_the_old_one_only_if_asked(
    images, indexed, capsys, says
):
    for name in ("0.png", "1.png"):
        (images / "blue" / name).unlink()
    words = ["index", "reindex", indexed, "--bundle=cd", f"--images={images}"]
    capsys.readouterr()
    with pytest.raises(ValueError, match=r"2 items of .* would be lost, such as 'blue/0\.png'"):
        run(*words)
    assert "added" not in capsys.readouterr().out  # nothing was embedded
    with index.open(indexed, model="ab" * 32) as store:
        assert store.count() == 9
    says("now has 7 items; it had 9", *words, "--drop-missing")
    with index.open(indexed, model="cd" * 32) as store:
        assert store.count() == 7 and store.check() == []


def test_images_that_cannot_be_read_refuse_a_reindex_that_the_next_one_continues(
    images, indexed, capsys
):
    data = (images / "red" / "0.png").read_bytes()
    (images / "red" / "0.png").write_bytes(b"")
    words = ["index", "reindex", indexed, "--bundle=cd", f"--images={images}"]
    capsys.readouterr()
    with pytest.raises(ValueError, match=r"1 item of .* would be lost, such as 'red/0\.png'"):
        run(*words)
    said = f"added 8 images; the index that is to replace {indexed} has 8 items"
    assert said in capsys.readouterr().out
    (images / "red" / "0.png").write_bytes(data)
    assert run(*words) == 0
    printed = capsys.readouterr().out
    assert "added 1 image, 8 were there already;" in printed and "now has 9 items" in printed


@pytest.mark.parametrize("folder", ["images", "wrong", "unknown"])
def test_an_interrupted_reindex_is_continued_only_with_the_same_images(
    images, indexed, tmp_path, folder
):
    """What a killed command with other images left is not published, nor kept under an id."""
    kept = np.eye(3, dtype=np.float32)[:2]
    with index.reindex(indexed, model="cd" * 32, dimension=3) as store:
        file = None if folder == "unknown" else File(str(tmp_path / folder), None)
        store.add(["red/0.png", "gone.png"], kept, files=[file] * 2)
    run("index", "reindex", indexed, "--bundle=cd", f"--images={images}")
    with index.open(indexed, model="cd" * 32) as store:
        assert store.count() == 9 and store.contains(["gone.png"]) == [False]
        is_kept = bool((store.get(["red/0.png"])[0].vector == kept[0]).all())
    assert is_kept == (folder == "images")


def test_a_reindex_of_vectors_is_run_again_after_a_kill(images, indexed, tmp_path):
    other, file = tmp_path / "other.index", tmp_path / "vectors.parquet"
    run("index", "create", other, "--bundle=cd", f"--images={images}")
    run("index", "export", other, file)
    with index.reindex(indexed, model="cd" * 32, dimension=3) as store:
        store.add(["red/0.png", "other"], np.eye(3, dtype=np.float32)[:2])
    assert run("index", "reindex", indexed, "--bundle=cd", f"--import={file}") == 0
    with index.open(indexed, model="cd" * 32) as a, index.open(other) as b:
        for x, y in zip(next(a.scan()), next(b.scan()), strict=True):
            np.testing.assert_array_equal(x.vector, y.vector)
    shown = pictures.Pictures(None, _known_files(indexed))
    assert shown.read("red/0.png") == (images / "red/0.png").read_bytes()


def test_every_item_is_shown_by_the_file_that_it_was_made_from(images, place, tmp_path):
    """Two folders have files of the same name: an id belongs to the folder that was added first."""
    more, moved = tmp_path / "more", tmp_path / "moved"
    (more / "red").mkdir(parents=True)
    for name, source in (("red/0.png", "blue/0.png"), ("red/9.png", "blue/1.png")):
        shutil.copy(images / source, more / name)
    add = ["index", "add", place, "--bundle=ab"]
    run("index", "create", place, *add[3:], f"--images={images}")
    assert {file.folder for file in _known_files(place).values()} == {str(images)}
    run(*add, f"--images={more}")
    assert {x: y.folder for x, y in _known_files(place).items() if y.folder != str(images)} == {
        "red/9.png": str(more)
    }

    def shown(name, folder=None):
        paths = pictures.Pictures(folder, _known_files(place))
        return paths.read(name) if name in paths else None

    old, new = (images / "red/0.png").read_bytes(), (more / "red/0.png").read_bytes()
    assert shown("red/0.png") == old
    assert shown("red/9.png") == (more / "red/9.png").read_bytes()
    assert shown("blue/2.png") == (images / "blue/2.png").read_bytes()
    assert shown("red/0.png", images) == old and shown("red/0.png", more) is None
    shutil.copytree(images, moved)  # a copy that the index does not know is taken as it is
    assert shown("red/0.png", moved) == old
    run(*add, f"--images={more}", "--replace")
    assert shown("red/0.png") == new and shown("red/1.png")
    run(*add, f"--images={images}", "--replace")
    assert shown("red/0.png") == old and shown("red/9.png")
    run(*add, f"--images={more}", "--replace")
    assert shown("red/0.png") == new
    images.rename(tmp_path / "away")
    assert shown("red/1.png") is None and shown("red/0.png") == new
    images.symlink_to(tmp_path / "away")
    assert shown("red/1.png") and shown("red/0.png") == new
    images.unlink()
    words = ["--bundle=cd", f"--images={moved}", "--drop-missing"]
    run("index", "reindex", place, *words)
    assert shown("red/0.png") == old and shown("red/9.png") is None


def test_an_image_whose_id_is_that_of_another_folder_is_named(
    images, place, tmp_path, capsys, says
):
    more = tmp_path / "more"
    (more / "red").mkdir(parents=True)
    shutil.copy(images / "blue/0.png", more / "red/0.png")
    shutil.copy(images / "blue/1.png", more / "red/9.png")
    run("index", "create", place, "--bundle=ab", f"--images={images}")
    add = ["index", "add", place, "--bundle=ab"]
    capsys.readouterr()
    assert run(*add, f"--images={more}") == 1
    printed, errors = capsys.readouterr()
    assert printed == f"added 1 image; {place} has 10 items\n"
    clash = f"left out: {more}/red/0.png: an image of {images} has the same id, red/0.png"
    assert errors.splitlines() == [clash, "1 image left out"]
    # The same files by another path, and a folder that was moved, are no other images.
    (tmp_path / "link").symlink_to(images)
    assert run(*add, f"--images={tmp_path}/link") == 0
    images.rename(tmp_path / "moved")
    says("added 0 images, 9 were there already", *add, f"--images={tmp_path}/moved")


def test_a_list_of_images_is_indexed(images, place, tmp_path, capsys):
    paths = sorted(path.relative_to(tmp_path).as_posix() for path in images.rglob("*.png"))
    columns = {"id": [f"n{i}" for i in range(8)] + ["n0"], "path": paths}
    parquet.write_table(pa.table(columns), tmp_path / "list.parquet")
    words = ["index", "create", place, "--bundle=ab", f"--images={tmp_path / 'list.parquet'}"]
    assert run(*words) == 1
    printed = capsys.readouterr()
    assert "added 8 images;" in printed.out and "another image has the same id, n0" in printed.err
    with index.open(place) as store:
        vectors = bundles.load("ab").embed([tmp_path / path for path in paths[:8]])
        for item, vector in zip(store.get(columns["id"][:8]), vectors, strict=True):
            np.testing.assert_allclose(item.vector, vector, atol=1e-6)


def test_columns_of_a_list_are_metadata(images, place, tmp_path, capsys):
    folder = tmp_path / "lists"
    folder.mkdir()
    columns = {
        "path": [f"../images/red/{i}.png" for i in range(3)],
        "id": ["a", "b", "c"],
        "price": [1.5, float("nan"), None],
        "tags": [["x"], [], None],
        "name": pa.array(["shoe", "hat", "shoe"]).dictionary_encode(),
    }
    file = folder / "list.parquet"
    parquet.write_table(pa.table(columns), file)
    words = ["index", "create", place, "--bundle=ab", f"--images={file}"]
    assert run(*words) == 0
    assert "so not metadata: tags\n" in capsys.readouterr().err
    with index.open(place) as store:
        stored = {item.id: item.metadata for items in store.scan() for item in items}
    assert stored == {
        "a": {"folder": "", "price": 1.5, "name": "shoe"},
        "b": {"folder": "", "price": None, "name": "hat"},
        "c": {"folder": "", "price": None, "name": "shoe"},
    }
    del columns["tags"]
    columns["price"][0], columns["path"] = 2.5, ["../images/red/0.png", "images/x.png", "y.png"]
    parquet.write_table(pa.table(columns), file)
    assert run(*words, "--replace") == 1
    said = f"2 images left out (relative paths in {file} begin at its folder)"
    assert said in capsys.readouterr().err
    with index.open(place) as store:
        assert store.get(["a"])[0].metadata["price"] == 2.5
    columns |= {
        "path": [f"../images/red/{i}.png" for i in range(3)],
        "name": ["", "x" * 70_000, ""],
    }
    parquet.write_table(pa.table(columns), file)
    assert run(*words, "--replace") == 1
    printed = capsys.readouterr()
    assert "added 2 images" in printed.out and "red/1.png: its metadata has 70" in printed.err


def test_errors_are_one_line_and_leave_nothing(images, place, tmp_path):
    (tmp_path / "empty").mkdir()
    make = ["index", "create", place, "--bundle=ab"]
    for words, message in (
        (["index"], "needs a verb.*create"),
        (["index", "crate", place], "know the verb 'crate': did you mean 'create'"),
        (["index", "create"], "needs an index"),
        (["index", "create", place, f"--images={images}"], "--bundle=BUNDLE is needed"),
        ([*make, f"--images={tmp_path}/no"], "neither a folder nor a Parquet file"),
        ([*make, f"--images={tmp_path}/empty"], "contains no images"),
        (["index", "create", images, "--bundle=ab", f"--images={images}"], "exists already"),
        (["index", "add", *make[2:], f"--images={images}"], "does not exist"),
        (["index", "add", "s3://x", "--bundle=ab", f"--images={images}"], "choose a folder, or"),
        (make, "either --images=FOLDER, or"),
        ([*make, f"--images={images}", "--items"], "--items does not belong to .*index create"),
        ([*make, f"--images={images}", "--drop-missing"], "--drop-missing does not belong"),
        ([*make, f"--images={images}", "more"], "'more' is not known"),
        (["index", "list", place], "does not exist"),
        (["index", "remove", place], "needs ids"),
        (["index", "check", place, "--chekc"], "'--chekc' is not known"),
        (["search", "ab", "x.png"], "needs --index"),
        (["search", "ab", f"--index={place}"], "needs a bundle with an image"),
        (["search", f"--index={place}", "--id=x"], "does not exist"),
        (["search", "ab", f"--index={place}", "x", "--threshold=fmr=1e-5"], "did you mean 'fmr="),
        (["search", "ab", f"--index={place}", "x", "--where=year"], "not FIELD=VALUE"),
        (["search", "ab", f"--index={place}", "x", "--where=a=1", "--where=a<2"], "both"),
    ):
        with pytest.raises((ValueError, OSError), match=message) as caught:
            run(*words)
        assert "\n" not in str(caught.value)
        assert not place.exists()


@pytest.mark.parametrize("count", [1, 3000])
def test_a_reader_of_the_output_may_end_before_it(place, tmp_path, count):
    """Before the first line, and after it while there is more than a pipe holds."""
    with index.create(place, model="ab" * 32, dimension=3) as store:
        vectors, notes = np.eye(3)[[0] * count], [{"note": "x" * 100}] * count
        store.add([f"n{i:04d}" for i in range(count)], vectors, notes)
    words = [sys.executable, "-m", "dmljax.main", "index", "list", str(place), "--items"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, **pipes, cwd=tmp_path, env=environment()) as process:
        assert count == 1 or process.stdout.readline().startswith("n0000  ")
        process.stdout.close()
        assert process.stderr.read() == "" and process.wait() == 128 + signal.SIGPIPE


def test_an_unknown_threshold_lists_the_others_or_says_why_there_are_none():
    assert inputs.threshold("fmr=1e-2", {"fmr=1e-2": 0.75}) == 0.75
    assert inputs.threshold("0.5", {}) == inputs.threshold(0.5, {}) == 0.5
    with pytest.raises(InvalidInput, match="did you mean 'fmr=1e-2'"):
        inputs.threshold("fmr=1e-3", {"fmr=1e-2": 0.75})
    reason = "which has none .* 16 test classes or 8 classes held out .*similarity, such"
    with pytest.raises(InvalidInput, match=reason):
        inputs.threshold("fmr=1e-3", {})
