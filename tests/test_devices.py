"""Results on a GPU equal those on the CPU for the same probes."""

from functools import partial

import pytest
import torch

import ritz
from ritz.operators import (
    DeflatedOperator,
    DenseOperator,
    DiagonalOperator,
    FunctionOperator,
    KernelOperator,
    KroneckerOperator,
    LaplacianOperator,
    LowRankOperator,
    RestrictedOperator,
    ShardedOperator,
    ShiftedOperator,
    SparseOperator,
    as_operator,
)
from ritz.operators._laplacian import GRAPH_MATRICES
from ritz.operators._shared import gershgorin
from ritz.testing import check_operator, with_spectrum

pytestmark = pytest.mark.gpu

PRECISIONS = [torch.float32, torch.float64]
MATRIX = with_spectrum(torch.linspace(0.5, 3, 40, dtype=torch.float64)).matrix


def graph(matrix, kind, *, weighted=True):
    weights = matrix.abs() * (matrix.abs() > 0.05)
    weights = weights if weighted else (weights > 0).to(matrix.dtype)
    return LaplacianOperator(weights.to_sparse_csr(), matrix=kind)


OPERATORS = {
    "dense": as_operator,
    "sparse": lambda a: SparseOperator((a * (a.abs() > 0.05)).to_sparse_csr()),
    "diagonal": lambda a: DiagonalOperator(a.diagonal()),
    "low rank": lambda a: LowRankOperator(a[:, :3], entries=a[0]),
    "kernel": lambda a: KernelOperator(a[:, :3], kernel="matern52", lengthscale=0.3, noise=0.1),
    "kronecker": lambda a: KroneckerOperator(as_operator(a), DiagonalOperator(a[0, :3])),
    "sum": lambda a: as_operator(a) - 2.0 * DiagonalOperator(a[0]),
    "shifted": lambda a: ShiftedOperator(as_operator(a), 1.0),
    "deflated": lambda a: DeflatedOperator(as_operator(a), torch.linalg.qr(a[:, :2]).Q),
    "restricted": lambda a: RestrictedOperator(as_operator(a), torch.tensor([3, 1, 9])),
    "function": lambda a: FunctionOperator(lambda x: a @ x, n=40, dtype=a.dtype, device=a.device),
    "sharded": lambda a: ShardedOperator(as_operator(a)),
    "unweighted graph": lambda a: graph(a, "normalized", weighted=False),
    **{f"{kind} of a graph": partial(graph, kind=kind) for kind in GRAPH_MATRICES},
}


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
@pytest.mark.parametrize("build", OPERATORS.values(), ids=OPERATORS.keys())
def test_every_operator_satisfies_check_operator_on_a_gpu(build, dtype):
    op = build(MATRIX.to(dtype).cuda())
    assert op.device.type == "cuda"
    check_operator(op, dense=build(MATRIX).dense(), rtol=2e-4 if dtype == torch.float32 else None)
    for known in (lambda op: ritz.operators.exact(op, "trace").value, gershgorin):
        expected = known(build(MATRIX))
        assert (
            (known(op) is None)
            if expected is None
            else known(op) == pytest.approx(expected, rel=1e-4)
        )


def hidden(matrix):
    return FunctionOperator(
        lambda block: matrix @ block, n=len(matrix), dtype=matrix.dtype, device=matrix.device
    )


