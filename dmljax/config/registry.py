"""Names in configs become functions, from a table of names for each kind of function.

The names of a kind are those in `__all__` of its module whose functions take the arguments that the
kind requires. So a new loss is found by its name as soon as its module exports it, and a helper
next to it, such as `sampling.coverage`, is not mistaken for a sampler. Imports no jax.
"""

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from dmljax.config.annotations import check, namespace
from dmljax.files.reading import FileText
from dmljax.hints import hint


class Kind(NamedTuple):
    """A kind of function that a config can name, and the arguments that it must take.

    The caller passes at least `positional` arguments by position (None: the caller itself tells
    the forms of a function apart), and the `keywords` by name. Where
    the arguments do not identify the kind, `only` lists the names of its functions, or `excludes`
    the names of other functions in the modules.
    """

    title: str
    modules: tuple[str, ...]
    positional: int | None = 0
    keywords: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    excludes: tuple[str, ...] = ()


def _choice(title: str, modules: str, positional: int, only: str) -> Kind:
    return Kind(title, tuple(modules.split()), positional, only=tuple(only.split()))


# Kinds of functions by the names that `resolve` takes.
KINDS = {
    "dataset": Kind("data set", ("dmljax.data.datasets",)),
    "sampler": Kind("sampler", ("dmljax.data.sampling",), 1, ("seed", "step")),
    "transform": Kind("transform", ("dmljax.data.transforms",), None),
    "normalization": Kind(
        "normalization", ("dmljax.weights.preprocessing",), 1, excludes=("inputs", "title")
    ),
    "net": Kind("net", ("dmljax.nets",)),
    "method": Kind("method", ("dmljax.methods",), 2, ("classes",)),
    # Losses of two views take no labels, so that no method can use them.
    "loss": Kind("loss", ("dmljax.losses",), 2, excludes=("clip", "siglip", "stats", "vicreg")),
    "miner": Kind("miner", ("dmljax.miners",), 2),
    "optimizer": _choice("optimizer", "dmljax.train.optimizers", 0, "adam radam rmsprop sgd"),
    "adaptation": Kind(
        "choice of what learns", ("dmljax.adapt.trained",), 1, excludes=("Adapted",)
    ),
    "metric": Kind("metric", ("dmljax.metrics.ranking", "dmljax.metrics.clusters"), 1),
    "schedule": Kind("schedule", ("dmljax.train.schedules",), 0, ("total",)),
    "value": _choice("schedule of a value", "dmljax.train.schedules", 1, "ramp"),
}
_ABE, _DVML, _GRAPH = "dmljax.methods.abe", "dmljax.methods.dvml", "dmljax.methods.graph"
_DENSE = "Dense centered_dense glorot_dense kaiming_dense mlp orthogonal_dense"
_DISTANCES = "cosine dot euclidean snr squared_euclidean unit_euclidean"
_RECONSTRUCTIONS = "reconstruction_half_sum reconstruction_mean_square reconstruction_norm"
_SELECTION = Kind("selection", ("dmljax.miners.selections",), 3)
# Keywords whose values in a config name functions, such as `reduce_fn='sum'`.
ARGUMENTS = {
    "activation_fn": _choice("activation", "jax.nn", 1, "elu gelu relu silu softplus tanh"),
    "attention_fn": _choice("attention", "dmljax.nets.attention", 0, "dot dot_plus_one gat gatv2"),
    "combine_fn": _choice(
        "combination of heads", "dmljax.nets.attention", 1, "average_heads concatenate_heads"
    ),
    "dense_fn": _choice("linear layer", "dmljax.nets.layers", 0, _DENSE),
    "deviation_fn": _choice("deviation", _DVML, 1, "log_variance_as_deviation standard_deviation"),
    "distance_fn": _choice("distance", "dmljax.ops", 2, _DISTANCES),
    "divergence_fn": _choice("divergence of learners", _ABE, 1, "divergence mean_divergence"),
    "edges_fn": _choice("function of edges", _GRAPH, 1, "similarity_edges similarity_graph"),
    "mask_fn": _choice("mask", f"jax.nn {_ABE}", 1, "min_max sigmoid"),
    "mine_fn": KINDS["miner"],
    "mlp_fn": _choice("step of a block", f"{_GRAPH}.nets", 1, "identity mlp"),
    "neg_fn": _SELECTION,
    "norm": _choice("norm", "dmljax.nets.layers", 0, "batch_norm frozen_batch_norm"),
    "pairs_fn": _choice("choice of pairs", _ABE, 1, "drawn_pairs"),
    "penalty_fn": Kind("penalty", ("dmljax.losses.pnp_penalties",), 1),
    "pool_fn": Kind("pool", ("dmljax.nets.pools",), 1),
    "pos_fn": _SELECTION,
    "positive_fn": _choice("edge weight", f"{_GRAPH}.nets", 2, "rectified shifted"),
    "reconstruction_fn": _choice("reconstruction", _DVML, 2, _RECONSTRUCTIONS),
    "reduce_fn": _choice("reduction", "dmljax.ops", 2, "mean mean_of_active sum"),
    "similarity_fn": _choice("similarity", f"{_GRAPH}.nets", 1, "correlation dot_products"),
}
_RULES = KINDS | ARGUMENTS

# Kinds whose functions may have values that change from step to step.
_STEPPED = ("loss", "miner", "mine_fn", "divergence_fn")

# Packages of dmljax whose public functions are safe to import by a name in a foreign file.
_LIBRARY = ("losses", "methods", "miners", "nets", "ops")


