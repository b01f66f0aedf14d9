"""Language models: an LSTM with the regularisers of AWD-LSTM, and a GPT decoder."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from ritz._core.checks import check_count, check_range
from ritz.models._catalogue import draw_layer, fill, normal, register, uniform

# ------------------------------------------------------------------------------------------
# A recurrent language model with the regularisers of AWD-LSTM.

State = tuple[tuple[Tensor, Tensor], ...]

# torch's names for the weights of a layer, in the order of its kernel; the second is recurrent.
WEIGHTS = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")


@final
class LSTMLanguageModel(nn.Module):
    """Tokens through LSTM layers to the logits of the next token; see :func:`lstm`.

    Dropout is done by dropout layers alone, so that ``Risk(..., dropout="fixed")`` holds a mask
    for each batch in all four places: whole words (``embedding_drop``), the recurrent matrices
    (``weight_drops``), and features, with one mask for all positions (``drops``). A forward hook
    on ``drops[-1]`` sees the last activations before and after dropout (as ``(batch, features,
    length)``), of which activation penalties are made.
    """

    def __init__(
        self,
        vocabulary: int,
        *,
        width: int,
        hidden: int,
        depth: int,
        tied: bool,
        dropouts: tuple[float, float, float],
        embedding_dropout: float,
        weight_drop: float,
    ) -> None:
        super().__init__()
        self.sizes = (hidden,) * (depth - 1) + (width if tied else hidden,)
        self.embedding = nn.Embedding(vocabulary, width)
        pairs = pairwise((width, *self.sizes))
        self.layers = nn.ModuleList(nn.LSTM(*pair, batch_first=True) for pair in pairs)
        self.head = Head(vocabulary, None if tied else hidden)
        inputs, between, outputs = dropouts
        chances = (inputs,) + (between,) * (depth - 1) + (outputs,)
        self.drops = nn.ModuleList(_lstm_dropout(nn.Dropout1d, chance) for chance in chances)
        self.embedding_drop = _lstm_dropout(nn.Dropout1d, embedding_dropout)
        self.weight_drops = nn.ModuleList(
            _lstm_dropout(nn.Dropout, weight_drop) for _ in range(depth)
        )

    def forward(self, tokens: Tensor, state: State | None = None) -> Any:
        """Logits ``(batch, vocabulary, length)`` of the next token.

        Args:
            tokens: ``(batch, length)``.
            state: What an earlier call or :meth:`initial_state` returned. Without it sequences
                begin with zeros and the logits are returned alone; with it, ``(logits, state)``.
        """
        before = self.initial_state(len(tokens)) if state is None else state
        x, after = self._locked(0, self._embed(tokens)), []
        for index in range(len(self.layers)):
            x, last = self._recur(index, x, before[index])
            x = self._locked(index + 1, x)
            after.append(last)
        logits = self.head(x, self.embedding.weight).transpose(1, 2)
        return logits if state is None else (logits, tuple(after))

    def initial_state(self, batch: int) -> State:
        """Zeros for ``batch`` sequences."""
        like = self.embedding.weight
        return tuple(
            (like.new_zeros(1, batch, size), like.new_zeros(1, batch, size)) for size in self.sizes
        )

    def _embed(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embedding(tokens)
        if isinstance(self.embedding_drop, nn.Identity):
            return x
        # A word is dropped wherever it stands: words are the channels of one sample here.
        kept = self.embedding_drop(x.new_ones(1, self.embedding.num_embeddings, 1))
        embedded: Tensor = x * kept[0][tokens]
        return embedded

    def _locked(self, index: int, x: Tensor) -> Tensor:
        # Features as channels are dropped at all positions or at none.
        dropped: Tensor = self.drops[index](x.transpose(1, 2))
        return dropped.transpose(1, 2)

    def _recur(
        self, index: int, x: Tensor, state: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        weights: list[Tensor] = [getattr(self.layers[index], name) for name in WEIGHTS]
        weights[1] = self.weight_drops[index](weights[1])
        # The kernel itself: called with other weights, the layer moves its own to new memory on
        # CUDA, away from where a recorded graph reads them.
        with _compacted(on=x.is_cuda):
            x, h, c = torch.lstm(x, state, weights, True, 1, 0.0, self.training, False, True)
        return x, (h, c)


@final
class Head(nn.Module):
    """A linear map to the vocabulary: by a matrix of its own, or one that it is lent."""

    def __init__(self, vocabulary: int, features: int | None) -> None:
        super().__init__()
        own = None if features is None else nn.Parameter(torch.empty(vocabulary, features))
        self.weight: nn.Parameter | None
        self.register_parameter("weight", own)
        self.bias = nn.Parameter(torch.empty(vocabulary))

    def forward(self, x: Tensor, lent: Tensor) -> Tensor:
        """``(..., features)`` to ``(..., vocabulary)``."""
        return nn.functional.linear(x, lent if self.weight is None else self.weight, self.bias)


@draw_layer.register
def _(module: Head, generator: torch.Generator) -> None:
    if module.weight is not None:
        uniform(module.weight, 0.1, generator)
    fill(module.bias, 0.0)


@register("lstm")
def lstm(
    *,
    num_classes: int = 10_000,
    input_shape: tuple[int, ...] | None = None,
    width: int = 400,
    hidden: int = 1150,
    depth: int = 3,
    tied: bool = True,
    dropout: float = 0.4,
    input_dropout: float = 0.4,
    hidden_dropout: float = 0.25,
    embedding_dropout: float = 0.1,
    weight_drop: float = 0.5,
) -> LSTMLanguageModel:
    """AWD-LSTM: three layers, 24,221,600 parameters on Penn Treebank.

    The language model of Granziol et al. (2021), B.3, with the dropout its code prescribes for
    Penn Treebank. Embeddings are drawn from +-0.1, recurrent layers from +- one over the root of
    their size, the biases of the head are zero.

    Args:
        num_classes: Words in the vocabulary.
        input_shape: Ignored: sequences may have any length.
        width: Of the embedding.
        hidden: Of all layers but the last, which has ``width`` where the head is tied.
        depth: Number of layers.
        tied: Whether the embedding is the matrix of the head too (Inan et al., 2017).
        dropout: Of the features before the head, one mask for all positions (Gal and
            Ghahramani, 2016).
        input_dropout: Likewise, of the embedded words.
        hidden_dropout: Likewise, between layers.
        embedding_dropout: Of whole words, wherever they stand.
        weight_drop: Of the entries of the recurrent matrices, once for a sequence.

    Reference: Merity et al. (2018), *Regularizing and optimizing LSTM language models*.
    """
    counts = {"num_classes": num_classes, "width": width, "hidden": hidden, "depth": depth}
    for name, count in counts.items():
        check_count(name, count)
    chances = {
        "dropout": dropout, "input_dropout": input_dropout, "hidden_dropout": hidden_dropout,
        "embedding_dropout": embedding_dropout, "weight_drop": weight_drop,
    }  # fmt: skip
    for name, chance in chances.items():
        check_range(name, chance, low=0.0, high=1.0)
    return LSTMLanguageModel(
        num_classes, width=width, hidden=hidden, depth=depth, tied=tied,
        dropouts=(input_dropout, hidden_dropout, dropout),
        embedding_dropout=embedding_dropout, weight_drop=weight_drop,
    )  # fmt: skip


@contextmanager
def _compacted(*, on: bool) -> Iterator[None]:
    """Let cuDNN gather the weights of a layer at every call: dropped ones are new every time."""
    if not on:
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="RNN module weights are not part of single")
        yield


def _lstm_dropout(kind: type[nn.Dropout] | type[nn.Dropout1d], chance: float) -> nn.Module:
    return kind(chance) if chance else nn.Identity()


# ------------------------------------------------------------------------------------------
# A decoder of the GPT kind.


@final
class DecoderBlock(nn.Module):
    """Causal attention and a perceptron, each after a norm and around a shortcut."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop1, self.drop2 = _gpt_dropout(dropout), _gpt_dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, length, width)`` to the same."""
        x = x + self.drop1(self.out(self._attend(self.norm1(x))))
        mapped: Tensor = x + self.drop2(self.down(functional.gelu(self.up(self.norm2(x)))))
        return mapped

    def _attend(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind(0)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return mixed.transpose(1, 2).flatten(2)


@final
class GPT(nn.Module):
    """Tokens through decoder blocks to the logits of the next token; see :func:`gpt`."""

    def __init__(
        self,
        vocabulary: int,
        length: int,
        *,
        width: int,
        depth: int,
        heads: int,
        dropout: float,
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.drop = _gpt_dropout(dropout)
        self.blocks = nn.ModuleList(DecoderBlock(width, heads, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits ``(batch, vocabulary, length)`` of the next token, for tokens ``(batch, length)``.

        The head is the embedding of the tokens, transposed.
        """
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.drop(self.tokens(tokens) + self.places(places))
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.norm(x), self.tokens.weight).transpose(1, 2)


def draw_gpt(model: nn.Module, generator: torch.Generator) -> None:
    r"""Weights :math:`\mathcal{N}(0, 0.02^2)`, over :math:`\sqrt{2 d}` into shortcuts; biases 0."""
    depth = sum(isinstance(module, DecoderBlock) for module in model.modules())
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            inward = name.endswith((".out", ".down"))
            normal(module.weight, 0.02 * ((2 * depth) ** -0.5 if inward else 1.0), generator)
            fill(getattr(module, "bias", None), 0.0)
        else:
            draw_layer(module, generator)


@register("gpt", draw=draw_gpt)
def gpt(
    *,
    num_classes: int = 10_000,
    input_shape: tuple[int, ...] = (256,),
    width: int = 384,
    depth: int = 6,
    heads: int = 6,
    dropout: float = 0.0,
) -> GPT:
    """A decoder of the GPT-2 kind, by default six layers of 384; ``gpt2`` has 124,439,808.

    Norms come first, the head is tied to the embedding, attention is
    ``scaled_dot_product_attention``, first weights are those of GPT-2.

    Args:
        num_classes: Tokens in the vocabulary.
        input_shape: ``(length,)``, the longest sequence.
        width: Of the embedding; a multiple of ``heads``.
        depth: Number of blocks.
        heads: Number of attention heads.
        dropout: Of the embedded tokens and of what blocks add; attention itself drops nothing.

    Reference: Radford et al. (2019), *Language models are unsupervised multitask learners*.
    """
    if len(input_shape) != 1:
        raise ValueError(f"input_shape must be (length,), got {tuple(input_shape)}")
    counts = {"num_classes": num_classes, "input_shape": input_shape[0], "width": width,
              "depth": depth, "heads": heads}  # fmt: skip
    for name, count in counts.items():
        check_count(name, count)
    check_range("dropout", dropout, low=0.0, high=1.0)
    if width % heads:
        raise ValueError(f"width must be a multiple of heads ({heads}), got {width}")
    return GPT(num_classes, input_shape[0], width=width, depth=depth, heads=heads, dropout=dropout)


@register("gpt2", draw=draw_gpt)
def gpt2(
    *,
    num_classes: int = 50_257,
    input_shape: tuple[int, ...] = (1024,),
    width: int = 768,
    depth: int = 12,
    heads: int = 12,
    dropout: float = 0.0,
) -> GPT:
    """:func:`gpt` of the size of the small GPT-2: 124,439,808 parameters."""
    return gpt(
        num_classes=num_classes,
        input_shape=input_shape,
        width=width,
        depth=depth,
        heads=heads,
        dropout=dropout,
    )


def _gpt_dropout(chance: float) -> nn.Module:
    return nn.Dropout(chance) if chance else nn.Identity()
