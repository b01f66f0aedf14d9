"""How results are named: after what was asked for beyond the defaults of a command."""

import hashlib
import inspect
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, final

from ritz.cli._runs import Opened
from ritz.training.checkpoints import NAME, WEIGHTS

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


def _plain(value: Any) -> str:
    """A value of an option as it is given: several numbers with commas between them."""
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _changes(opened: Opened) -> list[str]:
    """What was given in place of what the run was made with."""
    now, before, found = opened.config, opened.made, []
    for key in ("model", "data"):
        name, options = (getattr(now, part) for part in (key, f"{key}_options"))
        if (name, options) != (getattr(before, key), getattr(before, f"{key}_options")):
            found += [name, *(f"{option}={_plain(value)}" for option, value in options.items())]
    found += [now.loss] if now.loss != before.loss else []
    found += [f"batch{now.batch_size}"] if now.batch_size != before.batch_size else []
    return [re.sub(r"[^\w.,=+-]+", "_", text) for text in found]
