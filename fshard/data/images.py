"""Folders of images as map-style datasets: the class of an image is the name of its sub-folder."""

from __future__ import annotations

import importlib
import os
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fshard._core.files.io import StrPath
from fshard.errors import checked, fail

# The only formats that are read: for others Pillow starts programs that execute the file (Ghostscript for PostScript).
_FORMATS = {".bmp": "BMP", ".gif": "GIF", ".jpeg": "JPEG", ".jpg": "JPEG", ".pgm": "PPM", ".png": "PNG", ".ppm": "PPM",
            ".tif": "TIFF", ".tiff": "TIFF", ".webp": "WEBP"}  # fmt: skip
_SUFFIXES = tuple(_FORMATS)


@dataclass(frozen=True, eq=False, repr=False)
class ImageFolder:
    """A map-style dataset, made by `image_folder`: `images[i]` is (uint8 [C, H, W], label).

    Attributes: `classes`, the names of the labels; `files`, in the order of the dataset; `labels`, of each file.

    >>> folder = image_folder("photos", size=(4, 4))
    >>> folder.classes, folder.labels, len(folder)
    (('cat', 'dog'), (0, 0, 1), 3)
    """

    path: Path
    classes: tuple[str, ...]
    files: tuple[str, ...]
    labels: tuple[int, ...]
    size: tuple[int, int] | None
    mode: str

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        """Decode one image of the format that its suffix names.

        Raises ShardingError, with its path, if it is of another format, cannot be read or has more than 8 bits.
        """
        path = self.path / self.files[i]
        pil, named = _pillow(), _FORMATS[Path(self.files[i]).suffix.lower()]
        try:
            with pil.open(path, formats=[named]) as image:
                deep = image.mode if image.mode in ("I", "F") or image.mode.startswith("I;") else ""
                converted = image.convert(self.mode)
        except Exception as e:  # Pillow raises errors of many kinds for files that are damaged
            if (actual := _format_of(pil, path)) not in ("", named):
                raise fail(f"image_folder: {path} is of the format {actual}, and its suffix names {named}",
                           fix="give it the suffix of its format, or write it again") from e  # fmt: skip
            fix = "write it again, or remove it"
            raise fail(f"image_folder: {path} cannot be read as an image", str(e), fix=fix) from e
        if deep:  # Pillow would make all pixels above 255 white
            raise fail(f"image_folder: {path} has pixels of more than 8 bits, Pillow's mode {deep!r}",
                       fix="scale them to 0 to 255, and write it with 8 bits")  # fmt: skip
        pixels = np.array(self._resize(converted))
        return torch.from_numpy(pixels).view(*pixels.shape[:2], -1).permute(2, 0, 1).contiguous(), self.labels[i]

    def _resize(self, image: Any) -> Any:
        """Scale an image to cover `size`, and cut its middle out."""
        if self.size is None:
            return image
        (height, width), (w, h) = self.size, image.size
        scale = max(height / h, width / w)
        used_w, used_h = min(w, width / scale), min(h, height / scale)  # rounded, a quotient may be above the size
        left, top = (w - used_w) / 2, (h - used_h) / 2
        box = (left, top, left + used_w, top + used_h)
        bilinear = 2  # Pillow's number of the filter for photographs in torchvision's ImageFolder recipes
        return image.resize((width, height), bilinear, box=box)

    def __repr__(self) -> str:
        return f"ImageFolder({self.path}: {len(self)} images of {len(self.classes)} classes)"


