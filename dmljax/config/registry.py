"""Names in configs become functions: tables of names, and `Options` with functions in them.

The names of a kind are those in `__all__` of its module whose functions take the arguments that the
kind requires. So a new loss is found by its name as soon as its module exports it, and a helper
next to it, such as `sampling.group`, is not mistaken for a sampler. Imports no jax.
"""

import dataclasses
import functools
import importlib
import inspect
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from dmljax.config.fields import check, named
from dmljax.files.reading import FileText
from dmljax.hints import hint
from dmljax.train.options import SECTIONS, Options, Spec, fields_of, takes


class Kind(NamedTuple):
    """A kind of function that a config can name, and the arguments that it must take.

    The caller passes at least `positional` arguments by position (None: any number), and the
    `keywords` by name. Where the arguments do not identify the kind, `only` lists the names of its
    functions, or `excludes` the names of other functions in the modules.
    """

    title: str
    modules: str  # below dmljax, without a dot in front
    positional: int | None = 0
    only: str = ""
    keywords: str = ""
    excludes: str = ""


# Kinds of functions by the names that `resolve` takes.
KINDS = {
    "dataset": Kind("data set", "data.datasets"),
    "sampler": Kind("sampler", "data.sampling", 1, keywords="seed step"),
    "transform": Kind("transform", "data.transforms", None),
    "normalization": Kind("normalization", "weights.preprocessing", 1, excludes="inputs title"),
    "net": Kind("net", "nets"),
    "method": Kind("method", "methods", 2, keywords="classes"),
    # Losses of two views take no labels, so that no method can use them.
    "loss": Kind("loss", "losses", 2, excludes="clip siglip stats vicreg"),
    "miner": Kind("miner", "miners", 2),
    "optimizer": Kind("optimizer", "train.optimizers", 0, "adam radam rmsprop sgd"),
    "adaptation": Kind("choice of what learns", "adapt.trained", 1, excludes="Adapted"),
    "metric": Kind("metric", "metrics.ranking metrics.clusters", 1),
    "schedule": Kind("schedule", "train.schedules", 0, keywords="total"),
    "value": Kind("schedule of a value", "train.schedules", 1, "ramp"),
}
_DENSE = "Dense centered_dense glorot_dense kaiming_dense mlp orthogonal_dense"
_DISTANCES = "cosine dot euclidean snr squared_euclidean unit_euclidean"
_RECONSTRUCTIONS = "reconstruction_half_sum reconstruction_mean_square reconstruction_norm"
_HEADS = "average_heads concatenate_heads"
# Keywords whose values in a config name functions, such as `reduce_fn='sum'`.
ARGUMENTS = {
    "activation_fn": Kind("activation", "jax.nn", 1, "elu gelu relu silu softplus tanh"),
    "attention_fn": Kind("attention", "nets.attention", 0, "dot dot_plus_one gat gatv2"),
    "combine_fn": Kind("combination of heads", "nets.attention", 1, _HEADS),
    "dense_fn": Kind("linear layer", "nets.layers", 0, _DENSE),
    "deviation_fn": Kind(
        "deviation", "methods.dvml", 1, "log_variance_as_deviation standard_deviation"
    ),
    "distance_fn": Kind("distance", "ops", 2, _DISTANCES),
    "divergence_fn": Kind("divergence", "methods.abe", 1, "divergence mean_divergence"),
    "edges_fn": Kind("function of edges", "methods.graph", 1, "similarity_edges similarity_graph"),
    "mask_fn": Kind("mask", "jax.nn methods.abe", 1, "min_max sigmoid"),
    "mine_fn": KINDS["miner"],
    "mlp_fn": Kind("step of a block", "methods.graph_nets", 1, "identity mlp"),
    "neg_fn": Kind("selection", "miners.selections", 3),
    "norm": Kind("norm", "nets.layers", 0, "batch_norm frozen_batch_norm"),
    "pairs_fn": Kind("choice of pairs", "methods.abe", 1, "drawn_pairs"),
    "penalty_fn": Kind("penalty", "losses.pnp_penalties", 1),
    "pool_fn": Kind("pool", "nets.pools", 1),
    "pos_fn": Kind("selection", "miners.selections", 3),
    "positive_fn": Kind("edge weight", "methods.graph_nets", 2, "rectified shifted"),
    "reconstruction_fn": Kind("reconstruction", "methods.dvml", 2, _RECONSTRUCTIONS),
    "reduce_fn": Kind("reduction", "ops", 2, "mean mean_of_active sum"),
    "similarity_fn": Kind("similarity", "methods.graph_nets", 1, "correlation dot_products"),
}
_CALLED = Kind("function for evaluate.call", "", 1, keywords="step workdir")
_RULES = {**KINDS, **ARGUMENTS, "call": _CALLED}
# Kinds of functions by the fields that name them, where the kind is not the name of the field.
_KINDS = {"eval_transform": "transform", "normalize": "normalization", "trained": "adaptation"}
# Keywords of a field that are not arguments of its function, with their types.
_EXTRAS: Mapping[str, Mapping[str, Any]] = {
    # `full_epochs`: an epoch of a fraction has the number of steps of the whole training split.
    "dataset": {"image_fraction": float, "class_fraction": float, "full_epochs": bool},
    "net": {"weights": str | None},
    "normalize": {"force": bool},
    "sampler": {"every": int | str},
    # Lengths, which `config.timing` turns into steps.
    "schedule": {"warmup": int | str, "at": Sequence[int | str]},
}

