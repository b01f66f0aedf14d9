"""``ritz landscape``: loss and accuracy around a trained network, along lines and on a plane."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from ritz.cli._options import MeasureOptions, Picture, check_size, choice, examples, option

if TYPE_CHECKING:
    from torch import Tensor

    from ritz.cli._session import Measurement
    from ritz.curvature import Risk

EPILOG = examples(
    "ritz landscape runs/digits",
    "ritz landscape runs/vgg --plane --batch-norm recomputed --points 31",
    "ritz landscape runs/digits --directions filter --picture pdf",
    "Solid lines are training data; dashed lines are all test data, if there are any.",
    file="landscape-filter-train-average-points31.safetensors",
)

KINDS = (
    "ritz (Ritz vectors of the largest, the smallest and the flattest Ritz value), random, or "
    "filter (random, filter-normalized)."
)
Directions = Annotated[Literal["ritz", "random", "filter"], choice("--directions", KINDS)]
Plane = Annotated[bool, option("--plane", "Measure the plane of the first two directions as well.")]
Distance = Annotated[float, option("--distance", "Largest distance from the weights.")]
Points = Annotated[int, option("--points", "Points per line, and per side of the plane.", low=2)]
Steps = Annotated[int, option("--steps", "Lanczos steps for the Ritz vectors.", low=2)]
Mode = Annotated[
    Literal["eval", "train", "recomputed"], choice("--batch-norm", "eval, train or recomputed.")
]


def command(
    *,
    directions: Directions = "ritz",
    plane: Plane = False,
    distance: Distance = 1.0,
    points: Points = 21,
    steps: Steps = 30,
    batch_norm: Mode = "eval",
    picture: Picture = "png",
    common: MeasureOptions,
) -> None:
    """Measure loss and accuracy along directions from trained weights, and draw them."""
    from ritz import measures
    from ritz.cli._session import measurement

    check_size("--distance", distance)
    options = {"steps": steps, "distance": distance, "points": points}
    leading = {"directions": directions, "batch_norm": batch_norm}
    with measurement(command, common, **options) as session:
        risk = session.risk().with_batch_norm(session.modes(batch_norm)[0])
        vectors = _directions(session, risk, directions, steps)
        # All test data, whatever --samples: the test loss needs no products, so it is cheap.
        grid: Any = {
            "distance": distance,
            "num_points": points,
            "test": None if session.run.parts.test is None else session.risk("test", whole=True),
            "batch_norm": risk.batch_norm,
        }
        name = session.name("landscape", **leading)
        lines = measures.landscape(risk, vectors, **grid, **session.resume(name))
        session.save("landscape", lines, name, picture=picture)
        if plane:
            if len(vectors) < 2:
                raise ValueError(
                    f"--plane needs two directions, got {len(vectors)}: give more --steps"
                )
            # Ritz vectors are ordered by importance: largest, smallest, flattest.
            (first, u), (second, v), *_ = vectors.items()
            name = session.name("plane", **leading)
            grid |= {"names": (first, second)} | session.resume(name)
            session.save("plane", measures.landscape2d(risk, u, v, **grid), name, picture=picture)


def _directions(session: "Measurement", risk: "Risk", kind: str, steps: int) -> "dict[str, Tensor]":
    """Return directions by name; Ritz vectors are those of the batch-norm mode of the risk."""
    from ritz import measures
    from ritz.curvature import hessian
    from ritz.spectra import lanczos

    generator = session.generator()
    if kind == "ritz":
        saving = session.resume(session.name(f"directions-{risk.batch_norm}"))
        size = min(steps, risk.space.size)
        run = lanczos(hessian(risk), num_steps=size, vectors=True, generator=generator, **saving)
        return measures.ritz_directions(run)
    drawn = [measures.random_direction(risk, generator=generator) for _ in range(2)]
    if kind == "filter":
        # Each filter of the direction gets the norm of the filter of the weights, so that the
        # picture does not change if a layer is rescaled before batch norm.
        drawn = [measures.filter_normalized(risk, direction) for direction in drawn]
    return {f"{kind} direction {k}": direction for k, direction in enumerate(drawn, start=1)}
