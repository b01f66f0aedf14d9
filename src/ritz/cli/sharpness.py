"""``ritz sharpness``: norms, trace, negative mass and rank degeneracy of a trained network."""

from typing import Annotated, Any

from ritz.cli._options import Matrix, MeasureOptions, Modes, Split, examples, option

EPILOG = examples(
    "ritz sharpness runs/digits",
    "ritz sharpness runs/vgg --average --matrix ggn --samples 5000 --probes 4",
    file="sharpness-ggn-train-average-test-steps50.safetensors",
)

Steps = Annotated[int | None, option("--steps", "Lanczos steps per probe (default: 100).", low=1)]
Probes = Annotated[
    int, option("--probes", "Random probes; more probes give smaller error bars.", low=1)
]


def command(
    *,
    matrix: Matrix = "both",
    batch_norm: Modes = "both",
    split: Split = "train",
    steps: Steps = None,
    probes: Probes = 8,
    common: MeasureOptions,
) -> None:
    """Measure how sharp the loss is at trained weights, with error bars."""
    from ritz import measures
    from ritz.cli._session import measurement

    options = {"split": split, "steps": steps, "probes": probes}
    with measurement(command, common, **options) as session:
        # One file holds all matrices and modes, as rows of one table.
        name = session.name("sharpness", matrix=matrix, batch_norm=batch_norm)
        # None stands for all modes that make a difference.
        mode: Any = None if batch_norm == "both" or not session.has_batch_norm else batch_norm
        result = measures.sharpness(
            session.risk(split),
            num_steps=steps,
            num_probes=probes,
            matrix=session.matrices(matrix),
            batch_norm=mode,
            generator=session.generator(),
            **session.resume(name),
        )
        session.save("sharpness", result, name)
