"""A table of a study as one HTML file, with a dot for every seed."""

import html

from dmljax.studies import printing
from dmljax.studies.table import Cell, Table

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
li { margin: .2rem 0; color: #333; }
.scroll { overflow-x: auto; }
@media (prefers-color-scheme: dark) {
  body { color: #ddd; background: #16181c; } th, td { border-color: #333; } li { color: #bbb; }
  td.unresolved { color: #999; } .axis { stroke: #444; } .mean { stroke: #fff; }
  .seed { fill: #6af; }
}
"""


def as_html(table: Table) -> str:
    """Returns the table as a self-contained page: every seed is a dot over the interval."""
    ranges = {score: _range(table, score) for score in table.study.scores}
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        '<meta name=viewport content="width=device-width">',
        f"<title>{html.escape(table.study.title)}</title><style>{_STYLE}</style>",
        f"<h1>{html.escape(table.study.title)}</h1>",
    ]
    for i, (title, grid) in enumerate(printing.grids(table)):
        parts.append(f"<p>{html.escape(title)}</p><div class=scroll><table>")
        parts.append(_line(grid[0], "th"))
        for row in grid[1:]:
            dots = {}
            if i == 0:
                cells = next(r for r in table.rows if r.name == row[0]).cells
                dots = {1 + j: _dots(cells[s], *ranges[s]) for j, s in enumerate(ranges)}
            parts.append(_line(row, "td", dots))
        parts.append("</table></div>")
    items = "".join(f"<li>{html.escape(line)}</li>" for line in printing.footer(table))
    parts.append(f"<ul>{items}</ul></html>")
    return "\n".join(parts) + "\n"


def _line(cells: list[str], tag: str, dots: dict[int, str] | None = None) -> str:
    text = ""
    for j, cell in enumerate(cells):
        kind = ""
        if cell.startswith("**"):
            kind = " class=resolved"
        elif cell.endswith((printing.NOT_RESOLVED, printing.NO_TEST)):
            kind = " class=unresolved"
        picture = (dots or {}).get(j, "")
        text += f"<{tag}{kind}>{html.escape(cell.strip('*'))}{picture}</{tag}>"
    return f"<tr>{text}</tr>"


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
