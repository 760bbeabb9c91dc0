"""Training images on the devices: the batches and the runs are those of the host form."""

import shutil

import jax
import numpy as np
import pytest
from processes import ends, same, same_run, started, state
from system import blobs, photos, tiny
from train.pixels import distance

from dmljax.config.build import build
from dmljax.data.splits import Split, Splits
from dmljax.data.transforms.transform import Transform
from dmljax.runs import training
from dmljax.train import augment, devices, features, hosts, journal, loop, resident
from dmljax.train.devices import prefetch
from dmljax.train.start import first_state


def _batches(run, count, start=0, say=lambda line: None):
    data = resident.choose(run, say=say)
    images_fn = (lambda batch: batch) if data is None else jax.jit(data.images_fn)
    arrays = {} if data is None else data.arrays
    with loop.batches(run, start, resident=data) as host_batches:
        on_devices = prefetch(host_batches, run.shards.rows, window=run.options.runtime.data.window)
        batches = [jax.device_get(images_fn({**next(on_devices), **arrays})) for _ in range(count)]
    return batches, host_batches.skipped


SMALL = {"name": "standard_train", "size": 10, "antialias": False}
EIGHT = {"name": "class_balanced", "classes": 4, "per_class": 2}


def _run(folder, *, transform=SMALL, sampler=EIGHT, **runtime):
    return build(tiny(folder, transform=transform, sampler=sampler, runtime=runtime))


@pytest.mark.parametrize(
    ("per_class", "together"),
    [(2, None), (7, 2)] + [pytest.param(*x, marks=pytest.mark.slow) for x in ((2, 2), (7, None))],
)
def test_any_number_of_devices_makes_the_batches_of_the_host(
    per_class, together, tmp_path, monkeypatch
):
    """8 or 28 rows. On three devices the last ones are padding, of zeros.

    Of 28 rows, three devices have ten each, which they exchange in three pieces of up to four.
    Accelerators transform several images together.
    """
    monkeypatch.setattr(resident, "_together", lambda platform: together)
    sampler = {"name": "class_balanced", "classes": 4, "per_class": per_class}
    options = {"sampler": sampler, "transform": SMALL | {"color": 0.4}}
    rows = 4 * per_class
    of_host, _ = _batches(_run(tmp_path, **options, devices=1), 3, start=2)
    expected: list = []
    for count in (1, 3, 8):
        run = _run(tmp_path, **options, data="device", devices=count)
        batches, _ = _batches(run, 3, start=2)
        expected = expected or batches
        for actual, batch, host in zip(batches, expected, of_host, strict=True):
            difference = np.abs(actual["images"][:rows].astype(int) - host["images"])
            assert difference.mean() < 1
            for name in ("images", "labels"):
                np.testing.assert_array_equal(actual[name][:rows], batch[name][:rows])
                assert len(actual[name]) == run.shards.padded(rows)
                assert not actual[name][rows:].any()


def test_hosts_exchange_images_among_their_own_devices():
    """Two hosts of four devices. A host has all of ten images, three or fewer on a device."""
    images = np.random.default_rng(0).integers(1, 256, (10, 4, 4, 3), np.uint8)
    rows = np.random.default_rng(1).integers(-1, 10, 24)
    program = augment.program(Transform(), [(4, 4, 3)] * 10)
    mesh = devices.Shardings().mesh
    batch = {"resident": np.concatenate([images, np.zeros_like(images[:2])] * 2), "rows": rows}
    batch |= {"numbers": np.zeros((24, 1), np.float32), "labels": rows}
    images_fn = jax.jit(resident._images_fn(program, mesh, hosts=2, together=None))
    expected = np.where(rows[:, None, None, None] < 0, 0, images[rows])
    np.testing.assert_array_equal(images_fn(batch)["images"], expected)


