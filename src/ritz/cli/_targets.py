"""What users name: registered models, data and losses, or their own as ``module:factory``."""

import difflib
import importlib
import importlib.util
import inspect
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from ritz import data, models
from ritz._core.registry import Registry
from ritz.cli._trust import Trust
from ritz.training.sources import DataParts, as_parts

DATA, FROM_HERE = "--set-data", ("./", "../", "~/")
LOSSES: Registry[Callable[..., Any] | None] = Registry("loss")
for _name, _loss in (("cross_entropy", cross_entropy), ("mse", mse_loss), ("model", None)):
    LOSSES.register(_name)(_loss)  # "model": it returns its own


def make_model(
    target: str,
    *,
    parts: DataParts,
    options: Mapping[str, Any],
    seed: int = 0,
    written_in: Path | None = None,
) -> nn.Module:
    """Return a new model for some data, on the CPU.

    Args:
        target: A registered name, or ``module:factory``; the factory may take ``num_classes`` and
            ``input_shape``, and the options.
        parts: The data, which know these two.
        options: Keywords.
        seed: Of the first weights.
        written_in: The run folder that the name was read from, if it was.
    """
    known = {"num_classes": parts.num_classes, "input_shape": parts.shape}
    known = {name: value for name, value in known.items() if value is not None}
    if ":" in target:
        return _own_model(target, known, options, seed=seed, written_in=written_in)
    accepted = models.options(target)
    given = {name: value for name, value in known.items() if name in accepted} | dict(options)
    return models.create(target, generator=torch.Generator().manual_seed(seed), **given)


def _own_model(
    target: str,
    known: Mapping[str, Any],
    options: Mapping[str, Any],
    *,
    seed: int,
    written_in: Path | None,
) -> nn.Module:
    factory = own(target, written_in=written_in)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = _called(target, factory, known, options)
    if not isinstance(model, nn.Module):
        raise TypeError(f"{target} must return a torch.nn.Module, got {type(model).__name__}")
    return model


def make_data(
    target: str,
    *,
    data_dir: Path | None,
    options: Mapping[str, Any],
    written_in: Path | None = None,
) -> DataParts:
    """Return data, on the CPU.

    Args:
        target: A registered name, or ``module:factory``; the factory may take ``data_dir``, and
            the options. See :func:`ritz.training.sources.as_parts` for what it may return.
        data_dir: Folder of data sets.
        options: Keywords.
        written_in: The run folder that the name was read from, if it was.
    """
    if ":" not in target:
        return replace(as_parts(data.load(target, data_dir=data_dir, **options)), name=target)
    known = {} if data_dir is None else {"data_dir": data_dir}
    found = _called(target, own(target, written_in=written_in), known, options)
    try:
        return replace(as_parts(found), name=target)
    except (TypeError, ValueError) as error:
        raise type(error)(f"data {target}: {error}") from error


def loss_function(target: str, *, written_in: Path | None = None) -> Callable[..., Any] | None:
    """Return a loss by name, or as ``module:function``."""
    return own(target, written_in=written_in) if ":" in target else LOSSES[target]


def own(target: str, *, written_in: Path | None = None) -> Callable[..., Any]:
    """Return what ``module:factory`` names; modules of the current folder come first.

    A name that was ``written_in`` a run folder is followed as far as :class:`Trust` goes: to the
    user's own files alone, but to any function in them, with any arguments. So runs of strangers
    are not to be measured in a folder with scripts.
    """
    name, _, attribute = target.partition(":")
    if not (name and attribute and all(part.isidentifier() for part in name.split("."))):
        raise ValueError(f"{target!r} must be of the form module:factory")
    trust = None if written_in is None else Trust(written_in)
    with _current_folder_first() if trust is None or trust.any_own else nullcontext():
        if trust is not None:
            trust.check_module(name, target)
        module = _imported(name, target)
    found = getattr(module, attribute, None)
    if not callable(found) or isinstance(found, ModuleType):
        public = [key for key, value in vars(module).items() if callable(value) and key[0] != "_"]
        raise ValueError(
            f"{target!r}: {name} has no function {attribute!r}{_near(attribute, public)}"
        )
    if trust is not None:
        trust.check_callable(module, attribute, target)
    return found  # type: ignore[no-any-return]


@contextmanager
def _current_folder_first() -> Iterator[None]:
    """Look in the current folder first, and afterwards last.

    Last for what a module imports when it is called: what is installed comes before files that
    happen to bear its name.
    """
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        yield
    finally:
        with suppress(ValueError):  # the module took it out
            sys.path.remove(here)
        if here not in sys.path:
            sys.path.append(here)


def parse_settings(option: str, settings: Iterable[str] | None) -> dict[str, Any]:
    """Return ``KEY=VALUE`` pairs: as JSON, numbers separated by commas as a list, else as text."""
    found = {}
    for setting in settings or ():
        key, equals, value = setting.partition("=")
        if not equals or not key.strip():
            raise ValueError(f"{option} takes KEY=VALUE, got {setting!r}")
        found[key.strip()] = _value(value.strip())
    return {key: _placed(value) for key, value in found.items()} if option == DATA else found


def _placed(value: Any) -> Any:
    """A path from here as one from the root: a run is measured from other folders too."""
    if not (isinstance(value, str) and value.startswith(FROM_HERE)):
        return value  # data sets look for bare names in folders of their own first
    path = Path(value).expanduser()
    return str(path.resolve()) if path.exists() else value


def _value(text: str) -> Any:
    plain = text.replace("True", "true").replace("False", "false")
    with suppress(json.JSONDecodeError):
        return json.loads(plain)
    bracketed = plain.startswith("(") and plain.endswith(")")  # as Python writes several
    inner = plain[1:-1] if bracketed else plain
    with suppress(json.JSONDecodeError):
        several = json.loads(f"[{inner.strip().removesuffix(',')}]")
        if all(type(item) in (int, float) for item in several) and (several or bracketed):
            return several
    return text


def _imported(name: str, target: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or name.split(".")[0] != error.name.split(".")[0]:
            raise ValueError(
                f"{target!r}: {name} needs a module that is not there: {error}"
            ) from error
        files = [path.stem for path in Path.cwd().glob("*.py")]
        raise ValueError(f"{target!r}: no module {name!r} in {Path.cwd()} or on the Python path"
                         f"{_near(name, files)}") from error  # fmt: skip
    except Exception as error:
        raise ValueError(f"{target!r}: importing {name} raised {_summary(error)}") from error


def _called(
    target: str, factory: Callable[..., Any], known: Mapping[str, Any], options: Mapping[str, Any]
) -> Any:
    """What a factory returns, given of what is known what it has a name for, and all options."""
    try:
        parameters = inspect.signature(factory).parameters
    except ValueError:
        parameters = {}  # type: ignore[assignment]
    given = {name: value for name, value in known.items() if name in parameters} | dict(options)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for name in options:
        if name not in parameters and not takes_any:
            raise ValueError(f"{target!r} takes no option {name!r}{_near(name, parameters)}")
    for name, parameter in parameters.items():
        needed = parameter.default is parameter.empty and parameter.kind in (
            parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)  # fmt: skip
        if needed and name not in given:
            raise ValueError(f"{target!r} needs {name!r}, which is not known: give --set-model or "
                             f"--set-data {name}=VALUE")  # fmt: skip
    try:
        return factory(**given)
    except Exception as error:
        raise ValueError(f"{target!r} raised {_summary(error)}") from error


def _near(name: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(names), n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def _summary(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
