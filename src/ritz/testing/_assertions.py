"""`check_operator` and `assert_within_stderr`: assertions for operators and estimates."""

import torch
from torch import Tensor

from ritz._core.checks import check_rtol, check_type
from ritz._core.random import draw_probes, resolve_generator
from ritz._core.results import Estimate
from ritz.operators import LinearOperator, check_symmetric


def check_operator(
    op: LinearOperator,
    *,
    dense: Tensor | None = None,
    rtol: float | None = None,
    generator: torch.Generator | None = None,
) -> None:
    """Raise ``AssertionError`` unless ``op`` satisfies the contract of a linear operator.

    Products must be linear, symmetric, repeatable bit for bit, and of the dtype and device of the
    operator. They must not change their input. The product with a block must equal the products
    with its columns, the product of :meth:`~ritz.LinearOperator.to_scipy`, and the product of the
    matrix ``dense``.

    Args:
        op: The operator.
        dense: Expected matrix, ``(n, n)``. Defaults to ``op.dense()``.
        rtol: Relative tolerance. Defaults to 100 times roundoff times the square root of ``n``.
        generator: Source of the test vectors. Defaults to a new generator with seed 0.
    """
    check_type("op", op, LinearOperator, "an operator, such as that of ritz.as_operator(matrix)")
    n = op.shape[0]
    if rtol is None:
        # Errors of n random terms add up as a random walk: eps sqrt(n), and a factor of 100.
        rtol = 100 * n**0.5 * torch.finfo(op.dtype).eps
    else:
        check_rtol(rtol)
    block = draw_probes(op, 3, kind="gaussian", generator=resolve_generator(generator))
    before, product = block.clone(), op.matmat(block)
    atol = rtol * float(product.abs().max())

    def assert_same(left: Tensor, right: Tensor, name: str) -> None:
        torch.testing.assert_close(left, right, rtol=rtol, atol=atol, msg=lambda m: f"{name}: {m}")

    # The product must be a new tensor: a view would change the input when it is modified in place.
    kind = (product.shape, product.dtype, product.device)
    same = kind == (block.shape, op.dtype, op.device)
    _require(same, f"a product must be like its block: {kind}")
    _require(torch.equal(block, before), "a product must not change its input")
    _require(product.data_ptr() != block.data_ptr(), "a product must be a new tensor")
    _require(torch.equal(op.matmat(block), product), "equal products must be equal bit for bit")
    mixed = op.matmat(2.0 * block[:, :1] - 3.0 * block[:, 1:2])
    # A (2 x - 3 y) = 2 A x - 3 A y
    assert_same(mixed, 2.0 * product[:, :1] - 3.0 * product[:, 1:2], "linear")
    for i in range(3):
        assert_same(op @ block[:, i], product[:, i], "block equals columns")
    check_symmetric(op, generator=generator)
    matrix = op.dense() if dense is None else dense.to(op.dtype).to(op.device)
    assert_same(matrix @ block, product, "dense match")
    scipy_product = torch.from_numpy(op.to_scipy() @ block.cpu().numpy())
    assert_same(scipy_product, product.cpu(), "SciPy's view")


def assert_within_stderr(estimate: Estimate, exact: float | Tensor, *, sigmas: float = 4.0) -> None:
    """Raise ``AssertionError`` unless all means are within ``sigmas`` standard errors of ``exact``.

    The truncation of the estimate is added. Without a standard error, they must agree to roundoff.
    """
    check_type("estimate", estimate, Estimate, "an Estimate")
    mean = estimate.mean.double().cpu()
    truth = torch.as_tensor(exact, dtype=torch.float64).cpu()
    # |mean - truth| <= roundoff + sigmas stderr + truncation
    slack = 1e-12 * truth.abs().max() + sigmas * estimate.stderr.double().cpu()
    slack = slack + estimate.truncation.double().cpu()
    off = (mean - truth).abs()
    _require(
        bool((off <= slack).all()),
        f"off by {float(off.max()):.3g}, {float((off / slack).max() * sigmas):.1f} standard errors",
    )


def _require(condition: bool, message: str) -> None:
    # Not the assert statement, which python -O removes.
    if not condition:
        raise AssertionError(message)
