"""``ritz list``: models, data sets, optimisers, quantities of monitors and studies by name."""

from dataclasses import MISSING, dataclass
from typing import Literal

import ritz
from ritz.cli._options import PrintOptions, examples, option
from ritz.cli._output import print_result

EPILOG = examples("ritz list models", "ritz list optimizers --json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(PrintOptions):
    """Options of the command."""

    what: Literal["models", "datasets", "optimizers", "quantities", "studies"] = option(
        MISSING, "What to list.", argument=True
    )


def command(options: Options) -> None:
    """List what can be chosen by name: models, data sets, optimisers, quantities, studies."""
    second: dict[str, str] = {}  # listed below, under a title
    if options.what == "models":
        names = {name: _settings(name) for name in ritz.models.available()}
    elif options.what == "datasets":
        names = {name: ritz.data.describe(name) for name in ritz.data.available()}
    elif options.what == "optimizers":
        # Presets are optimisers with published settings, and know where these were published.
        names = {name: _defaults(name) for name in ritz.training.optimizer_names()}
        second = {name: ritz.optim.preset(name).source for name in ritz.optim.preset_names()}
    elif options.what == "quantities":
        from ritz.training._shared import QUANTITIES

        names = {name: QUANTITIES[name].text for name in QUANTITIES}
    else:
        # The first line of a study names the table or figure.
        documents = {name: ritz.studies.find(name).__doc__ for name in ritz.studies.available()}
        names = {name: (text or "").splitlines()[0] for name, text in documents.items()}
    lines = _columns(names)
    lines += ["", "Published settings, for --preset:", *_columns(second)] if second else []
    print_result(names | second, as_json=options.json, text="\n".join(lines))


def _columns(names: dict[str, str]) -> list[str]:
    width = max(map(len, names))
    return [f"{name:{width}}  {words}".rstrip() for name, words in names.items()]


def _settings(name: str) -> str:
    """Return the options of a model that the data do not determine."""
    chosen = [key for key in ritz.models.options(name) if key not in ("num_classes", "input_shape")]
    return f"--set-model: {', '.join(chosen)}" if chosen else ""


def _defaults(name: str) -> str:
    """Return the learning rate and weight decay that an optimiser has by default."""
    import torch

    from ritz.training._shared import create_optimizer

    # Defaults are those of an optimiser that was really made.
    layer = torch.nn.Linear(1, 1)
    group = create_optimizer(name, layer.parameters(), model=layer).param_groups[0]
    return f"lr {group['lr']:g}, weight decay {group['weight_decay']:g}"
