"""A run that learns nothing says so, and one that learns does not."""

import numpy as np
import pytest
from system import METHODS, tiny

from dmljax.runs import stuck, training
from dmljax.train.journal import read


def test_a_moving_mean_is_told_from_noise():
    """Of 500 curves without a trend few seem to move; of those with one nearly all do."""
    rng = np.random.default_rng(0)
    curves = 1 + 0.1 * rng.standard_normal((500, 30))
    still = [stuck.has_moved(curve) for curve in curves.tolist()]
    assert np.mean(still) < 0.1
    falling = curves - np.linspace(0, 0.3, 30)
    rising = curves + np.linspace(0, 0.3, 30)
    for trend in (falling, rising):
        assert np.mean([stuck.has_moved(curve) for curve in trend.tolist()]) > 0.97
    assert stuck.has_moved([0.2, 0.1] * 4)  # too few to tell
    assert not stuck.has_moved([0.2] * 9)
    # Far more than the first mean, within large noise.
    assert stuck.has_moved([1.0, 9.0, 2.0, 5.0, 4.0, 5.0, 1.0, 2.0, 3.0])


def test_a_score_rises_by_more_than_its_error():
    assert stuck.has_risen([0.5, 0.6], images=1000)
    assert not stuck.has_risen([0.5, 0.52], images=1000)  # the error of a share is 0.016
    assert stuck.has_risen([0.5, 0.52], images=100_000)
    assert stuck.has_risen([0.5, 0.6, 0.1], images=1000)  # it has been better
    assert stuck.has_risen([0.5], images=1000)
    assert not stuck.has_risen([0.5, 0.4], images=1000)


def _rows(losses, scores):
    rows = [{"step": 10 * (i + 1), "loss": loss} for i, loss in enumerate(losses)]
    return rows + [{"step": step, "val/R@1": score} for step, score in scores.items()]


@pytest.mark.parametrize(
    ("losses", "scores", "steps", "is_warned"),
    [
        ([0.7] * 12, {60: 0.1, 120: 0.1}, 300, True),
        ([0.7] * 12, {60: 0.1, 120: 0.3}, 300, False),
        ([0.7] * 12, {60: 0.1}, 300, False),  # one evaluation is too few to tell
        (np.linspace(0.7, 0.2, 12).tolist(), {60: 0.1, 120: 0.1}, 300, False),
        ([0.7] * 12, {60: 0.1, 120: 0.1}, 3000, False),  # too early
        ([0.7] * 8, {40: 0.1, 80: 0.1}, 300, False),
        ([0.7] * 12, {}, 300, False),
    ],
)
def test_who_is_warned(losses, scores, steps, is_warned):
    line = stuck.warning(_rows(losses, scores), key="val/R@1", images=500, steps=steps)
    assert (line is not None) == is_warned
    if is_warned:
        assert "mean 0.7 at the start, 0.7 now" in line
        assert "val/R@1 has not risen since step 60 (10.0, now 10.0)" in line


@pytest.mark.parametrize(
    ("pixels", "scores", "options", "is_warned"),
    [
        (0.24, {300: 0.04, 600: 0.06}, {}, True),
        (0.24, {300: 0.04, 600: 0.24}, {}, True),
        (0.24, {300: 0.04, 600: 0.25}, {}, True),  # within the noise of 1,000 images
        (0.24, {300: 0.04, 600: 0.35}, {}, False),
        (0.24, {300: 0.35, 600: 0.06}, {}, False),  # it has been better
        (0.24, {400: 0.06}, {}, False),  # too early
        (0.24, {400: 0.06}, {"steps": 800}, True),
        (0.24, {1000: 0.06}, {"dim": 2}, False),
        (None, {1000: 0.06}, {}, False),
        (0.98, {1000: 0.97}, {}, False),  # hardly anything is left to learn
        (0.98, {1000: 0.4}, {}, True),
    ],
)
def test_who_is_no_better_than_pixels(pixels, scores, options, is_warned):
    rows = [{"step": step, "test/R@1": score} for step, score in scores.items()]
    rows = [{"step": 0, "raw/R@1": pixels}] * (pixels is not None) + rows
    options = {"dim": 64, "images": 1000, "steps": 1000} | options
    line = stuck.below_pixels(rows, **options)
    assert (line is not None) == is_warned
    if is_warned:
        best = max(scores.values())
        assert f"test/R@1 is {100 * best:.1f}, and R@1 of raw pixels is {100 * pixels:.1f}" in line


