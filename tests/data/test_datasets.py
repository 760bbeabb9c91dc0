"""Each data set is read from its original layout, and wrong input gets one clear line."""

import gzip
import io
import json
import pickle
import sys

import data_fixtures as make
import numpy as np
import pytest
from absl import logging

from dmljax.config import registry
from dmljax.data import datasets, decode, splits
from dmljax.data.records import Reader


def _sizes(dataset):
    return tuple(
        datasets.Published(*(n for split in dataset for n in (len(split.names), len(split))))
    )


def _disjoint(dataset):
    return not set(dataset.train.names) & set(dataset.test.names)


def _all_read(dataset):
    return all(decode.read(r).shape[2] == 3 for s in dataset for r in (s.records[0], s.records[-1]))


@pytest.mark.parametrize("inside", ["", "CUB_200_2011"])
def test_cub_is_divided_after_its_first_hundred_classes(tmp_path, inside):
    make.cub(tmp_path)
    dataset = datasets.cub200(root=tmp_path / inside)
    assert _sizes(dataset) == (100, 200, 100, 200) and _disjoint(dataset) and _all_read(dataset)
    assert dataset.train.names[0] == "001.Bird_1" and dataset.test.names[0] == "101.Bird_101"
    for split in dataset:
        for record, label in zip(split.records, split.labels, strict=True):
            assert f"/{split.names[label]}/" in record


def test_cars_from_annotations_ignores_the_classification_split(tmp_path):
    make.cars(tmp_path)
    dataset = datasets.cars196(root=tmp_path)
    assert _sizes(dataset) == (98, 196, 98, 196) and _disjoint(dataset) and _all_read(dataset)
    assert dataset.train.names[-1] == "098 Make Model 98"
    assert dataset.test.names[0] == "099 Make Model 99"


def test_cars_from_class_folders(tmp_path):
    for root in (tmp_path / "a", tmp_path / "b" / "images"):
        make.class_folders(root, {f"class {c:03d}": 1 for c in range(196)}, width=8, height=8)
    for root in ("a", "b"):
        dataset = datasets.cars196(root=tmp_path / root)
        assert _sizes(dataset) == (98, 98, 98, 98) and _disjoint(dataset)
        assert dataset.test.names[0] == "099 class 098"
    make.put(tmp_path / "a" / "class 000" / "more" / "deep.jpg", make.jpeg(1, 8, 8))
    assert len(datasets.cars196(root=tmp_path / "a").train) == 99


def test_published_boxes_crop_the_images(tmp_path):
    """CUB gives left, top, width, height; Cars gives both corners, counted from 1."""
    birds = datasets.cub200(root=make.cub(tmp_path / "cub", per_class=3), crop=True).train
    # The third box of a class ends one pixel below the image, which has 16 x 12.
    assert birds.boxes[:3].tolist() == [[1, 2, 9, 11], [2, 2, 10, 12], [3, 2, 11, 12]]
    cars = datasets.cars196(root=make.cars(tmp_path / "cars"), crop=True).test
    assert (cars.boxes == [0, 1, 9, 11]).all()
    for split in (birds, cars):
        left, top, right, bottom = split.boxes[0]
        image = decode.read(split.records[0])
        assert (Reader(split)(0) == image[top:bottom, left:right]).all()
    assert datasets.cub200(root=tmp_path / "cub").train.boxes is None


def test_boxes_that_are_not_there_are_refused(tmp_path):
    with pytest.raises(ValueError, match="crop=True needs the published boxes: set root="):
        root = make.class_folders(tmp_path / "images", dict.fromkeys("abcd", 2))
        datasets.cars196(root=root, crop=True)
    with pytest.raises(ValueError, match="crop=True needs the published boxes: set root="):
        datasets.cub200(source="tfds", crop=True)
    make.cub(tmp_path / "cub")
    (tmp_path / "cub" / "CUB_200_2011" / "bounding_boxes.txt").write_text("1 1 1 4 4\n")
    with pytest.raises(ValueError, match=r"bounding_boxes\.txt do not list the same images"):
        datasets.cub200(root=tmp_path / "cub", crop=True)


def test_sop_has_its_published_splits_and_categories(tmp_path):
    make.sop(tmp_path)
    dataset = datasets.sop(root=tmp_path)
    assert _sizes(dataset) == (5, 15, 7, 21) and _disjoint(dataset) and _all_read(dataset)
    assert dataset.test.names == tuple(map(str, range(6, 13)))  # sorted by value: 10 after 9
    assert dataset.train.superlabels.tolist() == [c % 3 for c in range(1, 6) for _ in range(3)]


