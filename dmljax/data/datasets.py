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
from dmljax.hints import check_all, check_known

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


class _Layout(NamedTuple):
    """The files that a data set needs, who publishes them, and the usual names of their folder."""

    files: tuple[str, ...]
    origin: str
    inside: tuple[str, ...]


_LAYOUTS = {
    "cub200": _Layout(
        ("images.txt", "image_class_labels.txt", "images"),
        "CUB_200_2011.tgz of the Caltech-UCSD Birds page",
        ("CUB_200_2011",),
    ),
    "cars196": _Layout(
        ("cars_annos.mat", "car_ims"),
        "car_ims.tgz and cars_annos.mat of the Stanford Cars page",
        ("cars196", "stanford_cars"),
    ),
    "sop": _Layout(
        ("Ebay_train.txt", "Ebay_test.txt"),
        "Stanford_Online_Products.zip",
        ("Stanford_Online_Products",),
    ),
    "inshop": _Layout(
        ("Eval/list_eval_partition.txt", "Img"),
        "the In-shop Clothes Retrieval Benchmark of DeepFashion (Eval/ and Img/)",
        ("In_shop", "In-shop Clothes Retrieval Benchmark"),
    ),
    "tiny_imagenet": _Layout(
        ("wnids.txt", "train", "val/val_annotations.txt"),
        "tiny-imagenet-200.zip",
        ("tiny-imagenet-200",),
    ),
    # Distributions differ in the character before "idx" and in the suffix.
    "mnist": _Layout(
        (
            "train-images?idx3-ubyte*",
            "train-labels?idx1-ubyte*",
            "t10k-images?idx3-ubyte*",
            "t10k-labels?idx1-ubyte*",
        ),
        "the four idx files of MNIST",
        ("MNIST/raw", "mnist"),
    ),
}

_Path = str | os.PathLike | None
_NO_BOXES = "crop=True needs the published boxes: set root= to the original files"


def _home(name: str, root: _Path) -> pathlib.Path:
    """Finds the folder with the files of a published data set."""
    return image_folders.find_folder(root, dataset=name, **_LAYOUTS[name]._asdict())


def cub200(
    *, root: _Path = None, source: str = "files", data_dir: str | None = None, crop: bool = False
) -> Splits:
    """Reads CUB-200-2011, birds (Wah et al., 2011): the first 100 classes are for training.

    `crop=True` cuts every image to its published box (`bounding_boxes.txt`).
    """
    images: Records
    boxes = None
    if _is_tfds(source, crop):
        columns, masks = ("label", "label_name"), ("segmentation_mask",)
        images, _, (labels, titles) = records.tfds_set(
            "caltech_birds2011", "train+test", data_dir, *columns, encoded=masks
        )
        ids = np.array(labels) + 1
        names = [f"{i:03d}.{title.decode()}" for i, title in zip(ids, titles, strict=True)]
    else:
        home = _home("cub200", root)
        files = dict(_columns(home / "images.txt", 2))
        lists = {"image_class_labels.txt": 2} | ({"bounding_boxes.txt": 5} if crop else {})
        rows = {}
        for list_, count in lists.items():
            rows[list_] = {row[0]: row[1:] for row in _columns(home / list_, count)}
            if files.keys() != rows[list_].keys():
                raise ValueError(f"{home}: images.txt and {list_} do not list the same images")
        images = [str(home / "images" / file) for file in files.values()]
        ids = np.array([int(rows["image_class_labels.txt"][image][0]) for image in files])
        names = [file.split("/")[0] for file in files.values()]
        if crop:
            sides = np.array([rows["bounding_boxes.txt"][image][:4] for image in files], float)
            corners = sides[:, :2], sides[:, :2] + sides[:, 2:]  # of left, top, width, height
            boxes = _within_images(np.concatenate(corners, axis=1), images)
    return _checked("cub200", _by_class_id(images, ids, names, boxes=boxes, train_classes=100))


def cars196(
    *, root: _Path = None, source: str = "files", data_dir: str | None = None, crop: bool = False
) -> Splits:
    """Reads Cars196 (Krause et al., 2013): 16,185 images, the first 98 classes for training.

    Reads `cars_annos.mat` with `car_ims/`, or one folder per class in alphabetic order. `crop=True`
    cuts every image to its published box, which only the annotations have.
    """
    images: Records
    boxes = None
    if _is_tfds(source, crop):
        images, features, (labels,) = records.tfds_set("cars196", "train+test", data_dir, "label")
        ids, titles = np.array(labels) + 1, features["label"].names
    elif root is not None and (class_folders := _class_folders(root)):
        if crop:
            raise ValueError(_NO_BOXES)
        paths = [image_folders.image_paths(class_folder) for class_folder in class_folders]
        titles = [class_folder.name for class_folder in class_folders]
        images = [path for class_paths in paths for path in class_paths]
        ids = np.repeat(np.arange(len(paths)) + 1, [len(class_paths) for class_paths in paths])
    else:
        images, ids, titles, boxes = _cars_annotations(_home("cars196", root))
        boxes = _within_images(boxes, images) if crop else None
    names = [f"{i:03d} {titles[i - 1]}" for i in ids.tolist()]
    return _checked("cars196", _by_class_id(images, ids, names, boxes=boxes, train_classes=98))


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
    home: pathlib.Path,
) -> tuple[list[str], np.ndarray, Sequence[str], np.ndarray]:
    """Reads the original annotations: images, class ids from 1, class names, boxes."""
    from scipy import io as scipy_io

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
            images, _, columns = records.tfds_set(
                "stanford_online_products", name, data_dir, "class_id", "super_class_id"
            )
            ids, categories = (np.array(column) + 1 for column in columns)
        else:
            home = _home("sop", root)
            rows = _columns(home / f"Ebay_{name}.txt", 4, header=1)
            images = [str(home / row[3]) for row in rows]
            ids = np.array([int(row[1]) for row in rows])
            categories = np.array([int(row[2]) for row in rows])
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
    home = _home("inshop", root)
    available = [name for name in ("img", "img_highres") if (home / "Img" / name).is_dir()]
    if corpus not in (None, *available) or not available:
        missing = f"Img/{corpus or 'img'}"
        text = f"inshop: {home} has no {missing}; it has {available or 'no images'}"
        raise FileNotFoundError(text)
    corpus = corpus or available[0]
    logging.info("inshop: images of Img/%s (available: %s)", corpus, ", ".join(available))
    rows = _columns(home / "Eval" / "list_eval_partition.txt", 3, header=2)
    images = [str(home / "Img" / corpus / row[0].split("/", 1)[1]) for row in rows]
    # Item ids are padded with zeros, so sorting the strings sorts the numbers.
    labels, names = encode(row[1] for row in rows)
    status = np.array([row[2] for row in rows])
    marks = {"query": status == "query", "gallery": status == "gallery"}
    train = subset(Split(images, labels, names), status == "train")
    test = subset(Split(images, labels, names, **marks), status != "train")
    return _checked("inshop", Splits(train, test))


