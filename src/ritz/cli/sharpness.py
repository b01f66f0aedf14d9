"""``ritz sharpness``: norms, trace, negative mass and rank degeneracy of a trained network."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ritz.cli import _options as shared
from ritz.cli._options import option

if TYPE_CHECKING:
    from ritz.cli._measurement import Measurement

EPILOG = shared.examples(
    "ritz sharpness runs/digits",
    "ritz sharpness runs/vgg --calibrated --matrix hessian",
    "ritz sharpness runs/vgg --average --matrix ggn --samples 5000 --probes 4",
    file="sharpness-ggn-train-average-test-steps50.safetensors",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(shared.MeasureOptions):
    """Options of the command."""

    matrix: shared.Matrix = option("both", shared.MATRIX, free=True)
    batch_norm: shared.Modes = option("both", shared.MODES, free=True)
    # fmt: off
    split: shared.Split = option("train", shared.SPLIT)
    steps: int | None = option(None, "Number of Lanczos steps per probe (default: 100).", low=1)
    calibrated: bool = option(False, "Measure only the largest eigenvalue, comparable between "
                              "runs: batch norm is folded into the weights, and the "
                              "temperature of the outputs is fitted to held-out data.",
                              free=True)
    probes: int = option(8, "Number of random probes. More probes give smaller error bars.", low=1)
    max_products: int | None = option(
        None, shared.MAX_PRODUCTS.format("fewer probes, then fewer steps"), low=1)
    # fmt: on


def command(options: Options) -> None:
    """Measure sharpness: norms, trace, and fractions of negative and near-zero eigenvalues."""
    from ritz import measures
    from ritz.cli._measurement import measurement

    with measurement(options) as session:
        if options.calibrated:
            _calibrated(options, session)
            return
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
            max_products=options.max_products,
            generator=session.generator(),
            **session.resume(name),
        )
        session.save("sharpness", result, name)


def _calibrated(options: Options, session: "Measurement") -> None:
    from ritz import measures

    run = session.run
    # The temperature needs data on which the network was not trained.
    held = "validation" if run.parts.validation is not None else "test"
    if options.split == held or getattr(run.parts, held) is None:
        raise ValueError(f"--calibrated needs held-out data besides --split {options.split}: the "
                         "data have no validation or test part")  # fmt: skip
    matrices: Any = session.matrices("hessian" if options.matrix == "both" else options.matrix)
    name = session.name("calibrated", "matrix")
    result = measures.calibrated_sharpness(
        run.model,
        lambda model: session.risk(options.split, model=model),
        # The temperature minimises the loss on held-out data alone, without the L2 term.
        lambda model: session.risk(held, model=model, l2=0.0),
        matrix=matrices[0],
        generator=session.generator(),
        progress=not options.json,
    )
    session.save("calibrated sharpness", result, name)
