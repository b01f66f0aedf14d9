"""One measurement of a network or of a matrix in a file: open, resume, save, draw, print."""

import hashlib
import importlib.util
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import Field, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar, final

import torch
import typer
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from ritz._core.batch_norm import batch_norms
from ritz._core.journal import has_state, remove_state
from ritz._core.progress import LONG, duration
from ritz._core.signals import terminate_as_interrupt
from ritz._core.storage import digest, save
from ritz.cli._app import Interrupted
from ritz.cli._factories import (
    check_target,
    default_device,
    explain_mismatch,
    loss_function,
    make_data,
    make_model,
    parse_settings,
)
from ritz.cli._options import MeasureOptions
from ritz.cli._output import print_result, writing
from ritz.curvature import Risk
from ritz.operators._shared import MATRIX_FILES
from ritz.training import load_weights
from ritz.training._shared import (
    CHECKPOINT,
    CONFIG,
    WEIGHTS,
    DataParts,
    RunConfig,
    check_batch_size,
    measured_risk,
    read_run,
    run_weights,
    tensor_state,
)

S = TypeVar("S", bound="Session")

# Weights that file names of results do not mention: those at the end of the run.
LAST = {Path(name).stem for name in (WEIGHTS, CHECKPOINT)}
# Bytes of a name: file systems allow 255, and temporary names of a file being written add 50.
LONGEST = 160
BOTH = {"matrix": "hessian-ggn", "batch_norm": "eval-train"}
TITLES = {"hessian": "Hessian", "ggn": "Gauss-Newton"}

# ------------------------------------------------------------------------------------------
# Opening a run: its model, weights, data and loss.


@dataclass(frozen=True, slots=True)
class Run:
    """A trained network with its data and its loss.

    Attributes:
        folder: Folder of the run, or of the file of weights.
        weights: The file of weights.
        made: Configuration that the run was made with; empty names if there is no ``run.json``.
        config: The same with the options of the command line in place.
        model: The network, on its device.
        parts: The data.
        loss_fn: The loss; ``None`` if the model returns it.
    """

    folder: Path
    weights: Path
    made: RunConfig
    config: RunConfig
    model: nn.Module
    parts: DataParts
    loss_fn: Callable[..., Any] | None


def open_run(options: MeasureOptions) -> Run:
    """Build the model and the data of a run, and load the weights."""
    device = default_device(options.device)
    folder, weights = _find_weights(options)
    # A file of weights from elsewhere has no run.json beside it.
    made = read_run(folder) if (folder / CONFIG).is_file() else RunConfig(model="", data="")
    config = merge_config(options, made, folder)
    data_dir = options.data_dir or (None if config.data_dir is None else Path(config.data_dir))
    # The data come before the model, which may need their shape and number of classes.
    loss_fn = loss_function(config.loss)
    parts = make_data(config.data, data_dir=data_dir, options=config.data_options)
    # The name of the result would state a batch size that was not used.
    check_batch_size(options.batch_size, getattr(parts, getattr(options, "split", "train")))
    with _parameters_within(weights, folder / CONFIG):
        model = make_model(config.model, parts, config.model_options)
    load_weights(model, weights)
    return Run(folder, weights, made, config, model.to(device), parts, loss_fn)


@contextmanager
def _parameters_within(weights: Path, config: Path) -> Iterator[None]:
    """Raise as soon as a model has more parameters than its file of weights can hold.

    Anybody may have written the run folder, so it may describe a model that does not fit in memory.
    """
    # Twice the size: the file may have half precision, or tied weights once.
    total, limit = 0, 2 * weights.stat().st_size + 2**20

    def count(module: nn.Module, name: str, param: Tensor | None) -> None:
        nonlocal total
        total += 0 if param is None else param.nbytes
        if total > limit:
            raise ValueError(f"{config} describes a model that is larger than {weights}")

    # The hook counts while the model is built. Afterwards the memory would already be allocated.
    handle = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        handle.remove()


def _find_weights(options: MeasureOptions) -> tuple[Path, Path]:
    source = options.source
    if source.is_dir():
        return source, run_weights(source, average=options.average)
    if not source.exists():
        raise FileNotFoundError(f"no such folder or file: {source}")
    # Only a run folder says which file has the average.
    if options.average:
        raise ValueError(f"--average needs the folder of a run, got the file {source}")
    return source.parent, source


