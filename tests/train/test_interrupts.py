"""A signal in an evaluation or the report ends all processes within seconds, and loses nothing."""

import json
import os
import pathlib
import shutil
import signal
import time

import numpy as np
import pytest
from processes import LONG, children, ends, started, until, until_step
from system import blobs, tiny

from dmljax import retrieval
from dmljax.runs import training
from dmljax.train import journal
from dmljax.train.checkpoints import Checkpoints
from dmljax.train.evaluation import Evaluator

SECONDS = 20  # for the end of a process, on a machine that is busy with other tests


def _config(folder, **fields):
    """A run whose images are slow to read while `folder/slow` exists."""
    shutil.copy(pathlib.Path(__file__).with_name("slow_data.py"), folder)
    config = tiny(folder, **LONG | {"steps": 32, "pictures": "page"}, **fields)
    config["dataset"] = {"name": "slow_data:blobs", "path": blobs(folder)}
    config["evaluate"] = {"every": 16, "ks": [1], "clustering": {"seeds": [0]}, "batch_size": 4}
    return config


def _signal_one(process, processes):
    """Of several processes only number 1 gets the signal."""
    os.kill(children(process.pid)[1] if processes else process.pid, signal.SIGTERM)


def _said(folder, text):
    return lambda: text in (folder / "out.txt").read_text()


def _arrays(run):
    checkpoints = Checkpoints(run / "checkpoints")
    step = checkpoints.steps()[-1]
    return step, checkpoints.arrays(step), checkpoints.run(step)


@pytest.mark.parametrize("processes", [None, pytest.param(2, marks=pytest.mark.slow)])
def test_a_signal_at_any_time_gives_the_same_run(tmp_path, processes):
    config, run, slow = _config(tmp_path), tmp_path / "run", tmp_path / "slow"
    with started(tmp_path, run, config, processes=processes) as process:
        until((run / "config.json").exists, process, tmp_path)
        slow.touch()
        until(_said(tmp_path, "training images"), process, tmp_path)
        time.sleep(1)  # raw pixels are being read
        _signal_one(process, processes)
        assert "stopped before step 1" in ends(process, 143, tmp_path, within=SECONDS)
    slow.unlink()
    if processes is None:  # Ctrl-C in a terminal also reaches the processes that read images
        with started(tmp_path, run, config, "--config.runtime.workers=1") as process:
            until(_said(tmp_path, "compiling the train step"), process, tmp_path)
            slow.touch()
            until_step(run, 2, process)
            os.killpg(process.pid, signal.SIGINT)
            assert "saved; the same command continues" in ends(process, 130, tmp_path, within=30)
        slow.unlink()
    with started(tmp_path, run, config, processes=processes) as process:
        until_step(run, 8, process)
        slow.touch()
        until_step(run, 16, process)
        time.sleep(1)  # the test split is being read
        _signal_one(process, processes)
        assert "stopped after step 16, saved" in ends(process, 143, tmp_path, within=SECONDS)
    assert not any("test/R@1" in row for row in journal.read(run / "metrics.jsonl"))
    # The next process may be killed between the evaluation's lines and its checkpoint.
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 16, "test/R@1": 0.5}) + "\n")
    slow.unlink()
    with started(tmp_path, run, config, processes=processes) as process:
        until(_said(tmp_path, "test split after step 32"), process, tmp_path)
        slow.touch()
        _signal_one(process, processes)
        assert "repeats the report" in ends(process, 143, tmp_path, within=SECONDS)
    assert not (run / "report.html").exists()
    slow.unlink()
    for folder in (run, tmp_path / "undisturbed"):
        if processes is None:
            training.run(config | {"runtime": {"devices": 1}}, folder)
            continue
        with started(tmp_path, folder, config, processes=processes) as process:
            ends(process, 0, tmp_path)
    assert (run / "report.html").exists()
    (step, arrays, notes), (last, others, _) = _arrays(run), _arrays(tmp_path / "undisturbed")
    assert step == last == 32 and "repeats_evaluation" not in notes
    assert _bytes(arrays) == _bytes(others)
    one, other = (d / "metrics.jsonl" for d in (run, tmp_path / "undisturbed"))
    assert one.read_bytes() == other.read_bytes()


def _bytes(tree):
    import jax

    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def test_a_signal_to_one_process_ends_an_evaluation_that_clusters_for_hours(tmp_path):
    config, run = tiny(tmp_path), tmp_path / "run"
    config["evaluate"] |= {"clustering": {"starts": 10**6}}
    with started(tmp_path, run, config, processes=2) as process:
        until_step(run, 2, process)
        time.sleep(3)
        _signal_one(process, 2)
        ends(process, 143, tmp_path, within=SECONDS)
    step, _, notes = _arrays(run)
    assert step == 3 and notes["repeats_evaluation"]


def test_an_evaluation_that_is_repeated_gives_its_checkpoint_the_score(tmp_path, monkeypatch):
    config, run, original = tiny(tmp_path, steps=3), tmp_path / "run", Evaluator.evaluate
    config["evaluate"] |= {"clustering": None}

    def evaluate(*arguments, **options):
        os.kill(os.getpid(), signal.SIGTERM)
        return original(*arguments, **options)

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(Evaluator, "evaluate", evaluate)
        training.run(config, run)
    assert _notes(run) == ([], True)
    training.run(config, run)
    history, repeats_evaluation = _notes(run)
    assert len(history) == 1 and not repeats_evaluation


def _notes(run):
    *_, notes = _arrays(run)
    return notes["history"], notes.get("repeats_evaluation", False)


SEARCHES = {
    "ranks": (lambda x, labels: list(retrieval.ranks(x, labels, tile=128)), 9),
    "sorted ranks": (lambda x, labels: list(retrieval.ranks(x, labels // 100, tile=128)), 9),
    "mean distance": (
        lambda x, labels: list(retrieval.mean_distance_ranks(x[:, None], labels, rows=128)),
        3,
    ),
    "nearest": (lambda x, labels: retrieval.nearest(x, k=3, tile=128), 6),
    "k-means": (lambda x, labels: retrieval.kmeans(x, k=9, tile=128), 9),
    "k-reciprocal": (lambda x, labels: retrieval.k_reciprocal(x, k=4), 1),
}


@pytest.mark.parametrize("name", SEARCHES)
def test_every_search_can_be_ended_between_tiles(name):
    search, tiles = SEARCHES[name]
    rng = np.random.default_rng(0)
    x, labels = rng.normal(size=(384, 4)).astype(np.float32), np.arange(384) // 4
    calls = []
    with retrieval.stoppable(lambda: calls.append(None)):
        search(x, labels)
    assert len(calls) >= tiles

    def stop():
        if len(calls) == 1:
            raise TimeoutError
        calls.pop()

    with pytest.raises(TimeoutError), retrieval.stoppable(stop):
        search(x, labels)
    search(x, labels)  # outside of the block nothing is called
    assert len(calls) == 1
