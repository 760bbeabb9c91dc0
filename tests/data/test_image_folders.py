"""One folder per class: which images and classes are read, and what can be wrong."""

import os
import unicodedata

import data_fixtures as make
import numpy as np
import pytest

from dmljax.data import datasets, decode, image_folders


def test_split_is_the_first_half_of_the_classes_a_fraction_or_names(tmp_path):
    make.class_folders(tmp_path, {"c": 2, "a": 1, "b": 3, "d": 2})
    make.put(tmp_path / "a" / "deeper" / "x.png", make.png(1).getvalue())
    make.put(tmp_path / "a" / "notes.txt", b"no image")
    make.put(tmp_path / "a" / "._x.jpg", b"metadata that macOS writes beside an image")
    dataset = datasets.folder(root=tmp_path)
    assert dataset.train.names == ("a", "b") and dataset.test.names == ("c", "d")
    assert len(dataset.train) == 5 and len(dataset.test) == 4
    assert datasets.folder(root=tmp_path, split=0.25).train.names == ("a",)
    assert datasets.folder(root=tmp_path, split=("d", "b")).train.names == ("b", "d")
    with pytest.raises(ValueError, match="no class is called 'z'"):
        datasets.folder(root=tmp_path, split=["z"])


def test_folders_train_test_query_and_gallery_are_the_splits(tmp_path):
    make.class_folders(tmp_path / "train", {"a": 2, "b": 1})
    make.class_folders(tmp_path / "test", {"c": 2})
    dataset = datasets.folder(root=tmp_path)
    assert dataset.train.names == ("a", "b") and dataset.test.names == ("c",)
    make.class_folders(tmp_path / "query", {"c": 1, "d": 1})
    with pytest.raises(ValueError, match="only one of query/ and gallery/"):
        datasets.folder(root=tmp_path)
    make.class_folders(tmp_path / "gallery", {"c": 3, "d": 2})
    dataset = datasets.folder(root=tmp_path)
    assert dataset.train.names == ("a", "b")
    assert dataset.test.query.tolist() == [True] * 2 + [False] * 5
    assert (dataset.test.gallery == ~dataset.test.query).all()
    assert dataset.test.labels.tolist() == [0, 1, 0, 0, 0, 1, 1]


@pytest.mark.parametrize("name, split", [("val", None), ("valid", 0.0), ("validation", 0.5)])
def test_train_and_val_are_no_classes(tmp_path, name, split):
    for folder in ("train", name):
        make.class_folders(tmp_path / folder, {"a": 2, "b": 2})
    with pytest.raises(ValueError, match=rf"rename {name}/ to test/, or move it away") as error:
        datasets.folder(root=tmp_path, split=split)
    assert "\n" not in str(error.value)
    classes = datasets.folder(root=tmp_path, split=["train"])  # named, so they are classes
    assert classes.train.names == ("train",) and classes.test.names == (name,)


def test_val_beside_train_and_test_is_said_to_be_left_out(tmp_path, caplog):
    for folder, names in (("train", "ab"), ("val", "cd"), ("test", "ef")):
        make.class_folders(tmp_path / folder, dict.fromkeys(names, 2))
    dataset = datasets.folder(root=tmp_path)
    assert dataset.train.names == ("a", "b") and dataset.test.names == ("e", "f")
    (record,) = caplog.records
    assert f"{tmp_path / 'val'} is not read: --config.held_out=0.2" in record.getMessage()


def test_class_names_in_any_script_and_unicode_form(tmp_path):
    names = ["été", unicodedata.normalize("NFD", "œuvré"), "猫", "Ω 1", "кот"]
    make.class_folders(tmp_path, {name: 2 for name in names})
    with open(os.fsencode(tmp_path / "猫") + b"/\xff\xfe.jpg", "wb") as file:  # no UTF-8
        file.write(make.jpeg(9))
    dataset = datasets.folder(root=tmp_path, split=1.0).train
    assert len(dataset) == 11 and len(dataset.names) == 5
    assert all(decode.read(record).shape == (30, 40, 3) for record in dataset.records)
    assert set(dataset.names) >= {unicodedata.normalize("NFC", name) for name in names}


def test_a_class_folder_that_is_not_utf_8_is_named(tmp_path):
    os.mkdir(os.fsencode(tmp_path) + b"/caf\xe9")
    with open(os.fsencode(tmp_path) + b"/caf\xe9/1.jpg", "wb") as file:
        file.write(make.jpeg(9))
    with pytest.raises(ValueError, match=r"the name b'caf\\xe9' in .* is not UTF-8: rename"):
        datasets.folder(root=tmp_path)


