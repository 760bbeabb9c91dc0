"""The diagnosis of embeddings as typed facts, which a page shows.

`make` takes embeddings of any program, without a run. `diagnosis.py` computes the sections; this
module puts them together. A fault in one section leaves that section out and is listed in
`Facts.faults`.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from absl import logging

from dmljax import metrics, retrieval
from dmljax.data import splits
from dmljax.data.splits import Split
from dmljax.hints import counted
from dmljax.metrics.reports import MEANINGS
from dmljax.metrics.significance import FEWEST_CLASSES
from dmljax.report import diagnosis, findings, projection, scores_file, sprites
from dmljax.report.diagnosis import NEIGHBORS
from dmljax.report.scores_file import QueryScores

_SHOWN_NEIGHBORS = 8  # pictures of neighbors in a row of a worst query
_WORST_WITH_PICTURES = 400
_FEWEST_CLASSES_FOR_CONFUSIONS = 3
COSINE_STEPS = 127.5  # a byte is (cosine + 1) * 127.5


@dataclasses.dataclass(frozen=True)
class Fault:
    """A section that could not be made, and the reason."""

    section: str
    message: str


@dataclasses.dataclass(frozen=True)
class Items:
    """One row for each image of the split; the index `n` stands for no item.

    `hits` is 1 if the nearest item has the class, 0 if not, and 2 if the image is not a scored
    query. `first` is the rank of the first positive, or 0. `roles`: 1 query, 2 gallery, 0 both.
    """

    labels: np.ndarray  # [n]
    readable: np.ndarray  # uint8 [n]
    hits: np.ndarray  # uint8 [n]
    first: np.ndarray  # uint32 [n]
    map_at_r: np.ndarray  # uint8 [n], 255 is 1
    neighbors: np.ndarray  # [n NEIGHBORS]
    similarities: np.ndarray  # uint8 [n NEIGHBORS]
    best_own: np.ndarray  # [n]
    found: np.ndarray  # uint16 [n]: count of queries with the image among their nearest
    found_wrong: np.ndarray  # uint16 [n]: count of these queries that are of another class
    roles: np.ndarray | None = None  # uint8 [n]
    x: np.ndarray | None = None  # uint16 [n]
    y: np.ndarray | None = None
    cells: np.ndarray | None = None  # uint16 [n]


@dataclasses.dataclass(frozen=True)
class Facts:
    """Everything on a page, which leaves out sections that are None."""

    title: str
    headline: str = ""
    summary: str = ""
    rule: str = ""
    warning: str | None = None
    names: Sequence[str] = ()
    files: Sequence[str] | None = None
    items: Items | None = None
    scores: Mapping[str, Any] | None = None
    prefixes: Mapping[str, Any] | None = None
    curves: Mapping[str, Any] | None = None
    looks: Sequence[Mapping[str, Any]] = ()
    worst: Mapping[str, Any] | None = None
    classes: Mapping[str, Any] | None = None
    confusions: Mapping[str, Any] | None = None
    check: Mapping[str, Any] | None = None
    embedding: Mapping[str, Any] | None = None
    inside: Sequence[Mapping[str, Any]] = ()
    comparison: Mapping[str, Any] | None = None
    run: Mapping[str, Any] | None = None
    map_note: str = ""
    level: str = metrics.level_text()
    neighbors: int = NEIGHBORS
    shown_neighbors: int = _SHOWN_NEIGHBORS
    cosine_steps: float = COSINE_STEPS
    sheet_rows: Sequence[int] = ()
    faults: Sequence[Fault] = ()
    sheets: Sequence[bytes] = dataclasses.field(default=(), repr=False)


def from_tree(tree: Mapping[str, Any]) -> Facts:
    """Returns the facts of a page from the tree of `page.read`."""
    fields = {
        field.name: tree[field.name] for field in dataclasses.fields(Facts) if field.name in tree
    }
    if "items" in fields:
        fields["items"] = Items(**fields["items"])
    fields["faults"] = [Fault(**fault) for fault in tree.get("faults", ())]
    return Facts(**fields)


def make(
    embeddings: np.ndarray,
    labels: np.ndarray | Split,
    *,
    title: str,
    files: Sequence[str] | None = None,
    read_fn: Callable[[int], np.ndarray] | None = None,
    scores: Mapping[str, Mapping[str, float]] | None = None,
    query_scores: QueryScores | None = None,
    average: str = "queries",
    similarity_fn: retrieval.SimilarityFn = retrieval.euclidean,
    are_classes_new: bool | None = None,
    inside_fn: Callable[[np.ndarray], Sequence[Mapping[str, Any]]] | None = None,
    training_fn: Callable[[], Mapping[str, Any] | None] | None = None,
    fields: Mapping[str, Any] | None = None,
    seed: int = 0,
    pictures: bool = True,
    devices: Sequence[Any] | None = None,
) -> Facts:
    """Computes the facts of embeddings `[n d]` and labels `[n]`; rows of NaN are unreadable images.

    * A `Split` instead of the labels also gives the names of the classes, queries, gallery and
      groups. `files` are short names of the images. `read_fn(item)` is an image, uint8 `[h w c]`.
    * Without `pictures` there are no thumbnails, no map and no views of the method.
    * `scores`: {split: {score: value}}, such as those of the evaluation; by default the retrieval
      scores of these embeddings.
    * `query_scores`: the scores of the queries, computed by default. `average` and `similarity_fn`
      are as in `metrics.retrieval`.
    * `inside_fn(readable items) -> views` returns views of the inside of the method.
    * `training_fn()` returns the argument `training` of `diagnosis.leaks`: training images, to find
      test images among them.
    * `fields` are further fields of `Facts`, such as `curves` and `run`.
    """
    data = diagnosis.Data.of(
        embeddings, _split(labels), devices=devices, similarity_fn=similarity_fn
    )
    faults: list[Fault] = []

    def attempt(section: str, function: Callable | None, *args: Any, **kwargs: Any) -> Any:
        """Calls a function; returns None if an argument is None, and notes an error as a fault."""
        if function is None or any(argument is None for argument in args):
            return None
        try:
            return function(*args, **kwargs)
        except Exception as error:  # an incomplete page is better than no page
            first_line = (str(error) or "no message").splitlines()[0]
            faults.append(Fault(section, f"{type(error).__name__}: {first_line}"))
            logging.warning("a section is missing (%s): %s", section, faults[-1].message)
            return None

    if query_scores is None:
        options: dict[str, Any] = {"devices": devices, "similarity_fn": similarity_fn}
        query_scores = attempt("scores", scores_file.score, data.x, data.split, **options)
    per_query = None if query_scores is None else query_scores.values
    near = attempt("worst", diagnosis.neighborhoods, data)
    near_by_cosine = near
    if near is not None and not data.is_by_cosine:
        near_by_cosine = attempt(
            "check", diagnosis.neighborhoods, data, similarity_fn=retrieval.cosine
        )
    histograms = attempt("embedding", diagnosis.histograms, data)
    hubness = attempt("check", diagnosis.hubs, data, near)
    positions = attempt("map", _positions, data, seed) if pictures else None
    items = _items(data, per_query, near, hubness, positions)
    # Queries whose nearest item is wrong, worst first.
    order = findings.worst_queries(items.first, items.map_at_r.astype(np.float64))
    order = order[items.hits[order] == 0]
    confused = None
    if len(data.split.names) >= _FEWEST_CLASSES_FOR_CONFUSIONS:
        confused = attempt("classes", diagnosis.confusions, data, per_query, near)
    gray_fn = diagnosis.gray_copies(read_fn)
    training = attempt("check", training_fn)
    check: dict[str, Any] = {}
    for section in (
        attempt("check", diagnosis.leaks, data, near_by_cosine, gray_fn, training),
        attempt("check", diagnosis.suspects, data, per_query, near_by_cosine, histograms),
        attempt("check", diagnosis.duplicates, data, near_by_cosine, gray_fn=gray_fn),
    ):
        check |= section or {}
    if hubness and hubness["hubs"]:
        check |= {"hubs": hubness["hubs"], "hubs_note": hubness["hubs_note"]}
    views = attempt("inside", inside_fn, np.flatnonzero(data.search.readable)) if pictures else None
    images = None
    if pictures:
        needed = _pictures_needed(data, items, order, {**(confused or {}), **check}, views or ())
        images = attempt(
            "map",
            sprites.make,
            read_fn,
            data.split.labels,
            needed=needed,
            where=data.search.readable,
        )
    if images is not None and images.sheets:
        items = dataclasses.replace(items, cells=images.cells)
    else:
        images = None
    shown = attempt("scores", _scores, data, per_query, evaluated=scores, average=average)
    averaged = ", mean over classes" if average == "classes" else ""
    kind = {True: " on unseen classes", False: " on known classes", None: ""}[are_classes_new]
    facts = Facts(
        title=title,
        headline=f"R@1 {100 * shown['tiles'][0]['value']:.1f}{averaged}{kind}" if shown else "",
        summary=_summary(shown),
        names=list(data.split.names),
        files=None if files is None else list(files),
        items=items,
        scores=shown,
        worst={"order": order.astype(np.uint32)},
        classes=attempt("classes", diagnosis.class_table, data, per_query, items.map_at_r),
        confusions=confused,
        check=check or None,
        embedding=attempt(
            "embedding", diagnosis.embedding, data, histograms, near_by_cosine, hubness or {}
        ),
        inside=views or [],
        map_note=_map_note(data, images),
        sheet_rows=[] if images is None else images.rows,
        sheets=[] if images is None else images.sheets,
        faults=faults,
        **(fields or {}),
    )
    return dataclasses.replace(facts, looks=_looks(facts, data))


def _split(labels: np.ndarray | Split) -> Split:
    """Returns labels as a split whose records are the indices of the items."""
    if isinstance(labels, Split):
        return labels
    labels = np.asarray(labels)
    if labels.ndim != 1:
        raise ValueError(f"labels must have shape [n], got {labels.shape}: give one for each image")
    return Split(np.arange(len(labels)), *splits.encode(labels.tolist()))


def _positions(data: diagnosis.Data, seed: int) -> np.ndarray | None:
    """Computes positions `[n 2]` from 0 to 65535 on both axes; NaN rows stay at 0."""
    if data.search.readable.sum() < 2:
        return None
    positions = np.zeros((len(data.x), 2))
    plane = projection.map_positions(
        data.x[data.search.readable],
        data.split.labels[data.search.readable],
        seed=seed,
        devices=data.devices,
    )
    low, high = plane.min(axis=0), plane.max(axis=0)
    positions[data.search.readable] = 65535 * (plane - low) / np.maximum(high - low, 1e-12)
    return positions


def _items(data: diagnosis.Data, per_query, near, hubness, positions) -> Items:
    """Builds the rows of all images; columns without a result stay empty."""
    n, q = len(data.split), data.search.queries
    hits, first = np.full(n, 2, np.uint8), np.zeros(n, np.uint32)
    map_at_r = np.zeros(n, np.uint8)
    if per_query is not None:
        is_scored = np.isfinite(per_query["R@1"])
        hits[q[is_scored]] = per_query["R@1"][is_scored]
        first[q[is_scored]] = np.rint(1 / per_query["MRR"][is_scored])
        map_at_r[q[is_scored]] = np.rint(255 * per_query["MAP@R"][is_scored])
    neighbors, best_own = np.full((n, NEIGHBORS), -1), np.full(n, -1)
    if near is not None:
        neighbors[q], best_own[q] = data.items_at(near.nearest), data.items_at(near.own)
    found, wrong = np.zeros((2, n)) if not hubness else (hubness["counts"], hubness["wrong"])
    x, y = (None, None) if positions is None else np.rint(positions).astype(np.uint16).T
    roles = None
    if not data.search.within:
        is_query, is_item = np.zeros((2, n), bool)
        is_query[q], is_item[data.search.items] = True, True
        roles = np.where(is_query & ~is_item, 1, np.where(is_item & ~is_query, 2, 0))
    return Items(
        labels=data.split.labels.astype(np.uint16 if len(data.split.names) < 65536 else np.uint32),
        readable=data.search.readable.astype(np.uint8),
        hits=hits,
        first=first,
        map_at_r=map_at_r,
        neighbors=data.compact(neighbors),
        similarities=_similarities(data, neighbors),
        best_own=data.compact(best_own),
        found=np.minimum(found, 65535).astype(np.uint16),
        found_wrong=np.minimum(wrong, 65535).astype(np.uint16),
        roles=None if roles is None else roles.astype(np.uint8),
        x=x,
        y=y,
    )


def _similarities(data: diagnosis.Data, neighbors: np.ndarray) -> np.ndarray:
    """Computes the cosines of all items and their neighbors as bytes, see `COSINE_STEPS`."""
    x = np.where(data.search.readable[:, None], data.x, 0)
    norms = np.linalg.norm(x, axis=1, keepdims=True)
    unit = x / np.where(norms > 0, norms, 1)
    cosines = np.zeros(neighbors.shape, np.float32)
    for rank in range(neighbors.shape[1]):
        cosines[:, rank] = np.einsum("nd,nd->n", unit, unit[np.maximum(neighbors[:, rank], 0)])
    return np.rint(np.clip((cosines + 1) * COSINE_STEPS, 0, 255)).astype(np.uint8)


def _pictures_needed(
    data: diagnosis.Data,
    items: Items,
    order: np.ndarray,
    lists: Mapping[str, Any],
    views: Sequence[Mapping[str, Any]],
) -> list[int]:
    """Returns the items that the lists show, the most important first."""
    needed: list[Any] = []
    for view in views:
        needed += [*view.get("items", ())]
    for suspect in lists.get("suspects", ()):
        needed += [suspect["item"], suspect["own"], suspect["other"]]
    for pair in lists.get("pairs", ()):
        needed += [item for example in pair["examples"] for item in example]
    for leak in lists.get("leaks", ()):
        needed += [leak["item"]]
    for pair in lists.get("duplicates", ()):
        needed += [pair["a"], pair["b"]]
    for hub in lists.get("hubs", ()):
        needed += [hub["item"], *hub["queries"]]
    for i in order[:_WORST_WITH_PICTURES]:
        needed += [i, items.best_own[i], *items.neighbors[i, :_SHOWN_NEIGHBORS]]
    return [int(i) for i in needed if 0 <= i < len(data.split)]


def _scores(data: diagnosis.Data, per_query, *, evaluated, average) -> dict[str, Any] | None:
    """Builds the tiles with their intervals over classes, and the table of all scores."""
    if per_query is None:
        return None
    labels = data.search.labels
    is_scored = np.isfinite(per_query["R@1"])
    if not is_scored.any():
        return None
    tiles = []
    for name in per_query:
        low, high = metrics.interval(per_query[name], groups=labels, over=average)
        value = metrics.average(per_query[name], labels, over=average)
        tiles.append({"name": name, "value": value, "low": low, "high": high})
    classes = len(np.unique(labels[is_scored]))
    note = metrics.interval_note(labels[is_scored])
    if classes >= FEWEST_CLASSES:
        level, remark = metrics.level_text(), f"; {note}" if note else ""
        note = f"Range: {level} bootstrap over the {classes:,} classes{remark}."
    elif note:
        note = f"{note[0].upper()}{note[1:]}."
    if average == "classes":
        note += " Every score is the mean over classes of the mean of a class's queries."
    counts = f"{int(is_scored.sum()):,} queries"
    unscored = int((~is_scored).sum())
    if not data.search.within:
        counts += f", {len(data.search.items):,} gallery images"
    if unscored:
        counts += f"; {unscored:,} without another image of their class are not scored"
    if unreadable := int((~data.search.readable).sum()):
        counts += f"; {counted(unreadable, 'image')} could not be read"
    if len(data.split.names) == 1:
        counts += ". One class: every image is right, and the scores say nothing"
    table = evaluated or {"test": {tile["name"]: tile["value"] for tile in tiles}}
    note = f"{note} {counts}. Ranked by {diagnosis.ranked_by(data.x, data.similarity_fn)}."
    return {"tiles": tiles, "note": note.strip(), "table": _table(table)}


def _table(scores: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    splits = list(scores)
    names = dict.fromkeys(name for values in scores.values() for name in values)
    rows = []
    for name in names:
        if name.endswith("_std"):
            continue
        cells = [_cell(name, scores[split]) for split in splits]
        if any(cells):
            rows.append([name, *cells])
    meanings = {name: MEANINGS.get(name.rpartition("/")[2], "") for name, *_ in rows}
    return {"splits": splits, "rows": rows, "meanings": meanings}


_COUNTS = ("without_positive", "unreadable")


def _cell(name: str, values: Mapping[str, float]) -> str:
    if name not in values or not np.isfinite(values[name]):
        return ""
    if name in _COUNTS:
        return f"{int(values[name]):,}"
    deviation = values.get(f"{name}_std")
    text = f"{100 * values[name]:.1f}"
    return text if deviation is None else f"{text} ± {100 * deviation:.1f}"


def _summary(shown) -> str:
    if not shown:
        return "No query has another image of its class, so there are no scores."
    return ", ".join(f"{tile['name']} {100 * tile['value']:.1f}" for tile in shown["tiles"])


def _map_note(data: diagnosis.Data, images: sprites.Sprites | None) -> str:
    n = int(data.search.readable.sum())
    if data.x.shape[1] <= 2:
        text = f"The embedding has {data.x.shape[1]} dimensions: the map is the embedding itself."
    else:
        text = "Neighborhoods mean something; far distances, sizes and gaps do not."
        if n > projection.ANCHORS:
            text += (
                f" {projection.ANCHORS:,} images, drawn from the classes in turn, are placed by "
                "t-SNE, the others near their neighbors."
            )
    cells = np.zeros(0) if images is None else images.cells[data.search.readable]
    if missing := int((cells == sprites.MISSING).sum()):
        text += (
            f" {n - missing:,} of {n:,} images have a picture: those in the lists, and others "
            "drawn from the classes in turn."
        )
    return text


def _looks(facts: Facts, data: diagnosis.Data) -> list[dict[str, Any]]:
    """Builds at most five sentences about the most important findings."""
    looks: list[dict[str, Any]] = []

    def look(
        section: str, *parts: Any, items: Iterable[Any] | None = None, warning: bool | None = None
    ) -> None:
        items = None if items is None else list(dict.fromkeys(map(int, items)))
        looks.append({"parts": [*parts], "section": section, "items": items, "warning": warning})

    if facts.warning:
        look("run", facts.warning, warning=True)
    check = facts.check or {}
    if leaks := check.get("leaks"):
        are = "are" if len(leaks) > 1 else "is"
        text = f"{counted(len(leaks), 'test image')} {are} also among the training images."
        look("check", text, items=[leak["item"] for leak in leaks[:6]], warning=True)
    table = facts.classes
    if table is not None:
        bad = np.flatnonzero((table["recall"] < 0.5) & (table["queries"] > 0))
        if len(bad):
            worst = bad[np.lexsort((bad, table["upper"][bad]))][:4]
            parts: list[Any] = [
                f"{len(bad):,} of {int((table['queries'] > 0).sum()):,} classes have R@1 below 50"
                f"{', the worst ' if len(bad) > 1 else ': '}"
            ]
            for k, c in enumerate(worst):
                parts += [", " if k else "", {"class": int(c)}]
            look("classes", *parts, ".", items=table["example"][worst])
    if pairs := (facts.confusions or {}).get("pairs", ()):
        pair = pairs[0]
        a, b = {"class": pair["a"]}, {"class": pair["b"]}
        parts = ["Most frequent confusion: ", a, " taken for ", b]
        examples = [item for example in pair["examples"][:3] for item in example]
        look("classes", *parts, f", {pair['count']} of {pair['of']}.", items=examples)
    if len(suspects := check.get("suspects", ())) >= 3:
        text = f"{len(suspects):,} images may have a wrong label."
        look("check", text, items=[suspect["item"] for suspect in suspects[:6]])
    if duplicates := check.get("duplicates"):
        have = "have" if len(duplicates) > 1 else "has"
        pairs = counted(len(duplicates), "pair")
        text = f"{pairs} of almost the same picture {have} two labels."
        look("check", text, items=[i for d in duplicates[:3] for i in (d["a"], d["b"])])
    if facts.items and (hub := _worst_hub(check.get("hubs", ()), facts.items)):
        text = (
            f"One image is among the {NEIGHBORS} nearest of {hub['found']} queries, "
            f"{hub['wrong']} of them of another class: a "
        )
        label = {"class": int(data.split.labels[hub["item"]])}
        look("check", text, label, ".", items=[hub["item"], *hub["queries"][:5]])
    if unreadable := int((~data.search.readable).sum()):
        look("run", f"{counted(unreadable, 'image')} could not be read.")
    return looks[:5]


def _worst_hub(hubs: Sequence[Mapping[str, Any]], items: Items) -> Mapping[str, Any] | None:
    """Returns the first hub that is the nearest of two queries of other classes, or None.

    Where classes are smaller than `NEIGHBORS`, the nearest always hold images of other classes.
    """
    for hub in hubs:
        if np.sum((items.hits == 0) & (items.neighbors[:, 0] == hub["item"])) >= 2:
            return hub
    return None
