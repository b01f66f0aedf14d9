"""``ritz logdet``: the log determinant of a matrix in a file."""

import json as json_format
import math
import time
from pathlib import Path
from typing import Annotated

import typer

from ritz.cli._options import Json, Seed

File = Annotated[Path, typer.Argument(metavar="FILE", help="Matrix Market, or npz by SciPy.")]
Method = Annotated[str, typer.Option("--method", help="auto, cholesky, krylov, lanczos, ...")]
Products = Annotated[int, typer.Option("--products", help="Products to spend.")]
Floor = Annotated[float | None, typer.Option("--floor", help="A bound below the spectrum.")]
Rtol = Annotated[float | None, typer.Option("--rtol", help="Relative error that is asked for.")]


def command(
    file: File,
    method: Method = "auto",
    products: Products = 1500,
    floor: Floor = None,
    rtol: Rtol = None,
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Print the log determinant of a positive definite matrix, with its error bars."""
    import torch

    from ritz._core.results import format_uncertain
    from ritz.operators import read_matrix
    from ritz.spectra import logdet

    begin = time.monotonic()  # without the imports
    op = read_matrix(file)
    found = logdet(
        op,
        method=method,  # type: ignore[arg-type]  # checked there, with the choices in the message
        num_products=products,
        floor=floor,
        rtol=rtol,
        generator=torch.Generator().manual_seed(seed),
        progress=not json,
    )
    truncation = 0.0 if found.truncation is None else float(found.truncation)
    facts = {
        "file": str(file),
        "rows": op.shape[0],
        "logdet": float(found),
        "stderr": float(found.stderr),
        "truncation": None if math.isnan(truncation) else truncation,  # which JSON has no NaN for
        "method": found.method,
        "products": found.num_products,
        "seconds": round(time.monotonic() - begin, 3),
        "status": str(found.status),
    }
    if json:
        typer.echo(json_format.dumps(facts, indent=2))
    else:
        value = format_uncertain(float(found), float(found.stderr))
        typer.echo(f"log det = {value}  (truncation {truncation:.2g})")
        typer.echo(f"{found.method}; {found.num_products} products, {facts['seconds']} s")
        typer.echo(str(found.status))
    if rtol is not None:
        found.raise_if_failed()
