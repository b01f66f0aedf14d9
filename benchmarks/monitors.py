"""Monitors: what a measurement adds to a run, and what each quantity costs in gradients.

Usage: python benchmarks/monitors.py [--device cuda] [--network mlp|lenet|vgg16] [--samples N]
           [--watched N] [--every K] [--rounds N] [--part run|quantities]

``run`` trains ``--every`` epochs by ``fit``, on images of the shape of MNIST (``mlp``, ``lenet``)
or of CIFAR-100 with its augmentation (``vgg16``), in batches of 128, and measures the quantities
that ``ritz train --watch`` logs by default: the first measurement, which searches the largest
eigenvalue from a random vector, and later ones. ``share`` is their time over that of the epochs.
``quantities`` measures each quantity alone, after its first time, over a gradient of the watched
samples, beside the cost that the registry states. The images are random: the time does not depend
on them, but for the products of the first search.
"""

import argparse
import time

import torch
from timing import RESULTS, interleaved, median, ratio, table, write
from torch.nn.functional import cross_entropy

import ritz
from ritz.data import Augmentation, Split
from ritz.training import CurvatureMonitor, fit, quantity_names
from ritz.training._quantities import QUANTITIES

SHAPES = {"mlp": (1, 28, 28), "lenet": (1, 28, 28), "vgg16": (3, 32, 32)}


class Setting:
    """A network, random images for it, and a part of them to watch."""

    def __init__(self, options):
        shape, self.options = SHAPES[options.network], options
        generator = torch.Generator().manual_seed(0)
        images = torch.randint(256, (options.samples, *shape), generator=generator)
        labels = torch.randint(10, (options.samples,), generator=generator)
        middle = torch.full((shape[0],), 0.5, dtype=torch.float64)
        self.data = Split(inputs=images.to(torch.uint8), targets=labels, mean=middle, std=middle)
        self.augment = Augmentation() if options.network == "vgg16" else None
        part = images[: options.watched].float() / 127.5 - 1, labels[: options.watched]
        self.watched = tuple(tensor.to(options.device) for tensor in part)
        self.model = self.network()

    def network(self):
        names = {"num_classes": 10, "input_shape": SHAPES[self.options.network]}
        return ritz.models.create(self.options.network, **names).to(self.options.device)

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def train(self):
        """Train for the epochs between two measurements."""
        augment = {} if self.augment is None else {"augment": self.augment}
        fit(
            self.model, self.data, num_epochs=self.options.every, device=self.options.device,
            optimizer_settings={"lr": 0.01}, **augment,
        )  # fmt: skip
        self.synchronize()

    def monitor(self, names=None):
        """Return a job that measures quantities, and its monitor."""
        monitor = CurvatureMonitor(self.watched, quantities=names, batch_size=512)
        optimizer = self.optimizer(self.model)
        monitor.attach(optimizer)
        cross_entropy(self.model(self.watched[0][:8]), self.watched[1][:8]).backward()
        optimizer.step()

        def job():
            monitor.measure(self.model, optimizer)
            self.synchronize()

        return job, monitor

    def gradient(self):
        risk = ritz.Risk(self.model, cross_entropy, self.watched, batch_size=512)

        def job():
            risk.gradient()
            self.synchronize()

        return job

    def synchronize(self):
        if self.options.device == "cuda":
            torch.cuda.synchronize()


def run(setting, options):
    """Return the share of measurements in the time of the epochs between them."""
    clock = time.perf_counter if options.device == "cuda" else time.process_time
    job, monitor = setting.monitor()
    setting.train()  # compiles and caches what a first run does
    begin = clock()
    job()
    first = clock() - begin
    jobs = {"train": setting.train, "measure": job}
    seconds = interleaved(jobs, rounds=options.rounds, warm_up=False, clock=clock)
    share = [m / t for m, t in zip(seconds["measure"], seconds["train"], strict=True)]
    return {
        "network": options.network,
        "device": options.device,
        "samples": options.samples,
        "watched": options.watched,
        "every": options.every,
        "epochs_s": median(seconds["train"]),
        "measure_s": median(seconds["measure"]),
        "share": median(share),
        "least": min(share),
        "most": max(share),
        "first_s": first,
        "stated": monitor.cost,
    }


def quantities(setting, options):
    """Return the cost of each quantity in gradients of the watched samples."""
    clock = time.perf_counter if options.device == "cuda" else time.process_time
    model, rows = setting.network().train(), []
    has_norm = any("Norm" in type(layer).__name__ for layer in model.modules())
    for name in quantity_names():
        if name == "effective_rates" and not has_norm:
            continue
        job, monitor = setting.monitor([name])
        job()  # the first search, and traces
        jobs = {"gradient": setting.gradient(), name: job}
        seconds = interleaved(jobs, rounds=options.rounds, clock=clock)
        rows.append(
            {
                "network": options.network,
                "device": options.device,
                "quantity": name,
                "group": QUANTITIES[name].group,
                "gradients": ratio(seconds[name], seconds["gradient"]),
                "stated": monitor.cost,
            }
        )
        print(table(rows[-1:]), flush=True)
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--network", choices=SHAPES, default="mlp")
    parser.add_argument("--samples", type=int, default=60_000)
    parser.add_argument("--watched", type=int, default=1024)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--part", choices=("run", "quantities"), default="run")
    options = parser.parse_args()
    name = f"monitors-{options.part}-{options.network}-{options.device}"
    setting = Setting(options)
    results = [run(setting, options)] if options.part == "run" else quantities(setting, options)
    write(name, results)
    print(RESULTS / f"{name}.json")
