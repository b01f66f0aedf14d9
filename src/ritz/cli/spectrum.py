"""``ritz spectrum``: spectra of the Hessian or Gauss-Newton matrix of a trained network."""

from typing import Annotated

from ritz.cli._options import Matrix, MeasureOptions, Modes, Picture, Split, examples, option

EPILOG = examples(
    "ritz spectrum runs/digits",
    "ritz spectrum runs/vgg --matrix both --batch-norm both --samples 5000",
    "ritz spectrum weights.pt --model model:net --data data:load",
    file="spectrum-hessian-eval-average-test-steps50.safetensors",
)

Steps = Annotated[int, option("--steps", "Lanczos steps, one product with the matrix each.", low=1)]
Vectors = Annotated[bool, option("--vectors", "Save the Ritz vectors as well.")]


def command(
    *,
    matrix: Matrix = "hessian",
    batch_norm: Modes = "eval",
    split: Split = "train",
    steps: Steps = 100,
    vectors: Vectors = False,
    picture: Picture = "png",
    common: MeasureOptions,
) -> None:
    """Compute the spectrum of the curvature of a trained network, and draw it."""
    from ritz.cli._session import measurement
    from ritz.curvature import curvature_operator
    from ritz.spectra import lanczos

    options = {"split": split, "steps": steps, "vectors": vectors}
    with measurement(command, common, **options) as session:
        risk = session.risk(split)
        for kind in session.matrices(matrix):
            for mode in session.modes(batch_norm):
                # Train and eval mode have different Hessians: in train mode the statistics of a
                # batch depend on the weights.
                part = risk.with_batch_norm(mode)
                suffix = f"-{mode}" if session.has_batch_norm else ""
                name = session.name(f"spectrum-{kind}{suffix}")
                spectrum = lanczos(
                    curvature_operator(part, kind),
                    # A Krylov space has at most as many dimensions as there are parameters.
                    num_steps=min(steps, part.space.size),
                    vectors=vectors,
                    generator=session.generator(),
                    **session.resume(name),
                )
                session.save(session.title(kind, mode), spectrum, name)
        drawing = session.name("spectrum", matrix=matrix, batch_norm=batch_norm)
        session.draw(session.results, f"{drawing}.{picture}")
