"""Batches do not depend on workers, threads, hosts and first step; bad images are reported."""

import collections
import dataclasses
import functools
import hashlib
import pathlib
import sys
import time
import types

import data_fixtures as make
import numpy as np
import pytest

from dmljax.data import (
    datasets,
    decode,
    pipeline,
    prepare,
    records,
    sampling,
    splits,
    transforms,
)
from dmljax.data.transforms import transform

_P_BY_K = functools.partial(sampling.class_balanced, classes=4, per_class=2)
_SMALL = transform.bind(transforms.standard_train, size=24)
_SMALL_EVAL = transform.bind(transforms.standard_eval, size=24, shorter=28)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    root = tmp_path_factory.mktemp("photos")
    counts = {f"class {c}": n for c, n in enumerate([3, 5, 2, 4, 6, 3])}
    return datasets.folder(root=make.class_folders(root, counts), split=1.0).train


def _train(split, **options):
    defaults = dict(sample_fn=_P_BY_K, transform_fn=_SMALL, seed=3)
    return pipeline.train(split, **{**defaults, **options})


def _digest(batch):
    parts = (np.ascontiguousarray(batch[key]).tobytes() for key in sorted(batch))
    return hashlib.sha256(b"".join(parts)).hexdigest()


def _digests(split, steps, **options):
    with _train(split, **options) as batches:
        return [_digest(next(batches)) for _ in range(steps)]


def test_a_batch_is_the_plan_decoded_and_transformed(photos):
    with _train(photos, seed=11, start=5) as batches:
        for step in (5, 6):
            batch = next(batches)
            assert set(batch) == {"images", "labels"}
            assert batch["images"].shape == (8, 24, 24, 3) and batch["images"].dtype == np.uint8
            plan = sampling.class_balanced(
                photos.labels, classes=4, per_class=2, seed=11, step=step
            )
            assert (batch["labels"] == photos.labels[plan]).all()
            assert batch["labels"].dtype == np.int32
            for row, i in enumerate(plan):
                rng = np.random.Generator(np.random.Philox(key=[11, step * 8 + row]))
                image = _SMALL(decode.read(photos.records[i]), rng)
                assert (batch["images"][row] == image).all()


def test_large_jpegs_are_decoded_at_a_fraction_by_both_pipelines(tmp_path):
    """Images that are cut to boxes are decoded in full."""
    small = make.class_folders(tmp_path, {"a": 2, "b": 2}, width=320, height=200)
    split = datasets.folder(root=small, split=1.0).train
    boxes = np.tile([10, 10, 300, 190], (len(split), 1))
    options = {"size": 24, "scaled_decode": True}
    crop_fn = transform.bind(transforms.standard_train, area=(0.9, 1.0), **options)
    eval_fn = transform.bind(transforms.standard_eval, shorter=28, **options)
    rng = np.random.default_rng(0)
    for boxed in (False, True):
        images = dataclasses.replace(split, boxes=boxes) if boxed else split

        def read(i, least_side, boxed=boxed):
            pixels = decode.read(split.records[i], least_side=None if boxed else least_side)
            assert len(pixels) == (200 if boxed else 100)
            return pixels[10:190, 10:300] if boxed else pixels

        with pipeline.evaluation(images, transform_fn=eval_fn, batch_size=4) as batches:
            for i, image in enumerate(next(batches)["images"]):
                np.testing.assert_array_equal(image, eval_fn(read(i, 56), rng))
        sample_fn = functools.partial(sampling.class_balanced, classes=2, per_class=2)
        plan = sample_fn(split.labels, seed=3, step=0)
        with _train(images, sample_fn=sample_fn, transform_fn=crop_fn) as batches:
            for row, image in enumerate(next(batches)["images"]):
                row_rng = np.random.Generator(np.random.Philox(key=[3, row]))
                np.testing.assert_array_equal(image, crop_fn(read(plan[row], 60), row_rng))


def test_workers_and_threads_do_not_change_batches(photos):
    expected = _digests(photos, 5, start=2)
    assert len(set(expected)) == 5
    for options in (dict(threads=1), dict(threads=7), dict(workers=2)):
        assert _digests(photos, 5, start=2, **options) == expected, options
    assert _digests(photos, 1, start=2, seed=4) != expected[:1]


