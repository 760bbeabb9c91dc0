"""Fields of `config.method`: names become functions, and defaults are those of the library."""

import functools
import inspect

import jax
import jax.numpy as jnp
import pytest

from dmljax import losses, methods, nets
from dmljax.config import named_methods, registry
from dmljax.config.named_methods.choices import pool_fn_of
from dmljax.config.named_methods.dvml import _MODES, _RELEASES
from dmljax.methods.dvml import VariationalDecoder
from dmljax.methods.graph import GraphNetwork, MessagePassing
from dmljax.nets import attention

NET = nets.convnet(widths=(8, 8), strides=(2, 1))
BATCH = {"images": jax.ShapeDtypeStruct((2, 8, 8, 3), jnp.float32)}
SPLIT = {"split": ("conv1", "conv2"), "attention": "conv2"}


def _defaults(function):
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}


@pytest.mark.parametrize(
    ("name", "pieces"),
    [
        ("abe", ()),
        ("dvml", (VariationalDecoder,)),
        ("graph", (GraphNetwork, MessagePassing, attention.dot)),
        ("pairs", ()),
        ("proxies", ()),
    ],
)
def test_defaults_are_those_of_the_library(name, pieces):
    named = _defaults(getattr(named_methods, name))
    renamed = {"neck": "graph_neck"}
    for function in (getattr(methods, name), *pieces):
        for argument, default in _defaults(function).items():
            if function is GraphNetwork:
                argument = renamed.get(argument, argument)
            # None: the mode of dvml decides.
            if argument in named and named[argument] is not None:
                assert named[argument] == default, argument


def test_the_paper_mode_of_dvml_has_the_defaults_of_the_library():
    paper, library = _MODES["paper"], _defaults(methods.dvml)
    for name in ("samples", "decay", "probe", "phase_at"):
        assert paper[name] == library[name]
    assert paper["lambdas"] == tuple(phase.lambdas for phase in library["phases"])
    releases = _RELEASES[paper["release"]]
    assert releases == tuple(phase.release for phase in library["phases"])


@pytest.mark.parametrize("pool", ["mean", "max", "gem", "mean_max", "flatten"])
def test_a_pool_is_chosen_by_name(pool):
    method = registry.resolve("method", {"name": "pairs", "pool": pool, "dim": None})
    method = method(NET, losses.triplet, classes=3)
    params, model_state = jax.eval_shape(method.init, jax.random.key(0), BATCH)
    embeddings = jax.eval_shape(method.embed, params, model_state, BATCH["images"])
    assert embeddings.shape == (2, 8 * 4 * 4 if pool == "flatten" else 8)
    assert bool(params["head"]) == (pool == "gem")


def test_a_pool_takes_its_options_from_a_dict():
    pool_fn = pool_fn_of({"name": "gem", "p": 4.0})
    assert pool_fn.keywords == {"p": 4.0}


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("pairs", {"pool": "means"}, "no pool 'means': did you mean 'mean'"),
        (
            "pairs",
            {"pool": {"name": "max", "p": 2}},
            "pool 'max' has no argument 'p'. It has: none",
        ),
        ("pairs", {"pool": {"name": "gem", "q": 2}}, "'gem' has no argument 'q'.*epsilon, p"),
        ("proxies", {"poll": "mean"}, "proxies has no argument 'poll': did you mean 'pool'"),
        ("graph", {"mlp": "no"}, "no mlp 'no'.* It has: identity, none, relu"),
        ("graph", {"attention": "gatv3"}, "no attention 'gatv3': did you mean 'gatv2'"),
        (
            "graph",
            {"attention": {"name": "gat", "slpoe": 0.1}},
            "gat has no argument 'slpoe': did you mean 'slope'",
        ),
        ("abe", {"heads": 2, **SPLIT}, "heads must be True or False, not 2"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(name, options, message):
    with pytest.raises((ValueError, TypeError), match=message) as caught:
        factory = registry.resolve("method", {"name": name, **options})
        factory(NET, losses.triplet, classes=3)
    assert "\n" not in str(caught.value)


def test_a_method_without_a_factory_is_found_by_its_name(monkeypatch):
    """It needs no factory in `named_methods`, only a line in `methods/__init__.py`."""

    def plain(net, loss_fn, *, classes: int, width: int = 3):
        return net, loss_fn, classes, width

    monkeypatch.setattr(methods, "plain", plain, raising=False)
    monkeypatch.setattr(methods, "__all__", [*methods.__all__, "plain"])
    assert named_methods.plain is plain


def test_attention_takes_heads_and_dropout_of_the_method():
    """Unless its dict says otherwise."""
    options = {"heads": 2, "dropout": 0.3, "attention": {"name": "gat", "heads": 4}}
    method = named_methods.graph(
        NET, losses.label_smoothed_cross_entropy, classes=3, dim=8, **options
    )
    params, model_state = jax.eval_shape(method.init, jax.random.key(0), BATCH)
    attention_fn = functools.partial(
        method.inspect.batch_attention, images=jnp.zeros(BATCH["images"].shape)
    )
    maps = jax.eval_shape(attention_fn, params, model_state)
    assert maps["attention"].shape == (1, 4, 2, 2)
