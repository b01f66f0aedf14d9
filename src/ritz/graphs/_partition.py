"""Spectral clustering: the vertices of a graph, by the eigenvectors left of its gap."""

from typing import final

import scipy.linalg
import torch
from torch import Tensor

from ritz._core.checks import check_count
from ritz._core.progress import Progress
from ritz._core.random import resolve_generator
from ritz.graphs._gaps import NullSpace
from ritz.graphs._graph import Graph
from ritz.graphs._io import GraphLike
from ritz.graphs._matrices import laplacian, with_edges
from ritz.operators import LinearOperator
from ritz.spectra import eigenpairs

TOP = 2.0  # largest possible eigenvalue
RTOL = 1e-4  # of residuals: what lies within the band of the clusters need not be told apart
EQUAL = 1e-6  # eigenvalues this near may be one that is repeated


def spectral_clusters(
    graph: GraphLike,
    num_clusters: int,
    *,
    max_steps: int | None = None,
    generator: torch.Generator | None = None,
    progress: bool | Progress = False,
) -> Tensor:
    r"""Return the cluster of each vertex, ``(n,)``, numbers from 0.

    Rows of the eigenvectors of the ``k`` smallest eigenvalues of the normalised Laplacian, brought
    to length one, are sorted into ``k`` groups by k-means, from ``k`` rows that are as independent
    as any (by QR with pivots), so that no restarts are needed. The eigenvectors of the eigenvalue
    0 are those of the components and need not be computed; the others are by Lanczos, run again
    until no further one is as small. An isolated vertex is a cluster of its own. Clusters are
    numbered in the order of their first vertices. Memory: ``4 k`` vectors.

    Args:
        graph: Whatever :func:`ritz.graphs.as_graph` takes, with an edge at least.
        num_clusters: ``k``, such as :func:`ritz.graphs.count_clusters` gives; at least the number
            of components.
        max_steps: Most products of a Lanczos run.
        generator: Source of the start vectors.
        progress: Show a progress bar, or a :class:`Progress` to report to.

    Raises:
        ValueError: Fewer clusters than components, or more than vertices.
        ritz.NotConvergedError: Lanczos did not find the eigenvectors in ``max_steps``.

    Reference: Ng, Jordan and Weiss (2001); Damle, Minden and Ying (2019). Needs scikit-learn.

    Example:
        >>> from ritz import graphs
        >>> blocks = graphs.cluster_graph([30] * 3, degree=12, num_links=6)
        >>> graphs.spectral_clusters(blocks, 3).bincount()
        tensor([30, 30, 30])
    """
    graph = with_edges(graph)
    generator = resolve_generator(generator)
    null = NullSpace.of(graph, torch.float64)
    check_count("num_clusters", num_clusters, high=graph.num_nodes)
    if num_clusters < null.dimension:
        raise ValueError(
            f"num_clusters must be at least the number of components, {null.dimension}, got "
            f"{num_clusters}: graph.largest_component() leaves one"
        )
    if num_clusters == null.dimension:
        return _renumbered(null.labels)
    vectors = _eigenvectors(
        graph, null, num_clusters - null.dimension, max_steps, generator, progress
    )
    return _renumbered(_grouped(graph, null, vectors, num_clusters))


def _eigenvectors(
    graph: Graph,
    null: NullSpace,
    count: int,
    max_steps: int | None,
    generator: torch.Generator,
    progress: bool | Progress,
) -> Tensor:
    """Those of the smallest eigenvalues above those of the null space, ``(n, count)``."""
    op = laplacian(graph)
    values = torch.empty(0, dtype=torch.float64)
    vectors = torch.empty(graph.num_nodes, 0, dtype=torch.float64)
    wanted = count
    while True:
        pairs = eigenpairs(
            LiftedOperator(op, null, vectors),
            smallest=wanted,
            max_steps=max_steps,
            rtol=RTOL,
            generator=generator,
            progress=progress,
        )
        pairs.raise_if_failed()
        full = len(values) == count
        if full and float(pairs.values[0]) > float(values[-1]) - EQUAL:
            return vectors
        if pairs.vectors is None:
            raise RuntimeError("Lanczos returned no vectors")
        # A run finds a repeated eigenvalue once: the next one is without what was found.
        values, order = torch.cat([values, pairs.values]).sort()
        vectors = torch.cat([vectors, pairs.vectors], dim=1)[:, order[:count]]
        values, wanted = values[:count], 1


@final
class LiftedOperator(LinearOperator):
    r"""A Laplacian whose null space, and some eigenvectors, have the eigenvalue 2 or more.

    .. math:: L + 2 P_0 + 2 Q Q^\top
    """

    def __init__(self, op: LinearOperator, null: NullSpace, vectors: Tensor) -> None:
        super().__init__(op.shape[0], dtype=op.dtype, device=op.device, block_size=op.block_size)
        self.op, self.null, self.vectors = op, null, vectors

    def _matmat(self, block: Tensor) -> Tensor:
        rest = self.null.project_off(block.clone())
        product = self.op.matmat(block) + TOP * (block - rest)
        return product + TOP * (self.vectors @ (self.vectors.T @ block))


def _grouped(graph: Graph, null: NullSpace, vectors: Tensor, count: int) -> Tensor:
    from sklearn.cluster import KMeans

    joined = graph.crow.diff() > 0
    num_alone = int((~joined).sum())
    labels = torch.empty(graph.num_nodes, dtype=torch.int64)
    labels[~joined] = torch.arange(num_alone)
    components, place = null.labels[joined].unique(return_inverse=True)
    rows = torch.zeros(len(place), len(components), dtype=torch.float64)
    rows[torch.arange(len(place)), place] = null.entries[joined]
    rows = torch.cat([rows, vectors[joined]], dim=1)
    rows /= rows.norm(dim=1, keepdim=True)
    wanted = count - num_alone
    _, pivots = scipy.linalg.qr(rows.T.numpy(), mode="r", pivoting=True)
    means = KMeans(wanted, init=rows.numpy()[pivots[:wanted]], n_init=1)
    labels[joined] = num_alone + torch.from_numpy(means.fit_predict(rows.numpy())).long()
    return labels


def _renumbered(labels: Tensor) -> Tensor:
    """Labels in the order of their first appearance."""
    found, place = labels.unique(return_inverse=True)
    first = torch.full((len(found),), len(labels)).scatter_reduce(
        0, place, torch.arange(len(labels)), "amin"
    )
    rank = torch.empty_like(first)
    rank[first.argsort()] = torch.arange(len(found))
    return rank[place]
