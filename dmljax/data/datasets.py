"""The data sets that a config can name: `config.dataset = dict(name='cub200', ...)`.

Every function takes keywords only and returns `Splits(train, test)` as the papers define them.
`root` is the folder of the original files, or its parent. Data sets of TFDS can also be read from
its ArrayRecord files with `source='tfds'` (and `data_dir`), without TensorFlow.

Nothing is downloaded. No image is decoded here, except in `mnist`, `npz` and `glyphs`, which are a
few megabytes and stay in memory. If the counts differ from the published ones, a warning says so.
"""

import gzip
import io
import os
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from absl import logging
from PIL import Image

from dmljax.data import glyphs as glyphs_lib
from dmljax.data import image_folders, records
from dmljax.data.image_folders import folder
from dmljax.data.prepare import prepared
from dmljax.data.splits import Records, Split, Splits, divide, encode, subset
from dmljax.data.tables import npz, table

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


class Published(NamedTuple):
    """Numbers of classes and images, as the papers report them."""

    train_classes: int
    train_images: int
    test_classes: int
    test_images: int


PUBLISHED = {
    "cub200": Published(100, 5_864, 100, 5_924),
    "cars196": Published(98, 8_054, 98, 8_131),
    "sop": Published(11_318, 59_551, 11_316, 60_502),
    "inshop": Published(3_997, 25_882, 3_985, 14_218 + 12_612),
    "tiny_imagenet": Published(200, 100_000, 200, 10_000),
    "mnist": Published(10, 60_000, 10, 10_000),
    "glyphs": Published(164, 2_624, 163, 2_608),
}

_Path = str | os.PathLike | None


def cub200(
    *, root: _Path = None, source: str = "files", data_dir: str | None = None, crop: bool = False
) -> Splits:
    """Reads CUB-200-2011, birds (Wah et al., 2011): the first 100 classes are for training.

    `crop=True` cuts every image to its published box (`bounding_boxes.txt`).
    """
    images: Records
    boxes = None
    if _is_tfds(source):
        _refuse_crop(crop, "bounding_boxes.txt")
        images, values, _ = records.tfds_set(
            "caltech_birds2011",
            split="train+test",
            data_dir=data_dir,
            columns=("label", "label_name"),
            encoded=("segmentation_mask",),
        )
        ids = np.array(values["label"]) + 1
        titles = [name.decode() for name in values["label_name"]]
        names = [f"{i:03d}.{title}" for i, title in zip(ids, titles, strict=True)]
    else:
        if root is not None and (pathlib.Path(root) / "annotations-mat").is_dir():
            raise ValueError(
                f"cub200: {root} is the edition of 2010 (6,033 images); the papers use "
                "the edition of 2011: set root= to CUB_200_2011"
            )
        home = image_folders.find_folder(
            root,
            ["images.txt", "image_class_labels.txt", "images"],
            dataset="cub200",
            origin="CUB_200_2011.tgz of the Caltech-UCSD Birds page",
            inside=["CUB_200_2011"],
        )
        files = dict(_columns(home / "images.txt", 2))
        classes = dict(_columns(home / "image_class_labels.txt", 2))
        if files.keys() != classes.keys():
            raise ValueError(
                f"{home}: images.txt and image_class_labels.txt do not list the same images"
            )
        images = [str(home / "images" / file) for file in files.values()]
        ids = np.array([int(classes[image]) for image in files])
        names = [file.split("/")[0] for file in files.values()]
        _check_first(images, "cub200")
        if crop:
            box_of = {row[0]: row[1:5] for row in _columns(home / "bounding_boxes.txt", 5)}
            if files.keys() - box_of.keys():
                raise ValueError(f"{home}: bounding_boxes.txt does not list every image")
            rows = np.array([box_of[image] for image in files], float)  # left, top, width, height
            boxes = _within_images(
                np.concatenate([rows[:, :2], rows[:, :2] + rows[:, 2:]], 1), images
            )
    return _checked("cub200", _by_class_id(images, ids, names, boxes=boxes, train_classes=100))


