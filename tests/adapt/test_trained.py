"""What learns, by `config.trained`: gradients, moments, checkpoints, and what is shipped."""

import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util
from pretrained import RESNET, VIT, with_weights
from processes import LONG, same, same_after_a_kill
from system import METHODS, brief, tiny

from dmljax import adapt
from dmljax.adapt.trees import paths_of
from dmljax.config import registry
from dmljax.config.build import build
from dmljax.main import main
from dmljax.methods import pairs
from dmljax.nets import layers
from dmljax.runs import folder as run_folder
from dmljax.runs import training
from dmljax.train.checkpoints import Checkpoints
from dmljax.train.start import base_of, first_state
from dmljax.train.step import train_step
from dmljax.weights import load_adapter

SPECS = {
    "blocks": {"name": "blocks", "count": 1},
    "dora": {"name": "lora", "rank": 2, "dora": True},
    "prompts": {"name": "prompts", "count": 2},
}
SMALL = VIT | {"depth": 2, "width": 8}


def _flat(tree):
    return traverse_util.flatten_dict(tree, sep="/")


def _batch(size=8, side=12):
    rng = np.random.default_rng(1)
    images = rng.integers(0, 256, (size, side, side, 3)).astype(np.uint8)
    return {"images": images, "labels": np.arange(size, dtype=np.int32) // 2}


def _noisy(state):
    """The state with other values, so that no adapter is zero."""
    rng = np.random.default_rng(2)
    noise = lambda x: x + np.asarray(rng.normal(size=x.shape) * 0.05, x.dtype)  # noqa: E731
    return state._replace(params=jax.tree.map(noise, state.params))


@pytest.mark.parametrize("name", SPECS)
def test_a_step_changes_what_learns_by_its_part_of_the_whole_gradient(tmp_path, name):
    """One step of SGD in chunks, against the gradient with respect to everything at once."""
    optimizer = {"name": "sgd", "rate": 0.1, "momentum": 0.9, "accumulate": 1, "average": 0.5}
    fields = {"trained": SPECS[name], "optimizer": optimizer, "schedule": "constant"}
    run = build(tiny(tmp_path, net=with_weights(tmp_path, SMALL), **METHODS["proxies"] | fields))
    state, batch = _noisy(first_state(run)), _batch()
    step_fn = train_step(
        run.method,
        run.optimizer,
        normalize_fn=run.normalize_fn,
        seed=0,
        chunk=4,
        frozen=run.frozen,
    )
    updated, _ = jax.jit(step_fn)(state, batch)
    key = jax.random.fold_in(jax.random.key(0), 0)

    @jax.jit
    def gradient(params):
        images = {**batch, "images": run.normalize_fn(batch["images"])}
        loss_fn = functools.partial(run.method.loss, key=key, step=0)
        return jax.grad(lambda p: loss_fn(p, state.model_state, images)[0])(params)

    before, after, gradients = map(_flat, (state.params, updated.params, gradient(state.params)))
    assert run.frozen < set(before) and any(path.startswith("net/") for path in run.frozen)
    for path, value in before.items():
        if path in run.frozen:
            np.testing.assert_array_equal(after[path], value)
        else:
            np.testing.assert_allclose(after[path], value - 0.1 * gradients[path], atol=2e-6)
            assert np.abs(gradients[path]).max() > 0 or path.endswith("qkv/bias")
    kept = [paths_of(tree) for tree in jax.tree.leaves(state.opt_state, is_leaf=_is_tree)]
    kept = {path for paths in kept for path in paths}
    assert len(kept) > 1 and not any(p.endswith(path) for p in kept for path in run.frozen)


def _is_tree(x):
    return isinstance(x, dict)


def _learned_paths(net, spec):
    adapted = registry.resolve("adaptation", spec)(pairs(net, lambda x, y: 0.0, classes=2, dim=4))
    params = jax.eval_shape(
        lambda key: adapted.method.init(key, {"images": jnp.zeros((1, 32, 32, 3))})[0],
        jax.random.key(0),
    )
    return set(paths_of(params)) - adapted.frozen_fn(params)


@pytest.mark.parametrize(
    ("net", "count", "first"),
    [
        (VIT | {"image_size": 32}, 1, "net/blocks/2/"),
        (RESNET, 3, "net/layer3/1/"),
    ],
)
def test_there_is_no_backward_pass_below_the_first_block_that_learns(net, count, first):
    """By the operations of the lowered step: forward, and backward through the last blocks."""
    module = registry.resolve("net", net)()
    method = pairs(module, _spread, classes=2, dim=4)
    learned = _learned_paths(module, {"name": "blocks", "count": count})
    assert any(path.startswith(first) for path in learned)
    flops, images = {}, {"images": jnp.zeros((4, 32, 32, 3)), "labels": jnp.zeros(4, int)}
    params, state = jax.eval_shape(functools.partial(method.init, batch=images), jax.random.key(0))
    everything = set(paths_of(params))
    for name, frozen in {"all": set(), "blocks": everything - learned, "none": everything}.items():

        def gradient(params, state, frozen=frozen):
            learned, fixed = adapt.split(params, frozen)
            loss_fn = functools.partial(method.loss, key=jax.random.key(0), step=0)
            return jax.value_and_grad(lambda x: loss_fn(adapt.joined(x, fixed), state, images)[0])(
                learned
            )

        flops[name] = jax.jit(gradient).lower(params, state).cost_analysis()["flops"]
    assert flops["all"] > 2.3 * flops["none"]
    assert flops["blocks"] - flops["none"] < 0.35 * (flops["all"] - flops["none"])


def _spread(embeddings, labels):
    return jnp.sum(embeddings[0] * embeddings[1])


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run with adapters, whose last step is the result."""
    folder = tmp_path_factory.mktemp("lora")
    trained = {"name": "lora", "rank": 2}
    fields = {"trained": trained, "checkpoint": {"every": 3}, **METHODS["pairs"]}
    config = brief(folder, net=with_weights(folder), **fields)
    training.run(config, folder / "run")
    return config, folder / "run"


def _saved(folder, step=6):
    with Checkpoints(folder / "checkpoints") as checkpoints:
        params, train = checkpoints.arrays(step)
    return _flat(params), [*paths_of(train)]


def test_a_checkpoint_has_what_learns_and_its_moments(finished):
    _, folder = finished
    params, train = _saved(folder)
    assert {path.split("/")[0] for path in params} == {"adapters", "head"}
    assert not any("net/blocks/0/mlp" in path or "cls_token" in path for path in train)
    assert sum("adapters" in path for path in train) == 2 * 2 * 3  # mu and nu of a and b, 3 blocks


def test_a_run_goes_on_from_its_adapters_and_the_file_of_weights(finished, tmp_path):
    config, folder = finished
    shutil.copytree(folder, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "6")
    training.run(config, tmp_path / "run")
    states = [run_folder.reopen(path)[1] for path in (tmp_path / "run", folder)]
    same(*states)
    weights = first_state(build(config)).params["net"]
    same(states[0].params["net"], weights)


def test_what_is_shipped_has_the_adapters_in_its_kernels(finished):
    _, folder = finished
    run, state = run_folder.reopen(folder)
    embed_fn, variables, _ = run_folder.load(folder)
    images = _batch()["images"]
    expected = jax.jit(run.method.embed)(
        state.params, state.model_state, run.normalize_fn(jnp.asarray(images))
    )
    np.testing.assert_allclose(embed_fn(variables, images), expected, atol=1e-6)
    assert set(variables["params"]) == {"net", "head"}
    plain = jax.jit(run.adapted.deployed.embed)(
        {k: state.params[k] for k in ("net", "head")},
        state.model_state,
        run.normalize_fn(jnp.asarray(images)),
    )
    assert np.abs(plain - expected).max() > 1e-3  # the adapters count


def test_another_run_starts_from_the_merged_backbone(finished, tmp_path):
    config, folder = finished
    _, variables, _ = run_folder.load(folder)
    net = {k: v for k, v in config["net"].items() if k != "weights"}
    run = build(config | {"net": net, "start": str(folder), "trained": "last"})
    state = first_state(run)
    for name in ("net", "head"):
        trees = _flat(state.params[name]), _flat(variables["params"][name])
        for path in trees[0] | trees[1]:
            np.testing.assert_allclose(trees[0][path], trees[1][path], atol=1e-7)
    assert base_of(run) is None  # checkpoints hold a backbone that no file has


def test_a_run_does_not_start_from_a_merged_backbone_of_another_file(finished, tmp_path):
    config, folder = finished
    shutil.copytree(folder, tmp_path / "run")
    other = with_weights(tmp_path, seed=8)["weights"]
    saved = json.loads((folder / "config.json").read_text())
    saved["net"]["weights"] = other
    (tmp_path / "run" / "config.json").write_text(json.dumps(saved))
    net = {k: v for k, v in config["net"].items() if k != "weights"}
    run = build(config | {"net": net, "start": str(tmp_path / "run"), "trained": "last"})
    with pytest.raises(ValueError, match=r"is not the file that .* was trained from") as error:
        first_state(run)
    assert "\n" not in str(error.value)


def test_another_or_missing_file_of_weights_is_refused(finished, tmp_path):
    config, folder = finished
    other = with_weights(tmp_path, seed=8)["weights"]
    with pytest.raises(ValueError, match="is not the file that this run was trained from"):
        run_folder.reopen(folder, overrides=[f"--config.net.weights={other}"])
    moved = shutil.copy(config["net"]["weights"], tmp_path / "moved.safetensors")
    same(
        run_folder.reopen(folder, overrides=[f"--config.net.weights={moved}"])[1],
        run_folder.reopen(folder)[1],
    )
    with pytest.raises(FileNotFoundError, match="this run was trained from it"):
        run_folder.reopen(folder, overrides=["--config.net.weights=none.safetensors"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dora", "prompts"])
def test_a_killed_run_ends_the_same(tmp_path, name):
    fields = {"net": with_weights(tmp_path, SMALL), "trained": SPECS[name]}
    config = tiny(tmp_path, **LONG, **METHODS["proxies"] | fields)
    same_after_a_kill(tmp_path, config, 16)


_LORA = {"name": "lora"}


@pytest.mark.parametrize(
    ("spec", "net", "words"),
    [
        (_LORA | {"targets": "nowhere"}, VIT, "targets='nowhere' matches no kernel"),
        (_LORA | {"rank": 17}, VIT, "rank=17 must be .* the width 16 of net/blocks/0/attn/qkv"),
        (_LORA | {"alpha": 0}, VIT, "alpha=0 above 0"),
        (_LORA | {"targets": "("}, VIT, r"targets='\(' matches no kernel"),
        (_LORA, {"name": "convnet", "widths": [4], "strides": [2]}, "matches no kernel .* none"),
        ({"name": "blocks", "count": 9}, VIT, "count=9 must be from 1 to 3, the blocks"),
        ("prompts", RESNET, "has no tokens: take a vision transformer"),
        ({"name": "prompts", "count": 0}, VIT, "count must be 1 or more"),
        ("lora", VIT | {"weights": None}, "trained=lora needs a pretrained backbone"),
    ],
)
def test_bad_input_is_refused_in_one_line_and_before_anything(tmp_path, spec, net, words):
    net = net if "weights" in net else with_weights(tmp_path, net)
    with pytest.raises((ValueError, TypeError), match=words) as error:
        build(tiny(tmp_path, net=net, trained=spec))
    assert "\n" not in str(error.value)
    assert len(list(tmp_path.iterdir())) <= 2  # the data and the weights


def test_frozen_batch_norms_keep_their_statistics(tmp_path):
    run = build(tiny(tmp_path, net=with_weights(tmp_path, RESNET), trained="biases"))
    assert layers.is_frozen(run.net) and any("bn" in p and p.endswith("scale") for p in run.frozen)


def test_the_command_writes_adapters_that_the_weights_take_again(finished, tmp_path):
    _, folder = finished
    words = ["export", str(folder), "--adapter", f"--out={tmp_path / 'a'}", "--allow-worse"]
    assert main(words) == 0
    run, state = run_folder.reopen(folder)
    adapters = load_adapter(tmp_path / "a", run.net, base=run.weights)
    merged = adapt.merged(state.params["net"], adapters, scale=1.0)
    _, variables, _ = run_folder.load(folder)
    for path, array in _flat(variables["params"]["net"]).items():
        np.testing.assert_allclose(_flat(merged)[path], array, atol=1e-6)
