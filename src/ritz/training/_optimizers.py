"""Optimisers by name; the optimiser of a run, its schedule, its average and its noise."""

import inspect
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, get_args

import torch
from torch import nn
from torch.optim import ASGD, LBFGS, SGD, Adam, AdamW, Optimizer, RAdam
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ritz import optim
from ritz._core.distributed import world_size
from ritz._core.params import parameters
from ritz._core.registry import Registry
from ritz._core.training_config import TrainingConfig
from ritz.curvature._shared import Adapter

T = TypeVar("T")
OptimizerFactory = Callable[..., Optimizer]
OptimizerChoice = str | Optimizer | Callable[[Any], Optimizer]
_OPTIMIZERS: Registry[OptimizerFactory] = Registry("optimiser", listing="ritz list optimizers")

# What a setting must be, by the class of its default value.
KINDS = {bool: "True or False", int: "a number", float: "a number", tuple: "numbers"}


def register_optimizer(name: str) -> Callable[[OptimizerFactory], OptimizerFactory]:
    """Return a decorator that registers an optimiser under a name.

    The decorated function takes parameters and keyword arguments and returns an optimiser. If its
    first parameter is called ``model``, it gets the model instead of the parameters. If the
    optimiser has a built-in average, the function takes ``start`` and ``interval`` in steps, and
    the optimiser has an attribute ``average``. If it uses Lookahead, the function takes ``until``,
    the first step without Lookahead.

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
    # Leave out options that need an average, or a schedule that `changes` replaces.
    averages = options | changes
    if averages.get("average_from") is None and averages.get("patience") is None:
        options.pop("average_every", None)
    if changes.get("schedule", options.get("schedule")) != options.get("schedule"):
        for key in ("milestones", "final_ratio"):
            options.pop(key, None)
    return TrainingConfig(**(options | changes))


def with_preset(config: TrainingConfig) -> TrainingConfig:
    """Return the configuration with the start of the average that a published setting has."""
    if config.optimizer == "swa" and config.average_from is None and config.patience is None:
        # Izmailov et al. (2018): the last quarter of the run.
        return replace(config, average_from=math.ceil(0.75 * config.num_epochs))
    known = config.optimizer in optimizer_names() or config.optimizer not in optim.preset_names()
    if known or config.average_from is not None or config.patience is not None:
        return config
    # A run that is shorter than the published one may end before its average would start.
    start = optim.preset(config.optimizer).average_from
    fits = start is not None and start <= config.num_epochs
    return replace(config, average_from=start) if fits else config


def create_optimizer(
    name: str,
    params: Iterable[nn.Parameter],
    *,
    model: nn.Module | None = None,
    plan: Mapping[str, int | None] | None = None,
    capturable: bool = False,
    may_skip_steps: bool = False,
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
        may_skip_steps: Whether a gradient scaler may skip steps.
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
    # In an optimiser without `start`, a parameter `interval` does not belong to an average.
    names = {"start", "until"} & known.keys() | ({"interval"} if "start" in known else set())
    # What the user sets takes precedence over the plan.
    settings = {name: value for name, value in (plan or {}).items() if name in names} | settings
    if _takes_model(make):
        # Its hooks run on the host, so its steps cannot be captured.
        return _construct(name, make, model, settings)
    params = list(params)
    # SGD itself, or a partial of SGD, or one of Lookahead around SGD.
    sgd = SGD in (make, getattr(make, "func", None), *getattr(make, "args", ()))
    if sgd:
        # A fused step is one kernel, and the only step of SGD that a CUDA graph can capture.
        # If its first step is skipped, torch leaves the momentum of fused SGD uninitialised.
        unfused = may_skip_steps or any(
            settings.get(way) is not None for way in ("foreach", "differentiable")
        )
        fused = not unfused and settings.get("fused") is not False
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
    return _construct(name, make, params, settings)


def _takes_model(make: Callable[..., Any]) -> bool:
    return next(iter(inspect.signature(make).parameters), "") == "model"


def _construct(
    name: str, make: OptimizerFactory, subject: Any, settings: dict[str, Any]
) -> Optimizer:
    defaults = {key: each.default for key, each in inspect.signature(make).parameters.items()}
    # Those that a partial passes on by **settings are not in its signature.
    defaults |= getattr(make, "keywords", {})
    for key, value in settings.items():
        # torch would compare text with a number, or take it for True, and True for 1.
        default = type(defaults.get(key))
        kind = KINDS.get(default)
        wrong = isinstance(value, str | Mapping) or (
            isinstance(value, bool) and default is not bool
        )
        if kind is not None and wrong:
            raise TypeError(f"{key} of optimizer {name} must be {kind}, got {value!r}")
    try:
        return make(subject, **settings)
    except TypeError as error:
        known = list(_keywords(make))
        unknown = [key for key in settings if key not in known]
        if unknown:
            raise ValueError(f"optimizer {name} has no setting {unknown[0]!r}; it has "
                             f"{', '.join(known)}") from error  # fmt: skip
        raise ValueError(f"optimizer {name} cannot be made with {settings}: {error}") from error


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
    # `fit` makes its noise, which needs the model.
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
            may_skip_steps=config.precision == "float16",
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
    # LBFGS evaluates the loss several times per step, which needs a closure.
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


def nested(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimiser and those that Lookahead wraps, outermost first."""
    chain = [optimizer]
    while isinstance(optimizer := chain[-1], optim.Lookahead):
        chain.append(optimizer.optimizer)
    return chain


