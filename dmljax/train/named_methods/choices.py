"""Names in `config.method` become functions: choices from a table, and pools."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from dmljax.hints import hint
from dmljax.methods import base
from dmljax.nets import pools

__all__ = ["Pool", "choose", "pool_fn_of", "with_pool"]

Pool = str | Mapping[str, Any]
_POOLS: dict[str, Callable | None] = {
    "flatten": pools.flatten,
    "gem": pools.learned_gem,
    "max": pools.global_max,
    "mean": None,  # what the backbone pools itself
    "mean_max": pools.global_mean_max,
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


def with_pool(factory: Callable[..., base.Method]) -> Callable[..., base.Method]:
    """`factory` with the argument `pool`, a name, in place of its argument `pool_fn`."""

    @functools.wraps(factory)
    def named_factory(net, loss_fn, *, pool: Pool = "mean", **options):
        return factory(net, loss_fn, pool_fn=pool_fn_of(pool), **options)

    signature = inspect.signature(factory)
    pool = inspect.Parameter("pool", inspect.Parameter.KEYWORD_ONLY, default="mean")
    named_factory.__signature__ = signature.replace(
        parameters=[pool if p.name == "pool_fn" else p for p in signature.parameters.values()]
    )
    return named_factory