@checked
def image_folder(path: StrPath, *, size: tuple[int, int] | None = None, mode: str = "RGB") -> ImageFolder:
    """Return the images of a folder as a dataset of (uint8 [C, H, W], label); they are decoded when asked for.

    Each sub-folder is a class, and may contain folders. Classes, and the files of each, are in the order of their
    names. Names that begin with a dot are left out, and so are files without the suffix of an image. Links to folders
    are followed. An image is read in the format that its suffix names.

    Args:
        size: (H, W) of every image: it is scaled to cover that, and its middle is cut out. Without it each image has
            the size of its file, and a batch needs equal ones.
        mode: Pillow's: "RGB", 3 channels, or "L", 1 channel of grey.

    >>> images = image_folder("photos", size=(8, 8))
    >>> images, images.classes
    (ImageFolder(photos: 3 images of 2 classes), ('cat', 'dog'))
    >>> pixels, label = images[2]
    >>> pixels.shape, images.classes[label]
    (torch.Size([3, 8, 8]), 'dog')

    Raises ShardingError for a folder without classes, a class without images, a folder that cannot be read, a link to
    nothing, and a link to a folder that contains it. Reading an image raises one if it cannot be read, has another
    format than its suffix names, or has more than 8 bits.

    Source: torchvision's `ImageFolder`, for the layout.
    """
    root = Path(path)
    if mode not in ("RGB", "L"):
        raise fail(f"image_folder: mode={mode!r}", fix="'RGB' or 'L'")
    if size is not None and min(size) < 1:
        raise fail(f"image_folder: size={size}", fix="(height, width), both 1 or more")
    if not root.is_dir():
        raise fail(f"image_folder: {root} is not a folder", fix="a folder with a sub-folder of images for each class")
    _pillow()
    folders = {d.name: Path(d) for d in _entries(root) if d.is_dir()}
    classes = sorted(folders)
    if not classes:
        raise fail(f"image_folder: {root} has no sub-folders", fix="one sub-folder for the images of each class")
    files = [sorted(_images(root, folders[name], {_identity(root)})) for name in classes]
    if empty := [name for name, found in zip(classes, files, strict=True) if not found]:
        raise fail(f"image_folder: {len(empty)} of the {len(classes)} classes in {root} have no images",
                   ", ".join(empty[:8]) + ", ..." * (len(empty) > 8), f"suffixes of images: {' '.join(_SUFFIXES)}",
                   fix="remove these folders, or fill them")  # fmt: skip
    labels = tuple(label for label, found in enumerate(files) for _ in found)
    return ImageFolder(root, tuple(classes), tuple(f for found in files for f in found), labels, size, mode)


def _images(root: Path, folder: Path, above: Set[tuple[int, int]]) -> list[str]:
    """Return the images below a folder, as paths relative to `root`; `above` are the folders on the path to it."""
    me = _identity(folder)
    if me in above:
        raise fail(f"image_folder: {folder} is a link to a folder that it is in", str(folder.resolve()),
                   fix="remove the link: each image would be found again and again")  # fmt: skip
    found = []
    for entry in _entries(folder):
        if entry.is_dir():
            found += _images(root, Path(entry), {*above, me})
        elif entry.name.lower().endswith(_SUFFIXES):
            found.append(Path(entry).relative_to(root).as_posix())
    return found


def _identity(folder: Path) -> tuple[int, int]:
    """Return a folder's device and inode, which are the same for all paths to it."""
    info = folder.stat()
    return info.st_dev, info.st_ino


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """Return the entries of a folder that are not hidden.

    Raises ShardingError for an entry that cannot be read: a rank that left it out would have another dataset.
    """
    try:
        with os.scandir(folder) as entries:
            shown = [entry for entry in entries if not entry.name.startswith(".")]
    except OSError as e:
        raise fail(f"image_folder: {e.filename} cannot be read", str(e.strerror)) from e
    for link in (entry for entry in shown if entry.is_symlink()):
        try:
            link.stat()
        except OSError as e:
            raise fail(f"image_folder: {link.path} is a link to {os.readlink(link.path)}, which cannot be read",
                       str(e.strerror), fix="remove the link, or correct it") from e  # fmt: skip
    return shown


def _format_of(pil: Any, path: Path) -> str:
    """Return the format of a file, one of `_FORMATS`; "" if it has none of them."""
    try:
        with pil.open(path, formats=sorted(set(_FORMATS.values()))) as image:
            return str(image.format)
    except Exception:
        return ""


def _pillow() -> Any:
    try:
        return importlib.import_module("PIL.Image")
    except ImportError as e:
        raise fail("image_folder: needs Pillow, which is not installed", fix="pip install 'fshard[images]'") from e
