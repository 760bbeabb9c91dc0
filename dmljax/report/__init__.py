"""The page of a run, `report.html`, and tables of its main numbers.

    from dmljax import report
    report.show("runs/photos")               the page inside a notebook

`facts.make` makes a page of embeddings from any program, and `page.write` writes it.
"""

import os
import types

from dmljax.report import page

__all__ = ["show"]


def show(run: str | os.PathLike, *, height: int = 900) -> types.SimpleNamespace:
    """Shows the page of a run inside a notebook, `height` pixels high.

    `run` is the folder of a run, or a page.
    """
    path = page.path_of(run)
    page.read(path)  # refuses any other file
    document = path.read_text(encoding="utf-8").replace("&", "&amp;").replace('"', "&quot;")
    frame = (
        f'<iframe srcdoc="{document}" title="{path.parent.name}" sandbox="allow-scripts '
        f'allow-downloads" style="width:100%;height:{height}px;border:0"></iframe>'
    )
    return types.SimpleNamespace(_repr_html_=lambda: frame)  # which notebooks look for