def test_processes_read_image_files_on_hosts_with_many_cores(photos, tmp_path, monkeypatch):
    """A process starts the main module again: only where that is known to do no harm."""
    monkeypatch.setattr(pipeline.machine, "core_count", lambda: 16)
    free = types.SimpleNamespace(free=64 << 30)
    monkeypatch.setattr(pipeline.shutil, "disk_usage", lambda folder: free)
    module = types.SimpleNamespace(name="dmljax.main")
    for main, expected in (
        ({"__file__": "/usr/bin/dmljax", "__spec__": None}, 8),
        ({"__file__": "/usr/bin/dmljax.exe", "__spec__": None}, 8),
        ({"__file__": "/x/main.py", "__spec__": module}, 8),
        ({"__file__": "/home/script.py", "__spec__": None}, 0),
        ({"__file__": "/home/my_dmljax.py", "__spec__": None}, 0),
        ({}, 8),  # a notebook
    ):
        monkeypatch.setitem(sys.modules, "__main__", types.SimpleNamespace(**main))
        assert pipeline.workers_for(photos) == expected
    encoded = tuple(pathlib.Path(path).read_bytes() for path in photos.records)
    for in_memory in (np.zeros((len(photos), 4, 4, 3), np.uint8), encoded):
        assert pipeline.workers_for(dataclasses.replace(photos, records=in_memory)) == 0
    prepare.prepare(splits.Splits(photos, photos), out=tmp_path / "prepared", settings={}, size=16)
    prepared = datasets.prepared(root=tmp_path / "prepared").train
    assert pipeline.workers_for(prepared) == 8
    assert pipeline.workers_for(splits.subset(prepared, np.arange(5))) == 8
    for megabytes, expected in ((2048, 4), (64, 0)):  # as in containers
        free.free = megabytes << 20
        assert pipeline.workers_for(photos) == expected
    free.free = 64 << 30
    monkeypatch.setattr(pipeline.machine, "core_count", lambda: 4)
    assert pipeline.workers_for(photos) == 0


