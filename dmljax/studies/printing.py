"""A table of a study as Markdown, LaTeX and CSV; `page.py` prints it as HTML.

One or two values are printed as they are, without an interval. An unresolved difference is called
unresolved, never "equal".
"""

import csv
import io

from dmljax.metrics import level_text
from dmljax.studies.study_file import varies
from dmljax.studies.table import Cell, Comparison, Table, TableRow

FORMATS = ("md", "tex", "csv", "html")
NOT_RESOLVED, NO_TEST = "not resolved", "no spread between runs: no test"


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
        return f"{d.mean:+.2f}{wins}; {NO_TEST}"
    digits = 2 if (d.high - d.low) / 2 < 0.1 else 1
    text = f"{d.mean:+.{digits}f} [{d.low:+.{digits}f}, {d.high:+.{digits}f}], "
    text += f"p {_p(comparison.p)}{wins}"
    return text if comparison.is_resolved else f"{text}: {NOT_RESOLVED}"


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
    header = ["row", *study.scores, *(f"published {name}" for name in published), "runs"]
    body = []
    for row in table.rows:
        cells = []
        for score in study.scores:
            text = cell_text(row, row.cells[score])
            comparison = row.comparisons.get(score)
            cells.append(f"**{text}**" if comparison and comparison.is_better else text)
        cells += [str(row.published.get(name, "")) for name in published]
        body.append([row.name, *cells, _runs(row)])
    result = [(caption(table), [header, *body])]
    if any(row.comparisons for row in table.rows):
        tests = {
            "paired": "pairs of equal seeds, Student",
            "welch": "independent runs, Welch",
            "folds": "folds, corrected t of Nadeau and Bengio",
        }
        baselines = {row.name: study.row(row.name).baseline for row in table.rows}
        compared = {name: baseline for name, baseline in baselines.items() if baseline is not None}
        others = sorted(set(compared.values()))
        is_common = len(others) == 1
        title = (
            f"Differences{f' to {others[0]}' if is_common else ''} ({tests[study.test or '']}; "
            f"{level_text()} interval, p-value adjusted by Holm)"
        )
        body = []
        for row in table.rows:
            if row.name not in compared:
                continue
            cells = []
            for score in filter(varies, study.scores):
                comparison = row.comparisons.get(score)
                text = comparison_text(comparison) if comparison else "needs two runs of each"
                is_bold = comparison is not None and comparison.is_resolved
                cells.append(f"**{text}**" if is_bold else text)
            name = row.name if is_common else f"{row.name} minus {compared[row.name]}"
            body.append([name, *cells])
        result.append((title, [["row", *filter(varies, study.scores)], *body]))
    return result


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
    for title, grid in grids(table):
        widths = [max(len(row[i]) for row in grid) for i in range(len(grid[0]))]
        lines += [title, ""]
        for i, row in enumerate(grid):
            cells = (
                c.ljust(w) if j == 0 else c.rjust(w)
                for j, (c, w) in enumerate(zip(row, widths, strict=True))
            )
            lines.append(f"| {' | '.join(cells)} |")
            if i == 0:
                rules = ("-" * w if j == 0 else "-" * (w - 1) + ":" for j, w in enumerate(widths))
                lines.append(f"| {' | '.join(rules)} |")
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
