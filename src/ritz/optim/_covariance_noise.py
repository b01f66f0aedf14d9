"""`CovarianceNoise` and `NoisySGD`: large batches with the gradient noise of small batches."""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Literal, final

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Optimizer

from ritz._core.checks import check_choice, check_count, check_range, check_type
from ritz._core.distributed import unwrapped
from ritz._core.params import check_optimizer, parameters
from ritz.curvature._shared import (
    NOISE_KINDS,
    OF_STEP,
    Adapter,
    Draw,
    Forward,
    NoiseKind,
    StepNoise,
    scale_of_step,
)
from ritz.optim._kfac import curvature_of

STEP = "noise_step"  # number of steps taken, in the first group of the optimiser
ROOT = "noise_"  # prefix of the names of saved square roots in the state of a parameter
REFRESH = {"kfac": 10}  # default of refresh: a factorisation costs as much as several steps


@final
class CovarianceNoise:
    r"""Adds the gradient noise of a small batch to the steps of a large batch.

    .. math:: w \leftarrow w - \alpha\, \text{step}(g) + \alpha
        \sqrt{\frac{M_L - M_S}{M_L M_S}}\; F^{1/2} \xi,

    Here :math:`M_L` is the number of samples of a step, :math:`M_S` that of a small batch, and
    :math:`F^{1/2} \xi` is noise with the covariance of the gradient of one sample, or an
    approximation of it; see :func:`ritz.curvature.noise_sample` for the kinds. ``isotropic``,
    ``multiplicative`` and ``sgld`` do not depend on the batch size and are added without the factor
    :math:`\sqrt{\cdot}`. Any optimiser of torch can be used, because hooks of its ``step()`` add
    the noise. In your own training loop::

        noise = CovarianceNoise(optimizer, model, loss_fn, small=128)
        for batch in batches:
            optimizer.zero_grad()
            loss = noise.backward(batch)   # forward and backward pass
            optimizer.step()

    To accumulate gradients, call ``backward`` several times before a step, with the ``share`` of
    each part. With ``DistributedDataParallel``, pass the wrapped model. Each process draws its own
    random signs and labels, and the resulting noise is summed. Second moments are summed too, and
    the noise drawn from them is the same in all processes. The covariance is therefore that of all
    samples of the step.

    **Batch norm in train mode.** ``diagonal``, ``kfac`` and ``trace`` need a second forward pass
    without dropout, in which the statistics of each batch are constants. ``full``, ``centred`` and
    ``true`` use the forward pass of the step.

    **CUDA graphs.** :func:`ritz.training.fit` replays steps from CUDA graphs: one for steps that
    compute second moments, one for those that reuse them and one for those without noise. Steps
    with ``kfac``, and those of a gradient scaler, which read from the device whether the numbers
    are finite, run as usual.

    **Overflow.** With a gradient scaler, elements of the noise that are not finite are set to zero.
    Without one they reach the weights, as those of a gradient do.

    **Saving.** ``optimizer.state_dict()`` contains the number of steps. The random numbers depend
    on seed, step and process only, so that a resumed run is the same bit for bit. With ``refresh``
    above one, the square roots of the second moments are saved too.

    **Cost**, relative to a step without noise: ``full``, ``centred`` and ``true`` 5/3, for a second
    backward pass. ``diagonal`` and ``trace`` 1.3 to 1.5 for linear layers without batch norm; with
    batch norm in train mode there is a second forward and backward pass too, which makes it at
    least 1.7. Convolutions with more than a few positions cost more, because the gradient of every
    sample is formed. Memory: one vector, and two with ``refresh``.

    Args:
        optimizer: Any optimiser of parameters of the model.
        model: The model, possibly wrapped.
        loss_fn: Mean loss of outputs and target.
        kind: A kind of :func:`ritz.curvature.noise_sample`.
        small: Number of samples :math:`M_S` of a small batch, less than that of a step.
        until: First step without noise, counted from one. Defaults to never.
        momentum: ``after``: the noise is added to the weights after the step, so that momentum does
            not accumulate it. ``before``: the noise is added to the gradient.
        refresh: Number of steps after which the second moments of ``diagonal``, ``trace`` and
            ``kfac`` are computed again. Defaults to 1, and to 10 for ``kfac``.
        sigma: Standard deviation of ``isotropic`` and ``multiplicative``.
        temperature: Temperature of ``sgld``, such as one over the number of training samples.
        forward: Takes the model and a batch, returns ``(outputs, target)``.
        seed: Seed of the noise.

    Reference: Wen et al., *Interplay between optimization and generalization of stochastic gradient
    descent with covariance noise*, Algorithm 1, sections 2.2 and 5.4.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        loss_fn: Callable[..., Any] | None = cross_entropy,
        *,
        kind: NoiseKind = "diagonal",
        small: int = 128,
        until: int | None = None,
        momentum: Literal["after", "before"] = "after",
        refresh: int | None = None,
        sigma: float = 0.1,
        temperature: float | None = None,
        forward: Forward | None = None,
        seed: int = 0,
    ) -> None:
        check_optimizer(optimizer)
        check_type("model", model, nn.Module, "a torch.nn.Module")
        check_choice("kind", kind, NOISE_KINDS)
        small = check_count("small", small)
        check_choice("momentum", momentum, ("after", "before"))
        check_range("sigma", sigma, low=0.0)
        if until is not None:
            until = check_count("until", until)
        interval = REFRESH.get(kind, 1) if refresh is None else refresh
        self.refresh = check_count("refresh", interval)
        if kind == "sgld" and temperature is None:
            raise ValueError("temperature must be given for kind='sgld', got None")
        if temperature is not None:
            check_range("temperature", temperature, low=0.0)
        self.optimizer, self.kind, self.small, self.until = optimizer, kind, small, until
        self.momentum, self.sigma, self.temperature, self.seed = momentum, sigma, temperature, seed
        self._adapter = Adapter(model, loss_fn, forward)
        bare = Adapter(unwrapped(model), loss_fn, forward)
        self._step = StepNoise(
            bare, kind=kind, seed=seed, reused=self.refresh > 1, beside=self._beside
        )
        held = set(parameters(optimizer))
        self._named = {name: p for name, p in self._step.params.items() if p in held}
        if not self._named:
            raise ValueError("optimizer must have parameters of the model, got only others")
        self._names = {p: name for name, p in self._named.items()}
        self._noise: Draw | None = None  # noise of the next step
        self._begun, self._recording, self._versions = False, False, list[int]()
        before = optimizer.register_step_pre_hook(torch.compiler.disable(self._before))
        after = optimizer.register_step_post_hook(torch.compiler.disable(self._after))
        # Must run before the hooks of averages, which include the noise.
        hooks: Any = optimizer._optimizer_step_post_hooks
        hooks.move_to_end(after.id, last=False)
        self._hooks = before.id, after.id
        optimizer.register_load_state_dict_post_hook(self._load)

    def __repr__(self) -> str:
        return (
            f"CovarianceNoise({type(self.optimizer).__name__}, kind={self.kind!r}, "
            f"small={self.small}, until={self.until}: {self.num_steps} steps)"
        )

    @property
    def num_steps(self) -> int:
        """Number of steps taken."""
        return int(self.optimizer.param_groups[0].get(STEP, 0))

    @property
    def active(self) -> bool:
        """Whether the next step has noise."""
        return self.until is None or self.num_steps + 1 < self.until

    def backward(
        self, batch: Any, *, share: float = 1.0, scaler: torch.amp.GradScaler | None = None
    ) -> Tensor:
        """Run forward and backward pass of a batch, compute its part of the noise, return its loss.

        Args:
            batch: ``(*inputs, target)`` or a dictionary with ``labels``, as for the model.
            share: Weight of the batch in the loss of the step, if gradients are accumulated.
            scaler: Gradient scaler for float16. You call its ``step`` and ``update``.
        """
        if not self._begun or self._is_cleared():
            self.begin()
        with self.observing(batch):
            outputs, target = self._adapter(batch)
            loss: Tensor = self._adapter.loss(outputs, target)
        # A tensor, so that the step does not wait for the device.
        scale: Any = 1.0 if scaler is None else scaler.scale(torch.ones_like(loss)).detach()
        self.pull(loss * share * scale, outputs, target, batch, scale, share)
        self._versions = self._versions_of_gradients()
        return loss.detach()

    def _versions_of_gradients(self) -> list[int]:
        return [p.grad._version for p in self._named.values() if p.grad is not None]

    def _is_cleared(self) -> bool:
        """Return whether the gradients were cleared since the last backward pass.

        A gradient scaler may skip a step. Its gradients are then cleared, and the noise with them.
        """
        versions = self._versions_of_gradients()
        if not versions:
            return True
        # Reading whether gradients are zero waits for the device, so it is done only if they
        # changed.
        grads = [p.grad for p in self._named.values() if p.grad is not None]
        return versions != self._versions and not any(bool(grad.any()) for grad in grads)

    # --------------------------------------------------------------------------------------
    # For training loops that run the passes themselves.

    def begin(self) -> None:
        """Begin a step. Noise of a step that was not taken is discarded."""
        self._begun, self._noise = True, None
        if not self._recording:  # a replay reads the seeds of its own step
            self._step.generators.begin(self.num_steps + 1)
        self._step.begin(fresh=self._fresh)

    @property
    def _fresh(self) -> bool:
        """Whether the next step computes second moments."""
        return self.num_steps % self.refresh == 0 or not self._step.roots

    def observing(self, batch: Any) -> Any:
        """Return a context in which the forward pass of a batch must run, outside of autocast."""
        return self._step.observing(batch, active=self.active and self.kind not in OF_STEP)

    def pull(
        self, loss: Tensor, outputs: Any, target: Any, batch: Any, scale: float | Tensor, share: Any
    ) -> None:
        """Run the backward pass of a loss and compute its noise; see :meth:`StepNoise.pull`."""
        if not self.active or self.kind in OF_STEP:
            loss.backward()
        else:
            self._step.pull(loss, outputs, target, batch, scale, share)

    @torch.no_grad()
    def collect(self, scale: float | Tensor = 1.0) -> None:
        """Compute the noise of the step. Call it before gradients are clipped.

        Args:
            scale: Factor of a gradient scaler, if the gradients are not unscaled yet.
        """
        if not self.active:
            return

        def mean(name: str) -> Tensor:
            gradient = self._named[name].grad if name in self._named else None
            if gradient is None:
                return torch.zeros_like(self._step.params[name])
            return gradient / scale if isinstance(scale, Tensor) or scale != 1 else gradient

        # This noise does not depend on the samples of the step.
        if self.kind in OF_STEP:
            self._noise = self._of_step(mean)
            return
        draw, rows = self._step.collect(mean)
        # Checked in the first step alone, since the number may be a tensor on the device.
        if self.num_steps == 0 and rows <= self.small:
            raise ValueError(
                f"small must be less than the samples of a step, got {self.small} and {int(rows)}"
            )
        # A shorter batch at the end of an epoch may be as noisy as a small batch already.
        excess: Any = 1 / self.small - 1 / rows
        many = isinstance(excess, Tensor)
        factor = excess.clamp_min(0).sqrt() if many else math.sqrt(max(0.0, excess))
        self._noise = replace(draw, scale=draw.scale * factor)

    def _beside(self) -> AbstractContextManager[None]:
        # K-FAC must not capture the additional passes of the noise.
        curvature = curvature_of(self.optimizer)
        return nullcontext() if curvature is None else curvature.paused()

    def _advance(self) -> None:
        """Count a step."""
        if self.refresh > 1 and self.active and self._step.fresh:
            self._save()
        self._noise, self._begun = None, False
        self.optimizer.param_groups[0][STEP] = self.num_steps + 1

    # --------------------------------------------------------------------------------------
    # Hooks.

    def _of_step(self, mean: Callable[[str], Tensor]) -> Draw:
        rates = {p: g["lr"] for g in self.optimizer.param_groups for p in g["params"]}
        device = self._step.device
        rng = self._step.generators.shared
        noise: dict[str, Tensor] = {}
        for name, p in self._named.items():
            xi = torch.randn(p.shape, generator=rng, device=device, dtype=p.dtype)
            size = self._size(rates[p])
            noise[name] = xi.mul_(size) if self.kind != "multiplicative" else xi * mean(name) * size
        return Draw(values=noise, roots={}, scale=1.0)

    def _size(self, rate: float | Tensor) -> float | Tensor:
        """Return the standard deviation of the noise of a step. It is 0 if the step is."""
        if self.kind != "sgld":
            return self.sigma
        heat = float(self.temperature or 0.0)
        if isinstance(rate, Tensor):  # not read, which would wait for the device
            rate = rate.double()
            return torch.where(rate > 0, (2 * heat / rate).sqrt(), 0.0)
        return scale_of_step(self.kind, self.sigma, rate, heat) if rate else 0.0

    @torch.no_grad()
    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self.active:
            return
        # Fused optimisers are given scaled gradients.
        scale = getattr(optimizer, "grad_scale", None)
        if self._noise is None:
            if not self._begun:
                if self.kind not in OF_STEP:
                    raise RuntimeError(
                        "CovarianceNoise needs the batch of a step: call noise.backward(batch) "
                        "instead of loss.backward()"
                    )
                self.begin()
            self.collect(1.0 if scale is None else scale)
        if self.momentum == "before" and self._noise is not None:
            grads = {k: p.grad for k, p in self._named.items() if p.grad is not None}
            # w - alpha step(g - noise): the sign agrees with momentum="after".
            self._noise.add_to(grads, -1.0 if scale is None else -scale)

    @torch.no_grad()
    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        draw = self._noise
        if draw is not None and self.momentum == "after":
            found_inf: Tensor | None = getattr(optimizer, "found_inf", None)
            if found_inf is not None:
                # No noise if a fused optimiser skips the step. where() instead of a product,
                # because the noise may be infinite.
                values = {
                    name: torch.where(found_inf.to(noise.device) == 0, noise, 0.0)
                    for name, noise in draw.formed().items()
                }
                draw = Draw(values=values, roots={}, scale=1.0)
            for group in optimizer.param_groups:
                weights = [p for p in group["params"] if p in self._names and p.grad is not None]
                draw.add_to({self._names[p]: p for p in weights}, group["lr"])
        if not self._recording:
            self._advance()

    def _save(self) -> None:
        for name, roots in self._step.roots.items():
            p = self._named.get(name)
            # Not for parameters without a gradient, whose state the optimiser has not created yet.
            if p is not None and p.grad is not None:
                self.optimizer.state[p] |= {ROOT + key: root for key, root in roots.items()}

    def _load(self, optimizer: Optimizer) -> None:
        self._step.roots = {}
        for name, p in self._named.items():
            state = optimizer.state.get(p, {})
            roots = {k.removeprefix(ROOT): v for k, v in state.items() if k.startswith(ROOT)}
            if roots:
                self._step.roots[name] = roots


@final
class NoiseReplay:
    """The noise of steps that are replayed from CUDA graphs: begin(), the replay, advance()."""

    def __init__(self, noise: CovarianceNoise) -> None:
        self._noise = noise

    @property
    def is_possible(self) -> bool:
        """Whether steps can be recorded. The host reads whether a factorisation succeeded."""
        return self._noise.kind != "kfac"

    @property
    def phase(self) -> str:
        """What the next step computes: two steps of the same phase have the same graph."""
        if not self._noise.active:
            return "without noise"
        return "new moments" if self._noise._fresh else "old moments"

    @property
    def generators(self) -> tuple[torch.Generator, ...]:
        """The random generators that a graph draws from."""
        generators = self._noise._step.generators
        return generators.shared, generators.own

    @property
    def hooks(self) -> tuple[int, ...]:
        """Numbers of the hooks of the optimiser whose work is part of a graph."""
        return self._noise._hooks

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Context manager in which a step is recorded. It is not taken, and so not counted."""
        noise = self._noise
        noise._recording = True
        try:
            yield
        finally:
            noise._recording, noise._begun, noise._noise = False, False, None

    def begin(self) -> None:
        """Set the seeds that the graph of the next step reads."""
        self._noise.begin()

    def advance(self) -> None:
        """Count a step."""
        self._noise._advance()


