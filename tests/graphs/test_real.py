"""Counts of vertices and edges of published graphs, if ``RITZ_DATA`` names a folder with them."""

import os
from pathlib import Path

import pytest

from ritz.graphs import read

pytestmark = pytest.mark.slow

# Vertices, records (directed edges, or undirected ones), edges between two vertices, and vertices
# of the largest component.
PUBLISHED = {
    "email-Eu-core.txt.gz": (1005, 25571, 16064, 986),
    "ca-GrQc.txt.gz": (5242, 28980, 14484, 4158),
    "ca-HepTh.txt.gz": (9877, 51971, 25973, 8638),
    "ca-HepPh.txt.gz": (12008, 237010, 118489, 11204),
    "ca-AstroPh.txt.gz": (18772, 198110, 198050, 17903),
    "ca-CondMat.txt.gz": (23133, 186936, 93439, 21363),
    "facebook_combined.txt.gz": (4039, 88234, 88234, 4039),
    "wiki-Vote.txt.gz": (7115, 103689, 100762, 7066),
    "soc-Epinions1.txt.gz": (75879, 508837, 405740, 75877),
    "web-NotreDame.txt.gz": (325729, 1497134, 1090108, 325729),
    "netscience.mtx": (1589, 2742, 2742, 379),
    "road-minnesota.mtx": (2642, 3303, 3303, 2640),
    "road-luxembourg-osm.mtx.gz": (114599, 119666, 119666, 114599),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_counts_of_real_graphs_agree_with_published_ones(name):
    path = Path(os.environ.get("RITZ_DATA", ".")) / "graphs" / name
    if not path.is_file():
        pytest.skip(f"needs {name} in the folder graphs of RITZ_DATA")
    graph = read(path)
    found = (graph.num_nodes, graph.intake.num_records, graph.num_edges)
    assert (*found, graph.largest_component().num_nodes) == PUBLISHED[name]
