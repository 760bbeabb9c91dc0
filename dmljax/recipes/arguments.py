"""Arguments of recipes, written as `attention=gat,mlp=False`."""

import ast
import contextlib
import inspect
import typing
from collections.abc import Callable, Iterable
from typing import Any

from dmljax.files import schema
from dmljax.hints import check_known


def parse(
    recipe: Callable[..., dict[str, Any]], text: str | None, *, fixed: frozenset[str]
) -> dict:
    """Returns the keywords that `text` gives to `recipe`, with the types of its signature.

    `text` is `name=value,name=value`, or None for nothing. Names in `fixed` cannot be set.
    """
    parameters = inspect.signature(recipe, eval_str=True).parameters
    names = [name for name in parameters if name not in fixed]
    keywords: dict[str, Any] = {}
    for assignment in filter(None, (text or "").split(",")):
        name, _, value = assignment.partition("=")
        check_known("the config has no argument", [name], names)
        kind = parameters[name].annotation
        if kind is not str:
            with contextlib.suppress(ValueError, SyntaxError):
                value = ast.literal_eval(value)
        value = schema.parse(kind, value, f"the argument {name}")
        is_float = float in (kind, *typing.get_args(kind))
        keywords[name] = float(value) if is_float and value is not None else value
    return keywords


def config_function(recipe: Callable[..., dict[str, Any]], **fixed: Any) -> Callable[..., Any]:
    """Returns the `get_config(argument)` of a config file: `recipe` with some keywords chosen.

    It returns an `ml_collections.ConfigDict`, so that other programs can read the file with
    `ml_collections.config_flags` too.
    """

    def get_config(argument: str | None = None) -> Any:
        from ml_collections import ConfigDict

        return ConfigDict(recipe(**fixed, **parse(recipe, argument, fixed=frozenset(fixed))))

    vars(get_config).update(recipe=recipe)  # for `--print`
    return get_config


def check_choice(name: str, value: Any, choices: Iterable[Any]) -> None:
    """Raises unless `value` is one of `choices`."""
    choices = list(choices)
    if value not in choices:
        listed = ", ".join(map(str, choices[:-1])) + f" or {choices[-1]}"
        raise ValueError(f"{name} is {listed if len(choices) > 1 else choices[0]}, not {value!r}")
