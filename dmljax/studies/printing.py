"""A table of a study as Markdown, LaTeX, CSV, and HTML with a dot for every seed.

One or two values are printed as they are, without an interval. An unresolved difference is called
unresolved, never "equal".
"""

import csv
import html
import io

from dmljax.metrics import level_text
from dmljax.studies.study_file import varies
from dmljax.studies.table import Cell, Comparison, Table, TableRow

_UNRESOLVED = ("not resolved", "no spread between runs: no test")
_TESTS = {
    "paired": "pairs of equal seeds, Student",
    "welch": "independent runs, Welch",
    "folds": "folds, corrected t of Nadeau and Bengio",
}


def caption(table: Table) -> str:
    """Explains a cell."""
    unit = "folds" if table.study.test == "folds" else "seeds"
    how = f"mean ± half width of the {level_text()} Student interval over {unit}"
    rules = sorted({rule for row in table.rows for rule in row.rules})
    chosen = {"last": "the last step counts"}
    how_chosen = "; ".join(chosen.get(rule, f"the step is chosen by {rule}") for rule in rules)
    return f"In percent: {how}; {how_chosen or 'no run is finished'}."


def cell_text(row: TableRow, cell: Cell) -> str:
    """Returns the text of a cell, with its marks."""
    if cell.estimate is None:
        return "failed" if row.planned and len(row.failures) == row.planned else "-"
    marks = ("†" if row.test_chosen else "") + ("‡" if row.failures else "")
    mean, _, low, high, n = cell.estimate
    if n == 1:
        return f"{mean:.1f}{marks} (1 run)"
    if n == 2:
        return ", ".join(f"{value:.1f}" for value in cell.values.values()) + marks
    half = (high - low) / 2
    digits = 2 if half < 0.1 else 1
    return f"{mean:.{digits}f} ± {half:.{digits}f}{marks}"


def comparison_text(comparison: Comparison) -> str:
    """Returns a difference with its interval, its adjusted p-value and the wins among pairs."""
    d = comparison.difference
    wins = f", wins {comparison.wins} of {comparison.pairs}" if comparison.pairs else ""
    if not comparison.is_tested:
        return f"{d.mean:+.2f}{wins}; {_UNRESOLVED[1]}"
    digits = 2 if (d.high - d.low) / 2 < 0.1 else 1
    text = f"{d.mean:+.{digits}f} [{d.low:+.{digits}f}, {d.high:+.{digits}f}], "
    text += f"p {_p(comparison.p)}{wins}"
    return text if comparison.is_resolved else f"{text}: {_UNRESOLVED[0]}"


def _p(value: float) -> str:
    return "< 0.001" if value < 0.001 else f"{value:.3f}" if value < 0.0995 else f"{value:.2f}"


def _runs(row: TableRow) -> str:
    """Counts the runs that are finished, failed, running or collapsed."""
    text = str(row.planned) if row.is_complete else f"{row.finished} of {row.planned}"
    if row.failures:
        text += f", {len(row.failures)} failed"
    if row.running:
        text += f", {row.running} running"
    if row.collapsed:
        text += f", {row.collapsed} collapsed"
    return text


