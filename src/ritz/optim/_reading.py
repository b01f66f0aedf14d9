"""Reading a step: its gradient, update, decay and effective learning rates along eigenvectors."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from ritz._core.checks import check_finite, check_tensor
from ritz._core.params import check_optimizer, parameters
from ritz._core.storage import storable
from ritz.curvature import Risk
from ritz.optim._curvature import optimizer_risk

# Names of optimisers whose weight decay is not a term of the gradient.
DECOUPLED = ("AdamW", "Adafactor", "Muon")


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class StepReading:
    r"""A step of an optimiser in the basis of eigenvectors :math:`u_i` of the curvature.

    Attributes:
        values: Eigenvalues :math:`\lambda_i`, ``(k,)``, float64.
        gradient: :math:`u_i^\top g`, ``(k,)``.
        update: :math:`u_i^\top (w_{t+1} - w_t)` without the decay, ``(k,)``.
        decay: :math:`u_i^\top` of the part of the step that is weight decay, ``(k,)``.
        rates: Effective learning rates :math:`-\text{update}_i / \text{gradient}_i`, ``(k,)``.
        flat_rate: Effective learning rate :math:`-\Delta_\perp^\top g_\perp / \|g_\perp\|^2`, from
            the parts of update and gradient that are orthogonal to all eigenvectors.
        curvature_ratio: Estimated-curvature ratio :math:`R`: ``flat_rate`` over the learning rate
            along the eigenvector of the largest eigenvalue. 1 for SGD;
            :math:`(\lambda_1 + \delta)/\delta` for a damped Newton step.
        turn: :math:`u_i^\top (\hat w_{t+1} - \hat w_t)` of the directions :math:`\hat w = w/\|w\|`,
            ``(k,)``: the part of the step that a network invariant to the scale of
            :math:`w` responds to.
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
            f"R = {self.curvature_ratio:.4g}, rate beside the eigenvectors {self.flat_rate:.4g}",
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
) -> StepReading:
    r"""Return a step in the basis of some eigenvectors.

    .. math:: w_{t+1} = \sum_i (1 - \gamma \alpha_i)\, u_i u_i^\top w_t
        - \sum_i \alpha_i\, u_i u_i^\top g

    Cost: a few products with the matrix of eigenvectors.

    Args:
        values: Eigenvalues, ``(k,)``, ascending.
        vectors: Orthonormal eigenvectors as columns, ``(P, k)``, such as those of
            :func:`ritz.eigenpairs`.
        gradient: The gradient :math:`g` that the step followed, ``(P,)``.
        before: Weights :math:`w_t`, ``(P,)``.
        after: Weights :math:`w_{t+1}`, ``(P,)``.
        decay: The part of the step that is weight decay, ``(P,)``. Defaults to zero.

    Reference: Granziol et al. (2020), Explaining the adaptive generalisation gap, equations 10 and
    11; Granziol, *Spectral Machine Learning*, equations 6.7 and 6.8.
    """
    check_finite("vectors", vectors)
    rows: dict[str, Any] = {"gradient": gradient, "before": before, "after": after}
    for name, vector in rows.items():
        check_tensor(name, vector, dtype=vectors.dtype, device=vectors.device, rows=len(vectors))
    decay = torch.zeros_like(before) if decay is None else decay
    # w_{t+1} - w_t = - sum_i alpha_i u_i u_i' g, without what the decay has done.
    update = after - before - decay
    along = {"gradient": gradient, "update": update, "decay": decay}
    inside = {name: vectors.T @ vector for name, vector in along.items()}
    # The parts beside the eigenvectors.
    g, d = (along[name] - vectors @ inside[name] for name in ("gradient", "update"))
    # Beside the eigenvectors there is one learning rate, that of least squares: alpha = -d'g / g'g.
    square = float(g.double().square().sum())
    flat = -float(d.double() @ g.double()) / square if square else math.nan
    parts = {name: part.double().cpu() for name, part in inside.items()}
    # Equation 11: alpha_i = - u_i'(w_{t+1} - w_t) / u_i'g.
    rates = -parts["update"] / parts["gradient"]
    sharp = float(rates[values.argmax()])
    # The direction of the weights is what counts for layers before a normalisation.
    turn = vectors.T @ (after / after.norm() - before / before.norm())
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
    r"""Reads the last step of any optimiser in the eigenvectors of its curvature.

    It copies the weights before each step (one vector), and reads gradients and weights after it::

        reader = StepReader(optimizer)
        for step, batch in enumerate(batches):
            ...
            optimizer.step()
            if step % 100 == 0:
                risk = ritz.Risk(model, loss_fn, [batch])
                pairs = ritz.eigenpairs(ritz.hessian(risk), largest=10)
                print(reader.read(risk, pairs.values, pairs.vectors))

    The learning rates are the update over the gradient of this step; with momentum, the update has
    earlier gradients in it. Weight decay is split off. If it is decoupled, it is
    :math:`-\alpha\gamma w`. An L2 term goes through the preconditioner with the gradient, so it has
    the share of :math:`\gamma u_i^\top w` in :math:`u_i^\top (g + \gamma w)` of the update.

    Args:
        optimizer: Any optimiser; a hook is registered with it.

    Attributes:
        before: The weights before the last step, by parameter.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        check_optimizer(optimizer)
        self.optimizer = optimizer
        self.before: dict[Tensor, Tensor] = {}
        self._hook = optimizer.register_step_pre_hook(self._note)

    def close(self) -> None:
        """Remove the hook."""
        self._hook.remove()

    @torch.no_grad()
    def weights_before(self, risk: Risk) -> Tensor | None:
        """Return the weights before the last step, ``(P,)``; ``None`` if there was none.

        Args:
            risk: A risk of the model, which says in which order the parameters are.
        """
        if not self.before:
            return None
        weights = dict(risk.model.named_parameters())
        # A parameter that this optimiser does not train has not moved.
        parts = {n: self.before.get(weights[n], weights[n].detach()) for n in risk.space.shapes}
        return risk.space.flatten(parts).to(risk.theta)

    @torch.no_grad()
    def read(self, risk: Risk, values: Tensor, vectors: Tensor) -> StepReading | None:
        """Return the reading of the last step; ``None`` if there was none.

        Args:
            risk: A risk of the model, which says in which order the parameters are.
            values: Eigenvalues, ``(k,)``, ascending.
            vectors: Eigenvectors as columns, ``(P, k)``.
        """
        risk, params = optimizer_risk(self.optimizer, risk)
        if any(p not in self.before or p.grad is None for p in params.values()):
            return None
        group = {p: group for group in self.optimizer.param_groups for p in group["params"]}
        before = _joined(self.before[p] for p in params.values())
        gradient = _joined(p.grad for p in params.values() if p.grad is not None)
        coupled = torch.zeros_like(before)
        decay = torch.zeros_like(before)
        place = 0
        for p in params.values():
            part, place = slice(place, place + p.numel()), place + p.numel()
            factor = float(group[p].get("weight_decay", 0.0))
            if decoupled(self.optimizer, group[p]):
                decay[part] = -learning_rate(group[p]) * factor * before[part]
            else:
                coupled[part] = factor * before[part]
        reading = read_step(
            values,
            vectors,
            gradient=gradient + coupled,
            before=before,
            after=_joined(params.values()),
            decay=decay,
        )
        return _split_decay(reading, (vectors.T @ coupled).double().cpu())

    def note(self) -> None:
        """Note the current weights, as before a step."""
        for p in parameters(self.optimizer):
            if p.requires_grad:
                self.before[p] = p.detach().clone()

    def _note(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.note()


def _joined(parts: Iterable[Tensor]) -> Tensor:
    return torch.cat([part.detach().reshape(-1) for part in parts])


def learning_rate(group: dict[str, Any]) -> float:
    """Return the learning rate of a group, 0 if it has none yet."""
    # The lr of SpectralSGD is a factor on the rate that it measures, None at first.
    return float(group.get("lr", 0.0)) * (group.get("rate", 1.0) or 0.0)


def decoupled(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Return whether weight decay is applied beside the gradient."""
    if "decoupled_weight_decay" in group:
        return bool(group["decoupled_weight_decay"])
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner  # inside Lookahead
    if isinstance(optimizer, SGD):  # also with noise, in this package
        return False
    # torch.optim.RMSprop and Adagrad add an L2 term; the other optimisers of this package never do.
    kind = type(optimizer)
    return kind.__module__.startswith("ritz.") or any(name in kind.__name__ for name in DECOUPLED)


def _split_decay(reading: StepReading, coupled: Tensor) -> StepReading:
    """Return a reading with the L2 term, which is in its gradient, as a decay."""
    if not bool(coupled.any()):
        return reading
    # The rate is that of g + gamma w; gamma w takes its share of the update.
    decay = -reading.rates * coupled
    return replace(
        reading,
        gradient=reading.gradient - coupled,
        update=reading.update - decay,
        decay=reading.decay + decay,
    )