FIELDS = {
    "steps": 60,
    "evaluate": {"every": 15, "ks": [1], "clustering": None, "batch_size": 16},
    "log_every": 3,
    "checkpoint": {"keep": 1},
}


def test_a_run_at_a_rate_of_zero_is_warned_once(tmp_path, capsys):
    config = tiny(tmp_path, **FIELDS, optimizer={"name": "sgd", "rate": 0.0})
    config["net"] = config["net"] | {"norm": "frozen_batch_norm"}
    training.run(config, tmp_path / "run")
    printed = capsys.readouterr().out
    assert printed.count("warning: the loss has not moved") == 1
    assert "test/R@1 has not risen since step 15" in printed


def test_a_run_that_learns_is_not_warned(tmp_path, capsys):
    config = tiny(tmp_path, **FIELDS)
    config["method"] = config["method"] | {"dim": 16}
    training.run(config, tmp_path / "run")
    assert "warning" not in capsys.readouterr().out


def test_a_falling_loss_does_not_hide_a_poor_score(tmp_path, capsys):
    """Proxies that move to the images of a net that learns nothing."""
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(8), 16)
    images = 10 * rng.normal(size=(8, 12, 12, 3))[labels] + 40 * rng.normal(size=(128, 12, 12, 3))
    images = np.clip(128 + images, 0, 255).astype(np.uint8)
    np.savez(tmp_path / "noisy.npz", images=images, labels=labels)
    config = tiny(tmp_path, **FIELDS, **METHODS["proxies"])
    config["method"] = config["method"] | {"dim": 16}
    config["dataset"] = config["dataset"] | {"path": str(tmp_path / "noisy.npz")}
    groups = [{"path": "^(net|head)", "frozen": True}]
    config["optimizer"] = {"name": "adam", "rate": 0.5, "groups": groups}
    training.run(config, tmp_path / "run")
    rows = read(tmp_path / "run" / "metrics.jsonl")
    assert stuck.has_moved([row["loss"] for row in rows if "loss" in row])
    pixels = next(row["raw/R@1"] for row in rows if "raw/R@1" in row)
    assert 0.5 < pixels < 0.9
    printed = capsys.readouterr().out
    warned = f"and R@1 of raw pixels is {100 * pixels:.1f}: the net has learned little"
    assert printed.count(warned) == 1
    assert "docs/choosing.md" in printed and "has not moved" not in printed


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_no_method_is_warned_on_glyphs(tmp_path, capsys, name):
    fields = {
        "dataset": "glyphs",
        "transform": "glyphs_train",
        "sampler": {"name": "class_balanced", "classes": 16, "per_class": 4},
        "net": {"name": "convnet", "strides": (2, 2, 1, 2, 1)},
        "optimizer": {"name": "adam", "rate": 3e-3},
        "steps": 240,
        "log_every": 10,
        "evaluate": {"every": 40, "ks": [1], "clustering": None},
        "runtime": {"cache": True, "devices": 1},
    }
    config = tiny(tmp_path, **METHODS[name] | fields)
    stages = {"split": ["conv2", "conv3"], "attention": "conv3"}
    changes = {"abe": stages, "pairs": {"memory": 64}}  # the batch has 64 rows
    config["method"] = config["method"] | changes.get(name, {})
    training.run(config, tmp_path / "run")
    assert "warning" not in capsys.readouterr().out
