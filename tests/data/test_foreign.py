"""A data set, a transform and a sampler of another package work by their dotted names."""

import numpy as np
import pytest

from dmljax.config import registry
from dmljax.data import pipeline
from dmljax.data.sampling import sampler
from dmljax.data.transforms import transform

_MODULE = """
import numpy as np

from dmljax.data.splits import Split, Splits, divide, encode


def dots(*, classes=4) -> Splits:
    images = np.arange(classes * 3 * 64, dtype=np.uint8).reshape(classes * 3, 8, 8, 1)
    labels, names = encode(np.repeat(np.arange(classes), 3))
    return divide(Split(images, labels, names), train=0.5)


def darker(image, rng, *, factor: int = 2):
    return image // factor


def first_images(groups, *, batch_size: int, seed, step):
    return (step + np.arange(batch_size)) % len(groups.labels)
"""


@pytest.fixture
def my_module(tmp_path, monkeypatch):
    (tmp_path / "my_data_module.py").write_text(_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return "my_data_module"


def test_batches_of_foreign_functions(my_module):
    spec = {"name": f"{my_module}:dots", "classes": 6}
    splits = registry.resolve("dataset", spec)()
    assert splits.train.names == ("0", "1", "2") and len(splits.test) == 9
    spec = {"name": f"{my_module}:first_images", "batch_size": 4}
    chosen = registry.resolve("sampler", spec)
    sample_fn = sampler.bind(chosen.func, **chosen.keywords)
    spec = {"name": f"{my_module}:darker", "factor": 4}
    chosen = registry.resolve("transform", spec)
    transform_fn = transform.bind(chosen.func, **chosen.keywords)
    options = dict(sample_fn=sample_fn, transform_fn=transform_fn, seed=0, start=7)
    expected = splits.train.records[[7, 8, 0, 1]] // 4
    for workers in (0, 1):
        with pipeline.train(splits.train, workers=workers, **options) as batches:
            batch = next(batches)
        assert (batch["images"] == expected).all()
        assert batch["labels"].tolist() == [2, 2, 0, 0]
    epoch_end = sampler.epoch_end_fn(sample_fn, splits.train.labels, seed=0)
    assert epoch_end(3) == 3 * (9 // 4)


def test_a_foreign_function_of_another_kind_is_refused(my_module):
    with pytest.raises(ValueError, match="is not a sampler: it must take 1"):
        registry.resolve("sampler", f"{my_module}:darker")
    with pytest.raises(ValueError, match="has no argument 'gamma'"):
        registry.resolve("transform", {"name": f"{my_module}:darker", "gamma": 1})


def test_plain_functions_need_no_binding():
    split = registry.resolve("dataset", "glyphs")().train

    def reversed_rows(image, rng):
        return image[::-1]

    def rows(groups, *, seed, step):
        return np.array([step, step + 1])

    with pipeline.train(split, sample_fn=rows, transform_fn=reversed_rows, seed=0) as batches:
        assert (next(batches)["images"] == split.records[:2, ::-1]).all()