def grids(table: Table) -> list[tuple[str, list[list[str]]]]:
    """Returns the scores, and the differences if a row has a baseline: titles and rows of cells.

    Text between ** is bold: a difference that is resolved after Holm's adjustment.
    """
    study = table.study
    published = [name for name in study.scores if any(name in x.published for x in table.rows)]
    body = [["row", *study.scores, *(f"published {name}" for name in published), "runs"]]
    for row in table.rows:
        better = {name for name, comparison in row.comparisons.items() if comparison.is_better}
        cells = [_bold(cell_text(row, row.cells[x]), x in better) for x in study.scores]
        cells += [str(row.published.get(name, "")) for name in published]
        body.append([row.name, *cells, _runs(row)])
    baselines = {row.name: study.row(row.name).baseline for row in table.rows}
    others = sorted({name for name in baselines.values() if name is not None})
    if not any(row.comparisons for row in table.rows):
        return [(caption(table), body)]
    is_common, scores = len(others) == 1, list(filter(varies, study.scores))
    title = f"Differences{f' to {others[0]}' if is_common else ''} ({_TESTS[study.test or '']}; "
    title += f"{level_text()} interval, p-value adjusted by Holm)"
    differences = [["row", *scores]]
    for row in table.rows:
        if (other := baselines[row.name]) is not None:
            cells = []
            for comparison in map(row.comparisons.get, scores):
                text = comparison_text(comparison) if comparison else "needs two runs of each"
                cells.append(_bold(text, comparison is not None and comparison.is_resolved))
            differences.append([row.name if is_common else f"{row.name} minus {other}", *cells])
    return [(caption(table), body), (title, differences)]


def _bold(text: str, is_bold: bool) -> str:
    return f"**{text}**" if is_bold else text


def footer(table: Table) -> list[str]:
    """Returns the conclusions, the failed runs, and the origin of the numbers."""
    lines = list(table.notes)
    if any(row.failures for row in table.rows):
        lines.append("‡: the mean of the runs that finished; others failed.")
        lines += [f"Failed: {failure}" for row in table.rows for failure in row.failures]
    if any(row.published for row in table.rows):
        lines.append(
            f"Published: {table.study.published_from}. These values are not part of any test."
        )
    return [*lines, *table.provenance]


