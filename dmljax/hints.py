"""Parts of messages: counts with nouns, and the known names nearest to an unknown one."""

import difflib
from collections.abc import Collection, Iterable, Mapping

_NEAREST = 3  # names that are suggested
_COMPARED = 5000  # names; of more, those with the first letter of the word
_FEW = 12  # names that are all listed where none of them is near


def shown_bytes(count: int) -> str:
    """Returns a number of bytes in MB or GB.

    >>> shown_bytes(2_500_000), shown_bytes(11_700_000_000)
    ('2.5 MB', '11.7 GB')
    """
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.3g} MB"


def shown_duration(seconds: float) -> str:
    """Returns a time in hours, minutes or seconds.

    >>> shown_duration(90), shown_duration(9000)
    ('1.5 minutes', '2.5 hours')
    """
    for unit, length in (("hours", 3600), ("minutes", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} seconds"


def counted(count: int, noun: str) -> str:
    """Returns a count with its noun.

    >>> counted(1, "item"), counted(2, "training class")
    ('1 item', '2 training classes')
    """
    ending = "" if count == 1 else "es" if noun.endswith("s") else "s"
    return f"{count:,} {noun}{ending}"


def hint(word: str, names: Iterable[str], *, where: str = "") -> str:
    """Returns the end of a message about an unknown word: at most the three nearest of `names`.

    Names that begin with the word are the nearest. If none is near, a short list is given in full.
    `where` is a command that prints all names.

    >>> hint("gliphs", ["glyphs", "folder", "mnist", "npz"], where="dmljax list datasets")
    ": did you mean 'glyphs'? All names: dmljax list datasets"
    >>> hint("gliphs", ["glyphs", "folder"])
    ": did you mean 'glyphs'? It has: folder, glyphs"
    >>> hint("siglip2_b16", [f"siglip2_b16_{side}" for side in (224, 256, 384, 512)])
    ": did you mean 'siglip2_b16_224' or 'siglip2_b16_256' or 'siglip2_b16_384'?"
    """
    names = sorted(names)
    count = len(names)
    if count > _COMPARED:  # comparing a million names takes seconds
        names = [name for name in names if name[:1] == word[:1]][:_COMPARED] or names[:_COMPARED]
    near = [name for name in names if word and name.startswith(word)]
    near += difflib.get_close_matches(word, names, n=_NEAREST)
    near = list(dict.fromkeys(near))[:_NEAREST]
    start = f": did you mean {' or '.join(map(repr, near))}?" if near else "."
    if len(names) <= (_NEAREST if near else _FEW):
        return f"{start} It has: {', '.join(names) or 'none'}"
    everything = f" All names: {where}" if where else ""
    if near:
        return start + everything
    best = difflib.get_close_matches(word, names, n=_NEAREST, cutoff=0)
    return f". It has {count} names, such as {', '.join(best)}.{everything}".rstrip(".")


def check_all(problems: Mapping[str, bool]) -> None:
    """Raises an error of the first message in `problems` that is true."""
    for message, is_true in problems.items():
        if is_true:
            raise ValueError(message)


def check_known(message: str, words: Iterable[str], names: Collection[str]) -> None:
    """Raises an error of `message`, the word and a `hint` for a word that is not in `names`."""
    for word in words:
        if word not in names:
            raise ValueError(f"{message} {word!r}{hint(str(word), names)}")
