"""Data sets by name: images held as bytes on a device, and text as tokens; nothing downloads."""

from ritz.data import characters, cifar, downsampled, embedded, folders, idx, words
from ritz.data.augmentation import Augmentation
from ritz.data.batching import Batches
from ritz.data.catalogue import available, describe, load
from ritz.data.images import ImageData, Split
from ritz.data.sources import DataError
from ritz.data.splitting import SPLIT_SEED, epoch_generator, held_out
from ritz.data.texts import Segments, TextData, TextSplit

__all__ = [
    "SPLIT_SEED",
    "Augmentation",
    "Batches",
    "DataError",
    "ImageData",
    "Segments",
    "Split",
    "TextData",
    "TextSplit",
    "available",
    "characters",
    "cifar",
    "describe",
    "downsampled",
    "embedded",
    "epoch_generator",
    "folders",
    "held_out",
    "idx",
    "load",
    "words",
]
