"""The runs of a sweep: names and values of its grid, and the checks before the first run."""

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from hashlib import sha256
from itertools import combinations, product
from pathlib import Path
from typing import Any, final

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from ritz._core.checks import MAX_SEED, as_plain, check_choice, check_count, check_positive
from ritz._core.distributed import world_size
from ritz._core.registry import suggest
from ritz._core.training_config import TrainingConfig
from ritz.curvature._shared import Adapter
from ritz.training._checkpoint import WEIGHTS, FilePath
from ritz.training._data import PARTS, Feed
from ritz.training._optimizers import (
    average_plan,
    check_final,
    make_average,
    make_noise,
    make_optimizer,
    make_schedule,
    preset_config,
    with_preset,
)
from ritz.training._step import check_ghosts
from ritz.training._step_curvature import StepCurvature

# Prefixes of settings that are not fields of TrainingConfig.
GROUPS = ("optimizer", "model", "data")
SHORT = ("lr", "weight_decay")  # settings of the optimiser that need no prefix
LONGEST = 120  # characters of the name of a run, which is also that of its folder
# Steps of an epoch in checks that come before the data are read. Any number serves.
STEPS = 1000
# Metrics of an evaluation. Which of them exist depends on the loss and its targets.
SCORES = ("loss", "accuracy", "perplexity")
Others = dict[str, dict[str, Any]]


def describe(grid: Mapping[str, Sequence[Any]], seeds: Sequence[int]) -> str:
    """Return the number of runs of a sweep, such as ``6 runs: 3 values of lr x 2 seeds``."""
    parts = [f"{len(v)} value{'s' * (len(v) > 1)} of {name}" for name, v in grid.items()]
    parts.append(f"{len(seeds)} seed{'s' * (len(seeds) > 1)}")
    total = len(seeds) * math.prod(map(len, grid.values()))
    return f"{total} run{'s' * (total > 1)}: {' x '.join(parts)}"


def short_text(value: Any) -> str:
    """Return a value as a short text: 0.1, sgd, 64x32."""
    if isinstance(value, list | tuple):
        return "x".join(map(short_text, value))
    whole = isinstance(value, float) and float(f"{value:g}") == value
    return f"{value:g}" if whole else str(value)


