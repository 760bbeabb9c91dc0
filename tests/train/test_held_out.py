"""Classes that are held out of training choose the step whose scores are reported."""

import pytest
from system import tiny

from dmljax.config import build
from dmljax.runs import training


def test_at_least_two_classes_are_held_out(tmp_path):
    """With a single class every score would be 1. `tiny` has four training classes."""
    run = build.build(tiny(tmp_path, held_out=0.2, sampler={"name": "uniform", "batch_size": 8}))
    assert len(run.train.names) == len(run.held_out.names) == 2
    assert not set(run.train.names) & set(run.held_out.names)


def test_too_few_classes_name_the_flags_to_type(tmp_path):
    config = tiny(tmp_path, held_out=0.2)
    config["dataset"] |= {"split": 3 / 8}
    message = r"held_out=0.2 of 3 training classes: .*--config.held_out=None --config.select=last"
    with pytest.raises(ValueError, match=message):
        build.build(config)


@pytest.mark.parametrize("share", [0.9, 0.8])
def test_a_share_that_leaves_too_few_classes_to_train_on_can_be_smaller(tmp_path, share):
    config = tiny(tmp_path, held_out=share, sampler={"name": "uniform", "batch_size": 8})
    message = rf"held_out={share} of 4 training classes: .* such as --config.held_out=0.2"
    with pytest.raises(ValueError, match=message):
        build.build(config)


def test_the_end_of_a_run_says_which_step_was_chosen_and_why(tmp_path, capsys):
    config = tiny(tmp_path, held_out=0.5, select="val/MAP@R")
    config |= {"sampler": {"name": "class_balanced", "classes": 2, "per_class": 4}}
    training.run(config, tmp_path / "run")
    printed = capsys.readouterr().out
    assert "images of 2 held-out classes (their MAP@R chooses the checkpoint), " in printed
    assert "was chosen by val/MAP@R" in printed


def test_held_out_classes_that_choose_nothing_are_named_in_the_header(tmp_path, capsys):
    config = tiny(tmp_path, held_out=0.5, steps=1)
    config |= {"sampler": {"name": "class_balanced", "classes": 2, "per_class": 4}}
    training.run(config, tmp_path / "run")
    printed = capsys.readouterr().out
    assert " images of 2 held-out classes, " in printed and "chooses" not in printed
