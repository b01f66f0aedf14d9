"""What every operator must do, and what every estimate must satisfy."""

import torch
from torch import Tensor

from ritz._core.random import probes, resolve_generator
from ritz._core.results import Estimate
from ritz.operators import LinearOperator, check_symmetric


def check_operator(
    op: LinearOperator,
    *,
    dense: Tensor | None = None,
    rtol: float | None = None,
    generator: torch.Generator | None = None,
) -> None:
    """Raise ``AssertionError`` unless ``op`` keeps the contract of a linear operator.

    Linear, symmetric, a block equal to its columns, a vector equal to a column, the input kept,
    twice the same, of its dtype and device, agreeing with SciPy's view, and equal to ``dense``.

    Args:
        op: What to check.
        dense: The matrix it should be, ``(n, n)``; its own ``dense()`` by default.
        rtol: Relative tolerance; 100 units of roundoff times the root of ``n`` by default.
        generator: Source of the test vectors.
    """
    n = op.shape[0]
    block = probes(
        (n, 3),
        kind="gaussian",
        generator=resolve_generator(generator),
        dtype=op.dtype,
        device=op.device,
    )
    kept, product = block.clone(), op.matmat(block)
    rtol = 100 * n**0.5 * torch.finfo(op.dtype).eps if rtol is None else rtol
    atol = rtol * float(product.abs().max())

    def same(left: Tensor, right: Tensor, what: str) -> None:
        torch.testing.assert_close(left, right, rtol=rtol, atol=atol, msg=lambda m: f"{what}: {m}")

    kind = (product.shape, product.dtype, product.device)
    _require(
        kind == (block.shape, op.dtype, op.device), f"a product must be like its block: {kind}"
    )
    _require(torch.equal(block, kept), "a product must not change its input")
    _require(product.data_ptr() != block.data_ptr(), "a product must be a new tensor")
    _require(torch.equal(op.matmat(block), product), "equal products must be equal bit for bit")
    mixed = op.matmat(2.0 * block[:, :1] - 3.0 * block[:, 1:2])
    same(mixed, 2.0 * product[:, :1] - 3.0 * product[:, 1:2], "linear")
    for i in range(3):
        same(op @ block[:, i], product[:, i], "block equals columns")
    check_symmetric(op, generator=generator)
    matrix = op.dense() if dense is None else dense.to(op.dtype).to(op.device)
    same(matrix @ block, product, "dense match")
    scipy_product = torch.from_numpy(op.to_scipy() @ block.cpu().numpy())
    same(scipy_product, product.cpu(), "SciPy's view")


def assert_within_stderr(estimate: Estimate, exact: float | Tensor, *, sigmas: float = 4.0) -> None:
    """Raise ``AssertionError`` unless every mean is within ``sigmas`` standard errors of the truth.

    A zero standard error asks for equality to roundoff.
    """
    mean = estimate.mean.double().cpu()
    truth = torch.as_tensor(exact, dtype=torch.float64).cpu()
    slack = 1e-12 * truth.abs().max() + sigmas * estimate.stderr.double().cpu()
    if estimate.truncation is not None:
        slack = slack + estimate.truncation.double().cpu()
    off = (mean - truth).abs()
    _require(
        bool((off <= slack).all()),
        f"off by {float(off.max()):.3g}, {float((off / slack).max() * sigmas):.1f} standard errors",
    )


def _require(condition: bool, message: str) -> None:
    # Not the assert statement, which python -O drops.
    if not condition:
        raise AssertionError(message)
