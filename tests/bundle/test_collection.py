"""A bundle embeds a folder or a list in parts, which are what one process writes."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import forged
import numpy as np
import pyarrow as pa
import pytest
from processes import ROOT
from pyarrow import parquet
from system import photos

from dmljax import bundle as bundles
from dmljax import index, main
from dmljax.bundle import collection
from dmljax.files import parts
from dmljax.index import parquet as index_parquet


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """64 images in folders."""
    return photos(tmp_path_factory.mktemp("collection"))


@pytest.fixture(scope="module")
def listed(images):
    """The same images in a Parquet list of row groups of 10."""
    files = sorted(images.rglob("*.png"))
    paths = [path.relative_to(images.parent).as_posix() for path in files]
    table = pa.table({"id": [path.stem for path in files], "path": paths})
    parquet.write_table(table, images.parent / "list.parquet", row_group_size=10)
    return images.parent / "list.parquet"


def _read(out):
    """Ids and vectors of all parts."""
    parts.read(out, verify=True)
    rows = list(index_parquet.read(out))
    ids = [name for batch in rows for name in batch.ids]
    return ids, np.concatenate([batch.vectors for batch in rows])


def test_a_list_is_read_by_rows(listed, images):
    source = collection.open_collection(listed)
    everything = source.read_fn(range(64))
    assert source.count == 64 and [x.id for x in everything] == sorted(x.id for x in everything)
    for start, stop in ((0, 1), (9, 11), (10, 20), (37, 63), (60, 64)):
        assert source.read_fn(range(start, stop)) == everything[start:stop]
    folder = collection.open_collection(images)
    assert [x.path for x in folder.read_fn(range(64))] == [x.path for x in everything]
    for column in ("path", "id"):
        table = {"path": ["a.png", "b.png"], "id": ["a", "b"]}
        table[column] = [table[column][0], None]
        parquet.write_table(pa.table(table), listed.with_name("gaps.parquet"))
        source = collection.open_collection(listed.with_name("gaps.parquet"))
        with pytest.raises(ValueError, match="a row without path or id"):
            source.read_fn(range(2))


# A pause after every file, so that the test can kill the process between two of them.
PART = """
import sys, time
from dmljax.bundle import collection
from dmljax.files import parts
write_chunk = collection.write_chunk
def slowly(*arguments, **options):
    write_chunk(*arguments, **options)
    time.sleep(float(sys.argv[5]))
