"""Writes tiny data sets in the formats of the originals."""

import csv
import gzip
import io
import pathlib

import numpy as np
from PIL import Image


def picture(seed=0, width=40, height=30):
    """Smooth colors that differ by seed and that JPEG changes little."""
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (4, 5, 3), np.uint8))
    return small.resize((width, height), Image.Resampling.BICUBIC)


def jpeg(seed=0, width=40, height=30, mode="RGB", **options):
    out = io.BytesIO()
    picture(seed, width, height).convert(mode).save(out, "JPEG", **options)
    return out.getvalue()


def put(path, data):
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def class_folders(root, counts, suffix=".jpg", **options):
    """`{class: images}` as folders; every image is different."""
    seed = 0
    for name, count in counts.items():
        for i in range(count):
            seed += 1
            put(root / name / f"{i:03d}{suffix}", jpeg(seed, **options))
    return root


def cub(root, classes=200, per_class=2):
    home = root / "CUB_200_2011"
    images, labels, boxes = [], [], []
    for c in range(1, classes + 1):
        for i in range(per_class):
            number = len(images) + 1
            boxes.append(f"{number} {1 + i}.0 2.0 8.0 {9 + i}.0")  # left top width height
            file = f"{c:03d}.Bird_{c}/Bird_{c}_{i:04d}.jpg"
            put(home / "images" / file, jpeg(number, 16, 12))
            images.append(f"{number} {file}")
            labels.append(f"{number} {c}")
    (home / "images.txt").write_text("\n".join(images) + "\n")
    (home / "image_class_labels.txt").write_text("\n".join(labels) + "\n")
    (home / "bounding_boxes.txt").write_text("\n".join(boxes) + "\n")
    return root


def cars(root, classes=196, per_class=2):
    from scipy import io as scipy_io

    fields = ["relative_im_path", "bbox_x1", "bbox_y1", "bbox_x2", "bbox_y2", "class", "test"]
    rows = np.zeros((1, classes * per_class), [(f, object) for f in fields])
    # In the original file, classes are mixed, and `test` marks the split for classification.
    order = np.random.default_rng(0).permutation(classes * per_class)
    for n, k in enumerate(order):
        file = f"car_ims/{n + 1:06d}.jpg"
        put(root / file, jpeg(int(n), 16, 12))
        rows[0, n] = (file, 1, 2, 9, 11, int(k) % classes + 1, n % 2)
    names = np.array([[f"Make Model {c + 1}" for c in range(classes)]], object)
    scipy_io.savemat(root / "cars_annos.mat", {"annotations": rows, "class_names": names})
    return root


def sop(root):
    home = root / "Stanford_Online_Products"
    number = 0
    for split, classes in (("train", range(1, 6)), ("test", range(6, 13))):
        lines = ["image_id class_id super_class_id path"]
        for c in classes:
            for i in range(3):
                number += 1
                file = f"bicycle_final/{c}_{i}.JPG"
                put(home / file, jpeg(number))
                lines.append(f"{number} {c} {c % 3 + 1} {file}")
        (home / f"Ebay_{split}.txt").write_text("\n".join(lines) + "\n")
    return root


def inshop(root, corpora=("img",), train_items=(1, 3)):
    lines = []
    items = dict.fromkeys(train_items, "train") | dict.fromkeys((2, 7, 9), "test")
    for item, split in items.items():
        for i in range(4):
            file = f"img/WOMEN/Dresses/id_{item:08d}/{i:02d}_1_front.jpg"
            status = "train" if split == "train" else ("query" if i == 0 else "gallery")
            lines.append(f"{file}  id_{item:08d}  {status}")
            for corpus in corpora:
                side = 40 if corpus == "img" else 400
                path = root / "Img" / file.replace("img/", f"{corpus}/", 1)
                put(path, jpeg(item * 10 + i, side, side))
    listing = [str(len(lines)), "image_name item_id evaluation_status", *lines]
    put(root / "Eval" / "list_eval_partition.txt", ("\n".join(listing) + "\n").encode())
    return root


def tiny_imagenet(root, wnids=("n02", "n01", "n03"), per_class=3):
    home = root / "tiny-imagenet-200"
    put(home / "wnids.txt", "\n".join(wnids).encode())
    rows = []
    for c, wnid in enumerate(wnids):
        for i in range(per_class):
            mode = "L" if i == 0 else "RGB"
            put(home / "train" / wnid / "images" / f"{wnid}_{i}.JPEG", jpeg(c * 9 + i, mode=mode))
        put(home / "train" / wnid / f"{wnid}_boxes.txt", b"x\t0\t0\t9\t9\n")
        file = f"val_{c}.JPEG"
        put(home / "val" / "images" / file, jpeg(100 + c))
        rows.append(f"{file}\t{wnid}\t0\t32\t44\t62")
    put(home / "val" / "val_annotations.txt", ("\n".join(rows) + "\n").encode())
    return root


def _idx(array):
    shape = np.array(array.shape, ">u4").tobytes()
    return b"\0\0\x08" + bytes([array.ndim]) + shape + array.astype(np.uint8).tobytes()


def mnist(root, zipped=False, train=30, test=20):
    rng = np.random.default_rng(0)
    for prefix, count in (("train", train), ("t10k", test)):
        images = rng.integers(0, 256, (count, 28, 28))
        labels = np.arange(count) % 10
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            data = _idx(array)
            name = f"{prefix}-{kind}-ubyte" + (".gz" if zipped else "")
            put(root / name, gzip.compress(data) if zipped else data)
    return root


def write_table(path, rows):
    """Writes a CSV of `rows`, which are dicts, and an image for each `path`."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    for i, row in enumerate(rows):
        put(path.parent / row["path"], jpeg(i))
    return path


def tfds(name, data_dir, train, test, features):
    """Writes a TFDS data set with images and labels from `features(split, i)`."""
    import tensorflow_datasets

    tensorflow_datasets.disable_progress_bar()
    builder = tensorflow_datasets.builder(name, data_dir=data_dir, file_format="array_record")

    def generate(split, count):
        for i in range(count):
            yield f"{split}_{i}", features(split, i)

    builder._split_generators = lambda manager: {
        "train": generate("train", train),
        "test": generate("test", test),
    }
    builder.download_and_prepare()
    return data_dir


def png(seed, mode="RGB", width=28, height=28):
    out = io.BytesIO()
    picture(seed, width, height).convert(mode).save(out, "PNG")
    out.seek(0)
    return out
