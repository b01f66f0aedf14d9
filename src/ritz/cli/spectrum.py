"""``ritz spectrum``: the spectrum of the Hessian or Gauss-Newton matrix of a trained network."""

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
    SplitOption,
    print_results,
)

if TYPE_CHECKING:
    from ritz.cli._session import Opened

EPILOG = """
Examples:

ritz spectrum runs/digits

ritz spectrum runs/vgg --matrix both --batch-norm both --samples 5000 --steps 100 --out spectra

ritz spectrum weights.pt --model model:net --data data:load

Files are named after the matrix, the mode of batch norm, and options other than the defaults and
those of the run: spectrum-hessian-eval-average-test-steps50.safetensors.
A computation that was stopped goes on when the same command is given again.
"""

TITLES = {"hessian": "Hessian", "ggn": "Gauss-Newton"}
Matrix = Annotated[
    Literal["hessian", "ggn", "both"], typer.Option("--matrix", help="Which matrix.")
]
BatchNorm = Annotated[
    Literal["eval", "train", "recomputed", "both"],
    typer.Option("--batch-norm", help="Mode of batch norm; both: eval and train."),
]
Steps = Annotated[int, typer.Option("--steps", help="Lanczos steps, a product each.")]
Vectors = Annotated[bool, typer.Option("--vectors", help="Keep the Ritz vectors in the file.")]


def command(
    source: Source,
    matrix: Matrix = "hessian",
    batch_norm: BatchNorm = "eval",
    steps: Steps = 100,
    vectors: Vectors = False,
    average: Average = False,
    split: SplitOption = "train",
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
    """Compute the spectrum of the curvature at trained weights, by Lanczos, and draw it."""
    import torch

    from ritz.cli._session import Choice, Names, States, draw, open_run, writing
    from ritz.curvature import curvature_operator
    from ritz.spectra import lanczos

    check_count("--steps", steps)
    check_range("--save-interval", save_interval, low=0.0)
    opened = open_run(Choice(
        source=source, average=average, model=model, data=data, set_model=set_model,
        set_data=set_data, loss=loss, data_dir=data_dir, samples=samples, batch_size=batch_size,
        device=device, precision=precision, seed=seed,
    ))  # fmt: skip
    matrices = opened.matrices(matrix)
    with (
        writing(out or opened.folder) as folder,
        States(folder, opened, save_interval=save_interval, split=split, steps=steps,
               vectors=vectors) as states,
    ):  # fmt: skip
        risk = opened.risk(split)
        names = Names(command, opened, split=split, steps=steps, vectors=vectors)
        found: dict[str, ritz.Spectrum] = {}
        files: list[Path] = []
        for chosen in matrices:
            for mode in _modes(opened, batch_norm):
                part = risk.with_batch_norm(mode)
                title = TITLES[chosen] + (f", batch norm {mode}" if opened.has_batch_norm else "")
                name = f"spectrum-{chosen}" + (f"-{mode}" if opened.has_batch_norm else "")
                found[title] = lanczos(
                    curvature_operator(part, chosen), num_steps=min(steps, part.space.size),
                    vectors=vectors, state=states.path(name), save_interval=save_interval,
                    generator=torch.Generator().manual_seed(seed), progress=not json,
                )  # fmt: skip
                files.append(folder / f"{names(name)}.safetensors")
                ritz.save(found[title], files[-1])
        drawing = names("spectrum", matrix=matrix, batch_norm=batch_norm)
        files += draw(found, folder / f"{drawing}.{picture}")
        states.remove()
    print_results(found, files, as_json=json)


def _modes(opened: "Opened", asked: str) -> tuple[Any, ...]:
    if not opened.has_batch_norm:
        return ("eval",)
    return ("eval", "train") if asked == "both" else (asked,)
