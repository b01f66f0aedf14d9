"""Options of commands: each is a field of a dataclass, from which Typer makes an option."""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

from ritz._core.checks import MAX_SEED, check_range
from ritz._core.training_config import TrainingConfig

# Titles of the panels that --help shows.
NETWORK, OUTPUT, MACHINE = "Network and data", "Output", "Arithmetic"


def option(default: Any, help: str, panel: str | None = None, **known: Any) -> Any:
    """Return a field of a dataclass that is an option of a command.

    Args:
        default: Default value; ``dataclasses.MISSING`` if the option is required.
        help: Help text.
        panel: Title of the panel of ``--help``.
        **known: ``flags`` are the names of the option, by default that of the field. ``metavar``
            stands for the value in ``--help``; ``argument=True`` makes it an argument without a
            flag. ``low`` and ``high`` bound the value. ``free=True`` keeps it out of the names of
            files.
    """
    return field(default=default, metadata={"help": help, "panel": panel, **known})


@dataclass(frozen=True, slots=True, kw_only=True)
class PrintOptions:
    """The option of all commands."""

    json: bool = option(False, "Print the result as JSON, without progress bars.", free=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedOptions(PrintOptions):
    """Options of all commands that draw random numbers."""

    seed: int = option(0, "Seed of all random numbers.", low=0, high=MAX_SEED)


Matrix = Literal["hessian", "ggn", "both"]
MATRIX = "Curvature matrix: the Hessian, or the Gauss-Newton matrix (ggn)."
Modes = Literal["eval", "train", "recomputed", "both"]
MODE = (
    "Batch-norm mode. eval uses the running statistics, train the statistics of each batch, and "
    "recomputed uses running statistics that are computed anew on the measured data."
)
MODES = f"{MODE} both measures eval and train."
Split = Literal["train", "validation", "test"]
SPLIT = "Part of the data to measure on."
Picture = Literal["png", "svg", "pdf"]
PICTURE = "Format of the figures."
MAX_PRODUCTS = "Limit on the number of matrix-vector products, kept by {} (default: no limit)."
OF_RUN = (
    "a name or module:factory (default: as in the run). Required if the run used module:factory."
)
LOSS = "Loss: cross_entropy, mse, model (the model returns it) or module:function (default: {})."
SET_MODEL = "Option of the model, such as width=32 or hidden=64,32. May be repeated."
SET_DATA = "Option of the data set, such as file=./story.txt. May be repeated."
DATA_DIR = "Folder of data sets (default: the environment variable RITZ_DATA)."


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureOptions(SeedOptions):
    """Which trained network to measure on which data, how, and where results go."""

    # fmt: off
    source: Path = option(MISSING, "Folder of a run, or a file of weights.", metavar="RUN",
                          argument=True)
    average: bool = option(False, "Measure the averaged weights.", NETWORK)
    model: str | None = option(None, f"Model: {OF_RUN}", NETWORK, metavar="NAME")
    data: str | None = option(None, f"Data set: {OF_RUN}", NETWORK, metavar="NAME")
    loss: str | None = option(None, LOSS.format("as in the run"), NETWORK, metavar="NAME")
    set_model: list[str] | None = option(None, SET_MODEL, NETWORK, metavar="KEY=VALUE")
    set_data: list[str] | None = option(None, SET_DATA, NETWORK, metavar="KEY=VALUE")
    data_dir: Path | None = option(None, DATA_DIR, NETWORK, metavar="FOLDER")
    samples: int | None = option(None, "Measure on a random subset of this many samples (default: "
                                 "all).", NETWORK, low=1)
    batch_size: int | None = option(None, "Batch size (default: as in the run).", NETWORK, low=1)
    l2: float = option(0.0, "Coefficient of the L2 term l2/2 |w|^2 added to the loss. For a "
                       "network trained by SGD, pass its weight decay.", NETWORK, low=0.0)
    precision: Literal["float32", "tf32", "float64"] = option(
        "float32", "Precision of the matrix-vector products.", MACHINE, flags="--precision --dtype")
    device: str | None = option(None, "Device, such as cpu or cuda:1 (default: cuda if available).",
                                MACHINE, metavar="NAME")
    out: Path | None = option(None, "Folder for results (default: the folder of the run).", OUTPUT,
                              metavar="FOLDER")
    save_interval: float = option(30.0, "Seconds between saves of unfinished work, from which the "
                                  "command resumes.", OUTPUT, low=0.0)
    # fmt: on


def examples(*lines: str, file: str = "") -> str:
    """Return the end of a help page: one paragraph per line.

    Args:
        lines: Commands, and remarks.
        file: Name of a file that the command may write, as an example.
    """
    names = (
        f"Names of result files contain all options that differ from the defaults, as in {file}."
    )
    resuming = "If the command is interrupted, run it again. It resumes from the last save."
    return "\n\n".join(["Examples:", *lines, *([names, resuming] if file else [])])


def flatten_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command whose dataclass parameters are replaced by one option per field.

    Typer reads options from a signature, so this function writes the signature that Typer needs. A
    command with a parameter ``given`` gets the names of the options of training that were given.
    """
    # Annotations may be text, which only this resolves.
    hints = get_type_hints(command)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    parameters = [parameter for group in groups.values() for parameter in _parameters(group)]
    if TrainingConfig in groups.values():
        # Which options were given, which a published setting must not replace.
        context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY)
        parameters.append(context.replace(annotation=typer.Context))

    @functools.wraps(command)
    def run(**values: Any) -> None:
        made: dict[str, Any] = {}
        for name, group in groups.items():
            known = {entry.name: entry.metadata for entry in fields(group)}
            # None stands for the default of the field.
            chosen = {key: values[key] for key in known if values.get(key) is not None}
            for key, value in chosen.items():
                if "low" in known[key]:  # Typer has min=, but its message does not tell the value
                    check_range(key, value, low=known[key]["low"], high=known[key].get("high"))
            if group is not TrainingConfig:
                made[name] = group(**chosen)
                continue
            source, preset = values["context"].get_parameter_source, values.get("preset")
            given = {key: chosen[key] for key in chosen if source(key).name == "COMMANDLINE"}
            made[name] = group(**chosen) if preset is None else _published(preset, given)
            if "given" in hints:
                made["given"] = frozenset(given)
        command(**made)

    # Typer reads kinds and defaults from the signature, and types from the annotations.
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _published(preset: str, chosen: dict[str, Any]) -> TrainingConfig:
    """Return the options of a published setting, with those of the command line in place."""
    from ritz.training import preset_config

    if "optimizer" in chosen:
        raise ValueError(f"--preset {preset} brings its optimiser: leave out --optimizer")
    return preset_config(preset, **chosen)


def _parameters(group: Any) -> Iterator[inspect.Parameter]:
    """Yield a parameter with an option of Typer for each field of a dataclass.

    The fields are made by :func:`option`, or are those of :class:`ritz.training.TrainingConfig`,
    which have the same metadata. Fields of a base class come last.
    """
    entries = {entry.name: entry for entry in fields(group)}
    ordered = dict.fromkeys(key for base in group.__mro__ for key in inspect.get_annotations(base))
    for name in (name for name in ordered if name in entries):
        entry, known = entries[name], entries[name].metadata
        kind, text, metavar = known.get("kind", entry.type), known["help"], known.get("metavar")
        flags = known.get("flags", "--" + name.replace("_", "-"))
        # The command has its own options in place of this one.
        if flags is None:
            continue
        for other in (key for key in entries if "_" in key):  # help of the library names fields
            text = text.replace(other, "--" + other.replace("_", "-"))
        # Typer shows choices beside the name, where four of them leave no room for the text. An
        # option without a default has the type Literal[...] | None.
        literal = next(
            (part for part in (kind, *get_args(kind)) if get_origin(part) is Literal), None
        )
        if literal is not None:
            text, metavar = f"{text} Choices: {', '.join(get_args(literal))}.", "NAME"
        shown: Any = {"help": text, "metavar": metavar, "rich_help_panel": known["panel"]}
        shown["show_choices"] = False  # they are in the text
        argument = known.get("argument")
        declared = typer.Argument(**shown) if argument else typer.Option(*flags.split(), **shown)
        default = inspect.Parameter.empty if entry.default is MISSING else entry.default
        # Keyword-only, so that options without a default may follow those that have one.
        yield inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None if default == () else default,
            annotation=Annotated[kind, declared],
        )


def split_settings(option: str, settings: Iterable[str] | None) -> dict[str, str]:
    """Return the ``KEY=VALUE`` pairs of an option as text."""
    pairs = {}
    for setting in settings or ():
        key, equals, value = setting.partition("=")
        if not equals or not key.strip():
            raise ValueError(f"{option} takes KEY=VALUE, got {setting!r}")
        # A later pair replaces an earlier one, as usual on a command line.
        pairs[key.strip()] = value.strip()
    return pairs


def split_sizes(option: str, text: str | None) -> list[int] | None:
    """Return whole numbers separated by commas, or ``None`` if there are none."""
    try:
        # Python's own message would not name the option.
        return None if text is None else [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} takes whole numbers such as 8,64, got {text!r}") from None