def tiny_imagenet(*, root: _Path = None) -> Splits:
    """Reads TinyImageNet: 200 classes of 64x64 images. `val` is the test split.

    Labels follow the order of `wnids.txt`.
    """
    home = _home("tiny_imagenet", root)
    wnids = (home / "wnids.txt").read_text().split()
    train = [
        (path, wnid)
        for wnid in wnids
        if (class_folder := home / "train" / wnid).is_dir()
        for path in image_folders.image_paths(class_folder)
    ]
    rows = _columns(home / "val" / "val_annotations.txt", 2)
    test = [(str(home / "val" / "images" / row[0]), row[1]) for row in rows]
    splits = []
    for labeled_images in (train, test):
        labels, names = encode([wnid for _, wnid in labeled_images], names=wnids)
        splits.append(Split([path for path, _ in labeled_images], labels, names))
    return _checked("tiny_imagenet", Splits(*splits))


def mnist(
    *,
    root: _Path = None,
    source: str = "files",
    data_dir: str | None = None,
    classes: Sequence[int] = tuple(range(10)),
) -> Splits:
    """Reads MNIST, padded by 2 pixels to `uint8 [n 32 32 1]`. `classes` selects digits."""
    check_known("mnist: `classes` are digits, not", map(str, classes), [*"0123456789"])
    splits = []
    for name, prefix in (("train", "train"), ("test", "t10k")):
        if _is_tfds(source):
            encoded, _, (digits,) = records.tfds_set("mnist", name, data_dir, "label")
            decoded = (Image.open(io.BytesIO(encoded[i])) for i in range(len(encoded)))
            images = np.stack([np.asarray(image.convert("L")) for image in decoded])
            labels = np.array(digits)
        else:
            home = _home("mnist", root)
            images, labels = (
                _idx(min(home.glob(f"{prefix}-{kind}-ubyte*")))
                for kind in ("images?idx3", "labels?idx1")
            )
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


def _is_tfds(source: str, crop: bool = False) -> bool:
    is_tfds = source == "tfds"
    text = f"`source` must be 'files' or 'tfds', got {source!r}"
    check_all({text: source not in ("files", "tfds"), _NO_BOXES: is_tfds and crop})
    return is_tfds


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


def _class_folders(root: str | os.PathLike) -> list[pathlib.Path]:
    """Lists the class folders of Cars196; none if the annotations exist."""
    root = pathlib.Path(root).expanduser()
    for parent in (root, *(root / name for name in (*_LAYOUTS["cars196"].inside, "images"))):
        if (parent / "cars_annos.mat").exists():
            return []
        if parent.is_dir():
            folders = sorted(p for p in parent.iterdir() if p.is_dir() and p.name[0] != ".")
            if len(folders) > 98 or (len(folders) > 1 and parent.name == "images"):
                return folders
    return []


def _checked(name: str, splits: Splits) -> Splits:
    """Returns the splits; warns if their counts are not the published ones.

    Finds a wrong root at once by looking for one image; the doctor reads all of them.
    """
    for split in splits:
        if len(split) and isinstance(path := split.records[0], str) and not os.path.exists(path):
            raise FileNotFoundError(f"{name}: {path} is listed but missing: unpack the images")
    counts = Published(*(n for split in splits for n in (len(split.names), len(split))))
    if counts != PUBLISHED[name]:
        logging.warning(
            "%s: classes and images (train, test) are %s, published are %s: run dmljax doctor",
            name,
            tuple(counts),
            tuple(PUBLISHED[name]),
        )
    return splits


def _idx(path: pathlib.Path) -> np.ndarray:
    """Reads the `uint8` array in an idx file, gzipped or not."""
    data = path.read_bytes()
    try:
        data = gzip.decompress(data) if path.suffix == ".gz" else data
        if data[:3] != b"\0\0\x08":
            raise ValueError(f"it starts with {data[:4]!r}")
        shape = np.frombuffer(data, ">u4", data[3], 4).tolist()
        return np.frombuffer(data, np.uint8, offset=4 + 4 * len(shape)).reshape(shape)
    except (OSError, EOFError, ValueError, IndexError) as error:
        raise ValueError(f"{path} is not an idx file of bytes: {error}") from error
