"""The set that needs no download: characters are classes, type faces are instances.

The fonts are those that matplotlib ships (DejaVu and STIX, free licences). A character is in when
all faces have it and nothing else in the list looks like it once size and position are taken away:
of Latin, Greek and Cyrillic A one stays, of C and c, O, o and Θ as well. The nearest that are left
are Φ and Ф, I and l (a cosine of 0.89 over all faces; more than that in single ones). The list is
written out, so that the classes do not depend on the version of a font library.
"""

from __future__ import annotations

import functools
import importlib.util
import pathlib
import unicodedata

import numpy as np
from PIL import ImageFont

from dmljax.data.transforms.distortion import distort_batch

__all__ = ["CHARACTERS", "FACES", "SIZE", "images", "names"]

SIZE = 32
_EM = 22  # pixels of the em square: the widest glyph then just fits
# Part of the data set: it must not change if the defaults of `distort` do.
_DISTORTION = dict(
    rotation=15.0,
    shear=0.25,
    scale=(0.75, 1.15),
    shift=3.0,
    invert=0.5,
    noise=20.0,
    outside="median",
)
_STYLES = ("", "-Oblique", "-Bold", "-BoldOblique")
FACES = (
    *(f"DejaVuSans{style}" for style in _STYLES),
    *(f"DejaVuSansMono{style}" for style in _STYLES),
    *(f"DejaVuSerif{style}" for style in ("", "-Italic", "-Bold", "-BoldItalic")),
    *(f"STIXGeneral{style}" for style in ("", "Italic", "Bol", "BolIta")),
)
CHARACTERS = (
    "!#$%&0123456789?@ABCDEFGHIJKLMNOPQRSTUVWXYZabdefghjklmnqrtuy¢£¤¥§±µ¶ÀÆÇÈÌÏÑÒ×ØÙÝÞßàåæçèëìíîïð"
    "ñùýþāĄąĆćĎđĒĘęĜĝĢĤĥĮĴĶķĹĺĻļľŁŅņŊŌŒœŔŕŖŚśŞŤťŪūůŲųŴŵŹźƈƐƒƕƛƞƠƫƭƯưƺƾǂǼǽǾǿȷɐɑɒɓɔɕɖɗɘəɚɜɝɞɟɠɡɣɤɥ"
    "ɧɨɩɫɬɭɮɯɰɱɲɳɵɶɷɸɹɺɻɼɽɾɿʁʂʃʄʅʆʇʈʉʊʋʌʍʎʐʑʒʓʔʕʖʗʘʚʝʞʠʣʤʥʦʧʨΈΉΊΌΎΔΞΣΦΨΩάέήίαβγδζκλνξπρςστυφχω"
    "ϊϋώϐϑϒϖϘϚϛϝϞϟϠϡϰϵЂЃЉЊЋЌЎЏГДЖЛУФЦЧШЩЪЫЬЭЮЯбфхђѓћѢҐ†‡€∂ﬁ"
)


def names(characters: str) -> tuple[str, ...]:
    """Class names: the character and what Unicode calls it."""
    return tuple(f"{c} {unicodedata.name(c).lower()}" for c in characters)


@functools.cache
def _font(face: str) -> ImageFont.FreeTypeFont:
    # The folder is found without importing matplotlib, which takes longer than the rendering.
    package = importlib.util.find_spec("matplotlib")
    if package is None or not package.submodule_search_locations:
        raise FileNotFoundError("glyphs are drawn with matplotlib's fonts: pip install matplotlib")
    folder = pathlib.Path(package.submodule_search_locations[0]) / "mpl-data" / "fonts" / "ttf"
    path = folder / f"{face}.ttf"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: reinstall matplotlib, whose fonts glyphs uses")
    return ImageFont.truetype(str(path), _EM, layout_engine=ImageFont.Layout.BASIC)


def _draw(character: str, face: str) -> np.ndarray:
    """White on black, centred by its ink, `uint8 [32 32 1]`."""
    ink = _font(face).getmask(character, mode="L")
    width, height = ink.size
    top, left = (SIZE - height) // 2, (SIZE - width) // 2
    canvas = np.zeros((SIZE, SIZE, 1), np.uint8)
    pixels = np.frombuffer(bytes(ink), np.uint8).reshape(height, width, 1)
    canvas[top : top + height, left : left + width] = pixels
    return canvas


@functools.lru_cache(maxsize=2)
def images(characters: str) -> np.ndarray:
    """`uint8 [n 32 32 1]`, the faces of one character after another. Read-only.

    Each image has its own fixed distortion, drawn from its code point and its face: rendering other
    characters, or in another order, changes nothing.
    """
    pictures = np.empty((len(characters) * len(FACES), SIZE, SIZE, 1), np.uint8)
    for i, character in enumerate(characters):
        drawn = np.stack([_draw(character, face) for face in FACES])
        keys = [np.random.Philox(key=[ord(character), j]) for j in range(len(FACES))]
        rngs = [np.random.Generator(key) for key in keys]
        pictures[i * len(FACES) : (i + 1) * len(FACES)] = distort_batch(drawn, rngs, **_DISTORTION)
    pictures.setflags(write=False)
    return pictures
