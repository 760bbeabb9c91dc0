"""Every image format is decoded to the right RGB pixels, with and without the fast decoder."""

import contextlib
import io

import data_fixtures as make
import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from PIL import Image

from dmljax.data import decode


@pytest.fixture(params=["fast", "pillow"])
def decoder(request, monkeypatch):
    if request.param == "pillow":
        monkeypatch.setattr(decode, "simplejpeg", None)
    elif decode.simplejpeg is None:
        pytest.skip("simplejpeg (the extra 'fast') is not installed")


def _saved(picture, kind, **options):
    out = io.BytesIO()
    picture.save(out, kind, **options)
    return out.getvalue()


def _close(pixels, picture, tolerance):
    expected = np.asarray(picture).astype(int)
    assert pixels.dtype == np.uint8 and pixels.shape == expected.shape
    assert np.abs(pixels.astype(int) - expected).max() <= tolerance


@pytest.mark.usefixtures("decoder")
def test_every_mode_is_decoded_to_rgb():
    picture = make.picture(3)
    alpha = picture.copy()
    alpha.putalpha(77)
    _close(decode.decode(_saved(picture, "PNG")), picture, 0)
    _close(decode.decode(_saved(alpha, "PNG")), picture, 0)
    gray = picture.convert("L")
    for kind in ("PNG", "JPEG"):
        _close(decode.decode(_saved(gray, kind, quality=100)), gray.convert("RGB"), 3)
    _close(decode.decode(_saved(gray.convert("LA"), "PNG")), gray.convert("RGB"), 0)
    palette = picture.quantize(64)
    _close(decode.decode(_saved(palette, "PNG")), palette.convert("RGB"), 0)
    _close(decode.decode(_saved(palette, "GIF")), palette.convert("RGB"), 0)
    transparent = _saved(palette, "PNG", transparency=bytes([0, 128, 255]))
    _close(decode.decode(transparent), palette.convert("RGB"), 0)
    one_bit = picture.convert("1")
    _close(decode.decode(_saved(one_bit, "PNG")), one_bit.convert("RGB"), 0)
    cmyk = picture.convert("CMYK")
    _close(decode.decode(_saved(cmyk, "JPEG", quality=100)), picture, 12)
    _close(decode.decode(_saved(cmyk, "TIFF")), picture, 2)


def test_sixteen_bits_keep_the_high_byte():
    values = np.arange(40 * 30, dtype=np.uint16).reshape(30, 40) * 54
    data = _saved(Image.fromarray(values), "PNG")
    pixels = decode.decode(data)
    assert (pixels == (values >> 8)[:, :, None]).all() and pixels.max() > 240
    assert len(np.unique(pixels)) > 200  # Pillow's own conversion clips nearly all of them


@pytest.mark.usefixtures("decoder")
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(orientation):
    corners = Image.new("RGB", (32, 16), "black")
    corners.paste("red", (0, 0, 16, 8))
    exif = Image.Exif()
    exif[0x0112] = orientation
    pixels = decode.decode(_saved(corners, "JPEG", quality=95, exif=exif)).astype(int)
    assert pixels.shape[:2] == ((32, 16) if orientation > 4 else (16, 32))
    h, w = pixels.shape[:2]
    # The corner that shows the first pixel of the file, by the EXIF standard.
    row, column = {
        1: (0, 0), 2: (0, 1), 3: (1, 1), 4: (1, 0), 5: (0, 0), 6: (0, 1), 7: (1, 1), 8: (1, 0),
    }[orientation]  # fmt: skip
    y, x = (h - 3 if row else 2), (w - 3 if column else 2)
    assert pixels[y, x, 0] > 200 and pixels[h - 1 - y, w - 1 - x, 0] < 60


def test_pillow_decodes_images_with_an_orientation_in_xmp():
    data = _saved(Image.new("RGB", (32, 16), "red"), "JPEG")
    description = (
        b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF><rdf:Description tiff:Orientation="6"/>'
    )
    block = b"http://ns.adobe.com/xap/1.0/\0" + description + b"</rdf:RDF></x:xmpmeta>"
    rotated = data[:2] + b"\xff\xe1" + (len(block) + 2).to_bytes(2, "big") + block + data[2:]
    assert decode._pillow(rotated).shape[:2] == (32, 16)
    np.testing.assert_array_equal(decode.decode(rotated), decode._pillow(rotated))


