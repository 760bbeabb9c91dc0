"""A real bundle, its index and a search, as the commands do it."""

import json
import os

import numpy as np
import pytest
from bundle_cases import exported, trained
from PIL import Image

from dmljax import bundle, index, main


def test_an_index_is_not_replaced_by_an_empty_one(bundle_folder, tmp_path):
    folder, place = tmp_path / "images", tmp_path / "photos.index"
    folder.mkdir()
    (folder / "a.png").write_bytes(b"no image")
    with index.create(place, model="ab" * 32, dimension=4) as store:
        store.add(["a.png"], np.eye(4)[:1])
    words = ["index", "reindex", str(place), f"--bundle={bundle_folder}", f"--images={folder}"]
    with pytest.raises(ValueError, match=f"nothing could be added: {place} keeps its 1 item"):
        main.main(words)
    with index.open(place, model="ab" * 32) as store:
        assert store.contains(["a.png"]) == [True]


def test_a_bundle_without_unit_vectors_is_compared_by_distance(tmp_path, capsys):
    run = trained(tmp_path, method={"name": "pairs", "dim": 2, "unit": False})
    bundle_folder = exported(run, tmp_path / "a.bundle")
    loaded = bundle.load(bundle_folder)
    assert loaded.similarity == "euclidean" and loaded.dimension == 2 and not loaded.thresholds
    card = (bundle_folder / "README.md").read_text()
    assert "compared by distance" in card and "## Scores\n" in card and "## Same" not in card
    folder, place = tmp_path / "images", tmp_path / "a.index"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for i in range(9):
        Image.fromarray(rng.integers(0, 256, (20, 20, 3), np.uint8)).save(folder / f"{i}.png")
    words = ["index", "create", str(place), f"--bundle={bundle_folder}", f"--images={folder}"]
    assert main.main(words) == 0
    vectors = loaded.embed([folder / f"{i}.png" for i in range(9)]).astype(float)
    expected = np.sort(np.sqrt(((vectors - vectors[3]) ** 2).sum(axis=1)))
    near = float(expected[1:3].mean())
    words = ["search", str(bundle_folder), f"--index={place}", str(folder / "3.png")]
    capsys.readouterr()
    assert main.main([*words, "--json", f"--threshold={-near}"]) == 0
    hits = json.loads(capsys.readouterr().out)["hits"]
    np.testing.assert_allclose([-hit["similarity"] for hit in hits], expected[:2], atol=1e-5)


def test_the_data_set_of_a_bundle_is_indexed_without_files_of_its_own(
    bundle_folder, run_folder, tmp_path, capsys, monkeypatch
):
    loaded = bundle.load(bundle_folder)
    folder, place = tmp_path / "collection", tmp_path / "photos.index"
    words = ["index", "create", str(place), f"--bundle={bundle_folder}", "--split=test"]
    words.append(f"--images={folder}")
    monkeypatch.chdir(run_folder.parent)  # a file of this name may hold something else
    assert os.path.exists("blobs.npz")
    with pytest.raises(ValueError, match=r"--split=test needs --root=PATH: .* in 'blobs.npz'"):
        main.main(words)
    assert not folder.exists() and not place.exists()
    words.append(f"--root={run_folder.parent / 'blobs.npz'}")
    assert main.main(words) == 0
    paths = sorted(folder.glob("*/*.png"))
    with index.open(place, model=loaded.digest) as store:
        names = [path.relative_to(folder).as_posix() for path in paths]
        items = store.get(names)
        assert store.count() == len(paths) > 10
    assert [item.metadata["folder"] for item in items] == [path.parent.name for path in paths]
    vectors = np.stack([item.vector for item in items])
    np.testing.assert_allclose(vectors, loaded.embed(paths), atol=1e-5)
    capsys.readouterr()
    assert main.main(words) == 0  # again: everything is there
    assert "were there already" in capsys.readouterr().out
    for wrong, text in (
        (["--split=val", f"--images={folder}"], "no .val.. It has: test, train"),
        (["--split=test", "--import=x"], "--images=FOLDER"),
        (["--split=train", words[-1], f"--images={folder}"], "holds other files"),
        ([words[-1], f"--images={folder}"], "--root needs --split"),
        (["--split=test", words[-1], f"--images={bundle_folder}/README.md"], "cannot be written"),
    ):
        with pytest.raises((ValueError, OSError), match=text):
            main.main(["index", "create", str(place), f"--bundle={bundle_folder}", *wrong])
