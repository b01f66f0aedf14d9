"""``TrainingConfig``: every option of a training run, declared once. Imports no torch."""
# ruff: noqa: RUF009 - _option returns a field of a dataclass

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypedDict, get_args, get_origin

from ritz._core.checks import (
    MAX_SEED,
    as_plain,
    check_choice,
    check_count,
    check_positive,
    check_range,
    check_type,
    plain_fields,
)
from ritz._core.registry import suggest

if TYPE_CHECKING:
    import torch

TrainingPrecision = Literal["float32", "tf32", "bfloat16", "float16"]
ScheduleName = Literal["constant", "linear", "linear_held", "step"]
Unit = Literal["step", "epoch"]
PatienceMetric = Literal["auto", "accuracy", "loss"]
PatienceRule = Literal["stagnation", "non_monotone"]
# "none", and the kinds of ritz.curvature.noise_sample.
NoiseName = Literal["none", "diagonal", "full", "centred", "true", "kfac", "trace",
                    "trace_unscaled", "isotropic", "multiplicative", "sgld"]  # fmt: skip
DampingRule = Literal["constant", "ratio", "shrinkage", "noise", "adaptive"]
# Panels of ``ritz train --help``.
LENGTH, RATE = "Epochs and batches", "Optimiser and learning rate"
AVERAGE, EVALUATION = "Averaged weights", "Evaluation"
SPEED, FILES, NOISE, TEXT = "Precision and speed", "Output", "Large batches", "Language models"


