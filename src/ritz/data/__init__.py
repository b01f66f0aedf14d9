"""Data sets by name, read from local files: images as bytes on a device, texts as tokens."""

from ritz.data import _cifar, _image_sets, _text_sets  # noqa: F401  (they register readers)
from ritz.data._catalogue import available, describe, load
from ritz.data._files import DataError
from ritz.data._images import Augmentation, ImageData, Split
from ritz.data._texts import TextData, TextSplit

__all__ = [
    "Augmentation",
    "DataError",
    "ImageData",
    "Split",
    "TextData",
    "TextSplit",
    "available",
    "describe",
    "load",
]
