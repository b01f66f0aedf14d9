"""`read_step` and `StepReader`: gradient, update and learning rates along eigenvectors."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from ritz._core.blocks import inner_products
from ritz._core.checks import check_finite, check_tensor
from ritz._core.params import check_optimizer, parameters
from ritz._core.storage import storable
from ritz.curvature import Risk
from ritz.optim._curvature_optimizer import optimizer_risk
from ritz.optim._momentum import decay_parts, momentum_buffers, without_momentum


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class StepReading:
    r"""A step of an optimiser in the basis of eigenvectors :math:`u_i` of the curvature.

    Attributes:
        values: Eigenvalues :math:`\lambda_i`, ``(k,)``, float64.
        gradient: :math:`u_i^\top g`, ``(k,)``.
        update: :math:`u_i^\top (w_{t+1} - w_t)` without the decay, ``(k,)``. It includes momentum.
        decay: :math:`u_i^\top` of the part of the step that is weight decay, ``(k,)``.
        rates: Effective learning rates :math:`-u_i^\top \Delta / u_i^\top g`, ``(k,)``, where
            :math:`\Delta` is the step without momentum. NaN if the momentum of the optimiser is not
            known.
        flat_rate: Effective learning rate :math:`-\Delta_\perp^\top g_\perp / \|g_\perp\|^2`, from
            the parts of :math:`\Delta` and gradient that are orthogonal to all eigenvectors.
        curvature_ratio: Estimated-curvature ratio :math:`R`: ``flat_rate`` divided by the learning
            rate along the eigenvector of the largest eigenvalue. It is 1 for SGD with and without
            momentum, and :math:`(\lambda_1 + \delta)/\delta` for a damped Newton step. The divisors
            of Adam mix eigenvectors, so that its rate along one depends on the gradient along the
            others. Its :math:`R` is noisy and may be negative: average it over many steps.
        turn: :math:`u_i^\top (\hat w_{t+1} - \hat w_t)` with the directions
            :math:`\hat w = w/\|w\|`, ``(k,)``. It is the part of the step that matters if the
            outputs do not depend on :math:`\|w\|`.
    """

    values: Tensor
    gradient: Tensor
    update: Tensor
    decay: Tensor
    rates: Tensor
    flat_rate: float
    curvature_ratio: float
    turn: Tensor

    def __str__(self) -> str:
        lines = [
            f"R = {self.curvature_ratio:.4g}, rate orthogonal to these eigenvectors "
            f"{self.flat_rate:.4g}",
            f"  {'eigenvalue':>11}  {'gradient':>10}  {'update':>10}  {'decay':>10}  {'rate':>10}",
        ]
        columns = (self.values, self.gradient, self.update, self.decay, self.rates)
        rows = zip(*(column.flip(0).tolist() for column in columns), strict=True)
        return "\n".join([*lines, *("  " + "  ".join(f"{x:10.4g}" for x in row) for row in rows)])


def read_step(
    values: Tensor,
    vectors: Tensor,
    *,
    gradient: Tensor,
    before: Tensor,
    after: Tensor,
    decay: Tensor | None = None,
    without_momentum: Tensor | None = None,
) -> StepReading:
    r"""Return gradient, update, decay and effective learning rates of a step along eigenvectors.

    .. math:: w_{t+1} = \sum_i (1 - \gamma \alpha_i)\, u_i u_i^\top w_t
        - \sum_i \alpha_i\, u_i u_i^\top g

    Cost: a few products with the matrix of eigenvectors.

    Args:
        values: Eigenvalues, ``(k,)``, ascending.
        vectors: Orthonormal eigenvectors as columns, ``(P, k)``, such as those of
            :func:`ritz.eigenpairs`.
        gradient: The gradient :math:`g` of the step, ``(P,)``.
        before: Weights :math:`w_t`, ``(P,)``.
        after: Weights :math:`w_{t+1}`, ``(P,)``.
        decay: The part of the step that is weight decay, ``(P,)``. Defaults to zero.
        without_momentum: The step :math:`\Delta` that this gradient makes without momentum,
            ``(P,)``, from which the learning rates are computed. Defaults to the update without the
            decay, which is correct for optimisers without momentum.

    Reference: Granziol et al. (2020), Explaining the adaptive generalisation gap, equations 10 and
    11; Granziol, *Spectral Machine Learning*, equations 6.7 and 6.8.
    """
    check_finite("vectors", vectors)
    decay = torch.zeros_like(before) if decay is None else decay
    rows: dict[str, Any] = {"gradient": gradient, "before": before, "after": after, "decay": decay}
    if without_momentum is not None:
        rows["without_momentum"] = without_momentum
    kind: Any = {"dtype": vectors.dtype, "device": vectors.device, "rows": len(vectors)}
    for name, vector in rows.items():
        check_tensor(name, vector, **kind, ndim=1, like="vectors")
    if values.shape != vectors.shape[1:]:
        raise ValueError(f"values must be ({vectors.shape[1]},), got {tuple(values.shape)}")
    # w_{t+1} - w_t = - sum_i alpha_i u_i u_i' g, without decay and momentum.
    update = after - before - decay
    step = update if without_momentum is None else without_momentum
    along = {"gradient": gradient, "update": update, "decay": decay, "step": step}
    inside = {name: inner_products(vectors, vector) for name, vector in along.items()}
    # The parts orthogonal to the eigenvectors.
    g, d = (along[name] - vectors @ inside[name].to(vectors) for name in ("gradient", "step"))
    # Their learning rate by least squares: alpha = -d'g / g'g.
    square = float(g.double().square().sum())
    flat = -float(d.double() @ g.double()) / square if square else math.nan
    parts = {name: part.cpu() for name, part in inside.items()}
    # Equation 11: alpha_i = - u_i'(w_{t+1} - w_t) / u_i'g.
    rates = -parts.pop("step") / parts["gradient"]
    sharp = float(rates[values.argmax()])
    # Layers before a normalisation depend on the direction of the weights alone.
    size, former = (float(vector.double().norm()) for vector in (after, before))
    turn = inner_products(vectors, after / size - before / former)
    return StepReading(
        values=values.double().cpu(),
        rates=rates,
        flat_rate=flat,
        curvature_ratio=flat / sharp if sharp else math.inf,
        turn=turn.double().cpu(),
        **parts,
    )


@final
class StepReader:
    r"""Read the last step of any optimiser along eigenvectors of the curvature.

    It copies the weights before each step (one vector, and another one of momentum buffers), and
    reads gradients and weights after it::

        reader = StepReader(optimizer)
        for step, batch in enumerate(batches):
            ...
            optimizer.step()
            if step % 100 == 0:
                risk = ritz.Risk(model, loss_fn, [batch])
                pairs = ritz.eigenpairs(ritz.hessian(risk), largest=10)
                print(reader.read(risk, pairs.values, pairs.vectors))

    The learning rates are the step without momentum divided by the gradient of this step. Momentum
    is removed for SGD, RMSprop, :class:`KFAC`, :class:`LanczosNewton`, :class:`SpectralSGD`, Adam
    and the adaptive optimisers of ritz. For other optimisers with momentum, and for
    :class:`Lookahead` around momentum, the learning rates and :math:`R` are NaN.

    Weight decay is reported separately. Decoupled decay is :math:`-\alpha\gamma w`. An L2 term is
    preconditioned together with the gradient, so its part of the update is the fraction
    :math:`\gamma u_i^\top w / u_i^\top (g + \gamma w)` of the step without momentum. It is NaN
    where the rates are.

    Args:
        optimizer: Any optimiser. A hook is registered with it.

    Attributes:
        before: The weights before the last step, by parameter.
        buffers: The momentum buffers before the last step, by parameter; zero before the first.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        check_optimizer(optimizer)
        self.optimizer = optimizer
        self.before: dict[Tensor, Tensor] = {}
        self.buffers: dict[Tensor, Tensor] = {}
        self._hook = optimizer.register_step_pre_hook(self._note)

    def close(self) -> None:
        """Remove the hook."""
        self._hook.remove()

    @torch.no_grad()
    def weights_before(self, risk: Risk) -> Tensor | None:
        """Return the weights before the last step, ``(P,)``. ``None`` if there was none.

        Args:
            risk: A :class:`~ritz.Risk` of the model, for the order of the parameters.
        """
        if not self.before:
            return None
        weights = dict(risk.model.named_parameters())
        # A parameter that this optimiser does not train has not moved.
        parts = {n: self.before.get(weights[n], weights[n].detach()) for n in risk.space.shapes}
        return risk.space.flatten(parts).to(risk.theta)

    @torch.no_grad()
    def read(self, risk: Risk, values: Tensor, vectors: Tensor) -> StepReading | None:
        """Return the reading of the last step. ``None`` if there was none.

        Args:
            risk: A :class:`~ritz.Risk` of the model, for the order of the parameters.
            values: Eigenvalues, ``(k,)``, ascending.
            vectors: Eigenvectors as columns, ``(P, k)``.
        """
        risk, params = optimizer_risk(self.optimizer, risk)
        if any(p not in self.before or p.grad is None for p in params.values()):
            return None
        before = _flatten(self.before[p] for p in params.values())
        gradient = _flatten(p.grad for p in params.values() if p.grad is not None)
        weights = {p: self.before[p] for p in params.values()}
        decay, coupled = (
            _flatten(parts.values()) for parts in decay_parts(self.optimizer, weights)
        )
        after = _flatten(params.values())
        sizes = [p.numel() for p in params.values()]
        update, full = (
            {
                p: part.view_as(p)
                for p, part in zip(params.values(), vector.split(sizes), strict=True)
            }
            for vector in (after - before - decay, gradient + coupled)
        )
        step = without_momentum(
            self.optimizer, risk, update=update, gradient=full, buffers=self.buffers
        )
        reading = read_step(
            values,
            vectors,
            gradient=gradient + coupled,
            before=before,
            after=after,
            decay=decay,
            without_momentum=(
                torch.full_like(before, math.nan) if step is None else _flatten(step.values())
            ),
        )
        return _split_decay(reading, inner_products(vectors, coupled).cpu())

    def note(self) -> None:
        """Store the current weights and momentum buffers as those before the next step."""
        self.buffers = momentum_buffers(self.optimizer)
        for p in parameters(self.optimizer):
            if p.requires_grad:
                self.before[p] = p.detach().clone()

    def _note(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.note()


def _flatten(parts: Iterable[Tensor]) -> Tensor:
    return torch.cat([part.detach().reshape(-1) for part in parts])


def _split_decay(reading: StepReading, coupled: Tensor) -> StepReading:
    """Return a reading with the L2 term moved from the gradient and the update to the decay."""
    if not bool(coupled.any()):
        return reading
    # The rate belongs to g + gamma w, so the part of gamma w in the update is -rate gamma w.
    decay = -reading.rates * coupled
    return replace(
        reading,
        gradient=reading.gradient - coupled,
        update=reading.update - decay,
        decay=reading.decay + decay,
    )
