"""Names of functions in `config.method`, and the fields that version 0.1.0 had for them."""

import inspect
import warnings

import jax
import jax.numpy as jnp
import pytest

from dmljax import losses, nets, recipes
from dmljax.config import old_names, registry

NET = nets.convnet(widths=(8, 8), strides=(2, 1))
BATCH = {"images": jax.ShapeDtypeStruct((2, 8, 8, 3), jnp.float32)}
SPLIT = {"split": ("conv1", "conv2"), "attention": "conv2"}


def _shapes(spec, loss_fn=losses.triplet, net=NET):
    method = registry.resolve("method", spec)(net, loss_fn, classes=3)
    return jax.eval_shape(method.init, jax.random.key(0), BATCH), method


@pytest.mark.parametrize(
    ("pool", "width"),
    [(None, 8), ("global_max", 8), ("learned_gem", 8), ("global_mean_max", 8), ("flatten", 128)],
)
def test_a_pool_is_chosen_by_name(pool, width):
    (params, model_state), method = _shapes({"name": "pairs", "pool_fn": pool, "dim": None})
    embeddings = jax.eval_shape(method.embed, params, model_state, BATCH["images"])
    assert embeddings.shape == (2, width)
    assert bool(params["head"]) == (pool == "learned_gem")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("pairs", {"pool_fn": "global_men"}, "no pool 'global_men': did you mean 'global_mean'"),
        ("pairs", {"pool_fn": {"name": "global_max", "p": 2}}, "global_max has no argument 'p'"),
        ("pairs", {"pool_fn": {"name": "learned_gem", "q": 2}}, "learned_gem has no argument 'q'"),
        ("proxies", {"pol_fn": "flatten"}, "proxies has no argument 'pol_fn': did you mean 'pool"),
        ("graph", {"mlp_fn": "no"}, "no step of a block 'no'.* It has: identity, mlp"),
        ("graph", {"attention_fn": "gatv3"}, "no attention 'gatv3': did you mean 'gatv2'"),
        (
            "graph",
            {"attention_fn": {"name": "gat", "slpoe": 0.1}},
            "gat has no argument 'slpoe': did you mean 'slope'",
        ),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(name, options, message):
    with pytest.raises((ValueError, TypeError), match=message) as caught:
        registry.resolve("method", {"name": name, **options})
    assert "\n" not in str(caught.value)


def test_attention_takes_heads_and_dropout_of_the_method():
    """Unless its dict says otherwise."""
    spec = {"name": "graph", "dim": 8, "heads": 2, "dropout": 0.3}
    for attention, heads in (("gat", 2), ({"name": "gat", "heads": 4}, 4)):
        loss_fn = losses.label_smoothed_cross_entropy
        (params, state), method = _shapes(spec | {"attention_fn": attention}, loss_fn)
        images = BATCH["images"]
        maps = jax.eval_shape(method.inspect.batch_attention, params, state, images)
        assert {name: x.shape for name, x in maps.items()} == {"attention": (1, heads, 2, 2)}


CODE = recipes.dvml(mode="code_1200")["method"]
PAPER = recipes.dvml()["method"]
# The fields of version 0.1.0, and what they are now.
OLD = [
    ({"name": "pairs", "pool": "mean"}, {"name": "pairs", "pool_fn": None}),
    (
        {"name": "proxies", "proxy_std": 1.0, "embedding_init": "kaiming_fan_out"},
        {"name": "proxies", "proxy_init": 1.0, "dense_fn": "kaiming_dense"},
    ),
    (
        {"name": "pairs", "pool": {"name": "gem", "p": 4.0}},
        {"name": "pairs", "pool_fn": {"name": "learned_gem", "p": 4.0}},
    ),
    (
        {"name": "graph", "attention": "none", "mlp": "none", "threshold": None, "weighted": False},
        {"name": "graph", "attention_fn": None, "mlp_fn": None},
    ),
    (  # GAT had two sub-layers by default.
        {"name": "graph", "attention": "gat", "heads": 4, "mlp": "relu", "threshold": 0.5},
        {
            "name": "graph",
            "attention_fn": {"name": "gat", "sublayers": 2},
            "heads": 4,
            "mlp_fn": "mlp",
            "edges_fn": {"name": "similarity_edges", "threshold": 0.5},
        },
    ),
    (
        {"name": "graph", "weighted": True, "similarity": "dot", "positive": "shifted"},
        {
            "name": "graph",
            "edges_fn": {
                "name": "similarity_graph",
                "similarity_fn": "dot_products",
                "positive_fn": "shifted",
            },
        },
    ),
    (
        {"name": "abe", "heads": True, "mask": "sigmoid", **SPLIT},
        {"name": "abe", **SPLIT, "attention": None},
    ),
    (
        {"name": "abe", "pairs": "drawn", "divergence_pairs": "mean", "heads": False, **SPLIT},
        {
            "name": "abe",
            "pairs_fn": "drawn_pairs",
            "divergence_fn": {"name": "mean_divergence", "margin": 1.0},
            **SPLIT,
        },
    ),
    ({"name": "dvml", "mode": "paper", "dim": 512}, PAPER),
    ({"name": "dvml", "release": "never"}, PAPER | {"release": (False, False)}),
    (
        {"name": "dvml", "mode": "report", "baseline": True},
        recipes.dvml(mode="report", baseline=True)["method"],
    ),
    ({"name": "dvml", "mode": "seed", "phase_at": 1600}, CODE | {"phase_at": 1600}),
]


@pytest.mark.parametrize(("old", "new"), OLD, ids=str)
def test_old_fields_mean_what_they_meant(old, new):
    with pytest.warns(FutureWarning, match=f"config.method: .* of {old['name']} is now") as caught:
        current = old_names.current_method(old)
    assert len(caught) == 1 and "\n" not in str(caught[0].message)
    bound, expected = (registry.resolve("method", spec) for spec in (current, new))
    parameters = inspect.signature(expected.func).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}

    def plain(keywords):
        values = (defaults | keywords).items()
        return {k: getattr(v, "__name__", str(v)) if callable(v) else v for k, v in values}

    assert plain(bound.keywords) == plain(expected.keywords)


@pytest.mark.parametrize("recipe", [recipes.abe, recipes.dvml, recipes.graph])
def test_fields_of_today_stay_and_do_not_warn(recipe):
    method = recipe()["method"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert old_names.current_method(method) == method
        assert old_names.current_method("pairs") == "pairs"


def test_the_old_mode_of_a_recipe_warns():
    with pytest.warns(FutureWarning, match="write mode='code_1600'"):
        config = recipes.dvml(mode="seed")
    assert config == recipes.dvml(mode="code_1600")
