"""``ritz sharpness``: norms, trace, negative mass and rank degeneracy of a trained network."""

from typing import Annotated, Any, Literal

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

EPILOG = """
Examples:

ritz sharpness runs/digits

ritz sharpness runs/vgg --average --matrix ggn --samples 5000 --probes 4 --steps 50

Files are named after options other than the defaults and those of the run:
sharpness-ggn-train-average-test-steps50.safetensors.
A computation that was stopped goes on when the same command is given again.
"""

Matrix = Annotated[
    Literal["hessian", "ggn", "both"], typer.Option("--matrix", help="Which matrix.")
]
BatchNorm = Annotated[
    Literal["eval", "train", "recomputed", "both"],
    typer.Option("--batch-norm", help="Mode of batch norm; both: eval and train."),
]
Steps = Annotated[int | None, typer.Option("--steps", help="Lanczos steps a probe (default: 100).")]
Probes = Annotated[int, typer.Option("--probes", help="Random probes, for the error bars.")]


def command(
    source: Source,
    matrix: Matrix = "both",
    batch_norm: BatchNorm = "both",
    steps: Steps = None,
    probes: Probes = 8,
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
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Measure how sharp the loss is at trained weights, with error bars."""
    import torch

    from ritz.cli._session import Choice, Names, States, open_run, writing

    check_count("--probes", probes)
    check_range("--save-interval", save_interval, low=0.0)
    opened = open_run(Choice(
        source=source, average=average, model=model, data=data, set_model=set_model,
        set_data=set_data, loss=loss, data_dir=data_dir, samples=samples, batch_size=batch_size,
        device=device, precision=precision, seed=seed,
    ))  # fmt: skip
    matrices = opened.matrices(matrix)
    modes: Any = None if batch_norm == "both" or not opened.has_batch_norm else batch_norm
    with (
        writing(out or opened.folder) as folder,
        States(folder, opened, save_interval=save_interval, split=split, matrix=matrix,
               batch_norm=batch_norm, steps=steps, probes=probes) as states,
    ):  # fmt: skip
        found = ritz.measures.sharpness(
            opened.risk(split),
            num_steps=steps,
            num_probes=probes,
            matrix=matrices,
            batch_norm=modes,
            state=states.path("sharpness"),
            save_interval=save_interval,
            generator=torch.Generator().manual_seed(seed),
            progress=not json,
        )
        names = Names(command, opened, split=split, steps=steps, probes=probes)
        name = names("sharpness", matrix=matrix, batch_norm=batch_norm)
        path = folder / f"{name}.safetensors"
        ritz.save(found, path)
        states.remove()
    print_results({"sharpness": found}, [path], as_json=json)
