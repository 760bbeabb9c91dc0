"""Scores, and embeddings in the projector, of TensorBoard."""

import time

import numpy as np
from system import tiny

from dmljax.runs import training
from dmljax.train.journal import Journal


def test_scores_are_on_the_disk_within_seconds(tmp_path):
    """A run that is killed has them, as it has the lines of metrics.jsonl."""
    journal = Journal(tmp_path, step=0, total=9)
    journal.evaluation(3, {"R@1": 0.5}, split="test", shown="R@1")
    [file] = (tmp_path / "tensorboard").iterdir()
    end = time.monotonic() + 20
    while b"test/R_1" not in file.read_bytes():
        assert time.monotonic() < end
        time.sleep(0.05)
    journal.close()


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
