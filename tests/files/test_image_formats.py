"""The table of image formats, compared with what Pillow writes and reads."""

import io

import pytest
from PIL import Image

from dmljax.files import image_formats


@pytest.mark.parametrize("row", image_formats.FORMATS, ids=lambda row: row.name)
def test_a_format_agrees_with_pillow(row):
    out = io.BytesIO()
    Image.new("RGB", (5, 4)).save(out, row.name)
    assert image_formats.format_of(out.getvalue()) == row
    assert {Image.registered_extensions()[suffix] for suffix in row.suffixes} == {row.name}


@pytest.mark.parametrize(
    "data", [b"", b"\xff\xd8", b"P3\n1 1 255 1 2 3", b"RIFF1234WAVE", b"GIF88a"]
)
def test_bytes_of_no_format(data):
    assert image_formats.format_of(data) is None


def test_suffixes_that_are_read_are_not_unread():
    assert not set(image_formats.SUFFIXES) & set(image_formats.UNREAD_SUFFIXES)
    assert len(set(image_formats.SUFFIXES)) == len(image_formats.SUFFIXES)
