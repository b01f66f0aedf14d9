"""Curvature layer by layer: block-diagonal matrices and Kronecker factors (K-FAC)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from ritz._core.checks import check_choice, check_finite
from ritz._core.progress import Progress, tracking
from ritz._core.random import resolve_generator
from ritz._core.storage import storable
from ritz.curvature._matrices import MATRICES, CurvatureMatrix, curvature_operator, require_outputs
from ritz.curvature._persample.capture import Call, Captured, full_name, owners
from ritz.curvature._persample.exact import Columns, passes, root_columns
from ritz.curvature._persample.plan import structure_plan
from ritz.curvature._persample.rules import (
    chunks,
    sample_gradients,
    some_rows,
    squared_gradients,
    unrolled,
)
from ritz.curvature._products import EngineName
from ritz.curvature._risk import KnownLoss, Risk, Selection, recognised, recorded, selected
from ritz.operators import (
    BlockDiagonalOperator,
    DenseOperator,
    DiagonalOperator,
    Exact,
    LinearOperator,
    exact,
)
from ritz.operators._shared import Quantity

# ------------------------------------------------------------------------------------------
# Curvature of the layers of a network, each by itself.


def block_diagonal(
    risk: Risk,
    *,
    matrix: CurvatureMatrix = "hessian",
    by: Sequence[Selection] | None = None,
    engine: EngineName = "auto",
    memory: int = 2 * 2**30,
) -> BlockDiagonalOperator:
    r"""Return the block-diagonal part :math:`\operatorname{diag}(A_{11}, \dots, A_{mm})` by layer.

    Each block is the matrix of the risk as a function of its own parameters, the others held, so
    that a product is one with each of the blocks.

    Args:
        risk: The loss at a point.
        matrix: ``hessian`` or ``ggn``.
        by: The blocks: regular expressions that names begin with, or lists or functions of names,
            that take every parameter once and follow the order of ``risk.theta``. By default one
            for each module that owns parameters.
        engine: ``linearized`` (traced once), ``eager``, or ``auto``, the first if it can be traced.
        memory: Bytes for linearisations that are kept, all blocks together.
    """
    check_choice("matrix", matrix, MATRICES)
    groups = _by_module(risk) if by is None else _given(risk, by)
    options: dict[str, Any] = {"engine": engine, "memory": memory // len(groups)}
    return BlockDiagonalOperator(
        [curvature_operator(risk.on(names), matrix, **options) for names in groups]
    )


def _by_module(risk: Risk) -> list[list[str]]:
    return [[full_name(module, own) for own in names] for module, names in owners(risk).items()]


def _given(risk: Risk, by: Sequence[Selection]) -> list[list[str]]:
    if isinstance(by, str) or not isinstance(by, Sequence) or not by:
        raise TypeError(
            f"by must be a list of choices of parameters, one for each block, got {by!r}"
        )
    names = list(risk.space.shapes)
    groups = [selected(names, choice) for choice in by]
    taken = [name for group in groups for name in group]
    for name in names:
        if taken.count(name) != 1:
            raise ValueError(f"by must take every parameter once, got {name} {taken.count(name)} "
                             "times")  # fmt: skip
    if taken != names:
        first = next(a for a, b in zip(taken, names, strict=True) if a != b)
        raise ValueError(f"by must give blocks in the order of the parameters, {names}, got "
                         f"{first} out of its place")  # fmt: skip
    return groups


# ------------------------------------------------------------------------------------------
# Kronecker-factored curvature (K-FAC): a layer's block as inputs by outputs.
#
# The gradient of a linear layer for a sample is :math:`\sum_t \delta_t a_t^\top`, summed over
# positions. Were inputs :math:`a` and derivatives :math:`\delta` independent, and positions
# too,
#
# .. math:: G_\text{layer} = \mathbb{E}\Big[\sum_t \delta_t \delta_t^\top\Big] \otimes
#     \mathbb{E}\Big[\frac{1}{T} \sum_t a_t a_t^\top\Big],
#
# with a one appended to :math:`a` for the bias.

KFACKind = Literal["ggn", "monte_carlo", "empirical"]
_LAYERS = (("weight",), ("bias",), ("weight", "bias"))
MAX_DENSE = 2048  # parameters of a module without factors whose block is formed


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class KroneckerFactors:
    """The two factors of the block of a layer.

    Attributes:
        inputs: Second moment of the inputs, ``(i, i)``; the last of them is the one of the bias,
            where that is chosen.
        outputs: Second moment of the derivatives by the outputs, ``(o, o)``.
    """

    inputs: Tensor
    outputs: Tensor

    def __str__(self) -> str:
        return f"{len(self.inputs)} inputs by {len(self.outputs)} outputs"


@final
class LayerOperator(LinearOperator):
    r"""The matrix :math:`G \otimes A + \mu I` on weight and bias of a layer, in their flat order.

    The weight ``(o, i)`` comes first, row by row, then the bias ``(o,)``; the product of
    :math:`V = [W\ b]` is :math:`G V A + \mu V`.

    Args:
        factors: :math:`A` and :math:`G`.
        bias: Whether the last of the inputs is that of a bias.
        shift: :math:`\mu`.
    """

    def __init__(self, factors: KroneckerFactors, *, bias: bool, shift: float = 0.0) -> None:
        like = factors.inputs
        for name in ("inputs", "outputs"):
            value = getattr(factors, name)
            if value.ndim != 2 or len(value) != value.shape[1] or value.dtype != like.dtype:
                raise ValueError(f"{name} must be square and of {like.dtype}, got "
                                 f"{tuple(value.shape)} of {value.dtype}")  # fmt: skip
            check_finite(name, value)
        super().__init__(len(like) * len(factors.outputs), dtype=like.dtype, device=like.device)
        self.factors, self.bias, self.shift = factors, bias, shift

    def _matmat(self, block: Tensor) -> Tensor:
        A, G = self.factors.inputs, self.factors.outputs
        joint = self._joint(block)
        product = torch.einsum("pq,qik,ij->pjk", G, joint, A).add_(joint, alpha=self.shift)
        return self._flat(product)

    def _joint(self, block: Tensor) -> Tensor:
        """A block ``(n, k)`` as ``(o, i, k)``."""
        width, count = len(self.factors.outputs), block.shape[1]
        if not self.bias:
            return block.reshape(width, -1, count)
        weight = block[:-width].reshape(width, len(self.factors.inputs) - 1, count)
        return torch.cat([weight, block[-width:].unsqueeze(1)], 1)

    def _flat(self, joint: Tensor) -> Tensor:
        if not self.bias:
            return joint.flatten(0, 1)
        return torch.cat([joint[:, :-1].flatten(0, 1), joint[:, -1]])

    def _detail(self) -> str:
        return str(self.factors)


def kfac(
    risk: Risk,
    *,
    kind: KFACKind = "ggn",
    generator: torch.Generator | None = None,
    progress: bool | Progress = False,
) -> BlockDiagonalOperator:
    r"""Return a Kronecker-factored Gauss-Newton or Fisher matrix, a block for each module.

    The blocks of linear layers and convolutions without groups are :class:`LayerOperator`, whose
    ``factors`` are :math:`A` and :math:`G`: positions count as samples of their own (for
    convolutions :math:`A` is summed over them and :math:`G` averaged, as its authors have it). It
    is exact for one sample without positions, and for deep linear networks with squared error. Any
    other module has its exact block where it has up to 2048 parameters, else the diagonal of it.

    Args:
        risk: The loss at a point, of samples that do not depend on each other.
        kind: What :math:`\delta` is the derivative of: ``ggn`` (every column of a root of the
            Hessian in the outputs: no sampling, a backward pass for each output), ``monte_carlo``
            (the loss of a label drawn from the model, one pass) or ``empirical`` (the loss itself,
            one pass).
        generator: Source of the labels.
        progress: Show a progress bar over batches, or a :class:`Progress` to report to.

    Reference: Martens and Grosse (2015); Grosse and Martens (2016), equation 30; Eschenhagen,
    Immer, Turner, Schneider and Hennig (2023), expand setting; Bernacchia, Lengyel and
    Hennequin (2018) for linear networks.
    """
    check_choice("kind", kind, ("ggn", "monte_carlo", "empirical"))
    require_outputs(risk, "kfac()")
    columns = _columns(risk, kind, resolve_generator(generator))
    found = structure_plan(risk, roots=kind == "ggn")
    if found.gap:
        raise ValueError(f"kfac() is not possible here: {found.gap}")
    layers = dict(risk.model.named_modules())
    blocks = {
        name: _Block(risk, name, own, layers[name], alone=name in found.modules)
        for name, own in owners(risk).items()
    }
    with risk.settings(), tracking(progress, "K-FAC", risk.num_batches) as bar:
        for done, (weight, seen, parts) in enumerate(passes(risk, found, columns), 1):
            if lost := sorted(set(found.modules) - set(seen.calls)):
                raise ValueError(f"modules must be called once on every batch, not so {lost}")
            for number, (derivatives, gradients) in enumerate(parts):
                for name, deltas in derivatives.items():
                    blocks[name].add(seen.calls[name], deltas, weight, first=number == 0)
                for name in {name.rpartition(".")[0] for name in gradients}:
                    blocks[name].add_gradients(gradients, weight)
            bar.update(done)
    return BlockDiagonalOperator([block.operator() for block in blocks.values()])


class _Block:
    """The sums for one module: two factors, a matrix, or a diagonal."""

    def __init__(
        self, risk: Risk, name: str, own: tuple[str, ...], module: nn.Module, *, alone: bool
    ) -> None:
        self.risk, self.module, self.own = risk, module, own
        self.names = {key: full_name(name, key) for key in own}
        self.size = sum(risk.space.shapes[full].numel() for full in self.names.values())
        self.factored = alone and _factors(module) and own in _LAYERS
        zeros = risk.theta.new_zeros
        if self.factored:
            # Of the weight (o, ...), or of the bias (o,) alone, which has one input.
            shape = risk.space.shapes[full_name(name, own[0])]
            width = shape[1:].numel() + (len(own) > 1)
            self.inputs, self.outputs = zeros(width, width), zeros(shape[0], shape[0])
        else:
            self.total = zeros(*(self.size,) * (2 if self.size <= MAX_DENSE else 1))

    def add(self, call: Call, deltas: Tensor, weight: float, *, first: bool) -> None:
        if self.factored:
            self._add_factors(call, deltas, weight, first)
        elif self.total.ndim == 1:
            squares = squared_gradients(self.module, call, deltas)
            self.total.add_(torch.cat([squares[key].flatten() for key in self.own]), alpha=weight)
        else:
            for columns, part in chunks(deltas, self.size):
                found = sample_gradients(self.module, some_rows(call, part), deltas[columns, part])
                self.add_gradients({self.names[key]: found[key] for key in self.own}, weight)

    def add_gradients(self, gradients: dict[str, Tensor], weight: float) -> None:
        rows = torch.cat([_rows(gradients[name]) for name in self.names.values()], 1)
        if self.total.ndim == 1:
            self.total.add_(rows.square().sum(0), alpha=weight)
        else:
            self.total.addmm_(rows.T, rows, alpha=weight)

    def _add_factors(self, call: Call, deltas: Tensor, weight: float, first: bool) -> None:
        parts = unrolled(self.module, call, deltas)
        if parts is None:
            raise RuntimeError(f"{type(self.module).__name__} must be linear at positions")
        a, delta = (
            parts[0][:, 0].transpose(1, 2),
            parts[1][:, :, 0],
        )  # (batch, T, i), (c, batch, o, T)
        batch, positions = a.shape[:2]
        # The product is the same; which factor the positions go to matters to those who damp them.
        split = (1, 1 / positions) if _convolves(self.module) else (1 / positions, 1)
        if first:
            ones = a.new_ones(batch, positions, 1)
            both = [a] * ("weight" in self.own) + [ones] * ("bias" in self.own)
            rows = torch.cat(both, 2).flatten(0, 1)
            self.inputs.addmm_(rows.T, rows, alpha=weight * split[0] / batch)
        rows = delta.transpose(2, 3).flatten(0, 2)
        self.outputs.addmm_(rows.T, rows, alpha=weight * split[1])

    def operator(self) -> LinearOperator:
        """The block, summed over processes."""
        risk = self.risk
        if self.factored:
            pair = KroneckerFactors(
                inputs=risk.reduced(self.inputs), outputs=risk.reduced(self.outputs)
            )
            return LayerOperator(pair, bias="bias" in self.own, shift=risk.l2)
        total = risk.reduced(self.total)
        if total.ndim == 1:
            return DiagonalOperator(total + risk.l2)
        total.diagonal().add_(risk.l2)
        return DenseOperator(total)


def _rows(gradients: Tensor) -> Tensor:
    """Gradients ``(c, batch, *shape)``, each as a row."""
    return gradients.reshape(gradients.shape[:2].numel(), -1)


def _factors(module: nn.Module) -> bool:
    known = unrolled.dispatch(type(module)) is not unrolled.dispatch(object)
    return known and getattr(module, "groups", 1) == 1


def _convolves(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.conv._ConvNd)


def _columns(risk: Risk, kind: KFACKind, generator: torch.Generator) -> Columns:
    if kind == "ggn":
        return root_columns(risk)
    if kind == "empirical":
        return _empirical(risk)
    known = recognised(risk.loss_fn)
    if known is None or not known.sampled:
        raise ValueError(
            f"kind='monte_carlo' needs a loss that is a likelihood, got {risk.loss_fn}"
        )
    # A seed for every batch: which process sees it does not change its labels.
    seeds = torch.randint(0, 2**62, (risk.num_batches,), generator=generator).tolist()

    def columns(index: int, seen: Captured) -> Tensor:
        outputs = seen.outputs.detach()
        drawn = known.draw(outputs, seen.target, torch.Generator().manual_seed(seeds[index]))
        return _drawn_column(known, outputs, seen.target, drawn)[None]

    return columns


def _empirical(risk: Risk) -> Columns:
    def columns(index: int, seen: Captured) -> Tensor:
        with recorded():
            outputs = seen.outputs.detach().requires_grad_()
            loss = risk.adapter.loss(outputs, seen.target)
        # The mean of the batch has the gradients of its samples by their number.
        gradient = torch.autograd.grad(loss, outputs)[0] * math.sqrt(len(outputs))
        return gradient.unsqueeze(0)

    return columns


def _drawn_column(known: KnownLoss, outputs: Tensor, target: Any, drawn: Tensor) -> Tensor:
    r"""A random :math:`s` with :math:`\mathbb{E}[s s^\top]` the Hessian in the outputs."""
    column: Tensor
    if known.kind == "squared_error":
        column = (outputs - drawn) * (2 / outputs[0].numel() / len(outputs) ** 0.5)
        return column
    if known.kind == "binary_cross_entropy":
        column = (outputs.sigmoid() - drawn) / outputs.numel() ** 0.5
        return column
    labels = torch.where(drawn == known.ignore_index, 0, drawn)
    hot = functional.one_hot(labels, outputs.shape[1]).movedim(-1, 1)
    weights = known.weights(target, outputs).sqrt().unsqueeze(1)
    column = (outputs.softmax(1) - hot.to(outputs.dtype)) * weights
    return column


@exact.register
def _(op: LayerOperator, quantity: Quantity) -> Exact:
    A, G = op.factors.inputs, op.factors.outputs
    if quantity == "trace":
        # tr (G (x) A) = tr G tr A
        return Exact(float(G.double().trace() * A.double().trace()) + op.shift * op.shape[0])
    entries = torch.outer(G.diagonal(), A.diagonal())
    return Exact(op._flat(entries.unsqueeze(2))[:, 0] + op.shift)