def cars196(
    *, root: _Path = None, source: str = "files", data_dir: str | None = None, crop: bool = False
) -> Splits:
    """Reads Cars196 (Krause et al., 2013): 16,185 images, the first 98 classes for training.

    Reads `cars_annos.mat` with `car_ims/`, or one folder per class in alphabetic order. `crop=True`
    cuts every image to its published box, which only the annotations have.
    """
    inside = ["cars196", "stanford_cars", "images"]
    images: Records
    boxes = None
    if _is_tfds(source):
        _refuse_crop(crop, "cars_annos.mat")
        images, values, features = records.tfds_set(
            "cars196", split="train+test", data_dir=data_dir, columns=("label",)
        )
        ids, titles = np.array(values["label"]) + 1, features["label"].names
    elif root is not None and (class_folders := _class_folders(root, inside)):
        _refuse_crop(crop, "cars_annos.mat")
        paths = [image_folders.image_paths(class_folder) for class_folder in class_folders]
        titles = [class_folder.name for class_folder in class_folders]
        images = [path for class_paths in paths for path in class_paths]
        ids = np.repeat(np.arange(len(paths)) + 1, [len(class_paths) for class_paths in paths])
    else:
        images, ids, titles, boxes = _cars_annotations(root, inside[:2])
        boxes = _within_images(boxes, images) if crop else None
    names = [f"{i:03d} {titles[i - 1]}" for i in ids]
    return _checked("cars196", _by_class_id(images, ids, names, boxes=boxes, train_classes=98))


def _refuse_crop(crop: bool, annotations: str) -> None:
    if crop:
        raise ValueError(
            f"crop=True reads the boxes of {annotations}: set root= to the original files, without "
            "source="
        )


def _within_images(boxes: np.ndarray, images: Sequence[str]) -> np.ndarray:
    """Rounds boxes (left, top, right, bottom) to pixels and clips them to their images."""
    boxes = np.floor(boxes).astype(np.int32)
    for box, path in zip(boxes, images, strict=True):
        try:
            with Image.open(path) as image:  # reads only the header
                width, height = image.size
        except OSError:
            continue  # reported when the image is read
        box[:] = np.clip(box, 0, [width, height, width, height])
        if box[0] >= box[2] or box[1] >= box[3]:
            raise ValueError(f"the published box of {path} lies outside of the image")
    return boxes


def _cars_annotations(
    root: _Path, inside: Sequence[str]
) -> tuple[list[str], np.ndarray, Sequence[str], np.ndarray]:
    """Reads the original annotations: images, class ids from 1, class names, boxes."""
    from scipy import io as scipy_io

    home = image_folders.find_folder(
        root,
        ["cars_annos.mat", "car_ims"],
        dataset="cars196",
        origin="car_ims.tgz and cars_annos.mat of the Stanford Cars page",
        inside=inside,
    )
    try:
        content = scipy_io.loadmat(home / "cars_annos.mat", squeeze_me=True)
        rows, titles = np.atleast_1d(content["annotations"]), content["class_names"]
        images = [str(home / str(path)) for path in rows["relative_im_path"]]
        ids = rows["class"].astype(np.int64)
        # Numbers from 1, both ends included.
        first = np.stack([rows["bbox_x1"], rows["bbox_y1"]], axis=1).astype(np.int64) - 1
        last = np.stack([rows["bbox_x2"], rows["bbox_y2"]], axis=1).astype(np.int64)
    except (ValueError, KeyError, TypeError, NotImplementedError) as error:
        raise ValueError(f"{home}/cars_annos.mat cannot be read: {error}") from error
    _check_first(images, "cars196")
    return images, ids, titles, np.concatenate([first, last], axis=1)