@hypothesis.settings(deadline=None, max_examples=60)
@hypothesis.example(3, 3, "4:4:4", 5, False, "RGB", 1)
@hypothesis.given(
    st.integers(1, 70),
    st.integers(1, 70),
    st.sampled_from(["4:4:4", "4:2:2", "4:2:0"]),
    st.integers(5, 100),
    st.booleans(),
    st.sampled_from(["RGB", "L"]),
    st.sampled_from([None, 1, 3, 8, 30]),
)
def test_both_decoders_give_identical_pixels(
    width, height, subsampling, quality, progressive, mode, least_side
):
    if decode.simplejpeg is None:
        pytest.skip("simplejpeg (the extra 'fast') is not installed")
    options = dict(quality=quality, progressive=progressive)
    options |= dict(subsampling=subsampling) if mode == "RGB" else {}
    noise = np.random.default_rng(width * height).integers(0, 256, (height, width, 3), np.uint8)
    data = _saved(Image.fromarray(noise).convert(mode), "JPEG", **options)
    pixels = decode.decode(data, least_side=least_side)
    np.testing.assert_array_equal(pixels, decode._pillow(data, least_side=least_side))
    gray = [f(data, least_side=least_side, keep_gray=True) for f in (decode.decode, decode._pillow)]
    expected = pixels if mode == "RGB" else pixels[:, :, :1]
    np.testing.assert_array_equal(gray, [expected] * 2)
    n = 1
    while least_side and n < 8 and min(width, height) >= 2 * n * least_side:
        n *= 2
    assert pixels.shape == (-(-height // n), -(-width // n), 3)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "I;16", "P", "RGB", "RGBA"])
def test_gray_images_keep_one_channel(mode):
    noise = np.random.default_rng(0).integers(0, 256, (7, 5, 3), np.uint8)
    image = Image.fromarray(noise).convert("L" if mode == "I;16" else mode)
    if mode == "I;16":
        image = Image.fromarray(np.asarray(image).astype(np.uint16) << 8)
    data = _saved(image, "PNG")
    pixels, kept = decode.decode(data), decode.decode(data, keep_gray=True)
    is_gray = mode in ("L", "I;16")
    np.testing.assert_array_equal(kept, pixels[:, :, :1] if is_gray else pixels)


@pytest.mark.usefixtures("decoder")
@pytest.mark.parametrize("kind", ["JPEG", "MPO", "progressive", "gray", "rotated"])
def test_a_jpeg_at_a_fraction_of_its_size_is_nearly_the_resized_image(kind):
    h, w, least_side = 600, 900, 140
    waves = np.mgrid[0:h, 0:w] / 37.0
    image = np.stack([np.sin(waves[0]), np.sin(waves[1]), np.sin(waves.sum(axis=0))], axis=-1)
    picture = Image.fromarray((127.5 + 100 * image).astype(np.uint8))
    options = {"quality": 95}
    if kind == "MPO":  # as phones write, with a preview
        options |= {"save_all": True, "append_images": [picture.resize((90, 60))]}
    elif kind == "progressive":
        options |= {"progressive": True}
    elif kind == "gray":
        picture = picture.convert("L")
    elif kind == "rotated":
        options["exif"] = Image.Exif()
        options["exif"][0x0112] = 6
    data = _saved(picture, "MPO" if kind == "MPO" else "JPEG", **options)
    full, pixels = decode.decode(data), decode.decode(data, least_side=least_side)
    sides = (225, 150) if kind == "rotated" else (150, 225)
    assert full.shape[:2] == tuple(4 * side for side in sides) and pixels.shape[:2] == sides
    resized = Image.fromarray(full).resize(sides[::-1], Image.Resampling.BOX)
    assert np.abs(pixels.astype(int) - np.asarray(resized)).mean() < 1.5
    opened = Image.open(io.BytesIO(data))
    np.testing.assert_array_equal(
        decode.decode(data, picture=opened, least_side=least_side), pixels
    )


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF", "CMYK"])
def test_other_images_are_decoded_in_full(kind):
    picture = make.picture(3).resize((64, 48))
    jpeg_in_tiff = {"compression": "jpeg"} if kind == "TIFF" else {}
    picture = picture.convert("CMYK") if kind == "CMYK" else picture
    data = _saved(picture, "JPEG" if kind == "CMYK" else kind, **jpeg_in_tiff)
    pixels = decode.decode(data, least_side=4)
    assert pixels.shape == (48, 64, 3) and (pixels == decode.decode(data)).all()


@pytest.mark.usefixtures("decoder")
@pytest.mark.parametrize(
    "data, match",
    [
        (b"", "zero bytes"),
        (b"not an image at all", "cannot identify image file"),
        (make.jpeg(1, 200, 200)[:1500], "truncated"),
        (make.png(1).getvalue()[:200], "truncated|broken"),
        (b"\xff\xd8\xff\xe0", "cannot identify|truncated"),
    ],
    ids=["empty", "text", "jpeg", "png", "header"],
)
def test_an_unreadable_image_is_refused_with_its_fault(data, match):
    with pytest.raises(decode.UnreadableImage, match=match) as caught:
        decode.decode(data)
    assert "BytesIO" not in str(caught.value)


@pytest.mark.usefixtures("decoder")
@hypothesis.settings(
    deadline=None,
    max_examples=60,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
@hypothesis.given(st.integers(2, 900), st.binary(min_size=1, max_size=20))
def test_a_damaged_image_gives_pixels_or_one_type_of_error(position, junk):
    data = make.jpeg(1, 60, 60)
    data = data[:position] + junk + data[position + len(junk) :]
    with contextlib.suppress(decode.UnreadableImage):
        assert decode.decode(data).shape[2] == 3


def test_paths_bytes_and_arrays_are_read(tmp_path):
    data = make.jpeg(5)
    path = make.put(tmp_path / "猫 é.jpg", data)
    assert (decode.read(path) == decode.read(data)).all()
    array = np.zeros((3, 3, 1), np.uint8)
    assert decode.read(array) is array
    with pytest.raises(decode.UnreadableImage, match="No such file"):
        decode.read(tmp_path / "nothing.jpg")
    with pytest.raises(decode.UnreadableImage, match="Is a directory"):
        decode.read(tmp_path)
