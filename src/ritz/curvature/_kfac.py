"""`kfac`: Kronecker-factored curvature by layer, its blocks and their square roots."""

from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor, nn

from ritz import operators
from ritz._core.checks import check_choice, check_finite
from ritz._core.progress import Progress, tracking
from ritz._core.storage import storable
from ritz.curvature import _kfac_factors as factors
from ritz.curvature import _module_gradients as rules
from ritz.curvature import _sample_gradients as sample_gradients
from ritz.curvature._batches import batch_seeds
from ritz.curvature._losses import as_likelihood
from ritz.curvature._module_gradients import Call, full_name, owners
from ritz.curvature._risk import Risk, require_outputs
from ritz.curvature._sample_gradients import (
    Columns,
    ForwardPass,
    loss_columns,
    passes,
    root_columns,
    structure_plan,
)
from ritz.operators import BlockDiagonalOperator, Exact, LinearOperator, exact
from ritz.operators._shared import Quantity


@dataclass(frozen=True, slots=True)
class Tuning:
    """Sizes that decide how blocks and their square roots are computed."""

    # The block of a module without Kronecker factors is formed up to this number of parameters:
    # 32 MB of doubles. For larger modules the diagonal of the block is used.
    dense_block: int = 2048
    # Multiples of the identity that are added before a Cholesky decomposition, in eps |A|: the
    # second if the first is too little. For singular factors of 300 to 2,000 rows in float32, 0.1
    # is too little and 0.3 nearly enough. With 1 the root is as accurate as that of eigh, 2e-6 to
    # 5e-6 of |A|. With factors of 8,193 rows whose products are computed in TF32 it fails at times,
    # and an eigendecomposition of that size takes 0.6 s (H200). 32 adds 4e-6 |A| to all
    # eigenvalues, no more than the error that the root has without it.
    shifts: tuple[float, ...] = (1.0, 32.0)


TUNING = Tuning()

# ------------------------------------------------------------------------------------------
# Kronecker-factored curvature (K-FAC): the block of a layer as a product of two factors.
#
# The gradient of a linear layer for a sample is sum_t delta_t a_t', summed over positions t. If
# the inputs a and the derivatives delta were independent of each other, and of those at other
# positions, then
#
#     G_layer = E[sum_t delta_t delta_t'] (x) E[(1 / T) sum_t a_t a_t'],
#
# with a 1 appended to a for the bias.

KFACKind = Literal["ggn", "monte_carlo", "empirical"]


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class KroneckerFactors:
    """The two factors of the block of a layer.

    Attributes:
        inputs: Second moment of the inputs, ``(i, i)``. If the bias is selected, the last input is
            the constant 1.
        outputs: Second moment of the derivatives in the outputs, ``(o, o)``.
    """

    inputs: Tensor
    outputs: Tensor

    def __str__(self) -> str:
        return f"Kronecker factors of {len(self.inputs)} inputs and {len(self.outputs)} outputs"


@final
class LayerOperator(LinearOperator):
    r"""The matrix :math:`G \otimes A + \mu I` on weight and bias of a layer, in their flat order.

    The weight ``(o, i)`` comes first, row by row, then the bias ``(o,)``. The product with
    :math:`V = [W\ b]` is :math:`G V A + \mu V`.

    Args:
        factors: :math:`A` and :math:`G`.
        bias: Whether the layer has a bias. The last input in :math:`A` is then the constant 1.
        shift: The multiple :math:`\mu` of the identity. Defaults to 0.
    """

    def __init__(self, factors: KroneckerFactors, *, bias: bool, shift: float = 0.0) -> None:
        like = factors.inputs
        for name in ("inputs", "outputs"):
            check_finite(name, getattr(factors, name))
        super().__init__(len(like) * len(factors.outputs), dtype=like.dtype, device=like.device)
        self.factors, self.bias, self.shift = factors, bias, shift
        self._detail = f"{len(like)} inputs by {len(factors.outputs)} outputs"

    def _matmat(self, block: Tensor) -> Tensor:
        # V -> G V A + mu V, for each column as a matrix [W b].
        A, G = self.factors.inputs, self.factors.outputs
        V = self._joint(block)
        joint = torch.einsum("pq,qik,ij->pjk", G, V, A).add_(V, alpha=self.shift)
        return flatten_layer(joint, bias=self.bias)

    def _joint(self, block: Tensor) -> Tensor:
        """Return a block ``(n, k)`` as matrices [W b], ``(o, i, k)``."""
        width, count = len(self.factors.outputs), block.shape[1]
        if not self.bias:
            return block.reshape(width, -1, count)
        weight = block[:-width].reshape(width, len(self.factors.inputs) - 1, count)
        return torch.cat([weight, block[-width:].unsqueeze(1)], 1)


def flatten_layer(joint: Tensor, *, bias: bool) -> Tensor:
    """Return matrices [W b], ``(o, i, k)``, as vectors ``(n, k)``: rows of the weight, bias."""
    if not bias:
        return joint.flatten(0, 1)
    return torch.cat([joint[:, :-1].flatten(0, 1), joint[:, -1]])