def sop(
    *, root: _Path = None, source: str = "files", data_dir: str | None = None, half: bool = False
) -> Splits:
    """Reads Stanford Online Products (Song et al., 2016). `superlabels` are the 12 categories.

    `half=True` takes the first half of all 22,634 classes for training, as Musgrave et al. (2020)
    do. The official split has one class more for training.
    """
    splits = []
    images: Records
    for name in ("train", "test"):
        if _is_tfds(source):
            images, values, _ = records.tfds_set(
                "stanford_online_products",
                split=name,
                data_dir=data_dir,
                columns=("class_id", "super_class_id"),
            )
            ids = np.array(values["class_id"]) + 1
            categories = np.array(values["super_class_id"]) + 1
        else:
            home = image_folders.find_folder(
                root,
                ["Ebay_train.txt", "Ebay_test.txt"],
                dataset="sop",
                origin="Stanford_Online_Products.zip",
                inside=["Stanford_Online_Products"],
            )
            rows = _columns(home / f"Ebay_{name}.txt", 4, header=1)
            images = [str(home / row[3]) for row in rows]
            ids = np.array([int(row[1]) for row in rows])
            categories = np.array([int(row[2]) for row in rows])
            _check_first(images, "sop")
        labels, names = encode(ids)
        splits.append(Split(images, labels, names, superlabels=categories - 1))
    checked = _checked("sop", Splits(*splits))
    return _halves(checked) if half else checked


def _halves(splits: Splits) -> Splits:
    """Divides the classes of both splits again: the first half is for training."""
    train, test = splits
    records = [split.records[i] for split in splits for i in range(len(split))]
    labels = np.concatenate([train.labels, test.labels + len(train.names)])
    superlabels = np.concatenate([train.superlabels, test.superlabels])
    names = (*train.names, *test.names)
    return divide(Split(records, labels, names, superlabels=superlabels), train=0.5)


def inshop(*, root: _Path = None, corpus: str | None = None) -> Splits:
    """Reads In-Shop Clothes (Liu et al., 2016). The test split has queries and a gallery.

    `img` and `img_highres` are different versions of the images. `corpus` names one of them; by
    default it is `img` if that exists. The choice is logged.
    """
    listing = "Eval/list_eval_partition.txt"
    home = image_folders.find_folder(
        root,
        [listing, "Img"],
        dataset="inshop",
        origin="the In-shop Clothes Retrieval Benchmark of DeepFashion (Eval/ and Img/)",
        inside=["In_shop", "In-shop Clothes Retrieval Benchmark"],
    )
    available = [name for name in ("img", "img_highres") if (home / "Img" / name).is_dir()]
    if corpus not in (None, *available) or not available:
        missing = f"Img/{corpus or 'img'}"
        text = f"inshop: {home} has no {missing}; it has {available or 'no images'}"
        raise FileNotFoundError(text)
    corpus = corpus or available[0]
    logging.info("inshop: images of Img/%s (available: %s)", corpus, ", ".join(available))
    rows = _columns(home / listing, 3, header=2)
    if unknown := {row[2] for row in rows} - {"train", "query", "gallery"}:
        raise ValueError(
            f"{home / listing}: status {sorted(unknown)[0]!r} is none of train, query, gallery"
        )
    images = [str(home / "Img" / corpus / row[0].split("/", 1)[1]) for row in rows]
    status = np.array([row[2] for row in rows])

    def split_at(where: np.ndarray, **marks: np.ndarray) -> Split:
        # Item ids are padded with zeros, so sorting the strings sorts the numbers.
        labels, names = encode(rows[i][1] for i in np.flatnonzero(where))
        marks = {name: mark[where] for name, mark in marks.items()}
        return Split([images[i] for i in np.flatnonzero(where)], labels, names, **marks)

    train = split_at(status == "train")
    test = split_at(status != "train", query=status == "query", gallery=status == "gallery")
    _check_first(train.records or test.records, "inshop")
    return _checked("inshop", Splits(train, test))


