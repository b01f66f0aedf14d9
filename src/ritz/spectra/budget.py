"""What may be spent on the trace of a function."""

from dataclasses import dataclass

import torch

from ritz._core.progress import Progress


@dataclass(frozen=True, slots=True)
class Budget:
    """Products and probes, what is known of the spectrum, and where chance comes from.

    Attributes:
        num_products: Products to spend.
        num_probes: Random vectors; ``None``: as many as pay.
        floor: A number below the spectrum, if one is known.
        rtol: Relative error at which to stop, if any.
        generator: Source of the vectors.
        progress: Whether to show a bar, or what to tell.
    """

    num_products: int
    num_probes: int | None
    floor: float | None
    rtol: float | None
    generator: torch.Generator
    progress: bool | Progress
