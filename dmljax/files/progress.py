"""A progress bar: live on a terminal, a few plain lines elsewhere."""

from __future__ import annotations

import sys
from typing import TextIO

from rich import console as rich_console
from rich import progress as rich_progress


class Progress:
    """Counts from `start` to `total`, until the end of a `with` block or `close`.

    On a terminal, a live bar with the count, a text and the remaining time. Elsewhere (a file, a
    pipe), a line such as 'step 200/1000  loss 0.31' at the first report and at each tenth.
    """

    def __init__(self, title: str, total: int, *, start: int = 0, stream: TextIO | None = None):
        self._title, self._total, self._count = title, total, start
        self._stream, self._tenth = stream or sys.stdout, -1
        console = rich_console.Console(file=self._stream)
        self._live = None
        if console.is_terminal:
            columns = (
                rich_progress.TextColumn("{task.description} {task.completed:>6}/{task.total}"),
                rich_progress.BarColumn(),
                rich_progress.TextColumn("{task.fields[text]}"),
                rich_progress.TimeRemainingColumn(),
            )
            self._live = rich_progress.Progress(*columns, console=console)
            self._task = self._live.add_task(title, total=total, completed=start, text="")
            self._live.start()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Stops the live bar; the end of a `with` block does this."""
        if self._live is not None:
            self._live.stop()

    def update(self, count: int, text: str = "") -> None:
        """Reports that `count` of the total are done."""
        self._count = count
        if self._live is not None:
            self._live.update(self._task, completed=count, text=text)
        elif (tenth := count * 10 // self._total) != self._tenth:
            self._tenth = tenth
            line = f"{self._title} {count}/{self._total}  {text}"
            print(line.rstrip(), file=self._stream, flush=True)

    def advance(self, count: int = 1) -> None:
        """Reports that `count` more are done."""
        self.update(self._count + count)

    def print(self, line: str) -> None:
        """Prints a line above the bar."""
        if self._live is not None:
            self._live.console.print(line, highlight=False)
        else:
            print(line, file=self._stream, flush=True)
