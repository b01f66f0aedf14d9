"""Re-orthogonalisation, blocks and a basis on the host, on a CUDA device.

``step`` is ``ritz.lanczos`` with 100 steps on a diagonal matrix of 15,291,300 rows (as a VGG-16),
without its products, over the time of four reads of the basis at the rate of a large copy on the
device, or on the host for a basis on the host. ``blocks`` is Lanczos quadrature on a random graph:
the cost per probe in blocks over single probes, and compared with the CPU.
"""

import numpy as np
import scipy.sparse
import torch
from timing import interleaved, median, ratio, write

import ritz
from ritz.operators import DiagonalOperator, SparseOperator

NUM_STEPS = 100
ROWS = 15_291_300
KEYS = ("what", "ms", "copy GB/s", "over bound", "peak vectors", "over one at a time")


def synchronized(job):
    def run():
        job()
        torch.cuda.synchronize()

    return run


def step_row(placement, mode):
    op = DiagonalOperator(torch.rand(ROWS, device="cuda"))
    home = "cuda" if placement == "device" else "cpu"
    source = torch.ones(2**28, device=home)
    target = torch.empty_like(source)
    vector = torch.rand(ROWS, device="cuda")
    settings = {"num_steps": NUM_STEPS, "basis": placement, "reorthogonalize": mode}

    def products():
        for _ in range(NUM_STEPS):
            op.matmat(vector)

    jobs = {
        "copy": synchronized(lambda: target.copy_(source)),
        "run": synchronized(lambda: ritz.lanczos(op, **settings)),
        "products": synchronized(products),
    }
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    seconds = interleaved(jobs, rounds=3)
    rate = [2 * source.nbytes / t for t in seconds["copy"]]
    spent = [a - b for a, b in zip(seconds["run"], seconds["products"], strict=True)]
    reads = 4 * sum(range(1, NUM_STEPS + 1)) * ROWS * 4
    return {
        "what": f"step, basis on {placement}, {mode}",
        "ms": 1e3 * median(spent) / NUM_STEPS,
        "copy GB/s": median(rate) / 1e9,
        "over bound": ratio(spent, [reads / r for r in rate]),
        "peak vectors": (torch.cuda.max_memory_allocated() - before) / ROWS / 4,
    }


def graph(n=200_000, edges=2_000_000):
    draw = np.random.default_rng(0).integers(0, n, (2, edges))
    matrix = scipy.sparse.coo_array((np.ones(edges), (draw[0], draw[1])), shape=(n, n)).tocsr()
    return matrix + matrix.T


def block_rows():
    host = SparseOperator(graph())
    device = SparseOperator(host.matrix.to("cuda"))
    settings = {"num_steps": 30, "num_probes": 32}

    def quadrature(op, width):
        return synchronized(
            lambda: ritz.trace_function(op, torch.exp, block_size=width, **settings)
        )

    widths = (1, 8, 32)
    jobs = {f"cuda {width}": quadrature(device, width) for width in widths}
    jobs["cpu 4"] = quadrature(host, 4)
    seconds = interleaved(jobs, rounds=3)
    for name, spent in seconds.items():
        yield {
            "what": f"blocks, float64, width {name}",
            "ms": 1e3 * median(spent) / 32 / 30,
            "over one at a time": ratio(spent, seconds["cuda 1"]),
        }


def main():
    if not torch.cuda.is_available():
        print("no CUDA device here: nothing measured")
        return
    print(torch.cuda.get_device_name(), torch.__version__)
    pairs = (("device", "full"), ("device", "partial"), ("host", "full"))
    rows = [*(step_row(*pair) for pair in pairs), *block_rows()]
    write(__file__, [dict.fromkeys(KEYS, "") | row for row in rows])


if __name__ == "__main__":
    main()
