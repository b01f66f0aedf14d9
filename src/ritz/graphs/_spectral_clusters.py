"""``spectral_clusters``: clusters of the vertices of a graph, by its first eigenvectors."""

import numpy as np
import scipy.linalg
import torch
from torch import Tensor

from ritz._core.checks import check_count
from ritz._core.progress import Progress
from ritz._core.random import resolve_generator
from ritz.graphs._count_below import NullSpace
from ritz.graphs._gaps import TOP
from ritz.graphs._graph import Graph
from ritz.graphs._io import GraphLike
from ritz.graphs._matrices import laplacian, with_edges
from ritz.operators import FunctionOperator
from ritz.spectra import eigenpairs

# Relative residual. It may be large, because only the span of the eigenvectors matters.
_RTOL = 1e-4


def spectral_clusters(
    graph: GraphLike,
    num_clusters: int,
    *,
    max_steps: int | None = None,
    generator: torch.Generator | None = None,
    progress: bool | Progress = False,
) -> Tensor:
    r"""Return the cluster of each vertex, ``(n,)``, numbered in the order of first appearance.

    The eigenvectors of the ``k`` smallest eigenvalues of the normalised Laplacian have one row per
    vertex. The rows are scaled to length one and sorted into ``k`` groups by k-means. K-means
    starts from ``k`` nearly orthogonal rows (QR with pivoting), so no restarts are needed. The
    eigenvectors of the eigenvalue 0 are known from the components, and Lanczos computes the others.
    An isolated vertex is a cluster. Memory: ``3 k`` vectors.

    Args:
        graph: Anything :func:`ritz.graphs.as_graph` accepts, with at least one edge.
        num_clusters: Number ``k`` of clusters, at least the number of components.
            :func:`ritz.graphs.count_clusters` estimates it.
        max_steps: Maximum number of products. Defaults to that of :func:`ritz.eigenpairs`.
        generator: Source of the start vectors. Defaults to a new generator with seed 0.
        progress: ``True`` shows a progress bar; a :class:`Progress` object receives the progress.

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
    num_clusters = check_count("num_clusters", num_clusters, high=graph.num_nodes)
    if num_clusters < null.dimension:
        raise ValueError(
            f"num_clusters must be at least the number of components, {null.dimension}, got "
            f"{num_clusters}: use graph.largest_component() for a connected graph"
        )
    if num_clusters == null.dimension:
        return _renumbered(null.labels)
    op = laplacian(graph)

    def lifted(block: Tensor) -> Tensor:
        # L + 2 P_0 with the projector P_0 on the null space, whose eigenvalue becomes 2
        return op.matmat(block) + TOP * (block - null.project_off(block.clone()))

    pairs = eigenpairs(
        FunctionOperator(lifted, n=op.shape[0], dtype=op.dtype),
        smallest=num_clusters - null.dimension,
        max_steps=max_steps,
        rtol=_RTOL,
        generator=generator,
        progress=progress,
    )
    pairs.raise_if_failed()
    if pairs.vectors is None:
        raise RuntimeError("Lanczos returned no vectors")
    return _renumbered(_groups(graph, null, pairs.vectors, num_clusters))


def _groups(graph: Graph, null: NullSpace, vectors: Tensor, count: int) -> Tensor:
    from sklearn.cluster import KMeans

    joined = graph.crow.diff() > 0
    num_isolated = graph.num_isolated
    labels = torch.empty(graph.num_nodes, dtype=torch.int64)
    labels[~joined] = torch.arange(num_isolated)
    components, place = null.labels[joined].unique(return_inverse=True)
    rows = torch.zeros(len(place), len(components), dtype=torch.float64)
    rows[torch.arange(len(place)), place] = null.entries[joined]
    rows = torch.cat([rows, vectors[joined]], dim=1)
    # Without links between clusters, rows of one cluster are equal, and rows of different clusters
    # are orthogonal.
    rows /= rows.norm(dim=1, keepdim=True)
    wanted = count - num_isolated
    _, pivots = scipy.linalg.qr(rows.T.numpy(), mode="r", pivoting=True)
    means = KMeans(wanted, init=rows.numpy()[pivots[:wanted]], n_init=1)
    labels[joined] = num_isolated + torch.from_numpy(means.fit_predict(rows.numpy())).long()
    return labels


def _renumbered(labels: Tensor) -> Tensor:
    """Return labels numbered in the order of first appearance."""
    _, first, place = np.unique(labels.numpy(), return_index=True, return_inverse=True)
    return torch.from_numpy(first.argsort().argsort()[place])