def test_images_that_are_exchanged_take_the_memory_of_the_rows_of_a_device(
    tmp_path, without_diagnostics
):
    """Of N devices, each holds a piece as it is sent, an N-th of it, and the images so far.

    A step needs no more than with the images of the host.
    """
    blobs(tmp_path, classes=16, each=32, size=64)
    options = {"transform": "random_flip"}
    options["sampler"] = {"name": "class_balanced", "classes": 8, "per_class": 8}
    of_step = {}
    for data, count in (("device", 1), ("device", 3), ("device", 8), ("host", 8)):
        run = _run(tmp_path, **options, data=data, devices=count)
        images = resident.choose(run, say=lambda line: None)
        arrays = {} if images is None else images.arrays
        with loop.batches(run, resident=images) as host_batches:
            batch = {**next(prefetch(host_batches, run.shards.rows)), **arrays}
        if images is not None:
            taken = _temporary_bytes(jax.jit(images.images_fn), batch)
            assert taken < 1.02 * {1: 128, 3: 24 + 8 + 24, 8: 8 + 1 + 8}[count] * 64 * 64 * 3
        if count == 8:
            state = jax.tree.map(
                lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
                run.shapes,
                run.placements,
            )
            signal = jax.device_put(np.zeros(count, np.int32), run.shards.rows)
            step = loop.compiled_step(run, images)
            of_step[data] = _temporary_bytes(step, state, batch, signal)
    assert of_step["device"] < 1.01 * of_step["host"]


def _temporary_bytes(function, *arguments):
    return function.lower(*arguments).compile().memory_analysis().temp_size_in_bytes


def test_auto_takes_the_devices_if_the_images_fit(tmp_path):
    said = []
    actual, _ = _batches(_run(tmp_path, data="auto", devices=3), 2, say=said.append)
    same(actual, _batches(_run(tmp_path, data="device", devices=3), 2)[0])
    [line] = said
    assert line.startswith("data: 32 images of 12 x 12 x 3 take ")
    assert "on each of 3 devices" in line and line.endswith("(runtime.data='auto')")
    assert resident.choose(_run(tmp_path, data="auto", devices=3), say=said.append) is not None


def _sent_shapes(monkeypatch):
    """The shapes of the images that are sent from now on."""
    shapes, original = [], devices.put

    def put(batch, rows):
        shapes.extend(x.shape for name, x in batch.items() if name == "images")
        return original(batch, rows)

    monkeypatch.setattr(devices, "put", put)
    return shapes


@pytest.mark.parametrize("count", [1, 3])
def test_a_window_sends_the_same_batches_in_fewer_transfers(count, tmp_path, monkeypatch):
    """One transfer for each block, of which one is ahead; three devices pad eight rows to nine."""
    sent = _sent_shapes(monkeypatch)
    expected, _ = _batches(_run(tmp_path, devices=count), 5, start=2)
    image = (9 if count == 3 else 8, 10, 10, 3)
    assert sent == [image] * (5 + 1)
    for window, blocks in ((2, 3 + 1), (3, 2 + 1)):
        sent.clear()
        same(
            _batches(_run(tmp_path, devices=count, data={"window": window}), 5, start=2)[0],
            expected,
        )
        assert sent == [(window, *image)] * blocks


def test_features_are_taken_from_the_devices(source, tmp_path):
    fields = {"start": {"name": str(source), "takes": "backbone"}, "trained": "last"}
    fields |= {"features": {"views": 2}, "transform": "random_flip"}
    config = tiny(tmp_path, **fields)

    def on(count, data):
        runtime = {"features": str(tmp_path / "cache"), "devices": count, "data": data}
        return config | {"runtime": runtime}

    run = build(on(3, "device"))
    features.compute_of_run(run, first_state(run))
    for count in (1, 8, 3):
        actual, _ = _batches(build(on(count, "device")), 4)
        same(actual, _batches(build(on(count, "host")), 4)[0])
    assert actual[0]["images"].shape == (9, 8) and actual[0]["images"].dtype == np.float32
    assert len({row.tobytes() for batch in actual for row in batch["images"]}) > 20


@pytest.mark.parametrize("damaged", ["an image", "a class"])
def test_an_image_that_cannot_be_read_is_replaced_as_by_the_host(tmp_path, damaged):
    root = photos(tmp_path)
    for path in sorted((root / "c1").iterdir())[: 1 if damaged == "an image" else None]:
        path.write_bytes(b"no image")
    dataset = {"name": "folder", "root": str(root), "split": 0.5}
    config = tiny(tmp_path, dataset=dataset, unreadable="skip")
    expected, skipped = _batches(build(config), 6)
    actual, on_devices = _batches(build(config | {"runtime": {"data": "device"}}), 6)
    same(actual, expected)
    assert sum(on_devices.values()) >= 1 and on_devices.keys() == skipped.keys()
    with pytest.raises(ValueError, match=r"cannot be read.*unreadable='skip'"):
        resident.load(build(config | {"unreadable": "raise"}))


