"""The page of a run, `report.html`, and figures from it.

    from dmljax import report
    report.show("runs/photos")               the page inside a notebook
    report.findings("runs/photos")           the findings as text
    report.worst("runs/photos")              a figure; also neighbors and map

`facts.make` makes a page of embeddings from anywhere, and `page.write` writes it.
"""

from dmljax.report.notebook import embedding_map as map
from dmljax.report.notebook import findings, neighbors, show, worst

__all__ = ["findings", "map", "neighbors", "show", "worst"]
