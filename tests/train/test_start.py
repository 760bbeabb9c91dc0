"""Runs that start from the parameters of another run."""

import json
import shutil

import jax
import numpy as np
import pytest
from processes import same
from system import METHODS, brief, tiny

from dmljax.config import build
from dmljax.files import run_folder as results
from dmljax.runs import folder as run_folder
from dmljax.runs import training
from dmljax.train.checkpoints import Checkpoints
from dmljax.train.start import first_state


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A finished run of `pairs`, which chose an evaluation, not its last step."""
    folder = tmp_path_factory.mktemp("source")
    config = tiny(folder, select="test/R@1", seed=3, optimizer={"name": "sgd", "rate": 0.3})
    training.run(config, folder / "run")
    return folder / "run"


def _backbone(state):
    return {"params": state.params["net"], "batch_stats": state.model_state["batch_stats"]["net"]}


def _differ(one, other):
    leaves = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return [not np.array_equal(a, b) for a, b in leaves]


def test_the_first_backbone_is_that_of_the_chosen_step(source, tmp_path):
    chosen = results.read(source).chosen.step
    _, expected = run_folder.reopen(source, step=chosen)
    start = {"name": str(source), "takes": "backbone"}
    config = tiny(tmp_path, **METHODS["dvml"], start=start)
    state = first_state(build.build(config))
    same(_backbone(state), _backbone(expected))
    drawn = first_state(build.build(config | {"start": None}))
    others = [{k: v for k, v in s.params.items() if k != "net"} for s in (state, drawn)]
    same(*others)  # the new parts are drawn as ever
    assert any(_differ(_backbone(state), _backbone(drawn)))


def test_all_that_fits_is_carried_but_rows_for_classes(source, tmp_path, capsys):
    """Also where both runs have as many classes: they are others."""
    training.run(brief(tmp_path, **METHODS["proxies"]), tmp_path / "proxies")
    chosen = results.read(tmp_path / "proxies").chosen.step
    _, expected = run_folder.reopen(tmp_path / "proxies", step=chosen)
    config = brief(tmp_path, **METHODS["proxies"], start=str(tmp_path / "proxies"), seed=1)
    state = first_state(build.build(config))
    drawn = first_state(build.build(config | {"start": None}))
    same(state.params["head"], expected.params["head"])
    assert all(_differ(state.params["head"], drawn.params["head"]))
    same(state.params["proxies"], drawn.params["proxies"])
    capsys.readouterr()
    training.run(config, tmp_path / "run")
    line = f"start: the backbone, head/red of {tmp_path / 'proxies'}, step {chosen}; drawn: "
    assert f"{line}proxies" in capsys.readouterr().out
    # Of a linear layer of another width nothing is taken.
    config["method"] = config["method"] | {"dim": 5}
    state = first_state(build.build(config), say=(lines := []).append)
    drawn = first_state(build.build(config | {"start": None}))
    same(state.params["head"], drawn.params["head"])
    assert lines[0].endswith("; drawn: head/red, proxies")
    config |= {"start": {"name": str(source), "takes": "backbone"}}
    first_state(build.build(config), say=lines.append)
    assert lines[1].endswith("; all else is drawn (start.takes=backbone)")


def test_a_method_that_does_not_declare_its_parameters_is_told_so(source, tmp_path):
    config = tiny(tmp_path, method="config.outside:my_method", start=str(source))
    with pytest.raises(
        ValueError, match=r"my_method does not say .* a row for each class"
    ) as error:
        build.build(config)
    assert "\n" not in str(error.value) and "--config.start.takes=backbone" in str(error.value)
    build.build(config | {"start": {"name": str(source), "takes": "backbone"}})


def test_modules_of_a_method_are_carried_to_the_same_method(tmp_path):
    """The attention over the batch, but not the rows of its classifiers."""
    fields = METHODS["graph"] | {"method": METHODS["graph"]["method"] | {"neck": True}}
    training.run(brief(tmp_path, **fields), tmp_path / "source")
    _, expected = run_folder.reopen(tmp_path / "source")
    config = brief(tmp_path, **fields, start=str(tmp_path / "source"), seed=1)
    state = first_state(build.build(config))
    drawn = first_state(build.build(config | {"start": None}))
    same(state.params["graph"]["layers"], expected.params["graph"]["layers"])
    same(state.params["head"]["bottleneck"], expected.params["head"]["bottleneck"])
    same(state.model_state["batch_stats"], expected.model_state["batch_stats"])
    same(state.params["head"]["fc"], drawn.params["head"]["fc"])
    same(state.params["graph"]["fc"], drawn.params["graph"]["fc"])


_ONLY_NEW = {
    "trained": "last",
    "optimizer": {"name": "adam", "rate": 0.1, "decay": 0.1, "groups": [{"path": "head"}]},
}


def test_an_ensemble_copies_its_stages_and_gives_them_back(tmp_path):
    """Only its masks and its linear layer, which lie in its net, learn with trained='last'."""
    ensemble = brief(tmp_path, **METHODS["abe"])
    plain = brief(tmp_path, net=ensemble["net"])
    training.run(plain, tmp_path / "plain")
    config = ensemble | {"start": str(tmp_path / "plain")} | _ONLY_NEW
    before = first_state(build.build(config))
    _, expected = run_folder.reopen(tmp_path / "plain")
    same(before.params["net"]["shared"]["conv1"], expected.params["net"]["conv1"])
    same(before.params["net"]["attention"]["conv2"], expected.params["net"]["conv2"])
    training.run(config, tmp_path / "ensemble")
    _, after = run_folder.reopen(tmp_path / "ensemble")
    for part in ("shared", "attention", "head"):
        same(before.params["net"][part], after.params["net"][part])
    for part in ("masks", "embedding"):
        assert all(_differ(before.params["net"][part], after.params["net"][part]))
    start = {"start": str(tmp_path / "ensemble")}
    same(first_state(build.build(ensemble | start)).params, after.params)
    state = first_state(build.build(plain | start))
    same(state.params["net"], after.params["net"]["shared"] | after.params["net"]["head"])


def test_only_the_new_layers_learn(source, tmp_path):
    config = brief(tmp_path, start=str(source)) | _ONLY_NEW
    before = first_state(build.build(config))
    training.run(config, tmp_path / "run")
    _, after = run_folder.reopen(tmp_path / "run")
    same(before.model_state["batch_stats"], after.model_state["batch_stats"])
    same(before.params["net"], after.params["net"])
    assert all(_differ(before.params["head"], after.params["head"]))


def test_a_run_is_another_if_its_start_is(source, tmp_path, capsys):
    config = brief(tmp_path, start=str(source))
    one = build.digests_of(config)
    assert one.start and one.run != build.digests_of(brief(tmp_path)).run
    moved = shutil.copytree(source, tmp_path / "moved")
    assert build.digests_of(config | {"start": str(moved)}) == one
    assert (
        build.digests_of(config | {"start": {"name": str(source), "takes": "backbone"}}).run
        != one.run
    )
    training.run(config, tmp_path / "run")
    assert f"pretraining: the backbone of {source}" in capsys.readouterr().out
    training.run(config | {"start": str(moved)}, tmp_path / "run")
    assert results.read(tmp_path / "run").digests["start"] == one.start
    content = json.loads((moved / "result.json").read_text())
    content["chosen"]["step"] = 6 if content["chosen"]["step"] == 3 else 3
    (moved / "result.json").write_text(json.dumps(content))
    line = r"the run to start from: its digest was \w{12} step [36] and is now \w{12} step [36]\."
    with pytest.raises(ValueError, match=line):
        training.run(config | {"start": str(moved)}, tmp_path / "run")


def _refused(tmp_path, **fields):
    config = tiny(tmp_path, **fields)
    with pytest.raises((ValueError, OSError)) as refusal:
        training.run(config, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    return str(refusal.value)


def test_what_cannot_be_started_from(source, tmp_path):
    message = _refused(tmp_path, start=str(tmp_path))
    assert "holds no run: name the folder of a finished run" in message
    (tmp_path / "weights.pth").touch()
    message = _refused(tmp_path, start=str(tmp_path / "weights.pth"))
    assert "holds no run: " in message and "(a file of weights is --config.net.weights" in message
    net = {"name": "convnet", "widths": [5, 8], "strides": [2, 2]}
    message = _refused(tmp_path, start=str(source), net=net)
    assert message.startswith(f"start: the backbone of {source}, step ")
    assert "does not fit the net. shape: " in message and "params/conv1/conv/kernel" in message
    message = _refused(tmp_path, start=str(source), net={"name": "mobilenet_v2"})
    assert "does not fit the net: it is of another architecture" in message
    unfinished = shutil.copytree(source, tmp_path / "unfinished")
    (unfinished / "result.json").unlink()
    assert "is not finished" in _refused(tmp_path, start=str(unfinished))
    damaged = shutil.copytree(source, tmp_path / "damaged")
    step = results.read(damaged).chosen.step
    victim = next(p for p in (damaged / "checkpoints" / str(step)).rglob("*") if p.is_file())
    victim.write_bytes(b"")
    assert f"checkpoint {step} of {damaged} is damaged" in _refused(tmp_path, start=str(damaged))
    shutil.rmtree(damaged / "checkpoints")
    assert f"checkpoint {step} of {damaged} is damaged" in _refused(tmp_path, start=str(damaged))


def test_arrays_of_a_checkpoint_are_those_of_the_state(source):
    with Checkpoints(source / "checkpoints") as checkpoints:
        params, train = checkpoints.arrays(6)
    _, state = run_folder.reopen(source, step=6)
    same(params, state.params)
    same(train["model_state"], state.model_state)
