"""A config is read once, and every choice in it is checked."""

import ast
import pathlib

import numpy as np
import pytest
from PIL import Image
from system import tiny

from dmljax.config import data as timing
from dmljax.config import fields, method, registry
from dmljax.config.build import build
from dmljax.config.fields import options_of
from dmljax.data import sampling
from dmljax.data.sampling import sampler as samplers
from dmljax.runs import training

CONFIG = pathlib.Path(registry.__file__).parent
# These modules turn the plain data of a config into options. Others use the options.
READERS = {CONFIG / name for name in ("fields.py", "files.py")}
READERS.add(CONFIG.parent / "runs" / "ladder.py")  # makes configs of its steps
FILES = {p for name in ("config", "train", "runs") for p in (CONFIG.parent / name).glob("*.py")}


@pytest.mark.parametrize("file", sorted(FILES - READERS), ids=lambda file: file.stem)
def test_no_other_file_reads_a_field_of_a_config(file):
    nodes = [n for n in ast.walk(ast.parse(file.read_text())) if hasattr(n, "value")]
    fields = [n for n in nodes if isinstance(n, ast.Subscript) or getattr(n, "attr", "") == "get"]
    owners = [ast.unparse(node.value) for node in fields]
    assert not [owner for owner in owners if owner.rpartition(".")[2] == "config"]


def test_a_loss_that_does_not_fit_the_method_is_refused_before_data_are_read(tmp_path):
    nowhere = tiny(tmp_path) | {"dataset": {"name": "npz", "path": "nowhere.npz"}}
    arcface = nowhere | {"loss": {"name": "arcface"}}
    advice = "--config.method=proxies, or another loss"
    with pytest.raises(ValueError, match=f"loss arcface compares with proxies.* pairs .*{advice}"):
        method.functions_of(options_of(fields.complete(arcface)))
    method.functions_of(options_of(fields.complete(arcface | {"method": "proxies"})))
    with pytest.raises(ValueError, match=r"the loss triplet takes no proxies.*config.method=pairs"):
        method.functions_of(options_of(fields.complete(nowhere | {"method": "proxies"})))
    with pytest.raises(ValueError, match=advice):
        build(tiny(tmp_path, loss="arcface"))


def test_what_would_fail_in_the_first_step_is_refused_before_a_folder_is_written(tmp_path):
    memory = {"name": "pairs", "dim": 4, "memory": 7}  # and a batch has 8 images
    no_number = {"name": "contrastive", "reduce_fn": None}
    no_rows = {"name": "pairs", "dim": 0}
    for part, words in (
        ({"method": memory}, "method.memory=7 cannot hold a batch of 8 images: .* 8, or 0"),
        ({"loss": no_number}, "loss.reduce_fn=None .* training needs one number: leave it out"),
        ({"method": no_rows}, "method.dim=0: an embedding has 1 or more dimensions"),
    ):
        with pytest.raises(ValueError, match=words):
            training.run(tiny(tmp_path, **part), tmp_path / "run")
        assert not (tmp_path / "run").exists()
    build(tiny(tmp_path, method=memory | {"memory": 8}))


def _selection(folder, **fields):
    evaluate = {"every": 3, "ks": [1, 2], "clustering": {"seeds": [0]}, "batch_size": 16}
    evaluate |= fields.pop("evaluate", {})
    return build(tiny(folder, evaluate=evaluate, **fields)).selection


def test_select_names_any_score_of_any_split(tmp_path):
    held_out = {
        "held_out": 0.5,
        "sampler": {"name": "class_balanced", "classes": 2, "per_class": 4},
    }
    assert _selection(tmp_path, select="val", **held_out).key == "val/R@1"
    assert _selection(tmp_path, select="val/MAP@R", **held_out).key == "val/MAP@R"
    assert _selection(tmp_path, select="test/NMI").key == "test/NMI"
    assert _selection(tmp_path).is_last
    with pytest.raises(ValueError, match=r"no score 'MAP': did you mean 'MAP@R' or 'mAP'"):
        _selection(tmp_path, select="test/MAP")
    with pytest.raises(ValueError, match="no score 'NMI'"):
        _selection(tmp_path, select="test/NMI", evaluate={"clustering": None})
    with pytest.raises(ValueError, match=r"select must be 'last', or .*'val/R@1'.*not 'R@1'"):
        _selection(tmp_path, select="R@1")
    with pytest.raises(ValueError, match=r"needs held-out classes: --config.held_out=0.2"):
        _selection(tmp_path, select="val/R@1")
    with pytest.raises(ValueError, match="no score 'R@1'"):  # by which the best is reloaded
        _selection(tmp_path, reload_best_at=[3], evaluate={"metrics": ["map_at_r"]})


