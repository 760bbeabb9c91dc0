"""A note where evaluation prepares images in another way than the weights expect."""

import os
from collections.abc import Mapping
from typing import Any

from dmljax.config import registry
from dmljax.data.transforms.recipes import shorter_of
from dmljax.weights import expected_preprocessing

# Transforms of published systems and of users are chosen on purpose.
_COMPARED = ("standard_eval", "squash_eval")
_SIZE_TOLERANCE = 3  # pixels: published systems cut 227 where other code cuts 224


def input_note(weights: str | None, transform: Mapping[str, Any]) -> str:
    """A line if the evaluation's `transform` differs from the one of the weights, else ''.

    Size, filter, and crop or squash are compared, where the file is known.
    """
    if weights is None or not os.path.isfile(weights) or transform["name"] not in _COMPARED:
        return ""
    if (published := expected_preprocessing(weights)) is None:
        return ""
    expected, actual = _compared(published.transform), _compared(transform)
    has_size = abs(expected["size"] - actual["size"]) <= _SIZE_TOLERANCE
    if has_size and {**expected, "size": actual["size"]} == actual:
        return ""
    spec = {k: v for k, v in published.transform.items() if k != "scaled_decode"}
    return (
        f"{os.path.basename(weights)} was trained for {_title(expected)}, and this run evaluates "
        f'with {_title(actual)}. To prepare images as for the weights: --config.eval_transform="'
        f'{spec}"'
    )


def _compared(spec: Mapping[str, Any]) -> dict[str, Any]:
    values = registry.complete("transform", spec)
    names = ("name", "size", "shorter", "filter")
    values = {name: values[name] for name in names if name in values}
    if values.get("shorter", 0) is None:
        values["shorter"] = shorter_of(values["size"])
    return values


def _title(values: Mapping[str, Any]) -> str:
    options = ", ".join(f"{name}={value}" for name, value in values.items() if name != "name")
    return f"{values['name']}({options})"
