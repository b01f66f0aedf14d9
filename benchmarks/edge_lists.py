"""Reading an edge list: ritz beside pandas and pyarrow, in chunks, time and peak memory.

A file of random edges between a million vertices is written to a temporary folder. Every reader
runs in its own process, ``rounds`` times in turn. ``parse s`` is the time until all pairs are in
arrays. ``graph s`` adds the assembly into compressed rows, which is the same code for all readers.
``CPU s`` is the processor time of both, over all threads; it is what to compare on a busy machine.
``MB`` is the rise of the high-water mark of memory. pandas splits at runs of spaces and skips
comments as ritz does; pyarrow splits at one character, has no comments, and uses all cores.

The results hold readers that ritz had before. ``own parser`` is vectorised NumPy arithmetic on the
digits. It beat neither library by 1.5 in CPU time or in memory. ``numpy.loadtxt`` took 30 % more,
and 15 times as long if one line in a hundred is invalid. Now ``numpy.fromstring`` parses blocks of
whole numbers and decimals, and ``numpy.loadtxt`` all others: 1.04 of the CPU time of the own parser
without weights, 1.0 with, and 1.6 with one invalid line in a hundred (parsing of 3 million edges,
best of five).
"""

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from memory import kilobytes
from timing import RESULTS, median, write

ROWS = 2**18  # per chunk of pandas
BYTES = 2**22  # per block of pyarrow
NUM_NODES = 1_000_000
READERS = ("ritz", "pandas", "pyarrow")
MEASURED = ("parse s", "graph s", "CPU s", "MB")


def write_file(path, num_edges, *, weighted):
    """Write lines ``u v`` or ``u v weight``, a million at a time."""
    from pyarrow import csv, table

    generator = np.random.default_rng(0)
    options = csv.WriteOptions(include_header=False, delimiter=" ", quoting_style="none")
    with path.open("wb") as file:
        for start in range(0, num_edges, 2**20):
            size = min(2**20, num_edges - start)
            ends = generator.integers(0, NUM_NODES, (2, size))
            columns = {"u": ends[0], "v": ends[1]}
            if weighted:
                columns["w"] = generator.random(size).round(6)
            csv.write_csv(table(columns), file, options)


def pandas_chunks(path, weighted):
    """Yield arrays of both ends and of the weights."""
    import pandas

    names = ["u", "v", "w"][: 3 if weighted else 2]
    dtypes = dict.fromkeys("uv", np.int64) | ({"w": np.float64} if weighted else {})
    options = {"sep": r"\s+", "comment": "#", "header": None, "names": names, "dtype": dtypes}
    for frame in pandas.read_csv(path, chunksize=ROWS, **options):
        yield [frame[name].to_numpy() for name in names]


def pyarrow_chunks(path, weighted):
    """Yield arrays of both ends and of the weights."""
    import pyarrow
    from pyarrow import csv

    names = ["u", "v", "w"][: 3 if weighted else 2]
    types = {"u": pyarrow.int64(), "v": pyarrow.int64(), "w": pyarrow.float64()}
    reader = csv.open_csv(
        path,
        read_options=csv.ReadOptions(column_names=names, block_size=BYTES),
        parse_options=csv.ParseOptions(delimiter=" "),
        convert_options=csv.ConvertOptions(column_types={name: types[name] for name in names}),
    )
    for batch in reader:
        yield [column.to_numpy(zero_copy_only=False) for column in batch.columns]


def measure(who, path, weighted):
    """Return seconds to parse, seconds to the graph, and megabytes, in this process."""
    from ritz import graphs
    from ritz.graphs._io import Records, Rules, assemble
    from ritz.graphs._io.lines import open_source, read_edge_list

    for name in ("pandas", "pyarrow.csv"):  # the import is not part of the measurement
        if name.startswith(who):
            importlib.import_module(name)
    before = kilobytes("VmRSS")
    begin, begin_cpu = time.perf_counter(), time.process_time()
    if who == "ritz":
        with open_source(path, progress=False) as source:
            records = read_edge_list(source, weights=None, num_nodes=None, strict=True)
    else:
        records = Records(source=path.name, kind="list")
        for columns in globals()[f"{who}_chunks"](path, weighted):
            records.add(*columns)
    parsed = time.perf_counter() - begin
    graph = assemble(records, Rules())
    seconds = time.perf_counter() - begin
    assert isinstance(graph, graphs.Graph)
    return {
        "parse s": parsed,
        "graph s": seconds,
        "CPU s": time.process_time() - begin_cpu,
        "MB": (kilobytes("VmHWM") - before) / 1000,
        "edges": graph.num_edges,
    }


def alone(who, path, weighted):
    """Measure in another process."""
    command = [sys.executable, __file__, "--who", who, "--path", str(path)]
    command += ["--weighted"] if weighted else []
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def rows_of(num_edges, rounds, readers, folder, *, weighted):
    """Return a row per reader for one file, which is deleted afterwards."""
    path = Path(folder) / "edges.txt"
    write_file(path, num_edges, weighted=weighted)
    runs = {who: [] for who in readers}
    for _ in range(rounds):
        for who in readers:
            runs[who].append(alone(who, path, weighted))
    path.unlink()
    medians = {
        who: {key: median([run[key] for run in some]) for key in MEASURED}
        for who, some in runs.items()
    }
    for who, row in medians.items():
        yield {"weights": weighted, "who": who, "edges": num_edges} | row


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--edges", type=int, default=50_000_000)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--who", choices=READERS, help="measure one reader in this process")
    parser.add_argument("--readers", nargs="+", choices=READERS, default=READERS)
    parser.add_argument("--path", type=Path)
    parser.add_argument("--weighted", action="store_true")
    arguments = parser.parse_args()
    if arguments.who:
        print(json.dumps(measure(arguments.who, arguments.path, arguments.weighted)))
        return
    with tempfile.TemporaryDirectory() as folder:
        results = [
            row
            for weighted in (False, True)
            for row in rows_of(
                arguments.edges, arguments.rounds, arguments.readers, folder, weighted=weighted
            )
        ]
    # Rows of other sizes and of earlier readers stay.
    path = RESULTS / "edge_lists.json"
    before = json.loads(path.read_text())["results"] if path.exists() else []
    keys = ("weights", "who", "edges")
    new = {tuple(row[key] for key in keys) for row in results}
    write(__file__, [row for row in before if tuple(row[key] for key in keys) not in new] + results)


if __name__ == "__main__":
    main()
