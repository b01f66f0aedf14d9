"""Adaptive optimisers: Padam, PadamW, DampedAdamW, and with an average Gadam and GadamX."""

from collections.abc import Callable
from typing import Any, ClassVar, TypedDict, Unpack, final

import torch
from torch import Tensor
from torch.optim.optimizer import (
    Optimizer,
    ParamsT,
    _default_to_fused_or_foreach,
    _device_dtype_check_for_fused,
    _get_scalar_dtype,
    _use_grad_for_differentiable,
)

from ritz._core.checks import check_choice, check_range
from ritz.optim._averaging import IterateAverage
from ritz.optim._companions import check_shape, listed
from ritz.optim._update import Buffers, CompiledStep, Form, Number, Rule, update

# ------------------------------------------------------------------------------------------
# What the adaptive optimisers share: checks, state, and the step.

FORMS = ("inside", "outside", "published")
# Settings of a group that the rule of its update has under the same name.
COPIED = ("weight_decay", "decoupled_weight_decay", "partial", "maximize", "capturable",
          "differentiable")  # fmt: skip
STATE = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step")
# Raises during the capture of a step that cannot be captured. Older releases name it after CUDA.
CAPTURE_CHECK = (
    "_accelerator_graph_capture_health_check"
    if hasattr(Optimizer, "_accelerator_graph_capture_health_check")
    else "_cuda_graph_capture_health_check"
)


class Flags(TypedDict, total=False):
    """Keywords that every adaptive optimiser takes; see :class:`AdaptiveOptimizer`."""

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

    Each parameter has in ``state`` its ``step``, ``exp_avg``, ``exp_avg_sq`` and, with AMSGrad,
    ``max_exp_avg_sq``: two or three vectors. Every setting may differ between parameter groups and
    may change between steps.

    All of them take these keywords:

    * ``amsgrad``: Divide by the largest second moment so far. Defaults to True for
      ``form="published"`` only.
    * ``maximize``: Maximize the objective.
    * ``foreach``: Take all parameters through each operation together. Defaults to True on CUDA,
      unless the fused kernel is used.
    * ``fused``: Use torch's fused kernel, for power 1/2 with epsilon outside the root. Defaults to
      True where the device has one.
    * ``compile``: Compile the step of a group to one graph with ``torch.compile``. The first step
      takes seconds to a minute. Learning rates, decoupled decays and step counts may change
      freely. Other settings, and the set of parameters with gradients, are constants of the graph:
      if they change at every step, as betas do with ``OneCycleLR``, compilation is given up with a
      warning. Ignored if torch's own AdamW takes the step.
    * ``capturable``: Keep the step count on the device, for CUDA graphs.
    * ``differentiable``: Let gradients flow through the step.
    """

    _eps_key: ClassVar[str] = "eps"

    def __init__(
        self, params: ParamsT, flags: Flags, common: tuple[Any, ...], **settings: Any
    ) -> None:
        unknown = sorted(flags.keys() - Flags.__annotations__.keys())
        if unknown:
            raise TypeError(f"{type(self).__name__} got unknown arguments {', '.join(unknown)}")
        # DampedAdamW calls its epsilon delta.
        names = ("lr", "betas", self._eps_key, "weight_decay")
        defaults = DEFAULTS | dict(zip(names, common, strict=True)) | settings | flags
        self._check(defaults)
        self._graphs: dict[int, CompiledStep] = {}
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self._check(self.defaults | param_group)
        super().add_param_group(param_group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("_graphs", {})
        for group in self.param_groups:
            # Settings that an older pickle does not have.
            group |= DEFAULTS | self.defaults | group
            for param in group["params"]:
                state = self.state.get(param, {})
                if "step" in state and not torch.is_tensor(state["step"]):
                    state["step"] = torch.tensor(float(state["step"]), dtype=_get_scalar_dtype())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state. One of another model raises: the fused kernel would write beyond it."""
        here, there = listed(self.param_groups), listed(state_dict["param_groups"])
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
        getattr(self, CAPTURE_CHECK)()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
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
        buffers = Buffers(
            params,
            [param.grad for param in params],
            *([] if key.startswith("max") and not rule.amsgrad else [state[key] for state in states]
              for key in STATE),
        )  # fmt: skip
        if group["compile"] and rule.form != "outside" and not torch.compiler.is_compiling():
            if index not in self._graphs:
                self._graphs[index] = CompiledStep()
            self._graphs[index](buffers, rule, group["lr"])
            return
        update(
            buffers,
            rule,
            lr=group["lr"],
            foreach=group["foreach"],
            fused=fused,
            grad_scale=getattr(self, "grad_scale", None),
            found_inf=getattr(self, "found_inf", None),
        )

    def _rule(self, group: dict[str, Any]) -> Rule:
        form, amsgrad = _form(group), group["amsgrad"]
        beta1, beta2 = group["betas"]
        amsgrad = form == "published" if amsgrad is None else amsgrad
        rest: Any = {name: group[name] for name in COPIED}
        eps = group[self._eps_key]
        return Rule(beta1=beta1, beta2=beta2, eps=eps, form=form, amsgrad=amsgrad, **rest)

    def _runs_fused(self, group: dict[str, Any]) -> bool:
        if _form(group) != "outside":
            return False
        if group["fused"] is not None:
            return bool(group["fused"])
        if group["foreach"] is not None:
            return False
        # As torch decides for its own AdamW: by device, dtype and type of the parameters.
        return _default_to_fused_or_foreach(group["params"], group["differentiable"], True)[0]

    def _param_state(self, param: Tensor, rule: Rule, fused: bool) -> dict[str, Any]:
        state: dict[str, Any] = self.state[param]
        if "step" not in state:
            if fused:
                _device_dtype_check_for_fused(param)
            state["step"] = torch.tensor(0.0, dtype=_get_scalar_dtype())
            state["exp_avg"] = torch.zeros_like(param)
            state["exp_avg_sq"] = torch.zeros_like(param)
        if rule.amsgrad and "max_exp_avg_sq" not in state:
            state["max_exp_avg_sq"] = torch.zeros_like(param)
        # Kernels that never wait for the host read the step count beside the parameter.
        if fused or rule.capturable:
            state["step"] = state["step"].to(param.device, _get_scalar_dtype(is_fused=fused))
        return state

    def _check(self, settings: dict[str, Any]) -> None:
        """Raise unless the settings of a group are possible, each and together."""
        _check_lr(settings)
        _check_betas(settings["betas"])
        for name in (self._eps_key, "weight_decay"):
            check_range(name, settings[name], low=0)
        check_range("partial", settings["partial"], low=0, high=0.5)
        _check_flags(settings)


