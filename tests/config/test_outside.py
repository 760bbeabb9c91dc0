"""Everything that a config can name is added from outside of the package, by a dotted name."""

import pathlib
import re

import numpy as np
import pytest
from pretrained import with_weights
from system import tiny

from dmljax.config import files as config_files
from dmljax.config import registry
from dmljax.config.build import build
from dmljax.files import run_folder as results
from dmljax.report import page, scores_file
from dmljax.runs import folder, training
from dmljax.train import journal
from dmljax.train.start import first_state

OUTSIDE = {
    "dataset": {"dataset": {"name": "config.outside:my_dataset", "classes": 8}},
    "sampler": {"sampler": {"name": "config.outside:my_sampler", "batch_size": 8}},
    "transform": {"transform": {"name": "config.outside:my_transform", "brightness": 5}},
    "normalization": {"normalize": "config.outside:my_normalization"},
    "net": {"net": {"name": "config.outside:my_net", "width": 6}},
    "loss": {"loss": {"name": "config.outside:my_loss", "weight": 2.0}},
    "miner": {"miner": {"name": "config.outside:my_miner", "limit": 0.5}},
    "method": {"method": {"name": "config.outside:my_method", "scale": 1.0}},
    "adaptation": {"trained": {"name": "config.outside:my_adaptation", "ending": "bias"}},
    "schedule": {"schedule": {"name": "config.outside:my_schedule", "power": 2.0}},
    "metric": {
        "evaluate": {
            "every": 1,
            "batch_size": 16,
            "clustering": {"seeds": [0]},
            "ks": [1],
            "metrics": [
                "recall_at_k",
                {"name": "recall_at_k", "k": 4},
                {"name": "config.outside:my_metric", "best": 7},
                "config.outside:my_clustering_metric",
                "map_at_r",
                {"name": "config.outside:my_embedding_metric", "power": 2.0},
            ],
            "call": "config.outside:after_evaluation",
        }
    },
}
# Functions that arguments of other functions name, or that a method chooses.
INDIRECT = {"optimizer", "value"}


def test_every_kind_of_function_is_tested():
    assert set(OUTSIDE) == set(registry.KINDS) - INDIRECT


def test_a_run_with_one_outside_function_of_every_kind(tmp_path):
    config = tiny(tmp_path, steps=2, log_every=1, select="test/my_metric", runtime={"devices": 1})
    for fields in OUTSIDE.values():
        config |= fields
    config["checkpoint"] = {"keep": 2}
    config["net"] = with_weights(tmp_path, config["net"], size=6)  # a part of which learns
    scores = training.run(config, tmp_path / "run")
    lines = journal.read(tmp_path / "run" / "metrics.jsonl")
    losses = [x["loss"] for x in lines if "loss" in x]
    assert len(losses) == 2 and np.isfinite(losses).all() and losses[0] != losses[1]
    assert set(scores) == {"R@1", "R@4", "my_metric", "MAP@R", "without_positive"} | {
        "my_clustering_metric",
        "my_clustering_metric_std",
        "my_embedding_metric",
    }
    assert scores["my_embedding_metric"] == pytest.approx(1)  # unit vectors
    assert scores["my_clustering_metric"] == 1.0
    best = max(x["test/my_metric"] for x in lines if "test/my_metric" in x)
    assert scores["my_metric"] == best
    seen = (tmp_path / "run" / "seen.txt").read_text().splitlines()
    assert seen == [f"{x['step']} {x['test/R@1']} 32" for x in lines if "test/R@1" in x]
    assert len(seen) == 2
    run, state = folder.reopen(tmp_path / "run", trust_modules=True)
    first, last = (x.params["net"]["Dense_0"] for x in (first_state(run), state))
    np.testing.assert_array_equal(first["kernel"], last["kernel"])
    assert (np.asarray(first["bias"]) != np.asarray(last["bias"])).any()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (
            "call",
            "config.outside:my_loss",
            r"is not a function for .*: it must take 1 arguments",
        ),
        ("call", "config.outside:no_such", r"'config.outside:no_such' cannot be imported"),
        ("call", "map", r"no function for evaluate.call 'map'.* written as 'my_package"),
    ],
)
def test_what_an_evaluation_cannot_call(tmp_path, field, value, message):
    with pytest.raises(ValueError, match=message):
        build(tiny(tmp_path, evaluate={field: value}))


