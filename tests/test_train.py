"""Whole runs of a tiny config: what they leave behind, how they stop, go on, and refuse."""

import contextlib
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
from flax import traverse_util
from safetensors.numpy import save_file
from system import tiny, write_config

from dmljax import log, nets, train
from dmljax.checkpoint import Checkpoints, Damaged

ROOT = pathlib.Path(__file__).parents[1]


def _params(workdir):
    """The newest parameters, as they lie on the disk."""
    _, variables, _ = train.load(workdir)
    return jax.tree.map(np.asarray, variables)


def _same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    scores = train.run(tiny(folder), folder / "run")
    return folder, scores


def test_a_run_leaves_what_it_promises(whole):
    folder, scores = whole
    run = folder / "run"
    assert 0 <= scores["R@1"] <= 1 and {"MAP@R", "NMI", "R@2"} <= set(scores)
    lines = log.read(run / "metrics.jsonl")
    assert [x["step"] for x in lines if "loss" in x] == [2, 4, 6]
    assert [x["step"] for x in lines if "test/R@1" in x] == [3, 6]
    assert [x["step"] for x in lines if "raw/R@1" in x] == [0]
    assert json.loads((run / "config.json").read_text())["loss"]["margin"] == 0.2
    assert {"images_per_second", "input_wait_seconds", "memory_gib"} <= set(
        log.read(run / "speed.jsonl")[0]
    )
    assert list((run / "tensorboard").iterdir())


def test_the_same_command_twice_is_the_same_run(whole, tmp_path):
    folder, _ = whole
    train.run(tiny(folder), tmp_path / "again")
    _same(_params(tmp_path / "again"), _params(folder / "run"))
    ours, theirs = (d / "metrics.jsonl" for d in (tmp_path / "again", folder / "run"))
    assert ours.read_bytes() == theirs.read_bytes()


def test_training_changes_what_it_should(whole):
    folder, _ = whole
    made = train.build(tiny(folder))
    first = train.first_state(made)
    last = _params(folder / "run")["params"]
    for a, b in zip(jax.tree.leaves(first.params), jax.tree.leaves(last), strict=True):
        assert np.abs(np.asarray(a) - b).max() > 0


@pytest.mark.parametrize(
    "method, parts",
    [
        ({"name": "pairs", "dim": 4}, ["net"]),
        ({"name": "dvml", "dim": 4, "samples": 2}, ["net"]),
        (
            {"name": "abe", "learners": 2, "dim": 8, "split": ["conv1", "conv2"]}
            | {"attention": "conv2"},
            ["net/shared", "net/attention", "net/head"],
        ),
    ],
)
def test_weights_of_a_file_go_into_the_backbone(tmp_path, method, parts):
    net = nets.convnet(widths=(4, 8), strides=(2, 1))
    variables = net.init(jax.random.key(7), np.zeros((1, 12, 12, 3), np.float32), train=False)
    flat = traverse_util.flatten_dict(jax.tree.map(np.asarray, variables))
    flat = {k: v + 0.5 for k, v in flat.items()}
    save_file({_torch_name(k): _torch_axes(v) for k, v in flat.items()}, tmp_path / "w.safetensors")
    spec = {"name": "convnet", "widths": [4, 8], "strides": [2, 1]}
    spec |= {"weights": str(tmp_path / "w.safetensors")}
    made = train.build(tiny(tmp_path, net=spec, method=method))
    state = train.first_state(made)
    found = {"params": state.params, "batch_stats": state.model_state["batch_stats"]}
    checked = 0
    for kind, tree in found.items():
        for part in parts:
            for key, value in traverse_util.flatten_dict(_at(tree, part)).items():
                np.testing.assert_array_equal(value, flat[kind, *key])
                checked += 1
    assert checked >= len(flat)
    train.run(made.config, tmp_path / "run")


def _at(tree, path):
    for name in path.split("/"):
        tree = tree[name]
    return tree


def _torch_name(key):
    leaves = {"kernel": "weight", "scale": "weight", "mean": "running_mean", "var": "running_var"}
    return ".".join((*key[1:-1], leaves.get(key[-1], key[-1])))


def _torch_axes(array):
    return np.ascontiguousarray(array.transpose(3, 2, 0, 1) if array.ndim == 4 else array)


def test_load_embeds_images(whole):
    folder, _ = whole
    embed_fn, variables, config = train.load(folder / "run")
    images = np.random.default_rng(0).integers(0, 256, (5, 12, 12, 3)).astype(np.uint8)
    embeddings = np.asarray(embed_fn(variables, images))
    assert embeddings.shape == (5, 4) and config["method"]["dim"] == 4
    np.testing.assert_allclose(np.linalg.norm(embeddings, axis=1), 1, rtol=1e-5)


