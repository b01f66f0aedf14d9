"""Graphs: reading, random models, and what their spectra say."""

from ritz.graphs.converting import as_graph, to_undirected
from ritz.graphs.reading import read
from ritz.graphs.structures import Graph, GraphError, Intake

__all__ = ["Graph", "GraphError", "Intake", "as_graph", "read", "to_undirected"]
