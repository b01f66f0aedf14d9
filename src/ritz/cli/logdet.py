"""``ritz logdet``: the log determinant of a matrix in a file."""

import time
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Literal

from ritz.cli._options import SeedOptions, examples, option
from ritz.cli._output import print_result

EPILOG = examples(
    "ritz logdet matrix.mtx",
    "ritz logdet covariance.npz --method krylov --products 500 --rtol 1e-3",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(SeedOptions):
    """Options of the command."""

    file: Path = option(
        MISSING,
        "Symmetric matrix (.mtx, .mtx.gz, sparse .npz of SciPy, .npy).",
        metavar="FILE",
        argument=True,
    )
    method: Literal["auto", "cholesky", "krylov", "lanczos", "maxent", "chebyshev"] = option(
        "auto",
        "Method: factorise the matrix (cholesky), or estimate from matrix-vector products (the "
        "others). auto chooses by the size of the matrix and a few probes.",
    )
    products: int = option(1500, "Maximum number of matrix-vector products.")
    floor: float | None = option(
        None,
        "Positive lower bound of the smallest eigenvalue, if known. It narrows the error bars.",
    )
    rtol: float | None = option(
        None,
        "Relative error to reach (default: 1e-3 for auto, otherwise none). If it is given and not "
        "reached, the exit code is 1.",
    )


def command(options: Options) -> None:
    """Print the log determinant of a positive definite matrix, with its error bars."""
    import torch

    from ritz.operators import read_matrix
    from ritz.spectra import logdet

    begin = time.monotonic()  # without the imports
    op = read_matrix(options.file)
    estimate = logdet(
        op,
        method=options.method,
        num_products=options.products,
        floor=options.floor,
        rtol=options.rtol,
        generator=torch.Generator().manual_seed(options.seed),
        progress=not options.json,
    )
    seconds = round(time.monotonic() - begin, 3)
    # The rows tell whether the right file was read.
    facts = {"file": options.file, "rows": op.shape[0], "logdet": estimate, "seconds": seconds}
    print_result(facts, as_json=options.json, text=f"log det = {estimate}\n{seconds} s")
    # Without --rtol any accuracy is a success.
    if options.rtol is not None:
        estimate.raise_if_failed()
