"""Config files and overrides, as plain data, and a run's default folder. Imports no jax."""

import ast
import inspect
import pathlib
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from dmljax import recipes
from dmljax.hints import hint


def read(name: str, overrides: Iterable[str] = ()) -> dict[str, Any]:
    """Returns the config that `--config=` names, with overrides such as `--config.steps=500`.

    `name` is a Python file with `get_config()`, such as 'configs/glyphs.py', or a recipe of
    `dmljax.recipes`, such as 'glyphs'. Both may be followed by arguments: 'abe:dataset=cars196'.
    An override may set a field that the config leaves to its default.
    """
    source, _, argument = str(name).partition(":")
    get_config = get_config_of(source)
    try:
        takes_argument = bool(inspect.signature(get_config).parameters)
        if argument and not takes_argument:
            raise ValueError(f"it takes no argument, so not {argument!r}")
        config = plain(get_config(argument) if argument else get_config())
    except Exception as error:  # a config is the user's program
        raise ValueError(f"{source} does not run: {type(error).__name__}: {error}") from error
    return override(config, overrides)


def folder_name(name: str) -> str:
    """Returns a folder name: 'configs/cars_abe.py:learners=4' -> 'cars_abe-learners=4'."""
    source, _, argument = str(name).partition(":")
    return "-".join([pathlib.Path(source).stem, *filter(None, argument.split(","))])


def get_config_of(source: str) -> Callable[..., Any]:
    """Returns the `get_config` of a config file, or of a recipe by its name."""
    path = pathlib.Path(source)
    if not path.suffix and len(path.parts) == 1:
        return _recipe(source)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent} for the config {path.name!r}")
    if not path.is_file():
        others = hint(path.name, (other.name for other in path.parent.glob("*.py")))
        raise FileNotFoundError(f"the folder {path.parent} has no config {path.name!r}{others}")
    if path.suffix == ".json":  # such as the one of a run
        raise ValueError(
            f"{path} is not a Python file, as a config is. To repeat a run, write one with "
            "`import json, pathlib; "
            f"get_config = lambda: json.loads(pathlib.Path({str(path)!r}).read_text())`"
        )
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


def _recipe(name: str) -> Callable[..., Any]:
    if name not in recipes.NAMES:
        raise ValueError(
            f"there is no recipe {name!r}{hint(name, recipes.NAMES)}. A config file is written as "
            f"configs/{name}.py"
        )
    return recipes.config_function(getattr(recipes, name))


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
        fields: Any = config
        for parent in parents:
            fields = _section(fields, parent)
        if not isinstance(fields, dict):
            raise ValueError(f"{flag}: {'.'.join(parents)} has no fields")
        try:
            fields[leaf] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            fields[leaf] = value
    return config


def _section(fields: Any, name: str) -> Any:
    """Returns the fields of a field, or of an item of a list such as 'optimizer.groups.0'."""
    if isinstance(fields, list):
        return fields[int(name)] if name.isdecimal() and int(name) < len(fields) else None
    if not isinstance(fields, dict):
        return None
    value = fields.get(name)
    if isinstance(value, str):
        fields[name] = {"name": value}
    elif value is True or (not isinstance(value, dict | list) and not value):
        fields[name] = {}  # a setting that is off, or has its defaults
    return fields[name]


def plain(config: Any) -> Any:
    """Returns a ConfigDict, or anything nested, as dicts, lists and scalars."""
    if isinstance(config, Mapping) or hasattr(config, "items"):
        return {str(k): plain(v) for k, v in config.items()}
    return [plain(v) for v in config] if isinstance(config, list | tuple) else config


def differences(old: Any, new: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yields `(path, old, new)` for every field in which two plain configs differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(set(old) | set(new)):
            yield from differences(old.get(key), new.get(key), f"{path}.{key}" if path else key)
    elif old != new:
        yield path, old, new
