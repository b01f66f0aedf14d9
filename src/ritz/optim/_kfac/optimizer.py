"""`KFAC`: steps preconditioned by Kronecker-factored curvature."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Unpack, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from ritz._core.checks import check_type
from ritz._core.params import check_momentum, check_setting
from ritz.optim._curvature_optimizer import evaluate, optimizer_gradients
from ritz.optim._kfac.curvature import Curvature, Gradients
from ritz.optim._kfac.preconditioner import check_clip, clip_factor
from ritz.optim._kfac.settings import Options, checked_settings


@final
class KFAC(Optimizer):
    r"""Steps preconditioned by Kronecker-factored curvature (K-FAC), or by EK-FAC.

    .. math::
        z \leftarrow \rho z + (F + \delta I)^{-1} \nabla L(w), \qquad
        w \leftarrow (1 - \alpha\lambda)\, w - \alpha z,

    where the block of a layer in the Fisher matrix is :math:`F = S \otimes A`. :math:`A` is the
    second moment of its inputs, and :math:`S` that of the derivatives in its outputs. Hooks capture
    both in your forward and backward passes in train mode::

        optimizer = ritz.optim.KFAC(model, lr=0.01, delta=0.1)
        for inputs, labels in loader:
            optimizer.zero_grad()
            cross_entropy(model(inputs), labels).backward()
            optimizer.step()

    **Passes.** The loss must be the mean over the samples of a step. If you accumulate gradients,
    divide the loss by the number of batches. Each forward pass must have one backward pass. Put any
    other backward pass, such as that of a gradient penalty, into :meth:`paused`. If a layer is
    called several times before one backward pass, on equal numbers of samples, the calls are taken
    to be of the same samples, as in a siamese network. They count as positions of these samples.
    With :class:`~torch.nn.parallel.DistributedDataParallel`, the processes average their factors
    and divide the inverses among themselves.

    **Layers.** Linear layers, convolutions, embeddings (with their exact, diagonal :math:`A`),
    affine norms (with the exact block of each feature) and ``nn.MultiheadAttention``, in which
    queries, keys and values are one linear layer. Other layers, and layers that share a parameter,
    use the plain gradient. A warning says so once, and ``plain`` lists them. The damping
    of a layer is that of the group of its first parameter. Frozen parameters are left out. FSDP2 is
    not supported.

    **Cost.** Every ``factor_every`` steps two products per layer, every ``inverse_every`` steps its
    inverses, and in every step two products with the gradient (four for ``damping="exact"`` and
    EK-FAC). Layers with thousands of inputs dominate all three: pass ``max_order`` to make their
    factors diagonal. Memory: factors and inverses. They are part of ``state_dict()``, so that a
    resumed run is the same bit for bit. In the steps that update the factors, inputs of layers are
    stored from the forward to the backward pass. On a GPU, inputs and derivatives are stored until
    the step, and one CUDA graph for each batch size has copies of them, if they take at most 2 GiB
    together with the factors.

    Args:
        model: The model, also inside DistributedDataParallel.
        lr: Learning rate :math:`\alpha`.
        delta: Damping :math:`\delta`, which a :class:`~ritz.optim.GroupSchedule` may change. Along
            directions without curvature the effective learning rate is :math:`\alpha / \delta`.
            Start with a ratio of 0.1. With a ratio of 1, four of five networks on digits and MNIST
            diverged. A larger damping allows a larger learning rate.
        params: Parameters of the model or groups of them. Defaults to all that require a gradient.
        momentum: Momentum :math:`\rho`.
        weight_decay: Decay :math:`\lambda`.
        decoupled_weight_decay: If False, :math:`\lambda w` is added to the gradient instead.
        nesterov: Use Nesterov momentum.
        kl_clip: Limit :math:`\kappa`: the step is multiplied by
            :math:`\min(1, \sqrt{\kappa / (\alpha^2 g^\top (F + \delta I)^{-1} g)})`. Defaults to no
            limit.
        maximize: Maximize the objective.
        scaler: The ``GradScaler`` of the loss. Required for float16.
        **options: Options of the curvature.

            ``kind``: ``kfac`` (default) or ``ekfac``, which replaces the eigenvalues of
            :math:`S \otimes A` by the second moments of sample gradients in its eigenbasis.

            ``fisher``: ``empirical`` (default; the labels of the data, no additional pass),
            ``monte_carlo`` (labels drawn from the model, one more backward pass every
            ``factor_every`` steps) or ``ggn`` (one more per output). The last two need
            :meth:`observe`.

            ``damping``: ``factored`` (default),
            :math:`(S + \frac{\sqrt\delta}{\pi} I) \otimes (A + \pi \sqrt\delta I)`, or ``exact``.
            With ``factored``, the inverses are also updated as soon as :math:`\delta` has changed
            by a factor of 1.4.

            ``factor_every`` (10) and ``inverse_every`` (100): Steps between updates.
            ``factor_decay`` (0.95): Decay of the running averages, which are plain means at first.

            ``weight_sharing``: ``expand`` (default) treats positions as samples. ``reduce`` uses
            the mean input and the summed derivative of a sample.

            ``basis``: Eigenbases by ``eigh`` (default), or tracked by one step of ``qr``.

            ``max_order``: Factors of larger order are diagonal, and their eigenbasis in EK-FAC is
            the identity. 0 makes all factors diagonal. Defaults to no limit.

            ``precision``: ``tf32`` or ``float32`` products on a GPU. Defaults to the setting of
            torch. Inverses are always in float32.

            ``seed`` (0): Seed of drawn labels.

    Reference: Martens and Grosse (2015); Grosse and Martens (2016); George et al. (2018) for
    EK-FAC; Eschenhagen et al. (2023) for weight sharing.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float | Tensor = 0.01,
        delta: float = 0.1,
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
        self.kl_clip = check_clip(kl_clip)
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
        """Capture the curvature of a batch with ``fisher="monte_carlo"`` or ``"ggn"``.

        Call it between forward and backward pass. It does nothing in steps that do not update the
        factors.

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
        """Capture nothing inside the block. Use it for passes that are not part of the step."""
        return self._attached().paused()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step, and return the loss of ``closure`` if there is one."""
        curvature = self._attached()
        loss = evaluate(closure)
        gradients = self._gradients()
        if gradients:
            # Clipped before momentum, because the limit is for the step of this gradient.
            directions = curvature.step(gradients)
            limit = clip_factor(self, gradients, directions, self.kl_clip)
            for group in self.param_groups:
                params = [p for p in group["params"] if p in directions]
                self._update(params, directions, limit, group)
        return loss

    def _gradients(self) -> Gradients:
        gradients = optimizer_gradients(self)
        for group in self.param_groups:
            decay = 0.0 if group["decoupled_weight_decay"] else group["weight_decay"]
            for p in (p for p in group["params"] if p in gradients):
                # Maximizing L is minimizing -L. The curvature, a mean of squares, is the same.
                gradient = -gradients[p] if group["maximize"] else gradients[p]
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
        # Lists of tensors, so that foreach functions need only a few kernels.
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
            # Decoupled decay is not preconditioned.
            torch._foreach_mul_(params, 1 - rate * group["weight_decay"])
        torch._foreach_add_(params, steps, alpha=-rate)

    def _attached(self) -> Curvature:
        curvature: Curvature | None = getattr(self, "curvature", None)
        if curvature is None:
            raise RuntimeError(
                "a copy of KFAC has no model: create KFAC for the model, and load state_dict()"
            )
        return curvature


def _check_group(settings: dict[str, Any]) -> None:
    for name in ("lr", "weight_decay"):
        check_setting(name, settings[name])
    check_setting("delta", settings["delta"], zero=False)
    check_momentum(settings["momentum"])
    for name in ("nesterov", "maximize", "decoupled_weight_decay"):
        check_type(name, settings[name], bool, "True or False")
    if settings["nesterov"] and not settings["momentum"]:
        raise ValueError("nesterov=True needs momentum above 0, got 0")
