r"""The curvature of one layer: sums over a step, running averages, damped inverse.

.. math:: (S \otimes A + \delta I)^{-1} \operatorname{vec} V, \qquad
    S = \mathrm{E}[\delta \delta^\top], \quad A = \mathrm{E}[a a^\top]

for the gradient :math:`V` ``(o, i)`` in weight and bias, whose input is the constant 1.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, final, get_args

import torch
from torch import Tensor, nn

from ritz._core.checks import check_choice, check_count, check_range
from ritz.curvature._shared import (
    CONVOLUTIONS,
    Call,
    KFACKind,
    affine_gradients,
    input_moment,
    is_affine,
    is_layer,
    is_table,
    output_moment,
    projected_squares,
    squared_gradients,
    token_counts,
    token_deltas,
)

Kind = Literal["kfac", "ekfac"]
DampingMethod = Literal["exact", "factored"]
WeightSharing = Literal["expand", "reduce"]
Basis = Literal["eigh", "qr"]
ProductPrecision = Literal["float32", "tf32"]
Tensors = dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of a preconditioner, checked; see :class:`ritz.optim.KFAC`."""

    kind: Kind = "kfac"
    fisher: KFACKind = "empirical"
    damping: DampingMethod = "factored"
    # Inverses every 100 steps, as in the published runs (Granziol, Spectral Machine Learning,
    # section 5.8.2), and factors ten times as often.
    factor_every: int = 10
    inverse_every: int = 100
    factor_decay: float = 0.95  # Martens and Grosse (2015), section 5
    weight_sharing: WeightSharing = "expand"
    basis: Basis = "eigh"
    precision: ProductPrecision | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        choices: dict[str, Any] = {"kind": Kind, "fisher": KFACKind, "damping": DampingMethod}
        choices |= {"weight_sharing": WeightSharing, "basis": Basis}
        choices |= {"precision": ProductPrecision} if self.precision is not None else {}
        for name, kind in choices.items():
            check_choice(name, getattr(self, name), get_args(kind))
        check_count("factor_every", self.factor_every)
        check_count("inverse_every", self.inverse_every)
        check_count("seed", self.seed, low=0)
        check_range("factor_decay", self.factor_decay, low=0.0, high=1.0)


@dataclass(eq=False, slots=True)
class Pass:
    """A forward pass of the model, on so many samples; ``None`` if it was not seen."""

    rows: int | None