def test_metrics_are_chosen_by_name(tmp_path):
    evaluate = {"ks": [1, 4], "metrics": ["nmi", "recall_at_k", {"name": "recall_at_k", "k": 9}]}
    scores = build(tiny(tmp_path, evaluate=evaluate)).metrics
    assert scores.ks == (1, 4, 9)
    assert list(scores.clustering_fns) == ["NMI"] and not scores.ranking_fns
    with pytest.raises(ValueError, match=r"no metric 'xyz'.* such as .*dmljax list metrics"):
        build(tiny(tmp_path, evaluate={"metrics": ["xyz"]}))


def _ends(sample_fn, labels, **options):
    return samplers.epoch_end_fn(samplers.bind(sample_fn, **options), labels, seed=0)


def test_epochs_end_where_those_of_the_sampler_end():
    labels = np.repeat(np.arange(12), 30)
    epoch_end = _ends(sampling.random_class_count, labels, batch_size=12)
    ends = [round(epoch_end(n)) for n in range(9)]
    assert len(set(np.diff(ends).tolist())) > 1  # of different lengths
    assert timing.steps("8 epochs", epoch_end=epoch_end) == ends[8]
    assert [timing.steps(n, epoch_end=epoch_end) for n in ("0.001 epochs", 0)] == [1, 0]
    steps = timing.every("2 epochs", epoch_end=epoch_end, total=ends[8])
    assert sorted(steps) == ends[2::2]
    plan = _ends(sampling.class_balanced, labels, classes=3, per_class=5)
    every = timing.every("2 epochs", epoch_end=plan, total=200)
    assert sorted(every) == list(range(48, 201, 48))
    assert list(timing.every("0.5 epochs", epoch_end=plan, total=40)) == [12, 24, 36]
    assert list(timing.every(15, epoch_end=plan, total=40)) == [15, 30]


def _of_folders(folder, counts, **dataset):
    """A config of a folder with so many images in the folders that `counts` names."""
    for place, count in counts.items():
        (folder / "photos" / place).mkdir(parents=True)
        for i in range(count):
            Image.new("RGB", (12, 12)).save(folder / "photos" / place / f"{i}.png")
    dataset = {"name": "folder", "root": str(folder / "photos")} | dataset
    sampler = {"name": "class_balanced", "classes": 1, "per_class": 1}
    return tiny(folder, dataset=dataset, sampler=sampler)


@pytest.mark.parametrize(
    ("counts", "fields", "message"),
    [
        ({"a": 3}, {}, "no training images, and 1 class in the other split"),
        (dict.fromkeys("abcd", 2), {"split": 0.99}, r"no test images, and 4 .* than 0.99"),
        (dict.fromkeys("abcd", 1), {}, "nothing to score .*: no image has another one"),
        ({"train/a": 2, "query/b": 2, "gallery/c": 2}, {}, "no query has an image of its class in"),
        (
            {"train/a": 2, "train/b": 2},
            {},
            r"photos has train/ and no test/: add it, .* or name",
        ),
        ({"test/a": 2, "test/b": 2}, {}, r"photos has test/ and no train/: add it, .* or name"),
    ],
)
def test_splits_without_images_or_positives_are_refused(tmp_path, counts, fields, message):
    with pytest.raises(ValueError, match=message) as error:
        build(_of_folders(tmp_path, counts, **fields))
    assert "\n" not in str(error.value)


def loss_of_a_step(embeddings, labels, step):
    """Takes the step without a default."""
    return (embeddings**2).mean() * step


def test_a_loss_of_ones_own_may_need_the_step(tmp_path):
    build(tiny(tmp_path, loss="config.test_build:loss_of_a_step"))


def test_a_run_without_an_interval_saves_each_fifth_of_its_steps(tmp_path):
    no_interval = {"evaluate": {"batch_size": 16}, "checkpoint": {}}
    run = build(tiny(tmp_path, steps=60, **no_interval))
    assert list(run.checkpoint_steps) == [12, 24, 36, 48, 60] and list(run.evaluation_steps) == [60]
    assert list(build(tiny(tmp_path, steps=0, **no_interval)).checkpoint_steps) == []
    one = build(tiny(tmp_path, steps=60, **no_interval | {"evaluate": {"every": 30}}))
    assert list(one.checkpoint_steps) == [30, 60]
