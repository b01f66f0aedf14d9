"""K-FAC as an optimiser, and around any optimiser."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Unpack, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from ritz._core.checks import check_range, check_type
from ritz._core.params import check_optimizer, check_setting, parameters
from ritz.optim._kfac.preconditioner import (
    Curvature,
    Gradients,
    Options,
    checked_settings,
)


@final
class KFAC(Optimizer):
    r"""Steps preconditioned by Kronecker-factored curvature (K-FAC), or by EK-FAC.

    .. math::
        z \leftarrow \rho z + (F + \delta I)^{-1} \nabla L(w), \qquad
        w \leftarrow (1 - \alpha\lambda)\, w - \alpha z,

    where the block of a layer in the Fisher matrix is :math:`F = S \otimes A`, with the second
    moments :math:`A` of its inputs and :math:`S` of the derivatives in its outputs. Hooks capture
    both in the ordinary forward and backward pass, in train mode::

        optimizer = ritz.optim.KFAC(model, lr=0.01, delta=0.01)
        for inputs, labels in loader:
            optimizer.zero_grad()
            cross_entropy(model(inputs), labels).backward()
            optimizer.step()

    The loss must be the mean over the samples of a step, as in gradient accumulation with the loss
    divided by the number of batches. Each forward pass has one backward pass; put any other, such
    as that of a gradient penalty, into :meth:`paused`. Batches with backward passes of their own
    add up, also with :class:`~torch.nn.parallel.DistributedDataParallel`. Calls of a layer on equal
    numbers of samples with one backward pass are of the same samples, as in a siamese network, and
    count as positions of them. Several processes average their factors and share out the inverses.

    Known layers are linear layers, convolutions, embeddings (with their exact diagonal :math:`A`)
    and affine norms (the exact block of each feature). Any other layer, and one that shares a
    parameter with another, has the plain gradient; a warning says so once, and ``plain`` lists
    them. The damping of a layer is that of the group of its first parameter. Frozen parameters are
    left out. FSDP2 is not supported.

    Cost: every ``factor_every`` steps two products per layer, every ``inverse_every`` steps its
    inverses, and in every step two products with the gradient (four for ``damping="exact"`` and
    EK-FAC). A factor of thousands of inputs dominates all three: ``max_order`` makes it diagonal.
    Memory: factors and inverses, which ``state_dict()`` holds, so that a run resumes bit
    for bit. Inputs of layers are stored from the forward to the backward pass, in those steps
    alone.

    Args:
        model: The model, also inside DistributedDataParallel.
        lr: Learning rate :math:`\alpha`.
        delta: Damping :math:`\delta`, which a :class:`~ritz.optim.GroupSchedule` may change. Along
            directions without curvature the learning rate is :math:`\alpha / \delta`: a ratio
            of 1 is a good start, and a larger damping allows a larger
            learning rate.
        params: Parameters of the model or groups of them. Defaults to all that require a gradient.
        momentum: Momentum :math:`\rho`.
        weight_decay: Decay :math:`\lambda`.
        decoupled_weight_decay: False adds :math:`\lambda w` to the gradient instead.
        nesterov: Use Nesterov momentum.
        kl_clip: Limit :math:`\kappa`: the step is multiplied by
            :math:`\min(1, \sqrt{\kappa / (\alpha^2 g^\top (F + \delta I)^{-1} g)})`. Defaults to no
            limit.
        maximize: Maximize the objective.
        scaler: The ``GradScaler`` of the loss, which float16 needs.
        **options: ``kind``: ``kfac`` or ``ekfac``, which replaces the eigenvalues of
            :math:`S \otimes A` by second moments of sample gradients in its eigenbasis.
            ``fisher``: ``empirical`` (the labels of the data, no extra pass), ``monte_carlo``
            (labels drawn from the model, one more backward pass every ``factor_every`` steps) or
            ``ggn`` (one for each output); the last two need :meth:`observe`. ``damping``:
            ``factored``, :math:`(S + \frac{\sqrt\delta}{\pi} I) \otimes (A + \pi \sqrt\delta I)`,
            whose damping is renewed with the inverses, or ``exact``. ``factor_every`` (10),
            ``inverse_every`` (100), ``factor_decay`` (0.95; a plain mean at first).
            ``weight_sharing``: ``expand`` takes positions for samples, ``reduce`` has the mean
            input and the summed derivative of a sample. ``basis``: eigenbases by ``eigh``, or
            tracked by one step of ``qr``. ``max_order``: factors of larger order are diagonal (in
            EK-FAC, their basis is the identity, and its second moments are exact in that); 0 makes
            all factors diagonal, no limit by default. ``precision``: ``tf32`` or
            ``float32`` products on a GPU, by default as torch is set; inverses are always in
            float32. ``seed``: of drawn labels.

    Reference: Martens and Grosse (2015); Grosse and Martens (2016); George et al. (2018) for
    EK-FAC; Eschenhagen et al. (2023) for weight sharing.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float | Tensor = 0.01,
        delta: float = 0.01,
        *,
        params: ParamsT | None = None,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool = True,
        nesterov: bool = False,
        kl_clip: float | None = None,
        maximize: bool = False,
        scaler: Any = None,
        **options: Unpack[Options],
    ) -> None:
        settings = checked_settings(options)
        self.kl_clip = _checked_clip(kl_clip)
        check_type("model", model, nn.Module, "a torch.nn.Module")
        if params is None:
            params = [p for p in model.parameters() if p.requires_grad]
        defaults = {
            "lr": lr,
            "delta": delta,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "decoupled_weight_decay": decoupled_weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
        }
        _check_group(defaults)
        super().__init__(params, defaults)
        self.curvature: Curvature | None = Curvature(self, model, settings, scaler)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        _check_group(self.defaults | param_group)
        if hasattr(self, "curvature"):
            raise ValueError("KFAC takes all parameter groups when it is created: pass params=")
        super().add_param_group(param_group)

    @property
    def plain(self) -> dict[str, str]:
        """Layers whose gradients are not preconditioned, by name, with the reason."""
        return dict(self._attached().plain)

    def observe(self, outputs: Tensor, target: Any, loss_fn: Any) -> None:
        """Capture the curvature of a batch, for ``fisher`` other than ``empirical``.

        Call it between forward and backward pass. In steps that do not update the factors it does
        nothing.

        Args:
            outputs: Outputs of the model.
            target: Target of the loss.
            loss_fn: A loss of torch that is a negative log likelihood.
        """
        self._attached().observe(outputs, target, loss_fn)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients and the captured curvature."""
        super().zero_grad(set_to_none)
        self._attached().discard()

    def paused(self) -> AbstractContextManager[None]:
        """Capture nothing inside the block, as in a pass that is not part of the step."""
        return self._attached().paused()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step, and return the loss of ``closure`` if there is one."""
        curvature = self._attached()
        with torch.enable_grad():
            loss = None if closure is None else closure()
        gradients = self._gradients()
        if gradients:
            # Clipping comes before momentum: the limit is on the step of this gradient.
            directions = curvature.step(gradients)
            limit = clip_factor(self, gradients, directions, self.kl_clip)
            for group in self.param_groups:
                self._update(
                    [p for p in group["params"] if p in directions], directions, limit, group
                )
        return loss

    def _gradients(self) -> Gradients:
        gradients: Gradients = {}
        for group in self.param_groups:
            sign = -1.0 if group["maximize"] else 1.0
            decay = 0.0 if group["decoupled_weight_decay"] else group["weight_decay"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p.grad.is_sparse:
                    raise RuntimeError("KFAC does not support sparse gradients")
                # Maximizing L is minimizing -L; the curvature, of squares, is that of both.
                gradient = p.grad * sign if sign < 0 else p.grad
                gradients[p] = gradient.add(p, alpha=decay) if decay else gradient
        return gradients

    def _update(
        self,
        params: list[Tensor],
        directions: Gradients,
        limit: Tensor | None,
        group: dict[str, Any],
    ) -> None:
        if not params:
            return
        rate, momentum = float(group["lr"]), group["momentum"]
        # Lists of tensors, which the foreach functions take in a few kernels.
        steps = [directions[p] if limit is None else directions[p] * limit for p in params]
        if momentum:
            for p in params:
                if "momentum_buffer" not in self.state[p]:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p)
            buffers = [self.state[p]["momentum_buffer"] for p in params]
            # z <- rho z + d; with Nesterov the step is d + rho z.
            torch._foreach_mul_(buffers, momentum)
            torch._foreach_add_(buffers, steps)
            steps = (
                list(torch._foreach_add(steps, buffers, alpha=momentum))
                if group["nesterov"]
                else buffers
            )
        if group["decoupled_weight_decay"] and group["weight_decay"]:
            # Decoupled: the decay does not go through the preconditioner.
            torch._foreach_mul_(params, 1 - rate * group["weight_decay"])
        torch._foreach_add_(params, steps, alpha=-rate)

    def _attached(self) -> Curvature:
        curvature: Curvature | None = getattr(self, "curvature", None)
        if curvature is None:
            raise RuntimeError(
                "a copy of KFAC has no model: create KFAC for the model, and load state_dict()"
            )
        return curvature


