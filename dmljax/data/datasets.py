"""The data sets. `__all__` is what a config may name: `config.dataset = dict(name='cub200', ...)`.

Every function takes keywords only and returns `Splits(train, test)`; the class-disjoint split is
part of the set. `root` is the folder of the original files, or its parent. Sets that TFDS has are
also read from its ArrayRecord files with `source='tfds'` (and `data_dir`), without TensorFlow; its
halves are joined and split by class where they are those of the classification task. Nothing is
downloaded and no image is opened here, except the few megabytes of `mnist`, `npz` and `glyphs`,
which are held as arrays.

A set whose counts are not the published ones is loaded with a warning: run the doctor.
"""

from __future__ import annotations

import io
import os
import pathlib
from collections.abc import Sequence

import numpy as np
from absl import logging
from PIL import Image

from dmljax.data import glyphs as _glyphs
from dmljax.data import sources
from dmljax.data.prepared import prepared
from dmljax.data.published import PUBLISHED, Published
from dmljax.data.splits import Split, Splits, divide, encode, subset
from dmljax.data.tables import folder, npz, table

__all__ = [
    "cars196",
    "cub200",
    "folder",
    "glyphs",
    "inshop",
    "mnist",
    "npz",
    "prepared",
    "sop",
    "table",
    "tiny_imagenet",
]

_Path = str | os.PathLike | None


def cub200(*, root: _Path = None, source: str = "files", data_dir: str | None = None) -> Splits:
    """CUB-200-2011 birds (Wah et al., 2011): the first 100 classes for training."""
    if _from_tfds(source):
        columns, skip = ("label", "label_name"), ("segmentation_mask",)
        records, values, _ = sources.tfds_set(
            "caltech_birds2011", split="train+test", data_dir=data_dir, columns=columns, skip=skip
        )
        ids = np.array(values["label"]) + 1
        labels = zip(ids, values["label_name"], strict=True)
        names = [f"{i:03d}.{name.decode()}" for i, name in labels]
    else:
        if root is not None and (pathlib.Path(root) / "annotations-mat").is_dir():
            raise ValueError(
                f"cub200: {root} is the edition of 2010 (6,033 images); the papers use that of "
                "2011: point root= at CUB_200_2011"
            )
        home = sources.look_for(
            root,
            ["images.txt", "image_class_labels.txt", "images"],
            dataset="cub200",
            origin="CUB_200_2011.tgz of the Caltech-UCSD Birds page",
            inside=["CUB_200_2011"],
        )
        files = dict(_columns(home / "images.txt", 2))
        classes = dict(_columns(home / "image_class_labels.txt", 2))
        if files.keys() != classes.keys():
            raise ValueError(f"{home}: images.txt and image_class_labels.txt list other images")
        records = [str(home / "images" / file) for file in files.values()]
        ids = np.array([int(classes[image]) for image in files])
        names = [file.split("/")[0] for file in files.values()]
        _check_first(records, "cub200")
    return _checked("cub200", _halves(records, ids, names, train_classes=100))


def cars196(*, root: _Path = None, source: str = "files", data_dir: str | None = None) -> Splits:
    """Cars196 (Krause et al., 2013): all 16,185 images, the first 98 classes for training.

    Files are `cars_annos.mat` with `car_ims/`, or a folder for each class in alphabetic order.
    """
    if _from_tfds(source):
        records, values, features = sources.tfds_set(
            "cars196", split="train+test", data_dir=data_dir, columns=("label",)
        )
        ids, titles = np.array(values["label"]) + 1, features["label"].names
    else:
        from scipy import io as scipy_io

        origin = "car_ims.tgz and cars_annos.mat of the Stanford Cars page"
        inside = ["cars196", "stanford_cars", "images"]
        if root is not None and (by_class := _class_folders(root, inside)):
            of_class = [sources.walk(name) for name in by_class]
            titles = [name.name for name in by_class]
            records = [path for paths in of_class for path in paths]
            ids = np.repeat(np.arange(len(by_class)) + 1, [len(paths) for paths in of_class])
        else:
            wanted = ["cars_annos.mat", "car_ims"]
            home = sources.look_for(
                root, wanted, dataset="cars196", origin=origin, inside=inside[:2]
            )
            try:
                notes = scipy_io.loadmat(home / "cars_annos.mat", squeeze_me=True)
                rows, titles = np.atleast_1d(notes["annotations"]), notes["class_names"]
                records = [str(home / str(path)) for path in rows["relative_im_path"]]
                ids = rows["class"].astype(np.int64)
            except (ValueError, KeyError, TypeError, NotImplementedError) as error:
                raise ValueError(f"{home}/cars_annos.mat cannot be read: {error}") from error
            _check_first(records, "cars196")
    names = [f"{i:03d} {titles[i - 1]}" for i in ids]
    return _checked("cars196", _halves(records, ids, names, train_classes=98))


