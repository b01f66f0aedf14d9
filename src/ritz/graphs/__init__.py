"""Graphs: reading, random models, and what their spectra say."""

from ritz.graphs.clustered import cluster_graph, cluster_sizes
from ritz.graphs.converting import as_graph, to_undirected
from ritz.graphs.models import (
    barabasi_albert,
    configuration_model,
    erdos_renyi,
    stochastic_block_model,
    watts_strogatz,
)
from ritz.graphs.reading import read
from ritz.graphs.structures import Graph, GraphError, Intake

__all__ = [
    "Graph",
    "GraphError",
    "Intake",
    "as_graph",
    "barabasi_albert",
    "cluster_graph",
    "cluster_sizes",
    "configuration_model",
    "erdos_renyi",
    "read",
    "stochastic_block_model",
    "to_undirected",
    "watts_strogatz",
]
