"""prepare writes the same splits in a smaller form, and continues where it was interrupted."""

import dataclasses
import io
import json
import pathlib
import shlex
import subprocess
import sys
import time

import data_fixtures as make
import numpy as np
import pytest
from PIL import Image
from processes import command, environment

from dmljax.data import datasets, decode, digest, prepare, splits, transforms
from dmljax.files import writing as files
from dmljax.main import main


def _photographs(root):
    """Two classes of photographs: large, small, grayscale and rotated by EXIF."""
    make.class_folders(root, {"a": 3, "b": 3}, width=90, height=60)
    make.put(root / "a" / "small.jpg", make.jpeg(90, 30, 20))
    make.put(root / "a" / "gray.png", make.png(91, "L", 60, 90).getvalue())
    exif = Image.Exif()
    exif[0x0112] = 6
    out = io.BytesIO()
    make.picture(92, 90, 60).save(out, "JPEG", exif=exif)
    make.put(root / "b" / "turned.jpg", out.getvalue())
    return datasets.folder(root=root)


def _prepare(dataset, out, **options):
    options = dict(size=32, shard_size=3, settings={"dataset": {"name": "folder"}}) | options
    return prepare.prepare(dataset, out=out, **options)


def test_a_prepared_data_set_equals_its_source(tmp_path):
    dataset = _photographs(tmp_path / "photos")
    _prepare(dataset, tmp_path / "out")
    prepared = datasets.prepared(root=tmp_path / "out")
    for source, copy in zip(dataset, prepared, strict=True):
        assert source.names == copy.names and (source.labels == copy.labels).all()
        for before, after in zip(source.records, copy.records, strict=True):
            image, small = decode.read(before), decode.read(after)
            resize = transforms.resize_shorter_side(size=min(32, *image.shape[:2]))
            expected = resize(image, np.random.default_rng(0))
            assert small.shape == expected.shape
            assert np.abs(small.astype(int) - expected).mean() < 6
    small = next(i for i, r in enumerate(dataset.train.records) if r.endswith("small.jpg"))
    original = pathlib.Path(dataset.train.records[small]).read_bytes()
    assert prepared.train.records[small] == original  # small enough, so copied
    assert "record 1 of" in splits.record_name(prepared.train.records, 1)
    with pytest.raises(IndexError):
        prepared.train.records[len(prepared.train)]


def test_the_manifest_has_counts_labels_hashes_and_settings(tmp_path):
    manifest = _prepare(_photographs(tmp_path / "photos"), tmp_path / "out", quality=80)
    assert json.loads((tmp_path / "out" / "manifest.json").read_text()) == manifest
    assert manifest["settings"].items() >= {"size": 32, "quality": 80}.items()
    train = manifest["splits"]["train"]
    assert train["count"] == 5 and train["labels"] == [0] * 5 and train["names"] == ["a"]
    shards = [s for split in manifest["splits"].values() for s in split["shards"]]
    written = {p.name for p in (tmp_path / "out").iterdir()} - {"manifest.json"}
    assert written == {s["file"] for s in shards} and [s["count"] for s in shards] == [3, 2, 3, 1]
    for shard in shards:
        path = tmp_path / "out" / shard["file"]
        assert files.sha256(path) == shard["sha256"] and path.stat().st_size == shard["bytes"]


def test_marks_are_kept_and_boxes_are_cut(tmp_path):
    rows = [
        {
            "path": f"{i}.jpg",
            "label": "ab"[i % 2],
            "split": "test" if i > 1 else "train",
            "role": "" if i < 2 else ("query" if i == 2 else "gallery"),
            "box": "10 0 30 20",
            "group": "x" if i % 2 else "",
        }
        for i in range(6)
    ]
    dataset = datasets.table(path=make.write_table(tmp_path / "t.csv", rows))
    _prepare(dataset, tmp_path / "out")
    test = datasets.prepared(root=tmp_path / "out").test
    assert (test.query == dataset.test.query).all() and (test.gallery == dataset.test.gallery).all()
    assert (test.groups == dataset.test.groups).all() and test.boxes is None
    assert all(decode.read(record).shape == (20, 20, 3) for record in test.records)


@pytest.mark.parametrize("geometry", ["squash", "pad"])
def test_squash_and_pad_give_squares(tmp_path, geometry):
    _prepare(_photographs(tmp_path / "photos"), tmp_path / "out", geometry=geometry)
    prepared = datasets.prepared(root=tmp_path / "out")
    assert {decode.read(r).shape for split in prepared for r in split.records} == {(32, 32, 3)}