@pytest.mark.parametrize("hosts, padded", [(2, None), (3, None), (3, 15)])
def test_hosts_together_have_the_batch_of_one_host(photos, hosts, padded):
    """Of 8 rows in 15, the third host has none."""
    with _train(photos, start=7) as batches:
        expected = [next(batches) for _ in range(3)]
    shares = []
    for host in range(hosts):
        with _train(photos, start=7, host=host, hosts=hosts, padded=padded) as batches:
            shares.append([next(batches) for _ in range(3)])
    for step, global_batch in enumerate(expected):
        for key, rows in global_batch.items():
            together = np.concatenate([share[step][key] for share in shares])
            assert len(together) == (padded or -(-len(rows) // hosts) * hosts)
            assert (together[: len(rows)] == rows).all()
            assert (together[len(rows) :] == (-1 if key == "skipped" else 0)).all()


def test_the_form_of_a_transform_for_batches_gives_the_same_images(monkeypatch):
    split = datasets.glyphs().train
    bound = transform.bind(transforms.distort, shift=1.0)
    sizes, batch_fn = [], transforms.distort.batch

    def counted(self, images, rngs):
        sizes.append(len(images))
        return batch_fn(self, images, rngs)

    monkeypatch.setattr(transforms.distort, "batch", counted)

    def first(transform_fn, split=split, **options):
        options |= {"sample_fn": _P_BY_K, "transform_fn": transform_fn, "seed": 3, "start": 5}
        with pipeline.train(split, **options) as batches:
            return next(batches)

    expected = first(lambda image, rng: bound(image, rng))
    assert not sizes
    shares = [first(bound, host=host, hosts=2) for host in range(2)]
    assert set(sizes) == {len(expected["labels"]) // 2}
    with monkeypatch.context() as m:  # the images of an array in memory are not read one by one
        m.setattr(records.Reader, "__call__", None)
        from_array = first(bound)
    from_list = first(bound, split=dataclasses.replace(split, records=list(split.records)))
    for key, rows in expected.items():
        together = np.concatenate([share[key] for share in shares])
        for same in (from_array[key], from_list[key], together):
            assert same.dtype == rows.dtype and (same == rows).all()


def test_a_run_can_start_at_any_step_at_once(photos):
    stream = _digests(photos, 9)
    for start in (1, 4, 8):
        assert _digests(photos, 9 - start, start=start) == stream[start:]
    start_time = time.process_time()
    _digests(photos, 1, start=10**9)
    assert time.process_time() - start_time < 5


@pytest.mark.parametrize("hosts", [1, 2])
def test_evaluation_is_in_order_and_padded(photos, hosts):
    for batch_size in (4, 5, 10, 23, 64):
        shares = []
        for host in range(hosts):
            with pipeline.evaluation(
                photos, transform_fn=_SMALL_EVAL, batch_size=batch_size, host=host, hosts=hosts
            ) as batches:
                shares.append(list(batches))
        steps = -(-len(photos) // batch_size)
        assert all(len(share) == steps for share in shares)
        joined = [
            {key: np.concatenate([s[b][key] for s in shares]) for key in shares[0][0]}
            for b in range(steps)
        ]
        # The last host has rows of padding where the hosts do not divide the batch.
        assert all(len(batch["where"]) == -(-batch_size // hosts) * hosts for batch in joined)
        assert not any(batch["where"][batch_size:].any() for batch in joined)
        joined = [{key: rows[:batch_size] for key, rows in batch.items()} for batch in joined]
        where = np.concatenate([batch["where"] for batch in joined])
        assert where.tolist() == [i < len(photos) for i in range(steps * batch_size)]
        indices = np.concatenate([batch["indices"] for batch in joined])[where]
        images = np.concatenate([batch["images"] for batch in joined])
        assert set(joined[0]) == {"images", "indices", "where"}
        assert indices.tolist() == list(range(len(photos)))
        assert not images[~where].any()
        rng = np.random.default_rng(0)
        for i in (0, len(photos) - 1):
            assert (images[i] == _SMALL_EVAL(decode.read(photos.records[i]), rng)).all()


def test_cache_decodes_each_image_once(photos, monkeypatch):
    reads, read = [], decode.read
    monkeypatch.setattr(
        decode, "read", lambda record, **side: reads.append(record) or read(record, **side)
    )
    digests = _digests(photos, 20, threads=1, cache=True)
    assert len(reads) == len(set(reads)) == len(photos)
    assert _digests(photos, 20, threads=1) == digests
    assert len(reads) >= 160


def test_boxes_are_cut_before_the_transform(tmp_path):
    rows = [
        {"path": f"{i}.jpg", "label": "ab"[i % 2], "box": "5 3 25 23" if i else "0 0 40 99"}
        for i in range(4)
    ]
    split = datasets.table(path=make.write_table(tmp_path / "t.csv", rows), split=1.0).train
    options = dict(transform_fn=transforms.unchanged, batch_size=1)
    with pipeline.evaluation(splits.subset(split, [1]), **options) as batches:
        assert (next(batches)["images"][0] == decode.read(split.records[1])[3:23, 5:25]).all()
    with pytest.raises(decode.UnreadableImage, match=r"0 0 40 99 exceeds the 40x30 image"):
        pipeline.evaluation(split, **options)


@pytest.fixture
def damaged(tmp_path):
    make.class_folders(tmp_path, {"a": 3, "b": 3, "c": 2, "d": 4})
    make.put(tmp_path / "a" / "001.jpg", b"")
    data = (tmp_path / "d" / "000.jpg").read_bytes()
    make.put(tmp_path / "d" / "000.jpg", data[: len(data) // 2])
    return datasets.folder(root=tmp_path, split=1.0).train


def test_an_unreadable_image_is_named(damaged):
    with (
        pytest.raises(ValueError, match=r"(a/001|d/000).jpg cannot be read: .*unreadable='skip'"),
        _train(damaged, workers=1) as batches,
    ):
        for _ in range(20):
            next(batches)


def test_a_skipped_image_is_replaced_by_the_next_of_its_class_and_counted(damaged, caplog):
    steps, bad = 6, {1, 8}
    options = dict(unreadable="skip", transform_fn=transforms.unchanged)
    with _train(damaged, **options) as batches:
        stream = [next(batches) for _ in range(steps)]
        skipped = dict(batches.skipped)
    planned = np.concatenate(
        [
            sampling.class_balanced(damaged.labels, classes=4, per_class=2, seed=3, step=s)
            for s in range(steps)
        ]
    )
    images = np.concatenate([batch["images"] for batch in stream])
    labels = np.concatenate([batch["labels"] for batch in stream])
    assert (labels == damaged.labels[planned]).all()
    readable = {i: decode.read(r) for i, r in enumerate(damaged.records) if i not in bad}
    for i, image in zip(planned.tolist(), images, strict=True):
        np.testing.assert_array_equal(image, readable[i + (i in bad)])
    assert skipped == {damaged.records[i]: int((planned == i).sum()) for i in bad}
    assert caplog.text.count("a/001.jpg cannot be read: skipped from now on") == 1


def test_a_class_that_cannot_be_read_at_all_is_replaced_by_the_next_with_its_label(tmp_path):
    make.class_folders(tmp_path, {"a": 2, "b": 2, "c": 2})
    for i in range(2):
        make.put(tmp_path / "b" / f"00{i}.jpg", b"")
    split = datasets.folder(root=tmp_path, split=1.0).train
    sample_fn = functools.partial(sampling.class_balanced, classes=3, per_class=2)
    options = dict(sample_fn=sample_fn, transform_fn=transforms.unchanged)
    with _train(split, unreadable="skip", **options) as batches:
        batch = next(batches)
        skipped = dict(batches.skipped)
    plan = sample_fn(split.labels, seed=3, step=0)
    sources = [i if split.labels[i] != 1 else 4 for i in plan.tolist()]
    assert (batch["labels"] == split.labels[sources]).all()
    for image, i in zip(batch["images"], sources, strict=True):
        assert (image == decode.read(split.records[i])).all()
    assert skipped == {split.records[2]: 1, split.records[3]: 1}


def test_a_split_that_cannot_be_read_at_all_ends_the_run(tmp_path):
    make.class_folders(tmp_path, {"a": 2})
    split = datasets.folder(root=tmp_path, split=1.0).train
    with _train(split, sample_fn=_P_BY_K, unreadable="skip") as batches:
        next(batches)
    for path in split.records:
        make.put(pathlib.Path(path), b"")
    with (
        pytest.raises(decode.UnreadableImage, match="not a single image of the split can be read"),
        _train(split, sample_fn=_P_BY_K, unreadable="skip") as batches,
    ):
        next(batches)


def test_a_counter_of_skipped_images_grows_and_its_names_are_logged_once(damaged, caplog):
    skipped = collections.Counter()
    options = dict(transform_fn=_SMALL_EVAL, batch_size=5, unreadable="skip", skipped=skipped)
    for _ in range(3):
        with pipeline.evaluation(damaged, **options) as batches:
            where = np.concatenate([batch["where"] for batch in batches])
        assert np.flatnonzero(~where[: len(damaged)]).tolist() == [1, 8]
    assert skipped == {damaged.records[i]: 3 for i in (1, 8)}
    assert caplog.text.count("cannot be read: skipped from now on") == 2
    with pipeline.evaluation(damaged, **options | {"skipped": collections.Counter()}) as batches:
        list(batches)
        assert batches.skipped.total() == 2  # another counter, such as of the evaluation
    assert caplog.text.count("cannot be read: skipped from now on") == 2


def test_classes_with_single_images_are_reported_at_the_start(tmp_path, caplog):
    make.class_folders(tmp_path, {"a": 1, "b": 2, "c": 5, "d": 1})
    split = datasets.folder(root=tmp_path, split=1.0).train
    _train(split).close()
    assert "2 classes have one image, so no positive, such as 'a'" in caplog.text


@pytest.mark.parametrize(
    "options, match",
    [
        (dict(sample_fn=functools.partial(sampling.uniform, batch_size=99)), "has 23 images"),
        (dict(hosts=3, padded=8), "8 rows .* cannot be divided evenly by 3 hosts"),
        (dict(padded=7), "7 rows of a batch of 8"),
        (dict(host=2, hosts=2), "host 2 of 2"),
        (dict(unreadable="ignore"), "'raise' or 'skip', not 'ignore'"),
        (dict(workers=-1), "workers must be 0 or more"),
        (dict(threads=-1), "threads must be 1 or more"),
    ],
)
def test_wrong_arguments_are_refused_before_any_thread_starts(photos, options, match):
    with pytest.raises(ValueError, match=match):
        _train(photos, **options)


def test_empty_splits_and_images_of_several_sizes_are_refused(photos):
    empty = splits.subset(photos, np.zeros(len(photos), bool))
    with pytest.raises(ValueError, match="the split is empty"):
        _train(empty)
    random_size = lambda image, rng: image[: int(rng.integers(5, 20))]  # noqa: E731
    with (
        pytest.raises(ValueError, match=r"have the shapes .*choose a transform"),
        _train(photos, transform_fn=random_size) as batches,
    ):
        next(batches)


def test_closing_ends_the_stream_and_its_threads(photos):
    batches = _train(photos)
    next(batches)
    batches.close()
    batches.close()
    with pytest.raises(StopIteration):
        next(batches)


def test_batches_are_prepared_ahead_in_the_background(photos):
    times = []

    def slow(image, rng):
        times.append(time.monotonic())
        return image

    with _train(photos, transform_fn=slow, threads=2) as batches:
        next(batches)
        deadline = time.monotonic() + 10
        while len(times) < 16 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert len(times) >= 16  # the second batch is ready before it is asked for
