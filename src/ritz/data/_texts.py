"""``TextData``: texts as tokens on a device, cut into segments for truncated back-propagation."""

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import final

import torch
from torch import Tensor

from ritz._core.checks import check_count
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

    def __repr__(self) -> str:
        return f"TextSplit({len(self.tokens):,} tokens, segments of {self.length}, {self.device})"

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

    def __repr__(self) -> str:
        splits = {"train": self.train, "validation": self.validation, "test": self.test}
        sizes = ", ".join(f"{name} {len(split.tokens):,}" for name, split in splits.items())
        return (
            f"TextData({self.name}, vocabulary of {self.num_classes:,}, tokens: {sizes}, "
            f"{self.train.device})"
        )

    @property
    def num_classes(self) -> int:
        """Number of different tokens."""
        return len(self.vocabulary)

    def to(self, device: torch.device | str) -> "TextData":
        """Return the data on another device."""
        train, validation, test = (s.to(device) for s in (self.train, self.validation, self.test))
        return replace(self, train=train, validation=validation, test=test)
