"""Adaptive optimisers: `Padam`, `PadamW`, `DampedAdamW`, and the averaged `Gadam` and `GadamX`."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import fields
from typing import Any, ClassVar, TypedDict, Unpack, final, get_args

import torch
from torch import Tensor
from torch.optim import Adam, AdamW
from torch.optim.adam import adam
from torch.optim.optimizer import (
    Optimizer,
    ParamsT,
    _default_to_fused_or_foreach,
    _device_dtype_check_for_fused,
    _get_scalar_dtype,
    _use_grad_for_differentiable,
)

from ritz._core.checks import check_choice, check_range
from ritz.optim._adaptive_update import Buffers, CompiledStep, Form, Number, Rule, update
from ritz.optim._averaging import IterateAverage
from ritz.optim._state_tensors import check_shape, named_params

# ------------------------------------------------------------------------------------------
# The base class of the adaptive optimisers: checks, state, and the step.

STATE = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step")


class Flags(TypedDict, total=False):
    """Keyword arguments of every adaptive optimiser; see :class:`AdaptiveOptimizer`."""

    form: Form | None
    decoupled_weight_decay: bool
    amsgrad: bool | None
    maximize: bool
    foreach: bool | None
    fused: bool | None
    capturable: bool
    differentiable: bool
    compile: bool


# ``None`` leaves the choice to the optimiser.
DEFAULTS: dict[str, Any] = dict.fromkeys(Flags.__annotations__, False)
DEFAULTS |= dict.fromkeys(("amsgrad", "form", "foreach", "fused"))
DEFAULTS |= {"decoupled_weight_decay": True}


class AdaptiveOptimizer(Optimizer):
    r"""Base class of the adaptive optimisers.

    The state of each parameter has ``step``, ``exp_avg``, ``exp_avg_sq`` and, with AMSGrad,
    ``max_exp_avg_sq``: two or three vectors. Every setting may differ between parameter groups and
    may change between steps.

    All adaptive optimisers take these keyword arguments:

    * ``form``: Position of epsilon in the denominator; see :class:`~ritz.optim.Padam`.
    * ``decoupled_weight_decay``: If False, weight decay is added to the gradient as an L2 term.
    * ``amsgrad``: Divide by the largest second moment so far. Defaults to True for
      ``form="published"`` only.
    * ``maximize``: Maximize the objective.
    * ``foreach``: Use the multi-tensor implementation, as in ``torch.optim``. Defaults to True on
      CUDA, unless the fused kernel is used.
    * ``fused``: Use torch's fused kernel, for ``form="outside"``. Defaults to True if the device
      has one.
    * ``compile``: Compile the step of a group to one graph with ``torch.compile``. The first step
      takes seconds to a minute. Learning rates, decoupled decays and step counts may change
      freely. A change of another setting, or of the set of parameters with gradients, causes
      another compilation. After too many changes the optimiser warns and stops compiling. It has no
      effect if the step is that of ``torch.optim.AdamW``.
    * ``capturable``: Keep the step count on the device, for CUDA graphs.
    * ``differentiable``: Let gradients flow through the step.
    """

    _eps_key: ClassVar[str] = "eps"

    def __init__(self, params: ParamsT, flags: Flags, *common: Any, **settings: Any) -> None:
        # DampedAdamW has a single form: its epsilon, called delta, stands outside of the root.
        known = Flags.__annotations__.keys() - ({"form"} if self._eps_key == "delta" else set())
        unknown = sorted(flags.keys() - known)
        if unknown:
            raise TypeError(f"{type(self).__name__} got unknown arguments {', '.join(unknown)}")
        names = ("lr", "betas", self._eps_key, "weight_decay")
        defaults = DEFAULTS | dict(zip(names, common, strict=True)) | settings | flags
        self._check(defaults)
        self._graphs: dict[int, CompiledStep] = defaultdict(CompiledStep)
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self._check(self.defaults | param_group)
        super().add_param_group(param_group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("_graphs", defaultdict(CompiledStep))
        for group in self.param_groups:
            # Add the settings that an older pickle does not have.
            group |= DEFAULTS | self.defaults | group
            for param in group["params"]:
                state = self.state.get(param, {})
                if "step" in state and not torch.is_tensor(state["step"]):
                    state["step"] = torch.tensor(float(state["step"]), dtype=_get_scalar_dtype())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state. Raise if the shapes of its parameters differ."""
        # The fused kernel would write beyond the end of a tensor that is too small.
        here, there = map(named_params, (self.param_groups, state_dict["param_groups"]))
        for index, ((name, param), (_, place)) in enumerate(zip(here, there, strict=False)):
            for key, value in state_dict["state"].get(place, {}).items():
                if isinstance(value, Tensor) and value.ndim:
                    check_shape(key, value, name or f"parameter {index}", param)
        super().load_state_dict(state_dict)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # torch.amp.GradScaler then leaves unscaling and skipping to the fused kernel.
        return all(self._runs_fused(group) for group in self.param_groups)

    @_use_grad_for_differentiable
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step, and return the loss of ``closure`` if there is one."""
        # Raises if the step runs in a graph capture without capturable=True. The name of this check
        # is another one in older releases of torch.
        check = getattr(self, "_accelerator_graph_capture_health_check", None)
        (check or self._cuda_graph_capture_health_check)()
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for index, group in enumerate(self.param_groups):
            self._step_group(index, group)
        return loss

    def _step_group(self, index: int, group: dict[str, Any]) -> None:
        rule, fused = self._rule(group), self._runs_fused(group)
        params = [param for param in group["params"] if param.grad is not None]
        if not params:
            return
        if any(param.grad.is_sparse for param in params):
            raise RuntimeError(f"{type(self).__name__} does not support sparse gradients")
        states = [self._param_state(param, rule, fused) for param in params]
        # Without AMSGrad the largest moments are not used, even if the state has them.
        lists = (
            [state[key] for state in states if rule.amsgrad or key != "max_exp_avg_sq"]
            for key in STATE
        )
        buffers = Buffers(params, [param.grad for param in params], *lists)
        if rule.form == "outside":
            torch_step: Any = adam
            torch_step(
                *buffers,
                lr=group["lr"],
                foreach=False if fused else group["foreach"],
                fused=fused or None,  # None: torch decides between the other two
                grad_scale=getattr(self, "grad_scale", None),
                found_inf=getattr(self, "found_inf", None),
                has_complex=any(param.is_complex() for param in params),
                **{each.name: getattr(rule, each.name) for each in fields(rule)[2:]},
            )
        elif group["compile"] and not torch.compiler.is_compiling():
            self._graphs[index](buffers, rule, group["lr"])
        else:
            update(buffers, rule, group["lr"], group["foreach"])

    def _rule(self, group: dict[str, Any]) -> Rule:
        form, (beta1, beta2) = _form(group), group["betas"]
        settings: Any = {name: group[name] for name in Rule.__slots__ if name in group}
        settings |= {"beta1": beta1, "beta2": beta2, "eps": group[self._eps_key], "form": form}
        if group["amsgrad"] is None:
            settings["amsgrad"] = form == "published"
        return Rule(**settings)

    def _runs_fused(self, group: dict[str, Any]) -> bool:
        if _form(group) != "outside":
            return False
        if group["fused"] is not None:
            return bool(group["fused"])
        if group["foreach"] is not None:
            return False
        # As in torch.optim.AdamW: by device, dtype and type of the parameters.
        return _default_to_fused_or_foreach(group["params"], group["differentiable"], True)[0]

    def _param_state(self, param: Tensor, rule: Rule, fused: bool) -> dict[str, Any]:
        state: dict[str, Any] = self.state[param]
        if "step" not in state:
            if fused:
                _device_dtype_check_for_fused(param)
            state["step"] = torch.tensor(0.0, dtype=_get_scalar_dtype())
            # m_0 = v_0 = 0, which the factors 1 - beta^t correct.
            state["exp_avg"] = torch.zeros_like(param)
            state["exp_avg_sq"] = torch.zeros_like(param)
        if rule.amsgrad and "max_exp_avg_sq" not in state:
            state["max_exp_avg_sq"] = torch.zeros_like(param)
        # These kernels read the step count on the device of the parameter.
        if fused or rule.capturable:
            state["step"] = state["step"].to(param.device, _get_scalar_dtype(is_fused=fused))
        return state

    def _check(self, settings: dict[str, Any]) -> None:
        """Raise unless the settings of a group are valid, each by itself and together."""
        _check_lr(settings)
        if not isinstance(betas := settings["betas"], tuple | list) or len(betas) != 2:
            raise ValueError(f"betas must be two numbers, got {betas}")
        for index, beta in enumerate(betas):
            check_range(f"betas[{index}]", beta, low=0)
            if beta >= 1:
                raise ValueError(f"betas[{index}] must be less than 1, got {beta}")
        for name in (self._eps_key, "weight_decay"):
            check_range(name, settings[name], low=0)
        check_range("partial", settings["partial"], low=0, high=0.5)
        _check_flags(settings)


def _form(group: dict[str, Any]) -> Form:
    """Return the position of epsilon: for power 1/2 outside the root by default, as in torch."""
    default: Form = "outside" if group["partial"] == 0.5 else "inside"
    return group["form"] or default


def _check_lr(settings: dict[str, Any]) -> None:
    lr = settings["lr"]
    if isinstance(lr, Tensor):
        if settings["foreach"] and not settings["capturable"]:
            raise ValueError(
                "lr as a Tensor is not supported for capturable=False and foreach=True"
            )
        if lr.numel() != 1:
            raise ValueError(f"Tensor lr must be 1-element, got shape {tuple(lr.shape)}")
        lr = lr.item()
    check_range("lr", lr, low=0)


def _check_flags(settings: dict[str, Any]) -> None:
    form, partial = settings["form"], settings["partial"]
    if form is not None:
        check_choice("form", form, get_args(Form))
    if form == "outside" and partial != 0.5:
        raise ValueError(f"form='outside' needs partial=0.5, got partial={partial}")
    if settings["fused"] and _form(settings) != "outside":
        raise ValueError(
            "fused=True needs partial=0.5 with epsilon outside the root, got "
            f"partial={partial} and form={form!r}"
        )
    # The messages of the optimisers of torch, which the conformance tests of torch expect.
    if settings["fused"] and settings["differentiable"]:
        raise RuntimeError("`fused` does not support `differentiable`")
    if settings["fused"] and settings["foreach"]:
        raise RuntimeError("`fused` and `foreach` cannot be `True` together.")
    if settings["foreach"] and settings["differentiable"]:
        raise RuntimeError("`foreach` does not support `differentiable`")
    if settings["compile"] and settings["differentiable"]:
        raise ValueError("compile=True does not support differentiable=True")


# ------------------------------------------------------------------------------------------
# Partially adaptive methods, with coupled or decoupled decay.


@final
class Padam(AdaptiveOptimizer):
    r"""Padam: Adam with a power of the second moment from 0 to 1/2, and an L2 term in the gradient.

    .. math::
        g \leftarrow \nabla L(w) + \lambda w, \qquad
        w \leftarrow w - \alpha\, \hat m / (\hat v + \epsilon)^p

    Power 0 is SGD with momentum, and power 1/2 is Adam. At 1/2 the denominator defaults to
    :math:`\sqrt{\hat v} + \epsilon`, as in ``torch.optim.Adam``, and the step uses torch's fused
    kernel. With ``form="inside"``, :math:`\epsilon` has the effect of :math:`\sqrt\epsilon` outside
    of the root.

    Args:
        params: Parameters or groups of them.
        lr: Learning rate :math:`\alpha`, a number or a tensor of one element.
        betas: Decay rates of the running means of the gradient and of its square.
        eps: Term :math:`\epsilon` in the denominator.
        weight_decay: Coefficient :math:`\lambda`.
        partial: Power :math:`p`, from 0 to 1/2. Powers 1/2, 1/4, 1/8 and 1/16 are the fastest.
        **flags: ``form`` is the position of :math:`\epsilon`: ``"inside"`` the power,
            ``"outside"`` the root (for :math:`p = 1/2` only), or ``"published"``. The last one is
            the formula of the authors' code, :math:`(\sqrt{v_{\max}} + \epsilon)^{2p}` with
            AMSGrad, whose bias correction acts like a warm-up. ``form`` defaults to ``"outside"``
            at :math:`p = 1/2`, otherwise to ``"inside"``. ``amsgrad``, ``maximize``, ``foreach``,
            ``fused``, ``capturable`` and ``differentiable`` are as in ``torch.optim.AdamW``.
            ``compile=True`` compiles the step.

    Reference: Chen and Gu (2018), Closing the generalization gap of adaptive gradient methods.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: Number = 0.1,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        partial: float = 0.125,
        **flags: Unpack[Flags],
    ) -> None:
        flags.setdefault("decoupled_weight_decay", False)
        super().__init__(params, flags, lr, betas, eps, weight_decay, partial=partial)


