"""Published backbones on the user's images, as they are: scores, comparison and page."""

import collections
import csv
import dataclasses
import io
import os
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from dmljax import at_hand, ops, retrieval
from dmljax.config.data import transform_of
from dmljax.config.registry import chosen
from dmljax.data import image_folders
from dmljax.data.features import Cache
from dmljax.data.records import Reader
from dmljax.data.splits import Split
from dmljax.files import image_formats, parts
from dmljax.files.writing import make_folder, write_text
from dmljax.report import compare_page, comparison, diagnosis, findings, page, scores_file
from dmljax.report import facts as facts_lib
from dmljax.report.comparison import RunComparison
from dmljax.runs.page import short_names
from dmljax.train import features
from dmljax.train.devices import Shardings
from dmljax.weights import PUBLISHED, file_digest, load
from dmljax.weights.preprocessing import title as normalization_title

PIXELS = "raw pixels"
_CLUSTERS = "clusters.csv"
_PIXEL_SIDE, _BATCH_SIZE = 16, 32
_SHOWN_SIDE = 256  # of images that are made thumbnails, or compared with others as small ones
_MOST_CLUSTERS = 40
_NEAR_DUPLICATES = 0.9  # the cosine from which on pixels are compared


class Backbone(NamedTuple):
    """A published net by its name in `weights.PUBLISHED`, and the file of its weights."""

    name: str
    weights: pathlib.Path


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
    if folder.is_file():
        raise ValueError(f"{root} is a file: name the folder of your images")
    if not folder.is_dir():
        raise FileNotFoundError(f"{root} does not exist: name the folder of your images")
    if any(
        entry.is_dir() and not entry.name.startswith(".") and image_folders.has_images(entry)
        for entry in folder.iterdir()
    ):
        has_splits = (folder / "query").is_dir() or (folder / "test").is_dir()
        return image_folders.folder(root=folder, split=None if has_splits else 0.0).test, True
    if not (paths := image_folders.image_paths(folder)):
        raise FileNotFoundError(
            f"{folder} has no images; known: {' '.join(image_formats.SUFFIXES)}"
        )
    return Split(paths, np.zeros(len(paths), np.int32), ("images",)), False


