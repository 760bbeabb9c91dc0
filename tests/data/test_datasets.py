"""Each set from its exact layout; the split is right, and wrong input gets one clear line."""

import io
import pickle
import sys

import data_fixtures as make
import numpy as np
import pytest
from absl import logging

from dmljax.data import datasets, decode, published, splits
from dmljax.train import registry


def _sizes(found):
    return tuple(published.Published(*(n for s in found for n in (len(s.names), len(s)))))


def _disjoint(found):
    return not set(found.train.names) & set(found.test.names)


def _all_read(found):
    return all(decode.read(r).shape[2] == 3 for s in found for r in (s.records[0], s.records[-1]))


@pytest.mark.parametrize("inside", ["", "CUB_200_2011"])
def test_cub(tmp_path, inside):
    make.cub(tmp_path)
    found = datasets.cub200(root=tmp_path / inside)
    assert _sizes(found) == (100, 200, 100, 200) and _disjoint(found) and _all_read(found)
    assert found.train.names[0] == "001.Bird_1" and found.test.names[0] == "101.Bird_101"
    for half in found:
        for record, label in zip(half.records, half.labels, strict=True):
            assert f"/{half.names[label]}/" in record


def test_cars_from_annotations_ignores_the_classification_split(tmp_path):
    make.cars(tmp_path)
    found = datasets.cars196(root=tmp_path)
    assert _sizes(found) == (98, 196, 98, 196) and _disjoint(found) and _all_read(found)
    assert found.train.names[-1] == "098 Make Model 98"
    assert found.test.names[0] == "099 Make Model 99"


def test_cars_from_class_folders(tmp_path):
    for root in (tmp_path / "a", tmp_path / "b" / "images"):
        make.class_folders(root, {f"class {c:03d}": 1 for c in range(196)}, width=8, height=8)
    for root in ("a", "b"):
        found = datasets.cars196(root=tmp_path / root)
        assert _sizes(found) == (98, 98, 98, 98) and _disjoint(found)
        assert found.test.names[0] == "099 class 098"
    make.put(tmp_path / "a" / "class 000" / "more" / "deep.jpg", make.jpeg(1, 8, 8))
    assert len(datasets.cars196(root=tmp_path / "a").train) == 99


def test_the_older_edition_of_cub_is_named(tmp_path):
    (tmp_path / "lists").mkdir()
    (tmp_path / "annotations-mat").mkdir()
    with pytest.raises(ValueError, match=r"edition of 2010.*point root= at CUB_200_2011"):
        datasets.cub200(root=tmp_path)


def test_sop_keeps_its_own_halves_and_categories(tmp_path):
    make.sop(tmp_path)
    found = datasets.sop(root=tmp_path)
    assert _sizes(found) == (5, 15, 7, 21) and _disjoint(found) and _all_read(found)
    assert found.test.names == tuple(map(str, range(6, 13)))  # by value: 10 after 9
    assert found.train.superlabels.tolist() == [c % 3 for c in range(1, 6) for _ in range(3)]


def test_inshop_marks_queries_and_says_which_corpus(tmp_path, caplog):
    make.inshop(tmp_path, ("img", "img_highres"))
    logging.set_verbosity(logging.INFO)
    found = datasets.inshop(root=tmp_path)
    assert _sizes(found) == (2, 8, 3, 12) and _disjoint(found) and _all_read(found)
    assert found.test.query.sum() == 3 and found.test.gallery.sum() == 9
    assert not (found.test.query & found.test.gallery).any()
    assert "Img/img (found: img, img_highres)" in caplog.text
    assert all("/img/" in record for record in found.train.records)
    other = datasets.inshop(root=tmp_path, corpus="img_highres")
    assert all("/img_highres/" in record for record in other.train.records)
    with pytest.raises(FileNotFoundError, match=r"no Img/imgs; it has \['img', 'img_highres'\]"):
        datasets.inshop(root=tmp_path, corpus="imgs")


def test_tiny_imagenet_labels_follow_wnids(tmp_path):
    make.tiny_imagenet(tmp_path)
    found = datasets.tiny_imagenet(root=tmp_path)
    assert _sizes(found) == (3, 9, 3, 3) and _all_read(found)
    assert found.train.names == found.test.names == ("n02", "n01", "n03")
    for record, label in zip(found.train.records, found.train.labels, strict=True):
        assert f"/{found.train.names[label]}/" in record


@pytest.mark.parametrize("zipped", [False, True])
def test_mnist_is_padded_and_can_be_cut_to_some_digits(tmp_path, zipped):
    make.mnist(tmp_path, zipped)
    found = datasets.mnist(root=tmp_path)
    assert found.train.records.shape == (30, 32, 32, 1) and len(found.test) == 20
    assert not found.train.records[:, :2].any() and found.train.records[:, 2:30, 2:30].any()
    some = datasets.mnist(root=tmp_path, classes=(1, 5, 9))
    assert some.train.names == ("1", "5", "9") and len(some.train) == 9
    assert (some.train.records == found.train.records[np.isin(found.train.labels, [1, 5, 9])]).all()
    with pytest.raises(ValueError, match="11"):
        datasets.mnist(root=tmp_path, classes=(1, 11))


