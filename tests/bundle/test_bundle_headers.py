"""What is read of an image without a decoder, and what is refused for it."""

import io
import struct

import numpy as np
import pytest
from PIL import Image

from dmljax.bundle import BadImage, headers, images, preprocessing

PREPROCESS = preprocessing.from_transform("unchanged", (8, 8, 1))


def _encoded(mode, format, **options):
    out = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (37, 52, 3), np.uint8)
    Image.fromarray(pixels).convert(mode).save(out, format, **options)
    return out.getvalue()


FILES = {
    "png": _encoded("RGB", "PNG"),
    "png with a profile": _encoded("RGB", "PNG", icc_profile=b"profile"),
    "jpeg": _encoded("RGB", "JPEG"),
    "progressive jpeg": _encoded("L", "JPEG", progressive=True),
    "jpeg with a long comment": _encoded("RGB", "JPEG", comment=b"c" * 60_000),
    "webp": _encoded("RGB", "WEBP"),
    "webp without loss": _encoded("RGB", "WEBP", lossless=True),
    "webp with alpha": _encoded("RGBA", "WEBP", exif=b"Exif\0\0II*\0\x08\0\0\0\0\0\0\0\0\0"),
    "gif": _encoded("P", "GIF"),
    "bmp": _encoded("RGB", "BMP"),
    "tiff": _encoded("RGB", "TIFF"),
    "compressed tiff": _encoded("L", "TIFF", compression="tiff_lzw"),
    "ppm": _encoded("RGB", "PPM").replace(b"P6\n", b"P6\n# a comment 9 9\n", 1),
    "pgm": _encoded("L", "PPM"),
}
BIG_ENDIAN = b"MM\0*\0\0\0\x08\0\2\1\0\0\4\0\0\0\1\0\0\0\x34\1\1\0\3\0\0\0\1\0\x25\0\0\0\0\0\0"


@pytest.mark.parametrize("name", FILES)
def test_the_pixels_are_those_that_the_decoder_reads(name):
    facts = headers.facts(FILES[name])
    assert facts.pixels == 37 * 52 and facts.format in images.FORMATS
    assert headers.problem(FILES[name]) is None
    assert (facts.scans > 1) == name.startswith("progressive")
    assert facts.texts == (name == "png with a profile")


def test_the_largest_of_the_sizes_of_a_jpeg_counts():
    jpeg = FILES["jpeg"]
    place = jpeg.index(b"\xff\xc0")
    (length,) = struct.unpack_from(">H", jpeg, place + 2)
    size = bytearray(jpeg[place : place + 2 + length])
    struct.pack_into(">HH", size, 5, 370, 520)
    assert headers.facts(jpeg[:place] + size + jpeg[place:]).pixels == 370 * 520


def test_both_byte_orders_of_tiff_are_read():
    assert headers.facts(BIG_ENDIAN) == ("TIFF", 37 * 52, 1, 0)


def test_damaged_headers_are_unknown_and_raise_nothing():
    rng = np.random.default_rng(0)
    for data in (*FILES.values(), BIG_ENDIAN):
        for length in range(80):
            headers.facts(data[:length])
            headers.problem(data[:length])
        for _ in range(200):
            changed = bytearray(data[:2000])
            for position in rng.integers(0, min(len(changed), 60), 3):
                changed[position] = rng.integers(256)
            headers.facts(bytes(changed))
    assert headers.facts(b"nonsense") == (None, None, 1, 0)
    lists_itself = b"II*\0\x08\0\0\0\xff\xff" + b"\0" * 50
    assert headers.facts(lists_itself).pixels is None


def _repeated(count):
    """A progressive JPEG of `count` scans: its last scan again and again."""
    jpeg = FILES["progressive jpeg"]
    last = jpeg[jpeg.rfind(b"\xff\xda") : -2]
    return jpeg[:-2] + last * (count - jpeg.count(b"\xff\xda")) + jpeg[-2:]


def _bmp_of_runs():
    head = bytearray(_encoded("P", "BMP"))
    head[30] = 1
    return bytes(head)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (_repeated(headers.MAX_SCANS + 1), "has 101 scans: the limit is 100"),
        (b"P3\n2 2\n255\n" + b"1 2 3 " * 4, "save it as a binary PPM"),
        (b"P2 2 2 255 1 2 3 4", "save it as a binary PPM"),
        (b"P1\n2 2\n0 1 1 0\n", "save it as a binary PPM"),
        (_bmp_of_runs(), "save it without compression"),
    ],
)
def test_slow_kinds_of_images_are_refused_before_they_are_decoded(data, text):
    with pytest.raises(BadImage, match=text) as raised:
        images.prepare(data, PREPROCESS)
    assert raised.value.kind == "format"


def test_a_jpeg_may_have_a_hundred_scans():
    assert images.prepare(_repeated(headers.MAX_SCANS), PREPROCESS).shape == (8, 8, 1)