def _option(default: Any, help: str, panel: str | None = None, **metadata: Any) -> Any:
    """Return a field of :class:`TrainingConfig`.

    Args:
        default: Default value, in the library and on the command line.
        help: Documentation of the option, in the library and on the command line.
        panel: Panel of ``ritz train --help``.
        **metadata: ``low`` and ``high`` bound the value. ``free`` lets a run be resumed with
            another value, because the results do not depend on it. On the command line, ``flags``
            are the names (``None`` for none), ``kind`` is the type and ``metavar`` stands for the
            value, where these do not follow from the field.
    """
    metadata |= {"help": help, "panel": panel}
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """Options of :func:`ritz.training.fit` and ``ritz train``, checked when they are set.

    In the library, ``augment`` may also be a ``ritz.data.Augmentation``.
    """

    # fmt: off
    num_epochs: int = _option(10, "Total number of epochs, including those that a resumed run has "
                              "completed.", LENGTH, low=1, free=True, flags="--epochs")
    max_steps: int | None = _option(None, "Stop after this many steps, even within an epoch "
                                    "(default: no limit).", LENGTH, low=1)
    # 128, and an average once per epoch: Granziol et al., Iterate averaging, appendix B.2.
    batch_size: int | None = _option(128, "Batch size, summed over all processes. Data in batches, "
                                     "such as a DataLoader, have their own.", LENGTH, low=1)
    drop_last: bool = _option(False, "Leave out the last batch of an epoch if it is smaller.",
                              LENGTH)
    augment: Any = _option(True, "Augment training images in the usual way of the data set. CIFAR "
                           "and ImageNet-32: random crops and flips.", LENGTH, kind=bool,
                           flags="--augment/--no-augment")
    optimizer: str = _option("sgd", "Name of an optimiser, or of a published setting (ritz list "
                             "optimizers).", RATE, metavar="NAME")
    optimizer_settings: Mapping[str, Any] = _option({}, "Keyword arguments of the optimiser: lr, "
                                                    "weight_decay and so on.", flags=None)
    accumulate: int = _option(1, "Number of batches per step of the optimiser. The gradient is "
                              "the mean over all their samples.", RATE, low=1)
    clip_norm: float | None = _option(None, "Clip the gradient to this norm (default: no "
                                      "clipping).", RATE)
    steps_per_epoch: int | None = _option(None, "Number of steps per epoch. Only needed if the "
                                          "data have no length (iterable datasets).", LENGTH, low=1)
    # Fixed rather than drawn, so that the same command gives the same run.
    seed: int = _option(0, "Seed of all random numbers.", low=0, high=MAX_SEED)
    schedule: ScheduleName = _option("constant", "Schedule of the learning rate. linear is "
                                     "constant for half of the run and then falls to 1 % (with an "
                                     "average: to 50 % when the average starts). linear_held falls "
                                     "as linear without an average, and is constant from the start "
                                     "of the average on. step multiplies it by 0.1 after 1/2 and "
                                     "3/4 of the run.", RATE)
    milestones: Sequence[int] = _option((), "Time at which the schedule step multiplies the "
                                        "learning rate by 0.1, in epochs or steps (see "
                                        "schedule_unit). May be repeated (default: 1/2 and 3/4 of "
                                        "the run).", RATE, kind=list[int], metavar="TIME")
    final_ratio: float | None = _option(None, "Final learning rate of the schedule linear, as a "
                                        "fraction of the initial one (default: 0.01; 0.5 with an "
                                        "average).", RATE, low=0.0)
    schedule_unit: Unit = _option("epoch", "Unit of the schedule: the learning rate changes after "
                                  "each epoch or after each step.", RATE)
    warmup: int = _option(0, "Number of epochs, or of steps if schedule_unit is step, over which "
                          "the learning rate rises linearly at the start.", RATE)
    damping: DampingRule = _option("constant", "Rule for the damping delta of an optimiser that "
                                   "has one. ratio keeps delta / learning rate constant; "
                                   "shrinkage and noise measure delta on training samples (best "
                                   "shrinkage of a batch matrix; least damping under its noise); "
                                   "adaptive compares each step with its quadratic model. These "
                                   "three never set less than the edge of stability needs.", RATE)
    damping_interval: int | None = _option(None, "Number of steps between measurements of the "
                                           "damping after the first, more frequent ones (default: "
                                           "an epoch; for adaptive, steps that are compared: 5).",
                                           RATE,
                                           low=1)
    curvature_batch_size: int | None = _option(None, "Number of samples from which the curvature "
                                               "is measured, for optimisers that need it (default: "
                                               "the batch of the step).", RATE, low=1)
    average_from: int | None = _option(None, "First epoch of the average, counted from 1. The "
                                       "first weights in it are those before this epoch (default: "
                                       "no average).", AVERAGE, low=1)
    average_interval: int = _option(1, "Number of epochs, or of steps if average_every is step, "
                                    "between weights that enter the average.", AVERAGE, low=1)
    average_every: Unit = _option("epoch", "When weights enter the average: after epochs or after "
                                  "steps; see average_interval.", AVERAGE)
    # Granziol et al., Iterate averaging, appendix .2: Lookahead up to the average.
    lookahead_until: int | None = _option(None, "First epoch without Lookahead, for lookahead_sgd "
                                          "and lookahead_adamw, counted from 1 (default: the first "
                                          "epoch of the average).", AVERAGE, low=1)
    patience: int | None = _option(None, "Number of evaluations on validation data without "
                                   "improvement before averaging starts, and again before "
                                   "training stops.", AVERAGE, low=1)
    # Appendix A.2: "validation accuracy stagnation". A text has its perplexity, exp(loss).
    patience_metric: PatienceMetric = _option("auto", "Validation metric of patience. auto is the "
                                              "accuracy for classes, and the loss for text and "
                                              "where there is no accuracy.", AVERAGE)
    # Merity et al., Regularizing and optimizing LSTM language models, section 4, algorithm 1.
    patience_rule: PatienceRule = _option("stagnation", "When patience starts the average. "
                                          "stagnation: after that many evaluations without a new "
                                          "best; training stops after as many evaluations of the "
                                          "average without a new best. non_monotone: when an "
                                          "evaluation is worse than the best of all but the last "
                                          "patience evaluations before it; training does not "
                                          "stop.", AVERAGE)
    # The statistics cost a forward pass per batch, so an evaluation on the way uses a tenth.
    statistics_fraction: float = _option(0.1, "Fraction of the training batches from which "
                                         "batch-norm statistics of the average are recomputed at "
                                         "an evaluation. The last evaluation uses all batches.",
                                         AVERAGE, low=0.0, high=1.0)
    final: Literal["last", "average"] = _option("last", "Weights that the model has after "
                                                "training.", AVERAGE, free=True)
    # Wen et al., Covariance noise, section 5: batches of 4096 with the noise of 128, for a quarter.
    noise: NoiseName = _option("none", "Gradient noise to add to the steps, as a small batch "
                               "would have it. Its covariance is the diagonal of the Fisher "
                               "matrix (diagonal, as published), the whole matrix (full) or "
                               "another one; see help(ritz.curvature.noise_sample). Disables CUDA "
                               "graphs.", NOISE)
    noise_batch: int | None = _option(None, "Number of samples of the small batch whose noise is "
                                      "added (default: 1/32 of the samples of a step, as "
                                      "published; 128 if the data are a DataLoader).", NOISE, low=1)
    noise_until: float = _option(0.25, "Fraction of the run after which no more noise is added.",
                                 NOISE, low=0.0, high=1.0)
    noise_momentum: Literal["after", "before"] = _option("after", "Where the noise enters: after "
                                                         "momentum, or before it, as part of the "
                                                         "gradient.", NOISE)
    noise_refresh: int | None = _option(None, "Number of steps after which the second moments of "
                                        "the gradients are computed anew (default: 1; 10 for "
                                        "kfac).", NOISE, low=1)
    noise_sigma: float = _option(0.1, "Standard deviation of the noise isotropic and "
                                 "multiplicative.", NOISE, low=0.0)
    noise_temperature: float | None = _option(None, "Temperature of the noise sgld (default: one "
                                              "over the number of training samples).", NOISE,
                                              low=0.0)
    ghost_batch: int | None = _option(None, "Samples from which batch norm takes its statistics in "
                                      "training (default: the whole batch of a process).", NOISE,
                                      low=2)
    batch_schedule: str = _option("", "Batch sizes and the numbers of epochs after which they "
                                  "begin: 0:128,50:4096 is 128 at first, and 4096 after 50 epochs "
                                  "(default: the same throughout).", NOISE,
                                  metavar="EPOCH:SIZE,...")
    random_segments: bool = _option(False, "Draw the lengths of the segments of a text anew in "
                                    "each epoch: about the usual length, or half of it with "
                                    "probability 0.05. The learning rate of a step is "
                                    "proportional to its length. Disables CUDA graphs.", TEXT)
    # 2 and 1 in the code of Merity et al., Revisiting activation regularization, and so published.
    activation_penalty: float = _option(0.0, "Add this multiple of the mean square of the last "
                                        "activations, after dropout, to the loss (AR).", TEXT,
                                        low=0.0)
    change_penalty: float = _option(0.0, "Add this multiple of the mean square of the change of "
                                    "the last activations from one position to the next, before "
                                    "dropout, to the loss (TAR).", TEXT, low=0.0)
    evaluate_every: int = _option(1, "Number of epochs between evaluations.", EVALUATION, low=1)
    evaluation_batch_size: int | None = _option(None, "Batch size of evaluations (default: the "
                                                "larger of 512 and the batch size; for text the "
                                                "batch size).", EVALUATION, low=1)
    top_k: int | None = _option(None, "Also log the fraction of samples whose class is among "
                                "the k with the largest scores, as top5_accuracy for 5.",
                                EVALUATION, low=2, free=True)
    # Lower precisions change the weights, so they have to be chosen.
    precision: TrainingPrecision = _option("float32", "Precision. float16 and bfloat16 mean "
                                           "automatic mixed precision.", SPEED,
                                           flags="--precision --dtype")
    device: "str | torch.device | None" = _option(None, "Device, such as cpu or cuda:1 (default: "
                                                  "cuda if available; in Python, the device of the "
                                                  "model).", SPEED, free=True,
                                                  kind=str | None, metavar="NAME")
    compile: bool = _option(False, "Compile the model with torch.compile.", SPEED)
    capture: bool | None = _option(None, "Run steps as CUDA graphs (default: if possible).",
                                   SPEED, free=True, flags="--capture/--no-capture")
    # Costs speed: cuDNN must not search for fast convolutions; see `searched_convolutions`.
    deterministic: bool = _option(False, "Use deterministic CUDA kernels, so that runs are "
                                  "reproducible bit for bit (slower).", SPEED)
    resume: bool = _option(True, "Resume from the checkpoint in the folder, or start again and "
                           "overwrite it.", FILES, free=True,
                           flags="--resume/--restart")
    # A kill loses this much work and a step. Several processes agree every 50 steps only.
    save_interval: float = _option(60.0, "Seconds between checkpoints.", FILES, low=0.0, free=True)
    keep: Sequence[int] = _option((), "Epoch after which the weights are saved as well, as "
                                  "epoch-0005.safetensors; 0 for the initial weights. May be "
                                  "repeated.", FILES, free=True, kind=list[int], metavar="EPOCH")
    # fmt: on

    def __post_init__(self) -> None:
        plain_fields(self)
        for entry in fields(self):
            value, ends = getattr(self, entry.name), entry.metadata.keys() & {"low", "high"}
            bounds: Any = {end: entry.metadata[end] for end in ends}
            if get_origin(entry.type) is Literal:
                check_choice(entry.name, value, get_args(entry.type))
            elif entry.type in (bool, str) and not isinstance(value, entry.type):
                kind = "True or False" if entry.type is bool else "text"
                raise TypeError(f"{entry.name} must be {kind}, got {value!r:.40}")
            elif bounds and value is not None:
                real = float in (entry.type, *get_args(entry.type))
                check = check_range if real else check_count
                check(entry.name, value, **bounds)
        self._check_ranges()
        self._check_combinations()
        self._check_noise()
        # Read-only, and equal to what run.json gives back.
        stored = {
            "keep": tuple(self.keep),
            "milestones": tuple(self.milestones),
            "optimizer_settings": MappingProxyType(dict(self.optimizer_settings)),
            "augment": self.augment or False,
            "device": None if self.device is None else str(self.device),
        }
        for name, value in stored.items():
            object.__setattr__(self, name, value)

    def _check_ranges(self) -> None:
        # The number of steps is not known here: it depends on the data.
        longest = self.num_epochs if self.schedule_unit == "epoch" else None
        check_count("warmup", self.warmup, low=0, high=longest)
        if self.average_from is not None:
            check_count("average_from", self.average_from, high=self.num_epochs)
        if self.clip_norm is not None:
            check_positive("clip_norm", self.clip_norm)
        for epoch in self.keep:
            check_count("keep", epoch, low=0, high=self.num_epochs)
        if isinstance(self.augment, str):
            raise ValueError(f"augment must be a bool or an Augmentation, got {self.augment!r}")

    def _check_combinations(self) -> None:
        if self.average_from is not None and self.patience is not None:
            raise ValueError(f"average_from must be None if patience is set, which chooses the "
                             f"first epoch itself, got {self.average_from}")  # fmt: skip
        if self.milestones and self.schedule != "step":
            raise ValueError(f"milestones must be given with schedule step, got {self.schedule}")
        if self.schedule == "linear_held" and self.average_from is None:
            raise ValueError("schedule linear_held must be given with average_from, got None")
        if self.final_ratio is not None and not self.schedule.startswith("linear"):
            raise ValueError(f"final_ratio must be given with schedule linear, got {self.schedule}")
        if self.damping_interval is not None and self.damping in ("constant", "ratio"):
            raise ValueError(f"damping_interval must be given with a damping that is measured, got "
                             f"{self.damping}")  # fmt: skip
        if self.patience is None and self.patience_metric != "auto":
            raise ValueError(f"patience_metric must be given with patience, got it alone: "
                             f"{self.patience_metric}")  # fmt: skip
        if self.patience is None and self.patience_rule != "stagnation":
            raise ValueError(f"patience_rule must be given with patience, got it alone: "
                             f"{self.patience_rule}")  # fmt: skip
        if (self.activation_penalty or self.change_penalty) and self.compile:
            raise ValueError("compile must be False with activation_penalty and change_penalty, "
                             "which read activations inside the model")  # fmt: skip

    def _check_noise(self) -> None:
        defaults = {entry.name: entry.default for entry in fields(self)}
        for name in () if self.has_noise else defaults:
            if name.startswith("noise_") and getattr(self, name) != defaults[name]:
                raise ValueError(f"{name} must be given with noise, got it alone: "
                                 f"{getattr(self, name)}")  # fmt: skip
        if not self.batch_sizes:
            return
        by_step = {
            "average_from": self.average_from is not None or self.patience is not None,
            "lookahead_until": self.lookahead_until is not None,
            "schedule_unit='step'": self.schedule_unit == "step",
        }
        if option := next((name for name, value in by_step.items() if value), None):
            raise ValueError(f"batch_schedule must not be given with {option}: epochs then have "
                             "different numbers of steps")  # fmt: skip

    @property
    def has_noise(self) -> bool:
        """Whether the run has gradient noise, which the name of an optimiser may bring."""
        return self.noise != "none" or "noisy_sgd" in self.optimizer

    @property
    def batch_sizes(self) -> tuple[tuple[int, int], ...]:
        """The batch schedule: epochs done and batch sizes, or nothing."""
        entries = []
        for entry in filter(None, self.batch_schedule.split(",")):
            epoch, colon, size = entry.partition(":")
            if not (colon and epoch.strip().isdecimal() and size.strip().isdecimal()):
                raise ValueError(f"batch_schedule must be EPOCH:SIZE,..., got {entry!r}")
            entries.append((int(epoch), int(size)))
        epochs = [epoch for epoch, _ in entries]
        if entries and (epochs[0] != 0 or epochs != sorted(set(epochs))):
            raise ValueError(f"batch_schedule must have ascending epochs from 0, got {epochs}")
        for _, number in entries:
            check_count("batch_schedule", number)
        return tuple(entries)

    def __reduce__(self) -> tuple[Any, ...]:
        # A read-only mapping cannot be pickled.
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        values["optimizer_settings"] = dict(self.optimizer_settings)
        return _from_values, (values,)

    def to_plain(self) -> dict[str, Any]:
        """Return the options as values of JSON; a user-defined object by its description."""
        return {entry.name: _to_plain(getattr(self, entry.name)) for entry in fields(self)}

    def fingerprint(self) -> dict[str, Any]:
        """Return the options that must not change when a run is resumed."""
        plain = self.to_plain()
        plain["optimizer_settings"] = {k: repr(v) for k, v in self.optimizer_settings.items()}
        # The length of a run sets a schedule that falls over all of it. With an average, the linear
        # schedule falls up to the start of the average instead.
        step, linear = self.schedule == "step", self.schedule == "linear"
        falls = (step and not self.milestones) or (linear and not self.average_from)
        falls |= self.schedule == "linear_held"
        falls |= self.has_noise and self.noise_until < 1
        free = {entry.name for entry in fields(self) if entry.metadata.get("free")}
        return {k: v for k, v in plain.items() if k not in free or (falls and k == "num_epochs")}


