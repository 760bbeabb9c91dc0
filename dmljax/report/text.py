"""The report as text, for a terminal: of one model, or a comparison of several."""

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any, SupportsFloat, SupportsIndex

from rich import box
from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

from dmljax.metrics import level_text
from dmljax.report.comparison import RunComparison, p_text
from dmljax.report.facts import Facts, Items

_CLASSES, _PAIRS, _ITEMS = 10, 8, 12  # rows of a list at most
_WIDEST = 48  # characters of a name


def of_facts(facts: Facts) -> RenderableType:
    """The diagnosis of one model: what its page says, with the same numbers, in words.

    A long list shows its first rows, and how many there are. Pictures, the map and curves are on
    the page only.
    """
    parts: list[RenderableType] = [Text(f"{facts.title}: {facts.headline or 'no score'}", "bold")]
    if facts.scores is None:
        parts.append(Text(facts.summary))
    for section in (_head, _scores, _looks, _worst, _classes, _confusions):
        parts += section(facts)
    check = facts.check or {}
    for title, key, line in (
        ("Also among the training images", "leaks", _leak),
        ("Perhaps another label (candidates, not verdicts)", "suspects", _suspect),
        ("Almost the same picture, two labels", "duplicates", _duplicate),
        ("Found wrongly by many (hubs)", "hubs", _hub),
    ):
        listed = check.get(key, ())
        lines = [line(facts, row) for row in listed[:_ITEMS]]
        parts += _section(title, _listed(lines, len(listed), check.get(f"{key}_note")))
    if refusal := check.get("refusal"):
        parts += [Text(), Text(refusal)]
    parts += _embedding(facts)
    for fault in facts.faults:
        parts.append(Text(f"The section {fault.section!r} could not be made: {fault.message}"))
    return Group(*parts)


def show(content: RenderableType) -> None:
    """Prints with the colors of a terminal, or plainly into a pipe or a file."""
    width = None if sys.stdout.isatty() else 120
    Console(highlight=False, emoji=False, markup=False, width=width).print(content)