def test_links_are_followed_except_those_that_lead_back(tmp_path, caplog):
    photos = make.class_folders(tmp_path / "photos", {"a": 2, "b": 3, "zz": 4})
    (photos / "a" / "loop").symlink_to(photos / "a")
    (photos / "zz" / "up").symlink_to("..")
    (photos / "all").symlink_to(".")
    (photos / "c").symlink_to(make.class_folders(tmp_path / "elsewhere", {"c": 3}) / "c")
    (photos / "a" / "dangling.jpg").symlink_to(tmp_path / "nothing.jpg")
    dataset = datasets.folder(root=photos, split=1.0).train
    assert dataset.names == ("a", "b", "c", "zz")
    assert np.bincount(dataset.labels).tolist() == [3, 3, 3, 4]
    lines = [record.getMessage() for record in caplog.records]
    links = {"all": photos, "a/loop": photos / "a", "zz/up": photos}
    assert sorted(lines) == sorted(
        f"{photos / link} leads back to {target}: not followed" for link, target in links.items()
    )
    with pytest.raises(decode.UnreadableImage, match="No such file"):
        decode.read(dataset.records[2])


def test_formats_that_are_not_read_are_counted_in_one_line(tmp_path, caplog):
    for part, names in (("train", "ab"), ("test", "cd")):
        make.class_folders(tmp_path / part, dict.fromkeys(names, 2))
        make.put(tmp_path / part / names[0] / "IMG_1.HEIC", b"not read")
    make.put(tmp_path / "test" / "phone" / "IMG_2.heic", b"not read")
    make.put(tmp_path / "test" / "phone" / "._IMG_2.heic", b"of macOS")
    make.put(tmp_path / "test" / "IMG_3.cr2", b"not read")
    assert len(datasets.folder(root=tmp_path).test) == 4
    lines = [record.getMessage() for record in caplog.records]
    unread = "in formats that are not read"
    assert lines == [
        f"{tmp_path / 'train'}: 1 image {unread} (1 .heic): convert them to JPEG",
        f"{tmp_path / 'test' / 'phone'} contains no image: it is not a class",
        f"{tmp_path / 'test'}: 3 images {unread} (1 .cr2, 2 .heic): convert them to JPEG",
    ]
    with pytest.raises(FileNotFoundError, match=r"only 1 image .* \(1 .heic\): convert them"):
        datasets.folder(root=make.put(tmp_path / "new" / "a" / "x.heic", b"").parents[1])


def test_a_folder_without_classes_counts_them_too(tmp_path, caplog):
    make.put(tmp_path / "x.jpg", make.jpeg())
    make.put(tmp_path / "raw" / "x.dng", b"not read")
    assert image_folders.image_paths(tmp_path) == [str(tmp_path / "x.jpg")]
    assert f"{tmp_path}: 1 image in formats that are not read (1 .dng)" in caplog.text


def test_errors_name_the_value_and_the_fix(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        datasets.folder(root=tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match="is a file, not a folder"):
        datasets.folder(root=make.put(tmp_path / "file.jpg", make.jpeg()))
    with pytest.raises(FileNotFoundError, match=r"and 1 image directly in it: .*separate folder"):
        datasets.folder(root=tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="no folder of images"):
        datasets.folder(root=tmp_path)


def test_a_folder_without_read_permission_is_named(tmp_path, monkeypatch):
    """Root, which may run the tests, may read everything."""
    root = make.class_folders(tmp_path, {"a": 1, "b": 1})
    scan_fn = os.scandir

    def scandir(folder):
        if str(folder) == str(root / "a"):
            raise PermissionError(13, "Permission denied", str(folder))
        return scan_fn(folder)

    monkeypatch.setattr(image_folders.os, "scandir", scandir)
    with pytest.raises(PermissionError, match=r"a may not be read.*chmod"):
        datasets.folder(root=root)


def test_a_pipe_is_no_image(tmp_path):
    """Reading it would wait for ever. A link that leads nowhere is reported when it is read."""
    os.mkfifo(tmp_path / "pipe.png")
    os.symlink(tmp_path / "gone.png", tmp_path / "link.png")
    assert image_folders.image_paths(tmp_path) == [str(tmp_path / "link.png")]
