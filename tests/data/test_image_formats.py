"""The table of image formats, compared with what Pillow writes and reads."""

import io

import pytest
from PIL import Image

from dmljax.data import decode


@pytest.mark.parametrize("row", decode.FORMATS, ids=lambda row: row.name)
def test_a_format_agrees_with_pillow(row):
    out = io.BytesIO()
    Image.new("RGB", (5, 4)).save(out, row.name)
    assert decode.format_of(out.getvalue()) == row
    assert {Image.registered_extensions()[suffix] for suffix in row.suffixes} == {row.name}


@pytest.mark.parametrize(
    "data", [b"", b"\xff\xd8", b"P3\n1 1 255 1 2 3", b"RIFF1234WAVE", b"GIF88a"]
)
def test_bytes_of_no_format(data):
    assert decode.format_of(data) is None


def test_suffixes_that_are_read_are_not_unread():
    assert not set(decode.SUFFIXES) & set(decode.UNREAD_SUFFIXES)
    assert len(set(decode.SUFFIXES)) == len(decode.SUFFIXES)