def _form(group: dict[str, Any]) -> Form:
    """Return where epsilon stands: by default outside the root for power 1/2, as in torch."""
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


def _check_betas(betas: tuple[float, float]) -> None:
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise ValueError(f"betas must be two numbers, got {betas}")
    for index, beta in enumerate(betas):
        check_range(f"betas[{index}]", beta, low=0)
        if beta >= 1:
            raise ValueError(f"betas[{index}] must be less than 1, got {beta}")


def _check_flags(settings: dict[str, Any]) -> None:
    form, partial = settings["form"], settings["partial"]
    if form is not None:
        check_choice("form", form, FORMS)
    if form == "outside" and partial != 0.5:
        raise ValueError(f"form='outside' needs partial=0.5, got partial={partial}")
    if settings["fused"] and _form(settings) != "outside":
        raise ValueError("fused=True needs partial=0.5 with epsilon outside the root, got "
                         f"partial={partial} and form={form!r}")  # fmt: skip
    # The words of torch's own optimisers, which its conformance tests expect.
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
    r"""Partially adaptive steps with an L2 term in the gradient.

    .. math::
        g \leftarrow \nabla L(w) + \lambda w, \qquad
        w \leftarrow w - \alpha\, \hat m / (\hat v + \epsilon)^p

    Power 0 is SGD with momentum, 1/2 is Adam. At 1/2 the denominator is :math:`\sqrt{\hat v} +
    \epsilon`, as in ``torch.optim.Adam``, and torch's fused kernel takes the step, unless
    ``form="inside"``: there :math:`\epsilon` acts like :math:`\sqrt\epsilon` outside the root.

    Args:
        params: Parameters or groups of them.
        lr: Learning rate :math:`\alpha`, a number or a tensor of one element.
        betas: Decay rates of the running means of the gradient and of its square.
        eps: Term :math:`\epsilon` in the denominator.
        weight_decay: Coefficient :math:`\lambda`.
        partial: Power :math:`p`, from 0 to 1/2. Powers 1/2, 1/4, 1/8 and 1/16 are the fastest.
        form: Where :math:`\epsilon` stands: ``"inside"`` the power, ``"outside"`` the root
            (:math:`p = 1/2`), or ``"published"``, the authors' code: :math:`(\sqrt{v_{\max}} +
            \epsilon)^{2p}` with AMSGrad. There the factor :math:`\sqrt{1 - \beta_2^t}`, applied for
            every :math:`p`, acts as a warm-up. Defaults to ``"outside"`` at 1/2, otherwise to
            ``"inside"``.
        **flags: See :class:`~ritz.optim._adaptive.AdaptiveOptimizer`.

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
        form: Form | None = None,
        **flags: Unpack[Flags],
    ) -> None:
        common = (lr, betas, eps, weight_decay)
        super().__init__(
            params, flags, common, partial=partial, form=form, decoupled_weight_decay=False
        )


@final
class PadamW(AdaptiveOptimizer):
    r"""Partially adaptive steps with decoupled decay.

    .. math::
        w \leftarrow (1 - \alpha\lambda)\, w - \alpha\, \hat m / (\hat v + \epsilon)^p

    At power 1/2 this is ``torch.optim.AdamW``, on its fused kernel, unless ``form="inside"``.

    Args:
        params: Parameters or groups of them.
        lr: Learning rate :math:`\alpha`, a number or a tensor of one element.
        betas: Decay rates of the running means of the gradient and of its square.
        eps: Term :math:`\epsilon` in the denominator.
        weight_decay: Decoupled decay :math:`\lambda`.
        partial: Power :math:`p`, from 0 to 1/2.
        form: Where :math:`\epsilon` stands; see :class:`Padam`.
        **flags: See :class:`~ritz.optim._adaptive.AdaptiveOptimizer`.

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
        form: Form | None = None,
        **flags: Unpack[Flags],
    ) -> None:
        super().__init__(params, flags, (lr, betas, eps, weight_decay), partial=partial, form=form)


