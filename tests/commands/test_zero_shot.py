"""Backbones without any training: `zero-shot`, `embed --net`, `export --net`, configs/folder.py."""

import csv
import json
import os

import jax
import numpy as np
import pytest
from PIL import Image
from system import photos

from dmljax import at_hand, bundle, metrics, nets, recipes, weights
from dmljax.bundle import backbones
from dmljax.config.build import build
from dmljax.data import decode, pipeline
from dmljax.data.image_folders import folder as folder_set
from dmljax.files.writing import tensors_digest
from dmljax.main import main
from dmljax.nets.files import License, Preprocessing, Published
from dmljax.nets.initializers import initial_values
from dmljax.report import page
from dmljax.runs import zero_shot
from dmljax.weights import converted
from dmljax.weights.loading import FLAX

SIZE = 12
ENTRY = Published(
    "convnet",
    "https://example.org/tiny.safetensors",
    1,
    License("MIT", "yes", "keep the text"),
    "noise",
    Preprocessing(SIZE, SIZE, "bilinear", "unit"),
)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A folder of downloads with the weights of a small published net, 'tiny'."""
    monkeypatch.setattr(at_hand, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(weights, "installed", dict)
    monkeypatch.setitem(weights.PUBLISHED, "tiny", ENTRY)
    monkeypatch.setitem(weights.PUBLISHED, "absent", ENTRY._replace(url="https://x.org/y.pth"))
    (tmp_path / "cache").mkdir()
    net, images = nets.convnet(), np.zeros((1, SIZE, SIZE, 3), np.float32)
    variables = initial_values(lambda key: net.init(key, images, train=True), jax.random.key(3))
    # Biases of 0 would give a black image features of 0, which no unit vector has.
    variables["params"] = jax.tree.map(lambda x: x + 0.1 * (x.ndim == 1), variables["params"])
    tensors = {
        FLAX.name_fn(tuple(key.key for key in keys)): np.asarray(x)
        for keys, x in jax.tree_util.tree_leaves_with_path(variables)
    }
    metadata = {
        "format": converted.FORMAT,
        "net": {"name": "convnet"},
        "inputs": {"normalization": "unit"},
        "source": {"known_as": "tiny"},
        "license": "MIT",
        "notes": [],
        "tensors_sha256": tensors_digest(tensors),
    }
    converted.write(tmp_path / "cache" / "tiny.safetensors", tensors, json.dumps(metadata))
    return net, variables


def _referee(cache, paths):
    """The features of images, one by one."""
    net, variables = cache
    rows = []
    for path in paths:
        image = decode.read(path)[None].astype(np.float32) / 255
        rows.append(np.asarray(net.apply(variables, image, train=False)["pooled"])[0])
    rows = np.stack(rows)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def test_backbones_are_scored_as_they_are(cache, tmp_path, capsys):
    root = photos(tmp_path)
    out = tmp_path / "out"
    assert main(["zero-shot", str(root), "--nets=tiny", f"--out={out}", "--shard=1/2"]) == 0
    assert "part 1/2" in capsys.readouterr().out and not out.exists()
    parts = list((tmp_path / "cache" / "features").glob("*/*/part.json"))  # also of raw pixels
    assert len(parts) == 2 and {path.parent.name for path in parts} == {"part-1-of-2"}
    assert main(["zero-shot", str(root), "--nets=tiny,absent", f"--out={out}"]) == 0
    printed = capsys.readouterr()
    line = "absent is left out, its weights are not here: dmljax weights --fetch=absent, or "
    line += "--weights=FOLDER with y.pth"
    assert printed.err.strip() == line
    images = folder_set(root=root, split=0.0).test
    embeddings = _referee(cache, images.records)
    expected = metrics.retrieval(embeddings, images.labels, ks=(1,))
    facts = page.read(out / "report.html")
    rows = {row["score"]: row["cells"] for row in facts["comparison"]["rows"]}
    names = [run["name"] for run in facts["comparison"]["runs"]]
    assert facts["comparison"]["config_title"] == "About the backbones"
    place = names.index("tiny")
    for score in ("R@1", "MAP@R"):
        assert rows[score][place]["value"] == pytest.approx(expected[score], abs=1e-6)
    assert sorted(names) == ["raw pixels", "tiny"] and facts["sheets"]
    line = next(x for x in printed.out.splitlines() if x.startswith("tiny: standard_eval(size=12"))
    assert ", RGB 0 to 1; MIT; may be sold: yes" in line
    assert "raw pixels" in printed.out and f"{embeddings.shape[1]:,}" in printed.out
    main(["zero-shot", str(root), f"--out={tmp_path / 'again'}"])  # what is here, from disk
    printed = capsys.readouterr()
    assert "features of" not in printed.out and "tiny" in printed.out and not printed.err


def test_unreadable_images_are_named_once_with_the_reason_and_counted_again(
    cache, tmp_path, monkeypatch, caplog, capsys
):
    """Also: one class has no meaning, and the page goes to a folder of its own."""
    monkeypatch.chdir(tmp_path)
    root = photos(tmp_path, lambda i, label: "only")
    (root / "only" / "empty.png").touch()
    for lines in (1, 0):
        caplog.clear()
        main(["zero-shot", str(root), "--nets=tiny"])
        line = f"{root / 'only' / 'empty.png'} cannot be read: skipped from now on"
        assert caplog.text.count(line) == caplog.text.count("empty.png") == lines
        line = f"{root} has one class, 'only': every image is right, and the scores say nothing"
        assert caplog.text.count(line) == 1
        printed = capsys.readouterr().out
        assert "images that could not be read and are left out: 1\n" in printed
        assert f"page: runs/zero-shot/{root.name}/report.html" in printed


def test_images_without_folders_get_clusters_and_near_duplicates(
    cache, tmp_path, monkeypatch, capsys
):
    """By the first of several backbones."""
    root, file = photos(tmp_path, lambda i, label: ""), tmp_path / "cache" / "tiny.safetensors"
    (tmp_path / "cache" / "twin.safetensors").write_bytes(file.read_bytes())
    twin = ENTRY._replace(url="https://example.org/twin.safetensors")
    monkeypatch.setitem(weights.PUBLISHED, "twin", twin)
    copy = np.asarray(Image.open(root / "005.png")).astype(int) + 1
    Image.fromarray(np.clip(copy, 0, 255).astype(np.uint8)).save(root / "copy, twice.png")
    main(["zero-shot", f"{root}/", "--nets=twin,tiny", f"--out={tmp_path / 'out'}"])
    printed = capsys.readouterr().out
    line = "images without classes are grouped by one backbone, twin; not used: tiny (--nets=NAME"
    assert printed.startswith(line) and "near duplicates by twin;" in printed
    facts = page.read(tmp_path / "out" / "report.html")
    assert "R@1" not in facts["headline"] and "scores" not in facts
    pairs = [{facts["files"][d[k]] for k in "ab"} for d in facts["check"]["duplicates"]]
    assert {"photos/005.png", "photos/copy, twice.png"} in pairs
    lines = list(csv.DictReader((tmp_path / "out" / "clusters.csv").read_text().splitlines()))
    assert len(lines) == 65 and {int(x["cluster"]) for x in lines} == set(range(1, 7))
    clusters = {line["file"]: line["cluster"] for line in lines}
    sizes = np.bincount([int(cluster) for cluster in clusters.values()])[1:]
    assert (np.diff(sizes) <= 0).all()
    assert clusters["photos/005.png"] == clusters["photos/copy, twice.png"]
    assert len(facts["names"]) == 6 and (facts["items"]["hits"] == 2).all()
    classes = facts["classes"]
    assert classes["order"].tolist() == list(range(6)) and not classes["queries"].any()
    assert np.isnan(classes["recall"]).all() and np.isfinite(classes["inside"]).all()


def test_a_folder_of_features_that_cannot_be_written_is_named(cache, tmp_path):
    (tmp_path / "cache" / "features").touch()
    words = ["zero-shot", str(photos(tmp_path)), "--nets=tiny", f"--out={tmp_path / 'out'}"]
    message = r"features cannot be written to .*: Not a directory\. .* by \$DML"
    with pytest.raises(OSError, match=message):
        main(words)


def test_a_bundle_and_vectors_of_a_backbone(cache, tmp_path, capsys):
    root = photos(tmp_path)
    out = tmp_path / "tiny.bundle"
    assert main(["export", "--net=tiny", f"--out={out}", "--batch-sizes=8"]) == 0
    model = bundle.load(out)
    paths = sorted(str(path) for path in root.glob("*/*.png"))
    embeddings = model.embed(paths)
    np.testing.assert_allclose(embeddings, _referee(cache, paths), atol=1e-5)
    card = (out / "README.md").read_text()
    assert "MIT; may be sold: yes" in card and "Trained on noise" in card
    file = tmp_path / "cache" / "tiny.safetensors"
    words = ["embed", "--net=tiny", f"--weights={file}", f"--images={root}"]
    main([*words, f"--out={tmp_path / 'vectors'}"])
    shards = json.loads((tmp_path / "vectors" / "shards.json").read_text())
    assert shards["model"] == model.digest and shards["count"] == 64
    index = str(tmp_path / "photos.index")
    main(["index", "create", index, f"--bundle={out}", f"--import={tmp_path / 'vectors'}"])
    capsys.readouterr()
    main(["search", str(out), f"--index={index}", str(root / "c3" / "025.png"), "--k=1"])
    assert "c3/025.png" in capsys.readouterr().out


def test_large_photographs_have_the_same_features_everywhere(cache, tmp_path):
    """They are decoded at half of their size by `zero-shot`, by runs, by `embed` and by bundles."""
    rng, paths = np.random.default_rng(0), []
    for i in range(10):
        paths.append(tmp_path / "large" / f"c{i // 2}" / f"{i}.jpg")
        paths[i].parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (50, 70, 3), np.uint8)).save(paths[i])
    images, _ = zero_shot.images_of_folder(tmp_path / "large")
    file = tmp_path / "cache" / "tiny.safetensors"
    row = zero_shot.embed("tiny", file, images)
    vectors = backbones.opened("tiny", file).embed(paths)
    config = recipes.folder(train="all")
    config["dataset"]["root"] = str(tmp_path / "large")
    config |= {"held_out": 0, "select": "last", "steps": 1, "evaluate": {}}
    config["sampler"] |= {"classes": 2, "per_class": 2}
    run = build(config)
    assert run.transform_fn.least_side == 2 * 22  # of crops of 40 % of the area
    small = [decode.decode(path.read_bytes(), least_side=2 * SIZE) for path in paths]
    pixels = np.stack([run.eval_transform_fn(image, rng) for image in small])
    assert {image.shape for image in small} == {(25, 35, 3)}
    with pipeline.evaluation(images, transform_fn=run.eval_transform_fn, batch_size=10) as batches:
        np.testing.assert_array_equal(next(batches)["images"], pixels)
    net, variables = cache
    outputs = net.apply(variables, pixels.astype(np.float32) / 255, train=False)["pooled"]
    expected = np.asarray(outputs / np.linalg.norm(outputs, axis=1, keepdims=True))
    np.testing.assert_allclose(row.embeddings, expected, atol=1e-5)
    np.testing.assert_allclose(vectors, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["zero-shot", "photos", "--nets=tine"], r"there is no 'tine': did you mean 'tiny'"),
        (["zero-shot"], "needs a folder of images"),
        (["zero-shot", "photos", "--weights=photos"], "--weights=photos must be a folder with a f"),
        (["prepare", "--dataset=mnist", "--out=x", "--shard_size=a"], "invalid int value: 'a'"),
        (["zero-shot", "nowhere"], "nowhere does not exist"),
        (["zero-shot", "blobs.npz"], "blobs.npz is a file: name the folder of your images"),
        (["export", "--net=absent", "--out=x"], "dmljax weights --fetch=absent, or --weights=FILE"),
        (["export", "--net=tiny", "--weights=nowhere", "--out=x"], "nowhere is not a file"),
        (["export", "--net=tiny", "--allow-worse", "--out=x"], "leave out --allow-worse"),
        (["export", "runs/a", "--weights=f", "--out=x"], "leave out --weights$"),
        (["embed", "--net=tiny", "--out=x"], "without --images, .* leave out --net"),
        (["embed", "a.bundle", "--net=tiny", "--images=b", "--out=x"], "a bundle or --net"),
        (["embed", "a.bundle", "--weights=f", "--images=b", "--out=x"], "leave out --weights$"),
    ],
)
def test_wrong_words_are_one_line(cache, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    photos(tmp_path)
    with pytest.raises((ValueError, FileNotFoundError), match=message) as error:
        main(words)
    assert "\n" not in str(error.value) and not (tmp_path / "x").exists()


def test_the_last_download_comes_first_and_a_named_folder_before_it(cache, tmp_path):
    downloads, folder = tmp_path / "cache", tmp_path / "folder"
    (downloads / "y.pth").touch()
    for seconds, names in ((1, ["tiny", "absent"]), (2**33, ["absent", "tiny"])):
        os.utime(downloads / "y.pth", (seconds, seconds))
        assert list(at_hand.weights_at_hand()) == names
    folder.mkdir()
    (folder / "tiny.safetensors").touch()
    paths = at_hand.weights_at_hand(folder)
    assert list(paths) == ["tiny", "absent"] and paths["tiny"] == folder / "tiny.safetensors"


def test_the_folder_recipe_takes_what_is_here(cache, tmp_path, monkeypatch):
    config = recipes.folder()
    file = str(tmp_path / "cache" / "tiny.safetensors")
    assert config["net"] == {"name": "convnet", "weights": file, "norm": "frozen_batch_norm"}
    assert config["features"] == "cached" and config["trained"] == "last"
    config["dataset"]["root"] = str(photos(tmp_path))
    run = build(config)
    assert run.steps == 150 and run.eval_image_shape == (SIZE, SIZE, 3)
    fine_tuning = recipes.folder(train="all", loss="arcface")
    assert fine_tuning["trained"] == "all" and "select" not in fine_tuning
    with pytest.raises(ValueError, match="net: there is no 'tine': did you mean 'tiny'"):
        recipes.folder(net="tine")
    with pytest.raises(ValueError, match="the weights of absent are not here: dmljax weights"):
        recipes.folder(net="absent")
    (tmp_path / "cache" / "tiny.safetensors").unlink()
    assert "weights" not in recipes.folder()["net"] and "features" not in recipes.folder()
    with pytest.raises(ValueError, match=r"train=head needs .*`pip install 'dmljax\[photos\]'`"):
        recipes.folder(train="head")
    assert at_hand.weights_at_hand() == {}