def test_an_interrupted_run_ends_the_same(tmp_path, without_diagnostics, monkeypatch):
    """Bitwise on the devices, and also if it goes on with the images of the host."""
    sent = _sent_shapes(monkeypatch)
    config = tiny(tmp_path, runtime={"data": "device", "devices": 3}, log_every=1)
    training.run(config, tmp_path / "whole")
    for name, runtime in {
        "device": config["runtime"],
        "host": {"devices": 3, "data": {"window": 4}},
    }.items():
        shutil.copytree(tmp_path / "whole", tmp_path / name)
        for step in (4, 6):
            shutil.rmtree(tmp_path / name / "checkpoints" / str(step))
        training.run(config | {"runtime": runtime}, tmp_path / name)
    same_run(tmp_path / "device", tmp_path / "whole")
    assert {shape[:2] for shape in sent if shape[0] != 18} == {(4, 9)}  # evaluations send 18 images
    curves = [
        [x["loss"] for x in journal.read(tmp_path / name / "metrics.jsonl") if "loss" in x]
        for name in ("whole", "host")
    ]
    assert len(curves[0]) == 6
    np.testing.assert_allclose(*curves, rtol=1e-4)  # in float32: rounding only


@pytest.mark.slow
def test_hosts_divide_the_images_over_their_own_devices(tmp_path):
    """Of 8 images, two hosts hold 4 each on two devices, and the third host holds padding alone."""
    evaluate = {"every": 6, "ks": [1], "clustering": None, "batch_size": 10}
    config = tiny(tmp_path, evaluate=evaluate, checkpoint={"every": 6, "keep": 1})
    config["runtime"] = {"data": "device"}
    with started(tmp_path, tmp_path / "hosts", config, processes=3) as process:
        assert "on each of 2 devices" in ends(process, 0, tmp_path)
    training.run(config | {"runtime": {"devices": 1}}, tmp_path / "one")
    assert distance(state(tmp_path / "hosts").params, state(tmp_path / "one").params) < 1e-4


def rolled(image, rng):
    """A transform of a user, which reads pixels."""
    return np.roll(image, int(rng.integers(3)), axis=1)


def test_a_transform_without_a_device_form_is_named(tmp_path, capsys):
    mine = {"transform": "train.test_resident:rolled"}
    with pytest.raises(ValueError, match=r"transform rolled .*runtime.data=host") as refused:
        training.run(tiny(tmp_path, **mine, runtime={"data": "device"}), tmp_path / "run")
    assert str(refused.value).startswith("the transform") and "\n" not in str(refused.value)
    assert "raw pixels" not in capsys.readouterr().out  # which may take minutes
    training.run(tiny(tmp_path, **mine, runtime={"data": "auto"}), tmp_path / "auto")
    out = " ".join(capsys.readouterr().out.split())
    assert "sent by the host in every step (runtime.data='auto')" in out
    assert "transform rolled has no form for devices" in out


class _Huge:
    """As many images as no machine can hold; the first ones are read."""

    def __len__(self):
        return 1 << 20

    def __getitem__(self, i):
        assert i < 1000
        return np.zeros((2000, 3000, 3), np.uint8)

    def fingerprint(self):
        return "huge"


def huge():
    """A data set of 19 TB."""
    labels = np.arange(1 << 20) % 8
    names = tuple("abcdefgh")
    small = Split(np.zeros((16, 12, 12, 3), np.uint8), np.arange(16) % 8, names)
    return Splits(Split(_Huge(), labels, names), small)


def test_images_that_do_not_fit_are_refused_with_what_they_need(tmp_path, monkeypatch):
    config = tiny(tmp_path, dataset="train.test_resident:huge", transform="random_crop")
    run = build(config | {"runtime": {"data": "device", "devices": 2}})
    said = []
    with pytest.raises(resident.DoesNotFit, match=r"take 9,.* GB on each of 2 devices, with"):
        resident.choose(run, say=said.append)
    pixels = build(config | {"transform": "train.test_resident:rolled"})
    with pytest.raises(augment.NoDeviceForm, match="transform rolled"):  # before they are read
        resident.load(pixels)
    run = run._replace(options=build(config | {"runtime": {"data": "auto"}}).options)
    assert resident.choose(run, say=said.append) is None
    assert len(said) == 1 and "and they may take 50%" in said[0] and "\n" not in said[0]
    monkeypatch.setattr(resident.machine, "free_memory", lambda: 1 << 40)
    assert resident._free_bytes(jax.devices()[:4]) == 1 << 37  # of half, as they share it
    monkeypatch.setattr(hosts, "highest", lambda number: 1)  # what another host says
    with pytest.raises(resident.DoesNotFit, match="on the devices of another host"):
        resident.load(_run(tmp_path))