@final
class PadamW(AdaptiveOptimizer):
    r"""Padam with decoupled weight decay.

    .. math::
        w \leftarrow (1 - \alpha\lambda)\, w - \alpha\, \hat m / (\hat v + \epsilon)^p

    At power 1/2 this is ``torch.optim.AdamW`` with its fused kernel, unless ``form="inside"``.

    Args:
        params: Parameters or groups of them.
        lr: Learning rate :math:`\alpha`, a number or a tensor of one element.
        betas: Decay rates of the running means of the gradient and of its square.
        eps: Term :math:`\epsilon` in the denominator.
        weight_decay: Decoupled decay :math:`\lambda`.
        partial: Power :math:`p`, from 0 to 1/2.
        **flags: See :class:`Padam`.

    Reference: Granziol et al. (2021), Iterate averaged adaptive gradient methods, Algorithm 1
    without the average.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: Number = 0.1,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 5e-4,
        *,
        partial: float = 0.125,
        **flags: Unpack[Flags],
    ) -> None:
        super().__init__(params, flags, lr, betas, eps, weight_decay, partial=partial)


# ------------------------------------------------------------------------------------------
# Adaptive methods that average their iterates.


class AveragedOptimizer(AdaptiveOptimizer):
    """Base class of Gadam and GadamX: adaptive steps with a tail average of the iterates.

    Attributes:
        average: The average.
    """

    average: IterateAverage

    def __getstate__(self) -> dict[str, Any]:
        self.state_dict()  # the average writes its counts into the state
        plan = (self.average.planned, self.average.interval)
        return super().__getstate__() | {"_plan": plan}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "average" not in self.__dict__:
            # Copies and pickles have no hooks. Attach a new average and load it from the state.
            self._attach(*state["_plan"])
            self.load_state_dict(self.state_dict())

    def _attach(self, start: int | None, interval: int) -> None:
        self.average = IterateAverage(self, start=start, interval=interval)


@final
class Gadam(AveragedOptimizer):
    r"""AdamW with an average of the weights over the last steps (tail average).

    .. math::
        w_t = (1 - \alpha\lambda)\, w_{t-1} - \alpha\, \hat m / (\sqrt{\hat v} + \epsilon), \qquad
        \bar w \leftarrow \frac{n \bar w + w_t}{n + 1} \text{ for } t \ge T

    The step is that of ``torch.optim.AdamW``, with its fused kernel. ``optimizer.average`` is an
    :class:`~ritz.optim.IterateAverage`. To average once per epoch of ``m`` steps, beginning with
    the weights after ``e`` epochs, use ``start=e * m + 1, interval=m``. For example, ``m = 100``
    and ``e = 5`` average the weights after steps 500, 600, 700 and so on. Memory: three times that
    of the parameters::

        optimizer = Gadam(model.parameters(), start=501, interval=100)
        for inputs, targets in batches:
            optimizer.zero_grad()
            loss_fn(model(inputs), targets).backward()
            optimizer.step()
        with optimizer.average.applied(model):
            evaluate(model)

    Args:
        params: Parameters or groups of them.
        lr: Learning rate :math:`\alpha`, a number or a tensor of one element.
        betas: Decay rates of the running means of the gradient and of its square.
        eps: Term :math:`\epsilon` in the denominator.
        weight_decay: Decay :math:`\lambda`.
        start: First step :math:`T` of the average, counted from one; 0 also means the first. With
            None, averaging starts when you call ``optimizer.average.restart()``.
        interval: Number of steps between two averaged weights.
        partial: Power :math:`p` of the second moment, from 0 to 1/2. Below 1/2, :math:`\epsilon`
            is inside the power.
        **flags: See :class:`Padam`. ``decoupled_weight_decay=False`` adds the decay to the
            gradient, as an L2 term.

    Reference: Granziol et al. (2021), Iterate averaged adaptive gradient methods, Algorithm 1.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: Number = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        start: int | None = None,
        interval: int = 1,
        partial: float = 0.5,
        **flags: Unpack[Flags],
    ) -> None:
        super().__init__(params, flags, lr, betas, eps, weight_decay, partial=partial)
        self._attach(start, interval)


