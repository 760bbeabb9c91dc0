"""A sampler sets the lengths of a run in epochs, and a note in its header."""

import numpy as np
from system import tiny

from dmljax.config import build
from dmljax.data import sampling
from dmljax.data.sampling import published

_RANDOM_COUNT = {"name": "random_class_count", "batch_size": 8}


def test_a_length_in_epochs_of_random_class_count_ends_where_its_epochs_end(tmp_path):
    options = {"evaluate": {"every": "2 epochs"}, "reload_best_at": ["4 epochs"]}
    config = tiny(tmp_path, sampler=_RANDOM_COUNT, steps="10 epochs", seed=3, **options)
    run = build.build(config)
    groups = sampling.group(run.train.labels)
    ends = published.class_count_epoch_ends(groups, batch_size=8, seed=3, epochs=10)
    assert len(set(np.diff(ends).tolist())) > 1  # epochs differ in length
    assert run.steps == ends[-1]
    assert [step for step in range(1, run.steps + 1) if step in run.evaluation_steps] == (
        ends[1::2].tolist()
    )
    assert run.reload_steps == (ends[3],)


def test_a_length_in_epochs_of_class_balanced_is_a_multiple_of_its_epoch(tmp_path):
    run = build.build(tiny(tmp_path, steps="2.5 epochs"))
    assert run.steps == round(2.5 * (32 // 8))


def test_class_balanced_takes_all_classes_and_the_note_says_so(tmp_path):
    sampler = {"name": "class_balanced", "classes": 30, "per_class": 2}
    run = build.build(tiny(tmp_path, sampler=sampler))
    assert run.batch_size == 4 * 2
    assert run.sampler_note.startswith("a batch has all 4 classes instead of 30; ")
