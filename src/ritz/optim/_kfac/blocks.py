r"""The curvature of one layer in K-FAC: sums of a step, running averages, damped inverse.

.. math:: (S \otimes A + \delta I)^{-1} \operatorname{vec} V, \qquad
    S = \mathrm{E}[\delta \delta^\top], \quad A = \mathrm{E}[a a^\top]

is the product of the damped inverse with the gradient :math:`V`, ``(o, i)``, in weight and bias.
The input that belongs to the bias is the constant 1.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from ritz._core.distributed import world_size
from ritz.curvature._shared import (
    CONVOLUTIONS,
    Call,
    affine_gradients,
    input_columns,
    input_moment,
    is_affine,
    is_layer,
    is_table,
    join_calls,
    moment,
    output_moment,
    projected_squares,
    reduced_moments,
    squared_gradients,
    token_counts,
    token_deltas,
)
from ritz.optim._kfac.inverses import aligned, eigenbasis, num_zeros, times
from ritz.optim._kfac.settings import Settings

Tensors = dict[str, Tensor]
# If a linear layer has at least this many inputs per row of a batch, the input factor of a step is
# not formed, because writing and reading it would cost more than the products.
WIDE = 8

# A call of a layer, and the derivatives ``(1, batch, ...)`` in its outputs for each column.
LayerCall = tuple[Call, list[Tensor]]


def _tensors(call: LayerCall) -> list[Tensor]:
    return [call[0].args[0], *call[1]]


def _copied(call: LayerCall) -> LayerCall:
    """Return a copy of a call, for calls that are added after the backward pass.

    Until then the next batch may be written into its input, and torch may take its derivative for
    the gradient of a parameter of the same shape.
    """
    x, *columns = (tensor.clone() for tensor in _tensors(call))
    return replace(call[0], args=(x,), output=columns[0][0]), columns


@dataclass(eq=False, slots=True)
class Pass:
    """A forward pass of the model.

    Attributes:
        rows: Number of its samples. ``None`` if the layer was called outside of the model.
        backward: Identifies the backward pass of its derivatives. Forward passes with equal numbers
            of samples and the same backward pass are taken to be of the same samples, as in a
            siamese network.
    """

    rows: int | None
    backward: object = None


class Block(ABC):
    r"""Curvature of the parameters of one layer.

    Attributes:
        sums: Sums over the samples of this step, before they enter the averages.
        columns: Matrices :math:`X` whose products :math:`X X^\top` belong to the sums.
        average: Running averages.
        inverse: The tensors that :meth:`precondition` reads.
        inverse_delta: Damping with which the inverse was computed. ``None`` if not known.
        updates: Number of steps that entered the averages.
        waits: Whether calls wait until the end of the step; see ``deferred.py``.
        waiting: Groups of calls on the same samples that wait.
        nbytes: Size of all inputs and derivatives of this step.
    """

    def __init__(
        self, name: str, module: nn.Module, params: Mapping[str, nn.Parameter], settings: Settings
    ) -> None:
        self.name, self.module, self.params, self.settings = name, module, dict(params), settings
        # Half precision would lose the small eigenvalues.
        self.dtype = torch.promote_types(self.anchor.dtype, torch.float32)
        self.sums: Tensors = {}
        self.columns: dict[str, list[Tensor]] = {}
        self.average: Tensors = {}
        self.inverse: Tensors = {}
        self.inverse_delta: float | None = None
        self.updates = 0
        self.waits = False
        self.waiting: list[list[LayerCall]] = []
        self.samples = self.rows = self.nbytes = 0
        self._calls = 0  # calls whose derivatives have not arrived
        self._backward: object = None
        self._several = False  # whether several calls may belong to this backward pass
        self._counted: set[tuple[object, int]] = set()
        self._incomplete: dict[tuple[object, int, int], list[LayerCall]] = {}
        self._late: list[list[LayerCall]] = []  # calls to be projected, for EK-FAC

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
        """Current device of the parameters."""
        return self.anchor.device

    def load(self, state: Tensors) -> None:
        """Take averages and inverse from a saved state. Raise if their shapes do not fit."""
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
        self.adopt(state)

    def adopt(self, inverse: Tensors) -> None:
        """Take the tensors of :meth:`decompose`, in the memory of the earlier ones."""
        kinds = [{k: (v.shape, v.dtype, v.device) for k, v in each.items()}
                 for each in (self.inverse, inverse)]  # fmt: skip
        if kinds[0] != kinds[1]:
            self.inverse = {name: aligned(value) for name, value in inverse.items()}
            return
        # A CUDA graph of the products reads them from there.
        for name, value in inverse.items():
            self.inverse[name].copy_(value)

    # --------------------------------------------------------------------------------------
    # The sums of a step.

    @property
    def may_wait(self) -> bool:
        """Whether the sums can be computed without reading values on the host."""
        return True

    @property
    @abstractmethod
    def joins(self) -> bool:
        """Whether all calls of a layer on the same samples must be added together."""

    def expect(self) -> None:
        """Count a call of the layer. Its derivatives arrive in a backward pass."""
        self._calls += 1

    def receive(self, call: LayerCall, of: Pass) -> None:
        """Take a call of the layer with its derivatives."""
        if of.backward != self._backward:
            self._backward, self._several = of.backward, self._calls > 1
        self._calls = max(0, self._calls - 1)
        rows = len(call[0].args[0])
        # Calls with equal numbers of samples in one backward pass are of the same samples, which
        # count once. The rows of a layer may include positions, so the rows of the model are used.
        self._counted.add((of.backward, rows if of.rows is None else of.rows))
        self.samples = sum(samples for _, samples in self._counted)
        self.nbytes += sum(tensor.nbytes for tensor in _tensors(call))
        if self.joins and self._several:
            key = of.backward, rows, len(call[1])
            self._incomplete.setdefault(key, []).append(_copied(call))
        elif self.waits:
            self.waiting.append([_copied(call)])
        else:
            self.add([call])

    def take_waiting(self) -> list[Tensor]:
        """Return inputs and derivatives of the calls that wait, which then wait no more."""
        waiting, self.waiting = self.waiting, []
        return [each for calls in waiting for call in calls for each in _tensors(call)]

    def stop_waiting(self) -> None:
        """Add the calls that wait. Later ones of this step do not wait."""
        waiting, self.waiting, self.waits = self.waiting, [], False
        for calls in waiting:
            self.add(calls)

    def complete(self) -> None:
        """Add the calls that had to wait for all calls of the step."""
        complete, self._incomplete, self._calls = self._incomplete, {}, 0
        for calls in complete.values():
            if self.waits:
                self.waiting.append(calls)
            else:
                self.add(calls)
        self.join()

    def join(self) -> None:
        """Add columns to the sums of the same name."""
        # With accumulated batches of different sizes, there may be columns as well as sums.
        for name in self.columns.keys() & self.sums.keys():
            for x in self.columns.pop(name):
                self._sum(name, moment(x))

    def clear(self) -> None:
        """Forget the sums of this step."""
        self.restart()
        self.samples = self.nbytes = 0
        self.waiting = []
        self._backward, self._counted, self._incomplete, self._late = None, set(), {}, []

    def restart(self) -> None:
        """Forget the sums, but not the calls that wait."""
        self.sums, self.columns, self.rows = {}, {}, 0

    def absorb(self, gain: float) -> None:
        """Update the averages with the sums of this step.

        Args:
            gain: Factor that turns sums of squares of derivatives into means over samples.
        """
        self.updates += 1
        # A plain mean at first, later an exponential mean. It needs no bias correction.
        share, units = max(1 / self.updates, 1 - self.settings.factor_decay), self._units(gain)
        for name, total in self.sums.items():
            if name in self.average:
                # In place, so that a large factor is read and written once.
                self.average[name].mul_(1 - share).add_(total, alpha=share * units[name])
            else:
                self.average[name] = total * units[name]
        for name, parts in self.columns.items():
            x = torch.cat(parts, 1) if len(parts) > 1 else parts[0]
            if name in self.average:
                # average <- (1 - share) average + share X X' / N, in one pass
                options = {"beta": 1 - share, "alpha": share * units[name]}
                self.average[name].addmm_(x, x.T, **options)
            else:
                self.average[name] = moment(x) * units[name]

    def checked(self) -> Iterator[Tensor]:
        """Yield tensors that are finite if and only if all sums and columns of this step are."""
        for name, value in self.sums.items():
            # No entry of a second moment is larger than the largest one on its diagonal.
            yield value.diagonal(dim1=-2, dim2=-1) if self._is_matrix(name) else value
        for parts in self.columns.values():
            yield from parts

    def _sum(self, name: str, part: Tensor) -> None:
        if name in self.sums:
            self.sums[name] += part
        else:
            self.sums[name] = part

    def zeros(self) -> Tensors:
        """Return sums that are zero, for a process without samples."""
        return {
            name: torch.zeros(shape, dtype=self.dtype, device=self.device)
            for name, shape in self._shapes().items()
        }

    @property
    @abstractmethod
    def reads_delta(self) -> bool:
        """Whether :meth:`precondition` depends on the damping, or :meth:`decompose` alone does."""

    @abstractmethod
    def add(self, calls: list[LayerCall]) -> None:
        """Add calls of the layer on the same samples."""

    @abstractmethod
    def _shapes(self, *, whole: bool = False) -> dict[str, tuple[int, ...]]: ...

    def _is_matrix(self, name: str) -> bool:
        """Return whether sums or averages are second moments of vectors."""
        return True

    @abstractmethod
    def _units(self, gain: float) -> dict[str, float]:
        """Return the factors that turn sums into means, by name."""

    def matrices(self, delta: float) -> dict[str, Callable[[], Tensor]]:
        """Return functions that compute the matrices to invert, by name in :meth:`decompose`."""
        return {}

    @abstractmethod
    def decompose(self, delta: float) -> Tensors:
        """Return the tensors that represent the damped inverse, but for those of `matrices`."""

    @abstractmethod
    def blank(self) -> Tensors:
        """Return empty tensors of the shapes of :meth:`decompose`, to receive a broadcast."""

    @abstractmethod
    def cost(self) -> int:
        """Return the cost of :meth:`decompose` in arbitrary units."""

    def tensors_read(self) -> Iterator[Tensor]:
        """Yield the tensors that :meth:`precondition` may read."""
        yield from self.inverse.values()
        yield from self.average.values()

    @abstractmethod
    def precondition(self, gradients: Tensors, delta: float) -> Tensors:
        """Return the product of the damped inverse and the gradients of the parameters, by name."""


def block_of(
    name: str, module: nn.Module, params: Mapping[str, nn.Parameter], settings: Settings
) -> Block | None:
    """Return the block of a module, or ``None`` if there is none for its class."""
    if is_layer(module) or is_table(module):
        return KroneckerBlock(name, module, params, settings)
    return AffineBlock(name, module, params, settings) if is_affine(module) else None


# ------------------------------------------------------------------------------------------
# Linear layers, convolutions and embeddings.


@final
class KroneckerBlock(Block):
    """The Kronecker product of two factors, or a diagonal matrix in their eigenbases (EK-FAC).

    Factors of large order and the input factor of an embedding are diagonal, and are stored as
    vectors. An embedding is a linear layer with one-hot inputs. With groups, all factors have a
    leading axis.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.table = isinstance(self.module, nn.Embedding)
        self.groups: int = getattr(self.module, "groups", 1)
        self.reduces = self.settings.weight_sharing == "reduce" and not self.table
        shape, limit = self.anchor.shape, self.settings.max_order
        if self.table:
            self.orders = {"inputs": shape[0], "outputs": shape[1]}
        else:
            width = shape[1:].numel() * ("weight" in self.params) + ("bias" in self.params)
            self.orders = {"inputs": width, "outputs": shape[0] // self.groups}
        # The names of the diagonal factors.
        large = {k for k, order in self.orders.items() if limit is not None and order > limit}
        self.diagonal = large | ({"inputs"} if self.table else set())

    @property
    def may_wait(self) -> bool:
        return not self.table  # torch counts tokens on the host

    def _is_matrix(self, name: str) -> bool:
        return name != "scales" and name not in self.diagonal

    @property
    def joins(self) -> bool:
        # The square of a sum over positions has mixed terms between the calls.
        return self.reduces or self.settings.kind == "ekfac"

    @property
    def reads_delta(self) -> bool:
        return not self._is_factored()

    def add(self, calls: list[LayerCall]) -> None:
        if self.reduces:
            self._add_reduced(calls)
        else:
            for call, columns in calls:
                self._add_expanded(call, columns)
        if self.settings.kind == "ekfac" and self.inverse:
            self._project(calls)
        elif self.settings.kind == "ekfac":
            # Projected later in this step, when there are eigenbases.
            self._late.append([_copied(call) for call in calls])

    def _add_expanded(self, call: Call, columns: list[Tensor]) -> None:
        x, module = call.args[0], self.module
        if isinstance(module, nn.Embedding):
            columns = [token_deltas(module, x, deltas) for deltas in columns]
            self._sum("inputs", token_counts(module, x).to(self.dtype))
            self.rows += x.numel()
        else:
            self._add_inputs(x)
            width = columns[0].shape[2 if isinstance(module, CONVOLUTIONS) else -1]
            self.rows += columns[0].numel() // width
        # One column for the labels of the data or drawn labels; one per output for ``ggn``.
        for deltas in columns:
            diagonal = "outputs" in self.diagonal
            self._sum("outputs", output_moment(module, deltas, diagonal=diagonal))

    def _add_inputs(self, x: Tensor) -> None:
        diagonal, order = "inputs" in self.diagonal, self.orders["inputs"]
        few = isinstance(self.module, nn.Linear) and WIDE * x[..., 0].numel() <= order
        if few and not diagonal and world_size() == 1:
            self.columns.setdefault("inputs", []).append(input_columns(x, self.keys))
        else:
            self._sum("inputs", input_moment(self.module, x, self.keys, diagonal=diagonal))

    def _add_reduced(self, calls: list[LayerCall]) -> None:
        diagonal = "inputs" in self.diagonal, "outputs" in self.diagonal
        for number, parts in enumerate(_columns(calls)):
            a, delta = join_calls(self.module, parts)
            inputs, outputs = reduced_moments(a, delta, diagonal=diagonal)
            self._sum("outputs", outputs)
            if number == 0:  # all columns have the same inputs
                self._sum("inputs", inputs)
                self.rows += len(a)

    def _project(self, calls: list[LayerCall]) -> None:
        basis = self.inverse.get("outputs_basis")
        for parts in _columns(calls):
            if isinstance(self.module, nn.Embedding):
                squares = _table_squares(self.module, parts, basis)
            else:
                a, delta = join_calls(self.module, parts)
                squares = projected_squares(a, delta, self.inverse.get("inputs_basis"), basis)
            self._sum("scales", squares)

    def project_late(self) -> None:
        """Project the calls that were captured before there were eigenbases."""
        late, self._late = self._late, []
        for calls in late:
            self._project(calls)

    def absorb_late(self, gain: float) -> None:
        """Use the first projected squares as the average."""
        self.average["scales"] = self.sums["scales"] * gain

    def _shapes(self, *, whole: bool = False) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the sums of a step, or of all averages with ``whole``."""
        lead = () if self.groups == 1 else (self.groups,)
        o, i = self.orders["outputs"], self.orders["inputs"]
        sizes = {
            name: (*lead, *(order,) * (1 if name in self.diagonal else 2))
            for name, order in self.orders.items()
        }
        scaled = self.settings.kind == "ekfac" and (whole or bool(self.inverse))
        return sizes | ({"scales": (*lead, o, i)} if scaled else {})

    def _units(self, gain: float) -> dict[str, float]:
        # The factor 1 / T belongs to the inputs of a linear layer, and to the outputs of a
        # convolution.
        convolves = isinstance(self.module, CONVOLUTIONS) and not self.reduces
        inputs = 1 / (self.samples if convolves else self.rows)
        outputs = gain * (self.samples / self.rows if convolves else 1.0)
        return {"inputs": inputs, "outputs": outputs, "scales": gain}

    # --------------------------------------------------------------------------------------
    # The inverse.

    def cost(self) -> int:
        return self.groups * sum(
            order if name in self.diagonal else order**3 for name, order in self.orders.items()
        )

    def matrices(self, delta: float) -> dict[str, Callable[[], Tensor]]:
        if not self._is_factored():
            return {}
        shifts = self._shifts(delta)
        return {
            f"{name}_inverse": partial(self._shifted, name, shifts[name])
            for name in self.orders
            if name not in self.diagonal
        }

    def decompose(self, delta: float) -> Tensors:
        result: Tensors = {}
        if self._is_factored():
            shifts = self._shifts(delta) if self.diagonal else {}
            for name in self.diagonal:
                result[f"{name}_inverse"] = (self.average[name] + shifts[name]).reciprocal()
            return result
        for name in self.orders:
            if name in self.diagonal:
                result[f"{name}_values"] = self.average[name].clone()
            else:
                before = self.inverse.get(f"{name}_basis")
                basis = None if self.settings.basis == "eigh" else before
                parts = eigenbasis(self.average[name], basis)
                result |= {f"{name}_{k}": v for k, v in parts.items()}
        return result

    def _shifts(self, delta: float) -> Tensors:
        """Return the damping of each factor."""
        # (S + sqrt(delta)/pi I) (x) (A + pi sqrt(delta) I): the inverse of this approximation of
        # S (x) A + delta I is a Kronecker product of two small inverses.
        root, pi = delta**0.5, self._balance()
        return {"inputs": pi * root, "outputs": root / pi}

    def _balance(self) -> Tensor:
        r"""Return :math:`\pi`, with :math:`\pi^2` the mean eigenvalue of A over that of S.

        One number, or one for each group, ``(groups, 1)``.
        """
        means = [self._diagonal(name).mean(-1, keepdim=self.groups > 1) for name in self.orders]
        pi: Tensor = (means[0] / means[1]).sqrt()
        # If a factor is zero, any balance is correct.
        return torch.where(torch.isfinite(pi) & (pi > 0), pi, torch.ones_like(pi))

    def _diagonal(self, name: str) -> Tensor:
        factor = self.average[name]
        return factor if name in self.diagonal else factor.diagonal(dim1=-2, dim2=-1)

    def _shifted(self, name: str, shift: Tensor) -> Tensor:
        shifted = self.average[name].clone()
        shifted.diagonal(dim1=-2, dim2=-1).add_(shift)
        return shifted

    def blank(self) -> Tensors:
        result: Tensors = {}
        for name in self.orders:
            factor, vector = self.average[name], self._diagonal(name)
            if self._is_factored():
                result[f"{name}_inverse"] = torch.empty_like(factor)
                continue
            result[f"{name}_values"] = torch.empty_like(vector).contiguous()
            if name not in self.diagonal:
                result[f"{name}_basis"] = torch.empty_like(factor)
        return result

    def _is_factored(self) -> bool:
        return self.settings.kind == "kfac" and self.settings.damping == "factored"

    def rotate(self, new: Tensors) -> None:
        r"""Transform the scales of EK-FAC to new eigenbases, as if they were exact in the old ones.

        The diagonal of :math:`U'^\top U D U^\top U'` has the entries
        :math:`\sum_k (u'_i \cdot u_k)^2 d_k`.
        """
        scales = self.average.get("scales")
        if scales is None:
            return
        for name in ("inputs", "outputs"):
            if f"{name}_basis" in new:
                # Squares of the entries of U'^T U: the overlap of each new direction with each old.
                overlap = (new[f"{name}_basis"].mT @ self.inverse[f"{name}_basis"]).square()
                scales = overlap @ scales if name == "outputs" else scales @ overlap.mT
        self.average["scales"] = scales.contiguous()

    def precondition(self, gradients: Tensors, delta: float) -> Tensors:
        # (S (x) A)^-1 vec V = vec(S^-1 V A^-1) for symmetric factors and V by rows.
        inverse = self.inverse
        if self._is_factored():
            A, S = inverse["inputs_inverse"], inverse["outputs_inverse"]
            V = self._joint(gradients, A)
            V = S.unsqueeze(-1) * V if "outputs" in self.diagonal else S @ V
            diagonal = "inputs" in self.diagonal
            return self._split(V * A.unsqueeze(-2) if diagonal else times(V, A))
        # U_S [(U_S' V U_A) / (s a' + delta)] U_A', where U = I for a diagonal factor.
        U_A, U_S = inverse.get("inputs_basis"), inverse.get("outputs_basis")
        V = self._joint(gradients, U_A)
        V = V if U_A is None else times(V, U_A)
        V = V if U_S is None else U_S.mT @ V
        if self.settings.kind == "ekfac":
            scales = self.average["scales"]
        else:
            # The eigenvalues of a Kronecker product are the products of eigenvalues.
            s, a = inverse["outputs_values"], inverse["inputs_values"]
            scales = s.unsqueeze(-1) * a.unsqueeze(-2)
        V = V / (scales + delta)
        V = V if U_S is None else U_S @ V
        return self._split(V if U_A is None else times(V, U_A, transposed=True))

    def _joint(self, gradients: Tensors, matrix: Tensor | None) -> Tensor:
        """Return ``[W b]``, ``(o, i)`` or ``(groups, o, i)``, as rows for :func:`times`.

        Zeros follow each row if they follow each row of the matrix.
        """
        if self.table:
            return gradients["weight"].T
        parts = []
        if "weight" in gradients:
            weight = gradients["weight"]
            parts.append(weight.reshape(self.groups, len(weight) // self.groups, -1))
        if "bias" in gradients:
            parts.append(gradients["bias"].reshape(self.groups, -1, 1))
        if zeros := 0 if matrix is None else num_zeros(matrix):
            parts.append(parts[0].new_zeros(*parts[0].shape[:2], zeros))
        joint = parts[0] if len(parts) == 1 else torch.cat(parts, 2)
        return joint[0] if self.groups == 1 else joint

    def _split(self, V: Tensor) -> Tensors:
        if self.table:
            return {"weight": V.T}
        pieces: Tensors = {}
        if "weight" in self.params:
            weight = V[..., :-1] if "bias" in self.params else V
            pieces["weight"] = weight.reshape(self.params["weight"].shape)
        if "bias" in self.params:
            pieces["bias"] = V[..., -1].reshape(-1)
        return pieces


def _columns(calls: list[LayerCall]) -> list[list[tuple[Call, Tensor]]]:
    """Return one list per column: the calls, each with its derivative for this column."""
    return [[(call, columns[i]) for call, columns in calls] for i in range(len(calls[0][1]))]


def _table_squares(
    module: nn.Embedding, calls: Sequence[tuple[Call, Tensor]], basis: Tensor | None
) -> Tensor:
    """Return the sums of squares of sample gradients of an embedding, in a basis of its outputs."""
    # Join the positions of all calls: (batch, T) and (1, batch, T, o).
    ids = torch.cat([call.args[0].flatten(1) for call, _ in calls], 1)
    rows = [deltas.reshape(*deltas.shape[:2], -1, deltas.shape[-1]) for _, deltas in calls]
    deltas = torch.cat(rows, 2)
    call = replace(calls[0][0], args=(ids,))
    squares = squared_gradients(module, call, deltas if basis is None else deltas @ basis)
    # The rows of the table are the columns of the gradient.
    return squares["weight"].T


# ------------------------------------------------------------------------------------------
# Affine norms.


@final
class AffineBlock(Block):
    r"""The blocks of a norm, :math:`y = w z + b`: a 2 x 2 or 1 x 1 matrix for each feature.

    They are the exact second moments of per-sample gradients.
    """

    @property
    def joins(self) -> bool:
        return True

    @property
    def reads_delta(self) -> bool:
        return True

    def add(self, calls: list[LayerCall]) -> None:
        for parts in _columns(calls):
            # Each feature has its own small matrix, so no Kronecker product is needed.
            rows = [
                affine_gradients(self.module, call.args[0], deltas[0], self.keys)
                for call, deltas in parts
            ]
            # The gradient of a sample is the sum over all calls.
            total = torch.stack(rows).sum(0) if len(rows) > 1 else rows[0]
            self._sum("moment", torch.einsum("nci,ncj->cij", total, total))
        self.rows += len(calls[0][0].args[0])

    def _shapes(self, *, whole: bool = False) -> dict[str, tuple[int, ...]]:
        return {"moment": (self.anchor.numel(), len(self.params), len(self.params))}

    def _units(self, gain: float) -> dict[str, float]:
        return {"moment": gain}

    def cost(self) -> int:
        return 100 * self.anchor.numel()

    def decompose(self, delta: float) -> Tensors:
        return eigenbasis(self.average["moment"], None)

    def blank(self) -> Tensors:
        moment = self.average["moment"]
        return {"basis": torch.empty_like(moment), "values": torch.empty_like(moment[..., 0])}

    def precondition(self, gradients: Tensors, delta: float) -> Tensors:
        # (M + delta I)^-1 for every feature, from the eigenvectors of M.
        V = torch.stack([gradients[key].flatten() for key in self.keys], 1).unsqueeze(2)
        U, values = self.inverse["basis"], self.inverse["values"].unsqueeze(2)
        V = (U @ ((U.mT @ V) / (values + delta)))[..., 0]
        return {key: V[:, i].reshape(p.shape) for i, (key, p) in enumerate(self.params.items())}