def embed(
    backbone: Backbone | None,
    images: Split,
    *,
    shard: parts.Shard | None = None,
    skipped: collections.Counter[str] | None = None,
) -> Row | None:
    """Computes the features of all images as unit vectors; without a backbone, raw pixels.

    Features that are on disk already are not computed again. With `shard`, only that part is
    computed, and the result is None. Images that cannot be read have rows of NaN. Where they are
    found, `skipped` counts them by name; a name that it already contains is not logged again.
    """
    name, license = PIXELS, ""
    spec = {"name": "squash_eval", "size": _PIXEL_SIDE, "scaled_decode": True}
    about: dict[str, Any] = {"net": PIXELS}
    if backbone is not None:
        published = PUBLISHED[backbone.name]
        name, license = backbone.name, str(published.license)
        spec, normalize = published.preprocessing.transform, published.preprocessing.normalize
        about = {
            "net": chosen("net", published.net).with_defaults(),
            "weights": file_digest(backbone.weights),
            "normalize": chosen("normalize", normalize).with_defaults(),
        }
    transform_fn = transform_of(chosen("eval_transform", spec))
    preprocessing = transform_fn.title
    if backbone is not None:
        preprocessing += f", {normalization_title(normalize)}"
    store = Cache(at_hand.features_folder(), about, evaluation=transform_fn)
    records: Any = store.split(images).records
    if shard is not None or not store.is_complete:
        features.compute(
            store,
            _pixels if backbone is None else _features_fn(backbone),
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
    if backbone is not None:
        rows = np.asarray(ops.normalize(rows))
    return Row(name, rows, store.seconds, preprocessing, license)


def _pixels(images: jax.Array) -> jax.Array:
    return images.reshape(len(images), -1).astype(np.float32) / 255


def _features_fn(backbone: Backbone) -> Any:
    published = PUBLISHED[backbone.name]
    size = published.preprocessing.size
    net = chosen("net", published.net).function()
    normalize_fn = chosen("normalize", published.preprocessing.normalize).function
    variables = jax.device_put(load(backbone.weights, net, image_shape=(size, size, 3)))

    @jax.jit
    def features_fn(variables, images):
        return net.apply(variables, normalize_fn(images), train=False)["pooled"].astype(np.float32)

    return lambda images: features_fn(variables, images)


def score(rows: Sequence[Row], images: Split, out: str | os.PathLike) -> RunComparison:
    """Compares the rows by every query of labeled images, and writes the page `out/report.html`.

    The row with the highest MAP@R comes first; the others are compared with it.
    """
    scores = compare_page.scores_of({row.name: row.embeddings for row in rows}, images)
    ordered = sorted(rows, key=lambda row: -np.nanmean(scores[row.name].map_at_r))
    reader = Reader(images, least_side=_SHOWN_SIDE)
    pages = {
        row.name: facts_lib.make(
            row.embeddings,
            images,
            title=row.name,
            files=short_names(images),
            read_fn=lambda item: reader(int(item)),
            query_scores=scores[row.name],
            pictures=row is ordered[0],
            fields=_rule(row),
        )
        for row in ordered
    }
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


def _rule(row: Row) -> dict[str, str]:
    return {"rule": f"{row.name} without any training, on {row.preprocessing}"}


def page_of_clusters(row: Row, images: Split, out: str | os.PathLike) -> tuple[int, int]:
    """Writes `out/report.html` and `out/clusters.csv` of images without labels.

    The page has a map, near duplicates and clusters of k-means, which the reader may name. Returns
    the numbers of clusters and of near duplicates.
    """
    out = pathlib.Path(out)
    make_folder(out)
    readable = row.is_readable
    points = row.embeddings[readable]
    k = int(np.clip(round(np.sqrt(len(points) / 2)), 1, _MOST_CLUSTERS))
    clusters = np.asarray(retrieval.kmeans(points, k=k, trials=None).assignment)
    order = np.argsort(-np.bincount(clusters, minlength=k), kind="stable")
    labels = np.zeros(len(images), np.int32)
    labels[readable] = np.argsort(order)[clusters]
    counts = np.bincount(labels[readable], minlength=k)
    names = tuple(f"cluster {i + 1} ({count:,} images)" for i, count in enumerate(counts))
    split = dataclasses.replace(images, labels=labels, names=names)
    reader, files = Reader(images, least_side=_SHOWN_SIDE), short_names(images)
    content = facts_lib.make(
        row.embeddings,
        split,
        title=f"{len(images):,} images by {row.name}",
        files=files,
        read_fn=lambda item: reader(int(item)),
        query_scores=scores_file.unscored(row.embeddings, split),
        fields=_rule(row),
    )
    pairs = findings.near_duplicates(
        row.embeddings,
        np.arange(len(images)),  # of any two clusters, and within one
        threshold=_NEAR_DUPLICATES,
        gray_fn=diagnosis.gray_copies(reader),
    )
    duplicates = [
        {"a": int(a), "b": int(b), "similarity": float(similarity)}
        for a, b, similarity in zip(*pairs, strict=True)
    ]
    note = "Mutual nearest neighbors with almost the same pixels."
    content = dataclasses.replace(
        content,
        headline=f"{k} clusters, {len(duplicates)} near duplicates",
        summary="The images have no labels, so there are no scores.",
        worst=None,
        confusions=None,
        check={"duplicates": duplicates[:200], "duplicates_note": note} if duplicates else None,
        embedding=None,
        looks=(),
    )
    page.write(content, out / page.FILE)
    assert files is not None  # images of a folder have paths
    table = io.StringIO(newline="")
    lines = zip(np.array(files)[readable], labels[readable] + 1, strict=True)
    csv.writer(table, lineterminator="\n").writerows([("file", "cluster"), *lines])
    write_text(out / _CLUSTERS, table.getvalue())
    return k, len(duplicates)