@final
class GadamX(AveragedOptimizer):
    r"""Gadam with a smaller power of the second moment, 1/8 by default.

    .. math::
        w_t = (1 - \alpha\lambda)\, w_{t-1} - \alpha\, \hat m / (\hat v + \epsilon)^p, \qquad
        \bar w \leftarrow \frac{n \bar w + w_t}{n + 1} \text{ for } t \ge T

    Use learning rates as for SGD, such as 0.1, and not as for Adam. A step costs about as much as
    one of torch's fused AdamW with ``compile=True``, and as one of the unfused AdamW without. See
    :class:`Gadam` for an example.

    Args:
        params: Parameters or groups of them.
        lr: Learning rate :math:`\alpha`, a number or a tensor of one element.
        betas: Decay rates of the running means of the gradient and of its square.
        eps: Term :math:`\epsilon` in the denominator.
        weight_decay: Decay :math:`\lambda`.
        start: First step :math:`T` of the average; see :class:`Gadam`.
        interval: Number of steps between two averaged weights.
        partial: Power :math:`p`; 0.2 in the published language models.
        **flags: See :class:`Gadam`.

    Reference: Granziol et al. (2021), Iterate averaged adaptive gradient methods, Algorithm 1.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: Number = 0.1,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 5e-4,
        *,
        start: int | None = None,
        interval: int = 1,
        partial: float = 0.125,
        **flags: Unpack[Flags],
    ) -> None:
        super().__init__(params, flags, lr, betas, eps, weight_decay, partial=partial)
        self._attach(start, interval)


# ------------------------------------------------------------------------------------------
# Damping as a hyper-parameter.


@final
class DampedAdamW(AdaptiveOptimizer):
    r"""AdamW with a damping (epsilon) that can be tuned and scheduled like the learning rate.

    .. math::
        w \leftarrow (1 - \alpha\lambda)\, w - \alpha\, \hat m / (\sqrt{\hat v} + \delta)

    The step is that of ``torch.optim.AdamW`` with ``eps`` equal to :math:`\delta`, with its fused
    kernel. ``group["delta"]`` may differ between groups and change between steps. With a small
    damping, steps in flat directions are larger than in sharp ones. With a large damping the
    optimiser approaches SGD with learning rate :math:`\alpha/\delta`.

    Args:
        params: Parameters or groups of them.
        lr: Learning rate :math:`\alpha`, a number or a tensor of one element.
        betas: Decay rates of the running means of the gradient and of its square.
        delta: Damping :math:`\delta`. 1e-8 is Adam's epsilon; the reference tunes values up to 1.
        weight_decay: Decay :math:`\lambda`.
        **flags: See :class:`Gadam`.

    Reference: Granziol et al. (2020), Explaining the adaptive generalisation gap, section 3.2.
    """

    _eps_key: ClassVar[str] = "delta"

    def __init__(
        self,
        params: ParamsT,
        lr: Number = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        delta: float = 1e-8,
        weight_decay: float = 1e-2,
        **flags: Unpack[Flags],
    ) -> None:
        super().__init__(params, flags, lr, betas, delta, weight_decay, partial=0.5)


# Optimisers that divide a running mean of gradients by a function of a running mean of squares.
ADAPTIVE = (Adam, AdamW, Padam, PadamW, DampedAdamW, Gadam, GadamX)