def _from_values(values: dict[str, Any]) -> TrainingConfig:
    return TrainingConfig(**values)


class TrainingOptions(TypedDict, total=False):
    """Keyword options of :func:`ritz.training.fit`: the fields of :class:`TrainingConfig`.

    ``optimizer`` and ``schedule`` are parameters of ``fit`` itself, which also takes objects.
    """

    num_epochs: int
    max_steps: int | None
    batch_size: int | None
    drop_last: bool
    augment: Any
    optimizer_settings: Mapping[str, Any]
    accumulate: int
    clip_norm: float | None
    steps_per_epoch: int | None
    seed: int
    milestones: Sequence[int]
    final_ratio: float | None
    schedule_unit: Unit
    warmup: int
    damping: DampingRule
    damping_interval: int | None
    curvature_batch_size: int | None
    average_from: int | None
    average_interval: int
    average_every: Unit
    lookahead_until: int | None
    patience: int | None
    patience_metric: PatienceMetric
    patience_rule: PatienceRule
    statistics_fraction: float
    final: Literal["last", "average"]
    noise: NoiseName
    noise_batch: int | None
    noise_until: float
    noise_momentum: Literal["after", "before"]
    noise_refresh: int | None
    noise_sigma: float
    noise_temperature: float | None
    ghost_batch: int | None
    batch_schedule: str
    random_segments: bool
    activation_penalty: float
    change_penalty: float
    evaluate_every: int
    evaluation_batch_size: int | None
    top_k: int | None
    precision: TrainingPrecision
    device: "str | torch.device | None"
    compile: bool
    capture: bool | None
    deterministic: bool
    resume: bool
    save_interval: float
    keep: Sequence[int]


