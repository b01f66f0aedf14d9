"""Graphs from files and other libraries, random graphs, and quantities of their spectra."""

from ritz.graphs._clusters import ClusterCount, count_clusters
from ritz.graphs._density import density, entropy, heat_trace, moments
from ritz.graphs._fit import Fit, fit
from ritz.graphs._graph import Graph, GraphError
from ritz.graphs._io import GraphLike, as_graph, read, to_undirected
from ritz.graphs._matrices import eigenvalues, laplacian
from ritz.graphs._random import (
    barabasi_albert,
    cluster_graph,
    configuration_model,
    erdos_renyi,
    stochastic_block_model,
    watts_strogatz,
)
from ritz.graphs._similarity import Similarity, similarity
from ritz.graphs._spectral_clusters import spectral_clusters

__all__ = [
    "ClusterCount",
    "Fit",
    "Graph",
    "GraphError",
    "GraphLike",
    "Similarity",
    "as_graph",
    "barabasi_albert",
    "cluster_graph",
    "configuration_model",
    "count_clusters",
    "density",
    "eigenvalues",
    "entropy",
    "erdos_renyi",
    "fit",
    "heat_trace",
    "laplacian",
    "moments",
    "read",
    "similarity",
    "spectral_clusters",
    "stochastic_block_model",
    "to_undirected",
    "watts_strogatz",
]
