"""Features of a frozen backbone that are computed once, and runs that train on them."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from processes import ROOT, mounted, same
from system import METHODS, blobs, brief, photos, write_config

from dmljax import bundle
from dmljax.bundle import exporting
from dmljax.config.build import build
from dmljax.data import pipeline
from dmljax.data.digest import digest
from dmljax.data.features import Cache, transforms_of
from dmljax.data.image_folders import folder as folder_set
from dmljax.data.splits import Split, Splits, images_of, subset
from dmljax.data.transforms.transform import Transform, bind
from dmljax.files import parts
from dmljax.files import run_folder as results
from dmljax.main import main
from dmljax.methods.assemble import backbone_features
from dmljax.report import page
from dmljax.runs import folder as run_folder
from dmljax.runs import training
from dmljax.train import features, start
from dmljax.train.devices import Shardings
from dmljax.train.evaluation import Evaluator
from dmljax.train.start import first_state

VIT = {"name": "vit_s16", "width": 8, "heads": 2, "depth": 1, "patch": 4, "image_size": 12}
CENTERED = {"name": "pairs", "dim": 6, "dense_fn": "centered_dense"}


def _frozen(folder, source, **fields):
    fields = {"start": {"name": str(source), "takes": "backbone"}, "trained": "last"} | fields
    return brief(folder, **{"runtime": {"features": str(folder / "cache")}} | fields)


def _rolled(image, rng):
    """The image, moved to the right by a random number of pixels."""
    return np.roll(image, int(rng.integers(1, 12)), axis=1)


# Arrays: features are the mean and the maximum of the pixels of an image.


def _small_cache(folder, images, about="net", **options):
    return Cache(
        folder,
        {"net": about},
        evaluation=Transform(),
        output="pooled",
        **options,
    )


def _means(images):
    x = np.asarray(images, np.float32).reshape(len(images), -1)
    return np.stack([x.mean(axis=1), x.max(axis=1)], axis=1)


class Counting:
    """`_means`, counting the images that are not padding."""

    def __init__(self):
        self.images = 0

    def __call__(self, images):
        images = np.asarray(images)
        self.images += int((images.reshape(len(images), -1).max(axis=1) > 0).sum())
        return jax.numpy.asarray(_means(images))


def _compute(cache, function, **options):
    options = {"title": "means", "shards": Shardings(jax.devices()[:1]), "batch_size": 8} | options
    return features.compute(cache, function, **options)


def _images(folder, count=50):
    with np.load(blobs(folder, each=10)) as arrays:
        return Split(arrays["images"][:count], arrays["labels"][:count], tuple("abcdefgh"))


@pytest.mark.parametrize("name", ["pairs", "graph"])
def test_a_method_learns_the_same_as_on_images(source, tmp_path, name, without_diagnostics):
    # Adam turns the rounding of a gradient that is 0, as of some biases, into whole steps.
    fields = METHODS[name] | {"optimizer": {"name": "sgd", "rate": 0.1}}
    if name == "pairs":
        fields |= {"method": CENTERED, "loss": "supcon"}
    for kind in ("computed", "cached"):
        training.run(_frozen(tmp_path, source, **fields, features=kind), tmp_path / kind)
    (_, slow), (_, fast) = (run_folder.reopen(tmp_path / kind) for kind in ("computed", "cached"))
    for a, b in zip(jax.tree.leaves(slow), jax.tree.leaves(fast), strict=True):
        if a.dtype.kind == "f":
            np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-4)
    _, start = run_folder.reopen(source)
    same(start.params["net"], fast.params["net"])
    scores = [results.read(tmp_path / kind).scores for kind in ("computed", "cached")]
    for key in ("test/R@1", "test/MAP@R"):
        assert scores[0][key] == pytest.approx(scores[1][key], abs=1e-6)


def test_a_second_run_computes_no_features_and_the_page_shows_the_images(source, tmp_path, capsys):
    config = _frozen(tmp_path, source, method=CENTERED, features="cached", pictures="page")
    config["dataset"] = {"name": "folder", "root": str(photos(tmp_path)), "split": 0.5}
    training.run(config, tmp_path / "one")
    first = capsys.readouterr().out
    assert "features of convnet" in first and "with head minus frozen" in first
    times = {p: p.stat().st_mtime_ns for p in (tmp_path / "cache").glob("*/*/*.npy")}
    assert len(times) == 2  # of the training and of the test images
    training.run(config | {"seed": 1}, tmp_path / "two")
    assert "features of convnet" not in capsys.readouterr().out
    assert times == {p: p.stat().st_mtime_ns for p in (tmp_path / "cache").glob("*/*/*.npy")}
    page = (tmp_path / "two" / "report.html").read_text()
    assert page.count('class="sheet"') == 1 and "c4/032.png" in page and "frozen" in page


def test_other_images_weights_and_transforms_are_other_features(source, tmp_path):
    root = photos(tmp_path)
    config = _frozen(tmp_path, source, features="cached")
    config["dataset"] = {"name": "folder", "root": str(root), "split": 0.5}

    def folders(**fields):
        return {entry.folder for entry in build(config | fields).cache.entries}

    first = folders()
    assert first == folders(seed=1, held_out=0.5) and len(first) == 2
    assert not first & folders(eval_transform={"name": "center_crop", "size": 10})
    assert not first & folders(normalize={"name": "imagenet", "force": True})
    assert len(first & folders(features={"views": 2}, transform="random_flip")) == 2
    assert len(folders(features={"views": 2}, transform="random_flip")) == 3
    file = root / "c0" / "000.png"
    os.utime(file, (1, 1))
    assert len(first & folders()) == 1  # the test images are the same
    shutil.copytree(source, tmp_path / "other")
    result = json.loads((source / "result.json").read_text())
    result["digests"]["run"] = "0" * 64
    (tmp_path / "other" / "result.json").write_text(json.dumps(result))
    assert not first & folders(start=str(tmp_path / "other"))


def test_training_draws_among_the_views_and_evaluation_takes_the_plain_image(tmp_path):
    images = _images(tmp_path)
    cache = Cache(
        tmp_path / "cache",
        {"net": "means"},
        evaluation=Transform(),
        training=bind(_rolled),
        views=3,
    )
    split = subset(cache.split(images, is_training=True), np.arange(10, 40))

    def first_pixels(x):
        return jax.numpy.asarray(np.asarray(x, np.float32)[:, 0, :, 0])

    assert _compute(cache, first_pixels) == 50 + 150
    pixels = images.records[10:40, 0, :, 0].astype(np.float32)
    assert len(np.unique(split.records[0][1:], axis=0)) > 1
    for i in (0, 7, 29):
        record = split.records[i]
        np.testing.assert_array_equal(record[0], pixels[i])
        shifts = [np.roll(pixels[i], shift) for shift in range(1, 12)]
        assert all(any(np.array_equal(view, x) for x in shifts) for view in record[1:])
        assert record.shape == (4, 12)
    train_fn, eval_fn = transforms_of(bind(_rolled), Transform(), views=2)
    record, rng = split.records[0], np.random.default_rng(0)
    views = {train_fn(record, rng).tobytes() for _ in range(50)}
    assert views == {view.tobytes() for view in record[1:]}
    np.testing.assert_array_equal(eval_fn(record, rng), pixels[0])
    np.testing.assert_array_equal(images_of(split).records, images.records[10:40])


class Fingerprinted(list):
    """Records that the digest of a data set identifies by a text."""

    def fingerprint(self):
        return "some records"


def test_features_have_the_digest_of_their_images(tmp_path):
    images, boxes = _images(tmp_path), np.full((50, 4), 3)
    records = Fingerprinted(images.records)
    for split in (images, Split(records, images.labels, images.names, boxes=boxes)):
        in_cache = _small_cache(tmp_path / "cache", split).split(split)
        rows = np.arange(10, 40)
        for x, y in ((split, in_cache), (subset(split, rows), subset(in_cache, rows))):
            assert digest(Splits(x, x)) == digest(Splits(y, y))


_SLOW = """
import sys, time
sys.path[:0] = [{root!r}, {tests!r}]
import pathlib, numpy as np
from train import test_features as t
t.features._FILE_ROWS = 8
folder = pathlib.Path({folder!r})
images = t._images(folder)
cache = t._small_cache(folder / "cache", images)
cache.split(images)
def slow(x):
    time.sleep(0.5)
    return t.jax.numpy.asarray(t._means(x))