# Kinds whose functions may have values that change from step to step.
_STEPPED = ("loss", "miner", "mine_fn", "divergence_fn")

# Packages of dmljax whose public functions are safe to import by a name in a foreign file.
_LIBRARY = ("losses", "methods", "miners", "nets", "ops")


@functools.cache
def extras_of(field: str) -> Mapping[str, Any]:
    """Returns the keywords of a field that are not arguments of its function, with their types."""
    if field != "optimizer":
        return _EXTRAS.get(field, {})
    from dmljax.train import optimizers  # imports jax, which a list of names does not need

    parameters = inspect.signature(optimizers.build).parameters.items()
    others = ("direction", "schedule", "backbone")
    return {name: parameter.annotation for name, parameter in parameters if name not in others}


@functools.cache
def table(kind: str) -> Mapping[str, Callable]:
    """Returns the functions of a kind by their names."""
    rule = _RULES[kind]
    functions: dict[str, Any] = {}
    for name in rule.modules.split():
        module = importlib.import_module(name if name == "jax.nn" else f"dmljax.{name}")
        exported = [x for x in rule.only.split() if hasattr(module, x)] or module.__all__
        functions |= {x: getattr(module, x) for x in exported}
    kinds = (type, functools.partial, types.FunctionType)
    return {
        name: function
        for name, function in functions.items()
        if rule.only or (isinstance(function, kinds) and _misfit(function, rule) is None)
        if name not in rule.excludes.split()
    }


def names(kind: str) -> list[str]:
    """Returns the names that a config may use for a kind of function."""
    return sorted(table(kind))


def plural(kind: str) -> str:
    """Returns the name of a kind of function in `dmljax list`."""
    if kind in ARGUMENTS:
        return kind
    return f"{kind}es" if kind.endswith("ss") else f"{kind}s"


def resolve(
    kind: str, spec: str | Mapping[str, Any], *, extras: Mapping[str, Any] = MappingProxyType({})
) -> functools.partial:
    """Returns the function of a kind that `spec` names, with the keywords of `spec` bound.

    `spec` is a name or `dict(name=..., **keywords)`. A name 'package.module:function' is imported
    from outside dmljax. Unknown names and keywords, and values of a wrong type, raise. `extras` are
    the types of the keywords that the caller reads from `spec`, and the function does not take.
    """
    keywords: dict[str, Any] = dict(spec) if isinstance(spec, Mapping) else {"name": spec}
    if not isinstance(name := keywords.pop("name", None), str):
        raise ValueError(
            f"{spec!r} does not name a {_RULES[kind].title}: write dict(name='...', ...)"
        )
    function = _function(name, kind)
    check(kind, {key: keywords.pop(key) for key in extras if key in keywords}, extras)
    try:
        parameters = inspect.signature(function, eval_str=True).parameters
    except (NameError, SyntaxError, TypeError, AttributeError):  # annotations for other tools
        parameters = inspect.signature(function).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        known = [n for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY]
        for keyword in keywords:
            if keyword not in known:
                raise TypeError(
                    f"{name} has no argument {keyword!r}{hint(keyword, [*known, *extras])}"
                )
    annotations = {n: p.annotation for n, p in parameters.items() if p.annotation is not p.empty}
    schedules: dict[str, Callable] = {}
    for key, value in list(keywords.items()):
        if key in ARGUMENTS and isinstance(value, str | Mapping):
            argument = resolve(key, value)
            keywords[key] = argument if argument.keywords else argument.func
        elif kind in _STEPPED and _is_schedule(value) and not _fits(value, annotations.get(key)):
            schedules[key] = resolve("value", keywords.pop(key))
    check(name, keywords, annotations)
    return functools.partial(_scheduled(function, schedules) if schedules else function, **keywords)


def _is_schedule(value: Any) -> bool:
    return "name" in value if isinstance(value, Mapping) else ":" in str(value)


def _fits(value: Any, annotation: Any) -> bool:
    """Tells whether an argument with this annotation, if it has one, takes a value as it is."""
    if annotation is None:
        return False
    try:
        check("", {"": value}, {"": annotation})
    except TypeError:
        return False
    return True


def _function(name: str, kind: str) -> Callable:
    """Returns the function of a kind that a name means; raises, and lists the names, without."""
    rule = _RULES[kind]
    if ":" in name:
        function = _import(name)
        if (misfit := _misfit(function, rule)) is not None:
            raise ValueError(f"{name!r} is not a {rule.title}: {misfit}")
        return function
    functions = table(kind)
    if name not in functions:
        where = f"dmljax list {plural(kind)}" if functions else ""
        raise ValueError(
            f"there is no {rule.title} {name!r}{hint(name, functions, where=where)}. "
            "A function of your own is written as 'my_package.my_module:my_function'"
        )
    return functions[name]


