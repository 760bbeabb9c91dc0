"""Arguments of recipes, written as `attention=gat,mlp=False`."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from dmljax.hints import check_known

# The functions that read arguments, and their names in messages, by type.
_TYPES: dict[str, tuple[Callable[[str], Any], str]] = {
    "bool": ({"True": True, "False": False}.__getitem__, "True or False"),
    **{"int": (int, "a whole number"), "float": (float, "a number"), "str": (str, "a name")},
}


def parse(
    recipe: Callable[..., dict[str, Any]], text: str | None, *, fixed: frozenset[str]
) -> dict:
    """Returns the keywords that `text` gives to `recipe`, with the types of its signature.

    `text` is `name=value,name=value`, or None for nothing. Names in `fixed` cannot be set.
    """
    parameters = inspect.signature(recipe).parameters
    names = [name for name in parameters if name not in fixed]
    keywords: dict[str, Any] = {}
    for assignment in filter(None, (text or "").split(",")):
        name, equals, word = assignment.partition("=")
        check_known("the config has no argument", [name], names)
        annotation = inspect.formatannotation(parameters[name].annotation).strip("'")
        type_, *others = annotation.split(" | ")
        convert, expected = _TYPES[type_]
        try:
            if not equals:
                raise ValueError
            keywords[name] = None if word == "None" and others else convert(word)
        except (KeyError, ValueError):
            example = f"{name}={parameters[name].default}"
            raise ValueError(
                f"the argument {assignment!r} needs {expected}: write {example}"
            ) from None
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
