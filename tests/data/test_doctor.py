"""The doctor finds every kind of fault, and nothing wrong in a correct data set."""

import dataclasses

import data_fixtures as make
import numpy as np
import pytest
from processes import command

from dmljax import main
from dmljax.data import datasets, doctor, prepare, splits


def _wrong(splits, name=""):
    return [f.text for f in doctor.examine(splits, dataset=name) if f.level == "WRONG"]


def _texts(splits, name=""):
    return "\n".join(f"{f.level} {f.text}" for f in doctor.examine(splits, dataset=name))


@pytest.fixture
def photos(tmp_path):
    return make.class_folders(tmp_path / "photos", {"a": 3, "b": 1, "c": 3, "d": 4})


def test_a_correct_data_set_has_notes_and_no_fault(photos):
    text = _texts(datasets.folder(root=photos))
    assert "WRONG" not in text
    assert "note train: 4 images of 2 classes" in text and "labels run from 0 to 1" in text
    assert "the smallest classes are 'b' 1, 'a' 3; 1 class with one image, so no positive" in text


def test_unreadable_files_are_all_named(photos):
    make.put(photos / "a" / "000.jpg", b"")
    make.put(photos / "d" / "001.jpg", make.jpeg(1)[:300])
    (photos / "c" / "gone.jpg").symlink_to(photos / "nothing.jpg")
    (text,) = _wrong(datasets.folder(root=photos))
    assert text.startswith("3 images cannot be read") and "a/000.jpg: it has zero bytes" in text
    assert "d/001.jpg: " in text and "c/gone.jpg: No such file" in text


def test_duplicates_in_both_splits_and_within_one_are_named(photos):
    data = (photos / "a" / "000.jpg").read_bytes()
    make.put(photos / "d" / "copy.jpg", data)
    make.put(photos / "b" / "copy.jpg", data)
    dataset = datasets.folder(root=photos)
    (text,) = _wrong(dataset)
    assert (
        "1 images are in train and test" in text and "a/000.jpg = " in text and "d/copy.jpg" in text
    )
    assert "1 files occur more than once, 1 of them in different classes" in _texts(dataset)


def test_classes_in_both_splits_are_named(photos):
    everything = datasets.folder(root=photos, split=1.0).train
    leaking = splits.Splits(
        splits.subset(everything, [0, 1, 4]), splits.subset(everything, [2, 5, 8, 9])
    )
    (text,) = _wrong(leaking)
    assert text == "2 classes are in train and test: a; c"