def merge_config(options: MeasureOptions, made: RunConfig, folder: Path) -> RunConfig:
    """Return the configuration of a run with the options of the command line in place.

    A run folder is data that anybody may have written. A name in it that would import code is
    therefore used only if the command line repeats it.
    """
    names = {name: getattr(options, name) for name in ("model", "data", "loss")}
    changes: dict[str, Any] = {name: value for name, value in names.items() if value is not None}
    # A file of weights alone does not say what it belongs to.
    missing = [name for name in ("model", "data") if not (names[name] or getattr(made, name))]
    if missing:
        others = (".py", ".ipynb", ".csv", ".txt", ".json", *MATRIX_FILES)
        if options.source.name.endswith(others):
            raise ValueError(f"{options.source} is no run folder and no file of weights; spectrum "
                             f"and logdet read matrices ({', '.join(MATRIX_FILES)})")  # fmt: skip
        raise ValueError(f"{options.source} does not name its model and data, because there is no "
                         f"{CONFIG} in {folder.resolve()}: pass "
                         f"{' and '.join(f'--{name}' for name in missing)}")  # fmt: skip
    unnamed = [name for name in ("model", "data", "loss")
               if names[name] is None and ":" in getattr(made, name)]  # fmt: skip
    for name in unnamed:
        # The message below is a command to copy, so the name must not contain shell syntax.
        check_target(getattr(made, name))
    if unnamed:
        repeat = " ".join(f"--{name} {getattr(made, name)}" for name in unnamed)
        raise ValueError(f"{folder / CONFIG} refers to user-defined code, which is imported "
                         f"only if the command names it: add {repeat}")  # fmt: skip
    for kind in ("model", "data"):
        settings = parse_settings(f"--set-{kind}", getattr(options, f"set_{kind}"))
        # Options of the run do not apply to another model or other data.
        same = names[kind] in (None, getattr(made, kind))
        inherited = getattr(made, f"{kind}_options") if same else {}
        changes[f"{kind}_options"] = {**inherited, **settings}
    if options.batch_size is not None:
        changes["training"] = replace(made.training, batch_size=options.batch_size)
    return replace(made, **changes)


# ------------------------------------------------------------------------------------------
# The session of one command.


@contextmanager
def measurement(options: MeasureOptions) -> Iterator["Measurement"]:
    """Open a run, let the block measure it, and then print what the block saved.

    Within the block, SIGTERM acts as ctrl-C, and both end in :class:`Interrupted`.
    """
    run = open_run(options)
    new = Measurement(run, options, options.out or run.folder)
    known: Any = {"name": run.config.model, "loss_fn": run.loss_fn}
    with saving(new) as session, explain_mismatch(run.model, run.parts, **known):
        yield session


@contextmanager
def saving(session: S) -> Iterator[S]:
    """Let the block save results in the folder of a session, and then print them."""
    # Errors of the disk are outermost: whatever fails, they name the folder.
    with writing(session.folder), terminate_as_interrupt():
        try:
            yield session
        except KeyboardInterrupt as error:
            raise Interrupted(session.progress_saved()) from error
        # Everything is saved: nothing is left to resume.
        for state in session.states:
            remove_state(state)
    print_result(session.results, session.files, as_json=session.options.json)


