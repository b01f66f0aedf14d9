"""Optimisers by name, and that of a run."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, get_args

import torch
from torch import nn
from torch.optim import ASGD, LBFGS, SGD, Adam, AdamW, Optimizer, RAdam

from ritz import optim
from ritz._core.distributed import world_size
from ritz._core.params import parameters
from ritz._core.registry import Registry
from ritz._core.training_config import TrainingConfig

OptimizerFactory = Callable[..., Optimizer]
OptimizerChoice = str | Optimizer | Callable[[Any], Optimizer]
_OPTIMIZERS: Registry[OptimizerFactory] = Registry("optimizer")


def register_optimizer(name: str) -> Callable[[OptimizerFactory], OptimizerFactory]:
    """Return a decorator that registers an optimiser under a name.

    The decorated function takes parameters and keyword arguments and returns an optimiser. If its
    first parameter is called ``model``, it gets the model instead of the parameters. An optimiser
    with a built-in average takes ``start`` and ``interval``, in steps, and exposes the average as
    ``.average``. A Lookahead optimiser takes ``until``, its first step without Lookahead.

    Args:
        name: Name, which must not be registered yet.
    """
    return _OPTIMIZERS.register(name)


def optimizer_names() -> tuple[str, ...]:
    """Return the names of all optimisers; ``optim.preset_names()`` lists published settings."""
    return tuple(_OPTIMIZERS)


def preset_config(name: str, **changes: Any) -> TrainingConfig:
    """Return published options of a training run: optimiser, schedule, epochs, batch size.

    Pass it to :func:`fit`, or give ``ritz train --preset NAME``.

    Args:
        name: One of ``ritz.optim.preset_names()``.
        **changes: Options, which take precedence over the published ones. An average that would
            begin after the last epoch is left out.
    """
    chosen = optim.preset(name)
    options: dict[str, Any] = {"optimizer": name, "num_epochs": chosen.epochs, **chosen.training}
    epochs = changes.get("num_epochs", chosen.epochs)
    if chosen.average_from is not None and chosen.average_from <= epochs:
        options["average_from"] = chosen.average_from
    # Options that only go with an average, or with a schedule that is replaced.
    averages = options | changes
    if averages.get("average_from") is None and averages.get("patience") is None:
        options.pop("average_every", None)
    if changes.get("schedule", options.get("schedule")) != options.get("schedule"):
        for key in ("milestones", "final_ratio"):
            options.pop(key, None)
    return TrainingConfig(**(options | changes))


def create_optimizer(
    name: str,
    params: Iterable[nn.Parameter],
    *,
    model: nn.Module | None = None,
    plan: Mapping[str, int | None] | None = None,
    capturable: bool = False,
    skips: bool = False,
    **settings: Any,
) -> Optimizer:
    """Return an optimiser by name.

    Args:
        name: One of :func:`optimizer_names` or of ``ritz.optim.preset_names()``.
        params: Parameters to train.
        model: Their model, for an optimiser that takes it instead.
        plan: ``start`` and ``interval`` of the average of Gadam and GadamX, and ``until`` of
            Lookahead, in steps. Defaults to those of the optimiser.
        capturable: Create an optimiser whose steps can be captured in a CUDA graph, if possible.
        skips: Whether a gradient scaler may skip steps.
        **settings: Keyword arguments of the optimiser: ``lr``, ``weight_decay`` and so on.
    """
    # A registered name comes first, so that user-defined optimisers cannot be shadowed.
    if name not in _OPTIMIZERS and name in optim.preset_names():
        preset = optim.preset(name)
        make: OptimizerFactory = preset.optimizer
        settings = dict(preset.settings) | settings
    else:
        make = _OPTIMIZERS[name]
    known = inspect.signature(make).parameters
    # Without a start, the interval of an optimiser is that of something else.
    names = {"start", "until"} & known.keys() | ({"interval"} if "start" in known else set())
    # What the user sets takes precedence over the plan.
    settings = {name: value for name, value in (plan or {}).items() if name in names} | settings
    if _takes_model(make):
        # Its hooks run on the host, so its steps cannot be captured.
        return _made(name, make, model, settings)
    params = list(params)
    # SGD itself, with other defaults, or inside Lookahead.
    sgd = SGD in (make, getattr(make, "func", None), *getattr(make, "args", ()))
    if sgd:
        # A fused step is one kernel, and the only step of SGD that a CUDA graph can capture.
        # If its first step is skipped, torch leaves the momentum of fused SGD uninitialised.
        other = skips or any(settings.get(way) is not None for way in ("foreach", "differentiable"))
        fused = not other and settings.get("fused") is not False
        fused = fused and bool(params) and all(p.is_cuda for p in params)
        capturable = capturable and fused
        settings |= {"fused": True} if fused else {}
    # Curvature is measured between steps, by operations that wait for the device.
    curved = isinstance(make, type) and issubclass(make, optim.CurvatureOptimizer)
    capturable = capturable and not curved
    rate = settings.get("lr", known["lr"].default if "lr" in known else None)
    if capturable and rate is not None and params:
        # A graph reads the learning rate from memory, where the schedule writes it.
        settings["lr"] = torch.tensor(float(rate), device=params[0].device)
        settings |= {} if sgd else {"capturable": True}
    return _made(name, make, params, settings)


def _takes_model(make: Callable[..., Any]) -> bool:
    return next(iter(inspect.signature(make).parameters), "") == "model"


def _made(name: str, make: OptimizerFactory, subject: Any, settings: dict[str, Any]) -> Optimizer:
    try:
        return make(subject, **settings)
    except TypeError as error:
        takes = ", ".join(_keywords(make))
        raise ValueError(f"optimizer {name} cannot be made with {settings}: {error}; it takes "
                         f"{takes}") from error  # fmt: skip


def _keywords(make: OptimizerFactory) -> Iterator[str]:
    """Yield the settings that an optimiser takes, also those of ``**options: Unpack[...]``."""
    for name, parameter in inspect.signature(make).parameters.items():
        # The keys of the TypedDict inside Unpack[...] are the settings.
        packed = get_args(parameter.annotation) if parameter.kind is parameter.VAR_KEYWORD else ()
        if packed:
            yield from packed[0].__annotations__
        elif name not in ("params", "model", "inner", "settings", "scaler"):
            yield name


def _lookahead(
    inner: OptimizerFactory,
    params: Any,
    *,
    k: int = 5,
    alpha: float = 0.5,
    until: int | None = None,
    **settings: Any,
) -> Optimizer:
    return optim.Lookahead(inner(params, **settings), k=k, alpha=alpha, until=until)


_BUILT_IN: dict[str, OptimizerFactory] = {
    "sgd": partial(SGD, lr=0.1, momentum=0.9),
    # Its noise needs the model, and is made by fit.
    "noisy_sgd": partial(SGD, lr=0.1, momentum=0.9),
    "swa": optim.swa,
    "asgd": ASGD,
    "radam": RAdam,
    "adam": Adam,
    "adamw": AdamW,
    "damped_adamw": optim.DampedAdamW,
    "padam": optim.Padam,
    "padamw": optim.PadamW,
    "gadam": optim.Gadam,
    "gadamx": optim.GadamX,
    "kfac": optim.KFAC,
    "ekfac": partial(optim.KFAC, kind="ekfac"),
    "lanczos_newton": optim.LanczosNewton,
    "hessian_free": optim.HessianFree,
    "spectral_sgd": optim.SpectralSGD,
    "lookahead_sgd": partial(_lookahead, SGD, lr=0.1, momentum=0.9),
    "lookahead_adamw": partial(_lookahead, AdamW, lr=1e-3),
}
for _name, _factory in _BUILT_IN.items():
    _OPTIMIZERS.register(_name)(_factory)

# ------------------------------------------------------------------------------------------
# The optimiser of a run.


def make_optimizer(
    choice: OptimizerChoice | None,
    model: nn.Module,
    config: TrainingConfig,
    plan: dict[str, int | None],
    device: torch.device,
) -> Optimizer:
    """Return the optimiser that was chosen, or that of the options; see :func:`average_plan`."""
    optimizer: Any = choice
    if choice is None or isinstance(choice, str):
        single = device.type == "cuda" and world_size() == 1
        # The conditions of is_captured that are known before there is an optimiser.
        capturable = single and config.precision != "float16" and config.capture is not False
        trainable = [p for p in model.parameters() if p.requires_grad]
        optimizer = create_optimizer(
            config.optimizer,
            trainable,
            model=model,
            plan=plan,
            capturable=capturable,
            skips=config.precision == "float16",
            **config.optimizer_settings,
        )
    elif callable(choice) and not isinstance(choice, Optimizer):
        subject = model if _takes_model(choice) else model.parameters()
        optimizer = choice(subject, **config.optimizer_settings)
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer must be a name, a torch optimiser or a function of the "
            f"parameters that returns one, got {type(optimizer).__name__}"
        )
    # An optimiser of another model would run to the end and train nothing.
    if not set(model.parameters()) & set(parameters(optimizer)):
        kind = type(optimizer).__name__
        raise ValueError(f"optimizer must have parameters of the model, got a {kind} of others")
    # Other optimisers read gradients that are there; LBFGS evaluates the loss several times.
    if isinstance(optimizer, LBFGS):
        raise ValueError("optimizer must not be LBFGS, whose step() needs a closure")
    # The plan reaches only optimisers that are created by name.
    until = getattr(optimizer, "until", None)
    if config.lookahead_until is not None and until != plan["until"]:
        raise ValueError(
            f"lookahead_until must agree with the optimiser, got {config.lookahead_until}, which "
            f"is step {plan['until']}, and {type(optimizer).__name__} with until={until}: use "
            "lookahead_sgd or lookahead_adamw, or a Lookahead with that until="
        )
    return optimizer
