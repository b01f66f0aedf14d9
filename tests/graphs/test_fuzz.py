"""Random and damaged edge lists: valid edges are read, and only documented errors raised."""

import bz2
import gzip
import lzma
import math
import random
import re
import time
import tracemalloc

import pytest

from ritz.graphs import GraphError, read

SEPARATORS = [" ", "\t", ",", "  ", ", ", ";", " \t ", "\r", "\x0b"]
WORDS = [
    "x",
    "-1",
    "+3",
    "nan",
    "-inf",
    "1e3",
    "0.5",
    ".5",
    "5.",
    "1.2.3",
    "1_0",
    "0x10",
    "--2",
    "1e",
    "e5",
    "é",
    "\ufeff",
    "#",
    "%x",
    "9" * 18,
    "9" * 19,
    str(2**63 - 1),
    str(2**63),
    "9" * 40,
    "0" * 30 + "7",
    "-0.0",
    "1e-400",
    "1e400",
    "\u0663",
    "12345678",
    "123456789012345678",
    "0.12345678901234567890123456789012345",
    "/",
    ":",
    "1:2",
]


def fuzzed(rng):
    """Lines of two or three columns, some of them damaged."""
    columns = rng.choice([2, 2, 3])
    lines = []
    for _ in range(rng.randrange(1, 12)):
        words = [str(rng.randrange(10 ** rng.randrange(1, 12))) for _ in range(2)]
        if columns == 3:
            words.append(rng.choice([str(rng.randrange(9)), f"{rng.random() * 5:.3f}", "1e2"]))
        if rng.random() < 0.25:
            words[rng.randrange(len(words))] = rng.choice(WORDS)
        if rng.random() < 0.1:
            words = words[: rng.randrange(len(words) + 1)]
        if rng.random() < 0.1:
            words += [rng.choice(WORDS)]
        line = rng.choice(SEPARATORS).join(words)
        if rng.random() < 0.1:
            line = rng.choice(["#", "%", " ", "\t# "]) + line
        lines.append(line.encode())
    data = rng.choice([b"\n", b"\n", b"\r\n", b"\n\n"]).join(lines)
    if rng.random() < 0.2:
        place = rng.randrange(len(data) + 1)
        data = data[:place] + bytes([rng.randrange(1, 256)]) + data[place + rng.randrange(2) :]
    return data + rng.choice([b"", b"\n"])


def reference(data):
    """Edges and number of rejected lines, by a parser that reads line by line."""
    columns, edges, rejected, lines = None, [], 0, []
    for line in data.removeprefix(b"\xef\xbb\xbf").split(b"\n"):
        words = re.split(rb"[ \t\r\n\x0b\x0c,;]+", re.split(rb"[#%]", line)[0])
        lines += [[word for word in words if word]] if any(words) else []
    # Vertices have names if most lines contain one.
    named = 2 * sum(any(map(is_name, words[:2])) for words in lines) > len(lines)
    for words in lines:
        edge = None
        if columns in (None, len(words)) and len(words) in (2, 3):
            edge = plain_edge(words, named)
        if edge is None:
            rejected += 1
        else:
            columns = len(words)
            edges.append(edge)
    return edges, rejected


def is_name(word):
    try:
        float(word)
    except ValueError:
        return any(code > 127 or chr(code).isalpha() for code in word)
    return False


def plain_edge(words, named):
    if named:
        u, v = (word.decode("utf-8", "backslashreplace") for word in words[:2])
    elif not all(re.fullmatch(rb"\+?[0-9]+", word) for word in words[:2]):
        return None
    else:
        u, v = int(words[0]), int(words[1])
        if max(u, v) >= 2**63:
            return None
    if len(words) == 2:
        return u, v, 1.0
    if not re.fullmatch(rb"[0-9.eE+-]+", words[2]):
        return None
    try:
        weight = float(words[2])
    except ValueError:
        return None
    return (u, v, weight) if 0 <= weight < math.inf else None


def merged(edges):
    largest = {}
    for u, v, weight in edges:
        if u != v and weight > 0:
            pair = min(u, v), max(u, v)
            largest[pair] = max(weight, largest.get(pair, 0.0))
    return largest


def check(path, data):
    path.write_bytes(data)
    edges, rejected = reference(data)
    expected = merged(edges)
    if rejected:
        with pytest.raises(GraphError, match=r"line \d+|has no edge|is empty"):
            read(path, format="edges")
    try:
        graph = read(path, format="edges", errors="report")
    except GraphError:
        assert not expected
        return
    coo = graph.to_scipy().tocoo()
    names = range(graph.num_nodes) if graph.names is None else graph.names
    names = names if isinstance(names, tuple | range) else names.tolist()
    upper = {
        (min(names[i], names[j]), max(names[i], names[j])): w
        for i, j, w in zip(coo.row.tolist(), coo.col.tolist(), coo.data.tolist(), strict=True)
        if i < j
    }
    assert upper == expected
    assert set(names) == {end for u, v, _ in edges for end in (u, v)}
    intake = graph.intake
    assert intake.num_rejected == rejected
    assert intake.num_records == len(edges) + rejected
    lost = intake.num_self_loops + intake.num_zero_weights + intake.num_merged
    assert graph.num_edges + lost == len(edges)


