"""Every config, made small by flags, on images in the folder layout of its data set."""

import ast
import functools
import inspect
import json
import pathlib
import re
import sys

import jax
import numpy as np
import pytest

from dmljax import recipes
from dmljax.config import files as config_files
from dmljax.config import scores
from dmljax.config.build import build
from dmljax.runs import training
from dmljax.train import journal

sys.path.append(str(pathlib.Path(__file__).parent / "data"))
import data_fixtures

CONFIGS = sorted((pathlib.Path(__file__).parents[1] / "configs").glob("*.py"))
each_config = pytest.mark.parametrize("file", CONFIGS, ids=lambda path: path.stem)
# Their recipes and their data sets are trained by other configs; here they are built.
ALIKE = ("cub_abe", "inshop_abe", "sop_abe", "cars_dvml", "sop_dvml", "cars_graph", "cub_graph")
ALIKE += ("cars_multi_similarity", "cub_multi_similarity", "inshop_multi_similarity", "sop_graph")
ALIKE += ("cars_proxy_anchor", "inshop_proxy_anchor", "sop_proxy_anchor", "glyphs", "folder")
ALIKE += ("mnist_triplet", "sop_multi_similarity")
trained_config = pytest.mark.parametrize(
    "file",
    [pytest.param(f, marks=[pytest.mark.slow] * (f.stem in ALIKE), id=f.stem) for f in CONFIGS],
)


def _tiny_imagenet(root):
    """TinyImageNet's folders, with two test images of each class."""
    home = data_fixtures.tiny_imagenet(root) / "tiny-imagenet-200" / "val"
    notes = (home / "val_annotations.txt").read_text()
    for i, line in enumerate(notes.splitlines()):
        data_fixtures.put(home / "images" / f"more_{i}.JPEG", data_fixtures.jpeg(200 + i))
        notes += "\n" + line.replace(f"val_{i}.JPEG", f"more_{i}.JPEG")
    (home / "val_annotations.txt").write_text(notes)
    return root


LAYOUTS = {
    "cub200": data_fixtures.cub,
    "cars196": data_fixtures.cars,
    "sop": data_fixtures.sop,
    # Four training classes: two to train on and two to hold out.
    "inshop": functools.partial(data_fixtures.inshop, train_items=(1, 3, 4, 5)),
    "tiny_imagenet": _tiny_imagenet,
    "mnist": data_fixtures.mnist,
    "folder": lambda root: data_fixtures.class_folders(root, dict.fromkeys("abcdefgh", 6)),
}


@pytest.fixture(scope="module")
def root_of(tmp_path_factory):
    return functools.cache(lambda name: LAYOUTS[name](tmp_path_factory.mktemp(name)))


def _small(file, argument, root_of):
    """The config with the flags that make it small: a small net and two steps."""
    name = f"{file}:{argument}" if argument else str(file)
    config = config_files.read(name)
    changes = {"steps": 2, "log_every": 1, "pictures": None, "runtime.devices": 1}
    # One config with clustering is enough.
    clustering = {"seeds": [0]} if config["dataset"]["name"] == "mnist" else None
    changes |= {"evaluate.clustering": clustering}
    changes |= {"evaluate.every": 2, "evaluate.batch_size": 64}
    if config["dataset"]["name"] in LAYOUTS:
        changes["dataset.root"] = str(root_of(config["dataset"]["name"]))
    if config["dataset"]["name"] == "folder":  # whatever pretrained net is on this machine
        changes |= {"trained": "all", "features": "computed"}
    if config["net"]["name"] != "lecun":
        changes["net"] = {"name": "convnet", "widths": [4, 4], "strides": [8, 1]}
        changes["method.dim"] = 32
        if config.get("miner") and "dim" in config["miner"]:
            changes["miner.dim"] = 32
    if config.get("reload_best_at"):
        changes["reload_best_at"] = [2]
    if config["method"]["name"] == "abe":
        changes["method.split"] = ["conv1", "conv2"]
        if config["method"]["attention"] is not None:
            changes["method.attention"] = "conv2"
        changes["method.attention_pools"] = True  # the little net has none to leave out
    sizes = {"batch_size": 8, "classes": 2, "per_class": 4}
    changes |= {f"sampler.{k}": sizes[k] for k in config["sampler"] if k != "name"}
    return config_files.read(name, [f"--config.{k}={v!r}" for k, v in changes.items()])


