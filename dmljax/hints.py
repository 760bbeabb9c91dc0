"""Text for the reader: counts with nouns, the names nearest to an unknown one, and progress."""

import difflib
import shutil
import sys
import time
from collections.abc import Collection, Iterable, Mapping
from typing import Any

_NEAREST = 3  # names that are suggested
_COMPARED = 5000  # names; of more, those with the first letter of the word
_FEW = 12  # names that are all listed where none of them is near
_SECONDS = 0.1  # between two changes of a line on a terminal


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
    """
    names = sorted(names)
    count = len(names)
    if count > _COMPARED:  # comparing a million names takes seconds
        names = [name for name in names if name[:1] == word[:1]][:_COMPARED] or names[:_COMPARED]
    near = [name for name in names if word and name.startswith(word)]
    near += difflib.get_close_matches(word, names, n=_NEAREST)
    near = list(dict.fromkeys(near))[:_NEAREST]
    text = f": did you mean {' or '.join(map(repr, near))}?" if near else "."
    if len(names) <= (_NEAREST if near else _FEW):
        return f"{text} It has: {', '.join(names) or 'none'}"
    if not near:
        text = f". It has {count} names, such as {', '.join(names[:_NEAREST])}."
    return f"{text} All names: {where}" if where else text.rstrip(".")


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


class Progress:
    """Counts from `start` to `total`, until the end of a `with` block or `close`.

    On a terminal, one line with the count, a text and the remaining time. Elsewhere (a file, a
    pipe), a line such as 'step 200/1000  loss 0.31' at the first report and at each tenth.
    """

    def __init__(self, title: str, total: int, *, start: int = 0, stream: Any = None):
        self._title, self._total, self._count, self._start = title, total, start, start
        self._stream, self._tenth = stream or sys.stdout, -1
        self._begin, self._shown = time.monotonic(), 0.0
        self._is_live = self._stream.isatty()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Ends the line on a terminal; the end of a `with` block does this."""
        if self._is_live and self._shown:
            print(file=self._stream, flush=True)

    def update(self, count: int, text: str = "") -> None:
        """Reports that `count` of the total are done."""
        self._count, now = count, time.monotonic()
        line = f"{self._title} {count}/{self._total}  {text}".rstrip()
        if not self._is_live and (tenth := count * 10 // self._total) != self._tenth:
            self._tenth = tenth
            self.print(line)
        elif self._is_live and (count >= self._total or now >= self._shown + _SECONDS):
            seconds = (now - self._begin) / max(count - self._start, 1) * (self._total - count)
            line = f"{line}  {shown_duration(seconds)} left"[: shutil.get_terminal_size().columns]
            print(f"\r\x1b[K{line}", end="", file=self._stream, flush=True)
            self._shown = now

    def advance(self, count: int = 1) -> None:
        """Reports that `count` more are done."""
        self.update(self._count + count)

    def print(self, line: str) -> None:
        """Prints a line above the one that changes."""
        print(f"\r\x1b[K{line}" if self._is_live else line, file=self._stream, flush=True)