@dataclass(slots=True)
class Session(ABC):
    """One run of a command that measures something: its results, saved states and files.

    Attributes:
        options: Options of the command.
        folder: Folder of the results.
        results: Results by title, in the order in which they were saved.
        files: Files written.
        states: Files to resume from, which are removed once all results are saved.
    """

    options: MeasureOptions
    folder: Path
    results: dict[str, Any] = field(default_factory=dict)
    files: list[Path] = field(default_factory=list)
    states: list[Path] = field(default_factory=list)

    @property
    @abstractmethod
    def has_batch_norm(self) -> bool:
        """Whether modes of batch norm make a difference."""

    @property
    @abstractmethod
    def name_parts(self) -> tuple[str, list[str]]:
        """Parts of file names: what is measured, if not the run itself, and changes of the run."""

    @property
    @abstractmethod
    def identity(self) -> str:
        """Text that identifies what is measured, besides the options of the command."""

    def generator(self) -> torch.Generator:
        """Return a new generator with the seed of the command."""
        return torch.Generator().manual_seed(self.options.seed)

    def name(self, result: str, *leading: str) -> str:
        """Return the file name of a result, without its ending.

        The name contains every option that is not at its default, and weights, model, data and loss
        if they are not those of the run. So only the same command overwrites a result.

        Args:
            result: Kind of the result, such as ``sharpness``.
            leading: Options that come first in the name.
        """
        # Options that the name may have to mention: those of the command itself.
        entries = {entry.name: entry for entry in fields(self.options)}
        shared = {entry.name for entry in fields(MeasureOptions)}
        of_command = [
            key for key in entries if key not in shared and not entries[key].metadata.get("free")
        ]
        # Order: result and its variant, weights, cost, differences from the run, random choices.
        words = [result, *(self._word(entries[key]) for key in leading)]
        stem, changes = self.name_parts
        words += [stem, *(self._word(entries[key]) for key in of_command), *changes]
        words += [self._word(entries[key]) for key in ("samples", "l2", "precision", "seed")]
        words = [word for word in words if word]
        name = "-".join(words)
        if len(name.encode()) <= LONGEST:
            return name
        # A tag of the whole name tells names apart that agree up to the cut.
        tag = hashlib.sha256(name.encode()).hexdigest()[:8]
        return f"{name.encode()[: LONGEST - 9].decode(errors='ignore')}-{tag}"

    def _word(self, entry: Field[Any]) -> str:
        """Return the word for an option, or nothing if it has its default."""
        key, value = entry.name, getattr(self.options, entry.name)
        # Without batch norm all modes are the same.
        if value == entry.default or (key == "batch_norm" and not self.has_batch_norm):
            return ""
        if isinstance(value, str):
            return BOTH[key] if value == "both" else value
        equals = "=" if key[-1].isdigit() else ""
        return key if value is True else f"{key}{equals}{value}".removesuffix(".0")

    def resume(self, name: str) -> dict[str, Any]:
        """Return the keywords with which a computation saves its state and shows its progress.

        The state lies in a hidden file named after the result and what is measured, so that the
        same command finds it again and no other one does.
        """
        # Options are in the name already.
        key = hashlib.sha256(self.identity.encode()).hexdigest()[:16]
        self.states.append(self.folder / f".{name}-{key}.state")
        return {
            "state": self.states[-1],
            "save_interval": self.options.save_interval,
            "progress": not self.options.json,
        }

    def save(self, title: str, result: Any, name: str, *, picture: str | None = None) -> None:
        """Save a result, and draw it if a format of pictures is given."""
        self.results[title] = result
        self.files.append(self.folder / f"{name}.safetensors")
        save(result, self.files[-1])
        if picture is not None:
            self.draw(result, f"{name}.{picture}")

    def draw(self, result: Any, file: str) -> None:
        """Draw a result, or several by title, if Matplotlib is installed."""
        if importlib.util.find_spec("matplotlib") is not None:
            from ritz import plots

            self.files.append(plots.save_figure(plots.plot(result), self.folder / file))

    def progress_saved(self) -> str:
        """Return the message of an interrupted command: whether it can be resumed."""
        every = f"--save-interval is {self.options.save_interval:g} s"
        if any(map(has_state, self.states)):
            return f"interrupted; run the command again to resume from the last save ({every})"
        return f"interrupted before the first save ({every}); run the command again to restart"