def _open_arguments(file):
    """The arguments that a config file takes: those of its recipe that it has not chosen."""
    call = next(n for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Call))
    recipe = getattr(recipes, call.args[0].attr)
    return set(inspect.signature(recipe).parameters) - {keyword.arg for keyword in call.keywords}


def _arguments(file):
    """Every argument that the docstring mentions, such as 'attention=gat,mlp=False'.

    Not what needs a file of weights with photographs: tests/recipes/test_photo_recipes.py has one.
    """
    text = ast.get_docstring(ast.parse(file.read_text()))
    assignment = r"[a-z_]+=[\w.]*\w"
    arguments = re.findall(rf"(?<![-.\w])({assignment}(?:,{assignment})*)", text)
    others = ("select=", "net=", "train=ladder") if file.stem == "folder" else "select="
    return sorted({a for a in arguments if not a.startswith(others)})


@trained_config
def test_a_config_trains_two_steps_and_is_evaluated(file, root_of, tmp_path):
    config = _small(file, None, root_of)
    final = training.run(config, tmp_path)
    lines = journal.read(tmp_path / "metrics.jsonl")
    assert [x["step"] for x in lines if "loss" in x] == [1, 2]
    assert all(np.isfinite(x["loss"]) and x["gradient_norm"] > 0 for x in lines if "loss" in x)
    tested = [x for x in lines if "test/R@1" in x]
    assert [x["step"] for x in tested] == [2] and final["R@1"] == tested[0]["test/R@1"]
    assert {"R@1", "MAP@R", "mAP", "MRR", "P@1", "RP"} <= set(final)
    assert ("NMI" in final) == (config["evaluate"]["clustering"] is not None)
    saved_config = json.loads((tmp_path / "config.json").read_text())
    assert build(saved_config).config == saved_config


@each_config
def test_a_docstring_has_the_command_the_expectation_and_the_arguments(file):
    text = ast.get_docstring(ast.parse(file.read_text()))
    assert f"python -m dmljax.main --config=configs/{file.name}" in text
    assert re.search(r"[Ee]xpected|[Mm]easured|No\s+result\s+is\s+promised|no\s+numbers", text)
    assert file.stem in ("glyphs", "folder") or re.search("faithful|corrected", text)
    assert bool(_arguments(file)) == bool(_open_arguments(file))


@each_config
def test_a_config_builds_with_every_argument_of_its_docstring(file, root_of):
    arguments_by_config = {json.dumps(config_files.read(str(file))): None}
    for argument in _arguments(file):
        arguments_by_config.setdefault(
            json.dumps(config_files.read(f"{file}:{argument}")), argument
        )
    # Where a config offers arguments, at least one of them changes it.
    assert len(arguments_by_config) > 1 or not _arguments(file)
    for argument in arguments_by_config.values():
        config = _small(file, argument, root_of)
        scores.check(config)
        # Methods that differ by argument are built with each of them once.
        if argument is None or (file.stem not in ALIKE and "graph" in file.stem):
            run = build(config)
            assert run.steps == 2 and jax.tree.leaves(run.shapes.params)


@pytest.mark.slow
@each_config
def test_at_full_size_only_large_nets_have_5_million_parameters(file, root_of):
    for argument in ["", *_arguments(file)]:
        config = config_files.read(f"{file}:{argument}" if argument else str(file))
        small = _small(file, argument, root_of)
        run = build(config | {name: small[name] for name in ("dataset", "sampler", "runtime")})
        count = sum(x.size for x in jax.tree.leaves(run.shapes.params))
        is_large = config["net"]["name"] in ("resnet50", "googlenet", "bn_inception")
        assert (count > 5_000_000) == is_large, (argument, count)


def test_a_missing_config_file_is_refused_with_similar_names():
    with pytest.raises(FileNotFoundError, match=r"'gliphs.py': did you mean 'glyphs.py'\?"):
        config_files.read(str(CONFIGS[0].with_name("gliphs.py")))
    with pytest.raises(FileNotFoundError, match=r"the folder confgs has no config 'glyphs.py'"):
        config_files.read("confgs/glyphs.py")
