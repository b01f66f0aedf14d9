"""Data sets by name: images held as bytes on a device, and text as tokens; nothing downloads."""

# Imported for what they register.
from ritz.data import _cifar, _corpora, _digits, _folders, _imagenet32  # noqa: F401
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
