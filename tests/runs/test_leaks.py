"""A test image that is a copy of a training image is found, at the end of a run and later."""

import numpy as np
import pytest
from system import blobs, tiny

from dmljax.report import page
from dmljax.runs import page as run_page
from dmljax.runs import training

TRAIN, TEST = 3, 41  # images; the classes of the first 32 are for training


@pytest.fixture(scope="module")
def leaking(tmp_path_factory):
    """A run with a copy of a training image among its test images."""
    folder = tmp_path_factory.mktemp("leaks")
    path = blobs(folder)
    with np.load(path) as file:
        images, labels = file["images"], file["labels"]
    images[TEST] = images[TRAIN]
    np.savez(path, images=images, labels=labels)
    sampler = {"name": "class_balanced", "classes": 4, "per_class": 8}
    fields = {"steps": 20, "evaluate": {"every": 20, "clustering": {"seeds": [0]}}}
    fields |= {"sampler": sampler, "pictures": "page", "checkpoint": {"every": 20}}
    training.run(tiny(folder, **fields, runtime={"devices": 1}), folder / "run")
    return folder / "run"


def test_the_page_of_a_run_shows_the_copy_and_only_that(leaking):
    check = page.read(leaking / page.FILE)["check"]
    assert [leak["item"] for leak in check["leaks"]] == [TEST - 32]
    assert check["leaks"][0]["train_class"] == "0" and check["leaks"][0]["similarity"] > 0.999
    assert "training images." not in check["leaks_note"]  # all were compared
    looks = page.read(leaking / page.FILE)["looks"]
    assert looks[0]["parts"] == ["1 test image is also among the training images."]


def test_the_page_that_is_made_again_shows_it_too(leaking, monkeypatch):
    check = page.read(run_page.write_again(leaking))["check"]
    assert [leak["item"] for leak in check["leaks"]] == [TEST - 32]
    monkeypatch.setattr(run_page, "_MOST_TRAINING", 5)
    check = page.read(run_page.write_again(leaking))["check"] or {}
    assert not check.get("leaks") or "Compared with 5 of 32 training" in check["leaks_note"]
