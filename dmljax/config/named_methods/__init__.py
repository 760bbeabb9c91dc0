"""The methods as a config writes them: every option is a number, a name or a dict.

`dmljax.methods` takes modules and functions. The factories here take the fields of `config.method`,
replace names by functions, and call those. They are the table of names of `config.method.name`. A
method without such fields needs no factory here: its name is looked up in `dmljax.methods`.
"""

from __future__ import annotations

from typing import Any

from dmljax import methods
from dmljax.config.named_methods.abe import abe
from dmljax.config.named_methods.choices import with_names
from dmljax.config.named_methods.dvml import dvml
from dmljax.config.named_methods.graph import graph

__all__ = ["abe", "dvml", "graph", "pairs", "proxies"]
__all__ += sorted(set(methods.__all__) - set(__all__))

pairs = with_names(methods.pairs)
proxies = with_names(methods.proxies)


def __getattr__(name: str) -> Any:
    if name in methods.__all__:
        return getattr(methods, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
