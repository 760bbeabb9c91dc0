"""Published backbones on the user's images, as they are: scores, comparison and page."""

import collections
import csv
import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from dmljax import at_hand, ops, retrieval
from dmljax.config.data import transform_of
from dmljax.config.registry import chosen
from dmljax.data import decode, image_folders
from dmljax.data.features import Cache
from dmljax.data.records import Reader
from dmljax.data.splits import Split
from dmljax.files import parts
from dmljax.files.writing import atomic_writer, make_folder
from dmljax.nets.files import Published
from dmljax.nets.normalizations import title as normalization_title
from dmljax.report import compare_page, comparison, diagnosis, facts, findings, page, scores_file
from dmljax.report.comparison import RunComparison
from dmljax.report.facts import Facts
from dmljax.runs.page import short_names
from dmljax.train import features
from dmljax.train.devices import Shardings
from dmljax.weights import PUBLISHED, load
from dmljax.weights.converted import file_digest

PIXELS = "raw pixels"
_CLUSTERS = "clusters.csv"
_PIXEL_SIDE, _BATCH_SIZE = 16, 32
_SHOWN_SIDE = 256  # of images that are made thumbnails, or compared with others as small ones
_MOST_CLUSTERS = 40
_NEAR_DUPLICATES = 0.9  # the cosine from which on pixels are compared


class Row(NamedTuple):
    """A backbone on the images: its embeddings `[n d]`, and what a reader needs to know."""

    name: str
    embeddings: np.ndarray
    seconds: float | None  # per image
    preprocessing: str
    license: str

    @property
    def is_readable(self) -> np.ndarray:
        """Whether each image could be read."""
        return np.isfinite(self.embeddings).all(axis=1)

    @property
    def seconds_text(self) -> str:
        """The time of one image."""
        return "-" if self.seconds is None else f"{self.seconds:.3f}"


def images_of_folder(root: str | os.PathLike) -> tuple[Split, bool]:
    """Returns the images of a folder, and whether folders of classes label them.

    With folders `query/` and `gallery/`, or `test/`, these are the images; otherwise all are.
    """
    folder = pathlib.Path(root).expanduser()
    if not folder.is_dir():
        problem = "is a file" if folder.is_file() else "does not exist"
        raise FileNotFoundError(f"{root} {problem}: name the folder of your images")
    if any(
        entry.is_dir() and not entry.name.startswith(".") and image_folders.has_images(entry)
        for entry in folder.iterdir()
    ):
        has_splits = (folder / "query").is_dir() or (folder / "test").is_dir()
        return image_folders.folder(root=folder, split=None if has_splits else 0.0).test, True
    if not (paths := image_folders.image_paths(folder)):
        raise FileNotFoundError(f"{folder} has no images; known: {' '.join(decode.SUFFIXES)}")
    return Split(paths, np.zeros(len(paths), np.int32), ("images",)), False


def embed(
    name: str,
    weights: pathlib.Path | None,
    images: Split,
    *,
    shard: parts.Shard | None = None,
    skipped: collections.Counter[str] | None = None,
) -> Row | None:
    """Computes the features of all images by a published net as unit vectors.

    The `name` is one of `weights.PUBLISHED`, or `PIXELS` without weights. Features that are on disk
    already are not computed again. With `shard`, only that part is computed, and the result is
    None. Images that cannot be read have rows of NaN. Where they are found, `skipped` counts them
    by name; a name that it already contains is not logged again.
    """
    if weights is None:
        spec, license = {"name": "squash_eval", "size": _PIXEL_SIDE, "scaled_decode": True}, ""
        about: dict[str, Any] = {"net": PIXELS}
        preprocessing = ""
    else:
        published, license = PUBLISHED[name], str(PUBLISHED[name].license)
        spec, normalize = published.preprocessing.transform, published.preprocessing.normalize
        about = {
            "net": chosen("net", published.net).with_defaults(),
            "weights": file_digest(weights),
            "normalize": chosen("normalize", normalize).with_defaults(),
        }
        preprocessing = f", {normalization_title(normalize)}"
    transform_fn = transform_of(chosen("eval_transform", spec))
    store = Cache(at_hand.cache_folder() / "features", about, evaluation=transform_fn)
    records: Any = store.split(images).records
    if shard is not None or not store.is_complete:
        features.compute(
            store,
            _pixels if weights is None else _features_fn(PUBLISHED[name], weights),
            title=name,
            shards=Shardings(),
            batch_size=_BATCH_SIZE,
            shard=shard,
            unreadable="skip",
            skipped=skipped,
        )
    if shard is not None:
        return None
    rows = np.stack([records.rows[i] for i in range(len(images))])
    rows = rows if weights is None else np.asarray(ops.normalize(rows))
    return Row(name, rows, store.seconds, transform_fn.title + preprocessing, license)