# ------------------------------------------------------------------------------------------
# Adaptive methods that average their iterates.


class AveragedOptimizer(AdaptiveOptimizer):
    """Base class of Gadam and GadamX: adaptive steps with a tail average of the iterates."""

    def __init__(
        self,
        params: ParamsT,
        flags: Flags,
        common: tuple[Any, ...],
        plan: tuple[int | None, int],
        **settings: Any,
    ) -> None:
        super().__init__(params, flags, common, **settings)
        self._plan = plan
        self._attach()

    @property
    def average(self) -> IterateAverage:
        """The average of the iterates."""
        return self._average

    def __getstate__(self) -> dict[str, Any]:
        self.state_dict()  # the average writes its counts into the state
        return super().__getstate__() | {"_plan": self._plan}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_average" not in self.__dict__:
            # Copying and pickling lose hooks: attach anew, and continue from the state.
            self._attach()
            self.load_state_dict(self.state_dict())

    def _attach(self) -> None:
        start, interval = self._plan
        self._average = IterateAverage(self, start=start, interval=interval)


@final
class Gadam(AveragedOptimizer):
    r"""Adam that generalises: AdamW with a tail average of its iterates.

    .. math::
        w_t = (1 - \alpha\lambda)\, w_{t-1} - \alpha\, \hat m / (\sqrt{\hat v} + \epsilon), \qquad
        \bar w \leftarrow \frac{n \bar w + w_t}{n + 1} \text{ for } t \ge T

    The step is ``torch.optim.AdamW``'s, on its fused kernel. ``optimizer.average`` is the
    :class:`~ritz.optim.IterateAverage`; evaluate inside ``with optimizer.average.applied(model):``.
    To average once per epoch of ``m`` steps, from the weights after ``e`` epochs on, use
    ``start=e * m + 1, interval=m``. Memory: three vectors, one of them the average.

    Args:
        params: Parameters or groups of them.
        lr: Learning rate :math:`\alpha`, a number or a tensor of one element.
        betas: Decay rates of the running means of the gradient and of its square.
        eps: Term :math:`\epsilon` in the denominator.
        weight_decay: Decay :math:`\lambda`.
        start: First step :math:`T` of the average, counted from one; 0 also means the first. None
            waits for ``optimizer.average.restart()``.
        interval: Steps from one averaged iterate to the next.
        partial: Power :math:`p` of the second moment, from 0 to 1/2; below 1/2 :math:`\epsilon`
            moves inside it.
        form: Where :math:`\epsilon` stands; see :class:`~ritz.optim.Padam`.
        decoupled_weight_decay: False puts the decay into the gradient, as an L2 term.
        **flags: See :class:`~ritz.optim._adaptive.AdaptiveOptimizer`.

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
        form: Form | None = None,
        decoupled_weight_decay: bool = True,
        **flags: Unpack[Flags],
    ) -> None:
        power = {"partial": partial, "form": form}
        super().__init__(params, flags, (lr, betas, eps, weight_decay), (start, interval),
                         decoupled_weight_decay=decoupled_weight_decay, **power)  # fmt: skip


@final
class GadamX(AveragedOptimizer):
    r"""Partially adaptive Gadam: power 1/8 of the second moment.

    .. math::
        w_t = (1 - \alpha\lambda)\, w_{t-1} - \alpha\, \hat m / (\hat v + \epsilon)^p, \qquad
        \bar w \leftarrow \frac{n \bar w + w_t}{n + 1} \text{ for } t \ge T

    Use learning rates on the scale of SGD. With ``compile=True`` a step costs about as much as
    torch's fused AdamW, without it as much as the unfused one.

    Args:
        params: Parameters or groups of them.
        lr: Learning rate :math:`\alpha`, a number or a tensor of one element.
        betas: Decay rates of the running means of the gradient and of its square.
        eps: Term :math:`\epsilon` in the denominator.
        weight_decay: Decay :math:`\lambda`.
        start: First step :math:`T` of the average; see :class:`Gadam`.
        interval: Steps from one averaged iterate to the next.
        partial: Power :math:`p`; 0.2 in the published language models.
        form: Where :math:`\epsilon` stands; see :class:`~ritz.optim.Padam`.
        decoupled_weight_decay: False puts the decay into the gradient, as an L2 term.
        **flags: See :class:`~ritz.optim._adaptive.AdaptiveOptimizer`.

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
        form: Form | None = None,
        decoupled_weight_decay: bool = True,
        **flags: Unpack[Flags],
    ) -> None:
        power = {"partial": partial, "form": form}
        super().__init__(params, flags, (lr, betas, eps, weight_decay), (start, interval),
                         decoupled_weight_decay=decoupled_weight_decay, **power)  # fmt: skip


