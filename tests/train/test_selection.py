"""Which step counts, when a run ends early, and which classes choose."""

import shutil

import numpy as np
import pytest
from system import photos, tiny

from dmljax.config.build import build
from dmljax.data import datasets
from dmljax.files import run_folder as results
from dmljax.runs import folder as run_folder
from dmljax.runs import summary, training
from dmljax.train import journal
from dmljax.train.loop import is_out_of_patience
from dmljax.train.start import first_state

HELD_OUT = {"held_out": 0.5, "sampler": {"name": "class_balanced", "classes": 2, "per_class": 4}}
# From harmless to harmful, so that an early step is the best.
HARMFUL = {
    "optimizer": {"name": "sgd", "rate": 100.0},
    "schedule": {"name": "constant", "warmup": 6},
    "evaluate": {"every": 1, "ks": [1], "clustering": None, "batch_size": 16},
    "checkpoint": {"keep": 9},
    "runtime": {"devices": 1},
    "log_every": 1,
}


@pytest.mark.parametrize("patience", [0, 1, 2, 5])
def test_patience_is_counted_in_evaluations_since_the_best(patience):
    rng = np.random.default_rng(patience)
    for _ in range(50):
        scores = (rng.integers(0, 4, rng.integers(1, 9)) / 4).tolist()
        best = scores.index(max(scores))  # the first of equals
        since = len(scores[best + 1 :])
        assert is_out_of_patience(scores, patience) == (since > patience)
    assert not is_out_of_patience([3.0, 2.0, 1.0], None) and not is_out_of_patience([], 0)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run of 30 steps that ends early, its folder, and its evaluations {step: score}."""
    folder = tmp_path_factory.mktemp("stopped")
    config = tiny(folder, **HARMFUL, **HELD_OUT, steps=30, select="val/MAP@R", patience=2)
    training.run(config, folder / "run")
    rows = journal.read(folder / "run" / "metrics.jsonl")
    return config, folder, {row["step"]: row["val/MAP@R"] for row in rows if "val/MAP@R" in row}


def test_a_run_ends_when_its_best_evaluation_is_too_old(stopped):
    _, folder, scores = stopped
    best = max(scores, key=lambda step: (scores[step], -step))
    assert max(scores) == best + 3 < 30
    result = results.read(folder / "run")
    assert (result.step, result.chosen.step, result.chosen.candidates) == (best + 3, best, best + 3)
    assert result.scores["val/MAP@R"] == scores[best]


def test_the_same_command_ends_at_the_same_step_if_the_last_two_checkpoints_are_lost(
    stopped, tmp_path
):
    config, folder, scores = stopped
    shutil.copytree(folder / "run", tmp_path / "run")
    for step in (max(scores), max(scores) - 1):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / str(step))
    training.run(config, tmp_path / "run")
    assert results.read(tmp_path / "run").step == max(scores)
    files = [parent / "run" / "metrics.jsonl" for parent in (tmp_path, folder)]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_patience_needs_a_score(tmp_path):
    with pytest.raises(ValueError, match=r"patience=3 needs a score .*--config.select=val/MAP@R"):
        build(tiny(tmp_path, patience=3))


def test_a_run_without_evaluations_does_not_open_its_newest_step(tmp_path):
    config = tiny(
        tmp_path, select="test/R@1", evaluate={"every": 4, "ks": [1], "clustering": {"seeds": [0]}}
    )
    training.run(config, tmp_path / "run")
    rows = journal.read(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows if "test/R@1" in row] == [4, 6]  # and the last step
    for step in (4, 6):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / str(step))
    with pytest.raises(
        ValueError, match=r"none of the checkpoints \[2\] has been evaluated.*--step"
    ):
        run_folder.reopen(tmp_path / "run")
    assert int(run_folder.reopen(tmp_path / "run", step=2)[1].step) == 2


def nothing(ranks):
    """A score that exists for no query."""
    return np.full(len(ranks), np.nan)


def test_a_score_that_does_not_exist_chooses_nothing(tmp_path):
    metrics = [{"name": "recall_at_k", "k": 1}, "test_selection:nothing"]
    config = tiny(tmp_path, select="test/nothing", evaluate={"every": 2, "metrics": metrics})
    with pytest.raises(ValueError, match=r"select='test/nothing': test has no nothing"):
        training.run(config, tmp_path / "run")


def _names(config):
    run = build(config)
    return [list(split.names) for split in (run.train, run.held_out, run.test)]


def test_folds_hold_out_classes_of_the_training_split(tmp_path):
    config = tiny(tmp_path, sampler={"name": "class_balanced", "classes": 2, "per_class": 4})

    def names(index, **options):
        return _names(config | {"held_out": {"index": index, "count": 2, **options}})

    assert names(0)[:2] == [["0", "1"], ["2", "3"]]
    assert names(1)[:2] == [["2", "3"], ["0", "1"]]
    assert names(1)[2] == ["4", "5", "6", "7"]
    shuffled = [names(index, seed=5)[1] for index in (0, 1)]
    assert sorted(shuffled[0] + shuffled[1]) == ["0", "1", "2", "3"]
    assert shuffled[0] not in (["0", "1"], ["2", "3"])
    select = build(config | {"held_out": {"count": 2}, "select": "val/MAP@R"}).selection
    assert select.key == "val/MAP@R"


def test_a_score_of_which_less_is_better_chooses_no_step(tmp_path):
    config = tiny(tmp_path, select="test/class_deviation")
    config["evaluate"] |= {"metrics": ["all", "class_deviation"]}
    with pytest.raises(ValueError, match=r"would choose the step with the highest class_dev"):
        build(config)


def test_what_folds_refuse(tmp_path):
    with pytest.raises(ValueError, match=r"held_out.index=2 must be one of 0 to 1"):
        build(tiny(tmp_path, held_out={"name": "fold", "index": 2, "count": 2}))
    with pytest.raises(ValueError, match=r"held_out.count=3 of 4 classes: choose 2 to 2"):
        build(tiny(tmp_path, held_out={"count": 3}))
    with pytest.raises(ValueError, match=r"held_out has no field 'fraction'. It has: count, index"):
        build(tiny(tmp_path, held_out={"name": "fold", "fraction": 0.5}))
    with pytest.raises(ValueError, match=r"held_out.name must be 'last' or 'fold', got 'folds'"):
        build(tiny(tmp_path, held_out="folds"))


def test_held_out_images_are_queries_and_gallery_where_the_test_images_are(tmp_path):
    root = photos(
        tmp_path, lambda i, c: f"{'train' if c < 4 else ('query', 'gallery')[i % 2]}/c{c}"
    )
    config = tiny(tmp_path, dataset={"name": "folder", "root": str(root)}, steps=1, **HELD_OUT)
    run = build(config)
    assert run.test.query.sum() == run.test.gallery.sum() == 16
    assert run.held_out.query.tolist() == [False, True] * 8
    assert run.held_out.gallery.tolist() == [True, False] * 8
    header = summary.header(run, first_state(run))[-1]
    assert "16 images of 2 held-out classes (8 of them queries)" in header


def test_a_share_of_the_images_or_of_the_classes(tmp_path):
    def train(**shares):
        config = tiny(tmp_path, seed=shares.pop("seed", 0))
        config["sampler"] = {"name": "uniform", "batch_size": 8}
        config["dataset"] |= shares
        run = build(config)
        assert len(run.test) == 32
        return run.train

    whole = datasets.npz(path=tiny(tmp_path)["dataset"]["path"], split=0.5).train
    images, classes = train(image_fraction=0.5), train(class_fraction=0.5)
    assert np.bincount(images.labels).tolist() == [4] * 4 and images.names == whole.names
    assert np.bincount(classes.labels).tolist() == [8] * 2 and set(classes.names) < set(whole.names)
    assert np.bincount(train(image_fraction=0.01).labels).tolist() == [2] * 4

    def pixels(split):
        return {record.tobytes() for record in split.records}

    assert pixels(train(image_fraction=0.25)) < pixels(images) < pixels(whole)
    assert pixels(train(image_fraction=0.5, class_fraction=0.5)) < pixels(images)
    assert pixels(train(image_fraction=0.5, seed=1)) != pixels(images)
    assert pixels(train(image_fraction=0.5)) == pixels(images)
    with pytest.raises(ValueError, match=r"share of the classes must be above 0 .*not 1.5"):
        train(class_fraction=1.5)
    with pytest.raises(ValueError, match=r"image_fraction must be a number, got 'half'"):
        train(image_fraction="half")


def test_at_least_two_classes_are_held_out(tmp_path):
    """With a single class every score would be 1. `tiny` has four training classes."""
    run = build(tiny(tmp_path, held_out=0.2, sampler={"name": "uniform", "batch_size": 8}))
    assert len(run.train.names) == len(run.held_out.names) == 2
    assert not set(run.train.names) & set(run.held_out.names)


def test_too_few_classes_name_the_flags_to_type(tmp_path):
    config = tiny(tmp_path, held_out=0.2)
    config["dataset"] |= {"split": 3 / 8}
    message = r"held_out=0.2 of 3 training classes: .*--config.held_out=None --config.select=last"
    with pytest.raises(ValueError, match=message):
        build(config)


def test_a_share_that_leaves_too_few_classes_to_train_on_can_be_smaller(tmp_path):
    config = tiny(tmp_path, held_out=0.8, sampler={"name": "uniform", "batch_size": 8})
    message = r"held_out=0.8 of 4 training classes: .*--config.held_out=0.2"
    with pytest.raises(ValueError, match=message):
        build(config)


def test_the_header_says_what_the_held_out_classes_choose(tmp_path):
    for select, words in (("val/MAP@R", " (their MAP@R chooses the checkpoint), "), ("last", ", ")):
        run = build(tiny(tmp_path, **HELD_OUT, select=select))
        header = summary.header(run, first_state(run))[-1]
        assert f"images of 2 held-out classes{words}" in header
