"""Readers of texts: Penn Treebank and WikiText-2 as words, any other text as characters."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ritz.data._catalogue import DATASETS
from ritz.data._files import DataError, locate, read_whole
from ritz.data._texts import LENGTH, TextData, TextSplit


def _text_data(name: str, parts: Sequence[Tensor], words: Iterable[str], length: int) -> TextData:
    texts = (TextSplit(tokens=tokens, length=length) for tokens in parts)
    splits = dict(zip(("train", "validation", "test"), texts, strict=True))
    return TextData(name=name, vocabulary=tuple(words), **splits)


# ------------------------------------------------------------------------------------------
# Penn Treebank and WikiText-2 as words, from their standard text files, compressed or not.


@DATASETS.register("ptb")
def ptb(root: Path | None, *, length: int = LENGTH) -> TextData:
    """Penn Treebank: 929,589 training, 73,760 validation, 82,430 test words; vocabulary 10,000."""
    files = [f"ptb.{part}.txt" for part in ("train", "valid", "test")]
    folders = ("ptb", "penn", "simple-examples/data", ".")
    hint = "take data/ptb.*.txt of https://www.fit.vutbr.cz/~imikolov/rnnlm/simple-examples.tgz"
    return _words_data("ptb", locate("ptb", files, root=root, folders=folders, hint=hint), length)


@DATASETS.register("wikitext-2")
def wikitext_2(root: Path | None, *, length: int = LENGTH) -> TextData:
    """WikiText-2: 2,088,628 training, 217,646 validation, 245,569 test words; vocabulary 33,278."""
    files = [f"wiki.{part}.tokens" for part in ("train", "valid", "test")]
    hint = "unpack the published word-level archive wikitext-2-v1.zip"
    paths = locate("wikitext-2", files, root=root, folders=("wikitext-2", "."), hint=hint)
    return _words_data("wikitext-2", paths, length)


def _words_data(name: str, paths: list[Path], length: int) -> TextData:
    # Every line ends with the word <eos>, also an empty line and a last one without "\n".
    texts = [_read_text(path).removesuffix("\n") + "\n" for path in paths]
    words = [text.replace("\n", " <eos> ").split() for text in texts]
    numbers = {word: number for number, word in enumerate(dict.fromkeys(words[0]))}
    parts = [_tokens(path, part, numbers) for path, part in zip(paths, words, strict=True)]
    return _text_data(name, parts, numbers, length)


def _tokens(path: Path, words: list[str], numbers: dict[str, int]) -> Tensor:
    # Words that the training text does not have become <unk>, if it has that.
    tokens = [numbers.get(word, numbers.get("<unk>", -1)) for word in words]
    if -1 in tokens:
        word = words[tokens.index(-1)]
        raise DataError(
            f"{path} has the word {word[:40]!r}, but neither it nor <unk> is in the training text"
        )
    return torch.tensor(tokens, dtype=torch.int64)


def _read_text(path: Path) -> str:
    try:
        text = read_whole(path, limit=2**31).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not a text in UTF-8: {error}") from error
    if not text:
        raise DataError(f"{path} is empty")
    return text


# ------------------------------------------------------------------------------------------
# Any text as characters.


@DATASETS.register("text")
def text(root: Path | None, *, file: str, length: int = LENGTH) -> TextData:
    """Characters of any text file: 90 % for training, then 5 % each for validation and test."""
    path = Path(file).expanduser()
    others, hint = [Path.cwd()], "file= (--set-data file=PATH) is a text in UTF-8, plain or gzip"
    # A path that says where it is, as opposed to a name in a folder of data sets.
    if path.is_absolute() or file.startswith(("./", "../")):
        root, file, others = None, path.name, [path.absolute().parent]
    (path,) = locate("text", [file], root=root, folders=("text", "."), hint=hint, others=others)
    # In UTF-32 every character is one integer, so NumPy counts the alphabet of large texts fast.
    codes = np.frombuffer(_read_text(path).encode("utf-32-le"), np.uint32)
    vocabulary, tokens = np.unique(codes, return_inverse=True)
    numbers = torch.from_numpy(tokens.astype(np.int64))
    cuts = [int(share * len(numbers)) for share in (0.9, 0.95)]
    if not 0 < cuts[0] < cuts[1] < len(numbers):
        raise DataError(
            f"{path} is too short for training, validation and test: {len(numbers)} characters"
        )
    return _text_data("text", numbers.tensor_split(cuts), map(chr, vocabulary), length)