@functools.cache
def table(kind: str) -> Mapping[str, Callable]:
    """Returns the functions of a kind by their names."""
    rule = _RULES[kind]
    exported: dict[str, Any] = {}
    for module in map(importlib.import_module, rule.modules):
        names = [name for name in rule.only if hasattr(module, name)] or module.__all__
        exported |= {name: getattr(module, name) for name in names}
    if rule.only:
        return exported
    functions = {
        name: value
        for name, value in exported.items()
        if inspect.isroutine(value)
        or inspect.isclass(value)
        or isinstance(value, functools.partial)
    }
    return {
        name: function
        for name, function in functions.items()
        if name not in rule.excludes and _misfit(function, rule) is None
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
    rule = _RULES[kind]
    keywords: dict[str, Any] = dict(spec) if isinstance(spec, Mapping) else {"name": spec}
    if not isinstance(name := keywords.pop("name", None), str):
        raise ValueError(f"{spec!r} does not name a {rule.title}: write dict(name='...', ...)")
    function = own_function(name, rule) if ":" in name else _public_function(name, kind)
    check(kind, {key: keywords.pop(key) for key in extras if key in keywords}, extras)
    parameters = inspect.signature(function).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        names = [n for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY]
        for keyword in keywords:
            if keyword not in names:
                raise TypeError(
                    f"{name} has no argument {keyword!r}{hint(keyword, [*names, *extras])}"
                )
    annotations = {n: p.annotation for n, p in parameters.items() if p.annotation is not p.empty}
    schedules = {
        key: resolve("value", keywords.pop(key))
        for key, value in list(keywords.items())
        if kind in _STEPPED
        and key not in ARGUMENTS
        and _is_scheduled(value, annotations.get(key), namespace(function))
    }
    for key, value in keywords.items():
        if key in ARGUMENTS and isinstance(value, str | Mapping):
            argument = resolve(key, value)
            keywords[key] = argument if argument.keywords else argument.func
    check(name, keywords, annotations, names=namespace(function))
    return functools.partial(Scheduled(function, schedules) if schedules else function, **keywords)


def _public_function(name: str, kind: str) -> Callable:
    """Returns the function of dmljax with this name; raises, and lists the names, if none has."""
    if name in table(kind):
        return table(kind)[name]
    advice = ""
    if "." in name:
        module, _, function_name = name.rpartition(".")
        advice = f". A function of your own is written as '{module}:{function_name}'"
    known = hint(name, table(kind), where=f"dmljax list {plural(kind)}")
    raise ValueError(f"there is no {_RULES[kind].title} {name!r}{known}{advice}")


def _is_scheduled(value: Any, annotation: Any, names: Mapping[str, Any]) -> bool:
    """Tells whether a keyword that takes a number has a function of the step as its value."""
    if not (isinstance(value, Mapping) and "name" in value) and ":" not in str(value):
        return False

    def fits(other: Any) -> bool:
        try:
            check("", {"": other}, {"": annotation}, names=names)
        except (TypeError, ValueError):
            return False
        return True

    return annotation is None or (fits(0.5) and not fits(value))


class Scheduled:
    """`func(..., **{name: fn(step)})`: a function with keywords that depend on the step.

    It takes `step` as a keyword, and no longer the keywords of `schedule_fns`.
    """

    def __init__(self, func: Callable, schedule_fns: Mapping[str, Callable]):
        self.func, self.schedule_fns = func, schedule_fns
        signature = inspect.signature(func)
        self._takes_step = "step" in signature.parameters
        parameters = {n: p for n, p in signature.parameters.items() if n not in schedule_fns}
        parameters["step"] = inspect.Parameter("step", inspect.Parameter.KEYWORD_ONLY)
        ordered = sorted(parameters.values(), key=lambda parameter: parameter.kind)
        self.__signature__ = signature.replace(parameters=ordered)

    def __call__(self, *args: Any, step: Any, **keywords: Any) -> Any:
        values = {name: schedule_fn(step) for name, schedule_fn in self.schedule_fns.items()}
        values |= {"step": step} if self._takes_step else {}
        return self.func(*args, **values, **keywords)


def own_function(name: str, rule: Kind) -> Callable:
    """Returns the function 'package.module:function' from outside dmljax; it must fit `rule`."""
    if ":" not in str(name):
        raise ValueError(
            f"{name!r} is not a {rule.title}: write 'my_package.my_module:my_function'"
        )
    function = _import(name)
    if (misfit := _misfit(function, rule)) is not None:
        raise ValueError(f"{name!r} is not a {rule.title}: {misfit}")
    return function


def _misfit(function: Callable, rule: Kind) -> str | None:
    """Returns the reason why a function cannot be called as `rule` says, or None."""
    parameters = inspect.signature(function).parameters.values()
    kinds = {p.kind for p in parameters}
    by_position = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    by_name = {p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    missing = [name for name in rule.keywords if name not in by_name]
    if missing and inspect.Parameter.VAR_KEYWORD not in kinds:
        return f"it does not take {' and '.join(missing)}"
    if rule.positional is None:
        return None
    if len(by_position) < rule.positional and inspect.Parameter.VAR_POSITIONAL not in kinds:
        return f"it does not take {rule.positional} arguments by position"
    if not rule.positional and any(p.default is p.empty for p in by_position):
        return "it needs arguments that a config cannot give"
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
    except ModuleNotFoundError as error:
        advice = ""
        if error.name == package:  # and not a module that the user's own one imports
            advice = f". The folder that contains {package} must be in PYTHONPATH"
        raise ValueError(f"{name!r} cannot be imported: {error}{advice}") from error
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{name!r} cannot be imported: {error}") from error
