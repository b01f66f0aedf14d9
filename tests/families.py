"""Inputs with known spectra for ``intervals.py``: matrices, kernels, graphs and networks."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import networkx as nx
import numpy as np
import torch
from scipy.linalg import hadamard, hilbert
from torch import Tensor, nn
from torch.nn import functional

import ritz
from ritz.curvature import Risk
from ritz.operators import KernelOperator

# ------------------------------------------------------------------------------------------
# Matrices. Each is dense and float64; eigenvectors are random unless the name says otherwise.


def rotated(eigenvalues: Any, seed: int = 0) -> Tensor:
    """A symmetric matrix with these eigenvalues and random eigenvectors."""
    values = torch.as_tensor(np.asarray(eigenvalues), dtype=torch.float64)
    noise = torch.randn(
        len(values), len(values), generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    basis = torch.linalg.qr(noise).Q
    matrix = (basis * values) @ basis.T
    return (matrix + matrix.T) / 2


def kernel(n: int, noise: float, length: float = 0.3) -> Tensor:
    """A squared-exponential kernel of points in the unit square."""
    points = torch.rand(n, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    squared = torch.cdist(points, points).square()
    return torch.exp(-squared / (2 * length**2)) + noise * torch.eye(n, dtype=torch.float64)


def laplacian(n: int, degree: float, *, normalized: bool) -> Tensor:
    """The Laplacian of a random graph."""
    draws = torch.rand(n, n, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    edges = (draws < degree / n).double().triu(1)
    adjacency = edges + edges.T
    degrees = adjacency.sum(1)
    if not normalized:
        return torch.diag(degrees) - adjacency
    scale = degrees.clamp_min(1).rsqrt()
    return torch.diag((degrees > 0).double()) - scale[:, None] * adjacency * scale


def poisson(side: int, shift: float) -> Tensor:
    """The five-point Laplacian of a square grid, whose eigenvalues repeat."""
    line = 2 * torch.eye(side, dtype=torch.float64)
    line -= torch.diag(torch.ones(side - 1, dtype=torch.float64), 1)
    line -= torch.diag(torch.ones(side - 1, dtype=torch.float64), -1)
    eye = torch.eye(side, dtype=torch.float64)
    return torch.kron(line, eye) + torch.kron(eye, line) + shift * torch.eye(side * side).double()


def pairs(n: int, size: float) -> Tensor:
    """The identity with one large entry off the diagonal: samples take two values."""
    matrix = torch.eye(n, dtype=torch.float64)
    matrix[0, 1] = matrix[1, 0] = size
    return matrix


def wishart(n: int, samples: int, shift: float = 0.0) -> Tensor:
    draws = torch.randn(n, samples, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return draws @ draws.T / samples + shift * torch.eye(n, dtype=torch.float64)


def wigner(n: int, *spikes: float) -> Tensor:
    draws = torch.randn(n, n, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    matrix = (draws + draws.T) / math.sqrt(2 * n)
    for i, spike in enumerate(spikes):
        matrix[i, i] += spike
    return matrix


def graph_laplacian(graph: Any) -> Tensor:
    return torch.from_numpy(nx.laplacian_matrix(graph).toarray().astype(float))


def star(n: int) -> Tensor:
    """The adjacency matrix of a star: rank two, and the two eigenvalues cancel in the trace."""
    matrix = torch.zeros(n, n, dtype=torch.float64)
    matrix[0, 1:] = matrix[1:, 0] = 1.0
    return matrix


def arrow(n: int, tip: float, edge: float) -> Tensor:
    """A diagonal matrix with one full row and column."""
    matrix = torch.diag(torch.linspace(1, 3, n, dtype=torch.float64))
    matrix[0, 1:] = matrix[1:, 0] = edge
    matrix[0, 0] = tip
    return matrix


def ones(n: int, size: int) -> Tensor:
    """The identity with a small block of ones: most probes give the same sample."""
    matrix = torch.eye(n, dtype=torch.float64)
    matrix[:size, :size] += 1.0
    return matrix


def constant(n: int, size: float, shift: float) -> Tensor:
    """One large eigenvalue, whose vector is constant: samples are squares of normal numbers."""
    return size / n * torch.ones(n, n, dtype=torch.float64) + shift * torch.eye(n).double()


def signs(eigenvalues: Any) -> Tensor:
    """A matrix whose eigenvectors have entries of one size, as random signs do."""
    basis = torch.from_numpy(hadamard(len(eigenvalues)).astype(float))
    return (basis * torch.as_tensor(np.asarray(eigenvalues)) / len(eigenvalues)) @ basis.T


@dataclass(frozen=True)
class Matrix:
    """A named matrix, graph or network; whether it is positive definite, and whether it is easy."""

    build: Callable[[], Any]
    positive: bool = True
    easy: bool = False


MATRICES = {
    "two rows": Matrix(lambda: torch.diag(torch.tensor([1.0, 2.0]).double()), easy=True),
    "three rows": Matrix(lambda: rotated([1.0, 2.0, 4.0]), easy=True),
    "seven rows": Matrix(lambda: rotated(np.linspace(0.5, 3, 7)), easy=True),
    "identity": Matrix(lambda: 3 * torch.eye(50, dtype=torch.float64), easy=True),
    "diagonal": Matrix(lambda: torch.diag(torch.linspace(1, 5, 100).double()), easy=True),
    "uniform": Matrix(lambda: rotated(np.linspace(1, 2, 300)), easy=True),
    "condition 30": Matrix(lambda: rotated(np.geomspace(0.1, 3, 200)), easy=True),
    "clusters": Matrix(lambda: rotated(np.repeat([1.0, 2.0, 5.0], [150, 100, 50])), easy=True),
    "repeated": Matrix(lambda: rotated(np.repeat([0.5, 1.0, 1.5, 4.0, 8.0], 40)), easy=True),
    "Wishart": Matrix(lambda: wishart(400, 1200), easy=True),
    "Wishart, 1000 rows": Matrix(lambda: wishart(1000, 4000), easy=True),
    "Poisson, shifted": Matrix(lambda: poisson(14, 0.5), easy=True),
    "condition 1e4": Matrix(lambda: rotated(np.geomspace(1e-3, 10, 300))),
    "condition 1e8": Matrix(lambda: rotated(np.geomspace(1e-6, 1e2, 500))),
    "Poisson": Matrix(lambda: poisson(20, 0.0)),
    "rank 6 plus noise": Matrix(lambda: _low_rank(300, 6, 1e-3)),
    "one outlier": Matrix(lambda: rotated(np.r_[np.linspace(0.9, 1.1, 299), 500.0])),
    "powers": Matrix(lambda: rotated(1.0 / np.arange(1, 401) ** 2 + 1e-6)),
    "exponential": Matrix(lambda: rotated(0.8 ** np.arange(200) + 1e-8)),
    "kernel, noise 1e-2": Matrix(lambda: kernel(300, 1e-2)),
    "kernel, noise 1e-9": Matrix(lambda: kernel(200, 1e-9)),
    "Hilbert": Matrix(lambda: torch.from_numpy(hilbert(6)).double()),
    "one entry off the diagonal": Matrix(lambda: pairs(60, 20.0), positive=False),
    "rank 10": Matrix(lambda: _low_rank(200, 10, 0.0), positive=False),
    "Laplacian": Matrix(lambda: laplacian(300, 8, normalized=False), positive=False),
    "normalized Laplacian": Matrix(lambda: laplacian(300, 6, normalized=True), positive=False),
    "Wigner": Matrix(lambda: wigner(400), positive=False, easy=True),
    "spiked Wigner": Matrix(lambda: wigner(300, 10.0, -6.0), positive=False),
    "indefinite": Matrix(lambda: rotated(np.linspace(-1, 3, 150)), positive=False, easy=True),
    "seventeen rows": Matrix(lambda: rotated(np.r_[100.0, np.ones(16)])),
    "block of three ones": Matrix(lambda: ones(64, 3)),
    "block of four ones": Matrix(lambda: ones(64, 4)),
    "arrow": Matrix(lambda: arrow(300, 1e4, 5.0)),
    "log-normal": Matrix(lambda: rotated(np.exp(2 * _draws(300)))),
    "clusters 1e-6 apart": Matrix(lambda: rotated(np.repeat([1.0, 1.0 + 1e-6], [40, 60]))),
    "one entry of 1e6": Matrix(lambda: torch.diag(torch.tensor([1e6] + [1.5] * 199).double())),
    "Hadamard": Matrix(lambda: signs(np.r_[100.0, 50.0, 20.0, np.full(253, 0.1)])),
    "star": Matrix(lambda: star(100), positive=False),
    "path": Matrix(lambda: graph_laplacian(nx.path_graph(150)), positive=False),
    "bipartite, shifted": Matrix(
        lambda: graph_laplacian(nx.complete_bipartite_graph(5, 60)) + torch.eye(65).double() / 20
    ),
    "constant vector": Matrix(lambda: constant(60, 1e3, 1e-6)),
    "block of five": Matrix(lambda: torch.block_diag(rotated(3.0 ** np.arange(5)), ones(495, 0))),
}


def _draws(n: int) -> Any:
    return np.random.default_rng(0).standard_normal(n)


def _low_rank(n: int, rank: int, shift: float) -> Tensor:
    draws = torch.randn(n, rank, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return draws @ draws.T + shift * torch.eye(n, dtype=torch.float64)


KERNEL_SETTINGS = [
    (rows, length, noise, kernel)
    for rows, kernel in ((40, "squared_exponential"), (80, "matern32"))
    for length in (0.05, 0.2, 0.5, 2.0)
    for noise in (1e-1, 1e-3, 1e-5)
]


def kernel_operator(rows: int, length: float, noise: float, kind: Any) -> KernelOperator:
    """A kernel matrix with three parameters."""
    points = torch.rand(rows, 2, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    parameters = [
        torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in (length, 1, noise)
    ]
    length_scale, scale, variance = parameters
    return KernelOperator(
        points, kernel=kind, lengthscale=length_scale, outputscale=scale, noise=variance
    )


KERNELS = {
    f"{kind}, {rows} rows, length {length:g}, noise {noise:g}": Matrix(
        partial(kernel_operator, rows, length, noise, kind), easy=noise > 1e-2
    )
    for rows, length, noise, kind in KERNEL_SETTINGS
}


def edges(kind: str, n: int, parameter: float) -> Any:
    """A graph as a scipy matrix."""
    names = {"random": "fast_gnp_random_graph", "preferential": "barabasi_albert_graph"}
    if kind in names:
        made = getattr(nx, names[kind])(n, parameter, seed=7)
    elif kind == "small world":
        made = nx.watts_strogatz_graph(n, 4, parameter, seed=7)
    elif kind == "blocks":
        made = nx.planted_partition_graph(4, n // 4, 0.3, parameter, seed=7)
    else:
        made = getattr(nx, f"{kind}_graph")(n)
    made.remove_nodes_from(list(nx.isolates(made)))
    return nx.to_scipy_sparse_array(made, dtype=float)


GRAPH_SETTINGS = [
    *(("random", n, p) for n, p in ((60, 0.1), (100, 0.05), (200, 0.02), (300, 0.05), (150, 0.5))),
    *(("preferential", n, m) for n, m in ((60, 1), (100, 2), (200, 3), (300, 5))),
    *(("small world", n, p) for n, p in ((60, 0.0), (100, 0.1), (200, 0.3), (300, 1.0))),
    *(("blocks", n, p) for n, p in ((60, 0.02), (120, 0.05), (200, 0.1))),
    *((kind, n, 0.0) for kind, n in (("cycle", 90), ("path", 70), ("star", 80), ("complete", 50))),
    ("circular_ladder", 60, 0.0),
]
GRAPHS = {
    f"{kind}, {n} vertices, {parameter:g}": Matrix(partial(edges, kind, n, parameter), easy=True)
    for kind, n, parameter in GRAPH_SETTINGS
}


def network(inputs: int, hidden: int, classes: int, activation: Any, scale: float) -> Risk:
    """A small network, its weights and 12 samples."""
    generator = torch.Generator().manual_seed(8)
    model = nn.Sequential(nn.Linear(inputs, hidden), activation(), nn.Linear(hidden, classes))
    model = model.double()
    with torch.no_grad():
        for part in model.parameters():
            part.copy_(scale * torch.randn(part.shape, generator=generator, dtype=torch.float64))
    x = torch.randn(12, inputs, generator=generator, dtype=torch.float64)
    y = torch.randint(classes, (12,), generator=generator)
    return Risk(model, functional.cross_entropy, (x, y), batch_size=12)


NETWORKS = {
    f"{inputs}-{hidden}-{classes} {activation.__name__}, weights {scale:g}": Matrix(
        partial(network, inputs, hidden, classes, activation, scale), easy=True
    )
    for inputs, hidden, classes in ((2, 3, 2), (3, 4, 3), (4, 2, 2), (1, 6, 2), (5, 3, 4))
    for activation, scale in ((nn.Tanh, 0.3), (nn.Tanh, 2.0), (nn.Softplus, 0.5), (nn.ReLU, 1.0))
}


def trained(kind: str, num_steps: int) -> Risk:
    """A float32 network near a minimum, where the gradients of 24 samples cancel."""
    generator = torch.Generator().manual_seed(9)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3))
    x, y = torch.randn(24, 3, generator=generator), torch.randint(3, (24,), generator=generator)
    if kind == "one outlier sample":
        x[0] *= 30
    elif kind == "one label of each rare class":
        y = torch.tensor([1, 2] + [0] * 22)
    elif kind == "samples four times":
        x, y = x[:6].repeat(4, 1), y[:6].repeat(4)
    elif kind == "two samples":
        x, y = x[:2], y[:2]
    with torch.no_grad():
        for part in model.parameters():
            part.copy_(torch.randn(part.shape, generator=generator))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    for _ in range(num_steps):
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return Risk(model, functional.cross_entropy, (x, y), batch_size=len(x))


TRAINED = {
    f"{kind}, {num_steps} steps": Matrix(partial(trained, kind, num_steps), easy=True)
    for kind, num_steps in (
        ("random labels", 0),
        ("random labels", 100),
        ("one outlier sample", 0),
        ("one outlier sample", 100),
        ("one label of each rare class", 0),
        ("one label of each rare class", 100),
        ("samples four times", 0),
        ("samples four times", 30),
        ("two samples", 0),
    )
}

# Inputs of estimators that take no matrix, by name.
TABLES = {
    "matrices": MATRICES,
    "kernels": KERNELS,
    "graphs": GRAPHS,
    "networks": NETWORKS,
    "trained": TRAINED,
}


@cache
def built(name: str, kind: str = "matrices") -> tuple[Any, Tensor]:
    """A matrix and its eigenvalues; for other kinds the input alone."""
    matrix = TABLES[kind][name].build()
    if kind != "matrices":
        return matrix, torch.empty(0)
    # Roundoff in eigenvalues may exceed that of the estimate. Rayleigh quotients in extended
    # precision have the square of the error of their vectors.
    vectors = torch.linalg.eigh(matrix).eigenvectors.numpy().astype(np.longdouble)
    quotients = (vectors * (matrix.numpy() @ vectors)).sum(0) / (vectors * vectors).sum(0)
    return matrix, torch.from_numpy(quotients.astype(float)).sort().values


def products_only(matrix: Tensor) -> ritz.operators.FunctionOperator:
    """The matrix behind its products: no structure to take an exact answer from."""
    op = ritz.operators.FunctionOperator(
        lambda block: matrix @ block, n=len(matrix), dtype=matrix.dtype
    )
    op.block_size = 32  # fewer and larger products take less time
    return op