def tiny_imagenet(*, root: _Path = None) -> Splits:
    """Reads TinyImageNet: 200 classes of 64x64 images. `val` is the test split.

    Labels follow the order of `wnids.txt`.
    """
    home = image_folders.find_folder(
        root,
        ["wnids.txt", "train", "val/val_annotations.txt"],
        dataset="tiny_imagenet",
        origin="tiny-imagenet-200.zip",
        inside=["tiny-imagenet-200"],
    )
    wnids = (home / "wnids.txt").read_text().split()
    class_folders = [(wnid, home / "train" / wnid) for wnid in wnids]
    train = [
        (path, wnid)
        for wnid, class_folder in class_folders
        if class_folder.is_dir()
        for path in image_folders.image_paths(class_folder)
    ]
    rows = _columns(home / "val" / "val_annotations.txt", 2)
    test = [(str(home / "val" / "images" / row[0]), row[1]) for row in rows]
    splits = []
    for labeled_images in (train, test):
        labels, names = encode([wnid for _, wnid in labeled_images], names=wnids)
        splits.append(Split([path for path, _ in labeled_images], labels, names))
        _check_first(splits[-1].records, "tiny_imagenet")
    return _checked("tiny_imagenet", Splits(*splits))


def mnist(
    *,
    root: _Path = None,
    source: str = "files",
    data_dir: str | None = None,
    classes: Sequence[int] = tuple(range(10)),
) -> Splits:
    """Reads MNIST, padded by 2 pixels to `uint8 [n 32 32 1]`. `classes` selects digits."""
    if unknown := [digit for digit in classes if digit not in range(10)]:
        raise ValueError(f"mnist: classes are digits 0..9, not {unknown[0]!r}")
    splits = []
    for name, prefix in (("train", "train"), ("test", "t10k")):
        if _is_tfds(source):
            encoded, values, _ = records.tfds_set(
                "mnist", split=name, data_dir=data_dir, columns=("label",)
            )
            decoded = (Image.open(io.BytesIO(encoded[i])) for i in range(len(encoded)))
            images = np.stack([np.asarray(image.convert("L")) for image in decoded])
            labels = np.array(values["label"])
        else:
            images = _mnist_file(root, f"{prefix}-images-idx3")
            labels = _mnist_file(root, f"{prefix}-labels-idx1")
            if len(images) != len(labels) or images.ndim != 3 or labels.ndim != 1:
                raise ValueError(f"mnist: {images.shape} images do not fit {labels.shape} labels")
        padded = np.pad(images, ((0, 0), (2, 2), (2, 2)))[..., None]
        all_digits = Split(padded, labels, tuple(str(digit) for digit in range(10)))
        splits.append(subset(all_digits, np.isin(labels, classes)))
    if set(classes) == set(range(10)):
        return _checked("mnist", Splits(*splits))
    return Splits(*splits)


def glyphs() -> Splits:
    """Renders characters in 16 typefaces, 32x32 grayscale, in about two seconds; no download.

    Every other character is for training (with `transforms.glyphs_train`, which distorts each image
    again), the others are for testing.
    """
    characters = glyphs_lib.CHARACTERS
    labels = np.repeat(np.arange(len(characters)), len(glyphs_lib.FACES))
    all_images = Split(glyphs_lib.images(characters), labels, glyphs_lib.names(characters))
    splits = (subset(all_images, labels % 2 == remainder) for remainder in (0, 1))
    return _checked("glyphs", Splits(*splits))


def _is_tfds(source: str) -> bool:
    if source not in ("files", "tfds"):
        raise ValueError(f"source must be 'files' or 'tfds', not {source!r}")
    return source == "tfds"


