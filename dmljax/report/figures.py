"""A matplotlib figure that does not touch the state of a notebook."""

from __future__ import annotations

from typing import Any

__all__ = ["figure"]


def figure(width: float, height: float, **subplots: Any) -> tuple[Any, Any]:
    """`(figure, axes)` of a size in inches, without pyplot, which would change the backend."""
    from matplotlib.figure import Figure

    page = Figure(figsize=(width, height), layout="constrained")
    return page, page.subplots(**subplots)