def _scheduled(function: Callable, schedule_fns: Mapping[str, Callable]) -> Callable:
    """Returns `function(..., **{name: fn(step)})`: some of its keywords depend on the step.

    It takes `step` as a keyword, and no longer the keywords of `schedule_fns`.
    """
    signature = inspect.signature(function)
    takes_step = "step" in signature.parameters
    parameters = {n: p for n, p in signature.parameters.items() if n not in schedule_fns}
    parameters["step"] = inspect.Parameter("step", inspect.Parameter.KEYWORD_ONLY)

    @functools.wraps(function)
    def call(*args: Any, step: Any, **keywords: Any) -> Any:
        values = {name: schedule_fn(step) for name, schedule_fn in schedule_fns.items()}
        values |= {"step": step} if takes_step else {}
        return function(*args, **values, **keywords)

    ordered = sorted(parameters.values(), key=lambda parameter: parameter.kind)
    vars(call).update(__signature__=signature.replace(parameters=ordered))
    return call


def _misfit(function: Callable, rule: Kind) -> str | None:
    """Returns the reason why a function cannot be called as `rule` says, or None."""
    signature = inspect.signature(function)
    required = [
        p.name
        for p in signature.parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty
    ]
    if rule.positional == 0 and required:
        return f"it needs the argument {required[0]!r}, which a config cannot give"
    try:
        keywords = dict.fromkeys(rule.keywords.split())
        signature.bind_partial(*[None] * (rule.positional or 0), **keywords)
    except TypeError as error:
        needed = ", ".join([f"{rule.positional} arguments by position", *keywords])
        return f"it must take {needed}: {error}"
    return None


def _import(name: str) -> Callable:
    module, _, attribute = name.partition(":")
    package, _, subpackage = module.partition(".")
    is_library = package == "dmljax" and subpackage.partition(".")[0] in _LIBRARY
    if isinstance(name, FileText) and not is_library:
        raise ValueError(
            f"{name.path} names {name!r}, and importing {module} runs its code: if you trust that "
            "file, add --trust-modules (trust_modules=True in Python)"
        )
    try:
        imported = importlib.import_module(module)
        if isinstance(name, FileText) and attribute not in imported.__all__:
            raise ValueError(
                f"{name.path} names {name!r}, which is not a public function of dmljax"
            )
        return getattr(imported, attribute)
    except (ImportError, AttributeError) as error:
        advice = ""
        if isinstance(error, ModuleNotFoundError) and error.name == package:
            advice = f". The folder that contains {package} must be in PYTHONPATH"
        raise ValueError(f"{name!r} cannot be imported: {error}{advice}") from error


def chosen(field: str, value: str | Mapping[str, Any]) -> Spec:
    """Returns the function that the value of a field names."""
    spec = named(value)
    partial = resolve(_KINDS.get(field, field), spec, extras=extras_of(field))
    return Spec(spec, partial)


def with_defaults(spec: Spec) -> dict[str, Any]:
    """Returns a spec as a dict with the plain defaults of its function, for digests.

    Defaults that are functions are left out. Functions in `spec` stay names.
    """
    parameters = inspect.signature(spec.partial.func).parameters.values()
    plain = (bool, int, float, str, tuple, type(None))
    defaults = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    return {k: v for k, v in defaults.items() if isinstance(v, plain)} | spec


def options_of(config: Mapping[str, Any], only: Collection[str] | None = None) -> Options:
    """Returns the options of a completed config, with a function in every `Spec`.

    Raises a one-line error for an unknown name, an unknown argument or a value of a wrong type.
    With `only`, names in other fields stay plain data, and their modules are not imported. Lists
    become tuples, and `evaluate.frozen` is decided.
    """
    values = _tuples(config)
    options = _section(Options, values, only)
    if options.evaluate.frozen is not None:
        return options
    evaluate = dataclasses.replace(options.evaluate, frozen=options.has_pretrained)
    return dataclasses.replace(options, evaluate=evaluate)


def _section(section: type, values: Mapping[str, Any], only: Collection[str] | None) -> Any:
    fields, options = fields_of(section), dict(values)
    for name, value in values.items():
        is_resolved = only is None or name in only
        if name in SECTIONS:
            options[name] = _section(SECTIONS[name], value, only if only is None else ())
        elif value is None:
            continue
        elif settings := fields[name].metadata.get("settings"):
            options[name] = settings.get(value["name"], settings.get(""))(**value)
        elif name == "metrics" and is_resolved:
            options[name] = tuple(x if x == "all" else chosen("metric", x) for x in value)
        elif takes(fields[name], Spec):
            options[name] = chosen(name, value) if is_resolved else Spec(named(value))
    return section(**options)


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _tuples(v) for k, v in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value