def test_sop_divided_at_half_of_all_classes(tmp_path):
    make.sop(tmp_path)
    official, dataset = datasets.sop(root=tmp_path), datasets.sop(root=tmp_path, half=True)
    assert _sizes(dataset) == (6, 18, 6, 18) and _disjoint(dataset) and _all_read(dataset)
    assert dataset.train.names == (*official.train.names, official.test.names[0])

    def content(splits):
        rows = ((s, i) for s in splits for i in range(len(s)))
        return [(s.records[i], s.names[s.labels[i]], int(s.superlabels[i])) for s, i in rows]

    assert content(dataset) == content(official)


def test_inshop_marks_queries_and_logs_the_corpus(tmp_path, caplog):
    make.inshop(tmp_path, ("img", "img_highres"))
    logging.set_verbosity(logging.INFO)
    dataset = datasets.inshop(root=tmp_path)
    assert _sizes(dataset) == (2, 8, 3, 12) and _disjoint(dataset) and _all_read(dataset)
    assert dataset.test.query.sum() == 3 and dataset.test.gallery.sum() == 9
    assert not (dataset.test.query & dataset.test.gallery).any()
    assert "Img/img (available: img, img_highres)" in caplog.text
    assert all("/img/" in record for record in dataset.train.records)
    other = datasets.inshop(root=tmp_path, corpus="img_highres")
    assert all("/img_highres/" in record for record in other.train.records)
    with pytest.raises(FileNotFoundError, match=r"no Img/imgs; it has \['img', 'img_highres'\]"):
        datasets.inshop(root=tmp_path, corpus="imgs")


def test_tiny_imagenet_labels_follow_wnids(tmp_path):
    make.tiny_imagenet(tmp_path)
    dataset = datasets.tiny_imagenet(root=tmp_path)
    assert _sizes(dataset) == (3, 9, 3, 3) and _all_read(dataset)
    assert dataset.train.names == dataset.test.names == ("n02", "n01", "n03")
    for record, label in zip(dataset.train.records, dataset.train.labels, strict=True):
        assert f"/{dataset.train.names[label]}/" in record


@pytest.mark.parametrize("zipped", [False, True])
def test_mnist_is_padded_and_can_be_reduced_to_some_digits(tmp_path, zipped):
    make.mnist(tmp_path, zipped)
    dataset = datasets.mnist(root=tmp_path)
    assert dataset.train.records.shape == (30, 32, 32, 1) and len(dataset.test) == 20
    assert not dataset.train.records[:, :2].any() and dataset.train.records[:, 2:30, 2:30].any()
    reduced = datasets.mnist(root=tmp_path, classes=(1, 5, 9))
    assert reduced.train.names == ("1", "5", "9") and len(reduced.train) == 9
    assert (
        reduced.train.records == dataset.train.records[np.isin(dataset.train.labels, [1, 5, 9])]
    ).all()
    with pytest.raises(ValueError, match="11"):
        datasets.mnist(root=tmp_path, classes=(1, 11))


@pytest.mark.parametrize(
    "damage, match",
    [
        (lambda data: data[:-3], "not a gzip|Compressed file ended"),
        (lambda data: gzip.compress(gzip.decompress(data)[:-3]), "cannot reshape"),
        (lambda data: gzip.compress(b"junk"), "starts with b'junk'"),
        (lambda data: b"", "starts with b''"),
        (lambda data: b"\x1f\x8bxx", "Compressed file ended|Unknown compression"),
    ],
)
def test_a_damaged_mnist_file_is_named(tmp_path, damage, match):
    make.mnist(tmp_path, zipped=True)
    file = tmp_path / "train-images-idx3-ubyte.gz"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ValueError, match=f"is not an idx file of bytes: .*({match})"):
        datasets.mnist(root=tmp_path)


def _cars(split, i):
    import tensorflow_datasets as tfds

    offset = 0 if split == "train" else 3  # both splits of TFDS have images of every class
    return {
        "image": io.BytesIO(make.jpeg(i + 1000 * offset)),
        "label": (i * 49 + offset) % 196,
        "bbox": tfds.features.BBox(0.0, 0.0, 1.0, 1.0),
        "id": f"{i:05d}",
    }


def _cub(split, i):
    import tensorflow_datasets as tfds

    label = (i * 50 + (split == "test")) % 200
    return {
        "image": io.BytesIO(make.jpeg(i)),
        "image/filename": f"{i}.jpg",
        "label": label,
        "label_name": f"Bird_{label + 1}",
        "bbox": tfds.features.BBox(0.0, 0.0, 1.0, 1.0),
        "segmentation_mask": make.png(i, "L", 40, 30),
    }


def _sop(split, i):
    c = i // 2 + (0 if split == "train" else 11_318)
    return {
        "image": io.BytesIO(make.jpeg(i)),
        "class_id": c,
        "super_class_id": i % 12,
        "super_class_id/num": i % 12,
    }


