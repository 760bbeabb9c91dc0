"""Batches of the nearest classes: searched while a run trains, and the same after a kill."""

import os
import signal

import numpy as np
import pytest
from processes import LONG, same_after_a_kill
from system import tiny

from dmljax.config.build import build
from dmljax.runs import summary, training
from dmljax.train import initial_state, loop, neighbors
from dmljax.train.checkpoints import Checkpoints

_FIELDS = {
    **LONG,
    "sampler": {"name": "nearest_classes", "classes": 2, "per_class": 4, "near": 1, "every": 7},
}


def test_neighbors_of_classes_are_those_of_a_loop():
    rng = np.random.default_rng(0)
    labels = rng.permutation(np.repeat([3, 5, 8, 9, 12], 4))
    embeddings = rng.normal(size=(20, 3)).astype(np.float32)
    embeddings[2] = np.nan
    names = np.unique(labels)
    rows = [embeddings[(labels == n) & np.isfinite(embeddings[:, 0])] for n in names]
    centers = [r.mean(axis=0) for r in rows]
    for count in (2, 9):
        table = neighbors.nearest_of_each_class(embeddings, labels, count=count)
        for c, center in enumerate(centers):
            distances = [
                np.inf if o == c else np.linalg.norm(x - center) for o, x in enumerate(centers)
            ]
            assert table[c].tolist() == np.argsort(distances)[: min(count, 4)].tolist()
    assert neighbors.nearest_of_each_class(embeddings, np.zeros(20, int)).shape == (1, 0)


def test_batches_after_a_search_hold_near_classes(tmp_path, capsys):
    """The classes of a batch are one that is dealt and the one nearest to it."""
    config = tiny(tmp_path, **{**_FIELDS, "steps": 10})
    run_folder = tmp_path / "run"
    training.run(config, run_folder)
    run = build(config)
    assert "the nearest classes are searched 1 time" in capsys.readouterr().out
    table = np.load(run_folder / "neighbors" / "7.npy")
    with loop.batches(run, 8, workdir=run_folder) as batches:
        for _ in range(3):
            first, second = dict.fromkeys(next(batches)["labels"].tolist())
            assert table[first][0] == second
    with pytest.raises(FileNotFoundError, match=r"7\.npy is missing, so the run cannot continue"):
        (run_folder / "neighbors" / "7.npy").unlink()
        loop.batches(run, 8, workdir=run_folder)


def test_a_run_that_ends_before_the_first_search_says_so(tmp_path):
    for steps, is_searched in ((7, False), (8, True)):
        run = build(tiny(tmp_path, **{**_FIELDS, "steps": steps}))
        line = summary.header(run, initial_state.first_state(run))[-1]
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
        neighbors.remove_old(run, tmp_path, oldest)
        last = {start: max([0, *(s for s in searches if s < start)]) for start in range(oldest, 31)}
        for start, search in last.items():
            sample_fn = neighbors.sample_fn_at(run, tmp_path, start)
            assert getattr(sample_fn, "keywords", {}).get("neighbors", 0) == search
        left = {int(path.stem) for path in (tmp_path / "neighbors").iterdir()}
        assert left == {s for s in searches if s >= last[oldest]}


def test_a_signal_in_a_search_saves_the_steps_before(tmp_path, monkeypatch):
    config = tiny(tmp_path, **{**_FIELDS, "steps": 10, "checkpoint": {"every": 10}})
    original = neighbors.refresh

    def refresh(*arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        return original(*arguments)

    monkeypatch.setattr(neighbors, "refresh", refresh)
    with pytest.raises(SystemExit):
        training.run(config, tmp_path / "run")
    with Checkpoints(tmp_path / "run" / "checkpoints") as checkpoints:
        assert checkpoints.steps() == [7]


def test_a_killed_run_searches_and_ends_the_same(tmp_path):
    config = tiny(tmp_path, **_FIELDS)
    out = same_after_a_kill(tmp_path, config, 24)
    assert out.count("the nearest classes were searched") == 7
    # The oldest checkpoint that is kept is that of step 25. Older tables are removed.
    assert min(int(p.stem) for p in (tmp_path / "killed" / "neighbors").iterdir()) == 21