@final
class NoisySGD(SGD):
    r"""SGD with :class:`CovarianceNoise`, as published: momentum does not accumulate the noise.

    Call ``optimizer.noise.backward(batch)`` instead of ``loss.backward()``, as
    :func:`ritz.training.fit` does. A copy or a pickle has no model, so its ``step()`` raises.

    Args:
        model: The model, possibly wrapped.
        loss_fn: Mean loss of outputs and target.
        lr: Learning rate.
        momentum: Momentum.
        weight_decay: Weight decay.
        nesterov: Use Nesterov momentum.
        **noise: Keyword arguments of :class:`CovarianceNoise`, such as ``kind``, ``small`` and
            ``until``. Its ``momentum`` is called ``noise_momentum`` here.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any] | None = cross_entropy,
        *,
        lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        **noise: Any,
    ) -> None:
        check_type("model", model, nn.Module, "a torch.nn.Module")
        trainable = [p for p in model.parameters() if p.requires_grad]
        super().__init__(
            trainable, lr=lr, momentum=momentum, weight_decay=weight_decay, nesterov=nesterov
        )
        # SGD and CovarianceNoise both have an argument called momentum.
        noise["momentum"] = noise.pop("noise_momentum", "after")
        self.noise = CovarianceNoise(self, model, loss_fn, **noise)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if not hasattr(self, "noise"):  # torch copies the groups and the state alone
            self.register_step_pre_hook(_refuse_step)


def _refuse_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    raise RuntimeError(
        "a copy of NoisySGD has no model: create NoisySGD for the model, and load state_dict()"
    )
