"""The training loop over bare steps (forward, backward, optimiser step) on the same batches.

Both train a copy of the same network on batches that are already on the device. ``bare`` has no
log, schedule, totals or checkpoints: it zeroes gradients, runs forward, backward and step, or
replays a CUDA graph of them. Rounds of ``--epochs`` epochs alternate, and ratios are medians over
rounds. On the CPU the network is a small convolutional one. On CUDA it is a VGG-16 with batch norm
on CIFAR-100 shapes with batch size 128, eager and as a CUDA graph, in TF32, where the overhead of
the loop counts most.
"""

import argparse
import copy
import gc
import tempfile
from pathlib import Path

import torch
from timing import interleaved, median, ratio, write
from torch import nn
from torch.nn.functional import cross_entropy

from ritz import models, training


def small(classes):
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(32, classes),
    )  # fmt: skip


def batches(args):
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(args.batch_size, 3, 32, 32, generator=generator).to(args.device)
    labels = torch.randint(100, (args.batch_size,), generator=generator).to(args.device)
    return [(images + 0.01 * i, labels) for i in range(args.batches)]


def rate(args):
    return torch.tensor(0.01, device=args.device) if args.device == "cuda" else 0.01


def sgd(args, model):
    fused = {"fused": True} if args.device == "cuda" else {}
    return torch.optim.SGD(model.parameters(), lr=rate(args), momentum=0.9, **fused)


def bare(args, model, data):
    optimizer = sgd(args, model)

    def run():
        for _ in range(args.epochs):
            for inputs, targets in data:
                optimizer.zero_grad(set_to_none=True)
                cross_entropy(model(inputs), targets).backward()
                optimizer.step()
        wait(args)

    return run


def bare_captured(args, model, data):
    optimizer, held = sgd(args, model), [part.clone() for part in data[0]]

    def step():
        optimizer.zero_grad(set_to_none=True)
        cross_entropy(model(held[0]), held[1]).backward()
        optimizer.step()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def run():
        for _ in range(args.epochs):
            for inputs, targets in data:
                held[0].copy_(inputs)
                held[1].copy_(targets)
                graph.replay()
        wait(args)

    run.held = model, optimizer  # the graph refers to their memory
    return run


def loop(args, model, data, *, capture):
    folder = Path(tempfile.mkdtemp())

    def run():
        training.fit(
            model, data, num_epochs=args.epochs, optimizer="sgd", optimizer_settings={"lr": 0.01},
            log=folder / "log.jsonl", capture=capture, precision=args.precision,
        )  # fmt: skip
        wait(args)

    return run


def wait(args):
    if args.device == "cuda":
        torch.cuda.synchronize()


def jobs(args, data):
    model = models.create("vgg16_bn", num_classes=100) if args.device == "cuda" else small(100)
    model.to(args.device)
    if args.device == "cuda":
        model.to(memory_format=torch.channels_last)  # as in the training loop

    def fresh():
        return copy.deepcopy(model).train()

    yield "bare", bare(args, fresh(), data)
    yield "fit", loop(args, fresh(), data, capture=False)
    if args.device == "cuda":
        yield "bare, captured", bare_captured(args, fresh(), data)
        yield "fit, captured", loop(args, fresh(), data, capture=True)


def rows(args):
    torch.manual_seed(0)
    data = batches(args)
    made = dict(jobs(args, data))
    gc.disable()  # a collection would count for the job that runs at that time
    seconds = interleaved(made, rounds=args.rounds)
    steps = args.epochs * args.batches
    for name in made:
        below = "bare, captured" if name.endswith("captured") else "bare"
        yield {
            "device": args.device,
            "batch": args.batch_size,
            "what": name,
            "ms a step": 1e3 * median(seconds[name]) / steps,
            "over bare": ratio(seconds[name], seconds[below]),
        }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--batch-size", type=int, default=None)
    parser.add_argument("--batches", type=int, default=None, help="batches per epoch")
    parser.add_argument("--epochs", type=int, default=2, help="epochs per round")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    args.batch_size = args.batch_size or (128 if args.device == "cuda" else 32)
    args.batches = args.batches or (352 if args.device == "cuda" else 20)
    torch.set_num_threads(1)
    torch.backends.cudnn.benchmark = args.device == "cuda"
    args.precision = "tf32" if args.device == "cuda" else "float32"
    fast = args.precision == "tf32"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = fast
    write(__file__ if args.device == "cpu" else f"training_{args.device}", list(rows(args)))


if __name__ == "__main__":
    main()
