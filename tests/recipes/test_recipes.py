"""Recipes are plain data, found by name; their arguments are read from one line of text."""

import inspect
import json
import os
import pathlib

import pytest
from ml_collections import ConfigDict

from dmljax import recipes
from dmljax.config import files as config_files
from dmljax.config.fields import plain
from dmljax.recipes.arguments import parse

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"


def _recipe(*, kind: str = "dot", deep: bool = True, share: float = 0.0, depth: int = 1) -> dict:
    return {"kind": kind, "deep": deep, "share": share, "depth": depth}


def _optional(*, weight: float | None = None) -> dict:
    return {"weight": weight}


def _parse(text, recipe=_recipe, fixed=()):
    return parse(recipe, text, fixed=frozenset(fixed))


def test_arguments_have_the_types_of_the_signature():
    keywords = _parse("kind=gat,deep=False,share=0.5,depth=3")
    assert keywords == {"kind": "gat", "deep": False, "share": 0.5, "depth": 3}
    assert [type(value) for value in keywords.values()] == [str, bool, float, int]
    assert _parse("") == _parse(None) == {}
    assert _parse("weight=None", _optional) == {"weight": None}
    assert _parse("weight=2", _optional) == {"weight": 2.0}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("knd=gat", r"no argument 'knd': did you mean 'kind'\?$"),
        ("deep=no", "the argument deep must be True or False, got 'no'"),
        ("deep", "the argument deep must be True or False, got ''"),
        ("depth=x", "the argument depth must be a whole number, got 'x'"),
        ("share=x", "the argument share must be a number, got 'x'"),
        ("depth=None", "the argument depth must be a whole number, got None"),
    ],
)
def test_a_wrong_argument_is_refused_in_one_line(text, message):
    with pytest.raises(ValueError, match=message):
        _parse(text)


def test_an_argument_that_a_config_file_has_chosen_is_refused():
    with pytest.raises(ValueError, match=r"no argument 'depth'.*It has: deep, kind, share"):
        _parse("depth=2", fixed={"depth"})
    get_config = recipes.config_function(_recipe, depth=4)
    assert get_config("kind=gat") == ConfigDict({**_recipe(), "depth": 4, "kind": "gat"})


@pytest.mark.parametrize("name", recipes.NAMES)
def test_a_recipe_is_plain_data_of_its_own(name):
    """JSON can hold it, and changing one call's result does not change the next one's."""
    first = getattr(recipes, name)()
    text = json.dumps(first)
    for value in first.values():
        if isinstance(value, dict):
            value["changed"] = True
    second = getattr(recipes, name)()
    assert json.dumps(second) == text
    assert config_files.read(name) == plain(second)


def test_every_recipe_is_listed():
    public = {name for name in recipes.__all__ if inspect.isfunction(getattr(recipes, name))}
    assert public == {*recipes.NAMES, "config_function"}


def test_a_recipe_by_name_is_the_config_file():
    by_name = config_files.read("abe:dataset=cars196,learners=4", ["--config.steps=5"])
    by_file = config_files.read(f"{CONFIGS / 'cars_abe.py'}:learners=4", ["--config.steps=5"])
    assert by_name == by_file and by_name["method"]["learners"] == 4 and by_name["steps"] == 5


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gliphs", r"no recipe 'gliphs': did you mean 'glyphs'\?"),
        ("cars_abe", "a config file is written as configs/cars_abe.py"),
        ("abe:dataset=mnist", "dataset is cub200, cars196, sop or inshop, not 'mnist'"),
        ("proxy_anchor:dataset=sop,net=resnet50", "net is bn_inception, not 'resnet50'"),
        ("dvml:experiment=4", "experiment is 1, 2 or 3, not 4"),
        ("glyphs:steps=3", "no argument 'steps'"),
    ],
)
def test_a_wrong_name_or_choice_is_refused_in_one_line(name, message):
    with pytest.raises(ValueError, match=f"(?i){message}"):
        config_files.read(name)


def test_the_folder_of_a_run_contains_the_argument():
    assert config_files.folder_name("configs/glyphs.py") == "glyphs"
    assert config_files.folder_name("configs/cars_abe.py:learners=4,heads=True") == (
        "cars_abe-learners=4-heads=True"
    )
    assert config_files.folder_name("abe:dataset=sop") == "abe-dataset=sop"


def test_the_experiments_of_the_post_are_arguments():
    """Three sets of labels; the movie repeats frames of a tenth of a second, as published."""
    for labels in ("159", "125689", "0123456789"):
        dataset = recipes.mnist(labels=labels)["dataset"]
        assert dataset["classes"] == [int(c) for c in labels]
    movie = recipes.mnist()["pictures"]
    assert (movie["frame_ms"], movie["last_frame_ms"]) == (200, 3000)
    movie = recipes.mnist(repeat_frames=3, repeat_last=10)["pictures"]
    assert (movie["frame_ms"], movie["last_frame_ms"]) == (300, 1000)
    assert "pos_weight" not in recipes.mnist()["loss"]
    loss = recipes.mnist(positive_weight=0.25)["loss"]
    assert (loss["pos_weight"], loss["neg_weight"]) == (0.5, 1.5)
    with pytest.raises(ValueError, match="a fraction from 0 to 1, not 2"):
        recipes.mnist(positive_weight=2.0)
    with pytest.raises(ValueError, match="positive_weight is of loss=contrastive"):
        recipes.mnist(loss="triplet", positive_weight=0.3)


def test_a_config_file_that_changes_within_a_second_is_read_again(tmp_path):
    path = tmp_path / "mine.py"
    for steps in (8, 9):
        path.write_text(f"def get_config():\n    return {{'steps': {steps}}}\n")
        os.utime(path, (1, 1))  # one second, and one length
        assert config_files.read(str(path)) == {"steps": steps}
    assert [file.name for file in tmp_path.iterdir()] == ["mine.py"]


def test_the_config_of_a_run_is_a_config(tmp_path):
    config = config_files.read("glyphs", ["--config.size=None"])
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert config_files.read(str(tmp_path / "config.json")) == config
