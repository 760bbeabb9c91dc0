"""A data set that needs no download: characters are classes, typefaces are instances.

The fonts come with matplotlib (DejaVu and STIX, under free licenses). The list of characters
contains what all faces have, except look-alikes after centering: for instance one of Latin, Greek
and Cyrillic A, one of C and c, one of O, o and Θ. The most similar remaining pairs are Φ and Ф, I
and l (a cosine similarity of 0.89 over all faces). The list is written out, so that the classes do
not depend on the version of a font library.
"""

import functools
import importlib.util
import pathlib
import unicodedata

import numpy as np
from PIL import ImageFont

from dmljax.data.transforms.operations import distort

SIZE = 32
_EM = 22  # pixels of the em square, so that the widest glyph just fits
# Part of the data set: it must not change if the defaults of `distort` do.
_DISTORTION = distort(
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
    """Class names: the character and its Unicode name."""
    return tuple(f"{c} {unicodedata.name(c).lower()}" for c in characters)


@functools.cache
def font(face: str, size: int) -> ImageFont.FreeTypeFont:
    """Returns a font of matplotlib by the name of its file, `size` pixels of the em square high."""
    # Importing matplotlib would take longer than the rendering, so only look up its folder.
    package = importlib.util.find_spec("matplotlib")
    if package is None or not package.submodule_search_locations:
        raise FileNotFoundError("the fonts of matplotlib are missing: pip install matplotlib")
    folder = pathlib.Path(package.submodule_search_locations[0]) / "mpl-data" / "fonts" / "ttf"
    path = folder / f"{face}.ttf"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: reinstall matplotlib")
    return ImageFont.truetype(str(path), size, layout_engine=ImageFont.Layout.BASIC)


def _draw(character: str, face: str) -> np.ndarray:
    """Draws white on black, with a centered bounding box, `uint8 [32 32 1]`."""
    ink = font(face, _EM).getmask(character, mode="L")
    width, height = ink.size
    top, left = (SIZE - height) // 2, (SIZE - width) // 2
    canvas = np.zeros((SIZE, SIZE, 1), np.uint8)
    pixels = np.frombuffer(bytes(ink), np.uint8).reshape(height, width, 1)
    canvas[top : top + height, left : left + width] = pixels
    return canvas


@functools.lru_cache(maxsize=2)
def images(characters: str) -> np.ndarray:
    """Renders all faces of each character in order, `uint8 [n 32 32 1]`, read-only.

    Each image has its own fixed distortion, seeded by its code point and face. So an image does not
    depend on the other characters or their order.
    """
    out = np.empty((len(characters) * len(FACES), SIZE, SIZE, 1), np.uint8)
    for i, character in enumerate(characters):
        drawings = np.stack([_draw(character, face) for face in FACES])
        bits = [np.random.Philox(key=[ord(character), face]) for face in range(len(FACES))]
        rngs = [np.random.Generator(b) for b in bits]
        rows = slice(i * len(FACES), (i + 1) * len(FACES))
        out[rows] = _DISTORTION.batch(drawings, rngs)
    out.setflags(write=False)
    return out
