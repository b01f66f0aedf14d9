"""``ritz spectrum``: spectra of the Hessian or Gauss-Newton matrix of a trained network."""

from dataclasses import MISSING, dataclass, fields
from pathlib import Path

from ritz._core.checks import check_count
from ritz.cli import _options as shared
from ritz.cli._options import option

# The options that a matrix in a file has: it needs no network and no data.
OF_MATRICES = ("source", "steps", "max_products", "vectors", "picture", "out", "save_interval",
               "seed", "json")  # fmt: skip
EPILOG = shared.examples(
    "ritz spectrum runs/digits",
    "ritz spectrum runs/vgg --matrix both --batch-norm both --samples 5000",
    "ritz spectrum weights.pt --model model:net --data data:load",
    "ritz spectrum matrix.mtx --steps 200",
    file="spectrum-hessian-eval-average-test-steps50.safetensors",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(shared.MeasureOptions):
    """Options of the command."""

    source: Path = option(
        MISSING,
        "Folder of a run, file of weights, or symmetric matrix (.mtx, .mtx.gz, sparse .npz of "
        "SciPy, .npy).",
        metavar="RUN",
        argument=True,
    )
    matrix: shared.Matrix = option("hessian", shared.MATRIX, free=True)
    batch_norm: shared.Modes = option("eval", shared.MODES, free=True)
    split: shared.Split = option("train", shared.SPLIT)
    steps: int = option(
        100, "Number of Lanczos steps. Each takes one product with the matrix.", low=1
    )
    max_products: int | None = option(
        None, shared.MAX_PRODUCTS.format("fewer steps for each spectrum"), low=1
    )
    vectors: bool = option(False, "Save the Ritz vectors as well.")
    picture: shared.Picture = option("png", shared.PICTURE, shared.OUTPUT, free=True)


def command(options: Options) -> None:
    """Compute the spectrum of the curvature of a trained network, or of a matrix in a file."""
    from ritz.cli._measurement import measurement
    from ritz.curvature import curvature_operator
    from ritz.operators._shared import MATRIX_FILES
    from ritz.spectra import lanczos

    if options.source.name.endswith(MATRIX_FILES):
        _of_matrix(options)
        return
    with measurement(options) as session:
        risk = session.risk(options.split)
        kinds, modes = session.matrices(options.matrix), session.modes(options.batch_norm)
        rows = [(kind, mode) for kind in kinds for mode in modes]
        # A Krylov space has at most as many dimensions as there are parameters.
        steps = min(options.steps, risk.space.size)
        if options.max_products is not None:
            check_count("--max-products", options.max_products, low=len(rows))
            steps = min(steps, options.max_products // len(rows))
        session.announce(risk, products=len(rows) * steps)
        for kind, mode in rows:
            # Train and eval mode have different Hessians: in train mode the statistics of a batch
            # depend on the weights.
            part = risk.with_batch_norm(mode)
            suffix = f"-{mode}" if session.has_batch_norm else ""
            name = session.name(f"spectrum-{kind}{suffix}")
            spectrum = lanczos(
                curvature_operator(part, kind, num_products=steps),
                num_steps=steps,
                vectors=options.vectors,
                generator=session.generator(),
                **session.resume(name),
            )
            session.save(session.title(kind, mode), spectrum, name)
        drawing = session.name("spectrum", "matrix", "batch_norm")
        session.draw(session.results, f"{drawing}.{options.picture}")


def _of_matrix(options: Options) -> None:
    """Compute the spectrum of the symmetric matrix of a file."""
    from ritz.cli._measurement import MatrixSession, saving
    from ritz.operators import read_matrix
    from ritz.spectra import lanczos

    for entry in (entry for entry in fields(options) if entry.name not in OF_MATRICES):
        if getattr(options, entry.name) != entry.default:
            flag = f"--{entry.name.replace('_', '-')}"
            raise ValueError(f"{flag} is for trained networks, but {options.source} is a matrix")
    op = read_matrix(options.source)
    steps = min(options.steps, op.shape[0], options.max_products or options.steps)
    with saving(MatrixSession(options, options.out or options.source.parent)) as session:
        name = session.name("spectrum")
        spectrum = lanczos(
            op,
            num_steps=steps,
            vectors=options.vectors,
            generator=session.generator(),
            **session.resume(name),
        )
        session.save(options.source.name, spectrum, name, picture=options.picture)