FUNCTIONS = {
    "lanczos": lambda op: ritz.lanczos(op, num_steps=10, vectors=True),
    "lanczos on the host": lambda op: ritz.lanczos(op, num_steps=10, placement="host"),
    "lanczos partial": lambda op: ritz.lanczos(op, num_steps=10, reorthogonalize="partial"),
    "restarted": lambda op: ritz.eigenpairs(op, largest=2, max_vectors=12, rtol=1e-3),
    "hutchinson": lambda op: ritz.trace(op, method="hutchinson"),
    "hutch++": lambda op: ritz.trace(op, method="hutch++", num_probes=8),
    "xtrace": lambda op: ritz.trace(op, num_probes=8),
    "unit vectors": lambda op: ritz.trace(op, num_probes=64),
    "trace_function": lambda op: ritz.trace_function(op, torch.log, num_steps=8),
    "quadrature": lambda op: ritz.trace_function(
        op, torch.log, method="lanczos", num_steps=8, num_probes=8
    ),
    "diagonal": lambda op: ritz.diagonal(op, rtol=0.1),
    "frobenius_norm": ritz.frobenius_norm,
    "spectral_norm": ritz.spectral_norm,
    "bounds": ritz.bounds,
    "moments": lambda op: ritz.moments(op, num_moments=8, basis="legendre"),
    "density": lambda op: ritz.density(op, num_steps=8),
    "kpm": lambda op: ritz.density(op, num_steps=8, method="kpm"),
}
GRAPH_FUNCTIONS = ("lanczos", "hutchinson", "spectral_norm", "bounds", "moments", "density", "kpm")


def numbers(result):
    """Return the numbers of a result, without nodes and vectors, which are not unique."""
    names = ("mean", "stderr", "samples", "values", "residuals", "diagonal", "low", "high")
    found = {name: getattr(result, name) for name in names if hasattr(result, name)}
    if hasattr(result, "moment"):
        found |= {f"moment {k}": result.moment(k) for k in range(4)}
    return {
        name: torch.as_tensor(value, dtype=torch.float64).cpu()
        for name, value in found.items()
        if value is not None
    }


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS.keys())
def test_a_cpu_generator_gives_the_same_results_on_a_gpu(function):
    here, there = numbers(function(hidden(MATRIX))), numbers(function(hidden(MATRIX.cuda())))
    assert here.keys() == there.keys()
    for name in here:
        torch.testing.assert_close(there[name], here[name], rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("name", GRAPH_FUNCTIONS)
def test_a_graph_gives_the_same_results_on_a_gpu(name):
    function = FUNCTIONS[name]
    here = numbers(function(graph(MATRIX, "normalized")))
    there = numbers(function(graph(MATRIX.cuda(), "normalized")))
    assert here.keys() == there.keys()
    for key in here:
        torch.testing.assert_close(there[key], here[key], rtol=1e-8, atol=1e-9)


def test_moments_of_a_graph_computed_on_a_gpu_equal_those_on_the_cpu():
    drawn = ritz.graphs.erdos_renyi(400, p=0.02)
    here, there = (
        ritz.graphs.moments(drawn, num_moments=20, num_probes=8, device=device)
        for device in ("cpu", "cuda")
    )
    torch.testing.assert_close(there.samples, here.samples, rtol=1e-8, atol=1e-9)


def test_eigenpairs_resume_on_a_gpu(tmp_path):
    op = DenseOperator(MATRIX.cuda())
    settings = {"largest": 4, "max_vectors": 14, "state": tmp_path / "state"}
    first = ritz.eigenpairs(op, save_interval=0.0, **settings)
    again = ritz.eigenpairs(op, **settings)
    torch.testing.assert_close(again.values, first.values)


def test_solve_works_on_a_gpu():
    b = torch.randn(40, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = ritz.solve(
        DenseOperator(MATRIX.cuda()),
        b.cuda(),
        initial=b.cuda(),
        preconditioner=lambda block: 0.5 * block,
    )
    assert found.x.device.type == "cuda"
    torch.testing.assert_close(found.x.cpu(), torch.linalg.solve(MATRIX, b), rtol=1e-6, atol=1e-6)


def test_with_spectrum_works_on_a_gpu():
    eigenvalues = torch.linspace(1, 2, 20, dtype=torch.float64).cuda()
    for dense in (True, False):
        op = with_spectrum(eigenvalues, dense=dense)
        assert op.device.type == "cuda"
        torch.testing.assert_close(torch.linalg.eigvalsh(op.dense()), eigenvalues)


def test_a_block_on_another_device_is_rejected():
    with pytest.raises(ValueError, match=r"block must be on cuda:0, like the operator, got cpu"):
        as_operator(MATRIX.cuda()) @ MATRIX[:, 0]
