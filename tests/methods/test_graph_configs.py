"""The configs of the graph method: sizes, rates, decay, and one training step."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from graph_cases import LOSS
from one_step import read, shrink
from system import load_module

from dmljax import nets
from dmljax.config import data as timing
from dmljax.config import fields, registry
from dmljax.config.build import build

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"


@functools.cache
def _module(name):
    return load_module(CONFIGS / f"{name}_graph.py")


@functools.cache
def _sizes(name, arg, classes, net="convnet"):
    """Parameters of each module, by tracing."""
    actual = _module(name).get_config(arg)
    module = getattr(nets, net)()  # the width of the embedding is set, so any net will do
    method = registry.resolve("method", fields.plain(actual.method))
    method = method(module, LOSS, classes=classes)
    side = 227 if net == "resnet50" else 32
    batch = {
        "images": jax.ShapeDtypeStruct((2, side, side, 3), jnp.float32),
        "labels": jax.ShapeDtypeStruct((2,), jnp.int32),
    }
    params, _ = jax.eval_shape(method.init, jax.random.key(0), batch)
    return {part: sum(x.size for x in jax.tree.leaves(tree)) for part, tree in params.items()}


@pytest.mark.parametrize(
    ("name", "arg", "classes", "size"),
    [
        ("cars", "", 98, 6_669_824),
        ("cub", "", 100, 3_467_264),
        ("cars", "attention=gat,published=True", 98, 5_619_456),
        ("cub", "attention=gat,published=True", 100, 2_942_464),
        ("cars", "attention=gatv2,published=True", 98, 5_618_304),
        ("cub", "attention=gatv2,published=True", 100, 2_941_696),
        ("cars", "attention=none", 98, 4_566_528),
        ("cub", "attention=none", 100, 2_415_616),
        ("cars", "mlp=False", 98, 2_468_352),
        ("cub", "mlp=False", 100, 1_366_528),
        ("cars", "attention=none,mlp=False", 98, 365_056),
        ("cub", "attention=none,mlp=False", 100, 314_880),
        ("cars", "attention=dot_plus_one", 98, 6_669_824),
        ("sop", "backbone_only=False", 11_318, 9_210_880),
        ("inshop", "", 3_997, 5_462_528),
    ],
)
def test_published_sizes(name, arg, classes, size):
    # The frozen bias of the published neck is counted there, and is not here.
    bias = 1024 if name == "cars" else 512
    assert _sizes(name, arg, classes)["graph"] == size - bias


def test_published_sizes_of_the_encoder():
    sizes = _sizes("cars", "backbone_only=True", 98, net="resnet50")
    assert set(sizes) == {"net", "head"} and sum(sizes.values()) == 24_607_394
    assert "graph" not in _sizes("sop", "", 11_318)


def _small(name, arg, folder):
    """The config on small data, with a net that compiles in a second."""
    config = read(f"{name}_graph", arg)
    is_drawn = config["sampler"]["name"] == "random_class_count"
    sampler = {"batch_size": 8} if is_drawn else {"classes": 2, "per_class": 4}
    net = {"name": "convnet", "widths": [8], "strides": [2]}
    return shrink(config, folder, sampler=sampler, method={"dim": 16}, net=net)


def _check_blocks(blocks, arg, *, layers):
    """The parameters of every block are those of its attention and of its second step."""
    attention = next((kind for kind in ("gatv2", "gat", "none") if f"={kind}" in arg), "dot")
    linear = {"gat": ["linear"], "gatv2": ["linear_l", "linear_r"]}
    if attention == "none" and "mlp=False" in arg:
        assert not blocks
        return
    assert len(blocks) == layers
    for block in blocks.values():
        assert ("linear1" in block) == ("mlp=False" not in arg)
        assert ("att" in block) == (attention != "none")
        if attention == "dot":
            assert sorted(block["att"]) == ["k_linear", "out", "q_linear", "v_linear"]
        elif attention != "none":
            assert sorted(block["att"]["layer1"]) == ["attn", *linear[attention]]
            # The equation has one layer; the published code has two.
            assert ("output" in block["att"]) == ("published=True" in arg)


@pytest.mark.parametrize(
    ("name", "arg"),
    [
        ("cars", ""),
        ("sop", ""),
        ("cars", "attention=gat,published=True"),
        ("sop", "attention=gatv2,mlp=False,backbone_only=False"),
        ("cars", "attention=none,mlp=False,published=True"),
        ("sop", "backbone_only=True,held_out=0.34"),
    ],
)
def test_the_arguments_of_a_config_change_its_network(name, arg, tmp_path):
    run = build(_small(name, arg, tmp_path))
    assert (run.held_out is not None) == ("held_out" in arg)
    assert run.selection.key == ("val/R@1" if "held_out" in arg else "test/R@1")
    alone = name == "sop" and "backbone_only=False" not in arg
    assert (run.method.inspect.refine is None) == alone
    assert ("graph" in run.shapes.params) == (not alone)
    if not alone:
        _check_blocks(
            run.shapes.params["graph"].get("layers", {}), arg, layers=1 + (name == "cars")
        )
    std = 0.299 if "published" in arg else 0.229
    white = np.full((1, 1, 1, 3), 255, np.uint8)
    np.testing.assert_allclose(run.normalize_fn(white)[0, 0, 0, 0], (1 - 0.485) / std, rtol=1e-6)


def test_the_rate_is_divided_at_both_reloads_and_once_as_published():
    module, factors = _module("cars"), {}
    for published in (False, True):
        actual = module.get_config(f"published={published}")
        assert actual.steps == "70 epochs"
        spec = fields.plain(actual.schedule)
        steps = functools.partial(timing.steps, epoch_end=lambda epochs: 120 * epochs)
        spec["at"] = [steps(at) for at in spec["at"]]
        factor = registry.resolve("schedule", spec)(total=steps(actual.steps))
        epochs = np.array([0, 29.99, 30, 49.99, 50, 69]) * 120
        factors[published] = [float(factor(int(s))) for s in epochs]
        assert [steps(at) for at in actual.reload_best_at] == [30 * 120, 50 * 120]
    np.testing.assert_allclose(factors[False], [1, 1, 0.1, 0.1, 0.01, 0.01], rtol=1e-6)
    np.testing.assert_allclose(factors[True], [1, 1, 0.1, 0.1, 0.1, 0.1], rtol=1e-6)


def test_refinement_at_test_time_is_an_argument(tmp_path):
    for name, expected in (("cub", (1, 2, False)), ("cars", (1, 4, False))):
        config = _small(name, "attention=dot_plus_one,test_time=True", tmp_path)
        method = config["method"]
        assert (method["layers"], method["heads"], method["concat_layers"]) == expected
        run = build(config | {"select": "test/refined/R@1"})
        assert list(run.options.evaluate.rankings) == ["refined"]
        assert run.selection.score == "refined/R@1"
        plain = _small(name, "attention=dot_plus_one", tmp_path)
        assert not plain["evaluate"]["rankings"]
    for arg, message in (
        ("test_time=True,backbone_only=True", "test_time=True needs the graph"),
        ("heads=averaged,attention=none", "heads=averaged needs an attention"),
        ("sublayers=2", "sublayers=2 is of gat and gatv2, not attention=dot"),
    ):
        with pytest.raises(ValueError, match=message):
            _module(name).get_config(arg)


def test_heads_can_be_averaged():
    """Each head then has all features, as many times the projections."""
    sizes = {
        heads: _sizes("cars", f"heads={heads}", 98)["graph"]
        for heads in ("concatenated", "averaged")
    }
    gat = {
        heads: _sizes("cars", f"heads={heads},attention=gat", 98)["graph"]
        for heads in ("concatenated", "averaged")
    }
    d, layers = 512, 2
    # q, k and v have seven more heads of the full width; the other layers stay.
    assert sizes["averaged"] - sizes["concatenated"] == layers * 3 * 7 * (d * d + d)
    # W is seven heads wider; each of eight vectors a, of two parts, grows from d / 8 to d numbers.
    assert gat["averaged"] - gat["concatenated"] == layers * (7 * d * d + 8 * 2 * (d - d // 8))
    with_name = _module("cub").get_config("heads=averaged,attention=gat,published=True")
    assert with_name.method.attention_fn.to_dict() == {
        "name": "gat",
        "sublayers": 2,
        "share_vector": True,
        "share_projection": True,
        "combine_fn": "average_heads",
    }