def test_an_interrupted_run_continues_with_the_same_result(tmp_path, monkeypatch):
    dataset = _photographs(tmp_path / "photos")
    uninterrupted = _prepare(dataset, tmp_path / "uninterrupted")
    encode, calls = decode.encode, []

    def interrupted(image, *, quality):
        calls.append(1)
        if len(calls) > 5:
            raise KeyboardInterrupt
        return encode(image, quality=quality)

    monkeypatch.setattr(decode, "encode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        _prepare(dataset, tmp_path / "out", threads=1)
    monkeypatch.undo()
    assert not (tmp_path / "out" / "manifest.json").exists()
    with pytest.raises(FileNotFoundError, match="run the same prepare again to finish it"):
        datasets.prepared(root=tmp_path / "out")
    shard = tmp_path / "out" / "train-00000-of-00002.array_record"
    written = shard.stat().st_mtime_ns
    assert _prepare(dataset, tmp_path / "out") == uninterrupted
    assert shard.stat().st_mtime_ns == written, "a finished shard was written again"
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted(
        p.name for p in (tmp_path / "uninterrupted").iterdir()
    )


def test_other_settings_and_folders_in_use_are_refused(tmp_path):
    dataset = _photographs(tmp_path / "photos")
    _prepare(dataset, tmp_path / "out")
    with pytest.raises(FileExistsError, match="is not an empty folder: choose another"):
        _prepare(dataset, tmp_path / "out")
    (tmp_path / "out" / "manifest.json").rename(tmp_path / "manifest.json")
    with pytest.raises(FileExistsError, match="is not an empty folder"):
        _prepare(dataset, tmp_path / "out")
    shards = {"settings": {**json.loads((tmp_path / "manifest.json").read_text())["settings"]}}
    (tmp_path / "out" / "progress.json").write_text(json.dumps({**shards, "shards": {}}))
    boxes = np.tile(np.int32([0, 0, 2, 2]), (len(dataset.train), 1))
    boxed = dataset._replace(train=dataclasses.replace(dataset.train, boxes=boxes))
    assert digest.digest(boxed) != digest.digest(dataset)
    with pytest.raises(ValueError, match="unfinished data set with another size: finish it"):
        _prepare(dataset, tmp_path / "out", size=48)
    with pytest.raises(FileExistsError, match="is not an empty folder"):
        _prepare(dataset, tmp_path / "manifest.json")
    with pytest.raises(ValueError, match=r"no geometry 'x'. It has: pad, shorter, squash"):
        _prepare(dataset, tmp_path / "other", geometry="x")
    with pytest.raises(ValueError, match="nothing to prepare"):
        _prepare(splits.Splits(*[splits.Split(np.zeros((1, 2, 2, 1)), [0], ("a",))] * 2), tmp_path)


def test_unreadable_images_are_refused_or_skipped(tmp_path, capsys):
    dataset = _photographs(tmp_path / "photos")
    make.put(tmp_path / "photos" / "b" / "001.jpg", b"")
    with pytest.raises(
        decode.UnreadableImage, match=r"b/001.jpg cannot be read: it has zero bytes"
    ):
        _prepare(dataset, tmp_path / "out")
    assert not list((tmp_path / "out").glob("test*")) and not list((tmp_path / "out").glob("*.tmp"))
    result = _prepare(dataset, tmp_path / "skip", unreadable="skip")
    assert result["splits"]["test"]["count"] == 3 and "b/001.jpg" in capsys.readouterr().err
    assert result["splits"]["test"]["skipped"] == [dataset.test.records[1]]
    assert len(datasets.prepared(root=tmp_path / "skip").test) == 3


def test_a_damaged_shard_is_written_again(tmp_path, monkeypatch):
    dataset = _photographs(tmp_path / "photos")
    monkeypatch.setattr(prepare, "_summary", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        _prepare(dataset, tmp_path / "out")
    monkeypatch.undo()
    shard = tmp_path / "out" / "train-00001-of-00002.array_record"
    content = shard.read_bytes()
    shard.write_bytes(content[:-1] + b"?")
    result = _prepare(dataset, tmp_path / "out")
    assert files.sha256(shard) == result["splits"]["train"]["shards"][1]["sha256"]
    assert shard.read_bytes() == content


def test_a_truncated_shard_is_named(tmp_path):
    _prepare(_photographs(tmp_path / "photos"), tmp_path / "out")
    shard = tmp_path / "out" / "test-00000-of-00002.array_record"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(FileNotFoundError, match=r"test-00000.*missing or its size is not"):
        datasets.prepared(root=tmp_path / "out")
    make.put(tmp_path / "out" / "manifest.json", b"{}")
    with pytest.raises(ValueError, match="is not a manifest of prepare"):
        datasets.prepared(root=tmp_path / "out")


def test_the_advice_of_the_command_fits_a_config_of_another_data_set(tmp_path, capsys):
    _photographs(tmp_path / "photos")
    out = tmp_path / "out put"
    main(["prepare", "--dataset=folder", f"--root={tmp_path / 'photos'}", f"--out={out}"])
    advice = capsys.readouterr().out.splitlines()[-1]
    (flag,) = [word for word in shlex.split(advice) if word.startswith("--config.")]
    (tmp_path / "config.py").write_text(
        "def get_config():\n    return {'dataset': {'name': 'folder', 'split': 0.8}}\n"
    )
    assert main(["doctor", f"--config={tmp_path / 'config.py'}", flag]) == 0
    assert "train: 5 images of 1 class\n" in capsys.readouterr().out


def test_after_a_kill_the_same_command_continues(tmp_path):
    make.class_folders(tmp_path / "photos", {c: 30 for c in "abcd"}, width=300, height=200)
    out = tmp_path / "out"
    words = ["prepare", "--dataset=folder", f"--root={tmp_path / 'photos'}", f"--out={out}"]
    words += ["--size=64", "--shard_size=5"]
    first = subprocess.Popen([sys.executable, "-m", "dmljax.main", *words], env=environment())
    while not list(out.glob("*.array_record")) and first.poll() is None:
        time.sleep(0.005)
    first.kill()
    first.wait()
    second = command(*words)
    assert second.returncode == 0, second.stderr
    assert "train: 60 images of 2 classes" in second.stdout and "prepared" in second.stdout
    assert not (out / "progress.json").exists() and not list(out.glob("*.tmp"))
    dataset = datasets.prepared(root=out)
    assert len(dataset.train) == len(dataset.test) == 60
    assert min(decode.read(dataset.test.records[59]).shape[:2]) == 64