t._compute(cache, slow)
"""


def test_a_killed_process_goes_on_with_the_next_file(tmp_path, monkeypatch):
    monkeypatch.setattr(features, "_FILE_ROWS", 8)
    places = {"root": str(ROOT), "tests": str(ROOT / "tests"), "folder": str(tmp_path)}
    words = [sys.executable, "-c", _SLOW.format(**places)]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    files, deadline = [], time.monotonic() + 120
    while len(files) < 2 and process.poll() is None and time.monotonic() < deadline:
        files = list((tmp_path / "cache").glob("*/*/*.npy"))
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    complete = list((tmp_path / "cache").glob("*/*/*.npy"))
    assert 2 <= len(complete) < 7
    images, function = _images(tmp_path), Counting()
    cache = _small_cache(tmp_path / "cache", images)
    split = cache.split(images)
    assert not cache.is_complete
    assert _compute(cache, function) == 50 - 8 * len(complete) == function.images
    assert cache.is_complete and not list((tmp_path / "cache").glob("**/*.tmp"))
    rows = np.stack([split.records[i][0] for i in range(50)])
    np.testing.assert_array_equal(rows, _means(images.records))
    assert _compute(cache, function) == 0 and function.images == 50 - 8 * len(complete)


def test_a_full_disk_or_a_folder_without_access_is_one_line(tmp_path):
    images = _images(tmp_path)
    (tmp_path / "file").write_text("no folder")
    with mounted(tmp_path / "disk", "size=12k") as disk:
        for folder, reason in ((disk, "No space left"), (tmp_path / "file", "Not a directory")):
            cache = _small_cache(folder, images)
            cache.split(images)
            words = rf"features cannot be written to .*{reason}.*--config.runtime.features=FOLDER"
            with pytest.raises(OSError, match=words) as error:
                _compute(cache, _jax_means)
            assert "\n" not in str(error.value)
            assert not list(folder.glob("**/*.npy*"))


def test_parts_together_are_what_one_process_computes(tmp_path, monkeypatch):
    monkeypatch.setattr(features, "_FILE_ROWS", 8)
    images = _images(tmp_path)
    caches = [_small_cache(tmp_path / name, images) for name in ("parts", "one")]
    (in_parts, at_once), counts = [cache.split(images) for cache in caches], []
    for index in (2, 0, 1):
        counts.append(_compute(caches[0], _jax_means, shard=parts.Shard(index, 3)))
        assert caches[0].is_complete == (index == 1)
    assert sum(counts) == 50 and min(counts) > 0
    with pytest.raises(ValueError, match=r"another value of parts \(3, not 2\)"):
        _compute(caches[0], _jax_means, shard=parts.Shard(1, 2))
    assert _compute(caches[0], _jax_means) == 0
    assert caches[0].seconds is None  # 50 images say nothing about the time of one
    monkeypatch.setattr(features, "_LEAST_TIMED", 40)
    assert _compute(caches[1], _jax_means) == 50
    assert caches[1].seconds > 0
    for i in range(50):
        np.testing.assert_array_equal(in_parts.records[i], at_once.records[i])


def _jax_means(images):
    return jax.numpy.asarray(_means(images))


def test_a_command_computes_a_part_and_the_run_the_others(source, tmp_path, capsys):
    config = _frozen(tmp_path, source, features="cached")
    file = write_config(tmp_path, config)
    assert main(["train", f"--config={file}", "--features=1/2"]) == 0
    # Each split of 32 images is one file, which is in the last part.
    assert f"{tmp_path / 'cache'}: 64 images of part 1/2" in capsys.readouterr().out
    files = set((tmp_path / "cache").glob("*/*/*.npy"))
    assert len(files) == 2 and {path.parent.name for path in files} == {"part-1-of-2"}
    assert not build(config).cache.is_complete
    training.run(config, tmp_path / "run")
    assert set((tmp_path / "cache").glob("*/*/*.npy")) == files and build(config).cache.is_complete
    for words, message in (
        (["--features=2/2"], "argument --features: 2/2 is not I/N"),
        (["--features=0/2", "--config.features=computed"], "needs a config with features='cached'"),
        (["--features=0/2", "--workdir=x", "--overwrite"], "leave out --workdir, --overwrite$"),
        (["--features=0/2", "--processes=2", "--process=0"], "leave out --processes, --process$"),
    ):
        with pytest.raises(ValueError, match=message):
            main(["train", f"--config={file}", *words])


def test_images_that_cannot_be_read_stay_unreadable(tmp_path, capfd, caplog):
    root = photos(tmp_path)
    (root / "c1" / "009.png").write_bytes(b"no picture")
    images = folder_set(root=root, split=0.5).train
    cache = _small_cache(tmp_path / "cache", images)
    split = cache.split(images)
    with pytest.raises(ValueError, match=r"009\.png cannot be read"):
        _compute(cache, _jax_means)
    _compute(cache, _jax_means, unreadable="skip")
    with pytest.raises(ValueError, match="could not be read when its features were computed"):
        split.records[9]
    assert split.records.describe(9).endswith("009.png")
    assert np.isfinite(split.records[8]).all()
    caplog.clear()
    pipeline._warn_once.cache_clear()
    transform_fn = transforms_of(Transform(), Transform(), views=0)[1]
    with pipeline.evaluation(
        split, transform_fn=transform_fn, batch_size=9, unreadable="skip"
    ) as batches:
        list(batches)
    assert "009.png cannot be read: skipped from now on" in caplog.text


def test_the_head_knows_the_mean_and_one_scale_of_training_features(source, tmp_path):
    run = build(_frozen(tmp_path, source, method=CENTERED, features="cached"))
    state = first_state(run)
    features.compute_of_run(run, state)
    statistics = start.centered(run, state).model_state["batch_stats"]["head"]["red"]
    rows = np.stack([run.train.records[i][0] for i in range(len(run.train))])
    np.testing.assert_allclose(statistics["mean"], rows.mean(axis=0), rtol=1e-5)
    norms = np.linalg.norm(rows - rows.mean(axis=0), axis=1)
    np.testing.assert_allclose(statistics["scale"], norms.mean() / np.sqrt(8), rtol=1e-5)
    kernel = np.asarray(start.centered(run, state).params["head"]["red"]["kernel"])
    x = (rows - rows.mean(axis=0)) / np.float64(statistics["scale"]).ravel()[0]
    variances, directions = np.linalg.eigh(np.cov(x.T, bias=True))
    order = np.argsort(-variances)[:6]
    expected = directions[:, order] / (variances[order] + 0.1 * variances[order].mean()) ** 0.25
    expected *= np.sqrt(6) / np.linalg.norm(expected)
    np.testing.assert_allclose(np.abs(kernel), np.abs(expected), atol=1e-4)


@pytest.mark.parametrize("pool_fn", [None, "global_max"])
def test_frozen_features_are_what_the_head_takes(source, tmp_path, pool_fn):
    config = _frozen(tmp_path, source, method={"name": "pairs", "dim": 6, "pool_fn": pool_fn})
    outputs = []
    for kind in ("computed", "cached"):
        run = build(config | {"features": kind})
        features.compute_of_run(run, first_state(run))
        outputs.append(Evaluator(run).frozen_fn(start.backbone(run))(run.test))
    np.testing.assert_allclose(*outputs, atol=1e-6)
    _, state = run_folder.reopen(source)
    x = jax.numpy.asarray(run.test.records.images.records / 255, np.float32)
    name = "pooled" if pool_fn is None else "max_pooled"
    rows = backbone_features(run.net, state.params, state.model_state, x, output=name)
    expected = np.asarray(rows) / np.linalg.norm(rows, axis=1, keepdims=True)
    np.testing.assert_allclose(outputs[0], expected, atol=1e-5)


@pytest.mark.parametrize(("count", "dim"), [(3, 6), (40, 20), (5, 12)])
def test_few_images_leave_no_direction_out(count, dim):
    x = np.random.default_rng(0).normal(size=(count, 8))
    kernel = start.whitened(x - x.mean(axis=0), dim)
    assert kernel.shape == (8, dim) and np.isfinite(kernel).all()
    assert np.linalg.matrix_rank(kernel) == min(8, dim)
    np.testing.assert_allclose(np.square(kernel).sum(), dim)


def test_pca_keeps_the_lengths_of_directions_and_whitening_makes_deviations_equal():
    x = np.random.default_rng(0).normal(size=(4000, 5)) * np.array([8, 4, 2, 1, 1])
    x -= x.mean(axis=0)
    plain, half, full = (start.whitened(x, 3, amount) for amount in (0.0, 0.5, 1.0))
    np.testing.assert_allclose(plain.T @ plain, np.eye(3), atol=1e-6)
    deviations = [(x @ kernel).std(axis=0) for kernel in (plain, half, full)]
    np.testing.assert_allclose(deviations[0], [8, 4, 2], rtol=0.05)
    spreads = [d.max() / d.min() for d in deviations]
    # The largest variance is 16 times the smallest of three, before a tenth of their mean is added.
    assert 3.5 < spreads[0] < 4.5 and 2 < spreads[1] < 3 and 1.2 < spreads[2] < 1.5


def test_a_run_of_no_steps_fits_its_head_and_is_shipped(source, tmp_path):
    method = {"name": "pairs", "dim": 6, "dense_fn": {"name": "centered_dense", "whiten": 1.0}}
    config = _frozen(tmp_path, source, method=method, features="cached", steps=0, pictures="page")
    first = training.run(config, tmp_path / "run")
    assert results.read(tmp_path / "run").chosen.step == 0
    assert not page.read(tmp_path / "run").get("faults")
    run, state = run_folder.reopen(tmp_path / "run")
    rows = np.stack([run.train.records[i][0] for i in range(len(run.train))]).astype(np.float64)
    mean = rows.mean(axis=0)
    variances, directions = np.linalg.eigh(np.cov((rows - mean).T, bias=True))
    order = np.argsort(-variances)[:6]
    floor = 0.1 * variances[order].mean()
    kernel = directions[:, order] / np.sqrt(variances[order] + floor)
    images = _images(tmp_path, count=8).records
    x = jax.numpy.asarray(images / 255, np.float32)
    pooled = backbone_features(run.net, state.params, state.model_state, x)
    expected = (np.asarray(pooled) - mean) @ kernel
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    exporting.export(tmp_path / "run", tmp_path / "tiny.bundle", batch_sizes=(8,))
    embeddings = bundle.load(tmp_path / "tiny.bundle").embed(list(images))
    # Principal directions are known up to their signs.
    np.testing.assert_allclose(embeddings @ embeddings.T, expected @ expected.T, atol=1e-4)
    assert training.run(config, tmp_path / "run") == first


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"trained": "all"}, "needs a backbone that does not learn"),
        ({"method": {"name": "pairs", "pool_fn": "global_mean_max"}}, "keeps pooled features"),
        ({"method": {"name": "pairs", "pool_fn": "learned_attention"}}, "keeps pooled features"),
        ({"method": {"name": "pairs", "pool_fn": "class_and_mean"}}, "has no output 'class_and_me"),
        (
            {"method": CENTERED | {"dense_fn": {"name": "centered_dense", "whiten": 2.0}}},
            "whiten is a number from 0 .PCA. to 1, not 2.0",
        ),
        (METHODS["abe"] | {"start": None}, "trained=last needs a pretrained backbone"),
        ({"features": "kept"}, "features.name must be 'computed' or 'cached', got 'kept'"),
    ],
)
def test_what_cannot_be_cached_is_refused(source, tmp_path, fields, words):
    config = _frozen(tmp_path, source, features="cached") | fields
    with pytest.raises(ValueError, match=words) as error:
        build(config)
    assert "\n" not in str(error.value)
    assert not (pathlib.Path(tmp_path) / "cache").exists()
