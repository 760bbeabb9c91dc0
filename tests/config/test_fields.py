"""The dataclasses of options complete and check a config, and make the page of all fields."""

import json
import pathlib

import numpy as np
import pytest
from system import load_module, photos, tiny, write_config

from dmljax import main, recipes
from dmljax.config import fields, files
from dmljax.config.build import build
from dmljax.runs import summary
from dmljax.train import options, start

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "make_fields.py"
make_fields = load_module(PAGE)
SIZED = ["folder", "abe", "multi_similarity"]


def test_the_page_has_the_present_fields():
    page = make_fields.page()
    assert all(f"| `{name}` |" in page for name in ("seed", "evaluate.average", "runtime.cache"))


def test_a_config_has_the_defaults_of_the_dataclasses(tmp_path):
    config = fields.complete(tiny(tmp_path, evaluate={"knn": 3}))
    typed = fields.options_of(config)
    clustering = options.KMeans(name="kmeans")
    evaluation = options.EvaluationOptions(knn=3, clustering=clustering, frozen=False)
    assert typed.evaluate == evaluation
    assert typed.checkpoint == options.CheckpointOptions(every=2, keep=3)
    assert typed.sampler == {"name": "class_balanced", "classes": 4, "per_class": 2}
    assert typed.transform == {"name": "unchanged"} and typed.miner is None
    assert fields.complete(config) == config == json.loads(json.dumps(config))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"evaluate": {"average": "images"}},
            "average must be 'queries' or 'classes', got 'images'",
        ),
        ({"evaluate": {"kn": 3}}, "evaluate has no field 'kn': did you mean 'knn'"),
        ({"evaluate": 3}, "evaluate must be an object, got 3"),
        ({"runtime": {"devices": 0}}, "runtime.devices must be at least 1 or None, got 0"),
        ({"held_out": 1}, "held_out.fraction must be at least 0 and below 1, got 1"),
        ({"net": 3}, r"net must be a name or dict\(name='...', ...\), got 3"),
        ({"normalize": {"force": True}}, "normalize must be a name .* got {'force': True}"),
        ({"size": 0}, "size must be a number from 1 to 8192 or None, got 0"),
        ({"evaluate": {"ks": [1, 0]}}, r"evaluate.ks\[1\] must be at least 1, got 0"),
        (
            {"evaluate": {"rankings": ["best"]}},
            r"rankings\[0\] must be 'refined' or 'mean_distance'",
        ),
    ],
)
def test_a_value_out_of_range_is_refused_with_what_is_allowed(tmp_path, values, message):
    with pytest.raises((ValueError, TypeError), match=message):
        fields.complete(tiny(tmp_path, **values))
    missing = {k: v for k, v in tiny(tmp_path).items() if k != "steps"}
    with pytest.raises(ValueError, match=r"^steps is missing"):
        fields.complete(missing)


@pytest.mark.parametrize("recipe", SIZED)
def test_one_size_is_the_size_of_training_and_evaluation(recipe):
    config = fields.complete(files.read(recipe, ["--config.size=64"]))
    sizes = config["size"], config["transform"]["size"], config["eval_transform"]["size"]
    assert sizes == (64, 64, 64)
    flags = ["--config.eval_transform.size=96", "--config.size=64"]
    config = fields.complete(files.read(recipe, flags))
    assert (config["transform"]["size"], config["eval_transform"]["size"]) == (64, 96)
    config = fields.complete(files.read(recipe, ["--config.size=None"]))
    assert "size" not in config["transform"]  # the default of the transform


def test_a_config_with_a_size_is_the_config_with_two():
    config = recipes.multi_similarity(dataset="cub200") | {"size": 224}
    sized = {}
    for name in ("transform", "eval_transform"):
        spec = fields.complete(config)[name]
        config[name] = {k: v for k, v in spec.items() if k != "size"}
        sized[name] = {**config[name], "size": 224}
    both = {k: v for k, v in {**config, **sized}.items() if k != "size"}
    assert fields.config_digest(fields.complete(both)) == fields.config_digest(
        fields.complete(config)
    )
    with pytest.raises(ValueError, match="unchanged has no argument 'size'"):
        fields.options_of(fields.complete(config | {"transform": "unchanged"}))


