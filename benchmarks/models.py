"""The first product, later products and their memory, over one gradient, on common models.

Each model is small, with random weights and data, and attention as it comes. A row is one model
and one way to multiply: ritz, four other libraries, or double backward in ten lines of torch.
``first`` is the first Hessian product of a new operator, ``next`` every later one, ``column`` one
of a block of eight, ``GGN first`` and ``GGN`` the same for Gauss-Newton, ``compiled`` and ``GGN
compiled`` later ones with ``compile=True`` (with ``--compile``), all over one gradient of the same
samples in the same round. The gradient uses the attention and recurrent kernels that torch chooses;
those have no second derivatives, so products cannot.

``MiB`` is the peak memory of a product and of all that its operator caches, without model and data:
of the process on the CPU, of the device on CUDA. ``error`` and ``GGN error`` compare with plain
double backward. The process is warm: torch loads modules for about a second before its first
forward derivative, which is not in ``first``.
"""

import argparse
import copy
import ctypes
import gc
import importlib.util
import json
import time
import warnings
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from families import MODELS
from products import (
    WIDTH,
    Setting,
    backpack_jobs,
    curvlinops_jobs,
    eigenthings_jobs,
    gathered,
    pyhessian_jobs,
)
from timing import RESULTS, interleaved, median, ratio, write
from torch.nn.attention import SDPBackend, sdpa_kernel

import ritz

EVERY = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def ritz_jobs(s):
    risk = ritz.Risk(s.model, F.cross_entropy, s.batches)
    for kind, make in (("Hessian", ritz.hessian), ("GGN", ritz.ggn)):
        op = make(risk)
        yield f"{kind} ritz", lambda op=op: op @ s.vector
    wide = ritz.hessian(risk)
    yield "Hessian ritz, block", lambda: wide @ s.block


def compiled_jobs(s):
    for kind, make in (("Hessian", ritz.hessian), ("GGN", ritz.ggn)):
        op = make(s.risk, compile=True)
        yield f"{kind} ritz, compiled", lambda op=op: op @ s.vector


def torch_jobs(s):
    def ggn(x, y):
        outputs = s.model(x)
        slopes = torch.autograd.grad(F.cross_entropy(outputs, y), outputs, create_graph=True)[0]
        zero = torch.zeros_like(outputs, requires_grad=True)
        pulled = torch.autograd.grad(outputs, s.params, zero, create_graph=True)
        (tangent,) = torch.autograd.grad(pulled, zero, s.pieces)
        (curved,) = torch.autograd.grad(slopes, outputs, tangent, retain_graph=True)
        return torch.autograd.grad(outputs, s.params, curved)

    yield "Hessian torch", s.summed(s.double_backward)
    yield "GGN torch", s.summed(ggn)


# By name: how it is imported, and its jobs.
LIBRARIES = {
    "torch": ("torch", torch_jobs),
    "ritz": ("ritz", ritz_jobs),
    "curvlinops": ("curvlinops", curvlinops_jobs),
    "hessian-eigenthings": ("hessian_eigenthings", eigenthings_jobs),
    "PyHessian": ("pyhessian", pyhessian_jobs),
    "BackPACK": ("backpack", backpack_jobs),
}


def installed():
    """Return the jobs of the libraries that are installed, and print the others."""
    missing = [who for who, (name, _) in LIBRARIES.items() if not importlib.util.find_spec(name)]
    if missing:
        print(f"not installed, left out: {', '.join(missing)}")
    return {who: make for who, (_, make) in LIBRARIES.items() if who not in missing}


@contextmanager
def kernels(model, *, chosen):
    """Use the kernels that torch chooses, or those that have second derivatives."""
    recurrent = [module for module in model.modules() if isinstance(module, torch.nn.RNNBase)]
    enabled, modes = torch.backends.cudnn.enabled, [module.training for module in recurrent]
    with sdpa_kernel(EVERY if chosen else SDPBackend.MATH):
        torch.backends.cudnn.enabled = chosen or not recurrent
        for module in recurrent:
            # The layers have no dropout, and cuDNN has gradients in train mode only.
            module.train(chosen)
        try:
            yield
        finally:
            torch.backends.cudnn.enabled = enabled
            for module, mode in zip(recurrent, modes, strict=True):
                module.train(mode)


def flat(product):
    parts = product if isinstance(product, list | tuple) else [product]
    return torch.cat([part.detach().reshape(-1) for part in parts])


def timed(s, job):
    begin = clock(s)()
    result = job()
    if s.device != "cpu":
        torch.cuda.synchronize()
    return clock(s)() - begin, result


def clock(s):
    # Processor time leaves out what other programs take on a shared CPU.
    return time.process_time if s.device == "cpu" else time.perf_counter


