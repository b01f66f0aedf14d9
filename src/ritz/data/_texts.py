"""Text as tokens on a device, cut into segments for truncated back-propagation."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final, overload

import torch
from torch import Tensor

from ritz._core.checks import check_count

Segment = tuple[Tensor, Tensor]
LENGTH = 70  # tokens a segment, as in AWD-LSTM
_LEAST, _SPREAD, _HALVED = 5, 5.0, 0.05  # of segments of random length, as in AWD-LSTM


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Segments(Sequence[Segment]):
    """A sequence of pairs ``(inputs, targets)``, targets being one token ahead.

    Attributes:
        streams: Contiguous pieces of the text, one a row, of shape ``(batch_size, m)``.
        bounds: First and one past the last token of each segment in every row.
        consecutive: Whether a recurrent state is to be handed on from segment to segment.
    """

    streams: Tensor
    bounds: tuple[tuple[int, int], ...]
    consecutive: bool = True

    def __len__(self) -> int:
        return len(self.bounds)

    @overload
    def __getitem__(self, index: int) -> Segment: ...
    @overload
    def __getitem__(self, index: slice) -> "Segments": ...
    def __getitem__(self, index: int | slice) -> "Segment | Segments":
        if isinstance(index, slice):
            return replace(self, bounds=self.bounds[index])
        start, stop = self.bounds[index]
        return self.streams[:, start:stop], self.streams[:, start + 1 : stop + 1]


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TextSplit:
    """A text.

    Attributes:
        tokens: Numbers in the vocabulary, of shape ``(n,)``, int64.
        length: Tokens a segment, unless :meth:`batches` is told otherwise.
        consecutive: Whether a model with a state is to hand it on from segment to segment, in
            training and evaluation, or to begin each anew.
    """

    tokens: Tensor
    length: int = LENGTH
    consecutive: bool = True

    def __post_init__(self) -> None:
        check_count("length", self.length)

    @property
    def device(self) -> torch.device:
        """Where the tokens are held."""
        return self.tokens.device

    def to(self, device: torch.device | str) -> "TextSplit":
        """Return the text held on a device."""
        return replace(self, tokens=self.tokens.to(device))

    def batches(
        self,
        batch_size: int,
        *,
        length: int | None = None,
        variable: bool = False,
        generator: torch.Generator | None = None,
    ) -> Segments:
        r"""Return one epoch as a sequence of ``(inputs, targets)``, both ``(batch_size, length)``.

        The text is cut into ``batch_size`` streams of :math:`m = \lfloor n / b \rfloor` tokens,
        which are read side by side: row ``i`` of a segment goes on where row ``i`` of the one
        before stopped, so that a recurrent state can be handed on. The last segment may be
        shorter. Both tensors are views; ``epoch[k:]`` is the rest of an interrupted epoch.

        Args:
            batch_size: :math:`b`, the number of streams.
            length: Tokens a segment; that of the split by default.
            variable: Whether lengths are drawn as AWD-LSTM does: normal with standard deviation 5
                about ``length``, or about half of it once in twenty times, and never below 5.
            generator: Draws them. Nothing else about a text is random: it is never shuffled.

        References:
            Merity, Keskar and Socher, Regularizing and Optimizing LSTM Language Models, 2017,
            section 5.
        """
        check_count("batch_size", batch_size)
        length = self.length if length is None else length
        check_count("length", length)
        size = len(self.tokens) // batch_size
        if size < 2:
            raise ValueError(
                f"batch_size must leave every stream two of {len(self.tokens)} tokens, "
                f"got {batch_size}"
            )
        if variable and generator is None:
            raise ValueError("variable needs a generator to draw lengths from, got None")
        streams = self.tokens[: size * batch_size].view(batch_size, size)
        lengths = _lengths(size - 1, length, generator) if variable and generator else None
        bounds = _bounds(size - 1, length, lengths)
        return Segments(streams=streams, bounds=bounds, consecutive=self.consecutive)


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TextData:
    """A text in three parts and its vocabulary.

    Attributes:
        name: The name it is loaded by.
        train: What to train on.
        validation: What to choose by.
        test: What to test on.
        vocabulary: What each number stands for: words, or characters.
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
        """Return the data held on a device."""
        return TextData(
            name=self.name,
            train=self.train.to(device),
            validation=self.validation.to(device),
            test=self.test.to(device),
            vocabulary=self.vocabulary,
        )


def _lengths(total: int, length: int, generator: torch.Generator) -> list[int]:
    where = {"generator": generator, "device": generator.device}
    count = total // _LEAST + 1  # no segment but the last is shorter
    halved = torch.rand(count, **where) < _HALVED  # type: ignore[call-overload]
    centre = torch.where(halved, length / 2, float(length))
    drawn = centre + _SPREAD * torch.randn(count, **where)  # type: ignore[call-overload]
    return [int(size) for size in drawn.clamp(min=_LEAST).tolist()]


def _bounds(total: int, length: int, lengths: list[int] | None) -> tuple[tuple[int, int], ...]:
    if lengths is None:
        return tuple((at, min(at + length, total)) for at in range(0, total, length))
    bounds, at = list[tuple[int, int]](), 0
    for size in lengths:
        if at >= total:
            break
        bounds.append((at, min(at + size, total)))
        at += size
    return tuple(bounds)