def _pixels(images: jax.Array) -> jax.Array:
    return images.reshape(len(images), -1).astype(np.float32) / 255


def _features_fn(published: Published, weights: pathlib.Path) -> Callable[[jax.Array], jax.Array]:
    size, normalize = published.preprocessing.size, published.preprocessing.normalize
    net, normalize_fn = chosen("net", published.net).function(), chosen("normalize", normalize)
    variables = jax.device_put(load(weights, net, image_shape=(size, size, 3)))

    @jax.jit
    def features_fn(variables, images):
        images = normalize_fn.function(images)
        return net.apply(variables, images, train=False)["pooled"].astype(np.float32)

    return functools.partial(features_fn, variables)


def score(rows: Sequence[Row], images: Split, out: str | os.PathLike) -> RunComparison:
    """Compares the rows by every query of labeled images, and writes the page `out/report.html`.

    The row with the highest MAP@R comes first; the others are compared with it.
    """
    scores = compare_page.scores_of({row.name: row.embeddings for row in rows}, images)
    ordered = sorted(rows, key=lambda row: -np.nanmean(scores[row.name].map_at_r))
    pages = {}
    for row in ordered:
        options = {"query_scores": scores[row.name], "pictures": row is ordered[0]}
        pages[row.name] = _facts(row, images, title=row.name, **options)
    fields = [
        ["width", *(f"{row.embeddings.shape[1]:,}" for row in ordered)],
        ["seconds per image", *(row.seconds_text for row in ordered)],
        ["preprocessing", *(row.preprocessing for row in ordered)],
        ["license", *(row.license for row in ordered)],
    ]
    result = comparison.compare_runs({row.name: scores[row.name] for row in ordered})
    title = "About the backbones"
    content = compare_page.of_pages(pages, result, fields=fields, fields_title=title)
    make_folder(out)
    page.write(content, pathlib.Path(out) / page.FILE)
    return result


def _facts(row: Row, images: Split, **options: Any) -> Facts:
    reader, rule = _reader(images), f"{row.name} without any training, on {row.preprocessing}"
    options |= {"read_fn": lambda item: reader(int(item)), "fields": {"rule": rule}}
    return facts.make(row.embeddings, images, files=short_names(images), **options)


def _reader(images: Split) -> Reader:
    return Reader(images, least_side=_SHOWN_SIDE)


def page_of_clusters(row: Row, images: Split, out: str | os.PathLike) -> tuple[int, int]:
    """Writes `out/report.html` and `out/clusters.csv` of images without labels.

    The page has a map, near duplicates and clusters of k-means, which the reader may name. Returns
    the numbers of clusters and of near duplicates.
    """
    points = row.embeddings[row.is_readable]
    k = int(np.clip(round(np.sqrt(len(points) / 2)), 1, _MOST_CLUSTERS))
    clusters = np.asarray(retrieval.kmeans(points, k=k, trials=None).assignment)
    counts = np.bincount(clusters, minlength=k)
    order = np.argsort(-counts, kind="stable")  # the largest cluster first
    labels = np.zeros(len(images), np.int32)
    labels[row.is_readable] = np.argsort(order)[clusters]
    names = tuple(f"cluster {i} ({counts[j]:,} images)" for i, j in enumerate(order, start=1))
    split = dataclasses.replace(images, labels=labels, names=names)
    pairs = findings.near_duplicates(
        row.embeddings,
        np.arange(len(images)),  # of any two clusters, and within one
        threshold=_NEAR_DUPLICATES,
        gray_fn=diagnosis.gray_copies(_reader(images)),
    )
    duplicates = [
        {"a": int(a), "b": int(b), "similarity": float(similarity)}
        for a, b, similarity in zip(*pairs, strict=True)
    ]
    note = "Mutual nearest neighbors with almost the same pixels."
    unscored, title = scores_file.unscored(row.embeddings, split), f"images by {row.name}"
    content = dataclasses.replace(
        _facts(row, split, title=f"{len(images):,} {title}", query_scores=unscored),
        headline=f"{k} clusters, {len(duplicates)} near duplicates",
        summary="The images have no labels, so there are no scores.",
        worst=None,
        confusions=None,
        check={"duplicates": duplicates[:200], "duplicates_note": note} if duplicates else None,
        embedding=None,
        looks=(),
    )
    make_folder(out)
    page.write(content, pathlib.Path(out) / page.FILE)
    files = short_names(images)
    assert files is not None  # images of a folder have paths
    lines = zip(np.array(files)[row.is_readable], labels[row.is_readable] + 1, strict=True)
    with atomic_writer(pathlib.Path(out) / _CLUSTERS) as file:
        csv.writer(file, lineterminator="\n").writerows([("file", "cluster"), *lines])
    return k, len(duplicates)