def test_tfds_cars_joins_both_splits_and_divides_by_class(tmp_path):
    make.tfds("cars196", tmp_path, 12, 8, _cars)
    dataset = datasets.cars196(source="tfds", data_dir=str(tmp_path))
    assert (
        len(dataset.train) + len(dataset.test) == 20 and _disjoint(dataset) and _all_read(dataset)
    )
    assert all(int(name[:3]) <= 98 for name in dataset.train.names)
    assert all(int(name[:3]) > 98 for name in dataset.test.names)
    unpickled = pickle.loads(pickle.dumps(dataset.train))
    assert unpickled.records[1] == dataset.train.records[1]
    assert "tfds cars196" in splits.record_name(dataset.test.records, 0)


def test_tfds_cub_sop_and_mnist_have_the_splits_of_the_files(tmp_path):
    make.tfds("caltech_birds2011", tmp_path, 12, 8, _cub)
    dataset = datasets.cub200(source="tfds", data_dir=str(tmp_path))
    assert (
        len(dataset.train) + len(dataset.test) == 20 and _disjoint(dataset) and _all_read(dataset)
    )
    assert dataset.train.names[0] == "001.Bird_1" and dataset.test.names[-1] == "152.Bird_152"
    make.tfds("stanford_online_products", tmp_path, 6, 4, _sop)
    dataset = datasets.sop(source="tfds", data_dir=str(tmp_path))
    assert _sizes(dataset) == (3, 6, 2, 4) and _disjoint(dataset) and _all_read(dataset)
    assert dataset.test.names == ("11319", "11320")
    images = {}

    def digit(split, i):
        images[split, i] = make.png(i, "L").getvalue()
        return {"image": io.BytesIO(images[split, i]), "label": i % 10}

    make.tfds("mnist", tmp_path, 20, 10, digit)
    dataset = datasets.mnist(source="tfds", data_dir=str(tmp_path))
    assert dataset.train.records.shape == (20, 32, 32, 1)
    expected = {
        decode.decode(data)[:, :, 0].tobytes() for (s, _), data in images.items() if s == "train"
    }
    assert {r[2:30, 2:30, 0].tobytes() for r in dataset.train.records} == expected


def test_without_tfds_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    with pytest.raises(FileNotFoundError, match=r"pip install 'dmljax\[tfds\]'"):
        datasets.cars196(source="tfds")


def test_missing_tfds_data_names_the_command(tmp_path):
    with pytest.raises(FileNotFoundError, match="tfds build cars196 --file_format=array_record"):
        datasets.cars196(source="tfds", data_dir=str(tmp_path))
    with pytest.raises(ValueError, match="'files' or 'tfds', got 'web'"):
        datasets.cars196(source="web")


@pytest.mark.parametrize("name", ["cub200", "cars196", "sop", "inshop", "tiny_imagenet", "mnist"])
def test_a_missing_data_set_says_what_where_and_how(tmp_path, name):
    function = registry.resolve("dataset", name)
    with pytest.raises(ValueError, match=r"no root is given.*comes from.*set root="):
        function()
    with pytest.raises(FileNotFoundError, match=r"does not exist.*comes from.*set root="):
        function(root=tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match=r"has no .*comes from.*set root="):
        function(root=tmp_path)
    file = make.put(tmp_path / "archive.zip", b"x")
    with pytest.raises(FileNotFoundError, match="is a file, not a folder"):
        function(root=file)


def test_missing_images_and_truncated_lists_are_named(tmp_path):
    make.cub(tmp_path)
    home = tmp_path / "CUB_200_2011"
    (home / "images" / "001.Bird_1" / "Bird_1_0000.jpg").unlink()
    with pytest.raises(FileNotFoundError, match="listed but missing: unpack"):
        datasets.cub200(root=tmp_path)
    labels = (home / "image_class_labels.txt").read_text().splitlines()
    (home / "image_class_labels.txt").write_text("\n".join(labels[:-1]))
    with pytest.raises(ValueError, match="do not list the same images"):
        datasets.cub200(root=tmp_path)
    (home / "images.txt").write_text("1\n")
    with pytest.raises(ValueError, match=r"images.txt:1: 2 columns"):
        datasets.cub200(root=tmp_path)


def test_a_warning_reports_unexpected_counts(tmp_path, caplog):
    datasets.cub200(root=make.cub(tmp_path))
    assert "cub200" in caplog.text and "5864" in caplog.text and "doctor" in caplog.text


@pytest.mark.parametrize("key", ["pythonClassName", "type"])
def test_features_of_tfds_cannot_name_a_foreign_module(key, tmp_path, monkeypatch):
    folder = tmp_path / "cars196" / "2.1.0"
    folder.mkdir(parents=True)
    (tmp_path / "hostile.py").write_text("open('imported', 'w')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    features = {"featuresDict": {"features": {"image": {key: "hostile.Image"}}}}
    (folder / "features.json").write_text(json.dumps(features).replace("hostile", "\\u0068ostile"))
    with pytest.raises(ValueError, match=r"features.json names the class 'hostile.Image'"):
        datasets.cars196(source="tfds", data_dir=str(tmp_path))
    assert not (tmp_path / "imported").exists()