def comparison(result: RunComparison) -> RenderableType:
    """The table of a comparison: every score of every run, against the first one."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    several = len(result.runs) > 2
    columns: Sequence[tuple[str, JustifyMethod]] = (
        ("score", "left"),
        ("run", "left"),
        ("value", "right"),
        (f"{level_text()} range", "right"),
        (f"against {_short(result.first)}", "right"),
        (f"{level_text()} range", "right"),
        ("p (Holm)" if several else "p", "right"),
        ("verdict", "left"),
    )
    for heading, justify in columns:
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
        for change in result.changed_classes(name)[:_CLASSES]:
            gained, lost = len(change.only_second), len(change.only_first)
            parts.append(
                Text(
                    f"  {_short(change.name)}: R@1 {_signed(change.change)} "
                    f"({gained} gained, {lost} lost, of {change.queries:,})"
                )
            )
        if differing := result.changed_fields(name):
            parts.append(
                Text(f"configs differ in {len(differing)} field" + "s" * (len(differing) > 1))
            )
            for path, old, new in differing:
                parts.append(Text(f"  {path}: {_value(old)} -> {_value(new)}"))
    return Group(*parts)


def ranking(
    result: RunComparison, *, facts: Mapping[str, Sequence[str]], headings: Sequence[str]
) -> RenderableType:
    """One row for each run: R@1, MAP@R, and the difference of MAP@R to the first run.

    `facts` are further cells of each run, under `headings`.
    """
    columns = ["R@1", "MAP@R", "MAP@R - first", "p (Holm)" if len(result.runs) > 2 else "p"]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in ["", *columns, "verdict", *headings]:
        is_text = heading in ("", "verdict")
        table.add_column(heading, justify="left" if is_text else "right", no_wrap=True)
    for name in result.runs:
        row, other = (result.scores[score][name] for score in ("R@1", "MAP@R"))
        cells = [f"{_percent(x.mean)} {_brackets(x.low, x.high)}" for x in (row, other)]
        compared = other.comparison
        if compared is None:
            cells += ["", "", ""]
        else:
            range_ = _brackets(compared.low, compared.high, signed=True)
            cells += [f"{_signed(compared.difference)} {range_}", p_text(compared.p)]
            cells.append(compared.verdict)
        table.add_row(*map(Text, [_short(name), *cells, *facts[name]]))
    notes = [Text(note, style="dim") for note in result.notes[1:]]
    return Group(Text(result.notes[0], style="bold"), table, *notes)


def _brackets(low: float, high: float, *, signed: bool = False) -> str:
    form = _signed if signed else _percent
    return f"[{form(low)}, {form(high)}]" if math.isfinite(low) else ""


def _head(facts: Facts) -> list[RenderableType]:
    lines = [Text(line) for line in (facts.rule, facts.warning) if line]
    rows = (facts.run or {}).get("rows", ())
    return [*lines, *(Text(f"{name}: {value}", style="dim") for name, value in rows)]


def _scores(facts: Facts) -> list[RenderableType]:
    """The main scores with their ranges, then the other scores of every split."""
    if facts.scores is None:
        return []
    splits, *others = facts.scores["table"]["splits"]
    table = _table(
        ("score", "left"),
        (splits, "right"),
        (f"{level_text()} range", "right"),
        *((split, "right") for split in others),
    )
    cells = {name: values for name, *values in facts.scores["table"]["rows"]}
    for tile in facts.scores["tiles"]:
        _, *remaining = cells.pop(tile["name"], ("", *others))
        range_ = _range(tile["low"], tile["high"])
        table.add_row(tile["name"], _percent(tile["value"]), range_, *remaining)
    for name, (value, *remaining) in cells.items():
        table.add_row(Text(name), value, "", *remaining)
    return [table, Text(facts.scores["note"], style="dim")]


def _looks(facts: Facts) -> list[RenderableType]:
    def words(parts: Sequence[Any]) -> str:
        return "".join(x if isinstance(x, str) else _class(facts, x["class"]) for x in parts)

    lines = [words(look["parts"]) for look in facts.looks]
    return _section("Look at these first", _listed(lines, len(lines)))


def _worst(facts: Facts) -> list[RenderableType]:
    order = (facts.worst or {}).get("order", ())
    lines = [
        f"{_image(facts, i)}: nearest is {_image(facts, _items(facts).neighbors[i, 0])}, "
        f"first right at {_items(facts).first[i]:,}"
        for i in order[:_ITEMS]
    ]
    return _section("Worst queries", _listed(lines, len(order)))


def _classes(facts: Facts) -> list[RenderableType]:
    classes = facts.classes
    if classes is None:
        return []
    columns: list[tuple[str, JustifyMethod]] = [("class", "left"), ("images", "right")]
    columns += [("R@1", "right"), ("MAP@R", "right"), ("inside", "right")]
    has_next = "next" in classes
    if has_next:
        columns += [("next", "right"), ("next class", "left"), ("gap", "right")]
    table = _table(*columns)
    rows = [i for i in classes["order"] if classes["recall"][i] < 1][:_CLASSES]
    for i in rows:
        cells: list[RenderableType] = [Text(_class(facts, i)), f"{classes['count'][i]:,}"]
        cells += [_percent(classes["recall"][i]), _percent(classes["map_at_r"][i])]
        cells.append(_decimal(classes["inside"][i]))
        if has_next:
            following, cosine = classes["next"][i], classes["next_similarity"][i]
            cells.append(_decimal(cosine))
            cells.append(Text(_class(facts, following) if following < len(facts.names) else "-"))
            cells.append(_decimal(classes["inside"][i] - cosine))
        table.add_row(*cells)
    note = (
        "inside: mean cosine of two images of the class; next: cosine with the mean of the nearest "
        "other class; gap: inside - next"
    )
    return _section("Worst classes", [table, Text(note, style="dim")] if rows else [])


def _confusions(facts: Facts) -> list[RenderableType]:
    pairs = (facts.confusions or {}).get("pairs", ())
    lines = [
        f"{_class(facts, pair['a'])} taken for {_class(facts, pair['b'])}: {pair['count']:,} of "
        f"{pair['of']:,}" + (f", the other way {pair['back']:,}" if pair["back"] else "")
        for pair in pairs[:_PAIRS]
    ]
    total = (facts.confusions or {}).get("total", 0)
    return _section("Taken for one another", _listed(lines, total))


def _leak(facts: Facts, leak: Mapping[str, Any]) -> str:
    return (
        f"{_image(facts, leak['item'])} is like a training image of {_short(leak['train_class'])}: "
        f"cosine {leak['similarity']:.3f}"
    )


def _suspect(facts: Facts, suspect: Mapping[str, Any]) -> str:
    other = _class(facts, _items(facts).labels[suspect["other"]])
    return (
        f"{_image(facts, suspect['item'])} perhaps {other}: {suspect['to_own']:.2f} to its own "
        f"class, {suspect['to_other']:.2f} to that one"
    )


def _duplicate(facts: Facts, pair: Mapping[str, Any]) -> str:
    a, b = (_image(facts, pair[side]) for side in "ab")
    return f"{a} and {b}: cosine {pair['similarity']:.3f}"


def _hub(facts: Facts, hub: Mapping[str, Any]) -> str:
    return (
        f"{_image(facts, hub['item'])}: among the ten nearest of {hub['found']:,} queries, "
        f"{hub['wrong']:,} of them of another class"
    )


def _embedding(facts: Facts) -> list[RenderableType]:
    if facts.embedding is None:
        return []
    numbers = _table(("number", "left"), ("value", "right"), ("meaning", "left"))
    for row in facts.embedding["numbers"]:
        numbers.add_row(*row)
    lines = [
        f"At threshold {offer['threshold']:.3f}, 1 in {1 / offer['fmr']:,.0f} pairs of different "
        f"classes pass, and {_percent(offer['fnmr'])} % of the pairs of one class are refused."
        for offer in facts.embedding["thresholds"]
    ]
    return _section("The embedding", [numbers, *_listed(lines, len(lines))])


def _items(facts: Facts) -> Items:
    assert facts.items is not None  # only a page without images has none
    return facts.items


def _class(facts: Facts, label: SupportsIndex) -> str:
    return _short(facts.names[int(label)])


def _image(facts: Facts, item: SupportsIndex) -> str:
    name = f"image {item}" if facts.files is None else _short(facts.files[int(item)])
    return f"{name} ({_class(facts, _items(facts).labels[item])})"


def _listed(lines: Sequence[str], total: int, note: str | None = None) -> list[RenderableType]:
    """Lines of a list that has `total` rows, under a note; nothing without lines."""
    more = [f"and {total - len(lines):,} more"] if total > len(lines) else []
    head = [Text(note, style="dim")] if note else []
    return [*head, *(Text(f"  {line}") for line in [*lines, *more])] if lines else []


def _section(title: str, content: Sequence[RenderableType]) -> list[RenderableType]:
    """A heading and its content; a section that has nothing to say says nothing."""
    return [Text(), Text(title, style="bold"), *content] if content else []


def _table(*columns: tuple[str, JustifyMethod]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading, justify in columns:
        table.add_column(heading, justify=justify, overflow="fold")
    return table


def _short(name: str) -> str:
    """A name that fits a line: control characters are replaced, a long one keeps its end."""
    name = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(name))
    return name if len(name) <= _WIDEST else f"...{name[3 - _WIDEST :]}"


def _percent(value: SupportsFloat) -> str:
    return f"{100 * float(value):.1f}" if math.isfinite(value) else "-"


def _decimal(value: SupportsFloat) -> str:
    return f"{float(value):.2f}" if math.isfinite(value) else "-"


def _signed(value: float) -> str:
    return f"{100 * value:+.1f}" if math.isfinite(value) else "-"


def _range(low: float, high: float, *, signed: bool = False) -> str:
    form = _signed if signed else _percent
    return f"{form(low)} to {form(high)}" if math.isfinite(low) else "-"


def _value(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
