"""Images of characters, drawn from the fonts that Python packages bring: each character is a class, typefaces vary.

matplotlib has DejaVu, in three families of four styles. Three of these twelve typefaces, one of each family, are only
for testing. The package noto-cjk-sans-otc adds 20,976 Han and 11,172 Hangul characters in five regional typefaces,
one of them for testing; many of its characters look the same in all five.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .command import Refusal

Array = np.ndarray[Any, Any]
Face = tuple[Path, int]  # a file of fonts, and the number of one in it

SIZE = 32  # of an image, in pixels; a letter of 22 pixels is on row 24, in the middle
STYLES = {"Sans": "Oblique", "SansMono": "Oblique", "Serif": "Italic"}
HELD_OUT = ("DejaVuSans-Bold", "DejaVuSansMono-Oblique", "DejaVuSerif-Italic")
CJK_HELD_OUT = 4  # Hong Kong, of Japan, Korea, China, Taiwan, Hong Kong


class Glyphs(NamedTuple):
    """Images [N, 32, 32] uint8 and classes [N] int64, to train on and to test on, and a character of each class."""

    train: tuple[Array, Array]
    test: tuple[Array, Array]
    names: list[str]


def load(*, cjk: bool = False) -> Glyphs:
    """Draw all characters in all faces. No test image is among the training images; none is kept on disk."""
    try:
        fonts = Path(import_module("matplotlib").get_data_path()) / "fonts" / "ttf"
        noto = Path(import_module("noto_cjk_sans_otc").__path__[0]) / "NotoSansCJK-Regular.ttc" if cjk else None
    except ModuleNotFoundError as e:
        raise Refusal(f"the images are drawn from fonts of a package that is missing: pip install "
                      f"{str(e.name).replace('_', '-')}, or give --folder DIR") from None  # fmt: skip
    names = [f"DejaVu{family}{style}" for family, slanted in STYLES.items()
             for style in ("", "-Bold", f"-{slanted}", f"-Bold{slanted}")]  # fmt: skip
    faces = [(fonts / f"{name}.ttf", 0) for name in names]
    known = sorted(set.intersection(*map(characters, faces)))
    sets = [(known, faces, [name in HELD_OUT for name in names])]
    if noto is not None:
        known = sorted(c for c in characters((noto, 0)) if 0x4E00 <= c <= 0x9FFF or 0xAC00 <= c <= 0xD7A3)
        sets.append((known, [(noto, i) for i in range(5)], [i == CJK_HELD_OUT for i in range(5)]))
    codes, images, tests = [], [], []
    for chars, of, held_out in sets:
        codes += [np.tile(chars, len(of))]
        images += [draw(face, chars) for face in of]
        tests += [np.repeat(held_out, len(chars))]
    return merge(np.concatenate(codes), np.concatenate(images), np.concatenate(tests))


def characters(face: Face) -> set[int]:
    """Return the visible characters of a font."""
    font = import_module("matplotlib.ft2font").FT2Font(str(face[0]))
    return {c for c in font.get_charmap() if chr(c).isprintable() and not chr(c).isspace()}


def draw(face: Face, codes: Iterable[int]) -> Array:
    """Draw characters in one face: uint8 [N, 32, 32], white on black, all on the same line."""
    pillow = {name: import_module(f"PIL.{name}") for name in ("Image", "ImageDraw", "ImageFont")}
    font = pillow["ImageFont"].truetype(str(face[0]), 22, index=face[1])
    images = []
    for code in codes:
        image = pillow["Image"].new("L", (SIZE, SIZE))
        pillow["ImageDraw"].Draw(image).text((SIZE / 2, 24), chr(code), font=font, fill=255, anchor="ms")
        images.append(np.asarray(image))
    return np.stack(images)


def merge(codes: Array, images: Array, held_out: Array) -> Glyphs:
    """Give each class a number: characters that look the same in any face, A of Latin and of Greek, are one class.

    So no image has two classes. Characters without a visible pixel in some face are left out, and so is every test
    image that is equal to a training image: many symbols are not bold or slanted anywhere.
    """
    invisible = np.unique(codes[images.reshape(len(images), -1).max(1) == 0])
    keep = ~np.isin(codes, invisible)
    codes, images, held_out = codes[keep], images[keep], held_out[keep]
    alike: dict[bytes, list[int]] = {}
    for i, image in enumerate(images):
        alike.setdefault(image.tobytes(), []).append(i)
    root = groups(codes, alike.values())
    first = {r: i for i, r in enumerate(sorted(set(root.values())))}
    classes = np.array([first[root[c]] for c in codes.tolist()])
    test = np.sort([i for rows in alike.values() if held_out[rows].all() for i in rows]).astype(np.int64)
    return Glyphs((images[~held_out], classes[~held_out]), (images[test], classes[test]), [chr(r) for r in first])


def groups(codes: Array, alike: Iterable[Sequence[int]]) -> dict[int, int]:
    """Map each character to the first of its group: those linked by rows of `alike`, directly or by others."""
    first = {c: c for c in np.unique(codes).tolist()}
    linked = [codes[rows].tolist() for rows in alike if len(rows) > 1]
    before = None
    while first != before:
        before = dict(first)
        for chars in linked:
            first |= dict.fromkeys(chars, min(first[c] for c in chars))
    return first
