"""The report as text, for a terminal: one run, or a comparison of several."""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dmljax import metrics
from dmljax.report.comparison import ClassChange, RunComparison, p_text
from dmljax.report.findings import Findings

__all__ = ["comparison", "run"]

_CLASSES, _PAIRS, _ITEMS = 10, 8, 12  # rows of a list at most
_WIDEST = 48  # characters of a name


def run(
    findings: Findings,
    *,
    title: str,
    names: Sequence[str],
    name_fn: Callable[[int], str],
    other_scores: Mapping[str, float] = types.MappingProxyType({}),
    notes: Sequence[str] = (),
) -> RenderableType:
    """The report of one run: scores with ranges, worst classes, confusions and suspects.

    `names` are those of the classes, `name_fn(row)` is the name of an image, and `other_scores` are
    scores without a range, such as NMI. `notes` are lines under the title.
    """
    scores = findings.scores
    scored = scores.labels[scores.first > 0]
    counts = f"{len(scored):,} queries of {len(np.unique(scored)):,} classes"
    lone = len(scores.first) - len(scored)
    if lone:
        counts += f"; {lone:,} queries without a positive are left out"
    if findings.unreadable:
        plural = "s" if findings.unreadable > 1 else ""
        counts += f"; {findings.unreadable:,} image{plural} could not be read"
    head = [Text(title, style="bold"), Text(counts), *(Text(note) for note in notes if note)]
    parts: list[RenderableType] = [*head, Text(), _scores(findings, other_scores)]
    note = metrics.interval_note(scored)
    parts.append(Text(note or "range: 95 % bootstrap over classes", style="dim"))
    parts += _section("Worst classes", _classes(findings, names))
    parts += _section("Taken for one another", _confusions(findings, names))
    parts += _section(
        "Labels to check (candidates, not verdicts)", _suspects(findings, names, name_fn)
    )
    parts += _section("Near-duplicates of different classes", _duplicates(findings, names, name_fn))
    return Group(*parts)


