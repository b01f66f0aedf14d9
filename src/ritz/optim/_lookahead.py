"""Lookahead: slow weights that follow those of any optimiser."""

from collections.abc import Callable
from typing import Any, Literal, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from ritz._core.checks import check_choice, check_count, check_range
from ritz._core.params import parameters
from ritz.optim._averaging import move
from ritz.optim._companions import NEVER, Companions, StateDict, check_optimizer, local

MOMENTUM_BUFFERS = ("momentum_buffer", "exp_avg")
SETTINGS = ("optimizer", "k", "alpha", "planned", "momentum")
MomentumRule = Literal["keep", "reset", "pullback"]


@final
class Lookahead(Optimizer):
    r"""Slow weights :math:`\phi` around any optimiser of the fast weights :math:`\theta`.

    From :math:`\phi_0 = \theta_0`, the weights before the first step, after every :math:`k` steps

    .. math:: \phi \leftarrow \phi + \alpha (\theta - \phi), \qquad \theta \leftarrow \phi.

    It is an optimiser: schedulers, gradient scalers, hooks, ``zero_grad`` and ``add_param_group``
    work. ``state_dict()`` is that of the inner optimiser, which holds the slow weights as
    ``state[p]["slow"]`` (float32 for half-precision weights) and, updated by ``state_dict()``,
    ``"slow_step"`` (steps taken) and ``"slow_stop"``. Calling ``step()`` of the inner optimiser has
    the same effect as calling it here.

    To combine it with averaging (Gadam + Lookahead), stop it when the average starts::

        optimizer = Lookahead(torch.optim.AdamW(model.parameters()), until=start)
        average = IterateAverage(optimizer, start=start)

    Cost: one pass over fast and slow weights every ``k`` steps. Memory: one vector.

    Reference: Zhang, Lucas, Ba, Hinton (2019), Lookahead optimizer: k steps forward, 1 step back,
    Alg. 1.

    Args:
        optimizer: The inner optimiser.
        k: Steps from one synchronisation to the next.
        alpha: Step size :math:`\alpha` of the slow weights.
        until: First step, counted from one, without Lookahead. Defaults to never, unless
            :meth:`stop` is called.
        momentum: What to do with the inner momentum (``momentum_buffer`` or ``exp_avg``) at a
            synchronisation: ``keep`` it, ``reset`` it to zero, or ``pullback``, which interpolates
            it like the weights and stores another vector, ``state[p]["slow_momentum"]``.
    """

    optimizer: Optimizer
    k: int
    alpha: float
    planned: int | None
    momentum: MomentumRule

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        k: int = 5,
        alpha: float = 0.5,
        until: int | None = None,
        momentum: MomentumRule = "keep",
    ) -> None:
        check_optimizer(optimizer)
        check_count("k", k)
        check_range("alpha", alpha, low=0.0, high=1.0)
        if until is not None:
            check_count("until", until)
        check_choice("momentum", momentum, ("keep", "reset", "pullback"))
        values = (optimizer, k, alpha, until, momentum)
        self._attach(dict(zip(SETTINGS, values, strict=True)))

    @property
    def until(self) -> int | None:
        """First step without Lookahead."""
        # A call of stop() takes precedence over the plan.
        stopped = self._slow.numbers["stop"]
        return self.planned if stopped == NEVER else stopped

    def stop(self) -> None:
        """Continue with the inner optimiser alone."""
        self._slow.numbers["stop"] = self._slow.numbers["step"] + 1

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> StateDict:
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        state_dict: StateDict = self.optimizer.state_dict()
        for after in self._optimizer_state_dict_post_hooks.values():
            state_dict = after(self, state_dict) or state_dict
        return state_dict

    def load_state_dict(self, state_dict: StateDict) -> None:
        state_dict = state_dict.copy()
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        self.optimizer.load_state_dict(state_dict)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Parameter groups or defaults of the inner optimiser."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """State of the inner optimiser."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Parameter groups or defaults of the inner optimiser."""
        return self.optimizer.defaults

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in SETTINGS} | {"numbers": self._slow.numbers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._attach({name: state[name] for name in SETTINGS})
        # Copying loses hooks: continue with the slow weights in the state of the copy.
        self._slow.adopt(self.optimizer, state["numbers"])

    def _attach(self, settings: dict[str, Any]) -> None:
        # Creates the tables of hooks without registering the parameters a second time.
        super().__setstate__(settings)
        numbers = {"step": 0, "stop": NEVER}
        self._slow = Companions(self.optimizer, key="slow", numbers=numbers)
        self.optimizer.register_step_pre_hook(torch.compiler.disable(self._before_inner))
        self.optimizer.register_step_post_hook(torch.compiler.disable(self._after_inner))

    def _before_inner(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._slow.before_step(optimizer)
        # phi_0 = theta_0: weights may have been loaded since the slow ones were allocated.
        if self._slow.numbers["step"] == 0:
            self._slow.copy_weights()

    def _after_inner(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._slow.after_step(optimizer)
        for state, buffer in self._momenta() if self.momentum == "pullback" else ():
            if "slow_momentum" not in state:
                state["slow_momentum"] = torch.zeros_like(buffer)
        # Set by a gradient scaler for fused optimisers: such a step changed nothing.
        found_inf: Tensor | None = getattr(optimizer, "found_inf", None)
        if self._slow.initialising or (found_inf is not None and bool(found_inf > 0)):
            return
        numbers = self._slow.numbers
        numbers["step"] += 1
        over = self.until is not None and numbers["step"] >= self.until
        if numbers["step"] % self.k == 0 and not over:
            self._synchronise()

    @torch.no_grad()
    def _synchronise(self) -> None:
        slow, fast = list(self._slow.tensors.values()), list(self._slow.tensors)
        # phi <- phi + alpha (theta - phi), then theta <- phi
        move(slow, fast, self.alpha)
        torch._foreach_copy_([local(p) for p in fast], [local(s) for s in slow])
        for state, buffer in self._momenta() if self.momentum != "keep" else ():
            if self.momentum == "reset":
                buffer.zero_()
            else:
                # buffer <- slow + alpha (buffer - slow)
                buffer.lerp_(state["slow_momentum"], 1 - self.alpha)
                state["slow_momentum"].copy_(buffer)

    def _momenta(self) -> list[tuple[dict[str, Any], Tensor]]:
        states = [self.optimizer.state.get(p, {}) for p in parameters(self.optimizer)]
        pairs = [(s, s[name]) for s in states for name in MOMENTUM_BUFFERS
                 if isinstance(s.get(name), Tensor)]  # fmt: skip
        if not pairs:
            raise ValueError(f"optimizer must have momentum for momentum={self.momentum!r}, got "
                             f"{type(self.optimizer).__name__} without")  # fmt: skip
        return pairs
