"""`result.json`, and the digests that tell whether two runs are the same."""

import json
import pathlib
import shutil
import subprocess
import time

import numpy as np
import pytest
from pretrained import VIT, with_weights
from system import blobs, photos, tiny

from dmljax.config import build, fields
from dmljax.data import datasets, digest
from dmljax.files.run_folder import read
from dmljax.runs import training
from dmljax.train import journal, loop


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a finished run that chose its step on held-out classes, and its scores."""
    folder = tmp_path_factory.mktemp("finished")
    scores = training.run(
        _held_out(folder), folder / "run", source="configs/tiny.py:dim=4,margin=1"
    )
    return folder, scores


def _held_out(folder, **fields):
    sampler = {"name": "class_balanced", "classes": 2, "per_class": 4}
    return tiny(folder, held_out=0.5, select="val/MAP@R", sampler=sampler, **fields)


def test_a_result_says_what_was_chosen_and_all_scores(finished):
    folder, scores = finished
    result = read(folder / "run")
    rows = [row for row in journal.read(folder / "run" / "metrics.jsonl") if "val/MAP@R" in row]
    best = max(rows, key=lambda row: (row["val/MAP@R"], -row["step"]))
    assert result.status == "finished" and result.message == "" and result.step == 6
    assert (result.config, result.argument) == ("tiny", "dim=4,margin=1")
    chosen = result.chosen
    assert (chosen.step, chosen.split, chosen.score) == (best["step"], "val", "MAP@R")
    assert chosen.candidates == 2 and "was chosen by val/MAP@R" in chosen.sentence
    assert not chosen.uses_test
    assert result.scores["val/MAP@R"] == best["val/MAP@R"]
    assert {
        f"test/{name}": value for name, value in scores.items()
    }.items() <= result.scores.items()
    assert [row.step for row in result.evaluations] == [3, 6]
    assert all({"test/R@1", "val/R@1"} <= set(row.scores) for row in result.evaluations)
    images = {"images": 16, "classes": 2}
    assert result.data == {"train": images, "val": images, "test": {"images": 32, "classes": 4}}
    assert result.digests == json.loads((folder / "run" / "digests.json").read_text())
    assert result.wall_seconds > 0 and result.devices["platform"] == "cpu"
    assert result.versions["numpy"] == np.__version__
    content = json.loads((folder / "run" / "result.json").read_text())
    assert content["format"] == 1 and content["chosen"]["step"] == best["step"]


def test_choosing_by_test_scores_is_marked(tmp_path, capsys):
    training.run(tiny(tmp_path, reload_best_at=[3, 9]), tmp_path / "run")
    assert "(select=last; the best by " in (out := capsys.readouterr().out)
    assert " reloaded at 3), seed 0" in out  # not at 9, after the last step
    chosen = read(tmp_path / "run").chosen
    assert (chosen.score, chosen.candidates, chosen.uses_test) == (None, 1, True)


def test_a_failed_run_says_why_and_a_later_success_replaces_it(tmp_path):
    config, board = tiny(tmp_path), tmp_path / "run" / "tensorboard"
    board.parent.mkdir()
    board.touch()  # where a folder should be
    with pytest.raises(OSError, match="tensorboard"):
        training.run(config, tmp_path / "run")
    result = read(tmp_path / "run")
    assert result.status == "failed" and "tensorboard" in result.message and not result.scores
    board.unlink()
    training.run(config, tmp_path / "run")
    assert read(tmp_path / "run").status == "finished"


def test_a_damaged_result_is_one_line(finished, tmp_path):
    shutil.copytree(finished[0] / "run", tmp_path / "run")
    (tmp_path / "run" / "result.json").write_text("{")
    with pytest.raises(ValueError, match=r"result.json is damaged .*writes it again"):
        read(tmp_path / "run")


def test_a_run_goes_on_after_its_data_has_moved(finished, tmp_path):
    folder, _ = finished
    shutil.copytree(folder / "run", tmp_path / "run")
    metrics = (folder / "run" / "metrics.jsonl").read_bytes()
    shutil.copy(blobs(folder), tmp_path / "moved.npz")
    config = _held_out(folder)
    config["dataset"] |= {"path": str(tmp_path / "moved.npz")}
    training.run(config, tmp_path / "run")
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == metrics
    saved = json.loads((tmp_path / "run" / "config.json").read_text())
    assert saved["dataset"]["path"] == str(tmp_path / "moved.npz")


def test_other_data_in_the_same_place_are_another_run(finished, tmp_path):
    folder, _ = finished
    shutil.copytree(folder / "run", tmp_path / "run")
    with np.load(blobs(folder)) as arrays:
        images, labels = arrays["images"].copy(), arrays["labels"]
    images[5, 3, 3] ^= 1
    np.savez(tmp_path / "other.npz", images=images, labels=labels)
    config = _held_out(folder)
    config["dataset"] |= {"path": str(tmp_path / "other.npz")}
    with pytest.raises(ValueError, match=r"the data set: its digest was \w{12} and is now \w{12}"):
        training.run(config, tmp_path / "run")


def test_moved_weights_are_the_same_run_and_changed_ones_are_not(tmp_path):
    (tmp_path / "moved").mkdir()
    here, there, other = (
        tiny(tmp_path, net=with_weights(folder, VIT | {"depth": 1}, seed=seed))
        for folder, seed in ((tmp_path, 7), (tmp_path / "moved", 7), (tmp_path, 8))
    )
    assert build.digests_of(here) == build.digests_of(there)
    digests = {build.digests_of(config).run for config in (here, other, tiny(tmp_path))}
    assert len(digests) == 3
    training.run(here, tmp_path / "run")
    pathlib.Path(here["net"]["weights"]).unlink()
    training.run(there, tmp_path / "run")
    with pytest.raises(ValueError, match=r"the file of weights: its digest was \w{12} and"):
        training.run(other, tmp_path / "run")


def test_digests_know_what_can_change_a_result(tmp_path):
    config = tiny(tmp_path)
    one = build.digests_of(config)
    assert len(one.run) == 64 and int(one.run, 16) and one.weights is None
    for changes in ({"runtime": {"workers": 3}}, {"notes": "x"}, {"pictures": "page"}):
        assert build.digests_of(config | changes) == one
    assert build.digests_of(config | {"seed": 0, "held_out": 0.0}) == one  # the defaults
    for changes in ({"seed": 1}, {"steps": 7}, {"unreadable": "skip"}):
        other = build.digests_of(config | changes)
        assert other.run != one.run and other.config != one.config and other.data == one.data
    assert fields.digests_of(build.build(config).config, data=one.data) == one
    assert fields.digests_of(build.build(config).config, data="0").run != one.run


def test_the_digest_of_folders_follows_content_and_not_place(tmp_path):
    root = photos(tmp_path)
    one = digest.digest(datasets.folder(root=root))
    moved = shutil.move(root, tmp_path / "elsewhere")
    assert digest.digest(datasets.folder(root=moved)) == one
    assert digest.digest(datasets.folder(root=moved, split=0.25)) != one
    files = sorted((tmp_path / "elsewhere").rglob("*.png"))
    files[0].write_bytes(files[0].read_bytes() + b"0")
    changed = digest.digest(datasets.folder(root=moved))
    assert changed != one
    files[1].rename(files[1].with_name("zzz.png"))
    assert digest.digest(datasets.folder(root=moved)) not in (one, changed)


def test_code_is_the_revision_of_a_checkout():
    revision = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=str(loop.__file__)[:-7]
    ).stdout.strip()
    code = journal.code()
    assert code is None if not revision else code["revision"] == revision


def test_scores_are_on_the_disk_within_seconds(tmp_path):
    """A run that is killed has them, as it has the lines of metrics.jsonl."""
    log = journal.Journal(tmp_path, step=0, total=9)
    log.evaluation(3, {"R@1": 0.5}, split="test", shown="R@1")
    [file] = (tmp_path / "tensorboard").iterdir()
    end = time.monotonic() + 20
    while b"test/R_1" not in file.read_bytes():
        assert time.monotonic() < end
        time.sleep(0.05)
    log.close()


def test_every_evaluation_has_its_embeddings_and_classes_in_the_projector(tmp_path):
    evaluate = {"every": 3, "ks": [1], "clustering": None, "batch_size": 16}
    pictures = {"projector": 10}
    config = tiny(tmp_path, steps=6, evaluate=evaluate, pictures=pictures) | {
        "runtime": {"devices": 1}
    }
    training.run(config, tmp_path / "run")
    board = tmp_path / "run" / "tensorboard"
    text = (board / "projector_config.pbtxt").read_text()
    tables = {}
    for step in ("00003", "00006"):
        folder = board / step / "test"
        tables[step] = np.loadtxt(folder / "tensors.tsv")
        classes = (folder / "metadata.tsv").read_text().splitlines()
        assert tables[step].shape == (10, 4) and len(classes) == 10
        np.testing.assert_allclose(np.linalg.norm(tables[step], axis=1), 1, atol=1e-4)
        assert f"{step}/test/tensors.tsv" in text.replace("\\", "/")
    # The same images, embedded by two states of the net.
    assert np.abs(tables["00003"] - tables["00006"]).max() > 1e-3
