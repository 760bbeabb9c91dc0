"""Embeddings in TensorBoard's projector."""

import numpy as np
from system import tiny

from dmljax.runs import training


def test_every_evaluation_has_its_embeddings_and_classes_in_the_projector(tmp_path):
    evaluate = {"every": 3, "ks": [1], "clustering": False, "batch_size": 16, "projector": 10}
    config = tiny(tmp_path, steps=6, evaluate=evaluate) | {"runtime": {"devices": 1}}
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