@exact.register
def _(op: LayerOperator, quantity: Quantity) -> Exact:
    A, G = op.factors.inputs, op.factors.outputs
    if quantity == "trace":
        # tr (G (x) A) = tr G tr A
        return Exact(float(G.double().trace() * A.double().trace()) + op.shift * op.shape[0])
    entries = torch.outer(G.diagonal(), A.diagonal())
    return Exact(flatten_layer(entries.unsqueeze(2), bias=op.bias)[:, 0] + op.shift)


def kfac(
    risk: Risk,
    *,
    kind: KFACKind = "ggn",
    generator: torch.Generator | None = None,
    progress: bool | Progress = False,
) -> BlockDiagonalOperator:
    r"""Return a Kronecker-factored Gauss-Newton or Fisher matrix, one block per module.

    The block of a linear layer, or of a convolution without groups, is a Kronecker product
    :math:`G \otimes A`. Its ``factors`` are the second moments :math:`A` of the inputs and
    :math:`G` of the derivatives in the outputs. Tokens and spatial positions are treated as samples
    (the ``expand`` setting of Eschenhagen et al.). These blocks are exact for one sample without
    positions, and for deep linear networks with squared error. Any other module has its exact block
    if it has at most 2048 parameters, and the diagonal of this block otherwise.

    Args:
        risk: A :class:`Risk` of samples that do not depend on each other.
        kind: ``ggn`` (the exact Hessian in the outputs, one backward pass per output),
            ``monte_carlo`` (a label drawn from the model for each sample, one pass) or
            ``empirical`` (the true labels, one pass).
        generator: Source of the labels. Defaults to a new generator with seed 0.
        progress: Show a progress bar over batches, or a :class:`Progress` to report to.

    Reference: Martens and Grosse (2015); Grosse and Martens (2016), equation 30; Eschenhagen,
    Immer, Turner, Schneider and Hennig (2023), expand setting; Bernacchia, Lengyel and
    Hennequin (2018) for linear networks.
    """
    check_choice("kind", kind, ("ggn", "monte_carlo", "empirical"))
    require_outputs(risk, "kfac()")
    columns = _columns(risk, kind, generator)
    plan = structure_plan(risk, roots=kind == "ggn")
    if plan.gap:
        few = kind != "ggn" or plan.columns <= sample_gradients.TUNING.max_columns
        advice = "" if few else ": use kind='monte_carlo', which takes one pass"
        raise ValueError(f"kfac(kind={kind!r}) is not possible: {plan.gap}{advice}")
    layers = dict(risk.model.named_modules())
    blocks = {
        name: LayerSums(risk, name, keys, layers[name], alone=name in plan.modules)
        for name, keys in owners(list(risk.space.shapes)).items()
    }
    with risk.settings(), tracking(progress, "K-FAC", risk.num_batches) as bar:
        for done, (weight, full, parts) in enumerate(passes(risk, plan, columns), 1):
            if lost := sorted(set(plan.modules) - set(full.calls)):
                raise ValueError(
                    f"kfac() needs exactly one call of each module per batch, but {lost} are not "
                    "called once"
                )
            for number, (derivatives, gradients) in enumerate(parts):
                for name, deltas in derivatives.items():
                    blocks[name].add(full.calls[name], deltas, weight, first=number == 0)
                for name in {name.rpartition(".")[0] for name in gradients}:
                    blocks[name].add_gradients(gradients, weight)
            bar.update(done)
    return BlockDiagonalOperator([block.operator() for block in blocks.values()])


def _columns(risk: Risk, kind: KFACKind, generator: torch.Generator | None) -> Columns:
    if kind == "ggn":
        return root_columns(risk)
    if kind == "empirical":
        return loss_columns(risk)
    known, seeds = as_likelihood(risk.loss_fn), batch_seeds(risk.num_batches, generator)

    def columns(index: int, full: ForwardPass) -> Tensor:
        outputs = full.outputs.detach()
        labels = known.draw(outputs, full.target, torch.Generator().manual_seed(seeds[index]))
        return known.score(outputs, full.target, labels)[None]

    return columns


