"""Names in configs: the right kind of function, or one line that lists what exists."""

import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Optional, TypeVar

import numpy as np
import pytest
from jaxtyping import Bool, Float

from dmljax.config import registry
from dmljax.losses import pnp_penalties
from dmljax.miners import selections
from dmljax.nets.attention import average_heads
from dmljax.ops import Array
from dmljax.train import options

HELPERS = {
    "sampler": {"coverage", "epoch_steps", "group", "k_reciprocal"},
    "loss": {"clip", "cross_batch_memory", "lp", "stats", "weighted_sum", "zero_mean"},
    "schedule": {"Schedule", "adam"},
    "optimizer": {"averaged", "build", "cosine"},
    "reduce_fn": {"normalize", "euclidean"},
    "distance_fn": {"mean", "acos"},
}


@pytest.mark.parametrize("kind", [*registry.KINDS, *registry.ARGUMENTS])
def test_a_table_holds_functions_of_its_kind(kind):
    names = registry.names(kind)
    assert names and not set(names) & HELPERS.get(kind, set())
    assert all(callable(registry.resolve(kind, name)) for name in names)


@pytest.mark.parametrize(
    "kind, name, message",
    [
        ("schedule", "adam", r"no schedule 'adam'\. It has: constant, cosine, steps"),
        ("sampler", "group", "no sampler 'group'.* It has.*"),
        ("sampler", "standard_train", "no sampler 'standard_train'"),
        ("transform", "class_balanced", "no transform 'class_balanced'"),
        ("optimizer", "cosine", "no optimizer 'cosine'.* adam, radam, rmsprop, sgd"),
        ("loss", "stats", "no loss 'stats'"),
        ("sampler", "dmljax.data.sampling:group", "not a sampler: it must take 1"),
        ("loss", "dmljax.losses:lp", "not a loss: it must take 2 arguments"),
        ("optimizer", "dmljax.train.optimizers:averaged", "it needs the argument 'params'"),
    ],
)
def test_a_function_of_another_kind_is_refused(kind, name, message):
    with pytest.raises(ValueError, match=message) as refused:
        registry.resolve(kind, name)
    assert "\n" not in str(refused.value)


def test_functions_as_keywords_are_names_of_their_own_kind():
    loss = registry.resolve("loss", {"name": "contrastive", "reduce_fn": "sum"})
    assert loss.keywords["reduce_fn"] is registry.table("reduce_fn")["sum"]
    spec = {"name": "triplet", "mine_fn": {"name": "triplet_margin", "margin": 0.1}}
    assert registry.resolve("loss", spec).keywords["mine_fn"].keywords == {"margin": 0.1}
    for kind, name, keyword, value, function in [
        ("loss", "pnp", "penalty_fn", "iu", pnp_penalties.iu),
        ("miner", "batch_easy_hard", "pos_fn", "every", selections.every),
        ("attention_fn", "gat", "combine_fn", "average_heads", average_heads),
    ]:
        assert registry.resolve(kind, {"name": name, keyword: value}).keywords[keyword] is function
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


VALUES = (3, 2.5, "a", True, None, [1, 2], ["a"], [[1.0]], {"x": 1})
INNER = r"\S+ must be"  # an item of a list or dict that does not fit is named itself
FITTING = [  # annotations, the VALUES that fit, words of the refusal
    (float, [3, 2.5], "a number"),
    (int, [3], "a whole number"),
    (bool, [True], "True or False"),
    (float | None, [3, 2.5, None], "a number or None"),
    (Optional[int], [3, None], "a whole number or None"),  # noqa: UP045  of a user
    (tuple, [[1, 2], ["a"], [[1.0]]], "a list"),
    (tuple[int, ...], [[1, 2]], "a list"),
    (tuple[float, float], [[1, 2]], "a list( of 2 values)?"),
    (list[str], [["a"]], "a list"),
    (Sequence[Sequence[float]], [[[1.0]]], "a list"),
    (Mapping[str, int], [{"x": 1}], "an object"),
    (Literal["a", 3], [3, "a"], "'a' or 3"),
    (Callable[[int], int] | None, [None], "a function or None"),
    (options.Spec, ["a"], r"a name or dict\(name='...', ...\)"),
    (Float[Array, ""] | float, [3, 2.5], "a number"),
    (Bool[Array, "b"] | None, [None], "None"),
    (np.ndarray, [], "left out"),
    (Any, list(VALUES), ""),
    (TypeVar("T"), list(VALUES), ""),  # a config does not understand it
]


@pytest.mark.parametrize(("annotation", "fitting", "words"), FITTING, ids=str)
def test_every_kind_of_annotation_is_judged(annotation, fitting, words):
    for value in VALUES:
        arguments = "f", {"x": value}, {"x": annotation}
        if any(value is fit for fit in fitting) or value in [x for x in fitting if x is not True]:
            registry.check(*arguments)
        else:
            with pytest.raises(ValueError, match=rf"^f: x({INNER}| must be {words}, got)"):
                registry.check(*arguments)


@pytest.mark.parametrize("kind", [*registry.KINDS, *registry.ARGUMENTS])
def test_every_keyword_of_a_table_is_judged(kind):
    """Each value is accepted or refused; no annotation is unknown, and none but Any takes all."""
    for name, function in registry.table(kind).items():
        for parameter in inspect.signature(function, eval_str=True).parameters.values():
            if parameter.kind is not parameter.KEYWORD_ONLY:
                continue
            assert parameter.annotation is not parameter.empty, (kind, name, parameter.name)
            accepted = []
            for value in VALUES:
                with contextlib.suppress(ValueError):
                    registry.check(name, {"x": value}, {"x": parameter.annotation})
                    accepted.append(value)
            takes_all = parameter.name == "dtype" or (kind == "net" and parameter.name == "parent")
            assert takes_all or len(accepted) < len(VALUES), (kind, name, parameter.name)
