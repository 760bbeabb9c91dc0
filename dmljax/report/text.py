"""Tables of the main numbers for a terminal; everything else is on the page."""

import math
import sys

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from dmljax.metrics import level_text
from dmljax.report.comparison import RunComparison, p_text
from dmljax.report.facts import Facts

_WIDEST = 48  # characters of a name


def of_facts(facts: Facts) -> RenderableType:
    """Returns the scores of one model with their ranges."""
    parts: list[RenderableType] = [Text(f"{facts.title}: {facts.headline or 'no score'}", "bold")]
    parts += [Text(line) for line in (facts.rule, facts.warning) if line]
    if facts.scores is None:
        parts.append(Text(facts.summary))
    else:
        first, *others = facts.scores["table"]["splits"]
        table = _table("score", first, f"{level_text()} range", *others)
        ranges = {tile["name"]: _range(tile["low"], tile["high"]) for tile in facts.scores["tiles"]}
        for name, value, *remaining in facts.scores["table"]["rows"]:
            table.add_row(*map(Text, (name, value, ranges.get(name, ""), *remaining)))
        parts += [table, Text(facts.scores["note"])]
    return Group(*parts)


def comparison(result: RunComparison) -> RenderableType:
    """Returns the scores of every run, each compared with the first run."""
    level, baseline = f"{level_text()} range", f"against {_short(result.first)}"
    p = "p (Holm)" if len(result.runs) > 2 else "p"
    table = _table("score", "run", "value", level, baseline, level, p, "verdict")
    for score, rows in result.scores.items():
        for name, row in rows.items():
            is_first, other = name == result.first, row.comparison
            cells = [score if is_first else "", _short(name), f"{100 * row.mean:.1f}"]
            cells.append(_range(row.low, row.high))
            if other is not None:
                difference = f"{100 * other.difference:+.1f}"
                cells += [difference, _range(other.low, other.high, "+"), p_text(other.p)]
                cells.append(other.verdict)
            table.add_row(*map(Text, cells))
        table.add_section()
    sentences = [result.mcnemar_note(name, shown_fn=_short) for name in result.mcnemar]
    counts, *notes = result.notes
    return Group(Text(counts, "bold"), table, *map(Text, [*notes, *sentences]))


def show(content: RenderableType) -> None:
    """Prints with the colors of a terminal, or plain text into a pipe or a file."""
    width = None if sys.stdout.isatty() else 120
    Console(highlight=False, emoji=False, markup=False, width=width).print(content)


def _table(*headings: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in headings:
        is_text = heading in ("score", "run", "verdict")
        table.add_column(heading, justify="left" if is_text else "right", overflow="fold")
    return table


def _short(name: str) -> str:
    """Replaces control characters of a name, and cuts the beginning of a long one."""
    name = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(name))
    return name if len(name) <= _WIDEST else f"...{name[3 - _WIDEST :]}"


def _range(low: float, high: float, sign: str = "") -> str:
    return f"{100 * low:{sign}.1f} to {100 * high:{sign}.1f}" if math.isfinite(low) else "-"