class LayerSums:
    """Sums over batches for the block of one module: two factors, a matrix, or a diagonal."""

    def __init__(
        self, risk: Risk, name: str, keys: tuple[str, ...], module: nn.Module, *, alone: bool
    ) -> None:
        self.risk, self.module, self.keys = risk, module, keys
        self.names = {key: full_name(name, key) for key in keys}
        self.size = sum(risk.space.shapes[full].numel() for full in self.names.values())
        linear = rules.has_unroll_rule(module)
        plain = keys in (("weight",), ("bias",), ("weight", "bias"))
        self.factored = alone and linear and plain and getattr(module, "groups", 1) == 1
        zeros = risk.theta.new_zeros
        if self.factored:
            # The weight is (o, ...). A bias alone is (o,), and its only input is the constant 1.
            shape = risk.space.shapes[full_name(name, keys[0])]
            width = shape[1:].numel() + (len(keys) > 1)
            self.inputs, self.outputs = zeros(width, width), zeros(shape[0], shape[0])
        else:
            self.total = zeros(*(self.size,) * (2 if self.size <= TUNING.dense_block else 1))

    def sums(self) -> tuple[Tensor, ...]:
        return (self.inputs, self.outputs) if self.factored else (self.total,)

    def add(self, call: Call, deltas: Tensor, weight: float, *, first: bool) -> None:
        if self.factored:
            self._add_factors(call, deltas, weight, first)
        elif self.total.ndim == 1:
            squares = rules.squared_gradients(self.module, call, deltas)
            self.total.add_(torch.cat([squares[key].flatten() for key in self.keys]), alpha=weight)
        else:
            for gradients in rules.in_chunks(self.module, call, deltas):
                self.add_gradients({self.names[key]: gradients[key] for key in self.keys}, weight)

    def add_gradients(self, gradients: dict[str, Tensor], weight: float) -> None:
        # Gradients (c, batch, *shape), flattened to one row each.
        parts = [gradients[name] for name in self.names.values()]
        rows = torch.cat([part.reshape(part.shape[:2].numel(), -1) for part in parts], 1)
        if self.total.ndim == 1:
            self.total.add_(rows.square().sum(0), alpha=weight)
        else:
            self.total.addmm_(rows.T, rows, alpha=weight)

    def _add_factors(self, call: Call, deltas: Tensor, weight: float, first: bool) -> None:
        # The factor 1 / T belongs to the outputs of a convolution and to the inputs of a linear
        # layer. The choice matters only if the factors are damped.
        positions = factors.num_positions(self.module, deltas)
        convolves = isinstance(self.module, rules.CONVOLUTIONS)
        split = (1, 1 / positions) if convolves else (1 / positions, 1)
        x = call.args[0]
        if first:
            moment = factors.input_moment(self.module, x, self.keys)
            self.inputs.add_(moment, alpha=weight * split[0] / len(x))
        self.outputs.add_(factors.output_moment(self.module, deltas), alpha=weight * split[1])

    def operator(self) -> LinearOperator:
        """Return the block, summed over processes."""
        total_of, shift = self.risk.sum_over_processes, self.risk.l2
        if self.factored:
            pair = KroneckerFactors(inputs=total_of(self.inputs), outputs=total_of(self.outputs))
            return LayerOperator(pair, bias="bias" in self.keys, shift=shift)
        total = total_of(self.total)
        if total.ndim == 1:
            return operators.DiagonalOperator(total + shift)
        total.diagonal().add_(shift)
        return operators.DenseOperator(total)


def root(matrix: Tensor) -> Tensor:
    r"""Return a matrix :math:`R` with :math:`R R^\top` the positive semi-definite matrix."""
    # The smallest eigenvalues of a singular matrix may be negative by roundoff, which this shift
    # outweighs. An eigendecomposition takes 30 times as long (4,608 rows, H200: 125 ms).
    unit = torch.finfo(matrix.dtype).eps * matrix.norm()
    for shift in TUNING.shifts:
        shifted = matrix.clone()
        shifted.diagonal().add_(shift * unit)
        triangle: Tensor
        triangle, info = torch.linalg.cholesky_ex(shifted)
        # The results are made contiguous, as after loading from a file, since the last bits of a
        # product depend on strides.
        if not int(info) and bool(triangle.isfinite().all()):
            return triangle.contiguous()
    values, vectors = torch.linalg.eigh(matrix)
    square_root: Tensor = (vectors * values.clamp_min(0).sqrt()).contiguous()
    return square_root


BlockRoot = dict[str, Tensor]  # the square root of a block, or those of its two factors, by name


def block_root(op: LinearOperator) -> BlockRoot:
    """Return a square root of a block of :func:`kfac`."""
    if isinstance(op, LayerOperator):
        return {"inputs": root(op.factors.inputs), "outputs": root(op.factors.outputs)}
    if isinstance(op, operators.DiagonalOperator):
        return {"diagonal": op.entries.sqrt()}
    if isinstance(op, operators.DenseOperator):
        return {"dense": root(op.matrix)}
    raise TypeError(f"op must be a block of kfac(), got {type(op).__name__}")


def times_root(roots: BlockRoot, xi: Tensor, *, bias: bool) -> Tensor:
    """Return the product of the square root of a block and Gaussian numbers ``(n, k)``.

    Args:
        roots: Result of :func:`block_root`.
        xi: Independent standard normal numbers, ``(n, k)``.
        bias: Whether the block belongs to both weight and bias of a layer.
    """
    if "diagonal" in roots:
        return roots["diagonal"][:, None] * xi
    if "dense" in roots:
        return roots["dense"] @ xi
    # V = G^(1/2) Xi A^(1/2)': Cov[V_oi, V_pj] = G_op A_ij
    A, G = roots["inputs"], roots["outputs"]
    xi = xi.reshape(len(G), len(A), -1)
    return flatten_layer(torch.einsum("pq,qik,ji->pjk", G, xi, A), bias=bias)
