"""Where a command that was stopped goes on from: hidden files in the folder of its results."""

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any, final

from ritz.cli._runs import Opened
from ritz.measures.resume import digest
from ritz.training.weights import tensor_state


@final
class States:
    """The states of one command, named after all that its numbers depend on.

    So the same command finds them when it is given again, and no other one does.

    Args:
        folder: Of the results.
        opened: The model, its weights and data.
        settings: What else was asked for.
    """

    def __init__(self, folder: Path, opened: Opened, **settings: Any) -> None:
        # The weights stand for the place that they came from.
        asked = replace(opened.choice, source=Path(opened.weights.name))
        weights = digest(tensor_state(opened.model).values())
        text = f"{weights} {asked} {opened.config.batch_size} {sorted(settings.items())}"
        self._folder, self._key = folder, hashlib.sha256(text.encode()).hexdigest()[:16]
        self._used: list[Path] = []

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
