"""What the adaptive optimisers share: checks, state, and the step."""

from collections.abc import Callable
from typing import Any, ClassVar, TypedDict

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
from ritz.optim.adaptive import CompiledStep, update
from ritz.optim.companions import listed
from ritz.optim.rules import Buffers, Form, Rule

FORMS = ("inside", "outside", "published")
# Raises where a step that cannot be captured is; older releases name it after CUDA.
CAPTURE_CHECK = (
    "_accelerator_graph_capture_health_check"
    if hasattr(Optimizer, "_accelerator_graph_capture_health_check")
    else "_cuda_graph_capture_health_check"
)
FLAGS: dict[str, Any] = {
    "amsgrad": None,
    "form": None,
    "maximize": False,
    "foreach": None,
    "fused": None,
    "capturable": False,
    "differentiable": False,
    "compile": False,
}


class Flags(TypedDict, total=False):
    """Keywords every adaptive optimiser takes; see :class:`AdaptiveOptimizer`."""

    amsgrad: bool | None
    maximize: bool
    foreach: bool | None
    fused: bool | None
    capturable: bool
    differentiable: bool
    compile: bool


class AdaptiveOptimizer(Optimizer):
    r"""Base of the adaptive optimisers: moments, bias corrections, a power of the second moment.

    Each parameter has in ``state`` its ``step``, ``exp_avg``, ``exp_avg_sq`` and, with AMSGrad,
    ``max_exp_avg_sq``: two or three vectors. Every setting may differ between parameter groups and
    change between steps.

    Keywords shared by all:

    * ``amsgrad``: divide by the largest second moment so far; None: in the published form only.
    * ``maximize``: ascend.
    * ``foreach``: take all parameters through each operation together (the default on CUDA where
      the fused kernel does not serve).
    * ``fused``: torch's fused kernel, for power 1/2 with epsilon outside the root. It is the
      default where it serves.
    * ``compile``: one compiled graph for all parameters of a group. It needs what
      ``torch.compile`` needs and takes some seconds, or a minute, at the first step; where torch's
      own AdamW takes the step there is nothing to compile. Rates, decoupled decays and steps
      are free to change; other settings, and which parameters have gradients, are built in: where
      they change at every step, as betas do by ``OneCycleLR``, it gives up with a warning.
    * ``capturable``: keep the step on the device, for CUDA graphs.
    * ``differentiable``: let gradients through the step.
    """

    _eps_key: ClassVar[str] = "eps"

    def __init__(self, params: ParamsT, settings: dict[str, Any], flags: Flags) -> None:
        unknown = sorted(flags.keys() - Flags.__annotations__.keys())
        if unknown:
            raise TypeError(f"{type(self).__name__} got unknown arguments {', '.join(unknown)}")
        defaults = FLAGS | {"decoupled_weight_decay": True} | settings | flags
        self._check(defaults)
        self._graphs: list[CompiledStep] = []
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self._check(self.defaults | param_group)
        super().add_param_group(param_group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("_graphs", [])
        for group in self.param_groups:
            for key, value in (FLAGS | self.defaults).items():
                group.setdefault(key, value)
            for param in group["params"]:
                own = self.state.get(param, {})
                if "step" in own and not torch.is_tensor(own["step"]):
                    own["step"] = torch.tensor(float(own["step"]), dtype=_get_scalar_dtype())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; one of another model raises: the fused kernel would write beyond it."""
        here, there = listed(self.param_groups), listed(state_dict["param_groups"])
        for index, ((name, param), (_, place)) in enumerate(zip(here, there, strict=False)):
            for key, value in state_dict["state"].get(place, {}).items():
                if isinstance(value, Tensor) and value.ndim and value.shape != param.shape:
                    raise ValueError(
                        f"state_dict is of another model: its {key} of "
                        f"{name or f'parameter {index}'} is of shape {tuple(value.shape)}, the "
                        f"parameter of {tuple(param.shape)}"
                    )
        super().load_state_dict(state_dict)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # torch.amp.GradScaler then leaves unscaling and skipping to the fused kernel.
        return all(self._runs_fused(group) for group in self.param_groups)

    @_use_grad_for_differentiable
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step, and return the loss of ``closure`` where one is given."""
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
        buffers = self._buffers(group, rule, fused)
        if not buffers.params:
            return
        if group["compile"] and rule.form != "outside" and not torch.compiler.is_compiling():
            self._graph(index)(buffers, rule, group["lr"])
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

    def _graph(self, index: int) -> CompiledStep:
        while len(self._graphs) <= index:
            self._graphs.append(CompiledStep())
        return self._graphs[index]

    def _rule(self, group: dict[str, Any]) -> Rule:
        form = _form(group)
        amsgrad = group["amsgrad"]
        return Rule(
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            eps=group[self._eps_key],
            weight_decay=group["weight_decay"],
            partial=group["partial"],
            form=form,
            amsgrad=form == "published" if amsgrad is None else amsgrad,
            maximize=group["maximize"],
            decoupled=group["decoupled_weight_decay"],
            capturable=group["capturable"],
            differentiable=group["differentiable"],
        )

    def _runs_fused(self, group: dict[str, Any]) -> bool:
        if _form(group) != "outside":
            return False
        if group["fused"] is not None:
            return bool(group["fused"])
        if group["foreach"] is not None:
            return False
        return _default_to_fused_or_foreach(group["params"], group["differentiable"], True)[0]

    def _buffers(self, group: dict[str, Any], rule: Rule, fused: bool) -> Buffers:
        buffers = Buffers([], [], [], [], [], [])
        for param in group["params"]:
            if param.grad is None:
                continue
            if param.grad.is_sparse:
                raise RuntimeError(f"{type(self).__name__} does not support sparse gradients")
            own = self._own_state(param, rule, fused)
            buffers.params.append(param)
            buffers.grads.append(param.grad)
            buffers.exp_avgs.append(own["exp_avg"])
            buffers.exp_avg_sqs.append(own["exp_avg_sq"])
            buffers.steps.append(own["step"])
            if rule.amsgrad:
                buffers.max_exp_avg_sqs.append(own["max_exp_avg_sq"])
        return buffers

    def _own_state(self, param: Tensor, rule: Rule, fused: bool) -> dict[str, Any]:
        own: dict[str, Any] = self.state[param]
        if "step" not in own:
            if fused:
                _device_dtype_check_for_fused(param)
            own["step"] = torch.tensor(0.0, dtype=_get_scalar_dtype())
            own["exp_avg"] = torch.zeros_like(param)
            own["exp_avg_sq"] = torch.zeros_like(param)
        if rule.amsgrad and "max_exp_avg_sq" not in own:
            own["max_exp_avg_sq"] = torch.zeros_like(param)
        # Kernels that never wait for the host want the step beside the parameter.
        if fused or rule.capturable:
            own["step"] = own["step"].to(param.device, _get_scalar_dtype(is_fused=fused))
        return own

    def _check(self, settings: dict[str, Any]) -> None:
        """Raise unless the settings of a group are possible, each and together."""
        _check_lr(settings)
        _check_betas(settings["betas"])
        check_range(self._eps_key, settings[self._eps_key], low=0)
        check_range("weight_decay", settings["weight_decay"], low=0)
        check_range("partial", settings["partial"], low=0, high=0.5)
        _check_flags(settings)


def _form(group: dict[str, Any]) -> Form:
    """Where epsilon stands: outside the root for power 1/2, as torch has it, unless asked."""
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
    if settings["form"] is not None:
        check_choice("form", settings["form"], FORMS)
    if settings["form"] == "outside" and settings["partial"] != 0.5:
        raise ValueError(f"form='outside' needs partial=0.5, got partial={settings['partial']}")
    if settings["fused"] and _form(settings) != "outside":
        raise ValueError(
            "fused=True needs partial=0.5 with epsilon outside the root, got "
            f"partial={settings['partial']} and form={settings['form']!r}"
        )
    if settings["fused"] and settings["differentiable"]:
        raise RuntimeError("`fused` does not support `differentiable`")
    if settings["fused"] and settings["foreach"]:
        raise RuntimeError("`fused` and `foreach` cannot be `True` together.")
    if settings["foreach"] and settings["differentiable"]:
        raise RuntimeError("`foreach` does not support `differentiable`")
    if settings["compile"] and settings["differentiable"]:
        raise ValueError("compile=True does not support differentiable=True")