@pytest.mark.parametrize(
    "damage, match",
    [
        (lambda data: data[:-3], "header announces"),
        (lambda data: b"junk" + data, "not an idx file"),
        (lambda data: b"", "not an idx file"),
        (lambda data: b"\x1f\x8bxx", "damaged gzip"),
    ],
)
def test_mnist_damaged(tmp_path, damage, match):
    make.mnist(tmp_path)
    file = tmp_path / "train-images-idx3-ubyte"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ValueError, match=match):
        datasets.mnist(root=tmp_path)


def _cars(split, i):
    import tensorflow_datasets as tfds

    offset = 0 if split == "train" else 3  # both halves of TFDS have images of every class
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


def test_tfds_cars_joins_both_halves_and_splits_by_class(tmp_path):
    make.tfds("cars196", tmp_path, 12, 8, _cars)
    found = datasets.cars196(source="tfds", data_dir=str(tmp_path))
    assert len(found.train) + len(found.test) == 20 and _disjoint(found) and _all_read(found)
    assert all(int(name[:3]) <= 98 for name in found.train.names)
    assert all(int(name[:3]) > 98 for name in found.test.names)
    again = pickle.loads(pickle.dumps(found.train))
    assert again.records[1] == found.train.records[1]
    assert "tfds cars196" in splits.record_name(found.test.records, 0)


def test_tfds_cub_sop_mnist(tmp_path):
    make.tfds("caltech_birds2011", tmp_path, 12, 8, _cub)
    found = datasets.cub200(source="tfds", data_dir=str(tmp_path))
    assert len(found.train) + len(found.test) == 20 and _disjoint(found) and _all_read(found)
    assert found.train.names[0] == "001.Bird_1" and found.test.names[-1] == "152.Bird_152"
    make.tfds("stanford_online_products", tmp_path, 6, 4, _sop)
    found = datasets.sop(source="tfds", data_dir=str(tmp_path))
    assert _sizes(found) == (3, 6, 2, 4) and _disjoint(found) and _all_read(found)
    assert found.test.names == ("11319", "11320")
    images = {}

    def digit(split, i):
        images[split, i] = make.png(i, "L").getvalue()
        return {"image": io.BytesIO(images[split, i]), "label": i % 10}

    make.tfds("mnist", tmp_path, 20, 10, digit)
    found = datasets.mnist(source="tfds", data_dir=str(tmp_path))
    assert found.train.records.shape == (20, 32, 32, 1)
    wanted = {
        decode.decode(data)[:, :, 0].tobytes() for (s, _), data in images.items() if s == "train"
    }
    assert {r[2:30, 2:30, 0].tobytes() for r in found.train.records} == wanted


def test_without_tfds_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    with pytest.raises(FileNotFoundError, match=r"pip install 'dmljax\[tfds\]'"):
        datasets.cars196(source="tfds")


def test_tfds_that_is_not_there_names_the_command(tmp_path):
    with pytest.raises(FileNotFoundError, match="tfds build cars196 --file_format=array_record"):
        datasets.cars196(source="tfds", data_dir=str(tmp_path))
    with pytest.raises(ValueError, match="'files' or 'tfds', not 'web'"):
        datasets.cars196(source="web")


@pytest.mark.parametrize("name", ["cub200", "cars196", "sop", "inshop", "tiny_imagenet", "mnist"])
def test_missing_says_what_where_and_how(tmp_path, name):
    function = registry.resolve("dataset", name)
    with pytest.raises(ValueError, match=r"no root is given.*comes from.*point root="):
        function()
    with pytest.raises(FileNotFoundError, match=r"does not exist.*comes from.*point root="):
        function(root=tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match=r"has no .*comes from.*point root="):
        function(root=tmp_path)
    file = make.put(tmp_path / "archive.zip", b"x")
    with pytest.raises(NotADirectoryError, match="is a file, not a folder"):
        function(root=file)


def test_listed_but_missing_images_and_torn_lists(tmp_path):
    make.cub(tmp_path)
    home = tmp_path / "CUB_200_2011"
    (home / "images" / "001.Bird_1" / "Bird_1_0000.jpg").unlink()
    with pytest.raises(FileNotFoundError, match="listed but missing: unpack"):
        datasets.cub200(root=tmp_path)
    labels = (home / "image_class_labels.txt").read_text().splitlines()
    (home / "image_class_labels.txt").write_text("\n".join(labels[:-1]))
    with pytest.raises(ValueError, match="list other images"):
        datasets.cub200(root=tmp_path)
    (home / "images.txt").write_text("1\n")
    with pytest.raises(ValueError, match=r"images.txt:1: 2 columns"):
        datasets.cub200(root=tmp_path)


def test_counts_that_are_not_the_published_ones_are_told(tmp_path, caplog):
    datasets.cub200(root=make.cub(tmp_path))
    assert "cub200" in caplog.text and "5864" in caplog.text and "doctor" in caplog.text


def test_every_name_resolves():
    for name in datasets.__all__:
        assert callable(registry.resolve("dataset", name))
