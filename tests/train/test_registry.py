"""Names in configs: the right kind of function, or one line that lists what exists."""

import inspect

import pytest

from dmljax.config import registry
from dmljax.losses import pnp_penalties
from dmljax.miners import selections
from dmljax.nets.attention import average_heads

HELPERS = {
    "sampler": {"coverage", "epoch_steps", "group", "k_reciprocal", "k_reciprocal_queries"},
    "loss": {"clip", "cross_batch_memory", "lp", "stats", "weighted_sum", "zero_mean"},
    "schedule": {"Schedule", "adam"},
    "optimizer": {"averaged", "build", "cosine"},
    "reduction": {"normalize", "euclidean"},
    "distance": {"mean", "acos"},
}


@pytest.mark.parametrize("kind", registry.KINDS)
def test_a_table_holds_functions_of_its_kind(kind):
    names = registry.names(kind)
    assert names and not set(names) & HELPERS.get(kind, set())
    assert all(callable(registry.resolve(kind, name)) for name in names)


@pytest.mark.parametrize(
    "kind, name, message",
    [
        ("schedule", "adam", r"no schedule 'adam'\. It has: constant, cosine, steps"),
        ("sampler", "coverage", r"no sampler 'coverage'.* It has: abe_pairs, combine, n_pairs, "),
        ("sampler", "standard_train", "no sampler 'standard_train'"),
        ("transform", "plan", "no transform 'plan'"),
        ("optimizer", "cosine", "no optimizer 'cosine'.* adam, radam, rmsprop, sgd"),
        ("loss", "stats", "no loss 'stats'"),
        ("sampler", "dmljax.data.sampling:coverage", "not a sampler: it does not take seed and st"),
        ("loss", "dmljax.losses:lp", "not a loss: it does not take 2 arguments by position"),
        ("optimizer", "dmljax.train.optimizers:averaged", "needs arguments that a config cannot"),
    ],
)
def test_a_function_of_another_kind_is_refused(kind, name, message):
    with pytest.raises(ValueError, match=message) as refused:
        registry.resolve(kind, name)
    assert "\n" not in str(refused.value)


def test_functions_as_keywords_are_names_of_their_own_kind():
    loss = registry.resolve("loss", {"name": "contrastive", "reduce_fn": "sum"})
    assert loss.keywords["reduce_fn"] is registry.table("reduction")["sum"]
    spec = {"name": "triplet", "mine_fn": {"name": "triplet_margin", "margin": 0.1}}
    assert registry.resolve("loss", spec).keywords["mine_fn"].keywords == {"margin": 0.1}
    for kind, spec, keyword, function in [
        ("loss", {"name": "pnp", "penalty_fn": "iu"}, "penalty_fn", pnp_penalties.iu),
        ("miner", {"name": "batch_easy_hard", "pos_fn": "every"}, "pos_fn", selections.every),
        ("miner", {"name": "batch_easy_hard", "neg_fn": "easiest"}, "neg_fn", selections.easiest),
        ("attention", {"name": "gat", "combine_fn": "average_heads"}, "combine_fn", average_heads),
    ]:
        assert registry.resolve(kind, spec).keywords[keyword] is function
    spec = {"name": "pnp", "penalty_fn": {"name": "dq", "alpha": 2.0}}
    assert registry.resolve("loss", spec).keywords["penalty_fn"].keywords == {"alpha": 2.0}
    with pytest.raises(ValueError, match="no reduction 'euclidean'"):
        registry.resolve("loss", {"name": "contrastive", "reduce_fn": "euclidean"})


def test_every_loss_of_a_batch_is_in_the_table():
    from dmljax import losses

    takes_labels = {
        name
        for name in losses.__all__
        if list(inspect.signature(getattr(losses, name)).parameters)[1:2] == ["labels"]
    }
    assert set(registry.names("loss")) == takes_labels - {"stats"}