def comparison(
    result: RunComparison,
    *,
    changes: Mapping[str, Sequence[ClassChange]],
    fields: Mapping[str, Sequence[tuple[str, Any, Any]]],
) -> RenderableType:
    """The table of a comparison: every score of every run, against the first one.

    `changes` are the changed classes of each run but the first, `fields` the config's differences.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    several = len(result.runs) > 2
    for heading, justify in (
        ("score", "left"),
        ("run", "left"),
        ("value", "right"),
        ("95 % range", "right"),
        (f"against {_short(result.runs[0])}", "right"),
        ("95 % range", "right"),
        ("p (Holm)" if several else "p", "right"),
        ("verdict", "left"),
    ):
        table.add_column(heading, justify=justify, no_wrap=heading != "run")
    for score, rows in result.scores.items():
        for place, (name, row) in enumerate(rows.items()):
            cells = [score if not place else "", _short(name), _percent(row.mean)]
            cells.append(_range(row.low, row.high))
            other = row.comparison
            if other is None:
                cells += ["", "", "", ""]
            else:
                cells += [_signed(other.difference), _range(other.low, other.high, signed=True)]
                cells += [p_text(other.p), other.verdict]
            table.add_row(*map(Text, cells), end_section=place == len(rows) - 1)
    counts, *notes = result.notes
    parts: list[RenderableType] = [Text(counts, style="bold"), table]
    parts += [Text(note, style="dim") for note in notes]
    for name in result.mcnemar:
        parts += [Text(), Text(result.mcnemar_note(name, shown_fn=_short))]
        for change in list(changes.get(name, ()))[:_CLASSES]:
            gained, lost = len(change.only_second), len(change.only_first)
            parts.append(
                Text(
                    f"  {_short(change.name)}: {_signed(change.change)} "
                    f"(+{gained} -{lost} of {change.queries:,})"
                )
            )
        differing = list(fields.get(name, ()))
        if differing:
            parts.append(
                Text(f"configs differ in {len(differing)} field" + "s" * (len(differing) > 1))
            )
            for path, old, new in differing:
                parts.append(Text(f"  {path}: {_value(old)} -> {_value(new)}"))
    return Group(*parts)


def _scores(findings: Findings, other_scores: Mapping[str, float]) -> Table:
    table = _table(("score", "left"), ("value", "right"), ("95 % range", "right"))
    values = findings.scores.values
    for name, own in values.items():
        mean = float(np.nanmean(own)) if not np.isnan(own).all() else math.nan
        table.add_row(
            name, _percent(mean), _range(*metrics.interval(own, groups=findings.scores.labels))
        )
    for name, score in other_scores.items():
        if name not in values:
            table.add_row(Text(name), _percent(score), "")
    return table


def _classes(findings: Findings, names: Sequence[str]) -> Iterator[RenderableType]:
    table, classes = (
        _table(
            ("class", "left"),
            ("queries", "right"),
            ("R@1", "right"),
            ("MAP@R", "right"),
            ("next class", "left"),
            ("gap", "right"),
        ),
        findings.classes,
    )
    rows = [i for i in classes.order if classes.recall_at_1[i] < 1][:_CLASSES]
    for i in rows:
        has_next = classes.next_class[i] >= 0
        table.add_row(
            Text(_short(names[classes.labels[i]])),
            f"{classes.queries[i]:,}",
            _percent(classes.recall_at_1[i]),
            _percent(classes.map_at_r[i]),
            Text(_short(names[classes.labels[classes.next_class[i]]]) if has_next else "-"),
            f"{classes.gap[i]:+.2f}" if math.isfinite(classes.gap[i]) else "-",
        )
    if rows:
        yield table
        yield Text(
            "gap: mean cosine inside the class less that of its mean with the next class's",
            style="dim",
        )


def _confusions(findings: Findings, names: Sequence[str]) -> Iterator[RenderableType]:
    pairs = findings.confusions
    for i in range(min(_PAIRS, len(pairs.counts))):
        a, b = (_short(names[x[i]]) for x in (pairs.labels, pairs.taken_for))
        yield Text(
            f"  {a} -> {b}: {pairs.counts[i]:,} of {pairs.queries[i]:,} queries"
            f" ({pairs.reverse[i]:,} the other way)"
        )


def _suspects(
    findings: Findings, names: Sequence[str], name_fn: Callable[[int], str]
) -> Iterator[RenderableType]:
    suspects, near = findings.suspects, findings.near
    if suspects.refusal:
        yield Text(f"  no list: {suspects.refusal}")
    for item in suspects.items[:_ITEMS]:
        place = int(np.searchsorted(findings.queries, item))
        label = names[findings.labels[item]]
        other = int(near.other[place])
        yield Text(
            f"  {_short(name_fn(int(item)))}: labeled {_short(label)}, perhaps "
            f"{_short(names[findings.labels[other]])}"
        )
    if len(suspects.items) > _ITEMS:
        yield Text(f"  and {len(suspects.items) - _ITEMS:,} more")


def _duplicates(
    findings: Findings, names: Sequence[str], name_fn: Callable[[int], str]
) -> Iterator[RenderableType]:
    pairs = findings.duplicates
    if pairs.refusal:
        yield Text(f"  no list: {pairs.refusal}")
    for query, item in list(zip(pairs.queries.tolist(), pairs.items.tolist(), strict=True))[
        :_ITEMS
    ]:
        a, b = (
            f"{_short(name_fn(int(row)))} ({_short(names[findings.labels[row]])})"
            for row in (query, item)
        )
        yield Text(f"  {a} and {b}")
    if len(pairs.queries) > _ITEMS:
        yield Text(f"  and {len(pairs.queries) - _ITEMS:,} more")


def _section(title: str, parts: Iterator[RenderableType]) -> list[RenderableType]:
    """A heading and its content; a section that has nothing to say says nothing."""
    content = list(parts)
    return [Text(), Text(title, style="bold"), *content] if content else []


def _table(*columns: tuple[str, str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading, justify in columns:
        table.add_column(heading, justify=justify, overflow="fold")
    return table


def _short(name: str) -> str:
    """A name that fits a line: control characters are replaced, a long one keeps its end."""
    name = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(name))
    return name if len(name) <= _WIDEST else f"...{name[3 - _WIDEST :]}"


def _percent(value: float) -> str:
    return f"{100 * value:.1f}" if math.isfinite(value) else "-"


def _signed(value: float) -> str:
    return f"{100 * value:+.1f}" if math.isfinite(value) else "-"


def _range(low: float, high: float, *, signed: bool = False) -> str:
    form = _signed if signed else _percent
    return f"{form(low)} to {form(high)}" if math.isfinite(low) else "-"


def _value(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