@contextlib.contextmanager
def _started(folder, workdir, config, *flags):
    """The command in a process of its own; what it prints is in `folder/out.txt`."""
    command = [sys.executable, "-m", "dmljax.main", f"--config={write_config(folder, config)}"]
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "1", "PYTHONPATH": str(ROOT)}
    with (folder / "out.txt").open("w") as out:
        process = subprocess.Popen(
            [*command, f"--workdir={workdir}", *flags],
            stdout=out,
            stderr=out,
            env=environment,
            cwd=folder,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _until_step(workdir, step, process):
    """Waits until the run has reported `step`."""
    for _ in range(1200):
        lines = _readable(workdir / "metrics.jsonl")
        if any(x["step"] >= step and "loss" in x for x in lines):
            return
        assert process.poll() is None, (workdir.parent / "out.txt").read_text()
        time.sleep(0.05)
    raise AssertionError("the run did not get there")


def _readable(path):
    with contextlib.suppress(ValueError):  # a line may be half written
        return log.read(path)
    return []


def _ends(process, status, folder):
    assert process.wait(timeout=200) == status, (folder / "out.txt").read_text()
    return (folder / "out.txt").read_text()


LONG = {"steps": 50, "evaluate": {"every": 25, "ks": [1], "clustering": False, "batch_size": 16}}
LONG |= {"checkpoint": {"every": 5, "keep": 2}}


@pytest.mark.parametrize("moments", [(16,), pytest.param((2, 16, 40), marks=pytest.mark.slow)])
def test_killed_at_any_moment_the_same_command_gives_the_same_run(tmp_path, moments):
    config = tiny(tmp_path, **LONG, method={"name": "pairs", "dim": 4, "memory": 16})
    with _started(tmp_path, tmp_path / "whole", config) as process:
        _ends(process, 0, tmp_path)
    workdir = tmp_path / "killed"
    for moment in moments:
        with _started(tmp_path, workdir, config, "--config.runtime.workers=1") as process:
            _until_step(workdir, moment, process)
    with _started(tmp_path, workdir, config) as process:
        assert "going on from step" in _ends(process, 0, tmp_path)
    _same(_params(workdir), _params(tmp_path / "whole"))
    metrics = [(d / "metrics.jsonl").read_bytes() for d in (workdir, tmp_path / "whole")]
    assert metrics[0] == metrics[1]


@pytest.mark.parametrize("number, status", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_and_leaves(tmp_path, number, status):
    config = tiny(tmp_path, **LONG | {"steps": 100_000, "checkpoint": {"every": 50_000}})
    with _started(tmp_path, tmp_path / "run", config) as process:
        _until_step(tmp_path / "run", 4, process)
        process.send_signal(number)
        assert "saved; the same command goes on" in _ends(process, status, tmp_path)
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints")
    assert checkpoints.steps() and checkpoints.steps()[-1] >= 4
    checkpoints.close()


def test_a_damaged_checkpoint_is_named_and_the_one_before_used(whole, tmp_path, caplog):
    folder, _ = whole
    shutil.copytree(folder / "run", tmp_path / "run")
    newest = tmp_path / "run" / "checkpoints" / "6"
    victim = max((p for p in newest.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    train.run(tiny(folder), tmp_path / "run")
    assert "checkpoint 6 is damaged" in caplog.text and victim.name in caplog.text
    _same(_params(tmp_path / "run"), _params(folder / "run"))


def test_a_checkpoint_of_another_shape_is_one_line(whole):
    folder, _ = whole
    made = train.build(tiny(folder, method={"name": "pairs", "dim": 5}))
    shapes = train.state_shapes(made)
    checkpoints = Checkpoints(folder / "run" / "checkpoints")
    with pytest.raises(Damaged, match=r"head/red/.* is \(4,\) there and \(5,\) here"):
        checkpoints.restore(shapes, made.shards.everywhere)
    checkpoints.close()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"lss": {"name": "triplet"}}, r"no field 'lss': did you mean 'loss'\?"),
        ({"loss": {"name": "tripplet"}}, "did you mean 'triplet'"),
        ({"loss": {"name": "triplet", "margn": 1}}, "no argument 'margn': did you mean 'margin'"),
        ({"net": {"name": "resnet5"}}, "did you mean 'resnet50'"),
        ({"steps": "six"}, "'six' is no duration"),
        ({"evaluate": {"evry": 1}}, "did you mean 'every'"),
        ({"select": "best"}, "select must be"),
        ({"select": "val"}, "set validation"),
        ({"sampler": {"name": "plan", "classes": 3, "per_class": 3}}, "cannot be shared by 8"),
        ({"sampler": {"name": "plan", "classes": 30, "per_class": 2}}, "30"),
        ({"dataset": {"name": "npz", "path": "nowhere.npz"}}, "nowhere.npz"),
        ({"optimizer": {"name": "adam", "rate": 1, "groups": [{"pth": "x"}]}}, "pth"),
    ],
)
def test_what_a_config_says_wrong_is_told_before_anything_is_written(tmp_path, change, message):
    with pytest.raises((ValueError, TypeError, OSError), match=message):
        train.run(tiny(tmp_path, **change), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path):
    config = tiny(tmp_path, optimizer={"name": "sgd", "rate": 1e30}, normalize="unit")
    with pytest.raises(FloatingPointError, match=r"the loss is .* at step \d+ .*optimizer.rate"):
        train.run(config, tmp_path / "run")


def test_a_workdir_of_another_config_is_refused(whole, tmp_path):
    folder, _ = whole
    shutil.copytree(folder / "run", tmp_path / "run")
    other = tiny(folder, loss={"name": "triplet", "margin": 0.3})
    with pytest.raises(ValueError, match=r"loss.margin \(0.2 there, 0.3 here\).*--overwrite"):
        train.run(other, tmp_path / "run")
    train.run(other, tmp_path / "run", overwrite=True)
    assert len(log.read(tmp_path / "run" / "metrics.jsonl")) == 6


def test_a_workdir_in_use_is_refused(tmp_path):
    from dmljax.checkpoint import lock

    (tmp_path / "run").mkdir()
    held = lock(tmp_path / "run")
    with pytest.raises(ValueError, match=f"in use by process {os.getpid()}"):
        train.run(tiny(tmp_path), tmp_path / "run")
    held.close()
    train.run(tiny(tmp_path), tmp_path / "run")


def test_without_a_config_the_command_lists_them():
    done = subprocess.run(
        [sys.executable, "-m", "dmljax.main"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 2 and "configs/glyphs.py" in done.stderr
