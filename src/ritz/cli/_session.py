"""What ``spectrum``, ``sharpness`` and ``landscape`` share: open a run, name and save results."""

import hashlib
import importlib.util
import inspect
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn, final

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves, tree_map

from ritz._core.checks import check_count, check_device
from ritz._core.modes import batch_norms, evaluating
from ritz._core.storage import digest
from ritz.cli._app import Interrupted
from ritz.cli._options import Precision, Split
from ritz.cli._targets import loss_function, make_data, make_model, parse_settings
from ritz.curvature import Risk
from ritz.training import load_weights
from ritz.training._shared import (
    NAME,
    WEIGHTS,
    DataParts,
    RunConfig,
    first_batch,
    measured_risk,
    read_run,
    run_weights,
    tensor_state,
)

# ------------------------------------------------------------------------------------------
# Whether a model takes some data: a few samples are tried, before work that may be long.

LABELS = (torch.int64, torch.uint8)
HALF = (torch.float16, torch.bfloat16)


def check_pair(
    model: nn.Module,
    parts: DataParts,
    *,
    name: str,
    loss_fn: Any = None,
    device: torch.device | None = None,
) -> None:
    """Raise unless a model can be called on the first samples of its training data.

    The model, its mode and the generators are as before. What cannot be tried passes: batches that
    come only once, layers that take their shape from the first batch, half precision, which may
    need a device.

    Args:
        model: On any device.
        parts: The data.
        name: Of the model.
        loss_fn: Cross-entropy takes labels of two types alone.
        device: Where to try what fails on the CPU: it may have parts that are for a GPU alone.
    """
    with torch.random.fork_rng(devices=[]):
        batch = _batch(parts)
        inputs = _inputs(batch)
        if loss_fn is cross_entropy:
            _check_labels(batch, parts)
        if inputs is None or not _can_be_tried(model, inputs):
            return
        error = _failure(model, inputs)
        before = _device(model)
        if error is not None and device not in (None, before):
            error = error if _failure(model.to(device), inputs) else None
            model.to(before)
    if error is not None:
        raise ValueError(f"model {name} does not take the data {parts.name}, with inputs of "
                         f"{_described(inputs)}: {_first_line(error)}"
                         f"{_advice(model, inputs)}") from error  # fmt: skip


def _batch(parts: DataParts) -> Any:
    try:
        return first_batch(parts.train)
    except Exception as error:
        raise ValueError(f"the first samples of the data {parts.name} raised "
                         f"{_first_line(error)}") from error  # fmt: skip


def _inputs(batch: Any) -> Any:
    """A batch without its target; ``None`` where there is none to look at."""
    if isinstance(batch, Mapping):
        return dict(batch)
    return tuple(batch[:-1]) if isinstance(batch, tuple | list) and len(batch) > 1 else None


def _check_labels(batch: Any, parts: DataParts) -> None:
    labels = batch[-1] if isinstance(batch, tuple | list) and batch else None
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dtype in LABELS:
        return
    raise TypeError(f"the targets of the data {parts.name} must be int64 or uint8 for "
                    f"cross-entropy, got {_plain_text(labels.dtype)}")  # fmt: skip


def _advice(model: nn.Module, inputs: Any) -> str:
    """What to do about inputs of double precision, as NumPy has them unless told otherwise."""
    leaves = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    double = any(leaf.dtype == torch.float64 for leaf in leaves)
    single = any(tensor.dtype == torch.float32 for tensor in model.parameters())
    if not (double and single):
        return ""
    return '; the model is float32: give float32 inputs (for NumPy: .astype("float32"))'


def _can_be_tried(model: nn.Module, inputs: Any) -> bool:
    tensors = list(chain(model.parameters(), model.buffers()))
    if any(is_lazy(tensor) for tensor in tensors):
        return False
    leaves = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    return not any(tensor.dtype in HALF for tensor in chain(tensors, leaves))


def _failure(model: nn.Module, inputs: Any) -> Exception | None:
    """What a model raises; by name, it may take the labels or not."""
    device = _device(model)
    moved = tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, inputs)
    first: Exception | None = None
    for chosen in _ways(moved):
        try:
            with _unchanged(model), torch.no_grad():
                model(**chosen) if isinstance(chosen, dict) else model(*chosen)
        except torch.OutOfMemoryError:
            return None  # others may be using the device
        except Exception as error:
            first = first or error
        else:
            return None
    return first


