"""Batches of the nearest classes: searched while a run trains, and the same after a kill."""

import os
import shutil
import signal

import numpy as np
import pytest
from processes import same_run
from system import tiny

from dmljax.config.build import build
from dmljax.runs import summary, training
from dmljax.train import loop, start
from dmljax.train.checkpoints import Checkpoints

_FIELDS = {
    "steps": 16,
    "evaluate": {"every": 16, "ks": [1], "clustering": None, "batch_size": 16},
    "checkpoint": {"every": 5, "keep": 2},
    "sampler": {"name": "nearest_classes", "classes": 2, "per_class": 4, "near": 1, "every": 7},
}


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    """The config and the folder of a run with searches after steps 7 and 14."""
    folder = tmp_path_factory.mktemp("searched")
    config = tiny(folder, **_FIELDS)
    training.run(config, folder / "run")
    return config, folder / "run"


def test_neighbors_of_classes_are_those_of_a_loop():
    rng = np.random.default_rng(0)
    labels = rng.permutation(np.repeat([3, 5, 8, 9, 12], 4))
    embeddings = rng.normal(size=(20, 3)).astype(np.float32)
    embeddings[2] = np.nan
    names = np.unique(labels)
    rows = [embeddings[(labels == n) & np.isfinite(embeddings[:, 0])] for n in names]
    centers = [r.mean(axis=0) for r in rows]
    for count in (2, 9):
        table = loop.nearest_of_each_class(embeddings, labels, count=count)
        for c, center in enumerate(centers):
            distances = [
                np.inf if o == c else np.linalg.norm(x - center) for o, x in enumerate(centers)
            ]
            assert table[c].tolist() == np.argsort(distances)[: min(count, 4)].tolist()
    assert loop.nearest_of_each_class(embeddings, np.zeros(20, int)).shape == (1, 0)


def test_batches_after_a_search_hold_near_classes(searched, tmp_path):
    """The classes of a batch are one that is dealt and the one nearest to it."""
    config, folder = searched
    run, table = build(config), np.load(folder / "neighbors" / "14.npy")
    with loop.batches(run, 15, workdir=folder) as batches:
        for _ in range(3):
            first, second = dict.fromkeys(next(batches)["labels"].tolist())
            assert table[first][0] == second
    with pytest.raises(FileNotFoundError, match=r"14\.npy is missing, so the run cannot continue"):
        loop.batches(run, 15, workdir=tmp_path)


def test_a_run_that_is_resumed_after_a_search_ends_the_same(searched, tmp_path):
    config, folder = searched
    shutil.copytree(folder, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "16")
    training.run(config, tmp_path / "run")
    same_run(tmp_path / "run", folder)


def test_a_run_that_ends_before_the_first_search_says_so(tmp_path):
    for steps, is_searched in ((7, False), (8, True)):
        run = build(tiny(tmp_path, **{**_FIELDS, "steps": steps}))
        line = summary.header(run, start.first_state(run))[-1]
        assert ("searched 1 time" in line) == is_searched
        assert ("ends before the nearest classes are searched" in line) != is_searched


def test_a_table_is_kept_as_long_as_a_run_may_start_with_it(tmp_path):
    """The batch after a search of step 7 is the first with its table: a run at 7 searches again."""
    run = build(tiny(tmp_path, **{**_FIELDS, "steps": 30}))
    searches = [7, 14, 21, 28]
    (tmp_path / "neighbors").mkdir()
    for step in searches:
        np.save(tmp_path / "neighbors" / f"{step}.npy", step)
    for oldest in (0, 7, 8, 14, 20, 22, 30):
        loop.remove_neighbors(run, tmp_path, oldest)
        last = {start: max([0, *(s for s in searches if s < start)]) for start in range(oldest, 31)}
        for step, search in last.items():
            sample_fn = loop.sample_fn_at(run, tmp_path, step)
            assert getattr(sample_fn, "keywords", {}).get("neighbors", 0) == search
        left = {int(path.stem) for path in (tmp_path / "neighbors").iterdir()}
        assert left == {s for s in searches if s >= last[oldest]}


def test_a_signal_in_a_search_saves_the_steps_before(searched, tmp_path, monkeypatch):
    config, folder = searched
    original = loop.nearest_of_each_class

    def search(*arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        return original(*arguments)

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(loop, "nearest_of_each_class", search)
        training.run(config, tmp_path / "run")
    with Checkpoints(tmp_path / "run" / "checkpoints") as checkpoints:
        assert checkpoints.steps()[-1] == 7
    training.run(config, tmp_path / "run")
    same_run(tmp_path / "run", folder)
