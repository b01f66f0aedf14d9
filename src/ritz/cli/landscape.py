"""``ritz landscape``: loss and accuracy around a trained network, along lines and on a plane."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from ritz._core.checks import check_count, check_positive
from ritz.cli import _options as shared
from ritz.cli._options import option

if TYPE_CHECKING:
    from torch import Tensor

    from ritz.cli._measurement import Measurement
    from ritz.curvature import Risk

KINDS = (
    "Directions. ritz: Ritz vectors of the largest and smallest Ritz values, and of the one "
    "nearest to zero. filter: random, with each filter scaled to the norm of the trained one."
)
EPILOG = shared.examples(
    "ritz landscape runs/digits",
    "ritz landscape runs/vgg --plane --batch-norm recomputed --points 31",
    "ritz landscape runs/digits --directions filter --picture pdf",
    "In the figure, solid lines are for the measured data and dashed lines for all test data.",
    file="landscape-filter-train-average-points31.safetensors",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(shared.MeasureOptions):
    """Options of the command."""

    directions: Literal["ritz", "random", "filter"] = option("ritz", KINDS, free=True)
    plane: bool = option(False, "Also measure the plane of the first two directions.", free=True)
    batch_norm: Literal["eval", "train", "recomputed"] = option("eval", shared.MODE, free=True)
    steps: int = option(30, "Number of Lanczos steps for the Ritz vectors.", low=2)
    distance: float = option(
        1.0, "Largest distance from the trained weights, in multiples of the direction."
    )
    points: int = option(21, "Number of points per line. A plane has points x points.", low=2)
    max_products: int | None = option(
        None,
        "Limit on the number of products and evaluations of the loss, kept by fewer steps, then "
        "fewer points (default: no limit).",
        low=1,
    )
    picture: shared.Picture = option("png", shared.PICTURE, shared.OUTPUT, free=True)


def command(options: Options) -> None:
    """Measure loss and accuracy along directions from trained weights, and draw them."""
    from ritz import measures
    from ritz.cli._measurement import measurement

    check_positive("--distance", options.distance)
    leading = ("directions", "batch_norm")
    with measurement(options) as session:
        risk = session.risk().with_batch_norm(session.modes(options.batch_norm)[0])
        options = _within(options, risk.space.size)
        session.announce(risk, products=_steps(options), evaluations=_evaluations(options))
        vectors = _directions(session, risk, options)
        # All test data, even with --samples: the test loss needs no products, so it is cheap.
        grid: Any = {
            "distance": options.distance,
            "num_points": options.points,
            "test": None if session.run.parts.test is None else session.risk("test", whole=True),
            "batch_norm": risk.batch_norm,
        }
        name = session.name("landscape", *leading)
        lines = measures.landscape(risk, vectors, **grid, **session.resume(name))
        session.save("landscape", lines, name, picture=options.picture)
        if options.plane:
            if len(vectors) < 2:
                raise ValueError(
                    f"--plane needs two directions, got {len(vectors)}: give more --steps"
                )
            # Ritz vectors are ordered by importance: largest, smallest, flattest.
            (first, u), (second, v), *_ = vectors.items()
            name = session.name("plane", *leading)
            grid |= {"names": (first, second)} | session.resume(name)
            session.save(
                "plane", measures.landscape2d(risk, u, v, **grid), name, picture=options.picture
            )


def _steps(options: Options) -> int:
    return options.steps if options.directions == "ritz" else 0


def _evaluations(options: Options) -> int:
    # Ritz vectors of the largest, the smallest and the flattest value, or two random directions.
    lines = 3 if options.directions == "ritz" else 2
    return lines * options.points + options.plane * options.points**2


def _within(options: Options, size: int) -> Options:
    """Return the options with as many steps and points as the budget allows."""
    # A Krylov space has at most as many dimensions as there are parameters.
    options = replace(options, steps=min(options.steps, size))
    if options.max_products is None:
        return options
    # At most a third of the budget goes into the Lanczos steps, and the rest into points.
    smaller = replace(options, steps=min(options.steps, max(2, options.max_products // 3)))
    while _steps(smaller) + _evaluations(smaller) > options.max_products:
        if smaller.points == 2:
            needed = _steps(smaller) + _evaluations(smaller)
            check_count("--max-products", options.max_products, low=needed)
        smaller = replace(smaller, points=smaller.points - 1)
    return smaller


def _directions(session: "Measurement", risk: "Risk", options: Options) -> "dict[str, Tensor]":
    """Return directions by name; Ritz vectors are those of the batch-norm mode of the risk."""
    from ritz import measures
    from ritz.curvature import hessian
    from ritz.spectra import lanczos

    generator, kind = session.generator(), options.directions
    if kind == "ritz":
        saving = session.resume(session.name(f"directions-{risk.batch_norm}"))
        op = hessian(risk, num_products=options.steps)
        run = lanczos(op, num_steps=options.steps, vectors=True, generator=generator, **saving)
        return measures.ritz_directions(run)
    # Two directions, enough for a plane.
    drawn = [measures.random_direction(risk, generator=generator) for _ in range(2)]
    if kind == "filter":
        # Each filter of the direction gets the norm of the filter of the weights, so that the
        # picture does not change if a layer is rescaled before batch norm.
        drawn = [measures.filter_normalized(risk, direction) for direction in drawn]
    return {f"{kind} direction {k}": direction for k, direction in enumerate(drawn, start=1)}