def _ways(inputs: Any) -> list[Any]:
    if isinstance(inputs, dict) and "labels" in inputs:
        return [{name: part for name, part in inputs.items() if name != "labels"}, inputs]
    return [inputs]


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    # Tables with a largest norm are the parameters that a call changes: those it looks up.
    bounded = (each for each in model.modules() if getattr(each, "max_norm", None) is not None)
    tables = chain.from_iterable(each.parameters(recurse=False) for each in bounded)
    kept = [(each, each.detach().clone()) for each in chain(tables, model.buffers())]
    try:
        with evaluating(model, batch_statistics=False):
            yield
    finally:
        with torch.no_grad():
            for tensor, before in kept:
                tensor.copy_(before)


def _device(model: nn.Module) -> torch.device:
    first = next(chain(model.parameters(), model.buffers()), None)
    return torch.device("cpu") if first is None else first.device


def _described(inputs: Any) -> str:
    named = inputs.items() if isinstance(inputs, dict) else (("", part) for part in inputs)
    found = [f"{name} {_shape(part)}".lstrip() for name, part in named]
    return " and ".join(found)


def _shape(part: Any) -> str:
    if not isinstance(part, Tensor):
        return type(part).__name__
    return f"shape {tuple(part.shape)}, {_plain_text(part.dtype)}"


def _plain_text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


# ------------------------------------------------------------------------------------------
# What ``spectrum``, ``sharpness`` and ``landscape`` share: a trained model, opened by name.


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What to open, as it was asked for."""

    source: Path
    average: bool = False
    model: str | None = None
    data: str | None = None
    set_model: list[str] | None = None
    set_data: list[str] | None = None
    loss: str | None = None
    data_dir: Path | None = None
    samples: int | None = None
    batch_size: int | None = None
    device: str | None = None
    precision: Precision = "float32"
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A model with its weights, its data and its loss.

    Attributes:
        choice: What was asked for.
        folder: Of the run, or of the file of weights.
        weights: That file.
        made: What the run was made with; defaults, without model and data, where nothing says so.
        config: The same with what was asked for in its place.
        model: On the device.
        parts: The data.
        loss_fn: The loss.
    """

    choice: Choice
    folder: Path
    weights: Path
    made: RunConfig
    config: RunConfig
    model: nn.Module
    parts: DataParts
    loss_fn: Callable[..., Any] | None

    def risk(self, split: Split = "train", *, whole: bool = False) -> Risk:
        """The risk on a part of the data: the samples asked for, or all of them."""
        try:
            return measured_risk(
                self.model,
                self.loss_fn,
                self.parts,
                split=split,
                num_samples=None if whole else self.choice.samples,
                batch_size=self.config.batch_size,
                precision=self.choice.precision,
                seed=self.choice.seed,
            )
        except ValueError:
            raise  # which says what is wrong
        except Exception:
            check_pair(self.model, self.parts, name=self.config.model, loss_fn=self.loss_fn)
            raise

    def matrices(self, asked: str) -> tuple[Any, ...]:
        """The matrices that ``--matrix`` names."""
        if asked != "hessian" and self.loss_fn is None:
            raise ValueError(f"--matrix {asked}: the Gauss-Newton matrix is of the outputs and a "
                             "loss of them, and with --loss model the network returns the loss "
                             "alone: give --matrix hessian")  # fmt: skip
        return ("hessian", "ggn") if asked == "both" else (asked,)

    @property
    def has_batch_norm(self) -> bool:
        """Whether modes of batch norm make a difference."""
        return bool(batch_norms(self.model))


def default_device(device: str | None) -> torch.device:
    """The device asked for, which must be there, or the best one."""
    return check_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))


def open_run(choice: Choice) -> Opened:
    """Build the model and the data of a run, and put the weights in.

    What the run's ``run.json`` says holds where nothing else is asked for.
    """
    if choice.batch_size is not None:
        check_count("--batch-size", choice.batch_size)
    device = default_device(choice.device)
    folder, weights = _located(choice.source, choice.average)
    made = read_run(folder) if (folder / "run.json").is_file() else None
    config = _config(choice, folder, made)
    data_dir = choice.data_dir or (None if config.data_dir is None else Path(config.data_dir))
    loss_fn = loss_function(config.loss, written_in=folder if choice.loss is None else None)
    parts = make_data(
        config.data,
        data_dir=data_dir,
        options=config.data_options,
        written_in=folder if choice.data is None else None,
    )
    # Without a forward pass of its own: what is measured begins with one.
    model = make_model(
        config.model,
        parts=parts,
        options=config.model_options,
        written_in=folder if choice.model is None else None,
    )
    load_weights(model, weights)
    return Opened(
        choice=choice,
        folder=folder,
        weights=weights,
        made=RunConfig(model="", data="") if made is None else made,
        config=config,
        model=model.to(device),
        parts=parts,
        loss_fn=loss_fn,
    )