def several(embeddings, labels):
    return embeddings[:2]


def test_a_metric_of_embeddings_returns_one_number(tmp_path):
    config = tiny(tmp_path, evaluate={"metrics": ["all", "config.test_outside:several"]})
    with pytest.raises(ValueError, match=r"the metric several must return one number, not array"):
        training.run(config, tmp_path / "run")


@pytest.mark.parametrize("kind", ["loss", "dataset", "normalization"])
def test_a_missing_outside_function_is_named(tmp_path, kind):
    ((field, spec),) = OUTSIDE[kind].items()
    name = spec if isinstance(spec, str) else spec["name"]
    with pytest.raises(ValueError, match=f"'{name}_2' cannot be imported"):
        build(tiny(tmp_path, **{field: f"{name}_2"}))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_package.module:loss", "The folder that contains no_package must be in PYTHONPATH"),
        (
            "config.outside.my_loss",
            "A function of your own is written as 'my_package.my_module:",
        ),
    ],
)
def test_a_name_that_is_not_found_says_how_to_write_it(name, message):
    with pytest.raises(ValueError, match=message):
        registry.resolve("loss", name)


def test_a_missing_package_that_my_module_imports_is_named_alone(tmp_path, monkeypatch):
    (tmp_path / "my_broken_module.py").write_text("import no_package")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"No module named 'no_package'$"):
        registry.resolve("loss", "my_broken_module:loss")


def test_the_examples_of_the_documents_run_as_typed(tmp_path, monkeypatch):
    """All of them in one run, but for the miner, which that loss does not take."""
    root = pathlib.Path(__file__).parents[2]
    text = "".join(
        (root / name).read_text() for name in ("CONTRIBUTING.md", "docs/contributing.md")
    )
    examples = re.findall(r"```py\n(.*?)```", text, re.DOTALL)
    (tmp_path / "my_module.py").write_text("\n\n".join(examples))
    monkeypatch.syspath_prepend(tmp_path)
    words = re.findall(r"(--config\.[^=]+=)(\"[^\"]*\"|\S+)", text)
    flags = [flag + value.strip('"') for flag, value in words if flag != "--config.field="]
    fields = {flag.split(".")[1].partition("=")[0] for flag in flags}
    expected = {"loss", "miner", "evaluate", "net", "dataset", "sampler", "transform", "method"}
    assert fields == expected
    evaluate = {"every": 2, "ks": [1], "batch_size": 64, "clustering": None}
    config = tiny(tmp_path, steps=2, runtime={"devices": 1}, evaluate=evaluate)
    config = {name: value for name, value in config.items() if name not in fields - {"evaluate"}}
    config = config_files.override(config, flags)
    with pytest.raises(ValueError, match="the loss takes no miner"):
        training.run(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    build(config | {"loss": "triplet"})
    scores = training.run(config | {"miner": None}, tmp_path / "run")
    assert set(scores) == {"R@1", "first_page", "without_positive"}


def test_a_config_averages_over_classes_and_its_metric_sees_labels(tmp_path):
    metric = "config.test_outside:number_of_the_class"
    options = {"metrics": ["all", metric], "average": "classes"}
    run_folder = tmp_path / "run"
    training.run(tiny(tmp_path, evaluate=options, pictures="page"), run_folder)
    result = results.read(run_folder)
    labels = scores_file.read(run_folder).labels
    # Every class weighs the same, however many queries it has.
    assert result.scores["test/number_of_the_class"] == np.unique(labels).mean()
    assert result.average == "classes"
    tree = page.read(run_folder / "report.html")
    assert "mean over classes" in tree["headline"]
    assert tree["scores"]["tiles"][0]["value"] == pytest.approx(result.scores["test/R@1"])
    assert "mean over classes" in tree["scores"]["note"]
    with pytest.raises(ValueError, match=r"evaluate\.average must be 'queries' or 'classes'"):
        build(tiny(tmp_path, evaluate={"average": "images"}))


def number_of_the_class(ranks, *, labels):
    return labels.astype(np.float64)