def as_markdown(table: Table) -> str:
    """Returns the table for a terminal and for a document."""
    lines = [f"## {table.study.title}", ""]
    for title, (header, *body) in grids(table):
        first, *widths = (max(map(len, column)) for column in zip(header, *body, strict=True))
        rule = ["-" * first, *("-" * (width - 1) + ":" for width in widths)]
        lines += [title, ""]
        for name, *cells in (header, rule, *body):
            texts = (cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
            lines.append(f"| {' | '.join([name.ljust(first), *texts])} |")
        lines.append("")
    lines += [f"* {line}" for line in footer(table)]
    return "\n".join(lines) + "\n"


_LATEX = {"\\": r"\textbackslash{}", "±": r"$\pm$", "†": r"$^\dagger$", "‡": r"$^\ddagger$"}
_LATEX |= {character: f"\\{character}" for character in "&%$#_{}"}
_LATEX |= {"~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": "$<$", ">": "$>$"}


def as_latex(table: Table) -> str:
    """Returns two tabulars with \\toprule and so on, which the package booktabs provides."""

    def plain(text: str) -> str:
        escaped = "".join(_LATEX.get(c, c) for c in text.strip("*"))
        return rf"\textbf{{{escaped}}}" if text.startswith("**") else escaped

    lines = [f"% {table.study.title}"]
    for title, grid in grids(table):
        head, *body = (" & ".join(map(plain, row)) + r" \\" for row in grid)
        columns = "l" + "r" * (len(grid[0]) - 1)
        lines += [r"\begin{table}", r"\centering", rf"\caption{{{plain(title)}}}"]
        lines += [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", head, r"\midrule", *body]
        lines += [r"\bottomrule", r"\end{tabular}", r"\end{table}"]
    return "\n".join([*lines, *(f"% {line}" for line in footer(table))]) + "\n"


def as_csv(table: Table) -> str:
    """Returns raw values as fractions, one line for every run, for a reader's own tests."""
    fields = list(dict.fromkeys(name for line in table.raw for name in line))
    file = io.StringIO()
    writer = csv.DictWriter(file, fields, lineterminator="\n", restval="")
    writer.writeheader()
    writer.writerows(table.raw)
    return file.getvalue()


_WIDTH, _HEIGHT, _MARGIN = 220, 26, 8
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem;
       color: #1a1a1a; background: #fff; }
table { border-collapse: collapse; margin: .5rem 0 2rem; }
th, td { padding: .3rem .8rem; border-bottom: 1px solid #ddd; text-align: right;
         vertical-align: top; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
td.resolved { font-weight: 600; }
td.unresolved { color: #666; }
svg { display: block; margin-left: auto; }
.axis { stroke: #ddd; } .interval { stroke: #8ab; stroke-width: 3; }
.mean { stroke: #024; stroke-width: 2; } .seed { fill: #06c; fill-opacity: .55; }
li { margin: .2rem 0; color: #333; } .scroll { overflow-x: auto; }
@media (prefers-color-scheme: dark) {
  body { color: #ddd; background: #16181c; } th, td { border-color: #333; } li { color: #bbb; }
  td.unresolved { color: #999; } .axis { stroke: #444; } .mean { stroke: #fff; }
  .seed { fill: #6af; }
}
"""


def as_html(table: Table) -> str:
    """Returns the table as a self-contained page: every seed is a dot over the interval."""
    title = html.escape(table.study.title)
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        '<meta name=viewport content="width=device-width">',
        f"<title>{title}</title><style>{_STYLE}</style><h1>{title}</h1>",
    ]
    scores = dict(enumerate(table.study.scores, 1))
    ranges = {i: _range(table, score) for i, score in scores.items()}
    for number, (text, (header, *body)) in enumerate(grids(table)):
        parts.append(f"<p>{html.escape(text)}</p><div class=scroll><table>")
        parts.append("<tr>" + "".join(f"<th>{html.escape(cell)}</th>" for cell in header) + "</tr>")
        for i, row in enumerate(body):
            line = ""
            for j, cell in enumerate(row):
                has_dots = number == 0 and j in scores
                dots = _dots(table.rows[i].cells[scores[j]], *ranges[j]) if has_dots else ""
                kind = " class=resolved" if cell.startswith("**") else ""
                kind = " class=unresolved" if cell.endswith(_UNRESOLVED) else kind
                line += f"<td{kind}>{html.escape(cell.strip('*'))}{dots}</td>"
            parts.append(f"<tr>{line}</tr>")
        parts.append("</table></div>")
    items = "".join(f"<li>{html.escape(line)}</li>" for line in footer(table))
    parts.append(f"<ul>{items}</ul></html>")
    return "\n".join(parts) + "\n"


def _range(table: Table, score: str) -> tuple[float, float]:
    """Returns the smallest and the largest value of a column, the ends of the axis of its dots."""
    values = [value for row in table.rows for value in row.cells[score].values.values()]
    low, high = min(values, default=0.0), max(values, default=1.0)
    return (low, high) if high > low else (low - 1, high + 1)


def _dots(cell: Cell, low: float, high: float) -> str:
    if cell.estimate is None:
        return ""
    middle = _HEIGHT / 2

    def x(value: float) -> float:
        fraction = min(max((value - low) / (high - low), 0), 1)
        return _MARGIN + fraction * (_WIDTH - 2 * _MARGIN)

    marks = [f"<line class=axis x1={_MARGIN} x2={_WIDTH - _MARGIN} y1={middle} y2={middle} />"]
    mean, _, bottom, top, n = cell.estimate
    if n > 2:
        marks.append(
            f"<line class=interval x1={x(bottom):.1f} x2={x(top):.1f} y1={middle} y2={middle} />"
        )
    marks += [
        f"<circle class=seed cx={x(value):.1f} cy={middle} r=4><title>seed {seed}"
        f"{'' if fold is None else f', fold {fold}'}: {value:.2f}</title></circle>"
        for (seed, fold), value in cell.values.items()
    ]
    if n > 1:
        marks.append(f"<line class=mean x1={x(mean):.1f} x2={x(mean):.1f} y1=4 y2={_HEIGHT - 4} />")
    return f"<svg width={_WIDTH} height={_HEIGHT} role=img>{''.join(marks)}</svg>"


FORMATS = {"md": as_markdown, "tex": as_latex, "csv": as_csv, "html": as_html}
