"""Text corpora: Penn Treebank and WikiText-2 as words, any text as characters."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ritz.data._catalogue import DATASETS
from ritz.data._files import DataError, locate, read_whole
from ritz.data._texts import LENGTH, TextData, TextSplit

# ------------------------------------------------------------------------------------------
# Penn Treebank and WikiText-2 as words, from their standard text files, packed by gzip or
# not.

LIMIT = 2**31  # bytes of one text
EOS, UNKNOWN = "<eos>", "<unk>"


@DATASETS.register("ptb")
def ptb(root: Path | None, *, length: int = LENGTH) -> TextData:
    """Penn Treebank: 929,589 / 73,760 / 82,430 words, 10,000 different ones."""
    files = [f"ptb.{part}.txt" for part in ("train", "valid", "test")]
    folders = ("ptb", "penn", "simple-examples/data", ".")
    hint = "take data/ptb.*.txt of https://www.fit.vutbr.cz/~imikolov/rnnlm/simple-examples.tgz"
    return _load("ptb", locate("ptb", files, root=root, folders=folders, hint=hint), length)


@DATASETS.register("wikitext-2")
def wikitext_2(root: Path | None, *, length: int = LENGTH) -> TextData:
    """WikiText-2: 2,088,628 / 217,646 / 245,569 words, 33,278 different ones."""
    files = [f"wiki.{part}.tokens" for part in ("train", "valid", "test")]
    hint = "take the word-level wikitext-2-v1.zip that WikiText is published as, and unpack it"
    paths = locate("wikitext-2", files, root=root, folders=("wikitext-2", "."), hint=hint)
    return _load("wikitext-2", paths, length)


def read_text(path: Path) -> str:
    """Return a file of UTF-8 text, plain or packed by gzip."""
    try:
        text = read_whole(path, limit=LIMIT).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not a text in UTF-8: {error}") from error
    if not text:
        raise DataError(f"{path} is empty")
    return text


def _load(name: str, paths: list[Path], length: int) -> TextData:
    texts = [_words(path) for path in paths]
    numbers = {word: number for number, word in enumerate(dict.fromkeys(texts[0]))}
    train, validation, test = (
        TextSplit(tokens=_tokens(path, words, numbers), length=length)
        for path, words in zip(paths, texts, strict=True)
    )
    return TextData(
        name=name, train=train, validation=validation, test=test, vocabulary=tuple(numbers)
    )


def _words(path: Path) -> list[str]:
    text = read_text(path)
    # A line ends in the word <eos>, an empty one too, and so does the last.
    text = text if text.endswith("\n") else f"{text}\n"
    return text.replace("\n", f" {EOS} ").split()


def _tokens(path: Path, words: list[str], numbers: dict[str, int]) -> Tensor:
    # What training never showed is the unknown word, where the text has one.
    tokens = [numbers.get(word, numbers.get(UNKNOWN, -1)) for word in words]
    if -1 in tokens:
        word = words[tokens.index(-1)]
        raise DataError(
            f"{path} has the word {word[:40]!r}, which the training text has not, nor {UNKNOWN}"
        )
    return torch.tensor(tokens, dtype=torch.int64)


# ------------------------------------------------------------------------------------------
# Any text as characters.

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