def _by_class_id(
    images: Records,
    ids: np.ndarray,
    names: Sequence[str],
    *,
    boxes: np.ndarray | None = None,
    train_classes: int,
) -> Splits:
    """Divides classes by id: 1 to `train_classes` are for training. `names` are class names."""
    name_of_id = dict(zip(ids.tolist(), names, strict=True))
    order = sorted(name_of_id)
    labels, class_names = encode(
        [name_of_id[i] for i in ids.tolist()], names=[name_of_id[i] for i in order]
    )
    train_names = [name for i, name in zip(order, class_names, strict=True) if i <= train_classes]
    return divide(Split(images, labels, class_names, boxes=boxes), train=train_names)


def _columns(path: pathlib.Path, count: int, header: int = 0) -> list[list[str]]:
    """Reads the rows of a text file, split at spaces into at least `count` columns."""
    rows = []
    text = path.read_text(encoding="utf-8")
    for number, line in enumerate(text.splitlines()[header:], header + 1):
        if line.strip():
            row = line.split()
            if len(row) < count:
                raise ValueError(f"{path}:{number}: {count} columns are needed: {line!r}")
            rows.append(row)
    if not rows:
        raise ValueError(f"{path} lists nothing")
    return rows


def _class_folders(root: str | os.PathLike, inside: Sequence[str]) -> list[pathlib.Path]:
    """Class folders in `root` or its subfolders `inside`; none if the annotations exist."""
    root = pathlib.Path(root).expanduser()
    for parent in (root, *(root / name for name in inside)):
        if (parent / "cars_annos.mat").exists():
            return []
        if parent.is_dir():
            folders = sorted(p for p in parent.iterdir() if p.is_dir() and p.name[0] != ".")
            if len(folders) > 98 or (len(folders) > 1 and parent.name == "images"):
                return folders
    return []


def _check_first(paths: Records, dataset: str) -> None:
    """Finds a wrong root at once by looking for one image; the doctor reads all of them."""
    if len(paths) and not os.path.exists(paths[0]):
        raise FileNotFoundError(f"{dataset}: {paths[0]} is listed but missing: unpack the images")


def _checked(name: str, splits: Splits) -> Splits:
    """Returns the splits, after a warning if their counts are not the published ones."""
    counts = Published(*(n for split in splits for n in (len(split.names), len(split))))
    if counts != PUBLISHED[name]:
        logging.warning(
            "%s: classes and images (train, test) are %s, published are %s: run dmljax doctor",
            name,
            tuple(counts),
            tuple(PUBLISHED[name]),
        )
    return splits


def _mnist_file(root: _Path, stem: str) -> np.ndarray:
    """Reads an idx file, whose name and folder differ between distributions."""
    home = pathlib.Path(root or ".").expanduser()
    for name in (f"{stem}-ubyte", f"{stem}-ubyte.gz", f"{stem.replace('-idx', '.idx')}-ubyte"):
        for folder_ in (home, home / "MNIST" / "raw", home / "mnist"):
            if (folder_ / name).is_file():
                return _idx(folder_ / name)
    # Always raises: the file with this name cannot exist.
    names, origin = [f"{stem}-ubyte[.gz]"], "the four idx files of MNIST"
    image_folders.find_folder(root, names, dataset="mnist", origin=origin)
    raise AssertionError


def _idx(path: pathlib.Path) -> np.ndarray:
    """Reads the `uint8` array in an idx file, gzipped or not."""
    data = path.read_bytes()
    if data[:2] == b"\x1f\x8b":
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError) as error:
            raise ValueError(f"{path} is a damaged gzip file: {error}") from error
    if len(data) < 4 or data[:3] != b"\0\0\x08":
        raise ValueError(f"{path} is not an idx file of bytes: it starts with {data[:4]!r}")
    rank = data[3]
    header = 4 + 4 * rank
    shape = tuple(np.frombuffer(data, ">u4", rank, 4).tolist()) if len(data) >= header else ()
    expected = header + int(np.prod(shape, dtype=np.int64))
    if not shape or len(data) != expected:
        raise ValueError(f"{path} has {len(data)} bytes, but its header announces {expected}")
    return np.frombuffer(data, np.uint8, offset=header).reshape(shape)
