"""Average, schedule and noise of a run, created from the options and checked."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ritz import optim
from ritz._core.distributed import world_size
from ritz._core.modes import batch_norms
from ritz._core.params import parameters
from ritz._core.training_config import TrainingConfig
from ritz.curvature._shared import Adapter
from ritz.models import with_ghost_batch_norm
from ritz.training._recurrent import ActivationPenalty
from ritz.training._step import nested


def use_ghosts(model: nn.Module, config: TrainingConfig) -> None:
    """Give batch norms the statistics of ghost batches, if that is wanted."""
    if config.ghost_batch is None:
        return
    if not batch_norms(model):
        kind = type(model).__name__
        raise ValueError(f"ghost_batch needs a model with batch norm, got {kind} without")
    with_ghost_batch_norm(model, config.ghost_batch)


def make_penalty(model: nn.Module, config: TrainingConfig) -> ActivationPenalty | None:
    """Return the penalty on the last activations of a model, if that is wanted."""
    if not (config.activation_penalty or config.change_penalty):
        return None
    if config.has_noise:
        raise ValueError(
            "activation_penalty and change_penalty must be 0 with noise, whose gradients of "
            "samples do not include them"
        )
    return ActivationPenalty(model, config.activation_penalty, config.change_penalty)


def make_noise(
    optimizer: Optimizer,
    adapter: Adapter,
    config: TrainingConfig,
    num_steps: int | None,
    *,
    samples_per_step: int | None,
) -> optim.CovarianceNoise | None:
    """Return the gradient noise of a run, that of the optimiser or of the options, or ``None``.

    Args:
        optimizer: The optimiser, perhaps inside Lookahead.
        adapter: The model and its loss.
        config: The options.
        num_steps: Steps of the whole run, if known.
        samples_per_step: The smallest batch size, if it is chosen.
    """
    # An optimiser that was passed may have its noise already, also inside Lookahead.
    built_in = next((x for x in (getattr(o, "noise", None) for o in nested(optimizer))
                     if isinstance(x, optim.CovarianceNoise)), None)  # fmt: skip
    kind: Any = config.noise
    named = config.optimizer.partition("/")[0] == "noisy_sgd"
    if kind == "none" and named and built_in is None:
        kind = "diagonal"
    if kind == "none" and built_in is None:
        return None
    if config.capture or config.compile:
        name = "capture" if config.capture else "compile"
        raise ValueError(f"{name} must be False with noise, which reads gradients of samples")
    if built_in is not None and kind != "none":
        raise ValueError(f"noise must not be given twice, got {kind!r} and an optimiser with noise")
    if built_in is not None:
        return built_in
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
    """Return the samples of a small batch, for steps of so many samples if that is known."""
    # 128 of 4096, as published.
    usual = 128 if samples is None else max(1, samples // 32)
    small = usual if wanted is None else wanted
    # These kinds perturb the step itself and do not imitate a small batch.
    of_step = kind in ("isotropic", "multiplicative", "sgld")
    if samples is not None and small >= samples and not of_step:
        raise ValueError(
            f"noise_batch must be less than the samples of a step, got {small} and {samples}"
        )
    return small


def is_captured(optimizer: Optimizer, config: TrainingConfig, device: torch.device) -> bool:
    """Return whether to capture steps in a CUDA graph; raise if that is required but impossible."""
    inner = nested(optimizer)[-1]
    if config.capture and config.random_segments:
        raise ValueError("capture must be False with random_segments, whose batches differ in size")
    # All that changes between two steps must be on the device.
    stays = all(p.is_cuda for p in parameters(inner)) and all(
        isinstance(rate := group.get("lr"), Tensor)
        and rate.is_cuda
        and (group.get("capturable") or (isinstance(inner, SGD) and group["fused"]))
        for group in inner.param_groups
    )
    # The gradient scaler of float16 reads from the device whether to skip the step.
    single = device.type == "cuda" and world_size() == 1 and config.precision != "float16"
    if config.capture and not (single and stays):
        raise ValueError(
            "capture=True needs a CUDA device, a single process, a precision other than float16 "
            "and an optimiser with capturable=True (SGD: fused=True) and lr as a CUDA tensor, got "
            f"{type(optimizer).__name__} on {device} in {config.precision}"
        )
    return single and stays and config.capture is not False and not config.random_segments


def average_plan(
    config: TrainingConfig,
    length: int | None,
    steps_before: Callable[[int], int | None] = lambda epoch: None,
) -> dict[str, int | None]:
    """Return ``start`` and ``interval`` of the average, and ``until`` of Lookahead, in steps.

    ``start`` is ``None`` if patience decides. Without an average only ``until`` may be there.

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
    """Return the average of a run, and the rule that starts it if patience does."""
    if choice is not None:
        if "interval" in plan:
            raise ValueError("pass either average or one of average_from and patience")
        auto = choice if isinstance(choice, optim.AutoAverage) else None
        average: Any = auto.average if auto else choice
        # Hooks of an average on another optimiser would never run.
        if average.optimizer not in nested(optimizer):
            raise ValueError("average must be created for the optimizer that you pass to fit")
        return average, auto
    # Gadam and GadamX have an average; something else may have the same name elsewhere.
    named = (getattr(each, "average", None) for each in nested(optimizer))
    built_in = next((each for each in named if isinstance(each, optim.IterateAverage)), None)
    start, interval = plan.get("start"), plan.get("interval")
    if interval is None:  # the settings of the optimiser alone decide
        return built_in, None
    average = built_in or optim.IterateAverage(optimizer, start=start, interval=interval)
    # Gadam and GadamX got both from the plan if they were created by name, and not otherwise.
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


def make_schedule(
    choice: Any, optimizer: Optimizer, config: TrainingConfig, length: int | None
) -> Any:
    """Return a scheduler with ``step``, ``state_dict`` and ``load_state_dict``."""
    if isinstance(choice, ReduceLROnPlateau):
        raise ValueError("schedule must not be ReduceLROnPlateau, which needs a loss: see patience")
    if hasattr(choice, "step") and hasattr(choice, "load_state_dict"):
        return choice
    name = config.schedule if choice is None or isinstance(choice, str) else ""
    # Times are in calls of schedule.step(): one per epoch, or `length` per epoch.
    unit = 1 if config.schedule_unit == "epoch" else length
    if unit is None and name in ("linear", "linear_held", "step"):
        raise ValueError(
            f"steps_per_epoch is required for schedule={name!r} by step: the data have no length"
        )
    whole = config.num_epochs * (unit or 1)
    # A shape that falls must reach its end when the run does.
    if config.schedule_unit == "step" and config.max_steps is not None:
        whole = min(whole, config.max_steps)
    # Unset, each shape keeps its published final ratio: 1 %, or 50 % with an average.
    final: Any = {} if config.final_ratio is None else {"final": config.final_ratio}
    if name == "linear" and config.average_from is not None:
        # GADAM, equations 12 and 13: the rate falls up to the start of the average.
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


def explain_one_row(error: ValueError, rows: int, config: TrainingConfig) -> ValueError:
    """Return an error that says what to do about a batch of one row, or the error itself."""
    if "Expected more than 1 value per channel" not in str(error):  # torch
        return error
    return ValueError(
        f"batch norm needs at least two samples per process to train on, got a batch of {rows} in "
        f"{world_size()} process{'es' * (world_size() > 1)}: use drop_last=True (--drop-last) or "
        f"a batch size (--batch-size) other than {config.batch_size or 'that of the loader'}, and "
        "start again with resume=False (--restart)"
    )
