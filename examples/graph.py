"""Graphs: the density of eigenvalues, a comparison of graphs, and the number of clusters.

Usage: python examples/graph.py [--quick] [--out FOLDER]

The graphs are a ring with random shortcuts (Watts-Strogatz), a random graph with the same number of
edges (Erdos-Renyi), and a graph with seven planted clusters. ``ritz.graphs.read`` reads your own
from an edge list, Matrix Market, GML, GraphML or METIS file; NetworkX graphs and SciPy matrices can
be passed as they are. Takes about half a minute on one core.
"""

import argparse
from pathlib import Path

import torch

import ritz
from ritz import graphs


def main(quick: bool, out: Path) -> None:
    size, num_probes = (300, 20) if quick else (3000, 100)
    generator = torch.Generator().manual_seed(0)
    ring = graphs.watts_strogatz(size, num_neighbors=8, p=0.05, generator=generator)
    random = graphs.erdos_renyi(size, p=8 / (size - 1), generator=generator)
    between, within = torch.full((7, 7), 0.005), torch.eye(7)
    planted = graphs.stochastic_block_model(
        [size // 7] * 7, probabilities=torch.maximum(between, 0.5 * within), generator=generator
    )

    # The density of the eigenvalues of the normalised Laplacian, which lie in [0, 2].
    density = graphs.density(ring)
    print(f"share of the eigenvalues below 0.5: {density.mass(0.0, 0.5):.4f}")

    # Distances between the spectra. Two samples of the same model are close to each other.
    again = graphs.watts_strogatz(size, num_neighbors=8, p=0.05, generator=generator)
    similarity = graphs.similarity(
        {"ring": ring, "another ring": again, "random": random}, num_probes=num_probes
    )
    print(similarity)

    # Clusters: eigenvalues below the first gap of the spectrum.
    count = graphs.count_clusters(planted, num_probes=num_probes)
    print(count)
    labels = graphs.spectral_clusters(planted, count.count or 1)
    print("sizes of the clusters:", torch.bincount(labels).tolist())

    out.mkdir(parents=True, exist_ok=True)
    ritz.save(similarity, out / "similarity.safetensors")
    ritz.plots.density(density).figure.savefig(out / "density.png", dpi=150)
    ritz.plots.similarity(similarity).figure.savefig(out / "similarity.png", dpi=150)
    print("written:", *sorted(map(str, out.iterdir())))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small graphs, a few seconds")
    parser.add_argument("--out", type=Path, default=Path("out/graph"))
    arguments = parser.parse_args()
    main(arguments.quick, arguments.out)
