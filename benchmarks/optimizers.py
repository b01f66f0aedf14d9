"""Steps of the adaptive optimisers over a step of the fused AdamW of torch, on a VGG.

All jobs run in turn in one process. A round is one epoch of ``--steps`` steps, and ratios are
medians over rounds. ``once an epoch`` averages the weights once per round.
"""

import argparse
import gc
import importlib.util
import itertools
import time
import warnings

import torch
from timing import interleaved, median, ratio, write

from ritz.optim import Gadam, GadamX

CHANNELS = (1, 1, 2, 2, 4, 4, 4, 8, 8, 8, 8, 8, 8)
WIDTHS = {"5M": 37, "15M": 64, "100M": 168}


def shapes(width):
    """Return the weights of a VGG-16 with batch norm and 100 classes."""
    outer = [3, *(width * factor for factor in CHANNELS)]
    for before, after in itertools.pairwise(outer):
        yield from ((after, before, 3, 3), (after,), (after,))
    yield from ((100, outer[-1]), (100,))


def weights(args):
    generator = torch.Generator(args.device).manual_seed(0)
    for shape in shapes(WIDTHS[args.size]):
        noise = torch.randn(shape, generator=generator, device=args.device)
        p = torch.nn.Parameter(0.05 * noise)
        p.grad = 0.01 * torch.randn(shape, generator=generator, device=args.device)
        yield p


def optimizers(args):
    adamw, epoch = torch.optim.AdamW, {"start": 1, "interval": args.steps}
    yield "AdamW, torch fused", adamw, {"fused": True}
    yield "AdamW, torch foreach", adamw, {"foreach": True}
    yield "AdamW, torch for-loop", adamw, {"foreach": False}
    yield "Gadam", Gadam, {}
    yield "Gadam, averaging once an epoch", Gadam, epoch
    yield "Gadam, averaging every step", Gadam, {"start": 1}
    yield "GadamX", GadamX, {}
    yield "GadamX, foreach", GadamX, {"foreach": True}
    yield "GadamX, compiled", GadamX, {"compile": True}
    yield "GadamX, compiled, averaging once an epoch", GadamX, {"compile": True, **epoch}
    yield "GadamX, compiled, averaging every step", GadamX, {"compile": True, "start": 1}
    if importlib.util.find_spec("pytorch_optimizer"):
        from pytorch_optimizer import PAdam

        yield "Padam, pytorch_optimizer", PAdam, {"partial": 0.125}


def job(args, cls, settings):
    optimizer = cls(list(weights(args)), lr=1e-3, weight_decay=1e-2, **settings)

    def run():
        for _ in range(args.steps):
            optimizer.step()
        if args.device == "cuda":
            torch.cuda.synchronize()

    return run


def rows(args):
    chosen = [one for one in optimizers(args) if args.only in one[0] or one[0].startswith("AdamW")]
    jobs = {name: job(args, cls, settings) for name, cls, settings in chosen}
    count = sum(torch.Size(shape).numel() for shape in shapes(WIDTHS[args.size]))
    gc.disable()  # a collection would count for the job that runs at that time
    # Processor time leaves out what other programs take on a shared CPU.
    clock = time.process_time if args.device == "cpu" else time.perf_counter
    seconds = interleaved(jobs, rounds=args.rounds, clock=clock)
    for name in jobs:
        yield {
            "device": args.device,
            "parameters": count,
            "what": name,
            "ms": 1e3 * median(seconds[name]) / args.steps,
            "over fused": ratio(seconds[name], seconds["AdamW, torch fused"]),
            "over foreach": ratio(seconds[name], seconds["AdamW, torch foreach"]),
        }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--size", choices=tuple(WIDTHS), default="5M")
    parser.add_argument("--steps", type=int, default=100, help="steps per round (one epoch)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--only", default="", help="only optimisers of ritz whose name contains this"
    )
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    plain = args.device == "cpu" and args.size == "5M"
    write(__file__ if plain else f"optimizers_{args.device}_{args.size}", list(rows(args)))


if __name__ == "__main__":
    main()