# 10,000 files in all, a tenth of them in every run.
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 10))]


@pytest.mark.parametrize("seed", SEEDS)
def test_random_edge_lists_agree_with_a_plain_parser(tmp_path, seed):
    rng, count = random.Random(seed), 1_000
    kinds = {"accepted": 0, "rejected": 0}
    for _ in range(count):
        data = fuzzed(rng)
        edges, rejected = reference(data)
        kinds["accepted"] += len(edges)
        kinds["rejected"] += rejected
        check(tmp_path / "edges.txt", data)
    # The files contain both valid and invalid lines.
    assert kinds["accepted"] > count
    assert kinds["rejected"] > count / 2


FORMATS = ("edges", "mtx", "gml", "graphml", "metis")
SOUND = {
    "mtx": "%%MatrixMarket matrix coordinate real symmetric\n% c\n5 5 3\n2 1 1.5\n4 2 2\n5 4 1\n",
    "gml": 'graph [\n directed 0\n node [ id 1 label "a" ]\n node [ id 2 ]\n node [ id 3 ]\n'
    " edge [ source 1 target 2 value 2.5 ]\n edge [ source 2 target 3 ]\n]\n",
    "graphml": '<?xml version="1.0"?><graphml><key id="w" for="edge" attr.name="weight"/>'
    '<graph edgedefault="undirected"><node id="a"/><node id="b"/><node id="c"/>'
    '<edge source="a" target="b"><data key="w">2</data></edge>'
    '<edge source="b" target="c"/></graph></graphml>',
    "metis": "% c\n4 3 001\n2 5 3 1\n1 5\n1 1 4 2\n3 2\n",
}
SOUND["array"] = "%%MatrixMarket matrix array real general\n2 2\n0\n1.5\n1.5\n0\n"
SOUND["names"] = "# who whom\nann bob 2\nbob cy 1\ncy dora 1e-3\ndora ann 1\n"
SOUND["gzip"] = gzip.compress(b"0 1\n1 2 \n2 3\n" * 9, mtime=0)
SOUND["bzip2"] = bz2.compress(b"0 1\n1 2 \n2 3\n" * 9)
SOUND["xz"] = lzma.compress(b"0 1\n1 2 \n2 3\n" * 9)
PIECES = [
    b"",
    b"7",
    b"-",
    b" ",
    b"\n",
    b"]",
    b'"',
    b"<",
    b"\xff",
    b"nan",
    b"%",
    b"99999999",
    b"e9",
    b"&",
]
COUNTS = [300, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])]


def damaged(sound, rng):
    """A copy with one to three pieces replaced, repeated or cut off."""
    data = bytearray(sound)
    for _ in range(rng.randrange(1, 4)):
        place = rng.randrange(len(data) + 1)
        match rng.randrange(8):
            case 0:
                del data[place:]
            case 1:
                data[place:place] = data[place : place + rng.randrange(40)] * rng.randrange(1, 9)
            case _:
                data[place : place + rng.randrange(3)] = rng.choice(PIECES)
    return bytes(data)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("kind", SOUND)
def test_a_damaged_file_is_read_or_refused_in_bounded_time_and_memory(tmp_path, kind, count):
    rng, path = random.Random(7), tmp_path / "graph"
    sound = SOUND[kind] if isinstance(SOUND[kind], bytes) else SOUND[kind].encode()
    name = {"array": "mtx", "names": "edges"}.get(kind, kind)
    outcomes, messages = {"read": 0, "refused": 0}, []
    tracemalloc.start()
    for case in range(count):
        path.write_bytes(damaged(sound, rng))
        start = time.process_time()
        try:
            graph = read(path, format=name if name in FORMATS else None)
        except GraphError as error:
            messages.append(str(error))
            outcomes["refused"] += 1
        else:
            matrix = graph.to_scipy()
            assert (matrix != matrix.T).nnz == 0
            assert matrix.data.min() > 0
            outcomes["read"] += 1
        assert time.process_time() - start < 5, case
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert {message for message in messages if not re.fullmatch("graph.+", message)} == set()
    # A file of a few bytes may declare 2^24 vertices.
    assert peak < 600e6
    assert sum(outcomes.values()) == count
    assert outcomes["refused"] > count / 50
    # Compressed files have checksums.
    assert outcomes["read"] > count / 50 or kind in ("gzip", "bzip2", "xz")