# ------------------------------------------------------------------------------------------
# Names and values of options.


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One run of a sweep.

    Attributes:
        name: Values of the grid and seed, also the name of its folder.
        training: Options of training.
        others: Keywords of ``model`` and ``data``, and other ``names``: the model, the data.
        folder: Folder of the run, or ``None``.
    """

    name: str
    training: TrainingConfig
    others: Others
    folder: Path | None


def check_grid(
    grid: Mapping[str, Sequence[Any]], names: Iterable[str] = ()
) -> dict[str, list[Any]]:
    """Return the values of each option by its name in the library; raise for a bad grid.

    Args:
        grid: Values by name. A name may be a field of :class:`TrainingConfig`, also as on the
            command line; ``lr`` or ``weight_decay``; or ``optimizer.NAME``, ``model.NAME``,
            ``data.NAME``.
        names: Further options.
    """
    if not isinstance(grid, Mapping):
        raise TypeError(f"grid must be a dictionary of names and values, got {type(grid).__name__}")
    checked: dict[str, list[Any]] = {}
    for word, values in grid.items():
        name = _option_name(word, names)
        if name in checked:
            raise ValueError(f"grid must have {name} once, got it twice")
        if isinstance(values, str) or not isinstance(values, Sequence):
            raise TypeError(f"grid must have a list of values of {name}, got {values!r}")
        if not values:
            raise ValueError(f"grid must have at least one value of {name}, got none")
        values = [as_plain(value) for value in values]
        for place, value in enumerate(values):
            _check_plain(name, value)
            # 1 and True are equal, and not the same.
            if any(value == each and isinstance(value, bool) == isinstance(each, bool)
                   for each in values[:place]):  # fmt: skip
                raise ValueError(f"grid must have each value of {name} once, got {value} twice")
        checked[name] = values
    return checked


def _option_name(word: str, names: Iterable[str]) -> str:
    """Return the name of an option in the library."""
    known = {*SHORT, *names}
    aliases = {}
    for entry in fields(TrainingConfig):
        if entry.name not in ("seed", "resume", "optimizer_settings"):
            known.add(entry.name)
            flag = (entry.metadata.get("flags") or entry.name).split("/")[0].split()[0]
            # Such as epochs, the flag of num_epochs.
            aliases[flag.lstrip("-").replace("-", "_")] = entry.name
    name = str(word).lstrip("-").replace("-", "_")
    group, dot, key = str(word).partition(".")
    if dot and key and group in GROUPS:
        return str(word)
    if name == "seed":
        raise ValueError("grid must not have seed: pass seeds=[0,1,2] (--seeds 0,1,2)")
    if name not in known and name not in aliases:
        hint = suggest(name, sorted(known), listing="ritz train --help")
        hint += "" if hint.endswith("?") else "."
        raise ValueError(
            f"grid must have options of training, got {word!r}; {hint} Settings of "
            "the optimiser, the model and the data are optimizer.NAME, model.NAME and data.NAME"
        )
    return name if name in known else aliases[name]


def _check_plain(name: str, value: Any) -> None:
    if isinstance(value, list | tuple):
        for part in value:
            _check_plain(name, part)
    elif value is not None and not isinstance(value, bool | int | float | str):
        raise TypeError(f"grid must have numbers, text, lists or None as values of {name}, got "
                        f"{type(value).__name__}")  # fmt: skip
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"grid must have finite values of {name}, got {value}")


def check_seeds(seeds: int | Sequence[int], first: int) -> list[int]:
    """Return the seeds of a sweep: so many from ``first`` on, or those of a list."""
    seeds = as_plain(seeds)
    if isinstance(seeds, int) and not isinstance(seeds, bool):
        check_count("seeds", seeds)
        return list(range(first, first + seeds))
    if isinstance(seeds, str | bool) or not isinstance(seeds, Sequence):
        raise TypeError(f"seeds must be a number or a list of whole numbers, got {seeds!r}")
    if first:
        raise ValueError(f"seed must not be given with a list of seeds, got {first} and {seeds}")
    if not seeds:
        raise ValueError("seeds must contain at least one seed, got none")
    for place, seed in enumerate(seeds):
        check_count("seeds", seed, low=0, high=MAX_SEED)
        if seed in seeds[:place]:
            raise ValueError(f"seeds must differ, got {seed} twice")
    return list(map(int, seeds))


# ------------------------------------------------------------------------------------------
# The runs, and what is checked before the first.


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All runs of a sweep, checked before the first.

    Attributes:
        base: Options of all runs.
        grid: Values by option.
        seeds: Seeds.
        points: The runs: all points for one seed after the other, so that an unfinished table
            compares points.
        folder: Folder of the sweep, or ``None``.
    """

    base: TrainingConfig
    grid: dict[str, list[Any]]
    seeds: list[int]
    points: list[Point]
    folder: Path | None

    @property
    def done(self) -> frozenset[str]:
        """The names of the runs that have ended: only these have weights in their folder."""
        folders = ((point.name, point.folder) for point in self.points)
        return frozenset(
            name for name, folder in folders if folder is not None and (folder / WEIGHTS).is_file()
        )

    def __str__(self) -> str:
        # A published setting in the grid may bring its number of epochs.
        numbers = {point.training.num_epochs for point in self.points}
        epochs = "".join(f"; {n} epoch{'s' * (n > 1)} each" for n in numbers)
        return describe(self.grid, self.seeds) + (epochs if len(numbers) == 1 else "")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions:
    """Options of all runs, and how those of a point are made from them.

    Attributes:
        base: The options.
        given: Names of those that were chosen, which take precedence over a published setting.
        preset: A published setting of all runs, or ``None``.
        names: Options of the grid that are not in :class:`TrainingConfig`.
        check: Raises for a point that no run could have: takes options of training, and others.
        named: Whether the optimiser is chosen by name, and not passed as an object.
        cuts: Whether the batch size is an option of training; ``None`` if not known.
    """

    base: TrainingConfig
    given: Collection[str] = ()
    preset: str | None = None
    names: Iterable[str] = ()
    check: Callable[[TrainingConfig, Others], object] = lambda training, others: None
    named: bool = True
    cuts: bool | None = None

    def at(self, chosen: Mapping[str, Any], seed: int) -> tuple[TrainingConfig, Others]:
        """Return the options of training of a point, and the others, unchecked."""
        training: dict[str, Any] = {"seed": seed}
        settings = dict(self.base.optimizer_settings)
        others: Others = {"model": {}, "data": {}, "names": {}}
        known = {entry.name for entry in fields(TrainingConfig)}
        for name, value in chosen.items():
            # Without a dot the group is empty and the key is the whole name.
            group, _, key = name.rpartition(".")
            if group == "optimizer" or name in SHORT:
                settings[key] = value
            elif group:
                others[group][key] = value
            else:
                (training if name in known else others["names"])[name] = value
        for name in SHORT:
            if name in settings:
                check_positive(name, settings[name], zero=name == "weight_decay")
        training["optimizer_settings"] = settings
        preset = others["names"].pop("preset", self.preset)
        if preset is None:
            return replace(self.base, **training), others
        training = {name: getattr(self.base, name) for name in self.given} | training
        if "optimizer" in training:
            raise ValueError(f"preset {preset} brings its optimiser: leave out optimizer")
        return preset_config(preset, **training), others

    def checked(self, chosen: Mapping[str, Any], seed: int) -> tuple[TrainingConfig, Others]:
        """Return the options of a point; raise if no run could have them."""
        training, others = self.at(chosen, seed)
        if self.named:
            check_options(training, cuts=self.cuts)
        self.check(training, others)
        return training, others


