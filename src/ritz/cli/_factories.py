"""Models, data sets, losses and devices by name: registered names, or ``module:factory``."""

import ast
import difflib
import importlib
import inspect
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from ritz import data, models
from ritz._core.batches import split_labels, to_device
from ritz._core.checks import check_device
from ritz._core.registry import Registry
from ritz.cli._options import split_settings
from ritz.training._shared import DataParts, as_parts, first_batch

LOSSES: Registry[Callable[..., Any] | None] = Registry("loss")
for _name, _loss in (("cross_entropy", cross_entropy), ("mse", mse_loss), ("model", None)):
    LOSSES.register(_name)(_loss)  # None: the model returns its loss


def make_model(
    target: str, parts: DataParts, options: Mapping[str, Any], *, seed: int = 0
) -> nn.Module:
    """Return a new model for a data set, on the CPU.

    Args:
        target: A registered name, or ``module:factory``. A factory receives ``num_classes`` and
            ``input_shape`` if it has parameters of these names.
        parts: The data set, which knows these two.
        options: Further keywords.
        seed: Seed of the initial weights.
    """
    known = {"num_classes": parts.num_classes, "input_shape": parts.shape}
    known = {name: value for name, value in known.items() if value is not None}
    if ":" not in target:
        # Not every model depends on the number of classes or on the shape of the inputs.
        accepted = models.options(target)
        keywords = {name: known[name] for name in known if name in accepted} | dict(options)
        try:
            return models.create(target, generator=torch.Generator().manual_seed(seed), **keywords)
        except ValueError as error:  # such as images that are too small for the network
            raise ValueError(f"model {target} for data {parts.name}: {error}") from error
    # User code draws its weights from the global generator, which is seeded and then restored.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = _call("model", target, known, options)
    if not isinstance(model, nn.Module):
        raise TypeError(f"{target} must return a torch.nn.Module, got {type(model).__name__}")
    return model


def make_data(target: str, *, data_dir: Path | None, options: Mapping[str, Any]) -> DataParts:
    """Return a data set, on the CPU.

    Args:
        target: A registered name, or ``module:factory``. A factory receives ``data_dir`` if it has
            a parameter of this name, and may return what :func:`ritz.training.fit` accepts.
        data_dir: Folder of data sets.
        options: Further keywords.
    """
    if ":" not in target:
        return replace(as_parts(data.load(target, data_dir=data_dir, **options)), name=target)
    known = {} if data_dir is None else {"data_dir": data_dir}
    source = _call("data", target, known, options)
    try:
        return replace(as_parts(source), name=target)
    except (TypeError, ValueError) as error:
        raise type(error)(f"data {target}: {error}") from error


def loss_function(target: str) -> Callable[..., Any] | None:
    """Return a loss by its registered name, or as ``module:function``."""
    return import_target(target) if ":" in target else LOSSES[target]


def check_target(target: str) -> tuple[str, str]:
    """Return module and attribute of ``module:factory``; raise unless it has this form."""
    module, _, attribute = target.partition(":")
    if not (attribute.isidentifier() and all(part.isidentifier() for part in module.split("."))):
        raise ValueError(f"{target!r} must be of the form module:factory")
    return module, attribute


def import_target(target: str) -> Callable[..., Any]:
    """Return what ``module:factory`` names; modules of the current folder come first."""
    name, attribute = check_target(target)
    with _current_folder_first():
        module = _import(name, target)
    factory = getattr(module, attribute, None)
    if not callable(factory) or isinstance(factory, ModuleType):
        # Suggest only what could be meant: public names that can be called.
        public = [key for key, value in vars(module).items() if callable(value) and key[0] != "_"]
        raise ValueError(
            f"{target!r}: {name} has no function {attribute!r}{_suggestion(attribute, public)}"
        )
    return factory  # type: ignore[no-any-return]


@contextmanager
def _current_folder_first() -> Iterator[None]:
    """Put the current folder first on the path, and last afterwards.

    Last, because a factory may import modules beside it when it is called, while a file here must
    not hide an installed module of the same name.
    """
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        yield
    finally:
        with suppress(ValueError):  # the module may have removed it
            sys.path.remove(here)
        if here not in sys.path:
            sys.path.append(here)