@final
class Measurement(Session):
    """A session that measures a trained network.

    Args:
        run: The trained network.
        options: Options of the command.
        folder: Folder of the results.
    """

    __slots__ = ("run",)

    def __init__(self, run: Run, options: MeasureOptions, folder: Path) -> None:
        super().__init__(options, folder)
        self.run = run

    @property
    def has_batch_norm(self) -> bool:
        """Whether modes of batch norm make a difference."""
        return bool(batch_norms(self.run.model))

    @property
    def name_parts(self) -> tuple[str, list[str]]:
        """Name of the weights, if not the last ones, and options that differ from the run."""
        stem = self.run.weights.stem
        return "" if stem in LAST else stem, _changes(self.run.config, self.run.made)

    @property
    def identity(self) -> str:
        """Digest of the weights, folder of the data and device, on which the numbers depend."""
        weights = digest(tensor_state(self.run.model).values())
        return f"{weights} {self.options.data_dir} {self.options.device}"

    def risk(
        self,
        split: Any = "train",
        *,
        whole: bool = False,
        model: nn.Module | None = None,
        l2: float | None = None,
    ) -> Risk:
        """Return the risk on a part of the data, on all samples if ``whole``.

        Model and L2 term are those of the run and of the options unless others are given.
        """
        return measured_risk(
            self.run.model if model is None else model,
            self.run.loss_fn,
            self.run.parts,
            split=split,
            num_samples=None if whole else self.options.samples,
            batch_size=self.run.config.batch_size,
            l2=self.options.l2 if l2 is None else l2,
            precision=self.options.precision,
            seed=self.options.seed,
            progress=not self.options.json,
        )

    def announce(self, risk: Risk, *, products: int, evaluations: int = 0) -> None:
        """Print the cost of a long command and an estimate of its duration."""
        if self.options.json:
            return
        with risk.settings():
            context = next(context for _, context, _ in risk.contexts())
            for _ in range(2):  # the first gradient of a process loads code
                begin = time.perf_counter()
                float(risk.batch_gradient(context)[1])
        gradient = (time.perf_counter() - begin) * sum(risk.batch_rows) / context.size
        # A product costs 1 to 2 gradients, and up to 4 where a model cannot be traced; an
        # evaluation is the first third of a gradient (benchmarks/models.py).
        seconds = gradient * (2 * products + evaluations / 3)
        if seconds > LONG:
            work = f"{products:,} products" + (f", {evaluations:,} evaluations" * bool(evaluations))
            typer.echo(f"{work} on {risk.num_samples:,} samples: about {duration(seconds)}; "
                       "--max-products sets a limit", err=True)  # fmt: skip

    def matrices(self, matrix: str) -> tuple[Any, ...]:
        """Return the matrices that ``--matrix`` selects."""
        if matrix != "hessian" and self.run.loss_fn is None:
            raise ValueError(
                f"--matrix {matrix} needs the outputs of the model, but with --loss model it "
                "returns only the loss: give --matrix hessian"
            )
        return ("hessian", "ggn") if matrix == "both" else (matrix,)

    def modes(self, batch_norm: str) -> tuple[Any, ...]:
        """Return the modes that ``--batch-norm`` selects; only ``eval`` without batch norm."""
        if not self.has_batch_norm:
            return ("eval",)
        return ("eval", "train") if batch_norm == "both" else (batch_norm,)

    def title(self, matrix: str, mode: str) -> str:
        """Return the name of a matrix in pictures and tables."""
        term = f", L2 term {self.options.l2:g}" if self.options.l2 else ""
        return TITLES[matrix] + (f", batch norm {mode}" if self.has_batch_norm else "") + term


@final
class MatrixSession(Session):
    """A session that measures the matrix of a file."""

    __slots__ = ()

    @property
    def has_batch_norm(self) -> bool:
        """A matrix has no batch norm."""
        return False

    @property
    def name_parts(self) -> tuple[str, list[str]]:
        """Name of the file."""
        return self.options.source.name, []

    @property
    def identity(self) -> str:
        """Path of the file. A resumed Lanczos run detects by itself that the matrix has changed."""
        return str(self.options.source.resolve())


def _changes(config: RunConfig, made: RunConfig) -> list[str]:
    """Return a word for everything that differs from what the run was made with."""
    now, before = (
        [
            _describe(one.model, one.model_options),
            _describe(one.data, one.data_options),
            one.loss,
            f"batch{one.batch_size}",
        ]
        for one in (config, made)
    )
    # Only differences: results of the run as it is have the shortest names.
    changed = [word for word, old in zip(now, before, strict=True) if word != old]
    # Paths and module:factory have characters that file systems refuse.
    return [re.sub(r"[^\w.,=+-]+", "_", word) for word in changed]


def _describe(name: str, options: Mapping[str, Any]) -> str:
    values = {key: str(value).strip("[]()").replace(", ", ",") for key, value in options.items()}
    return "-".join([name, *(f"{key}={value}" for key, value in values.items())])
