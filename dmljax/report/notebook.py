"""Pages and figures for notebooks, from the page of a run: nothing is computed again."""

import io
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from dmljax.report import facts, figures, page, text

_RIGHT, _WRONG, _INK = "#0069a8", "#c04a00", "#1b1f24"


class InlinePage:
    """A page that a notebook displays; `html` is its frame."""

    def __init__(self, html: str):
        self.html = html

    def _repr_html_(self) -> str:
        return self.html


def show(run: str | os.PathLike, *, height: int = 900) -> InlinePage:
    """The page of a run inside a notebook, `height` pixels high.

    `run` is the folder of a run, or a page.
    """
    path = page.path_of(run)
    page.read(path)  # refuses any other file
    document = path.read_text(encoding="utf-8").replace("&", "&amp;").replace('"', "&quot;")
    return InlinePage(
        f'<iframe srcdoc="{document}" title="{path.parent.name}" sandbox="allow-scripts '
        f'allow-downloads" style="width:100%;height:{height}px;border:0"></iframe>'
    )


def findings(run: str | os.PathLike) -> None:
    """Prints the findings of the page of a run, as `dmljax report --text` does."""
    text.show(text.of_facts(facts.from_tree(page.read(run))))


def worst(run: str | os.PathLike, *, queries: int = 8, k: int = 8) -> Any:
    """A figure of the queries whose first right image ranks last, as `neighbors` draws them."""
    tree = page.read(run)
    order = tree["worst"]["order"]
    if not len(order):
        raise ValueError(f"{run}: the nearest image of every query is right; there is no worst one")
    return _rows(tree, order[:queries].tolist(), k=k)


def neighbors(run: str | os.PathLike, items: Sequence[int] | None = None, *, k: int = 8) -> Any:
    """A figure of images and their `k` nearest: blue and solid is right, orange and dashed wrong.

    `items` are numbers of test images, as the page shows them; without them, eight are drawn.
    """
    tree = page.read(run)
    queries = np.flatnonzero(tree["items"]["hits"] < 2)
    if items is None:
        items = np.random.default_rng(0).permutation(queries)[:8].tolist()
    wrong = [i for i in items if not 0 <= i < len(tree["items"]["labels"])]
    if wrong:
        raise ValueError(
            f"there is no image {wrong[0]}: choose from 0 to {len(tree['items']['labels']) - 1}"
        )
    return _rows(tree, items, k=k)


def embedding_map(runs: str | os.PathLike | Sequence[str | os.PathLike], *, size: float = 8) -> Any:
    """A figure of all test images at their positions of the page: wrong ones are squares.

    `runs` is the folder of a run, or several: their maps are drawn side by side under the names of
    the folders, with the R@1 of each. Each map has axes of its own.
    """
    folders = [runs] if isinstance(runs, str | os.PathLike) else list(runs)
    if not folders:
        raise ValueError("map: name at least one run")
    trees = [page.read(folder)["items"] for folder in folders]
    for folder, items in zip(folders, trees, strict=True):
        if "x" not in items:
            raise ValueError(
                f"{folder}: its page has no map, as fewer than two images could be read"
            )
    figure, axes = figures.figure(
        size * len(folders), size * 0.75, ncols=len(folders), squeeze=False
    )
    for axis, items, folder in zip(axes[0], trees, folders, strict=True):
        _draw_map(axis, items)
        if len(folders) > 1:
            queries = items["hits"][items["hits"] < 2]
            name = page.path_of(folder).parent.name
            axis.set_title(f"{name}: R@1 {100 * float(np.mean(queries)):.1f}")
    return figure


def _draw_map(axis: Any, items: dict[str, Any]) -> None:
    readable = items["readable"] > 0
    for name, hit, marker, color in (
        ("right", 1, "o", _RIGHT),
        ("wrong", 0, "s", _WRONG),
        ("no query", 2, ".", "#a5aeb9"),
    ):
        rows = readable & (items["hits"] == hit)
        if rows.any():
            axis.scatter(
                items["x"][rows],
                items["y"][rows],
                s=10,
                marker=marker,
                color=color,
                lw=0,
                label=f"{name} ({int(rows.sum()):,})",
            )
    axis.set(xticks=[], yticks=[])
    axis.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))


class _Pictures:
    """The thumbnails of a page."""

    def __init__(self, tree: dict[str, Any]):
        self._sheets: dict[int, np.ndarray] = {}
        self._tree = tree
        self._cells = tree["items"].get("cells")

    def __call__(self, item: int) -> np.ndarray | None:
        if self._cells is None or self._cells[item] == 65535:
            return None
        sheet, place = divmod(int(self._cells[item]), 256)
        if sheet not in self._sheets:
            with Image.open(io.BytesIO(self._tree["sheets"][sheet])) as picture:
                self._sheets[sheet] = np.asarray(picture.convert("RGB"))
        side = self._sheets[sheet].shape[1] // 16
        top, left = divmod(place, 16)
        return self._sheets[sheet][top * side : (top + 1) * side, left * side : (left + 1) * side]


def _rows(tree: dict[str, Any], queries: Sequence[int], *, k: int) -> Any:
    """One row for each query: the query, its nearest, and the nearest of its class."""
    items, names, picture_of = tree["items"], tree["names"], _Pictures(tree)
    n, labels = len(items["labels"]), items["labels"]
    k = min(k, items["neighbors"].shape[1])
    figure, axes = figures.figure(
        1.0 * (k + 2) + 1.2, 1.15 * len(queries), nrows=len(queries), ncols=k + 2, squeeze=False
    )
    for row, query in zip(axes, queries, strict=True):
        cells = [int(query), *(int(j) for j in items["neighbors"][query, :k])]
        cells.append(int(items["best_own"][query]))
        titles = ["query", *(str(rank) for rank in range(1, k + 1)), f"{items['first'][query]:,}"]
        for place, (axis, item, title) in enumerate(zip(row, cells, titles, strict=True)):
            axis.set(xticks=[], yticks=[])
            if item >= n:
                axis.set_axis_off()
                continue
            is_right = labels[item] == labels[query]
            color = _INK if place == 0 else _RIGHT if is_right else _WRONG
            for spine in axis.spines.values():
                spine.set(color=color, linewidth=2.5)
                spine.set_linestyle("solid" if place == 0 or is_right else (0, (3, 2)))
            image = picture_of(item)
            if image is None:
                axis.text(0.5, 0.5, names[labels[item]][:14], ha="center", va="center", fontsize=6)
            else:
                axis.imshow(image)
            mark = "" if place == 0 else "right " if is_right else "wrong "
            axis.set_title(f"{mark}{title}", fontsize=7, color=color, pad=2)
        row[0].set_ylabel(names[labels[query]][:18], fontsize=7, rotation=0, ha="right")
    return figure
