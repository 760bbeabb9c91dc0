"""A matplotlib figure that does not touch the state of a notebook."""

import io
from typing import Any


def figure(width: float, height: float, **subplots: Any) -> tuple[Any, Any]:
    """`(figure, axes)` of a size in inches, without pyplot, which would change the backend.

    A notebook displays the figure as a picture.
    """
    from matplotlib.figure import Figure

    class InlineFigure(Figure):
        def _repr_png_(self) -> bytes:
            buffer = io.BytesIO()
            self.savefig(buffer, format="png", dpi=100)
            return buffer.getvalue()

    page = InlineFigure(figsize=(width, height), layout="constrained")
    return page, page.subplots(**subplots)
