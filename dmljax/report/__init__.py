"""The page of a run, `report.html`, and tables of its main numbers.

    from dmljax import report
    report.show("runs/photos")               the page inside a notebook

`facts.make` makes a page of embeddings from any program, and `page.write` writes it.
"""

import os

from dmljax.report import page

__all__ = ["show"]


class InlinePage:
    """A page that a notebook displays; `html` is its frame."""

    def __init__(self, html: str):
        self.html = html

    def _repr_html_(self) -> str:
        return self.html


def show(run: str | os.PathLike, *, height: int = 900) -> InlinePage:
    """Shows the page of a run inside a notebook, `height` pixels high.

    `run` is the folder of a run, or a page.
    """
    path = page.path_of(run)
    page.read(path)  # refuses any other file
    document = path.read_text(encoding="utf-8").replace("&", "&amp;").replace('"', "&quot;")
    return InlinePage(
        f'<iframe srcdoc="{document}" title="{path.parent.name}" sandbox="allow-scripts '
        f'allow-downloads" style="width:100%;height:{height}px;border:0"></iframe>'
    )