@contextmanager
def writing(folder: Path) -> Iterator[Path]:
    """Give a folder for results, made where it is missing; say so where it takes none, or no more.

    That it takes none is seen before the block, which may be the work of hours.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".writable.{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise OSError(f"cannot write to {folder}: {error.strerror}") from error
    try:
        yield folder
    except SafetensorError as error:  # which has what the system said in words of its own
        raise _unwritable(folder, str(error)) from error
    except OSError as error:
        elsewhere = error.filename is not None and not Path(error.filename).is_relative_to(folder)
        if error.strerror is None or elsewhere:
            raise
        raise _unwritable(folder, error.strerror) from error


def _unwritable(folder: Path, reason: str) -> OSError:
    return OSError(f"cannot write to {folder}: {reason}; what was whole before is so still, and "
                   "the same command, given again, goes on from there")  # fmt: skip


def _located(source: Path, average: bool) -> tuple[Path, Path]:
    if source.is_dir():
        return source, run_weights(source, average=average)
    if not source.exists():
        raise FileNotFoundError(f"no such folder or file: {source}")
    if average:
        raise ValueError(f"--average needs the folder of a run, got the file {source}")
    return source.parent, source


def _config(choice: Choice, folder: Path, made: RunConfig | None) -> RunConfig:
    names = ("model", "data", "loss", "batch_size")
    given = {name: getattr(choice, name) for name in names}
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    for kind in ("model", "data"):
        changes[f"{kind}_options"] = _options(choice, kind, made)
    if made is not None:
        return RunConfig(**(made.plain() | changes))
    missing = [f"--{name}" for name in ("model", "data") if given[name] is None]
    if missing:
        raise ValueError(f"{folder} has no run.json, which says what {choice.source.name} was made "
                         f"from: give {' and '.join(missing)}")  # fmt: skip
    return RunConfig(**changes)


def _options(choice: Choice, kind: str, made: RunConfig | None) -> dict[str, Any]:
    """Those asked for, and the others of the run, unless they belong to another name."""
    asked = parse_settings(f"--set-{kind}", getattr(choice, f"set_{kind}"))
    if made is None or getattr(choice, kind) not in (None, getattr(made, kind)):
        return asked
    return {**getattr(made, f"{kind}_options"), **asked}


def draw(result: Any, path: Path) -> list[Path]:
    """Draw a result where matplotlib is there; return the picture, or nothing."""
    if importlib.util.find_spec("matplotlib") is None:
        return []
    from ritz import plots

    return [plots.save_figure(plots.plot(result), path)]


# ------------------------------------------------------------------------------------------
# How results are named: after what was asked for beyond the defaults of a command.

LAST = {Path(name).stem for name in (WEIGHTS, NAME)}  # of a run: results do not name them
LONGEST = 160  # bytes: file systems take 255, and a file that is being written has 50 more
BOTH = {"matrix": "hessian-ggn", "batch_norm": "eval-train"}


@final
class Names:
    """Names of the results of one command, without their ending: another question, another name.

    They tell weights, options, model, data and loss, each where it is neither the default of the
    command nor what the run was made with. So a result is overwritten by the same command alone.

    Args:
        command: The function of the command, which has the defaults.
        opened: The model, its weights and data.
        options: What else the results depend on, by the names of the function's arguments.
    """

    def __init__(self, command: Callable[..., None], opened: Opened, **options: Any) -> None:
        signature = inspect.signature(command)
        self._defaults = {key: known.default for key, known in signature.parameters.items()}
        self._ignored = () if opened.has_batch_norm else ("batch_norm",)
        weights = [] if opened.weights.stem in LAST else [opened.weights.stem]
        drawn = {key: getattr(opened.choice, key) for key in ("samples", "precision", "seed")}
        self._ending = [*weights, *self._told(options), *_changes(opened), *self._told(drawn)]

    def __call__(self, result: str, **words: str) -> str:
        """The name of a result, with the options, by their names, whose values tell it."""
        name = "-".join([result, *self._told(words), *self._ending])
        if len(name.encode()) <= LONGEST:
            return name
        whole = hashlib.sha256(name.encode()).hexdigest()[:8]
        return f"{name.encode()[: LONGEST - 9].decode(errors='ignore')}-{whole}"

    def _told(self, options: Mapping[str, Any]) -> list[str]:
        asked = {key: value for key, value in options.items() if value != self._defaults[key]}
        return [_word(key, value) for key, value in asked.items() if key not in self._ignored]


def _word(key: str, value: Any) -> str:
    if isinstance(value, str):
        return BOTH[key] if value == "both" else value
    return key if value is True else f"{key}{value}".removesuffix(".0")


def _plain_word(value: Any) -> str:
    """A value of an option as it is given: several numbers with commas between them."""
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _changes(opened: Opened) -> list[str]:
    """What was given in place of what the run was made with."""
    now, before, found = opened.config, opened.made, []
    for key in ("model", "data"):
        name, options = (getattr(now, part) for part in (key, f"{key}_options"))
        if (name, options) != (getattr(before, key), getattr(before, f"{key}_options")):
            found += [
                name,
                *(f"{option}={_plain_word(value)}" for option, value in options.items()),
            ]
    found += [now.loss] if now.loss != before.loss else []
    found += [f"batch{now.batch_size}"] if now.batch_size != before.batch_size else []
    return [re.sub(r"[^\w.,=+-]+", "_", text) for text in found]


# ------------------------------------------------------------------------------------------
# Where a command that was stopped goes on from: hidden files in the folder of its results.

# Vectors of a state, and one that was being written: no use without the file that names them.
PARTS = re.compile(r".*(\.\d+\.\d+-\d+|\.next)")


@final
class States:
    """The states of one command, named after all that its numbers depend on.

    So the same command finds them when it is given again, and no other one does. For the block,
    the signal to terminate is as good as ctrl-C, and either ends in :class:`Interrupted`.

    Args:
        folder: Of the results.
        opened: The model, its weights and data.
        save_interval: Seconds between saves, which the numbers do not depend on.
        settings: What else was asked for.
    """

    def __init__(
        self, folder: Path, opened: Opened, *, save_interval: float, **settings: Any
    ) -> None:
        # The weights stand for the place that they came from.
        asked = replace(opened.choice, source=Path(opened.weights.name))
        weights = digest(tensor_state(opened.model).values())
        text = f"{weights} {asked} {opened.config.batch_size} {sorted(settings.items())}"
        self._folder, self._key = folder, hashlib.sha256(text.encode()).hexdigest()[:16]
        self._used: list[Path] = []
        self._interval = save_interval
        self._before: Any = signal.SIG_DFL

    def __enter__(self) -> "States":
        self._before = signal.getsignal(signal.SIGTERM)
        if self._handles_signals():
            signal.signal(signal.SIGTERM, _interrupt)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._handles_signals():
            signal.signal(signal.SIGTERM, self._before)
        if isinstance(error, KeyboardInterrupt):
            every = f"--save-interval is {self._interval:g} s"
            raise Interrupted(
                f"interrupted; the same command goes on from the last save ({every})"
                if self._any_saved()
                else f"interrupted before the first save ({every}): the same command begins anew"
            ) from error

    def path(self, name: str) -> Path:
        """The state of one part of the work."""
        self._used.append(self._folder / f".{name}-{self._key}.state")
        return self._used[-1]

    def remove(self) -> None:
        """All results are written: remove what they were resumed from."""
        for path in self._used:
            # A file that a kill left half written has a point more before its name.
            for spent in self._folder.glob(f"*{path.name}*"):
                spent.unlink(missing_ok=True)

    def _handles_signals(self) -> bool:
        # Python lets nobody else; and what was started to ignore the signal goes on ignoring it.
        in_main_thread = threading.current_thread() is threading.main_thread()
        return in_main_thread and self._before is not signal.SIG_IGN

    def _any_saved(self) -> bool:
        names = [path.name for used in self._used for path in self._folder.glob(f"{used.name}*")]
        return any(PARTS.fullmatch(name) is None for name in names)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt
