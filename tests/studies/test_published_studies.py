"""Every file in studies/: its rows build, and run small on images in the layout of their set."""

import ast
import functools
import pathlib
import re

import jax
import numpy as np
import pytest
from test_configs import LAYOUTS

from dmljax import at_hand
from dmljax.config import files as config_files
from dmljax.config.build import build
from dmljax.data.sampling.base import group
from dmljax.data.sampling.published import chunks_epoch_length
from dmljax.runs import training
from dmljax.studies import plan, study_file
from dmljax.train import evaluation

ROOT = pathlib.Path(__file__).parents[2]

FOUR_SETS = [f"dataset={name}" for name in ("cub200", "cars196", "sop", "inshop")]
PHOTO_SETS = FOUR_SETS[:2]
ARGUMENTS = {
    "abe_tables": [
        *(f"table={n}" for n in (1, 2, 3, "figure4", "figure7")),
        *(f"table={n},{name}" for n, name in zip((4, 5), PHOTO_SETS, strict=True)),
        "table=others,dataset=sop",
        "table=ensembles",
        "table=ensembles,dataset=sop,seeds=5",
    ],
    "augmentation": [],  # its rows train the weights that are on the machine
    "backbones": [],  # its rows are the weights that are on the machine
    "dvml_report": ["", "mode=code_1200", "mode=report"],
    "dvml_tables": [*FOUR_SETS[:3], "table=deviation,dataset=sop"],
    "five_methods": ["", "data=omniglot8,size=64"],
    "glyphs": [""],
    "graph_ablations": [
        *FOUR_SETS,
        "dataset=cars196,published=False,held_out=0.2",
        "table=heads",
        "table=sublayers",
        *(f"table=refined,{name}" for name in PHOTO_SETS),
    ],
    "graph_samples": FOUR_SETS[:1],
    "graph_search": [PHOTO_SETS[0], "attention=gatv2"],
    "graph_selection": PHOTO_SETS[:1],
    "graph_transfer": ["source=cars196,target=cub200", "source=cub200,target=cars196"],
    "hard_classes": ["", "loss=ntxent"],
    "ladder": [],  # its rows train the weights that are on the machine
    "mnist_plane": [""],
    "reality_check": [
        *(f"loss={loss}" for loss in ("multi_similarity_miner", "soft_triple", "arcface")),
        FOUR_SETS[2],
    ],
    "review_tinyimagenet": [""],
    "small_ladder": ["data=omniglot8", "pretrain=omniglot8,data=glyphs"],
}
FILES = sorted((ROOT / "studies").glob("*.py"))
STUDIES = [f"{file}:{argument}" for file in FILES for argument in ARGUMENTS.get(file.stem, [])]
each_study = pytest.mark.parametrize("name", STUDIES, ids=lambda n: pathlib.Path(n).name)


def test_every_file_is_here():
    assert {file.stem for file in FILES} == set(ARGUMENTS)


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_its_docstring_has_the_command(file):
    text = ast.get_docstring(ast.parse(file.read_text()))
    assert re.search(rf"dmljax study run studies/{file.name}", text)


@each_study
def test_the_config_of_every_row_is_read(name):
    study = study_file.read(name)
    configs = plan.check_rows(study)
    own_runs = [row for row in study.rows if row.runs_of is None and not row.best_of]
    assert set(configs) == {row.name for row in own_runs}
    for row in study.published.values():
        for score, value in row.items():  # a ratio may be above 100 %
            assert 0 < value <= (100 if score != "class_deviation" else 110)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("abe_tables.py:table=1,dataset=cub200", "table=1 needs dataset=cars196, not dataset=cub"),
        ("dvml_tables.py:dataset=inshop", "dataset is one of cars196, cub200, sop, not 'inshop'"),
    ],
)
def test_published_values_of_another_set_are_refused(name, message):
    with pytest.raises(ValueError, match=message):
        study_file.read(str(ROOT / "studies" / name))


def test_backbones_are_rows_with_the_scores_of_the_frozen_net(tmp_path, monkeypatch):
    file = tmp_path / "weights.pth"
    file.write_bytes(b"weights")
    here = {name: file for name in ("dinov2_s14", "clip_b16", "mobilenet_v2")}
    monkeypatch.setattr(at_hand, "weights_at_hand", lambda folder=None: here)
    for dataset, value in (("cub200", 79.7), ("inshop", 33.4)):
        study = study_file.read(f"{ROOT}/studies/backbones.py:dataset={dataset}")
        configs = plan.check_rows(study)
        assert list(configs) == list(here)
        assert configs["clip_b16"]["net"]["name"] == "clip_b16"
        assert {c["dataset"]["name"] for c in configs.values()} == {dataset}
        assert all(c["select"] == "last" for c in configs.values())
        assert study.published["dinov2_s14"] == {"frozen/R@1": value}
        transforms = [c[k] for c in configs.values() for k in ("transform", "eval_transform")]
        assert not any(transform["scaled_decode"] for transform in transforms)
    two = study_file.read(f"{ROOT}/studies/backbones.py:dataset=folder,nets=clip_b16+dinov2_s14")
    assert [row.name for row in two.rows] == ["clip_b16", "dinov2_s14"] and not two.published
    monkeypatch.setattr(at_hand, "weights_at_hand", lambda folder=None: {})
    with pytest.raises(ValueError, match="no weights of a backbone are on this machine"):
        study_file.read(f"{ROOT}/studies/backbones.py")
    with pytest.raises(ValueError, match=r"dataset is one of cub200, .* not 'cub'"):
        study_file.read(f"{ROOT}/studies/backbones.py:dataset=cub")


def test_the_samplers_and_not_the_files_say_how_long_70_epochs_are(root_of):
    """Rows on shares of the images have as many steps as the row on all of them."""
    study = study_file.read(f"{ROOT / 'studies' / 'graph_samples.py'}:dataset=cars196")
    runs = {}
    for row in study.rows:
        config = _small(row, root_of, steps="70 epochs")
        config["evaluate"]["every"] = None
        runs[row.name] = build(config)
    labels = runs["all"].train.labels
    length = chunks_epoch_length(group(labels), classes=2, per_class=2)
    assert length != len(labels) // 4, "the sampler needs more batches than images / batch"
    assert {run.steps for run in runs.values()} == {70 * length}
    assert len(runs["1/8 of the classes"].train) < len(labels) / 4


def test_rankings_of_the_review_are_cut_as_published():
    study = study_file.read(str(ROOT / "studies" / "review_tinyimagenet.py"))
    computed = {name for c in plan.check_rows(study).values() for name in _cut_names(c)}
    assert {score for score in study.scores if "@max" in score} == computed


def _cut_names(config):
    return evaluation.cut_names(config["evaluate"]["depth"])


@pytest.fixture(scope="module")
def root_of(tmp_path_factory):
    def folder_of(name):
        folder = tmp_path_factory.mktemp(name)
        return LAYOUTS[name](folder) if name in LAYOUTS else folder

    return functools.cache(folder_of)


def _image_file(folder):
    """A file of eight classes of six images; half of the classes are for testing."""
    labels = np.repeat(np.arange(8), 6)
    names = [f"class{label}" for label in range(8)]
    images = np.random.default_rng(0).integers(0, 256, (48, 32, 32), np.uint8)
    path = folder / "images.npz"
    is_test = np.arange(8) >= 4
    np.savez(path, images=images, labels=labels, class_names=names, class_is_test=is_test)
    return path


def _small(row, root_of, *, steps=2):
    """The config of a row with a little net, two steps and a tiny data set."""
    words = study_file.flags(row.overrides)
    config = config_files.read(row.config, words)
    changes = {"steps": steps, "log_every": 1, "pictures": None, "runtime.devices": 1}
    changes |= {"evaluate.every": 2, "evaluate.batch_size": 64}
    changes |= {"evaluate.clustering": None, "select": "last", "reload_best_at": []}
    changes |= {"patience": None}
    dataset = config["dataset"]["name"]
    if dataset in LAYOUTS:
        changes["dataset.root"] = str(root_of(dataset))
    if dataset == "npz":
        changes["dataset.path"] = str(_image_file(root_of("arrays")))
    if config["net"]["name"] != "lecun":
        changes["net"] = {"name": "convnet", "widths": [4, 4], "strides": [8, 1]}
        changes["method.dim"] = 32
        if config.get("miner") and "dim" in config["miner"]:
            changes["miner.dim"] = 32
    if config["method"]["name"] == "abe":
        changes |= {"method.split": ["conv1", "conv2"], "method.attention_pools": True}
        if config["method"]["attention"] is not None:
            changes["method.attention"] = "conv2"
    sizes = {"batch_size": 8, "classes": 2, "per_class": 2}
    changes |= {f"sampler.{k}": sizes[k] for k in config["sampler"] if k != "name"}
    if isinstance(config["schedule"], dict) and "at" in config["schedule"]:
        changes["schedule"] = "constant"
    return config_files.read(row.config, [*words, *study_file.flags(changes)])


RUN_SCORES = ("R@1", "MAP@R", "P@1", "RP", "class_deviation", "refined/R@1")
RUN_SCORES += ("mAP@max_bin_count", "MRR@max_bin_count")


def _rows(study):
    """The rows with runs of their own, but only the first candidate of a choice."""
    later = {name for row in study.rows for name in row.best_of[1:]}
    return [r for r in study.rows if r.runs_of is None and not r.best_of and r.name not in later]


@pytest.mark.slow
@each_study
def test_every_row_builds_and_the_first_ones_run(name, root_of, tmp_path):
    study = study_file.read(name)
    folders = {}
    for i, row in enumerate(_rows(study)):
        config = _small(row, root_of)
        folders[row.name] = tmp_path / str(i)
        if row.start_from is not None:
            config["start"] = str(folders[row.start_from])
        if i < 2:
            scores = training.run(config, tmp_path / str(i))
            wanted = [s for s in study.scores if s in RUN_SCORES]
            assert wanted and all(np.isfinite(scores[s]) for s in wanted), row.name
        else:
            run = build(config)
            assert run.steps == 2 and jax.tree.leaves(run.shapes.params), row.name