def _built_in(optimizer: Optimizer, name: str, kind: type[T]) -> T | None:
    """Return an attribute of an optimiser, or of one inside Lookahead, if it is of class ``kind``.

    Other optimisers may use the name for something else.
    """
    values = (getattr(each, name, None) for each in nested(optimizer))
    return next((value for value in values if isinstance(value, kind)), None)


# ------------------------------------------------------------------------------------------
# Schedule of the learning rate.


def make_schedule(
    choice: Any, optimizer: Optimizer, config: TrainingConfig, length: int | None
) -> Any:
    """Return a scheduler with ``step``, ``state_dict`` and ``load_state_dict``."""
    if isinstance(choice, ReduceLROnPlateau):
        raise ValueError("schedule must not be ReduceLROnPlateau, which needs a loss: see patience")
    if isinstance(choice, type):
        raise TypeError(
            f"schedule must be a scheduler, got the class {choice.__name__}: create it for the "
            "optimizer that you pass"
        )
    if hasattr(choice, "step") and hasattr(choice, "load_state_dict"):
        other = getattr(choice, "optimizer", None)
        # It would change learning rates that no step uses.
        if isinstance(other, Optimizer) and other not in nested(optimizer):
            raise ValueError(
                f"schedule must be created for the optimizer that you pass, got a "
                f"{type(choice).__name__} of another {type(other).__name__}"
            )
        return choice
    name = config.schedule if choice is None or isinstance(choice, str) else ""
    # Times are in calls of schedule.step(): one per epoch, or `length` per epoch.
    unit = 1 if config.schedule_unit == "epoch" else length
    if unit is None and name in ("linear", "linear_held", "step"):
        raise ValueError(
            f"steps_per_epoch is required for schedule={name!r} by step: the data have no length"
        )
    whole = config.num_epochs * (unit or 1)
    # The schedule must end when the run does.
    if config.schedule_unit == "step" and config.max_steps is not None:
        whole = min(whole, config.max_steps)
    # By default each shape has its published final ratio: 1 %, or 50 % with an average.
    final: Any = {} if config.final_ratio is None else {"final": config.final_ratio}
    if name == "linear" and config.average_from is not None:
        # Granziol et al. (2021), equations 12 and 13: the rate falls until averaging starts.
        start = max(1, (config.average_from - 1) * (unit or 1))
        shape = optim.averaging_decay(start, **final)
    elif name == "linear_held":
        start = ((config.average_from or 1) - 1) * (unit or 1)
        shape = optim.held_from(start, optim.linear_decay(whole, **final))
    elif name == "linear":
        shape = optim.linear_decay(whole, **final)
    elif name == "step":
        shape = optim.step_decay(sorted(config.milestones or {whole // 2, whole * 3 // 4}))
    else:
        shape = choice if callable(choice) else lambda time: 1.0
    shape = optim.warmup(config.warmup, then=shape) if config.warmup else shape
    return optim.Schedule(optimizer, shape)


# ------------------------------------------------------------------------------------------
# Average of the weights.


def average_plan(
    config: TrainingConfig,
    length: int | None,
    steps_before: Callable[[int], int | None] = lambda epoch: None,
) -> dict[str, int | None]:
    """Return ``start`` and ``interval`` of the average, and ``until`` of Lookahead, in steps.

    ``start`` is ``None`` if patience decides. Without an average there is at most ``until``.

    Args:
        config: The options.
        length: Steps of an epoch, if known.
        steps_before: Returns the number of steps before an epoch, if epochs differ; otherwise
            ``None``.
    """
    averages = config.average_from is not None or config.patience is not None
    if config.average_interval != 1 and not averages:
        raise ValueError(
            f"average_interval must be given with average_from or patience, got it alone: "
            f"{config.average_interval}"
        )
    by_epoch = {
        "average_from": config.average_from,
        "lookahead_until": config.lookahead_until,
        "average_every='epoch'": averages and config.average_every == "epoch",
    }
    option = next((name for name, value in by_epoch.items() if value), None)
    if option and length is None:
        raise ValueError(f"steps_per_epoch is required for {option}: the data have no length")
    plan: dict[str, int | None] = {}
    steps = length or 1  # of an epoch

    def first_step(epoch: int | None) -> int | None:
        if epoch is None:
            return None
        before = steps_before(epoch)
        # Steps and epochs count from one: epoch e begins with step 1 + (e - 1) * steps.
        return 1 + ((epoch - 1) * steps if before is None else before)

    if averages:
        unit = steps if config.average_every == "epoch" else 1
        plan = {"start": first_step(config.average_from)}
        plan["interval"] = unit * config.average_interval
    # Lookahead hands over to the average: Granziol et al., Iterate averaging, appendix .2.
    until = first_step(config.lookahead_until or config.average_from)
    return plan if until is None else plan | {"until": until}


def make_average(
    choice: optim.IterateAverage | optim.AutoAverage | None,
    optimizer: Optimizer,
    config: TrainingConfig,
    plan: dict[str, int | None],
) -> tuple[optim.IterateAverage | None, optim.AutoAverage | None]:
    """Return the average of a run, and the rule that starts it if patience decides."""
    if choice is not None:
        if "interval" in plan:
            raise ValueError("pass either average or one of average_from and patience")
        auto = choice if isinstance(choice, optim.AutoAverage) else None
        average: Any = auto.average if auto else choice
        # If the average belonged to another optimiser, its hooks would never run.
        if average.optimizer not in nested(optimizer):
            raise ValueError("average must be created for the optimizer that you pass to fit")
        return average, auto
    built_in = _built_in(optimizer, "average", optim.IterateAverage)
    start, interval = plan.get("start"), plan.get("interval")
    if interval is None:  # the settings of the optimiser alone decide
        return built_in, None
    average = built_in or optim.IterateAverage(optimizer, start=start, interval=interval)
    # Gadam and GadamX that were created by name have both from the plan. Others must agree.
    if (average.planned, average.interval) != (start, interval):
        raise ValueError(
            f"average_from, average_every and average_interval must agree with the average of the "
            f"optimiser, got start={start}, interval={interval} for a {type(optimizer).__name__} "
            f"with start={average.planned}, interval={average.interval}"
        )
    if config.patience is None:
        return average, None
    auto = optim.AutoAverage(average, patience=config.patience, rule=config.patience_rule)
    return average, auto


def check_patience(parts: Container[str]) -> None:
    """Raise if the data have no validation part, on which patience depends."""
    # The test data must not decide when the run ends.
    if "validation" not in parts:
        raise ValueError(
            "patience needs validation data, got none: pass validation= to fit() or sweep(), or "
            "hold out images of a data set (--set-data validation=500), or let your data function "
            "return (train, validation, test)"
        )


def check_final(config: TrainingConfig, average: optim.IterateAverage | None) -> None:
    """Raise if a run shall end with the weights of an average that it does not have."""
    if config.final == "average" and average is None:
        raise ValueError("final='average' needs an average: pass average_from "
                         "(--average-from) or patience (--patience)")  # fmt: skip


# ------------------------------------------------------------------------------------------
# Gradient noise.


def make_noise(
    optimizer: Optimizer,
    adapter: Adapter,
    config: TrainingConfig,
    num_steps: int | None,
    *,
    samples_per_step: int | None,
) -> optim.CovarianceNoise | None:
    """Return the gradient noise of the optimiser, or that of the options, or ``None``.

    Args:
        optimizer: The optimiser, perhaps inside Lookahead.
        adapter: The model and its loss.
        config: The options.
        num_steps: Steps of the whole run, if known.
        samples_per_step: The smallest batch size, if it is chosen.
    """
    built_in = _built_in(optimizer, "noise", optim.CovarianceNoise)
    kind: Any = config.noise
    if kind == "none" and built_in is None:
        if config.optimizer.partition("/")[0] != "noisy_sgd":
            return None
        kind = "diagonal"
    if config.compile:
        raise ValueError("compile must be False with noise, which reads gradients of samples")
    if built_in is not None:
        if kind == "none":
            return built_in
        raise ValueError(f"noise must not be given twice, got {kind!r} and an optimiser with noise")
    if num_steps is None and (config.noise_until < 1 or kind == "sgld"):
        raise ValueError("steps_per_epoch is required for noise_until: the data have no length")
    samples = None if samples_per_step is None else samples_per_step * config.accumulate
    small = _small_batch(config.noise_batch, samples, kind)
    heat = config.noise_temperature
    if kind == "sgld" and heat is None:
        # One over the samples that the steps of an epoch see.
        heat = config.num_epochs / ((samples or 1) * (num_steps or 1))
    # Noise in the first steps, up to this fraction of all.
    until = None if num_steps is None else math.ceil(config.noise_until * num_steps) + 1
    return optim.CovarianceNoise(
        nested(optimizer)[-1],
        adapter.model,
        adapter.loss_fn.call,
        forward=adapter.custom,
        kind=kind,
        small=small,
        until=None if config.noise_until == 1 else until,
        momentum=config.noise_momentum,
        refresh=config.noise_refresh,
        sigma=config.noise_sigma,
        temperature=heat,
        seed=config.seed,
    )


def _small_batch(wanted: int | None, samples: int | None, kind: str) -> int:
    """Return the number of samples of the small batch whose noise is added to steps."""
    # 128 of 4096, as published.
    usual = 128 if samples is None else max(1, samples // 32)
    small = usual if wanted is None else wanted
    # These kinds do not imitate a small batch, so its size does not matter.
    of_step = kind in ("isotropic", "multiplicative", "sgld")
    if samples is not None and small >= samples and not of_step:
        raise ValueError(
            f"noise_batch must be less than the samples of a step, got {small} and {samples}"
        )
    return small