collection.write_chunk = slowly
collection.embed(*sys.argv[1:4], shard=parts.parse(sys.argv[4]), chunk=5)
"""


def _process(bundle, source, out, shard, pause=0):
    words = [sys.executable, "-c", PART, str(bundle), str(source), str(out), shard, str(pause)]
    return subprocess.Popen(words, env=os.environ | {"PYTHONPATH": str(ROOT)})


def test_killed_parts_are_together_what_one_process_writes(bundle_folder, listed, tmp_path):
    out, folder = tmp_path / "out", tmp_path / "out" / "part-1-of-3"
    process = _process(bundle_folder, listed, out, "1/3", pause=60)
    end = time.monotonic() + 120
    while not list(folder.glob("*.parquet")):
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.05)
    with pytest.raises(ValueError, match=f"being written by process {process.pid} on"):
        collection.embed(bundle_folder, listed, out, shard=parts.Shard(1, 3), chunk=5)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    [first] = folder.glob("*.parquet")
    written = first.stat().st_mtime_ns
    (folder / "000000000026.parquet.1.tmp").write_bytes(b"half")  # a kill within a write
    process = _process(bundle_folder, listed, out, "1/3")
    for i in (0, 2):
        collection.embed(bundle_folder, listed, out, shard=parts.Shard(i, 3), chunk=5)
    assert process.wait(timeout=200) == 0
    assert first.stat().st_mtime_ns == written and not list(folder.glob("*.tmp"))
    ids, vectors = _read(out)
    collection.embed(bundle_folder, listed, tmp_path / "one", chunk=64)
    expected_ids, expected = _read(tmp_path / "one")
    assert ids == expected_ids and len(ids) == 64
    np.testing.assert_array_equal(vectors, expected)
    files = [x.path for x in collection.open_collection(listed).read_fn(range(64))]
    np.testing.assert_allclose(vectors, bundles.load(bundle_folder).embed(files), atol=1e-6)
    _refuses_what_does_not_belong(bundle_folder, listed, out, tmp_path)


def _refuses_what_does_not_belong(bundle_folder, listed, out, tmp_path):
    fewer = tmp_path / "fewer.parquet"
    parquet.write_table(parquet.read_table(listed).slice(0, 63), fewer)
    for source, shard, message in (
        (listed, parts.Shard(0, 4), r"another value of parts \(3, not 4\)"),
        (fewer, parts.Shard(0, 3), "begun with another value of collection"),
    ):
        with pytest.raises(ValueError, match=message):
            collection.embed(bundle_folder, source, out, shard=shard, chunk=5)
    with pytest.raises(ValueError, match="the collection has 64 images"):
        collection.embed(bundle_folder, listed, tmp_path / "new", shard=parts.Shard(0, 65))
    copy = shutil.copytree(out, tmp_path / "copy")
    shutil.rmtree(copy / "part-2-of-3")
    with pytest.raises(ValueError, match="part-2-of-3 missing"):
        index_parquet.about(copy)


def test_the_commands_make_an_index_of_parts(bundle_folder, images, tmp_path, capsys, monkeypatch):
    collection_folder = shutil.copytree(images, tmp_path / "photos")
    (collection_folder / "c0" / "broken.png").write_bytes(b"no image")
    out, place = tmp_path / "out", tmp_path / "photos.index"
    words = ["embed", str(bundle_folder), f"--images={collection_folder}", f"--out={out}"]
    with pytest.raises(ValueError, match="leave out --split"):
        main.main([*words, "--split=train"])
    assert main.main([*words, "--shard=0/2"]) == 0
    assert "left out: 1, see" in capsys.readouterr().err
    add = ["index", "create", str(place), f"--bundle={bundle_folder}", f"--import={out}"]
    with pytest.raises(ValueError, match="part-1-of-2 missing"):
        main.main(add)
    assert not place.exists()
    assert main.main([*words, "--shard=1/2"]) == 0
    assert "2 of 2 parts are complete" in capsys.readouterr().out
    [line] = (out / "part-0-of-2" / "left_out.jsonl").read_text().splitlines()
    assert json.loads(line)["id"] == "c0/broken.png"

    def interrupted(*arguments):
        """The first call reads the ids, and the second one is interrupted after one batch."""
        calls.append(arguments)
        yield from read(*arguments) if len(calls) == 1 else [next(read(*arguments))]
        if len(calls) == 2:
            raise KeyboardInterrupt

    read, calls = index_parquet.read, []
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(index_parquet, "read", interrupted)
        main.main(add)
    with index.open(place) as store:
        count = store.count()
    assert main.main(add) == 0 and f"{count} were there already" in capsys.readouterr().out
    assert count > 0 and main.main(add) == 0 and "64 were there already" in capsys.readouterr().out
    with index.open(place) as store:
        ids, vectors = _read(out)
        assert store.count() == 64 and store.search(vectors[:1], 1)[0][0].id == ids[0]
    other = shutil.copytree(bundle_folder, tmp_path / "other.bundle")
    forged.change_manifest(other, model="00" * 32)
    with pytest.raises(ValueError, match="model digest"):
        main.main(["embed", str(other), *words[2:], "--shard=0/2"])


def test_parts_give_an_index_the_metadata_that_images_give_it(bundle_folder, images, tmp_path):
    paths = sorted(path.relative_to(images).as_posix() for path in images.rglob("*.png"))
    table = pa.table({"path": paths, "year": range(64), "note": ["x" * 70_000] + ["a"] * 63})
    parquet.write_table(table, images / "years.parquet")
    for i, source in enumerate((images, images / "years.parquet")):
        metadata = []
        for way in ("images", "import"):
            place, origin = tmp_path / f"{way}-{i}.index", source
            if way == "import":
                origin = tmp_path / f"vectors-{i}"
                facts = collection.embed(bundle_folder, source, origin)
                assert facts["left_out"] == i  # the note of one image is too long for an index
            create = ["index", "create", str(place), f"--bundle={bundle_folder}"]
            assert main.main([*create, f"--{way}={origin}"]) == int(way == "images" and i)
            with index.open(place) as store:
                metadata.append({x.id: x.metadata for items in store.scan() for x in items})
        assert metadata[0] == metadata[1] and len(metadata[0]) == 64 - i
        assert metadata[1][paths[9]]["folder"] == os.path.dirname(paths[9])


def test_an_embedding_that_is_not_finite_is_left_out(bundle_folder, images, tmp_path, monkeypatch):
    model = bundles.load(bundle_folder)
    embed_fn = type(model).embed_prepared
    bad = np.asarray(model.prepare(sorted(images.rglob("*.png"))[5]))

    def overflow(self, batch, **options):
        x = np.array(embed_fn(self, batch, **options))
        x[(np.asarray(batch) == bad).all(axis=(1, 2, 3))] = np.nan
        return x

    monkeypatch.setattr(type(model), "embed_prepared", overflow)
    facts = collection.embed(model, images, tmp_path / "out")
    ids, vectors = _read(tmp_path / "out")
    assert facts["left_out"] == 1 and len(ids) == 63 and np.isfinite(vectors).all()
    text = (tmp_path / "out" / "part-0-of-1" / collection.LEFT_OUT).read_text()
    [name] = {x.id for x in collection.images_below(images)}.difference(ids)
    assert json.loads(text) == {"id": name, "problem": "its embedding has NaN or infinity"}
