"""Language models: an LSTM with the regularisers of AWD-LSTM, and a GPT decoder."""

import warnings
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from ritz.models._catalogue import Shape, dropout_layer, register
from ritz.models._initial_weights import draw_layer, fill, normal, uniform

# ------------------------------------------------------------------------------------------
# A recurrent language model with the regularisers of AWD-LSTM.

State = tuple[tuple[Tensor, Tensor], ...]


@register("lstm")
@final
class LSTMLanguageModel(nn.Module):
    """AWD-LSTM, a language model of LSTM layers: 24,221,600 parameters on Penn Treebank.

    The language model of Granziol et al. (2021), B.3, with the dropout that its code prescribes for
    Penn Treebank. Embeddings are drawn from +-0.1, recurrent layers from +- one over the root of
    their size, and the biases of the head are zero.

    Dropout is done by dropout layers only, so that ``Risk(..., dropout="fixed")`` fixes a mask per
    batch everywhere: for whole words (``embedding_drop``), for the recurrent matrices
    (``weight_drops``), and for features, with one mask for all positions (``drops``). The last of
    these, ``last_drop``, takes and returns the activations that ``fit(activation_penalty=...)``
    penalises, as ``(batch, features, length)``.

    Args:
        num_classes: Number of words in the vocabulary.
        input_shape: Ignored, since sequences may have any length.
        width: Size of the embedding.
        hidden: Size of all layers but the last, which has ``width`` if the head is tied.
        depth: Number of layers.
        tied: Use the embedding as the matrix of the head (Inan et al., 2017).
        dropout: Probability of dropout of the features before the head, with one mask for all
            positions (Gal and Ghahramani, 2016).
        input_dropout: The same, for the embedded words.
        hidden_dropout: The same, between layers.
        embedding_dropout: Probability of dropout of a word, at all its positions.
        weight_drop: Probability of dropout of the entries of the recurrent matrices, with one mask
            per sequence.

    Reference: Merity et al. (2018), *Regularizing and optimizing LSTM language models*.
    """

    def __init__(
        self,
        *,
        num_classes: int = 10_000,
        input_shape: Shape | None = None,
        width: int = 400,
        hidden: int = 1150,
        depth: int = 3,
        tied: bool = True,
        dropout: float = 0.4,
        input_dropout: float = 0.4,
        hidden_dropout: float = 0.25,
        embedding_dropout: float = 0.1,
        weight_drop: float = 0.5,
    ) -> None:
        super().__init__()
        self.sizes = (hidden,) * (depth - 1) + (width if tied else hidden,)
        self.embedding = nn.Embedding(num_classes, width)
        pairs = pairwise((width, *self.sizes))
        self.layers = nn.ModuleList(nn.LSTM(*pair, batch_first=True) for pair in pairs)
        self.head = Head(num_classes, None if tied else hidden)
        rates = (input_dropout,) + (hidden_dropout,) * (depth - 1) + (dropout,)
        self.drops = nn.ModuleList(dropout_layer(rate, nn.Dropout1d) for rate in rates)
        self.embedding_drop = dropout_layer(embedding_dropout, nn.Dropout1d)
        self.weight_drops = nn.ModuleList(dropout_layer(weight_drop) for _ in range(depth))

    def forward(self, tokens: Tensor, state: State | None = None) -> Any:
        """Logits ``(batch, vocabulary, length)`` of the next token, the axes of ``cross_entropy``.

        Args:
            tokens: ``(batch, length)``.
            state: The state that an earlier call or :meth:`initial_state` returned. With it,
                ``(logits, state)`` is returned. Without it, sequences begin with a state of zeros
                and only the logits are returned.
        """
        before = self.initial_state(len(tokens)) if state is None else state
        x, after = self._locked(0, self._embed(tokens)), []
        for index in range(len(self.layers)):
            x, last = self._recur(index, x, before[index])
            x = self._locked(index + 1, x)
            after.append(last)
        logits = self.head(x, self.embedding.weight).transpose(1, 2)
        return logits if state is None else (logits, tuple(after))

    @property
    def last_drop(self) -> nn.Module:
        """The dropout layer between the last activations and the head."""
        return self.drops[-1]

    def initial_state(self, batch: int) -> State:
        """Return a state of zeros for ``batch`` sequences."""
        like = self.embedding.weight
        return tuple(
            (like.new_zeros(1, batch, size), like.new_zeros(1, batch, size)) for size in self.sizes
        )

    def _embed(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embedding(tokens)
        if isinstance(self.embedding_drop, nn.Identity):
            return x
        # One mask over the vocabulary, as channels of one sample: a word is dropped everywhere.
        mask = self.embedding_drop(x.new_ones(1, self.embedding.num_embeddings, 1))
        embedded: Tensor = x * mask[0][tokens]
        return embedded

    def _locked(self, index: int, x: Tensor) -> Tensor:
        # Dropout1d drops channels, so that a feature is dropped at all positions or at none.
        dropped: Tensor = self.drops[index](x.transpose(1, 2))
        return dropped.transpose(1, 2)

    def _recur(
        self, index: int, x: Tensor, state: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        # In the order of the kernel; the second is the recurrent matrix.
        names = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
        weights: list[Tensor] = [getattr(self.layers[index], name) for name in names]
        weights[1] = self.weight_drops[index](weights[1])
        # The kernel, not the layer: called with other weights, the layer would move its own to new
        # memory on CUDA, away from where a recorded graph reads them.
        with warnings.catch_warnings() if x.is_cuda else nullcontext():
            if x.is_cuda:
                # cuDNN copies the weights at every call, since dropped ones are always new.
                warnings.filterwarnings("ignore", message="RNN module weights are not part of")
            x, h, c = torch.lstm(x, state, weights, True, 1, 0.0, self.training, False, True)
        return x, (h, c)


@final
class Head(nn.Module):
    """A linear map to the vocabulary, with its own matrix or a shared one."""

    def __init__(self, vocabulary: int, features: int | None) -> None:
        super().__init__()
        weight = None if features is None else nn.Parameter(torch.empty(vocabulary, features))
        self.weight: nn.Parameter | None
        self.register_parameter("weight", weight)
        self.bias = nn.Parameter(torch.empty(vocabulary))

    def forward(self, x: Tensor, shared: Tensor) -> Tensor:
        """``(..., features)`` to ``(..., vocabulary)``."""
        return functional.linear(x, shared if self.weight is None else self.weight, self.bias)


@draw_layer.register
def _(module: Head, generator: torch.Generator) -> None:
    uniform(module.weight, 0.1, generator)
    fill(module.bias, 0.0)


# ------------------------------------------------------------------------------------------
# A decoder of the GPT kind.


@final
class DecoderBlock(nn.Module):
    """Causal attention and a perceptron, each after a norm and with a shortcut."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop1, self.drop2 = dropout_layer(dropout), dropout_layer(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, length, width)`` to the same."""
        x = x + self.drop1(self.out(self._attend(self.norm1(x))))
        mapped: Tensor = x + self.drop2(self.down(functional.gelu(self.up(self.norm2(x)))))
        return mapped

    def _attend(self, x: Tensor) -> Tensor:
        # Queries, keys and values, each (batch, heads, length, width / heads).
        parts = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind(0)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return mixed.transpose(1, 2).flatten(2)


def draw_gpt(model: nn.Module, generator: torch.Generator) -> None:
    r"""Weights :math:`\mathcal{N}(0, 0.02^2)`, over :math:`\sqrt{2 d}` into shortcuts; biases 0."""
    depth = sum(isinstance(module, DecoderBlock) for module in model.modules())
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            # Each of the 2 d shortcuts adds the same variance, so that of their sum is 0.02^2.
            inward = name.endswith((".out", ".down"))
            normal(module.weight, 0.02 * ((2 * depth) ** -0.5 if inward else 1.0), generator)
            fill(getattr(module, "bias", None), 0.0)
        else:
            draw_layer(module, generator)


@register("gpt", draw=draw_gpt)
@final
class GPT(nn.Module):
    """A decoder like GPT-2, by default six layers of 384; ``gpt2`` has 124,439,808 parameters.

    Blocks are pre-norm, the head is tied to the embedding, attention is
    ``scaled_dot_product_attention``, and initial weights are those of GPT-2.

    Args:
        num_classes: Number of tokens in the vocabulary.
        input_shape: ``(length,)``, the longest sequence.
        width: Size of the embedding; a multiple of ``heads``.
        depth: Number of blocks.
        heads: Number of attention heads.
        dropout: Probability of embedding and residual dropout. There is no attention dropout.

    Reference: Radford et al. (2019), *Language models are unsupervised multitask learners*.
    """

    def __init__(
        self,
        *,
        num_classes: int = 10_000,
        input_shape: Shape = (256,),
        width: int = 384,
        depth: int = 6,
        heads: int = 6,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if len(input_shape) != 1:
            raise ValueError(f"input_shape must be (length,), got {tuple(input_shape)}")
        if width % heads:
            raise ValueError(f"width must be a multiple of heads ({heads}), got {width}")
        self.tokens = nn.Embedding(num_classes, width)
        self.places = nn.Embedding(*input_shape, width)
        self.drop = dropout_layer(dropout)
        self.blocks = nn.Sequential(*(DecoderBlock(width, heads, dropout) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits ``(batch, vocabulary, length)`` of the next token, for tokens ``(batch, length)``.

        The head is the embedding of the tokens, transposed.
        """
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.blocks(self.drop(self.tokens(tokens) + self.places(places)))
        return functional.linear(self.norm(x), self.tokens.weight).transpose(1, 2)


register("gpt2", draw=draw_gpt)(
    partial(GPT, num_classes=50_257, input_shape=(1024,), width=768, depth=12, heads=12)
)
