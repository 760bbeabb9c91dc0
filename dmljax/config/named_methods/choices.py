"""Names in `config.method` become functions: choices from a table, and pools."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from dmljax.hints import hint
from dmljax.methods import base
from dmljax.nets import initializers, layers, pools

__all__ = ["Pool", "choose", "pool_fn_of", "with_names"]

Pool = str | Mapping[str, Any]
_POOLS: dict[str, Callable | None] = {
    "flatten": pools.flatten,
    "gem": pools.learned_gem,
    "max": pools.global_max,
    "mean": None,  # what the backbone pools itself
    "mean_max": pools.global_mean_max,
}
_DENSE = {
    "glorot": layers.glorot_dense,
    "kaiming_fan_out": layers.kaiming_dense,
    "torch": layers.Dense,
}


def choose(field: str, name: Any, table: Mapping[str, Any]) -> Any:
    """The entry `name` of `table`. The error about an unknown name lists all names."""
    if name not in table:
        raise ValueError(f"there is no {field} {name!r}{hint(str(name), table)}")
    return table[name]


def pool_fn_of(pool: Pool) -> Callable | None:
    """The function of a pool's name, or of dict(name="gem", p=4.0)."""
    options = dict(pool) if isinstance(pool, Mapping) else {"name": pool}
    name = options.pop("name", None)
    pool_fn = choose("pool", name, _POOLS)
    argument_names = ("p", "epsilon") if name == "gem" else ()
    if unknown := sorted(set(options) - set(argument_names)):
        message = f"the pool {name!r} has no argument {unknown[0]!r}"
        raise TypeError(message + hint(unknown[0], argument_names))
    return functools.partial(pool_fn, **options) if options else pool_fn


def with_names(factory: Callable[..., base.Method]) -> Callable[..., base.Method]:
    """`factory` with names and numbers in place of its arguments that are functions.

    * `pool` in place of `pool_fn`: "mean", "max", "gem", "mean_max" or "flatten".
    * `embedding_init` in place of `dense_fn`: how the linear layer is drawn, "torch",
      "kaiming_fan_out" or "glorot".
    * `proxy_std` in place of `proxy_init`: the standard deviation of the proxies; None takes the
      values published with the loss.
    """
    signature = inspect.signature(factory)
    replacements = {
        "pool_fn": ("pool", "mean", Pool),
        "dense_fn": ("embedding_init", "torch", str),
        "proxy_init": ("proxy_std", None, float | None),
    }

    @functools.wraps(factory)
    def named_factory(net, loss_fn, *, pool="mean", embedding_init="torch", **options):
        options |= {"pool_fn": pool_fn_of(pool)}
        options |= {"dense_fn": choose("embedding_init", embedding_init, _DENSE)}
        if (std := options.pop("proxy_std", None)) is not None:
            options["proxy_init"] = initializers.normal(std)
        return factory(net, loss_fn, **options)

    parameters = []
    for name, parameter in signature.parameters.items():
        if name in replacements:
            new_name, default, annotation = replacements[name]
            parameter = parameter.replace(name=new_name, default=default, annotation=annotation)
        parameters.append(parameter)
    named_factory.__signature__ = signature.replace(parameters=parameters)
    return named_factory
