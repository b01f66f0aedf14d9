"""A step with gradient noise over the plain step of a large batch.

All jobs run in turn in one process; ratios are medians over rounds with their quartiles. On the CPU
the clock is the processor time of one thread, which other processes disturb least. ``every 10``
takes ten steps per round with second moments from the first of them. ``captured`` steps are
replayed from a CUDA graph, and are compared with captured plain steps. One command measures a GPU:
``python benchmarks/noise.py --device cuda --networks mlp vgg16``. Results are written after every
network. A network takes at most ``--seconds``, and then has fewer rounds; a step that does not fit
into memory is left out.
"""

import argparse
import itertools
import statistics
import time
import warnings

import networks
import torch
from timing import write
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD

from ritz.curvature._shared import Adapter
from ritz.optim import CovarianceNoise
from ritz.training import TrainingConfig
from ritz.training._cuda_graph import CapturedStep
from ritz.training._step import Piece, Step

# Name, options of the noise, steps per round.
JOBS = [
    ("plain", None, 1),
    ("full", {"kind": "full"}, 1),
    ("diagonal", {"kind": "diagonal"}, 1),
    ("trace", {"kind": "trace"}, 1),
    ("plain, ten steps", None, 10),
    ("diagonal, every 10", {"kind": "diagonal", "refresh": 10}, 10),
    ("kfac, every 10", {"kind": "kfac", "refresh": 10}, 10),
    # On CUDA alone.
    ("captured plain", None, 1),
    ("captured full", {"kind": "full"}, 1),
    ("captured diagonal", {"kind": "diagonal"}, 1),
]


def deep():
    """784-1024-1024-1024-10."""
    widths, layers = (784, 1024, 1024, 1024), []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(1024, 10)), torch.zeros(1, 784), 10


def wide():
    """784-8192-8192-10, whose kernels take longer than their launches on a GPU."""
    layers = [nn.Linear(784, 8192), nn.ReLU(), nn.Linear(8192, 8192), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(8192, 10)), torch.zeros(1, 784), 10


def job(model, batch, options, steps, args):
    """Return a function that takes some steps, and starts with new second moments."""
    fused = {"fused": True} if args.device == "cuda" else {}
    optimizer = SGD(model.parameters(), lr=1e-4, momentum=0.9, **fused)
    noise = None
    if options is not None:
        noise = CovarianceNoise(optimizer, model, small=len(batch[0]) // 32, **options)

    def run():
        if noise is not None and noise.refresh == steps:
            optimizer.param_groups[0]["noise_step"] = 0  # the first step refreshes
        for _ in range(steps):
            optimizer.zero_grad()
            if noise is None:
                cross_entropy(model(batch[0]), batch[1]).backward()
            else:
                noise.backward(batch)
            optimizer.step()
        if args.device == "cuda":
            torch.cuda.synchronize()

    return run


def captured_job(model, batch, options, args):
    """Return a function that replays a training step from a CUDA graph."""
    # A graph reads the learning rate from memory.
    rate = torch.tensor(1e-4, device=args.device)
    optimizer = SGD(model.parameters(), lr=rate, momentum=0.9, fused=True)
    noise = None
    if options is not None:
        noise = CovarianceNoise(optimizer, model, small=len(batch[0]) // 32, **options)
    adapter, device = Adapter(model, cross_entropy, None), torch.device(args.device)
    step = Step(adapter, optimizer, TrainingConfig(), device, cached=False, noise=noise)
    take, pieces = CapturedStep(step, required=True), [Piece(batch)]
    for _ in range(4):  # the fourth step is recorded
        take(pieces)

    def run():
        take(pieces)
        torch.cuda.synchronize()

    return run


def seconds(jobs, args):
    """Return the seconds of each job by round: at least two rounds, while time is left."""
    clock = time.perf_counter if args.device == "cuda" else time.process_time
    begin = time.perf_counter()
    for name in list(jobs):
        try:
            jobs[name]()
        except torch.OutOfMemoryError as error:
            print(f"{name} left out: {str(error).splitlines()[0]}", flush=True)
            del jobs[name]
    found = {name: [] for name in jobs}
    for number in range(args.rounds):
        if number >= 2 and time.perf_counter() - begin > args.seconds:
            break
        for name, run in jobs.items():
            start = clock()
            run()
            found[name].append(clock() - start)
    return found


def rows(name, args):
    make = {"deep": deep, "wide": wide}.get(name) or getattr(networks, name)
    model, inputs, classes = make()
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(args.batch, *inputs.shape[1:], generator=generator).to(args.device)
    labels = torch.randint(0, classes, (args.batch,), generator=generator).to(args.device)
    jobs, chosen = {}, [job for job in JOBS if not args.steps or job[0] in args.steps]
    if args.device == "cpu":
        chosen = [job for job in chosen if not job[0].startswith("captured")]
    for title, options, steps in chosen:
        other = make()[0].to(args.device)
        other.load_state_dict(model.state_dict())
        if title.startswith("captured"):
            jobs[title] = captured_job(other, (inputs, labels), options, args)
        else:
            jobs[title] = job(other, (inputs, labels), options, steps, args)
    found = seconds(jobs, args)
    for title, _, steps in chosen:
        if title not in found:
            continue
        base = found["plain" if steps == 1 else "plain, ten steps"]
        if title.startswith("captured"):
            base = found["captured plain"]
        ratios = [a / b for a, b in zip(found[title], base, strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4)
        yield {
            "network": name,
            "device": args.device,
            "batch": args.batch,
            "step": title,
            "ms": 1e3 * statistics.median(found[title]) / steps,
            "over plain": statistics.median(ratios),
            "lower quartile": low,
            "upper quartile": high,
        }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--networks", nargs="+", default=["mlp", "deep", "cnn"])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--seconds", type=float, default=240.0, help="per network, about")
    titles = [title for title, _, _ in JOBS]
    parser.add_argument("--steps", nargs="+", choices=titles, help="with plain; all by default")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    suffix = "" if args.device == "cpu" else "_cuda"
    name = __file__.replace(".py", f"{suffix}.py")
    results = []
    for network in args.networks:
        results += rows(network, args)
        write(name, results)
        if args.device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
