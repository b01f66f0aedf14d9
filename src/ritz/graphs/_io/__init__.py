"""Graphs from files and from the objects of other libraries."""

from ritz.graphs._io.assembly import Records, Rules, assemble
from ritz.graphs._io.convert import GraphLike, as_graph, to_undirected
from ritz.graphs._io.files import read

__all__ = ["GraphLike", "Records", "Rules", "as_graph", "assemble", "read", "to_undirected"]
