"""Config files and overrides, as plain data, and a run's default folder. Imports no jax."""

import ast
import inspect
import pathlib
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from dmljax import recipes
from dmljax.config import fields
from dmljax.files import reading
from dmljax.hints import hint


def read(name: str, overrides: Iterable[str] = ()) -> dict[str, Any]:
    """Returns the config that `--config=` names, with overrides such as `--config.steps=500`.

    `name` is a Python file with `get_config()`, such as 'configs/glyphs.py', the `config.json` of a
    run, or a recipe of `dmljax.recipes`, such as 'glyphs'. A file and a recipe may be followed by
    arguments: 'abe:dataset=cars196'. An override may set a field that the config leaves to its
    default.
    """
    source, _, argument = str(name).partition(":")
    get_config = _get_config_of(source)
    try:
        config = fields.plain(get_config(argument) if argument else get_config())
    except Exception as error:  # a config is the user's program
        raise ValueError(f"{source} does not run: {type(error).__name__}: {error}") from error
    return override(config, overrides)


def folder_name(name: str) -> str:
    """Returns a folder name: 'configs/cars_abe.py:learners=4' -> 'cars_abe-learners=4'."""
    source, _, argument = str(name).partition(":")
    return "-".join([pathlib.Path(source).stem, *filter(None, argument.split(","))])


def _get_config_of(source: str) -> Callable[..., Any]:
    """Returns the `get_config` of a config file, or of a recipe by its name."""
    path = pathlib.Path(source)
    if not path.suffix and len(path.parts) == 1:
        if source not in recipes.NAMES:
            names = hint(source, recipes.NAMES, where="dmljax list recipes")
            raise ValueError(
                f"there is no recipe {source!r}{names}. A config file is written as "
                f"configs/{source}.py"
            )
        return recipes.config_function(getattr(recipes, source))
    if not path.is_file():
        others = hint(path.name, (other.name for other in path.parent.glob("*.py")))
        raise FileNotFoundError(f"the folder {path.parent} has no config {path.name!r}{others}")
    if path.suffix == ".json":  # of a run
        return lambda: reading.object_of_run(path)
    return function_of_file(path, "get_config")


def function_of_file(path: pathlib.Path, name: str) -> Callable[..., Any]:
    """Returns the function `name` of a Python file, which is a program of the user.

    The file is compiled each time. Python's import would take the compiled form of an earlier
    content, if both were written in the same second and have the same length.
    """
    module = types.ModuleType(path.stem)
    module.__file__ = str(path)
    try:
        exec(compile(path.read_bytes(), str(path), "exec"), module.__dict__)
        function = getattr(module, name)
        inspect.signature(function)
        return function
    except Exception as error:
        raise ValueError(f"{path} does not run: {type(error).__name__}: {error}") from error


def override(config: dict[str, Any], flags: Iterable[str]) -> dict[str, Any]:
    """Changes the config by flags such as `--config.steps=500`, and returns it.

    `--config.size` replaces the sizes that the config gives its transforms; other flags may give
    them sizes again.
    """
    for flag in sorted(flags, key=lambda flag: not flag.startswith("--config.size=")):
        key, equals, value = flag.partition("=")
        if key == "--config.size":
            for spec in (config.get("transform"), config.get("eval_transform")):
                if isinstance(spec, dict):
                    spec.pop("size", None)
        if not key.startswith("--config.") or not equals:
            raise ValueError(f"{flag} is not known; an override is --config.steps=500")
        *parents, leaf = key.removeprefix("--config.").split(".")
        section: Any = config
        for parent in parents:
            section = _section(section, parent)
        if not isinstance(section, dict):
            raise ValueError(f"{flag}: {'.'.join(parents)} has no fields")
        try:
            section[leaf] = value if value == "..." else ast.literal_eval(value)
        except (ValueError, SyntaxError):
            section[leaf] = value
    return config


def _section(section: Any, name: str) -> Any:
    """Returns the fields of a field, or of an item of a list such as 'optimizer.groups.0'."""
    if isinstance(section, list):
        return section[int(name)] if name.isdecimal() and int(name) < len(section) else None
    if not isinstance(section, dict):
        return None
    value = section.get(name)
    if isinstance(value, str):
        section[name] = {"name": value}
    elif value is True or (not isinstance(value, dict | list) and not value):
        section[name] = {}  # a setting that is off, or has its defaults
    return section[name]


def differences(old: Any, new: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yields `(path, old, new)` for every field in which two plain configs differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(set(old) | set(new)):
            yield from differences(old.get(key), new.get(key), f"{path}.{key}" if path else key)
    elif old != new:
        yield path, old, new


def table(name: str, overrides: Iterable[str] = ()) -> str:
    """Returns all values of a config as aligned lines of field, value and source, for `--print`.

    A source is the last of 'default', 'recipe', 'config file' and 'command line' that changed the
    value; arguments behind a colon belong to the command line.
    """
    path = name.partition(":")[0]
    recipe = getattr(_get_config_of(path), "recipe", None)
    required: dict[str, Any] = dict.fromkeys(("dataset", "net", "loss", "method"), "")
    layers = {
        "default": {**required, "steps": ""},
        **({} if recipe is None else {"recipe": recipe()}),
        "config file": read(path),
        "command line": read(name, overrides),
    }
    values, sources = dict[str, Any](), dict[str, str]()
    for source, config in layers.items():
        previous, values = values, dict(_leaves(fields.complete(config)))
        sources = {
            field: sources[field] if field in previous and previous[field] == value else source
            for field, value in values.items()
        }
    widths = [max(map(len, values)), max(len(repr(value)) for value in values.values())]
    return "\n".join(
        f"{field:{widths[0]}}  {value!r:{min(widths[1], 48)}}  {sources[field]}"
        for field, value in values.items()
    )


def _leaves(value: Any, field: str = "") -> Iterator[tuple[str, Any]]:
    """Yields `(field, value)` for all values of a config, such as 'optimizer.groups.0.factor'."""
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        value = dict(enumerate(value))
    if not isinstance(value, dict):
        yield field, value
        return
    for name, item in value.items():
        yield from _leaves(item, f"{field}.{name}" if field else str(name))