# ------------------------------------------------------------------------------------------
# Damping as a hyper-parameter, and as shrinkage.


@final
class DampedAdamW(AdaptiveOptimizer):
    r"""AdamW whose damping is tuned and scheduled like the learning rate.

    .. math::
        w \leftarrow (1 - \alpha\lambda)\, w - \alpha\, \hat m / (\sqrt{\hat v} + \delta)

    The step is that of ``torch.optim.AdamW`` with ``eps`` equal to :math:`\delta`, on its fused
    kernel. ``group["delta"]`` may differ between groups and change between steps. Small damping
    makes steps in flat directions larger than in sharp ones; large damping approaches SGD with
    learning rate :math:`\alpha/\delta`.

    Args:
        params: Parameters or groups of them.
        lr: Learning rate :math:`\alpha`, a number or a tensor of one element.
        betas: Decay rates of the running means of the gradient and of its square.
        delta: Damping :math:`\delta`; see :func:`delta_to_shrinkage`.
        weight_decay: Decay :math:`\lambda`.
        decoupled_weight_decay: False puts the decay into the gradient, as an L2 term.
        **flags: See :class:`~ritz.optim._adaptive.AdaptiveOptimizer`.

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
        *,
        decoupled_weight_decay: bool = True,
        **flags: Unpack[Flags],
    ) -> None:
        common = (lr, betas, delta, weight_decay)
        super().__init__(
            params, flags, common, partial=0.5, decoupled_weight_decay=decoupled_weight_decay
        )


def delta_to_shrinkage(delta: float) -> float:
    r"""Return the weight :math:`\beta` of the curvature in the shrinkage equivalent to damping.

    .. math::
        \frac{\alpha}{\lambda + \delta} = \frac{\alpha\beta}{\beta\lambda + (1 - \beta)}, \qquad
        \beta = \frac{1}{1 + \delta}

    A damped step of learning rate :math:`\alpha` on :math:`H` is a step of learning rate
    :math:`\alpha\beta` on :math:`\beta H + (1 - \beta) I`.

    Args:
        delta: Damping, at least 0.

    Reference: Granziol et al. (2020), Explaining the adaptive generalisation gap, section 3.2.

    >>> delta_to_shrinkage(3.0)
    0.25
    """
    check_range("delta", delta, low=0)
    # alpha / (lambda + delta) = alpha beta / (beta lambda + 1 - beta) for every lambda
    return 1 / (1 + delta)


def shrinkage_to_delta(beta: float) -> float:
    r"""Return the damping :math:`\delta = (1 - \beta)/\beta` that is equivalent to a shrinkage.

    The inverse of :func:`delta_to_shrinkage`.

    Args:
        beta: Weight of the curvature, above 0 and at most 1.

    >>> shrinkage_to_delta(0.25)
    3.0
    """
    check_range("beta", beta, low=0, high=1)
    if beta == 0:
        raise ValueError("beta must be above 0: no damping shrinks the curvature away, got 0")
    # beta = 1 / (1 + delta)
    return (1 - beta) / beta
