"""Any text as characters."""

from pathlib import Path

import numpy as np
import torch

from ritz.data.catalogue import DATASETS
from ritz.data.sources import DataError, locate
from ritz.data.texts import LENGTH, TextData, TextSplit
from ritz.data.words import read_text

_SHARES = (0.9, 0.95)  # of the text up to the end of training and of validation


@DATASETS.register("text")
def text(root: Path | None, *, file: str, length: int = LENGTH) -> TextData:
    """Characters of any text file: its first 90 % to train on, then 5 % each to choose and test."""
    path = _located(root, file)
    codes = np.frombuffer(read_text(path).encode("utf-32-le"), np.uint32)
    vocabulary, tokens = np.unique(codes, return_inverse=True)
    numbers = torch.from_numpy(tokens.astype(np.int64))
    cuts = [int(share * len(numbers)) for share in _SHARES]
    if not 0 < cuts[0] < cuts[1] < len(numbers):
        raise DataError(f"{path} is too short to be cut into three: {len(numbers)} characters")
    train, validation, test = (
        TextSplit(tokens=part, length=length) for part in numbers.tensor_split(cuts)
    )
    return TextData(
        name="text", train=train, validation=validation, test=test,
        vocabulary=tuple(map(chr, vocabulary.tolist())),
    )  # fmt: skip


def _located(root: Path | None, file: str) -> Path:
    """The file, in the folders of data sets or else in the current folder."""
    asked = Path(file).expanduser()
    whole = asked.is_absolute() or file.startswith(("./", "../"))  # which say where it is
    others = [asked.absolute().parent if whole else Path.cwd()]
    (path,) = locate(
        "text",
        [asked.name if whole else file],
        root=None if whole else root,
        folders=("text", "."),
        hint="file= names any text in UTF-8, plain or packed by gzip",
        others=others,
    )
    return path
