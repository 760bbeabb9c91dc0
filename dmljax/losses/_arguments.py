"""Descriptions of arguments that losses share: written once, part of every docstring."""

import inspect
import textwrap
from collections.abc import Callable, Mapping

__all__ = ["PAIR_ARGUMENTS", "PROXY_ARGUMENTS", "VECTOR_ARGUMENTS", "VIEW_ARGUMENTS", "describe"]

_REDUCE = (
    "Turns the entries into one number: `ops.mean`, `ops.mean_of_active`, `ops.sum`, "
    "`ops.threshold(...)`, `ops.weighted(...)`. None returns the entries, 0 where they do not "
    "count."
)
PAIR_ARGUMENTS = {
    "labels": (
        "Classes of the rows: int `[b]`; or multi-hot bool `[b c]`, where rows that share a class "
        "are positives; or `ops.Pairs`, the masks of positives and negatives."
    ),
    "distance_fn": (
        "What the loss measures: `distance_fn(x [b d], y [n d]) -> [b n]`. `ops.unit_euclidean`, "
        "`ops.cosine` and `ops.unit(...)` normalize embeddings; `ops.euclidean`, "
        "`ops.squared_euclidean` and `ops.dot` do not."
    ),
    "references": (
        "What the anchors are compared with. By default the batch itself, without the pair of a "
        "row with itself. References that contain the batch, such as those of "
        "`jax.lax.all_gather`, count each row as its own positive: give `ops.pairs(labels, "
        "reference_labels, ids=..., reference_ids=...)` as labels, which excludes equal ids."
    ),
    "reference_labels": "Classes of `references`, in the form of `labels`.",
    "where": "Rows that count. Masking a row equals dropping it.",
    "mine_fn": (
        "A miner, `mine_fn(distances, pairs)`, that selects pairs or triplets: see "
        "`dmljax.miners`. It reads Euclidean distances of unit embeddings, whatever the loss "
        "itself measures."
    ),
    "reduce_fn": _REDUCE,
}
PROXY_ARGUMENTS = {
    "labels": (
        "Classes of the rows, from 0 to c - 1. Another label raises, or gives NaN inside `jit`, "
        "where its value is unknown."
    ),
    "proxies": "One learned vector per class, or k of them: parameters, trained with the net.",
    "where": "Rows that count. Masking a row equals dropping it, whatever its label.",
    "reduce_fn": _REDUCE,
    "tiles": (
        "For very many classes, `ops.ClassTiles(size)`: `size` classes at a time, or a random "
        "share of them. None computes all logits at once."
    ),
}
VIEW_ARGUMENTS = {
    "other": "Row i is the other view, or modality, of row i of `embeddings`. It gets gradients.",
    "where": "Rows that count, on both sides. Masking a row equals dropping it.",
    "reduce_fn": _REDUCE,
}
VECTOR_ARGUMENTS = {
    "x": "Vectors along the last axis: embeddings `[b d]`, or proxies `[c d]` or `[c k d]`.",
    "proxies": "k learned vectors per class.",
    "where": "Vectors that count. Masking a vector equals dropping it.",
    "reduce_fn": _REDUCE,
}


def describe(arguments: Mapping[str, str]) -> Callable[[Callable], Callable]:
    """A decorator that describes a function's parameters in its docstring, by `arguments`.

    They follow the section "Args:" of the docstring, in front of its example.
    """

    def decorate(function):
        if function.__doc__ is None:  # python -OO
            return function
        text, prompt, example = inspect.cleandoc(function.__doc__).partition("\n\n>>> ")
        if "\n\nArgs:\n" not in text:
            text += "\n\nArgs:"
        described = text.partition("\n\nArgs:")[2]
        for name in inspect.signature(function).parameters:
            if name in arguments and f"\n    {name}: " not in described:
                lines = textwrap.wrap(f"{name}: {arguments[name]}", 92, subsequent_indent="    ")
                text += "\n" + textwrap.indent("\n".join(lines), "    ")
        function.__doc__ = text + prompt + example
        return function

    return decorate