def _document(entry: Field[Any]) -> str:
    # A default of None is explained in the help.
    shown = entry.default not in (None, MISSING)
    return f"{entry.name}: {entry.metadata['help']}" + (
        f" Defaults to ``{entry.default!r}``." if shown else ""
    )


# Sphinx, help() and the command line show the same text.
TrainingConfig.__doc__ = f"{TrainingConfig.__doc__}\n    Attributes:\n" + "\n".join(
    f"        {_document(entry)}" for entry in fields(TrainingConfig)
)


def combine(config: TrainingConfig | None, options: Mapping[str, Any]) -> TrainingConfig:
    """Return a configuration with some options replaced; raise TypeError for unknown names."""
    known = [entry.name for entry in fields(TrainingConfig)]
    for name in options:
        if name not in known:
            # Settings of an optimiser are what people try first.
            settings = name in ("lr", "weight_decay", "momentum", "betas", "eps")
            hint = "pass optimizer_settings={" + f"{name!r}: ...}}" if settings else ""
            near = suggest(name, known, listing="help(ritz.training.TrainingConfig)")
            raise TypeError(f"fit has no option {name!r}; {hint or near}")
    if config is None:
        config = TrainingConfig()
    check_type("config", config, TrainingConfig, "a ritz.training.TrainingConfig")
    return replace(config, **options)


def check_same(
    before: Mapping[str, Any], now: Mapping[str, Any], path: Any, *, show: Any = repr
) -> None:
    """Raise if a run is resumed with other options than it was started with."""
    for name, value in now.items():
        if name == "optimizer_settings":  # named one by one: lr rather than a dictionary
            old = before.get(name, {})
            # Settings are stored as text already.
            check_same(_complete(old, value), _complete(value, old), path, show=str)
        elif name in before and before[name] != value:
            raise ValueError(
                f"{path} was made with {name}={show(before[name])}, this run has {show(value)}: "
                "pass the same value or another folder, or start again with resume=False "
                "(--restart)"
            )


def _complete(settings: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of an optimiser, with ``default`` for those that only the others have."""
    return dict.fromkeys(others, "default") | dict(settings)


def _to_plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _to_plain(part) for name, part in value.items()}
    if isinstance(value, tuple | list):
        return [_to_plain(part) for part in value]
    value = as_plain(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    # The repr of a function holds its address, which differs between processes.
    return repr(value) if is_dataclass(value) else type(value).__name__
