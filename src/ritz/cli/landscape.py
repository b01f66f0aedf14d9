"""``ritz landscape``: loss and accuracy around a trained network, along lines and on a plane."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

import ritz
from ritz._core.checks import check_count, check_range
from ritz.cli._options import (
    Average,
    BatchSize,
    Data,
    DataDir,
    Device,
    Json,
    Loss,
    Model,
    Out,
    Picture,
    PrecisionOption,
    Samples,
    SaveInterval,
    Seed,
    SetData,
    SetModel,
    Source,
    check_size,
    print_results,
)

if TYPE_CHECKING:
    from torch import Tensor

    from ritz.curvature import Risk

EPILOG = """
Examples:

ritz landscape runs/digits

ritz landscape runs/vgg --plane --batch-norm recomputed --distance 2 --points 31 --samples 5000

ritz landscape runs/digits --directions filter --picture pdf

Solid lines are the training data, dashes the test data where there are any, all of them.
Files are named after options other than the defaults and those of the run:
landscape-filter-train-average-points31.safetensors, plane-filter-train-average-points31.png.
A computation that was stopped goes on when the same command is given again.
"""

Kind = Literal["ritz", "random", "filter"]
Directions = Annotated[
    Kind,
    typer.Option(
        "--directions",
        help="ritz: of the largest, smallest and flattest Ritz value; random; filter-normalised.",
    ),
]
Plane = Annotated[bool, typer.Option("--plane", help="Also the plane of two directions.")]
Distance = Annotated[float, typer.Option("--distance", help="Largest step to either side.")]
Points = Annotated[int, typer.Option("--points", help="Points a line, and a side of the plane.")]
Steps = Annotated[int, typer.Option("--steps", help="Lanczos steps for the Ritz vectors.")]
BatchNorm = Annotated[
    Literal["eval", "train", "recomputed"], typer.Option("--batch-norm", help="Mode of batch norm.")
]


def command(
    source: Source,
    directions: Directions = "ritz",
    plane: Plane = False,
    distance: Distance = 1.0,
    points: Points = 21,
    steps: Steps = 30,
    batch_norm: BatchNorm = "eval",
    average: Average = False,
    samples: Samples = None,
    batch_size: BatchSize = None,
    model: Model = None,
    data: Data = None,
    loss: Loss = None,
    set_model: SetModel = None,
    set_data: SetData = None,
    data_dir: DataDir = None,
    precision: PrecisionOption = "float32",
    device: Device = None,
    out: Out = None,
    save_interval: SaveInterval = 30.0,
    picture: Picture = "png",
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Compute loss and accuracy along directions from trained weights, and draw them."""
    from ritz.cli._session import Choice, Names, States, draw, open_run, writing

    check_count("--points", points, low=2)
    check_count("--steps", steps, low=2)
    check_size("--distance", distance)
    check_range("--save-interval", save_interval, low=0.0)
    opened = open_run(Choice(
        source=source, average=average, model=model, data=data, set_model=set_model,
        set_data=set_data, loss=loss, data_dir=data_dir, samples=samples, batch_size=batch_size,
        device=device, precision=precision, seed=seed,
    ))  # fmt: skip
    with (
        writing(out or opened.folder) as folder,
        States(folder, opened, save_interval=save_interval, directions=directions,
               distance=distance, points=points, steps=steps, batch_norm=batch_norm) as states,
    ):  # fmt: skip
        risk = opened.risk().with_batch_norm(batch_norm if opened.has_batch_norm else "eval")
        saving: Any = {"save_interval": save_interval, "progress": not json}
        vectors = _directions(
            risk, directions, steps, seed, state=states.path("directions"), **saving
        )
        common: Any = saving | {
            "distance": distance,
            "num_points": points,
            "test": None if opened.parts.test is None else opened.risk("test", whole=True),
            "batch_norm": risk.batch_norm,
        }
        found: dict[str, Any] = {
            "landscape": ritz.measures.landscape(
                risk, vectors, state=states.path("landscape"), **common
            )
        }
        if plane:
            found["plane"] = _plane(risk, vectors, common | {"state": states.path("plane")})
        names = Names(command, opened, steps=steps, distance=distance, points=points)
        files: list[Path] = []
        for kind, result in found.items():
            name = names(kind, directions=directions, batch_norm=batch_norm)
            files.append(folder / f"{name}.safetensors")
            ritz.save(result, files[-1])
            files += draw(result, folder / f"{name}.{picture}")
        states.remove()
    print_results(found, files, as_json=json)


def _directions(
    risk: "Risk", kind: Kind, steps: int, seed: int, **saving: Any
) -> "dict[str, Tensor]":
    """Directions by name; Ritz vectors are of the mode of batch norm that is drawn."""
    import torch

    from ritz.curvature import hessian
    from ritz.spectra import lanczos

    generator = torch.Generator().manual_seed(seed)
    if kind == "ritz":
        steps = min(steps, risk.space.size)
        run = lanczos(hessian(risk), num_steps=steps, vectors=True, generator=generator, **saving)
        return ritz.measures.ritz_directions(run)
    drawn = [ritz.measures.random_direction(risk, generator=generator) for _ in range(2)]
    if kind == "filter":
        drawn = [ritz.measures.filter_normalized(risk, direction) for direction in drawn]
    return {f"{kind} direction {k}": direction for k, direction in enumerate(drawn, start=1)}


def _plane(risk: "Risk", chosen: "dict[str, Tensor]", common: Any) -> Any:
    if len(chosen) < 2:
        raise ValueError(f"--plane needs two directions, got {len(chosen)}: give more --steps")
    (first, u), (second, v), *_ = chosen.items()
    return ritz.measures.landscape2d(risk, u, v, names=(first, second), **common)