def test_sets_that_a_run_refuses_are_wrong():
    images = np.arange(8, dtype=np.uint8)[:, None, None, None]
    everything = splits.Split(images, np.arange(8) // 2, tuple("abcd"))
    for train, title in ((0.0, "train"), (1.0, "test")):
        (text,) = _wrong(splits.divide(everything, train=train))
        assert text == f"{title}: 0 images of 0 classes, so `dmljax train` refuses this data set"
    empty = np.zeros(8, bool)
    for marks, reason in (
        ({"query": empty, "gallery": empty}, "no image has the role 'query'"),
        (
            {"groups": np.zeros(8, int)},
            "no image has another one of its class outside of its group",
        ),
    ):
        split = dataclasses.replace(everything, **marks)
        (text,) = _wrong(splits.divide(split, train=0.5))
        assert text.startswith("there is nothing to score in the test split: ") and reason in text


def test_names_that_look_alike_are_noted():
    labels, names = splits.encode(["1", "01", "1.0", "2", "Pear", "pear", "plum", "NaN"] * 2)
    images = np.arange(len(labels), dtype=np.uint8)[:, None, None, None]
    text = _texts(splits.divide(splits.Split(images, labels, names), train=0.5))
    assert "note names of classes that differ only in case, blanks or zeros: " in text
    assert "'01' = '1' = '1.0'; 'Pear' = 'pear'. If they mean one class" in text
    assert "differ only" not in _texts(datasets.glyphs(), "glyphs")
    labels, names = splits.encode(["12345678901234567", "12345678901234568", "7e999", "8e999"] * 4)
    text = _texts(splits.divide(splits.Split(images, labels, names), train=0.5))
    assert "differ only" not in text


def test_numbers_in_the_order_of_text_are_noted():
    images = np.arange(40, dtype=np.uint8)[:, None, None, None]
    for form, is_noted in (("{}.0", True), ("{}", False), ("{:02d}.0", False), ("c{}", False)):
        labels, names = splits.encode([form.format(i // 2) for i in range(40)])
        text = _texts(splits.divide(splits.Split(images, labels, names), train=0.5))
        note = "note test: classes are numbers in the order of text: 18.0; 19.0; 2.0"
        assert (note in text) == is_noted


def test_some_data_sets_share_classes_by_design(tmp_path):
    dataset = datasets.tiny_imagenet(root=make.tiny_imagenet(tmp_path))
    wrong = _wrong(dataset, "tiny_imagenet")
    assert all("published" in text or "nothing to score" in text for text in wrong)
    assert "ok 3 classes are in train and test, as intended in this data set" in _texts(
        dataset, "tiny_imagenet"
    )


def test_counts_that_are_not_the_published_ones_are_named(tmp_path):
    dataset = datasets.cub200(root=make.cub(tmp_path))
    wrong = _wrong(dataset, "cub200")
    assert len(wrong) == 2 and "published are 5,864 images of 100 classes" in wrong[0]
    text = _texts(datasets.glyphs(), "glyphs")
    assert "ok train: 2,624 images of 164 classes" in text and "WRONG" not in text


def test_the_exit_status_tells_correct_damaged_and_wrongly_called_apart(photos, tmp_path, capsys):
    assert main.main(["doctor", "--dataset=folder", f"--root={photos}"]) == 0
    assert capsys.readouterr().out.endswith("nothing is wrong\n")
    config = tmp_path / "config.py"
    config.write_text(
        "def get_config():\n    return dict(dataset=dict(name='folder', root='no'))\n"
    )
    broken = tmp_path / "broken.py"
    broken.write_text("nonsense")
    make.put(photos / "a" / "000.jpg", b"")
    damaged = command("doctor", f"--config={config}", f"--config.dataset.root={photos}")
    assert damaged.returncode == 1 and damaged.stdout.endswith("1 wrong\n")
    process = command("doctor", f"--config={config}")
    assert process.returncode == 2 and not process.stdout
    assert process.stderr.startswith("error: ") and process.stderr.count("\n") == 1
    for arguments, message in (
        ([f"--config={config}"], "the folder no does not exist"),
        (["--config=nowhere.py"], "has no config 'nowhere.py'"),
        (["--dataset=folder", "--roto=x"], "folder has no argument 'roto'"),
        ([f"--config={broken}"], "broken.py does not run: NameError: name 'nonsense'"),
        ([], "--dataset is needed, one of: cars196"),
        (["--dataset=table"], "also needs: 'path'"),
        (["--dataset=mnist", "--source=web"], "got 'web'"),
        (["--dataset=folder", f"--root={photos / 'a' / '001.jpg'}"], "is a file, not a folder"),
    ):
        with pytest.raises((ValueError, TypeError, OSError), match=message):
            main.main(["doctor", *arguments])


def test_a_prepared_set_is_checked_against_its_manifest(photos, tmp_path, capsys):
    spec = {"dataset": {"name": "folder"}}
    prepare.prepare(datasets.folder(root=photos), out=tmp_path / "out", settings=spec)
    arguments = ("--dataset=prepared", f"--root={tmp_path / 'out'}")
    assert main.main(["doctor", *arguments]) == 0
    assert "ok     2 shards agree with the manifest" in capsys.readouterr().out
    shard = tmp_path / "out" / "train-00000-of-00001.array_record"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 255  # padding: every image can still be read
    shard.write_bytes(data)
    damaged = command("doctor", *arguments)
    assert (
        damaged.returncode in (1, 2) and "train-00000-of-00001" in damaged.stdout + damaged.stderr
    )
