"""Images from strangers: what is refused, in which words, and what is accepted all the same."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, TiffImagePlugin

from dmljax.bundle import BadImage, preprocessing
from dmljax.data import decode, transforms

PREPROCESS = preprocessing.from_transform(
    {"name": "standard_eval", "size": 8, "shorter": 10}, (8, 8, 3)
)
PIXELS = np.random.default_rng(0).integers(0, 256, (24, 30, 3), np.uint8)


def _encoded(picture, format="PNG", **options):
    out = io.BytesIO()
    picture.save(out, format, **options)
    return out.getvalue()


PICTURE = Image.fromarray(PIXELS)
PNG, JPEG = _encoded(PICTURE), _encoded(PICTURE, "JPEG", quality=90)


def _huge_png(width, height):
    """A small file whose header promises many pixels."""

    def chunk(name, data):
        body = name + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = zlib.compress(b"\0" * 100)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
    )


def _animated(format):
    frames = [Image.fromarray(255 - PIXELS)]
    return _encoded(PICTURE, format, save_all=True, append_images=frames)


REFUSED = {
    "empty": (b"", "zero bytes", "unreadable"),
    "text": (b"hello " * 100, "is not an image in one of JPEG, PNG", "format"),
    "truncated png": (PNG[: len(PNG) // 2], "cannot be read", "unreadable"),
    "truncated jpeg": (JPEG[: len(JPEG) // 2], "cannot be read", "unreadable"),
    "header only": (PNG[:30], "cannot be read|not an image in", None),
    "huge": (_huge_png(100_000, 100_000), "too (large|many)", "too_large"),
    "many pixels": (_huge_png(10_000, 10_000), "the limit is 50,000,000 pixels", "too_large"),
    "wide": (_huge_png(30_000, 10), "20,000 on a side", "too_large"),
    "animated gif": (_animated("GIF"), "has several frames", "format"),
    "animated png": (_animated("PNG"), "has several frames", "format"),
    "pages": (_animated("TIFF"), "has several frames", "format"),
    "numbers as text": (b"P3\n2 1\n255\n1 2 3 4 5 6\n", "is not an image in one of", "format"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    data, message, kind = REFUSED[name]
    with pytest.raises(BadImage, match=message) as raised:
        preprocessing.prepare(data, PREPROCESS)
    assert kind is None or raised.value.kind == kind
    assert "\n" not in str(raised.value) and raised.value.status in (400, 413, 415, 422)


def _many_pages(count):
    """A TIFF of `count` pages of two by two pixels."""
    data = bytearray(_encoded(Image.new("L", (2, 2)), "TIFF"))
    (start,) = struct.unpack_from("<I", data, 4)
    (entries,) = struct.unpack_from("<H", data, start)
    size = 2 + 12 * entries
    page, pointer = bytes(data[start : start + size]), start + size
    for _ in range(count - 1):
        data += b"\0" * (len(data) % 2)
        struct.pack_into("<I", data, pointer, len(data))
        pointer = len(data) + size
        data += page + b"\0" * 4
    return bytes(data)


def test_pages_are_not_counted(monkeypatch):
    """Pillow compares every page with all earlier ones: a file of 30 MB would take hours."""
    data = _many_pages(2000)
    with Image.open(io.BytesIO(data)) as picture:
        assert picture.n_frames == 2000
    loads = []
    load = TiffImagePlugin.ImageFileDirectory_v2.load
    monkeypatch.setattr(
        TiffImagePlugin.ImageFileDirectory_v2,
        "load",
        lambda self, file: loads.append(1) or load(self, file),
    )
    with pytest.raises(BadImage, match="has several frames"):
        preprocessing.prepare(data, PREPROCESS)
    assert 0 < len(loads) < 10


def test_a_thin_image_does_not_fill_the_memory():
    """Its shorter side of one pixel would be resized to ten, its longer side to 200,000."""
    thin = _encoded(Image.new("RGB", (20_000, 1)))
    wide = PREPROCESS._replace(operations=(transforms.resize_shorter_side(size=256),))
    with pytest.raises(BadImage, match="is too large, before or after it is resized") as raised:
        preprocessing.prepare(thin, wide)
    assert raised.value.kind == "too_large"


def test_the_limit_of_bytes():
    with pytest.raises(BadImage, match="the limit is 100") as raised:
        preprocessing.pixels(PNG, check_size_fn=PREPROCESS.check_size, max_bytes=100)
    assert raised.value.status == 413


def test_missing_files_folders_and_names_with_zeros(tmp_path):
    for path, reason in ((tmp_path / "a.png", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(BadImage, match=reason):
            preprocessing.prepare(path, PREPROCESS)
    with pytest.raises(BadImage, match="cannot be read"):
        preprocessing.prepare("a\0b.png", PREPROCESS)
    for wrong, kind in ((PICTURE, "type Image"), (0, "type int"), (None, "type NoneType")):
        with pytest.raises(BadImage, match=f"a path, the bytes of a file, or pixels .* {kind}: of"):
            preprocessing._read(wrong)


def _rotated():
    exif = Image.Exif()
    exif[0x0112] = 6
    return _encoded(PICTURE, "JPEG", quality=90, exif=exif)


ACCEPTED = {
    "png": PNG,
    "jpeg": JPEG,
    "gray": _encoded(PICTURE.convert("L")),
    "16 bits": _encoded(Image.fromarray(PIXELS[:, :, 0].astype(np.uint16) * 257)),
    "alpha": _encoded(PICTURE.convert("RGBA")),
    "cmyk": _encoded(PICTURE.convert("CMYK"), "JPEG"),
    "palette": _encoded(PICTURE.convert("P")),
    "rotated": _rotated(),
    "webp": _encoded(PICTURE, "WEBP"),
    "tiff": _encoded(PICTURE, "TIFF"),
    "bmp": _encoded(PICTURE, "BMP"),
    "gif": _encoded(PICTURE.convert("P"), "GIF"),
    "gray gif": _encoded(PICTURE.convert("L"), "GIF"),
    "transparent gif": _encoded(PICTURE.convert("P"), "GIF", transparency=3),
    "polyglot": PNG + b"<script>alert(1)</script>",
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_pixels_are_those_that_training_decodes(name):
    expected = PREPROCESS(decode.decode(ACCEPTED[name]))
    np.testing.assert_array_equal(preprocessing.prepare(ACCEPTED[name], PREPROCESS), expected)
    if name in ("alpha", "polyglot", "tiff", "bmp"):
        np.testing.assert_array_equal(expected, PREPROCESS(PIXELS))


def test_the_content_decides_and_not_the_name(tmp_path):
    path = tmp_path / "a.jpg"
    path.write_bytes(PNG)
    np.testing.assert_array_equal(preprocessing.prepare(path, PREPROCESS), PREPROCESS(PIXELS))


def test_only_the_listed_formats_are_opened():
    """An icon is an image for Pillow, and none here."""
    icon = _encoded(PICTURE.resize((16, 16)), "ICO")
    with pytest.raises(BadImage) as raised:
        preprocessing.prepare(icon, PREPROCESS)
    assert raised.value.kind == "format"
    assert decode.decode(icon).shape == (16, 16, 3)