def _import(name: str, target: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # Either the module itself is missing, or a module that it imports.
        if error.name is None or name.split(".")[0] != error.name.split(".")[0]:
            raise ValueError(f"{target!r}: {name} imports a missing module: {error}") from error
        files = [path.stem for path in Path.cwd().glob("*.py")]
        raise ValueError(
            f"{target!r}: no module {name!r} in {Path.cwd()} or on the Python path"
            f"{_suggestion(name, files)}"
        ) from error
    except Exception as error:
        raise ValueError(f"{target!r}: importing {name} raised {summary(error)}") from error


def _call(kind: str, target: str, known: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """Call a factory with all options, and with those known values that it has parameters for.

    Args:
        kind: ``model`` or ``data``.
        target: The factory, as ``module:factory``.
        known: Values that it gets if it has parameters of these names.
        options: Further keywords.
    """
    factory = import_target(target)
    try:
        signature = inspect.signature(factory)
    except ValueError:  # a built-in without a signature takes anything
        signature = inspect.signature(lambda **keywords: None)
    keywords = {name: known[name] for name in known if name in signature.parameters} | dict(options)
    # Check the arguments before the call: a TypeError inside the factory may have other reasons.
    try:
        signature.bind(**keywords)
    except TypeError as error:
        names = ", ".join(signature.parameters) or "none"
        # The name of an unknown option came from --set-model or from the grid of a sweep.
        advice = str(error).startswith("missing") * f": give them with --set-{kind} NAME=VALUE"
        raise ValueError(f"{target!r}: {error}; it takes {names}{advice}") from error
    try:
        return factory(**keywords)
    except Exception as error:
        raise ValueError(f"{target!r} raised {summary(error)}") from error


def parse_settings(option: str, settings: Iterable[str] | None) -> dict[str, Any]:
    """Return ``KEY=VALUE`` pairs: values as JSON, numbers with commas as a list, or else as text.

    A path that begins with ``./``, ``../`` or ``~/`` becomes absolute if it exists, so that the
    run can be measured from another folder. Data sets look for bare names in their folder.
    """
    values = {key: _value(text) for key, text in split_settings(option, settings).items()}
    for key, value in values.items():
        if isinstance(value, str) and value.startswith(("./", "../", "~/")):
            path = Path(value).expanduser()
            values[key] = str(path.resolve()) if path.exists() else value
    return values


def _value(text: str) -> Any:
    # JSON has numbers, true, false, null, lists and quoted text; Python has True and 64,32.
    for read in (json.loads, ast.literal_eval):
        with suppress(ValueError, SyntaxError):
            value = read(text)
            if not isinstance(value, tuple):
                return value
            # "64,32" are numbers, but "'a','b'" is text that has a comma.
            if all(type(item) in (int, float) for item in value):
                return list(value)
    return text


def _suggestion(name: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(names), n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def summary(error: BaseException) -> str:
    """Return class and first line of an error."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def default_device(name: str | torch.device | None) -> torch.device:
    """Return the device of a name, which must exist; by default CUDA if there is one."""
    return check_device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


# ------------------------------------------------------------------------------------------
# Errors that name a model that does not take its data.


@contextmanager
def explain_mismatch(
    model: nn.Module, parts: DataParts, *, name: str, loss_fn: Callable[..., Any] | None
) -> Iterator[None]:
    """If the block fails, try the model on two samples, and name it and the data if that fails too.

    The model is tried only after a failure, so a run that works costs nothing more.
    """
    try:
        yield
    except (ValueError, torch.OutOfMemoryError):
        raise  # the message says what is wrong
    except Exception:
        if mismatch := _find_mismatch(model, parts, name, loss_fn):
            raise mismatch from None
        raise


def _find_mismatch(
    model: nn.Module, parts: DataParts, name: str, loss_fn: Callable[..., Any] | None
) -> Exception | None:
    try:
        batch = first_batch(parts.train)
    except Exception as error:
        return ValueError(
            f"reading the first samples of data {parts.name} failed: {summary(error)}"
        )
    # Two samples are enough to see whether the model accepts the data.
    args, kwargs, labels = split_labels(batch)
    if batch is None or labels is None:
        return None
    accepted = (torch.int64, torch.uint8)
    whole = isinstance(labels, Tensor) and not labels.is_floating_point()
    if loss_fn is cross_entropy and whole and labels.dtype not in accepted:
        return TypeError(f"the targets of the data {parts.name} must be int64 or uint8 for "
                         f"cross-entropy, got {str(labels.dtype)[6:]}")  # fmt: skip
    device = next(chain(model.parameters(), model.buffers()), torch.empty(0)).device
    try:
        with torch.no_grad():
            model(*to_device(args, device), **to_device(kwargs, device))
    except Exception as error:
        named = [("", part) for part in args] + [(f"{key} ", part) for key, part in kwargs.items()]
        shown = [f"{key}{_describe_input(part)}" for key, part in named]
        # NumPy computes in float64 by default, and models have float32 weights.
        other = any(kind in " ".join(shown) for kind in ("float64", "float16"))
        advice = '; convert inputs by .float(), or .astype("float32") in NumPy' if other else ""
        return ValueError(f"model {name} failed on data {parts.name}, with inputs of "
                          f"{' and '.join(shown)}: {summary(error)}{advice}")  # fmt: skip
    return None


def _describe_input(part: Any) -> str:
    if isinstance(part, Tensor):
        return f"shape {tuple(part.shape)}, {str(part.dtype)[6:]}"
    return f"class {type(part).__name__}"