def plan_sweep(
    options: SweepOptions,
    grid: Mapping[str, Sequence[Any]],
    *,
    seeds: int | Sequence[int],
    folder: FilePath | None,
) -> Plan:
    """Return the runs of a sweep; raise if the grid is wrong.

    Args:
        options: Options of all runs.
        grid: As for :func:`sweep`.
        seeds: As for :func:`sweep`.
        folder: As for :func:`sweep`.
    """
    if world_size() > 1:
        raise ValueError("a sweep must be started in one process, got several: leave out torchrun")
    checked, seeds = check_grid(grid, options.names), check_seeds(seeds, options.base.seed)
    words, grid = dict(zip(checked, map(str, grid), strict=True)), checked
    combined = [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]
    for chosen in combined:
        try:
            options.checked(chosen, seeds[0])
        except (ValueError, TypeError, OSError) as error:
            raise _name_values(options, chosen, words, seeds[0], error) from error
    place, points = None if folder is None else Path(folder), []
    for seed in seeds:
        for chosen in combined:
            name = _name(chosen | {"seed": seed})
            training, others = options.at(chosen, seed)
            points.append(Point(name=name, training=training, others=others,
                                folder=None if place is None else place / name))  # fmt: skip
    return Plan(base=options.base, grid=grid, seeds=seeds, points=points, folder=place)


def _name_values(
    options: SweepOptions,
    chosen: Mapping[str, Any],
    words: Mapping[str, str],
    seed: int,
    error: Exception,
) -> Exception:
    """Return an error of a point with the values of the grid that cause it before its message."""
    for count in range(len(chosen) + 1):
        for names in combinations(chosen, count):
            if _message(options, {name: chosen[name] for name in names}, seed) == str(error):
                # The options of all runs are wrong, and not the grid.
                if not names:
                    return error
                kind = next(k for k in (ValueError, TypeError, OSError) if isinstance(error, k))
                values = ", ".join(f"{words[name]}={short_text(chosen[name])}" for name in names)
                return kind(f"grid {values}: {error}")
    return error


def _message(options: SweepOptions, chosen: Mapping[str, Any], seed: int) -> str:
    try:
        options.checked(chosen, seed)
    except (ValueError, TypeError, OSError) as error:
        return str(error)
    return ""


def check_options(config: TrainingConfig, *, cuts: bool | None = None) -> None:
    """Raise if a run cannot begin with these options, whatever its model and data.

    Optimiser, average, schedule, noise and damping are made for a network with one weight.

    Args:
        config: The options.
        cuts: Whether the batch size is an option of training; ``None`` if not known.
    """
    config = with_preset(config)
    layer = nn.utils.skip_init(nn.Linear, 1, 1)
    length, device = config.steps_per_epoch or STEPS, torch.device("cpu")
    plan = average_plan(config, length)
    optimizer = make_optimizer(None, layer, config, plan, device)
    check_final(config, make_average(None, optimizer, config, plan)[0])
    make_schedule(None, optimizer, config, length)
    sizes = [size for _, size in config.batch_sizes] or [config.batch_size or STEPS]
    if cuts:
        check_ghosts(config, max(sizes))
    adapter = Adapter(layer, cross_entropy, None)
    make_noise(optimizer, adapter, config, config.num_epochs * length,
               samples_per_step=min(sizes) if cuts else None)  # fmt: skip
    feed = Feed((torch.zeros(1, 1),), batch_size=1, device=device, shuffled=False)
    StepCurvature(layer, feed, config, optimizer, length=length)


def check_metric(
    metric: str | None,
    points: Iterable[Point],
    *,
    parts: Iterable[str] = PARTS,
    watched: bool = False,
) -> None:
    """Raise for a metric that no run can have.

    Args:
        metric: The metric, or ``None``.
        points: The runs.
        parts: Parts of the data, if they are known.
        watched: Whether there are monitors, whose numbers are not known before the first of them.
    """
    if metric is None or watched:
        return
    points = list(points)
    tops = {point.training.top_k for point in points}
    scores = [*SCORES, *(f"top{k}_accuracy" for k in sorted(filter(None, tops)))]
    names = [f"{part}_{score}" for part in parts for score in scores]
    names += [f"average_{name}" for name in names]
    names += ["damping"] * any(point.training.damping != "constant" for point in points)
    check_choice("metric", metric, ["learning_rate", *names])


def _name(chosen: Mapping[str, Any]) -> str:
    """Return a name of a run that can be the name of a folder."""
    whole = ",".join(f"{name}={short_text(value)}" for name, value in chosen.items())
    name = re.sub(r"[^\w.,=+-]+", "_", whole)
    if name == whole and len(name) <= LONGEST:
        return name
    # A tag tells names apart that differ only in characters that were replaced or cut.
    return f"{name[:LONGEST]}-{sha256(whole.encode()).hexdigest()[:8]}"
