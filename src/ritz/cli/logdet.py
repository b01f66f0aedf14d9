"""``ritz logdet``: the log determinant of a matrix in a file."""

import time
from pathlib import Path
from typing import Annotated, Literal

import typer

from ritz.cli._options import Json, Seed, choice, examples, option, print_result

EPILOG = examples(
    "ritz logdet matrix.mtx",
    "ritz logdet covariance.npz --method krylov --products 500 --rtol 1e-3",
)

File = Annotated[
    Path, typer.Argument(metavar="FILE", help="Matrix Market file, or a sparse .npz of SciPy.")
]
Method = Annotated[
    Literal["auto", "cholesky", "krylov", "lanczos", "maxent", "chebyshev"],
    choice("--method", "auto, cholesky, krylov, lanczos, maxent or chebyshev."),
]
Products = Annotated[int, option("--products", "Most matrix-vector products to spend.")]
Floor = Annotated[float | None, option("--floor", "Lower bound of the spectrum, if known.")]
Rtol = Annotated[float | None, option("--rtol", "Relative error to reach; failure is exit code 1.")]


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

    from ritz.operators import read_matrix
    from ritz.spectra import logdet

    begin = time.monotonic()  # without the imports
    op = read_matrix(file)
    estimate = logdet(
        op,
        method=method,
        num_products=products,
        floor=floor,
        rtol=rtol,
        generator=torch.Generator().manual_seed(seed),
        progress=not json,
    )
    seconds = round(time.monotonic() - begin, 3)
    # The rows tell whether the right file was read.
    facts = {"file": file, "rows": op.shape[0], "logdet": estimate, "seconds": seconds}
    print_result(facts, as_json=json, text=f"log det = {estimate}\n{seconds} s")
    # Without --rtol any accuracy is a success.
    if rtol is not None:
        estimate.raise_if_failed()