def sop(*, root: _Path = None, source: str = "files", data_dir: str | None = None) -> Splits:
    """Stanford Online Products (Song et al., 2016); `superlabels` are the twelve categories."""
    halves = []
    for split in ("train", "test"):
        if _from_tfds(source):
            columns = ("class_id", "super_class_id")
            records, values, _ = sources.tfds_set(
                "stanford_online_products", split=split, data_dir=data_dir, columns=columns
            )
            ids, coarse = (np.array(values[column]) + 1 for column in columns)
        else:
            file = f"Ebay_{split}.txt"
            home = sources.look_for(
                root,
                ["Ebay_train.txt", "Ebay_test.txt"],
                dataset="sop",
                origin="Stanford_Online_Products.zip",
                inside=["Stanford_Online_Products"],
            )
            rows = _columns(home / file, 4, header=1)
            records = [str(home / row[3]) for row in rows]
            ids, coarse = (np.array([int(row[i]) for row in rows]) for i in (1, 2))
            _check_first(records, "sop")
        labels, names = encode(ids)
        halves.append(Split(records, labels, names, superlabels=coarse - 1))
    return _checked("sop", Splits(*halves))


def inshop(*, root: _Path = None, corpus: str | None = None) -> Splits:
    """In-Shop Clothes (Liu et al., 2016); the test half is marked as query and gallery.

    `img` and `img_highres` are different corpora. `corpus` names one; otherwise `img` is taken
    where it is there. Which one was found is logged.
    """
    origin = "the In-shop Clothes Retrieval Benchmark of DeepFashion (Eval/ and Img/)"
    listing = "Eval/list_eval_partition.txt"
    inside = ["In_shop", "In-shop Clothes Retrieval Benchmark"]
    home = sources.look_for(root, [listing, "Img"], dataset="inshop", origin=origin, inside=inside)
    found = [name for name in ("img", "img_highres") if (home / "Img" / name).is_dir()]
    if corpus not in (None, *found) or not found:
        wanted = f"Img/{corpus or 'img'}"
        raise FileNotFoundError(f"inshop: {home} has no {wanted}; it has {found or 'no images'}")
    corpus = corpus or found[0]
    logging.info("inshop: images of Img/%s (found: %s)", corpus, ", ".join(found))
    rows = _columns(home / listing, 3, header=2)
    if unknown := {row[2] for row in rows} - {"train", "query", "gallery"}:
        raise ValueError(f"{home / listing}: status {sorted(unknown)[0]!r} is not known")
    paths = [home / "Img" / corpus / row[0].split("/", 1)[1] for row in rows]
    status = np.array([row[2] for row in rows])
    halves = []
    for mine in (status == "train", status != "train"):
        chosen = np.flatnonzero(mine)
        # Item ids are zero-padded, so their order as strings is that of their numbers.
        labels, names = encode(rows[i][1] for i in chosen)
        halves.append(Split([str(paths[i]) for i in chosen], labels, names))
    train, test = halves
    sides = status[status != "train"]
    test = Split(
        test.records, test.labels, test.names, query=sides == "query", gallery=sides == "gallery"
    )
    _check_first(train.records or test.records, "inshop")
    return _checked("inshop", Splits(train, test))


def tiny_imagenet(*, root: _Path = None) -> Splits:
    """TinyImageNet: 200 classes of 64x64 images, the same in both halves; `val` is the test half.

    Labels follow the order of `wnids.txt`.
    """
    home = sources.look_for(
        root,
        ["wnids.txt", "train", "val/val_annotations.txt"],
        dataset="tiny_imagenet",
        origin="tiny-imagenet-200.zip",
        inside=["tiny-imagenet-200"],
    )
    wnids = (home / "wnids.txt").read_text().split()
    train = [(path, wnid) for wnid in wnids for path in _images_of(home / "train" / wnid)]
    rows = _columns(home / "val" / "val_annotations.txt", 2)
    test = [(str(home / "val" / "images" / row[0]), row[1]) for row in rows]
    halves = []
    for pairs in (train, test):
        labels, names = encode([wnid for _, wnid in pairs], names=wnids)
        halves.append(Split([path for path, _ in pairs], labels, names))
        _check_first(halves[-1].records, "tiny_imagenet")
    return _checked("tiny_imagenet", Splits(*halves))


