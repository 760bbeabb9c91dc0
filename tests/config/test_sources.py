"""`dmljax train --print` says where each value comes from."""

from system import tiny, write_config

from dmljax import main
from dmljax.config import sources


def _sources(name, *flags):
    return {value.field: (value.value, value.source) for value in sources.values_of(name, flags)}


def test_values_of_a_recipe_have_their_sources():
    flags = ["--config.size=64", "--config.optimizer.groups.0.decay=0", "--config.evaluate.every=9"]
    values = _sources("configs/cars_graph.py:mlp=False", *flags)
    by_file = "config file (dataset=cars196)"
    assert values["dataset.name"] == ("cars196", by_file)
    assert values["optimizer.rate"] == (0.00036683239911604993, by_file)
    assert values["method.mlp_fn"] == (None, "command line (mlp=False)")
    assert values["method.dim"] == (512, "recipe")
    assert values["size"] == values["transform.size"] == (64, "command line")
    assert values["optimizer.groups.0.decay"] == (0, "command line")
    assert values["optimizer.groups.0.path"] == (".", "recipe")
    assert values["evaluate.every"] == (9, "command line")
    assert values["held_out"] == (None, "recipe")  # which sets it, to the default
    held_out = _sources("graph:held_out=0.2")["held_out.fraction"]
    assert held_out == (0.2, "command line (held_out=0.2)")
    assert values["patience"] == (None, "default")
    by_recipe = _sources("graph:dataset=cars196")
    assert by_recipe["optimizer.rate"][1] == "command line (dataset=cars196)"
    assert _sources("proxy_anchor")["transform.size"] == (224, "recipe")


def test_values_of_a_file_of_ones_own(tmp_path, monkeypatch, capsys):
    name = write_config(tmp_path, tiny(tmp_path))
    values = _sources(name, "--config.loss.margin=0.3")
    assert values["steps"] == (6, "config file") and values["seed"] == (0, "default")
    assert values["loss.name"] == ("triplet", "config file")
    assert values["loss.margin"] == (0.3, "command line")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "blobs.npz").unlink()  # nothing is built
    words = ["train", f"--config={name}", "--config.loss.margin=0.3", "--print"]
    assert main.main(words) == 0 and not (tmp_path / "runs").exists()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(values)
    (line,) = (line for line in lines if line.startswith("loss.margin "))
    assert line.split() == ["loss.margin", "0.3", "command", "line"]
    columns = {line.index(repr(values[line.split()[0]][0])) for line in lines}
    assert len(columns) == 1  # aligned
