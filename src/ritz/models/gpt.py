"""A decoder of the GPT kind."""

from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional

from ritz._core.checks import check_count, check_range
from ritz.models.catalogue import register
from ritz.models.initialising import draw_layer, fill, normal


@final
class DecoderBlock(nn.Module):
    """Causal attention and a perceptron, each after a norm and around a shortcut."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop1, self.drop2 = _dropout(dropout), _dropout(dropout)

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
        self.drop = _dropout(dropout)
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


def _dropout(chance: float) -> nn.Module:
    return nn.Dropout(chance) if chance else nn.Identity()
