"""Options with functions: every name in a config becomes a function here, once, with arguments."""

import dataclasses
import inspect
from collections.abc import Collection, Mapping
from typing import Any

from dmljax.config import registry
from dmljax.config.fields import named
from dmljax.train import optimizers
from dmljax.train.options import SECTIONS, SETTINGS, Options, Spec, fields_of

# Kinds of functions by the fields that name them, where the kind is not the name of the field.
_KINDS = {
    "eval_transform": "transform",
    "normalize": "normalization",
    "trained": "adaptation",
}
_GIVEN = ("direction", "schedule", "backbone")  # arguments of `optimizers.build` from elsewhere
# Keywords of a field that are not arguments of its function, with their types.
EXTRAS: Mapping[str, Mapping[str, Any]] = {
    # Fractions of the training split; whether an epoch has as many steps as with all images.
    "dataset": {"image_fraction": "float", "class_fraction": "float", "full_epochs": "bool"},
    "net": {"weights": "str | None"},
    "normalize": {"force": "bool"},
    "optimizer": {
        name: parameter.annotation
        for name, parameter in inspect.signature(optimizers.build).parameters.items()
        if name not in _GIVEN
    },
    "sampler": {"every": "int | str"},
}
_LENGTHS = {"warmup": 0, "at": (1,)}  # arguments of schedules that may be '5 epochs'
_CALLED = registry.Kind("function for evaluate.call", (), 1, ("step", "workdir"))


def resolve(config: Mapping[str, Any], only: Collection[str] | None = None) -> Options:
    """Returns the options of a completed config, with a function in every `Spec`.

    Raises a one-line error for an unknown name, an unknown argument or a value of a wrong type.
    With `only`, names in other fields stay plain data, and their modules are not imported. Lists
    become tuples, and `evaluate.frozen` is decided.
    """
    options = Options(**{name: _value(name, value, only) for name, value in config.items()})
    if options.evaluate.frozen is not None:
        return options
    evaluate = dataclasses.replace(options.evaluate, frozen=options.has_pretrained)
    return dataclasses.replace(options, evaluate=evaluate)


def chosen(field: str, value: str | Mapping[str, Any]) -> Spec:
    """Returns the function that the value of a field names."""
    spec = named(value)
    kind = _KINDS.get(field, field)
    checked = spec
    if field == "schedule":  # lengths such as '5 epochs' become steps in `config.timing`
        checked = {name: _LENGTHS.get(name, value) for name, value in spec.items()}
    return Spec(spec, registry.resolve(kind, checked, extras=EXTRAS.get(field, {})))


def with_defaults(spec: Spec) -> dict[str, Any]:
    """Returns a spec as a dict with the plain defaults of its function, for digests.

    Defaults that are functions are left out. Functions in `spec` stay names.
    """
    parameters = inspect.signature(spec.partial.func).parameters.values()
    plain = (bool, int, float, str, tuple, type(None))
    defaults = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    return {k: v for k, v in defaults.items() if isinstance(v, plain)} | spec


def _value(name: str, value: Any, only: Collection[str] | None) -> Any:
    if name in SECTIONS:
        return _section(name, value, only)
    if name in SETTINGS:
        return _setting(name, value)
    value = _tuples(value)
    if value is None or not str(fields_of(Options)[name].type).startswith("Spec"):
        return value
    return chosen(name, value) if only is None or name in only else Spec(named(value))


def _section(name: str, value: Mapping[str, Any], only: Collection[str] | None) -> Any:
    fields = {
        field: _setting(f"{name}.{field}", x) if f"{name}.{field}" in SETTINGS else _tuples(x)
        for field, x in value.items()
    }
    if name == "evaluate" and (only is None or name in only):
        metrics = (x if x == "all" else chosen("metric", x) for x in fields["metrics"])
        fields["metrics"] = tuple(metrics)
        if (call := fields["call"]) is not None:
            fields["call"] = registry.own_function(call, _CALLED)
    return SECTIONS[name](**fields)


def _setting(path: str, value: Mapping[str, Any] | None) -> Any:
    if value is None:
        return None
    settings = SETTINGS[path]
    return settings.get(value["name"], next(iter(settings.values())))(**_tuples(value))


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _tuples(v) for k, v in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value
