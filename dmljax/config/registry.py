"""Names in configs become functions: tables of names, and `Options` with functions in them.

The names of a kind are those in `__all__` of its module whose functions take the arguments that the
kind requires. So a new loss is found by its name as soon as its module exports it, and a helper
next to it, such as `sampling.group`, is not mistaken for a sampler. Imports no jax.
"""

import functools
import importlib
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from dmljax.files import schema
from dmljax.files.reading import FileText
from dmljax.hints import check_known, hint
from dmljax.train.options import Length, Spec


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
    "normalization": Kind("normalization", "nets.normalizations", 1, excludes="inputs title"),
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
_KINDS = {
    **{"eval_transform": "transform", "normalize": "normalization"},
    **{"trained": "adaptation", "metrics": "metric"},
}
# Keywords of a field that are not arguments of its function, with their types.
_EXTRAS: Mapping[str, Mapping[str, Any]] = {
    # `full_epochs`: an epoch of a fraction has the number of steps of the whole training split.
    "dataset": {"image_fraction": float, "class_fraction": float, "full_epochs": bool},
    "net": {"weights": str | None},
    "normalize": {"force": bool},
    "sampler": {"every": Length},
    # Lengths, which `config.optimizer` turns into steps.
    "schedule": {"warmup": Length, "at": Sequence[Length]},
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
    keywords: dict[str, Any] = dict(Spec.from_json(spec, kind))
    function = _function(name := keywords.pop("name"), kind)
    check(kind, {key: keywords.pop(key) for key in extras if key in keywords}, extras)
    try:
        parameters = inspect.signature(function, eval_str=True).parameters
    except (NameError, SyntaxError, TypeError, AttributeError):  # annotations for other tools
        parameters = inspect.signature(function).parameters
    annotations = {n: p.annotation for n, p in parameters.items() if p.annotation is not p.empty}
    known = [n for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY]
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        check_known(f"{name} has no argument", keywords, [*known, *extras])
    schedules: dict[str, Callable] = {}
    for key, value in list(keywords.items()):
        is_named = isinstance(value, str | Mapping)
        if key in ARGUMENTS and is_named:
            argument = resolve(key, value)
            keywords[key] = argument if argument.keywords else argument.func
        elif is_named and kind in _STEPPED and (":" in value or "name" in value):
            try:
                check(name, {key: value}, {key: annotations.get(key, float)})
            except ValueError:
                schedules[key] = resolve("value", keywords.pop(key))
    check(name, keywords, annotations)
    return functools.partial(_scheduled(function, schedules) if schedules else function, **keywords)


def check(name: str, values: Mapping[str, Any], annotations: Mapping[str, Any]) -> None:
    """Raises ValueError if a value of a config contradicts its annotation in the function `name`.

    A list may stand for a tuple, and a whole number for a float. A value passes without an
    annotation, or with one that a config does not understand.
    """
    for key, value in values.items():
        schema.parse(annotations.get(key, Any), value, f"{name}: {key}")


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
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    for p in signature.parameters.values() if rule.positional == 0 else ():
        if p.kind in by_position and p.default is p.empty:
            return f"it needs the argument {p.name!r}, which a config cannot give"
    try:
        keywords = dict.fromkeys(rule.keywords.split())
        signature.bind_partial(*[None] * (rule.positional or 0), **keywords)
    except TypeError as error:
        needed = ", ".join([f"{rule.positional} arguments by position", *keywords])
        return f"it must take {needed}: {error}"
    return None


def _import(name: str) -> Callable:
    """Imports 'package.module:function'; text of a file may name public functions of dmljax."""
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
        function = getattr(imported, attribute)
    except (ImportError, AttributeError) as error:
        advice = ""
        if isinstance(error, ModuleNotFoundError) and error.name == package:
            advice = f". The folder that contains {package} must be in PYTHONPATH"
        raise ValueError(f"{name!r} cannot be imported: {error}{advice}") from error
    if isinstance(name, FileText) and attribute not in imported.__all__:
        raise ValueError(f"{name.path} names {name!r}, which is not a public function of dmljax")
    return function


def chosen(field: str, value: str | Mapping[str, Any]) -> Spec:
    """Returns the function that the value of a field names."""
    spec = Spec.from_json(value, field)
    return Spec(spec, resolve(_KINDS.get(field, field), spec, extras=extras_of(field)))
