"""``ritz sharpness``: norms, trace, negative mass and rank degeneracy of a trained network."""

from dataclasses import dataclass
from typing import Any

from ritz.cli import _options as shared
from ritz.cli._options import option

EPILOG = shared.examples(
    "ritz sharpness runs/digits",
    "ritz sharpness runs/vgg --average --matrix ggn --samples 5000 --probes 4",
    file="sharpness-ggn-train-average-test-steps50.safetensors",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(shared.MeasureOptions):
    """Options of the command."""

    matrix: shared.Matrix = option("both", shared.MATRIX, free=True)
    batch_norm: shared.Modes = option("both", shared.MODES, free=True)
    split: shared.Split = option("train", shared.SPLIT)
    steps: int | None = option(None, "Lanczos steps per probe (default: 100).", low=1)
    probes: int = option(8, "Number of random probes. More probes give smaller error bars.", low=1)


def command(options: Options) -> None:
    """Measure sharpness: spectral and Frobenius norm, trace, negative and near-zero eigenvalues."""
    from ritz import measures
    from ritz.cli._session import measurement

    with measurement(options) as session:
        # One file holds all matrices and modes, as rows of one table.
        name = session.name("sharpness", "matrix", "batch_norm")
        # None stands for all modes that make a difference.
        single = options.batch_norm != "both" and session.has_batch_norm
        mode: Any = options.batch_norm if single else None
        result = measures.sharpness(
            session.risk(options.split),
            num_steps=options.steps,
            num_probes=options.probes,
            matrix=session.matrices(options.matrix),
            batch_norm=mode,
            generator=session.generator(),
            **session.resume(name),
        )
        session.save("sharpness", result, name)