class Block(ABC):
    """Curvature of the parameters of one layer.

    Attributes:
        sums: Sums over the samples of this step, before they enter the averages.
        average: Running averages.
        inverse: What :meth:`precondition` reads.
        updates: Number of steps that entered the averages.
    """

    def __init__(
        self, name: str, module: nn.Module, params: Mapping[str, nn.Parameter], settings: Settings
    ) -> None:
        self.name, self.module, self.params, self.settings = name, module, dict(params), settings
        # Half precision would lose the small eigenvalues.
        self.dtype = torch.promote_types(self.anchor.dtype, torch.float32)
        self.sums: Tensors = {}
        self.average: Tensors = {}
        self.inverse: Tensors = {}
        self.updates = 0
        self.passes: set[Pass] = set()
        self.samples = self.rows = 0

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of the parameters in the module."""
        return tuple(self.params)

    @property
    def anchor(self) -> nn.Parameter:
        """The parameter in whose state the curvature is saved."""
        return next(iter(self.params.values()))

    @property
    def device(self) -> torch.device:
        """Device of the parameters, which may move."""
        return self.anchor.device

    def load(self, state: Tensors) -> None:
        """Take averages and inverse from a saved state; raise if they do not fit."""
        shapes = self._shapes(whole=True)
        self.average = {name: state.pop(name) for name in shapes if name in state}
        self.inverse = {}
        shapes = {name: shape for name, shape in shapes.items() if name in self.average}
        fits = {name: tuple(value.shape) for name, value in self.average.items()} == shapes
        if fits and self.average:
            blank = {name: value.shape for name, value in self.blank().items()}
            fits = blank == {name: value.shape for name, value in state.items()}
        if not fits:
            raise ValueError(
                f"state_dict does not match: the curvature of layer {self.name!r} was saved with "
                "other settings or shapes"
            )
        self.inverse = state

    def count(self, call_pass: Pass, rows: int) -> None:
        """Count the samples of a call, once per forward pass of the model."""
        if call_pass not in self.passes:
            self.passes.add(call_pass)
            self.samples += rows if call_pass.rows is None else call_pass.rows

    def clear(self) -> None:
        """Forget the sums of this step."""
        self.sums, self.passes, self.samples, self.rows = {}, set(), 0, 0

    def absorb(self, gain: float) -> None:
        """Let the sums of this step enter the averages.

        Args:
            gain: Factor that makes sums of squares of derivatives means over samples.
        """
        self.updates += 1
        # A mean of the first steps, which becomes an exponential one: nothing to correct.
        share, units = max(1 / self.updates, 1 - self.settings.factor_decay), self._units(gain)
        for name, total in self.sums.items():
            if name in self.average:
                # In place: a factor of thousands of inputs is read and written once.
                self.average[name].mul_(1 - share).add_(total, alpha=share * units[name])
            else:
                self.average[name] = total * units[name]

    def _sum(self, name: str, part: Tensor) -> None:
        if name in self.sums:
            self.sums[name] += part
        else:
            self.sums[name] = part

    def zeros(self) -> Tensors:
        """Return sums of no samples, which a process without samples contributes."""
        return {
            name: torch.zeros(shape, dtype=self.dtype, device=self.device)
            for name, shape in self._shapes().items()
        }

    @abstractmethod
    def add(self, call: Call, columns: list[Tensor]) -> None:
        """Add a call of the layer with derivatives ``(1, batch, ...)`` in its outputs."""

    @abstractmethod
    def _shapes(self, *, whole: bool = False) -> dict[str, tuple[int, ...]]: ...

    @abstractmethod
    def _units(self, gain: float) -> dict[str, float]:
        """Return the factors that make sums means."""

    @abstractmethod
    def decomposed(self, delta: float) -> Tensors:
        """Return the inverse of the current averages."""

    @abstractmethod
    def blank(self) -> Tensors:
        """Return tensors of the shapes of :meth:`decomposed`, to receive those of a process."""

    @abstractmethod
    def cost(self) -> int:
        """Return the operations of :meth:`decomposed`, in some unit."""

    @abstractmethod
    def precondition(self, gradients: Tensors, delta: float) -> Tensors:
        """Return the damped inverse times the gradients of the parameters, by name."""


def block_of(
    name: str, module: nn.Module, params: Mapping[str, nn.Parameter], settings: Settings
) -> Block | None:
    """Return the block of a module, or ``None`` if its curvature is not known."""
    if is_layer(module) or is_table(module):
        return KroneckerBlock(name, module, params, settings)
    return AffineBlock(name, module, params, settings) if is_affine(module) else None


# ------------------------------------------------------------------------------------------
# Linear layers, convolutions and embeddings.


@final
class KroneckerBlock(Block):
    """The Kronecker product of two factors, or a diagonal in their eigenbases (EK-FAC).

    An embedding is a linear layer on one-hot inputs: its factor of the inputs is diagonal and
    stored as a vector. With groups, all matrices have a leading axis of groups.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.table = isinstance(self.module, nn.Embedding)
        self.groups: int = getattr(self.module, "groups", 1)
        self.reduces = self.settings.weight_sharing == "reduce" and not self.table
        self._late: list[tuple[Call, list[Tensor]]] = []

    def add(self, call: Call, columns: list[Tensor]) -> None:
        x, module = call.args[0], self.module
        if isinstance(module, nn.Embedding):
            columns = [token_deltas(module, x, deltas) for deltas in columns]
            self._sum("inputs", token_counts(module, x).to(self.dtype))
            self.rows += x.numel()
        else:
            self._sum("inputs", input_moment(module, x, self.keys, reduce=self.reduces))
            self.rows += len(x) if self.reduces else self._num_positions(columns[0])
        # One column for labels, of the data or drawn; as many as outputs for the exact matrix.
        for deltas in columns:
            self._sum("outputs", output_moment(module, deltas, reduce=self.reduces))
        if self.settings.kind == "ekfac" and self.inverse:
            self._project(call, columns)
        elif self.settings.kind == "ekfac":
            self._late.append((call, columns))  # until there are eigenbases, in this step

    def _num_positions(self, deltas: Tensor) -> int:
        width = deltas.shape[2] if isinstance(self.module, CONVOLUTIONS) else deltas.shape[-1]
        return deltas.numel() // width

    def _project(self, call: Call, columns: list[Tensor]) -> None:
        basis = self.inverse["outputs_basis"]
        for deltas in columns:
            if self.table:
                # The rows of the table are the columns of the gradient.
                squares = squared_gradients(self.module, call, deltas @ basis)["weight"].T
            else:
                inputs = self.inverse["inputs_basis"]
                squares = projected_squares(self.module, call, deltas, inputs, basis)
            self._sum("scales", squares)

    def project_late(self) -> bool:
        """Project what was captured before there were eigenbases; return whether it was."""
        late, self._late = self._late, []
        for call, columns in late:
            self._project(call, columns)
        return bool(late)

    def absorb_late(self, gain: float) -> None:
        """Let the first projected squares become the average."""
        self.average["scales"] = self.sums["scales"] * gain

    def clear(self) -> None:
        super().clear()
        self._late = []

    def _shapes(self, *, whole: bool = False) -> dict[str, tuple[int, ...]]:
        """Shapes of what a step sums, or of all averages with ``whole``."""
        shape, scaled = self.anchor.shape, self.settings.kind == "ekfac"
        scaled = scaled and (whole or bool(self.inverse))
        sizes: dict[str, tuple[int, ...]]
        if self.table:
            sizes = {"inputs": (shape[0],), "outputs": (shape[1], shape[1])}
            return sizes | ({"scales": (shape[1], shape[0])} if scaled else {})
        lead = () if self.groups == 1 else (self.groups,)
        o = shape[0] // self.groups
        i = shape[1:].numel() * ("weight" in self.params) + ("bias" in self.params)
        sizes = {"inputs": (*lead, i, i), "outputs": (*lead, o, o)}
        return sizes | ({"scales": (*lead, o, i)} if scaled else {})

    def _units(self, gain: float) -> dict[str, float]:
        # 1 / T goes to the inputs of a linear layer, and to the outputs of a convolution.
        convolves = isinstance(self.module, CONVOLUTIONS) and not self.reduces
        inputs = 1 / (self.samples if convolves else self.rows)
        outputs = gain * (self.samples / self.rows if convolves else 1.0)
        return {"inputs": inputs, "outputs": outputs, "scales": gain}

    # --------------------------------------------------------------------------------------
    # The inverse.

    def cost(self) -> int:
        return sum(value.shape[-1] ** 3 for value in self.average.values() if value.ndim > 1)

    def decomposed(self, delta: float) -> Tensors:
        # (S + sqrt(delta)/pi I) (x) (A + pi sqrt(delta) I): its mixed terms damp with the trace of
        # the other factor, and its inverse is the product of two small inverses.
        A, S = self.average["inputs"], self.average["outputs"]
        if self.settings.kind == "kfac" and self.settings.damping == "factored":
            root = delta**0.5
            pi = self._balance(A, S)
            shifted = A + pi * root if self.table else _shifted(A, pi * root)
            return {
                "inputs_inverse": shifted.reciprocal() if self.table else inverted(shifted),
                "outputs_inverse": inverted(_shifted(S, root / pi)),
            }
        result: Tensors = {}
        for name, factor in (("inputs", A), ("outputs", S)):
            if factor.ndim == 1:
                result[f"{name}_values"] = factor.clone()
            else:
                before = self.inverse.get(f"{name}_basis")
                basis = None if self.settings.basis == "eigh" else before
                result |= {f"{name}_{k}": v for k, v in eigenbasis(factor, basis).items()}
        return result

    def _balance(self, A: Tensor, S: Tensor) -> Tensor:
        r"""Return :math:`\pi`, with :math:`\pi^2` the mean eigenvalue of A over that of S."""
        means = [
            factor.mean(-1) if factor.ndim == 1 else _diagonal(factor).mean(-1) for factor in (A, S)
        ]
        pi: Tensor = (means[0] / means[1]).sqrt()
        # A layer without signal has no scale. Any balance is right for it.
        pi = torch.where(torch.isfinite(pi) & (pi > 0), pi, torch.ones_like(pi))
        return pi[..., None, None] if self.groups > 1 else pi

    def blank(self) -> Tensors:
        names = ("inverse",) if self._is_factored() else ("basis", "values")
        result: Tensors = {}
        for name, factor in self.average.items():
            for part in names if name != "scales" else ():
                vector = part == "values" or factor.ndim == 1
                if factor.ndim > 1 or part != "basis":
                    like = factor if not vector or factor.ndim == 1 else factor[..., 0]
                    result[f"{name}_{part}"] = torch.empty_like(like).contiguous()
        return result

    def _is_factored(self) -> bool:
        return self.settings.kind == "kfac" and self.settings.damping == "factored"

    def rotate(self, new: Tensors) -> None:
        r"""Express the scales of EK-FAC in new eigenbases, as if the old ones were exact.

        The diagonal of :math:`U'^\top U D U^\top U'` has the entries
        :math:`\sum_k (u'_i \cdot u_k)^2 d_k`.
        """
        scales = self.average.get("scales")
        if scales is None:
            return
        for name in ("inputs", "outputs"):
            if f"{name}_basis" in new:
                # Squares of the entries of U'^T U: how much of each old direction a new one has.
                overlap = (new[f"{name}_basis"].mT @ self.inverse[f"{name}_basis"]).square()
                scales = overlap @ scales if name == "outputs" else scales @ overlap.mT
        self.average["scales"] = scales.contiguous()

    def precondition(self, gradients: Tensors, delta: float) -> Tensors:
        # (S (x) A)^-1 vec V = vec(S^-1 V A^-1) for symmetric factors and V by rows.
        V, inverse = self._joint(gradients), self.inverse
        if self._is_factored():
            A = inverse["inputs_inverse"]
            V = inverse["outputs_inverse"] @ V
            return self._parted(V * A if self.table else V @ A)
        # U_S [(U_S' V U_A) / (s a' + delta)] U_A'; an embedding has U_A = I.
        U_A, U_S = inverse.get("inputs_basis"), inverse["outputs_basis"]
        V = U_S.mT @ (V if U_A is None else V @ U_A)
        if self.settings.kind == "ekfac":
            scales = self.average["scales"]
        else:
            # The eigenvalues of a Kronecker product are the products of eigenvalues.
            s, a = inverse["outputs_values"], inverse["inputs_values"]
            scales = s.unsqueeze(-1) * a.unsqueeze(-2)
        V = U_S @ (V / (scales + delta))
        return self._parted(V if U_A is None else V @ U_A.mT)

    def _joint(self, gradients: Tensors) -> Tensor:
        """Return ``[W b]``, ``(o, i)`` or ``(groups, o, i)``."""
        if self.table:
            return gradients["weight"].T
        parts = []
        if "weight" in gradients:
            weight = gradients["weight"]
            parts.append(weight.reshape(self.groups, len(weight) // self.groups, -1))
        if "bias" in gradients:
            parts.append(gradients["bias"].reshape(self.groups, -1, 1))
        joint = parts[0] if len(parts) == 1 else torch.cat(parts, 2)
        return joint[0] if self.groups == 1 else joint

    def _parted(self, V: Tensor) -> Tensors:
        if self.table:
            return {"weight": V.T}
        pieces: Tensors = {}
        if "weight" in self.params:
            weight = V[..., :-1] if "bias" in self.params else V
            pieces["weight"] = weight.reshape(self.params["weight"].shape)
        if "bias" in self.params:
            pieces["bias"] = V[..., -1].reshape(-1)
        return pieces


def _diagonal(factor: Tensor) -> Tensor:
    return factor.diagonal(dim1=-2, dim2=-1)


def _shifted(factor: Tensor, shift: Tensor | float) -> Tensor:
    shifted = factor.clone()
    shift = shift[..., 0] if isinstance(shift, Tensor) and shift.ndim else shift
    _diagonal(shifted).add_(shift)
    return shifted


def inverted(matrix: Tensor) -> Tensor:
    """Return the inverse of a positive definite matrix, by Cholesky's method if roundoff allows."""
    root, info = torch.linalg.cholesky_ex(matrix)
    if not bool(info.any()):
        # The inverse is symmetric, and comes column by column: its transpose needs no copy.
        return torch.cholesky_inverse(root).mT.contiguous()
    # Roundoff has made an eigenvalue negative: the damping is below eps times the largest.
    values, basis = eigen(matrix)
    floor = torch.finfo(matrix.dtype).eps * values[..., -1:]
    inverse: Tensor = (basis / values.maximum(floor).unsqueeze(-2)) @ basis.mT
    return inverse.contiguous()


def eigen(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues and eigenvectors of a symmetric matrix that may be nearly singular."""
    # Near the end of training derivatives and their squares may be below the normal numbers.
    scale = matrix.abs().amax((-2, -1), keepdim=True)
    scale = torch.where(scale > 0, scale, 1.0)
    scaled = matrix / scale
    try:
        values, basis = torch.linalg.eigh(scaled)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        # Divide and conquer may fail in float32 for thousands of eigenvalues at zero.
        values, basis = (part.to(matrix) for part in torch.linalg.eigh(scaled.double()))
    return values * scale[..., 0], basis


def eigenbasis(factor: Tensor, before: Tensor | None) -> Tensors:
    """Return ``basis`` and ``values`` of a factor; from an earlier basis, one step of QR.

    A step of orthogonal iteration from the eigenbasis of a factor that has changed a little is
    near to the new one, at a fraction of the cost.
    """
    # QR of F U: one step of orthogonal iteration, which converges over the inverses to come.
    if before is None:
        values, basis = eigen(factor)
    else:
        basis = torch.linalg.qr(factor @ before).Q
        values = (basis * (factor @ basis)).sum(-2)
    # Roundoff makes zero eigenvalues negative. Contiguous, since layouts decide the last bits.
    return {"basis": basis.contiguous(), "values": values.clamp_min(0)}


# ------------------------------------------------------------------------------------------
# Affine norms.


@final
class AffineBlock(Block):
    r"""The block of each feature of a norm, :math:`y = w z + b`: 2 x 2, or 1 x 1.

    It is the second moment of gradients of samples, without an approximation by a product.
    """

    def add(self, call: Call, columns: list[Tensor]) -> None:
        for deltas in columns:
            # Features of a norm are independent parameters: no product of factors is needed.
            rows = affine_gradients(self.module, call.args[0], deltas[0], self.keys)
            self._sum("moment", torch.einsum("nci,ncj->cij", rows, rows))
        self.rows += columns[0].shape[1]

    def _shapes(self, *, whole: bool = False) -> dict[str, tuple[int, ...]]:
        return {"moment": (self.anchor.numel(), len(self.params), len(self.params))}

    def _units(self, gain: float) -> dict[str, float]:
        return {"moment": gain}

    def cost(self) -> int:
        return 100 * self.anchor.numel()

    def decomposed(self, delta: float) -> Tensors:
        return eigenbasis(self.average["moment"], None)

    def blank(self) -> Tensors:
        moment = self.average["moment"]
        return {"basis": torch.empty_like(moment), "values": torch.empty_like(moment[..., 0])}

    def precondition(self, gradients: Tensors, delta: float) -> Tensors:
        # (M + delta I)^-1 of every feature, by the eigenvectors of its 2 x 2 moment.
        V = torch.stack([gradients[key].flatten() for key in self.keys], 1).unsqueeze(2)
        U, values = self.inverse["basis"], self.inverse["values"].unsqueeze(2)
        V = (U @ ((U.mT @ V) / (values + delta)))[..., 0]
        return {key: V[:, i].reshape(p.shape) for i, (key, p) in enumerate(self.params.items())}
