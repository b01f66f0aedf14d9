"""Monitors: what a measurement adds to a run, and what each quantity costs in gradients.

Usage: python benchmarks/monitors.py [--device cuda] [--network mlp|lenet|vgg16] [--samples N]
           [--timed N] [--watched N] [--every K] [--rounds N] [--part run|quantities] [--limit S]

``run`` trains by ``fit``, on images of the shape of MNIST (``mlp``, ``lenet``) or of CIFAR-100 with
its augmentation (``vgg16``), in batches of 128, and measures the quantities that ``ritz train
--watch`` logs by default every ``--every`` epochs: the first measurement, which searches the
largest eigenvalue from a random vector, and ``--rounds`` later ones. ``share`` is the time of a
later one over that of the epochs before it. With ``--timed`` only so many samples are trained on,
and the time of an epoch of ``--samples`` is extrapolated from it. The images are random: the time
does not depend on them, but for the products of the first search.

``quantities`` measures each quantity alone, after its first time, over a gradient of the watched
samples, beside the cost that the registry states. A quantity that fails is a row with its error.

Results are written after each round and each quantity. After ``--limit`` seconds none is begun.
"""

import argparse
import time

import torch
from timing import RESULTS, interleaved, median, ratio, write
from torch.nn.functional import cross_entropy

import ritz
from ritz._core.modes import arithmetic
from ritz.data import Augmentation, Split
from ritz.training import CurvatureMonitor, fit, quantity_names
from ritz.training._quantities import QUANTITIES
from ritz.training._run_folder import num_watched

SHAPES = {"mlp": (1, 28, 28), "lenet": (1, 28, 28), "vgg16": (3, 32, 32)}


class Setting:
    """A network, random images for it, and a part of them to watch."""

    def __init__(self, options):
        shape, self.options, device = SHAPES[options.network], options, options.device
        self.cuda, self.start = device.startswith("cuda"), time.monotonic()
        # On a shared CPU the time that other programs take does not count.
        self.clock = time.perf_counter if self.cuda else time.process_time
        self.model = self.network()
        self.watched = options.watched or num_watched(self.model)
        count = max(self.watched, options.timed or options.samples)
        generator = torch.Generator().manual_seed(0)
        # As bytes: in int64 the images of CIFAR take 1.2 GB.
        images = torch.randint(256, (count, *shape), generator=generator, dtype=torch.uint8)
        labels = torch.randint(10, (count,), generator=generator)
        middle = torch.full((shape[0],), 0.5, dtype=torch.float64)
        self.data = Split(
            inputs=images.to(device), targets=labels.to(device), mean=middle, std=middle
        )
        part = images[: self.watched].float() / 127.5 - 1, labels[: self.watched]
        self.part = tuple(tensor.to(device) for tensor in part)

    def network(self):
        names = {"num_classes": 10, "input_shape": SHAPES[self.options.network]}
        return ritz.models.create(self.options.network, **names).to(self.options.device)

    def monitor(self, names=None, every=1):
        return CurvatureMonitor(self.part, quantities=names, batch_size=512, every=every)

    def now(self):
        """Return the time, after all work on the device."""
        if self.cuda:
            torch.cuda.synchronize()
        return self.clock()

    @property
    def late(self):
        return time.monotonic() - self.start > self.options.limit

    @property
    def row(self):
        names = ("network", "device", "precision", "samples", "timed", "every")
        row = {name: getattr(self.options, name) for name in names}
        return row | {"watched": self.watched}


