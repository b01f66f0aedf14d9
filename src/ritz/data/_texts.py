"""Texts as tokens on a device, cut into segments for truncated back-propagation; text corpora."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import final

import numpy as np
import torch
from torch import Tensor

from ritz._core.checks import check_count
from ritz.data._files import DATASETS, DataError, locate, read_whole
from ritz.data._images import Epoch, Samples

LENGTH = 70  # tokens per segment, as in AWD-LSTM


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TextSplit:
    """A text as tokens.

    Attributes:
        tokens: Indices into the vocabulary, ``(n,)``, int64.
        length: Default number of tokens per segment.
        consecutive: Whether a recurrent model passes its state on from segment to segment, in
            training and evaluation, or starts each segment with a new state.
    """

    tokens: Tensor
    length: int = LENGTH
    consecutive: bool = True

    def __post_init__(self) -> None:
        check_count("length", self.length)

    @property
    def device(self) -> torch.device:
        """Device that stores the tokens."""
        return self.tokens.device

    def to(self, device: torch.device | str) -> "TextSplit":
        """Return the text on another device."""
        return replace(self, tokens=self.tokens.to(device))

    def batches(
        self,
        batch_size: int,
        *,
        length: int | None = None,
        variable: bool = False,
        generator: torch.Generator | None = None,
    ) -> Epoch:
        r"""Return one epoch as a sequence of ``(inputs, targets)``, both ``(batch_size, length)``.

        The text is cut into ``batch_size`` streams of :math:`m = \lfloor n / b \rfloor` tokens,
        which are read in parallel: row ``i`` of a segment continues row ``i`` of the segment
        before, so that a recurrent state can be passed on. The last segment may be shorter. Both
        tensors are views, and ``epoch[k:]`` is the rest of an interrupted epoch.

        Args:
            batch_size: :math:`b`, the number of streams.
            length: Tokens per segment. Defaults to that of the split.
            variable: Draw lengths as in AWD-LSTM: normal with standard deviation 5 and mean
                ``length``, or half of it with probability 0.05, and at least 5.
            generator: Source of the lengths. Nothing else is random; a text is never shuffled.

        References:
            Merity, Keskar and Socher, Regularizing and Optimizing LSTM Language Models, 2017,
            section 5.
        """
        batch_size = check_count("batch_size", batch_size)
        length = self.length if length is None else length
        length = check_count("length", length)
        size = len(self.tokens) // batch_size
        if size < 2:
            raise ValueError(
                f"batch_size must be at most half of the {len(self.tokens)} tokens of the text, "
                f"got {batch_size}"
            )
        if variable and generator is None:
            raise ValueError("variable needs a generator to draw lengths from, got None")
        # Tokens that do not fill a last column of the streams are dropped.
        streams = self.tokens[: size * batch_size].view(batch_size, size)
        total = size - 1  # the last token of a stream is only a target
        lengths = _lengths(total, length, generator) if variable and generator else None
        starts = accumulate(lengths, initial=0) if lengths else range(0, total, length)
        bounds = tuple(pairwise([*(at for at in starts if at < total), total]))

        def pair(positions: slice) -> Samples:
            # Targets are one token ahead.
            ahead = slice(positions.start + 1, positions.stop + 1)
            return streams[:, positions], streams[:, ahead]

        return Epoch(bounds=bounds, pair=pair, consecutive=self.consecutive)


def _lengths(total: int, length: int, generator: torch.Generator) -> list[int]:
    count, device = total // 5 + 1, generator.device  # no segment but the last is shorter than 5
    halved = torch.rand(count, generator=generator, device=device) < 0.05
    mean = torch.where(halved, length / 2, float(length))
    lengths = mean + 5.0 * torch.randn(count, generator=generator, device=device)
    return lengths.clamp(min=5).int().tolist()


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TextData:
    """A text in three parts and its vocabulary.

    Attributes:
        name: Name of the data set.
        train: Training text.
        validation: Validation text.
        test: Test text.
        vocabulary: The word or character of each token.
    """

    name: str
    train: TextSplit
    validation: TextSplit
    test: TextSplit
    vocabulary: tuple[str, ...]

    @property
    def num_classes(self) -> int:
        """Number of different tokens."""
        return len(self.vocabulary)

    def to(self, device: torch.device | str) -> "TextData":
        """Return the data on another device."""
        train, validation, test = (s.to(device) for s in (self.train, self.validation, self.test))
        return replace(self, train=train, validation=validation, test=test)


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
