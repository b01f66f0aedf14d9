"""`KFACPreconditioner`: gradients preconditioned by K-FAC, for any optimiser."""

from contextlib import AbstractContextManager
from typing import Any, Unpack, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ritz._core.params import check_optimizer, check_setting, parameters
from ritz.optim._kfac.curvature import Curvature, Gradients, as_laid_out
from ritz.optim._kfac.settings import Options, checked_settings


@final
class KFACPreconditioner:
    """Precondition the gradients of any optimiser by K-FAC or EK-FAC.

    Before each step of the optimiser, the gradients are replaced by the preconditioned gradients of
    :class:`KFAC`. After the step the original gradients are restored::

        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        KFACPreconditioner(optimizer, model, delta=0.1)

    The optimiser keeps the preconditioner alive. The damping is ``delta`` in its groups, and the
    curvature is saved with its state. Before you load a state, create the preconditioner again: a
    copy or a pickle of the optimiser takes its plain steps.

    Args:
        optimizer: An optimiser of parameters of the model. Its ``step()`` must not need a closure,
            and its groups must not have ``delta`` already.
        model: The model, also inside DistributedDataParallel.
        delta: Damping.
        kl_clip: See :class:`KFAC`.
        scaler: The ``GradScaler`` of the loss, which float16 needs.
        **options: The same as those of :class:`KFAC`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        delta: float = 0.1,
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
        self.kl_clip = check_clip(kl_clip)
        self.curvature = Curvature(optimizer, model, settings, scaler)
        self._gradients: Gradients = {}
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    def __repr__(self) -> str:
        kind, layers = self.curvature.settings.kind, len(self.curvature.blocks)
        name = type(self.curvature.optimizer).__name__
        return f"KFACPreconditioner({name}, kind={kind!r}: {layers} layers)"

    @property
    def plain(self) -> dict[str, str]:
        """Layers whose gradients are not preconditioned, by name, with the reason."""
        return dict(self.curvature.plain)

    def observe(self, outputs: Tensor, target: Any, loss_fn: Any) -> None:
        """Capture the curvature of a batch, as :meth:`KFAC.observe` does."""
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
        # A closure computes new gradients inside of step(), too late to be preconditioned.
        if any(each is not None for each in (*args[1:], *kwargs.values())):
            raise ValueError("step() of a preconditioned optimiser takes no closure, got one: call "
                             "backward() before step()")  # fmt: skip
        # A fused kernel skips a step whose scaled gradients overflow.
        overflow: Tensor | None = getattr(optimizer, "found_inf", None)
        if overflow is not None and bool(overflow > 0):
            return
        # Restored after the step, so that monitors and clipping see the original gradients.
        self._gradients = {p: p.grad for p in parameters(optimizer) if p.grad is not None}
        if not self._gradients:
            return
        directions = self.curvature.step(self._gradients)
        limit = clip_factor(optimizer, self._gradients, directions, self.kl_clip)
        for p, direction in directions.items():
            # Assigned and not modified in place, as the gradient may be a view of a DDP bucket.
            p.grad = as_laid_out(direction if limit is None else direction * limit, p)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for p, gradient in self._gradients.items():
            p.grad = gradient
        self._gradients = {}


def clip_factor(
    optimizer: Optimizer, gradients: Gradients, directions: Gradients, limit: float | None
) -> Tensor | None:
    r"""Return :math:`\min(1, \sqrt{\kappa / (\alpha^2 g^\top P g)})`, or ``None`` if no limit."""
    if limit is None:
        return None
    total = torch.zeros((), dtype=torch.float64)
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p in gradients:
                # The KL divergence by which the step changes the model is about alpha^2 g'Pg.
                product = (gradients[p] * directions[p]).sum(dtype=torch.float64)
                total = total.to(product.device) + float(group["lr"]) ** 2 * product
    # Gradients may be scaled if a fused kernel divides them by the scale later.
    scale = getattr(optimizer, "grad_scale", None)
    total = total if scale is None else total / scale.double() ** 2
    # clamp_min avoids a division by zero if all gradients are zero.
    return (limit / total.clamp_min(torch.finfo(torch.float64).tiny)).sqrt().clamp_max(1)


def check_clip(limit: float | None) -> float | None:
    if limit is not None:
        check_setting("kl_clip", limit)
    return limit