def resident(field):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    return float("nan")


def peak(s, job):
    """Return the peak MiB while a job runs. On the CPU it is that of the process."""
    gc.collect()
    if s.device != "cpu":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        job()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = resident("VmRSS")
    job()
    return resident("VmHWM") - before


def starts(s, make):
    """Yield label, seconds of the first product, the product and the job of new operators."""
    jobs = iter(make(s))
    while True:
        begin = clock(s)()
        pair = next(jobs, None)
        making = clock(s)() - begin
        if pair is None:
            return
        label, job = pair
        seconds, product = timed(s, job)
        yield label, making + seconds, product, job


def measured(s, who, make, starting):
    """Return the first products, jobs and memory of a library, by label."""
    first, jobs, products, memory = {}, {}, {}, float("nan")
    try:
        for _ in range(starting):
            for label, seconds, product, job in starts(s, make):
                first.setdefault(label, []).append(seconds)
                jobs[label], products[label] = job, flat(product)

        def build():
            _, job = next(iter(make(s)))
            job(), job()

        memory = peak(s, build)
    except Exception as error:
        print(f"  {who} could not: {type(error).__name__}: {str(error).splitlines()[:1]}")
    return first, jobs, products, memory


def rows(name, args, libraries):
    torch.manual_seed(0)
    s = Setting(*MODELS[name](args.scale), args.device, None)
    plain = s.summed(s.gradient)

    def gradient():
        with kernels(s.model, chosen=True):
            plain()

    gradient()
    base = peak(s, gradient)
    # Without torch.compile, through which torch has no second derivatives.
    bare = copy.copy(s)
    bare.model = getattr(s.model, "_orig_mod", s.model)
    with kernels(s.model, chosen=False):
        truth = {label: flat(job()) for label, job in torch_jobs(bare)}
        found = {who: measured(s, who, make, args.starts) for who, make in libraries.items()}
        jobs = {label: job for _, parts, _, _ in found.values() for label, job in parts.items()}
        if args.compile:
            jobs |= dict(gathered({"ritz, compiled": compiled_jobs}, s))
        jobs = {"gradient": gradient} | jobs
        jobs = {label: lambda job=job: timed(s, job) for label, job in jobs.items()}
        seconds = interleaved(jobs, rounds=args.rounds, clock=clock(s))
    below = median(seconds["gradient"])

    def over(label, columns=1):
        return ratio(seconds[label], seconds["gradient"]) / columns if label in seconds else ""

    for who, (first, _, products, memory) in found.items():
        row = {
            "model": name,
            "parameters": s.risk.space.size,
            "gradient ms": 1e3 * below,
            "who": who,
        }
        for kind, heads in (
            ("Hessian", ("first", "next", "compiled", "error")),
            ("GGN", ("GGN first", "GGN", "GGN compiled", "GGN error")),
        ):
            label = f"{kind} {who}"
            row[heads[0]] = median(first[label]) / below if label in first else ""
            row[heads[1]] = over(label)
            row[heads[2]] = over(f"{label}, compiled")
            here, there = products.get(label), truth.get(f"{kind} torch")
            known = here is not None and there is not None
            row[heads[3]] = float((here - there).norm() / there.norm()) if known else ""
        row["first s"] = median(first[f"Hessian {who}"]) if f"Hessian {who}" in first else ""
        row["column"] = over(f"Hessian {who}, block", WIDTH)
        row["MiB"], row["gradient MiB"] = memory, base
        yield row


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--scale", type=int, default=1, help="factor of all widths")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--starts", type=int, default=3, help="operators whose first product is timed"
    )
    parser.add_argument("--compile", action="store_true", help="products with compile=True too")
    parser.add_argument("--name", help="of the file of results")
    parser.add_argument("--add", action="store_true", help="keep the rows of other models")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    libraries = installed()
    warm = Setting(torch.nn.Linear(3, 2), torch.randn(4, 3), torch.tensor([0, 1, 0, 1]),
                   args.device, None)  # fmt: skip
    for _, job in gathered(libraries, warm):
        job()
    args.name = args.name or ("models" if args.device == "cpu" else "models_cuda")
    path = RESULTS / f"{args.name}.json"
    before = json.loads(path.read_text())["results"] if args.add and path.exists() else []
    found = [row for row in before if row["model"] not in args.models]
    for name in args.models:
        try:
            found += rows(name, args, libraries)
        except Exception as error:  # the other models are measured all the same
            print(f"{name} could not: {type(error).__name__}: {str(error).splitlines()[:1]}")
            continue
        found.sort(key=lambda row: list(MODELS).index(row["model"]))
        write(args.name, found)


if __name__ == "__main__":
    main()