@final
class KFACPreconditioner:
    """Preconditions the gradients of any optimiser by K-FAC or EK-FAC.

    Before each step of the optimiser the gradient becomes that of :class:`KFAC`, and after it
    itself again::

        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        KFACPreconditioner(optimizer, model, delta=0.01)

    It belongs to the optimiser from then on: the damping is ``delta`` in its groups, and the
    curvature is saved with its state. Create it again before loading a state.

    Args:
        optimizer: An optimiser of parameters of the model, whose ``step()`` needs no closure and
            which has no ``delta``.
        model: The model, also inside DistributedDataParallel.
        delta: Damping.
        kl_clip: See :class:`KFAC`.
        scaler: The ``GradScaler`` of the loss, which float16 needs.
        **options: As of :class:`KFAC`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        delta: float = 0.01,
        *,
        kl_clip: float | None = None,
        scaler: Any = None,
        **options: Unpack[Options],
    ) -> None:
        check_optimizer(optimizer)
        check_setting("delta", delta, zero=False)
        settings = checked_settings(options)
        if any("delta" in group for group in optimizer.param_groups):
            kind = type(optimizer).__name__
            raise ValueError(f"optimizer must not have a damping already, got {kind} with delta")
        for group in optimizer.param_groups:
            group["delta"] = delta
        self.kl_clip = _checked_clip(kl_clip)
        self.curvature = Curvature(optimizer, model, settings, scaler)
        self._gradients: Gradients = {}
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    @property
    def plain(self) -> dict[str, str]:
        """Layers whose gradients are not preconditioned, by name, with the reason."""
        return dict(self.curvature.plain)

    def observe(self, outputs: Tensor, target: Any, loss_fn: Any) -> None:
        """Capture the curvature of a batch; see :meth:`KFAC.observe`."""
        self.curvature.observe(outputs, target, loss_fn)

    def paused(self) -> AbstractContextManager[None]:
        """Capture nothing inside the block."""
        return self.curvature.paused()

    def remove(self) -> None:
        """Remove all hooks, so that steps are no longer preconditioned."""
        self.curvature.remove()
        for handle in self._handles:
            handle.remove()

    @torch.no_grad()
    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        # A closure computes new gradients inside of step(), which would not be preconditioned.
        if any(each is not None for each in (*args[1:], *kwargs.values())):
            raise ValueError("KFACPreconditioner needs gradients before step(), got a closure")
        # A fused kernel skips a step whose scaled gradients overflow.
        overflow: Tensor | None = getattr(optimizer, "found_inf", None)
        if overflow is not None and bool(overflow > 0):
            return
        # The gradients come back after the step: monitors and clipping outside see plain ones.
        self._gradients = {p: p.grad for p in parameters(optimizer) if p.grad is not None}
        if not self._gradients:
            return
        directions = self.curvature.step(self._gradients)
        limit = clip_factor(optimizer, self._gradients, directions, self.kl_clip)
        for p, direction in directions.items():
            # Assigned and not written into: the gradient may be a view of a bucket of DDP.
            p.grad = direction if limit is None else direction * limit

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for p, gradient in self._gradients.items():
            p.grad = gradient
        self._gradients = {}


def clip_factor(
    optimizer: Optimizer, gradients: Gradients, directions: Gradients, limit: float | None
) -> Tensor | None:
    r"""Return :math:`\min(1, \sqrt{\kappa / (\alpha^2 g^\top P g)})`, or ``None`` without limit."""
    if limit is None:
        return None
    total = torch.zeros((), dtype=torch.float64)
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p in gradients:
                # The step changes the model by alpha^2 g'Pg in KL divergence, over all layers.
                product = (gradients[p] * directions[p]).sum(dtype=torch.float64)
                total = total.to(product.device) + float(group["lr"]) ** 2 * product
    # Scaled gradients, which a fused kernel divides by the scale later.
    scale = getattr(optimizer, "grad_scale", None)
    total = total if scale is None else total / scale.double() ** 2
    # The tiniest number stands for a gradient of zero, whose step needs no limit.
    return (limit / total.clamp_min(torch.finfo(torch.float64).tiny)).sqrt().clamp_max(1)


def _checked_clip(limit: float | None) -> float | None:
    if limit is not None:
        check_setting("kl_clip", limit)
    return limit


def _check_group(settings: dict[str, Any]) -> None:
    for name in ("lr", "weight_decay"):
        check_setting(name, settings[name])
    check_setting("delta", settings["delta"], zero=False)
    check_range("momentum", settings["momentum"], low=0.0, high=1.0)
    for name in ("nesterov", "maximize", "decoupled_weight_decay"):
        check_type(name, settings[name], bool, "True or False")
    if settings["nesterov"] and not settings["momentum"]:
        raise ValueError("nesterov=True needs momentum above 0, got 0")
