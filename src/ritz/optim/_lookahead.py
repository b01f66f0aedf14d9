"""`Lookahead`: slow weights that follow the fast weights of any optimiser."""

from collections.abc import Callable
from operator import attrgetter
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from ritz._core.checks import check_count, check_range
from ritz._core.params import check_optimizer
from ritz.optim._averaging import move
from ritz.optim._state_tensors import NEVER, StateDict, StateTensors, local

SETTINGS = ("optimizer", "k", "alpha", "planned")


@final
class Lookahead(Optimizer):
    r"""Slow weights :math:`\phi` around any optimiser of the fast weights :math:`\theta`.

    The slow weights start as :math:`\phi_0 = \theta_0`, the weights before the first step. After
    every :math:`k` steps

    .. math:: \phi \leftarrow \phi + \alpha (\theta - \phi), \qquad \theta \leftarrow \phi.

    It is an optimiser: schedulers, gradient scalers, hooks, ``zero_grad`` and ``add_param_group``
    work. ``state_dict()`` is that of the inner optimiser. It contains the slow weights as
    ``state[p]["slow"]`` (float32 for half-precision weights), the number of steps as
    ``"slow_step"``, and ``"slow_stop"``. Calling ``step()`` of the inner optimiser has the same
    effect as calling it here.

    To combine it with averaging (Gadam + Lookahead), stop it when the average starts::

        optimizer = Lookahead(torch.optim.AdamW(model.parameters()), until=start)
        average = IterateAverage(optimizer, start=start)

    Cost: one pass over fast and slow weights every ``k`` steps. Memory: one vector.

    Reference: Zhang, Lucas, Ba, Hinton (2019), Lookahead optimizer: k steps forward, 1 step back,
    Alg. 1.

    Args:
        optimizer: The inner optimiser.
        k: Number of steps between two updates of the slow weights.
        alpha: Step size :math:`\alpha` of the slow weights.
        until: First step without Lookahead, counted from one. Defaults to never, unless
            :meth:`stop` is called.
    """

    def __init__(
        self, optimizer: Optimizer, *, k: int = 5, alpha: float = 0.5, until: int | None = None
    ) -> None:
        check_optimizer(optimizer)
        k = check_count("k", k)
        check_range("alpha", alpha, low=0.0, high=1.0)
        if until is not None:
            until = check_count("until", until)
        self.optimizer, self.k, self.alpha, self.planned = optimizer, k, alpha, until
        self._attach()

    def __repr__(self) -> str:
        return f"Lookahead(k={self.k}, alpha={self.alpha}, until={self.until}) of {self.optimizer}"

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
        args: tuple[Any, ...] = (self, closure)
        kwargs: dict[str, Any] = {}
        for before in self._optimizer_step_pre_hooks.values():
            args, kwargs = before(self, args, kwargs) or (args, kwargs)
        loss = self.optimizer.step(*args[1:], **kwargs)
        for after in self._optimizer_step_post_hooks.values():
            after(self, args, kwargs)
        return loss

    # Prevents torch from wrapping this method. The wrapper would run the global hooks, which the
    # step of the inner optimiser runs already.
    step.hooked = True  # type: ignore[attr-defined]

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

    # Groups, state and defaults are those of the inner optimiser.
    param_groups = property(attrgetter("optimizer.param_groups"))
    state = property(attrgetter("optimizer.state"))
    defaults = property(attrgetter("optimizer.defaults"))

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in SETTINGS} | {"numbers": self._slow.numbers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name in SETTINGS:
            setattr(self, name, state[name])
        self._attach()
        # A copy has no hooks. Continue with the slow weights in its state.
        self._slow.adopt(self.optimizer, state["numbers"])

    def _attach(self) -> None:
        # Create the hook tables of an Optimizer without registering the parameters again.
        super().__setstate__({})
        numbers = {"step": 0, "stop": NEVER}
        self._slow = StateTensors(self.optimizer, key="slow", numbers=numbers)
        self.optimizer.register_step_pre_hook(torch.compiler.disable(self._before_inner))
        self.optimizer.register_step_post_hook(torch.compiler.disable(self._after_inner))

    def _before_inner(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._slow.before_step(optimizer)
        # phi_0 = theta_0. Weights may have been loaded since the slow ones were allocated.
        if self._slow.numbers["step"] == 0:
            self._slow.copy_weights()

    def _after_inner(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._slow.after_step(optimizer)
        # Set by a gradient scaler for fused optimisers. A skipped step is not counted.
        found_inf: Tensor | None = getattr(optimizer, "found_inf", None)
        if self._slow.initialising or (found_inf is not None and bool(found_inf > 0)):
            return
        numbers = self._slow.numbers
        numbers["step"] += 1
        # phi is updated after steps k, 2k, ..., up to the step before `until`.
        over = self.until is not None and numbers["step"] >= self.until
        if numbers["step"] % self.k == 0 and not over:
            self._synchronise()

    @torch.no_grad()
    def _synchronise(self) -> None:
        slow, fast = list(self._slow.tensors.values()), list(self._slow.tensors)
        if not slow:  # all parameters are frozen, and torch refuses empty lists
            return
        # phi <- phi + alpha (theta - phi), then theta <- phi
        move(slow, fast, self.alpha)
        torch._foreach_copy_([local(p) for p in fast], [local(s) for s in slow])