def mnist(
    *,
    root: _Path = None,
    source: str = "files",
    data_dir: str | None = None,
    classes: Sequence[int] = tuple(range(10)),
) -> Splits:
    """MNIST digits padded by 2 to 32x32, `uint8 [n 32 32 1]`; `classes` keeps some digits only."""
    halves = []
    if wrong := [digit for digit in classes if digit not in range(10)]:
        raise ValueError(f"mnist: classes are digits 0..9, not {wrong[0]!r}")
    for split, prefix in (("train", "train"), ("test", "t10k")):
        if _from_tfds(source):
            records, values, _ = sources.tfds_set(
                "mnist", split=split, data_dir=data_dir, columns=("label",)
            )
            pictures = (Image.open(io.BytesIO(records[i])) for i in range(len(records)))
            images = np.stack([np.asarray(picture.convert("L")) for picture in pictures])
            labels = np.array(values["label"])
        else:
            images, labels = (
                _idx(root, f"{prefix}-{kind}") for kind in ("images-idx3", "labels-idx1")
            )
            if len(images) != len(labels) or images.ndim != 3 or labels.ndim != 1:
                raise ValueError(f"mnist: {images.shape} images do not fit {labels.shape} labels")
        padded = np.pad(images, ((0, 0), (2, 2), (2, 2)))[..., None]
        whole = Split(padded, labels, tuple(str(digit) for digit in range(10)))
        halves.append(subset(whole, np.isin(labels, classes)))
    splits = Splits(*halves)
    return _checked("mnist", splits) if set(classes) == set(range(10)) else splits


def glyphs() -> Splits:
    """Characters in sixteen type faces, 32x32 grey, drawn here in about two seconds; no download.

    Every other character is for training (with `transforms.glyphs_train`, fresh distortions of
    each image), the others are never seen.
    """
    pictures = _glyphs.images(_glyphs.CHARACTERS)
    labels = np.repeat(np.arange(len(_glyphs.CHARACTERS)), len(_glyphs.FACES))
    whole = Split(pictures, labels, _glyphs.names(_glyphs.CHARACTERS))
    return _checked("glyphs", Splits(*(subset(whole, labels % 2 == half) for half in (0, 1))))


def _from_tfds(source: str) -> bool:
    if source not in ("files", "tfds"):
        raise ValueError(f"source must be 'files' or 'tfds', not {source!r}")
    return source == "tfds"


def _halves(records, ids: np.ndarray, names: Sequence[str], *, train_classes: int) -> Splits:
    """Class ids 1..train_classes to the training half; a class is called `names` of its images."""
    title = dict(zip(ids.tolist(), names, strict=True))
    order = sorted(title)
    labels, names = encode([title[i] for i in ids.tolist()], names=[title[i] for i in order])
    whole = Split(records, labels, names)
    return divide(whole, train=[n for i, n in zip(order, names, strict=True) if i <= train_classes])


def _columns(path: pathlib.Path, at_least: int, header: int = 0) -> list[list[str]]:
    """Rows of a text file of columns between spaces; the last named column may hold spaces."""
    rows = []
    text = path.read_text(encoding="utf-8")
    for number, line in enumerate(text.splitlines()[header:], header + 1):
        if line.strip():
            row = line.split()
            if len(row) < at_least:
                raise ValueError(f"{path}:{number}: {at_least} columns are needed: {line!r}")
            rows.append(row)
    if not rows:
        raise ValueError(f"{path} lists nothing")
    return rows


def _class_folders(root: str | os.PathLike, inside: Sequence[str]) -> list[pathlib.Path]:
    """Folders of classes in `root` or `inside` it, unless the original annotations are there."""
    root = pathlib.Path(root).expanduser()
    for place in (root, *(root / name for name in inside)):
        if (place / "cars_annos.mat").exists():
            return []
        if place.is_dir():
            folders = sorted(p for p in place.iterdir() if p.is_dir() and p.name[0] != ".")
            if len(folders) > 98 or (len(folders) > 1 and place.name == "images"):
                return folders
    return []


def _images_of(folder_: pathlib.Path) -> list[str]:
    return sources.walk(folder_) if folder_.is_dir() else []


def _check_first(records: Sequence[str], dataset: str) -> None:
    """One look, so that a wrong root is told at once; the doctor looks at every file."""
    if len(records) and not os.path.exists(records[0]):
        raise FileNotFoundError(f"{dataset}: {records[0]} is listed but missing: unpack the images")


def _checked(name: str, splits: Splits) -> Splits:
    found = Published(*(n for split in splits for n in (len(split.names), len(split))))
    if found != PUBLISHED[name]:
        logging.warning(
            "%s: classes and images (train, test) are %s, published are %s: run the doctor",
            name,
            tuple(found),
            tuple(PUBLISHED[name]),
        )
    return splits


def _idx(root: _Path, stem: str) -> np.ndarray:
    home = pathlib.Path(root or ".").expanduser()
    for name in (f"{stem}-ubyte", f"{stem}-ubyte.gz", f"{stem.replace('-idx', '.idx')}-ubyte"):
        for place in (home, home / "MNIST" / "raw", home / "mnist"):
            if (place / name).is_file():
                return sources.idx(place / name)
    wanted = [f"{stem}-ubyte[.gz]"]
    return sources.look_for(root, wanted, dataset="mnist", origin="the four idx files of MNIST")
