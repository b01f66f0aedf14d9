"""Memory of reading: a small multiple of the graph, whatever the size of the file."""

import subprocess
import sys

import numpy as np
import pytest

# The size of the process before and at its largest, and that of the graph.
MEASURE = """
import resource, sys
import ritz.graphs as graphs
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
graphs.read(sys.argv[2])
before = peak()
graph = graphs.read(sys.argv[1])
parts = [graph.crow, graph.col] + ([] if graph.weights is None else [graph.weights])
print((peak() - before) / sum(part.numel() * part.element_size() for part in parts))
"""


def write(path, num_edges, *, weighted):
    generator = np.random.default_rng(8)
    with path.open("w") as file:
        for _ in range(0, num_edges, 100_000):
            rows = generator.integers(0, num_edges // 10, (100_000, 2)).tolist()
            weight = "\t1.25" if weighted else ""
            file.write("".join(f"{u}\t{v}{weight}\n" for u, v in rows))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="sizes of processes are counted otherwise")
@pytest.mark.parametrize("weighted", [False, True])
def test_memory_is_bounded_by_the_graph(tmp_path, weighted):
    write(tmp_path / "small.txt", 100_000, weighted=weighted)
    write(tmp_path / "large.txt", 8_000_000, weighted=weighted)
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, tmp_path / "large.txt", tmp_path / "small.txt"],
        capture_output=True,
        text=True,
        check=True,
    )
    # Measured: 3.2 without weights, 2.3 with.
    assert float(done.stdout) < 3.5
