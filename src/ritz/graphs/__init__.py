"""Graphs: reading, random models, and what their spectra say."""

from ritz.graphs.clustered import cluster_graph, cluster_sizes
from ritz.graphs.clusters import count_clusters
from ritz.graphs.comparing import Similarity, similarity
from ritz.graphs.converting import as_graph, to_undirected
from ritz.graphs.counting import ClusterCount
from ritz.graphs.entropic import density, entropy, moments, spectrum
from ritz.graphs.fitting import Fit, fit
from ritz.graphs.heat import heat_trace
from ritz.graphs.matrices import eigenvalues, laplacian
from ritz.graphs.models import (
    barabasi_albert,
    configuration_model,
    erdos_renyi,
    stochastic_block_model,
    watts_strogatz,
)
from ritz.graphs.partitioning import spectral_clusters
from ritz.graphs.reading import read
from ritz.graphs.searching import ModelFit
from ritz.graphs.structures import Graph, GraphError, Intake

__all__ = [
    "ClusterCount",
    "Fit",
    "Graph",
    "GraphError",
    "Intake",
    "ModelFit",
    "Similarity",
    "as_graph",
    "barabasi_albert",
    "cluster_graph",
    "cluster_sizes",
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
    "spectrum",
    "stochastic_block_model",
    "to_undirected",
    "watts_strogatz",
]