class Timed:
    """Times a monitor, and the epochs before each measurement; writes after each."""

    unit = "epoch"

    def __init__(self, monitor, setting, file):
        self.monitor, self.setting, self.file = monitor, setting, file
        self.attach = monitor.attach
        self.first, self.epochs, self.spent, self.end = None, [], [], None

    def __call__(self, epoch, model, optimizer):
        begin = self.setting.now()
        record = self.monitor(epoch, model, optimizer)
        if record is None:
            return
        if self.first is None:
            # The epochs before it contain what is done once: capturing, searching algorithms.
            self.end = self.setting.now()
            self.first = self.end - begin
        else:
            self.epochs.append(begin - self.end)
            self.end = self.setting.now()
            self.spent.append(self.end - begin)
        self.write()
        if self.setting.late:
            raise KeyboardInterrupt

    def write(self):
        row = self.setting.row | {"first_s": self.first, "stated": self.monitor.cost}
        if self.epochs:
            options = self.setting.options
            scale = options.samples / (options.timed or options.samples)
            epochs = [scale * seconds for seconds in self.epochs]
            shares = [m / t for m, t in zip(self.spent, epochs, strict=True)]
            row |= {"epochs_s": median(epochs), "measure_s": median(self.spent)}
            row |= {"share": median(shares), "least": min(shares), "most": max(shares)}
        write(self.file, [row])


def run(setting, file):
    """Measure the share of measurements in the time of the epochs between them."""
    options = setting.options
    timed = Timed(setting.monitor(every=options.every), setting, file)
    images = setting.data.take(options.timed or options.samples)
    augment = {"augment": Augmentation()} if options.network == "vgg16" else {}
    try:
        fit(
            setting.model, images, num_epochs=options.every * (options.rounds + 1), batch_size=128,
            device=options.device, precision=options.precision, monitors=[timed],
            optimizer_settings={"lr": 0.01}, **augment,
        )  # fmt: skip
    except KeyboardInterrupt:
        print(f"stopped after {options.limit:g} seconds")


def measured(setting, name):
    """Return the cost of a quantity in gradients of the watched samples, and the stated one."""
    monitor, model = setting.monitor([name]), setting.model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    monitor.attach(optimizer)
    cross_entropy(model(setting.part[0][:8]), setting.part[1][:8]).backward()
    optimizer.step()
    risk = ritz.Risk(model, cross_entropy, setting.part, batch_size=512)

    def gradient():
        risk.gradient()
        setting.now()

    def measure():
        monitor.measure(model, optimizer)
        setting.now()

    measure()  # the first search, and traces
    jobs = {"gradient": gradient, name: measure}
    seconds = interleaved(jobs, rounds=setting.options.rounds, clock=setting.clock)
    return {"gradients": ratio(seconds[name], seconds["gradient"]), "stated": monitor.cost}


def quantities(setting, file):
    """Measure the cost of each quantity."""
    rows = []
    has_norm = any("Norm" in type(layer).__name__ for layer in setting.model.modules())
    # The cheap ones first, so that a limit leaves out the dearest.
    names = sorted(quantity_names(), key=lambda name: setting.monitor([name]).cost)
    for name in names:
        if name == "effective_rates" and not has_norm:
            continue
        if setting.late:
            print(f"stopped after {setting.options.limit:g} seconds, before {name}")
            break
        try:
            cost, problem = measured(setting, name), ""
        except Exception as error:  # the other quantities are still of use
            cost = {"gradients": None, "stated": None}
            problem = f"{type(error).__name__}: {error}".splitlines()[0]
        row = setting.row | {"quantity": name, "group": QUANTITIES[name].group}
        rows.append(row | cost | {"error": problem})
        write(file, rows, shown=1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--network", choices=SHAPES, default="mlp")
    parser.add_argument("--precision", choices=("float32", "tf32", "bfloat16"), default="float32")
    parser.add_argument("--samples", type=int, default=60_000)
    parser.add_argument("--timed", type=int, default=None)
    parser.add_argument("--watched", type=int, default=None)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--part", choices=("run", "quantities"), default="run")
    parser.add_argument("--limit", type=float, default=150.0)
    options = parser.parse_args()
    file = f"monitors-{options.part}-{options.network}-{options.device.partition(':')[0]}"
    part = {"run": run, "quantities": quantities}[options.part]
    # As fit does it: convolutions of CUDA would use TF32 otherwise.
    with arithmetic("float32" if options.precision == "float32" else "tf32"):
        part(Setting(options), file)
    print(RESULTS / f"{file}.json")
