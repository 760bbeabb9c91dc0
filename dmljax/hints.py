"""The end of an error message about an unknown name: the nearest known name, and all of them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["hint"]


def hint(word: str, names: Iterable[str]) -> str:
    """The end of a message about the unknown `word`: the nearest of `names`, and all of them.

    >>> hint("gliphs", ["glyphs", "folder"])
    ": did you mean 'glyphs'? It has: folder, glyphs"
    """
    names = sorted(names)
    near = difflib.get_close_matches(word, names, n=1)
    start = f": did you mean {near[0]!r}?" if near else "."
    return f"{start} It has: {', '.join(names) or 'none'}"