def test_the_evaluation_at_a_small_size_sees_the_border_of_a_photograph(tmp_path):
    flags = ["--config.size=64", "--config.net={'name': 'convnet'}"]
    config = files.read("folder:train=all", flags)
    config["dataset"] |= {"root": str(photos(tmp_path))}
    run = build(config | {"runtime": {"devices": 1}})
    assert run.image_shape == run.eval_image_shape == (64, 64, 3)
    photograph = np.zeros((480, 640, 3), np.uint8)
    photograph[:48] = photograph[-48:] = 255  # a tenth of the height
    image = run.eval_transform_fn(photograph, np.random.default_rng(0))
    assert (image[[0, 1, -2, -1]] > 200).all() and (image[16:48] == 0).all()
    state = start.first_state(run)
    line = summary.header(run, state)[1]  # after the advice to start from pretrained weights
    assert "standard_train(size=64" in line and " for training" in line
    assert "standard_eval(size=64, shorter=72" in line


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("held_out", 0, None),
        ("held_out", 0.25, {"name": "last", "fraction": 0.25}),
        ("held_out", "fold", {"name": "fold", "index": 0, "count": 4, "seed": None}),
        ("held_out", {"index": 1}, {"name": "fold", "index": 1, "count": 4, "seed": None}),
        ("pictures", False, None),
        ("pictures", True, {"name": "page", "projector": 0}),
        ("pictures", {"projector": 9}, {"name": "page", "projector": 9}),
        ("features", {"views": 2}, {"name": "cached", "views": 2}),
        (
            "start",
            {"name": "runs/a", "takes": "backbone"},
            {"name": "runs/a", "takes": "backbone", "mixed_with": None, "mixed_fraction": 0.5},
        ),
    ],
)
def test_a_setting_is_a_name_a_value_or_fields(tmp_path, field, value, expected):
    config = fields.complete(tiny(tmp_path, **{field: value}))
    assert config[field] == expected
    assert fields.complete(config) == config


def test_flags_change_fields_of_settings(tmp_path):
    flags = ["--config.start=runs/a", "--config.start.takes=backbone"]
    flags += ["--config.evaluate.clustering.starts=10", "--config.pictures.projector=5"]
    config = fields.complete(files.override(tiny(tmp_path), flags))
    assert (config["start"]["name"], config["start"]["takes"]) == ("runs/a", "backbone")
    clustering = {"name": "kmeans", "starts": 10, "seeds": [0], "only_last": False}
    assert config["evaluate"]["clustering"] == clustering
    typed = fields.options_of(config)
    assert typed.pictures == options.Page(name="page", projector=5)


def test_a_digest_is_of_the_values_and_not_of_how_they_are_written(tmp_path):
    config = tiny(tmp_path, start="runs/a")
    written = {
        "held_out": 0.0,
        "start": {"name": "elsewhere", "takes": "all"},
        "loss": {"name": "triplet", "margin": 0.2},
        "pictures": "page",
        "notes": "x",
    }
    one, other = (fields.config_digest(fields.complete(c)) for c in (config, config | written))
    assert one == other
    changed = config | {"start": {"name": "runs/a", "takes": "backbone"}}
    assert fields.config_digest(fields.complete(changed)) != one


def test_the_printed_values_of_a_config_have_their_sources(tmp_path, monkeypatch, capsys):
    name = write_config(tmp_path, tiny(tmp_path, size=9))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "blobs.npz").unlink()  # nothing is built
    words = ["train", f"--config={name}", "--config.loss.margin=0.3", "--print"]
    assert main.main(words) == 0 and not (tmp_path / "runs").exists()
    lines = capsys.readouterr().out.splitlines()
    sources = {line.split()[0]: line.split()[1:] for line in lines}
    assert sources["held_out"] == ["None", "default"]
    assert sources["loss.margin"] == ["0.3", "command", "line"]
    assert sources["steps"] == ["6", "config", "file"] and sources["seed"] == ["0", "default"]
    assert sources["transform.size"] == ["9", "config", "file"]
    assert sources["evaluate.clustering.starts"] == ["1", "default"]


def test_the_printed_values_of_a_recipe_have_their_sources():
    flags = ["--config.optimizer.groups.0.decay=0"]
    name = f"{PAGE.parents[1] / 'configs' / 'cars_graph.py'}:mlp=False,held_out=0.2"
    sources = {}
    for line in files.table(name, flags).splitlines():
        field, _, value_and_source = line.partition(" ")
        sources[field] = value_and_source.split("  ")[-1].strip()
    assert sources["dataset.name"] == sources["optimizer.rate"] == "config file"
    assert sources["method.mlp_fn"] == sources["held_out.fraction"] == "command line"
    assert sources["method.dim"] == sources["optimizer.groups.0.path"] == "recipe"
    assert sources["optimizer.groups.0.decay"] == "command line"
    assert sources["patience"] == "default"
