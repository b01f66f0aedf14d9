"""Steps of the second-order optimisers over an eager SGD step on the same batch.

``refresh`` is ``update_curvature`` at new weights, with the traces of the warm-up: the primal part
of the network, 20 products, the orthogonalisation and the Ritz vectors. ``step`` uses the basis
that is there. The amortised cost of an interval is that of a step plus that of a refresh over the
interval. All jobs run in turn in one process. For the targets, at most 40
SGD steps with the Hessian (34 by arithmetic) and 28 with the Gauss-Newton matrix, run with
``--network vgg16 --device cuda --limit 180``.
"""

import argparse
import math
import time
import warnings
from functools import partial

import torch
from networks import BATCH, cnn, mlp, vgg16
from timing import interleaved, median, ratio, working, write
from torch.nn.functional import cross_entropy

import ritz
from ritz.optim import HessianFree, LanczosNewton, SpectralSGD

NETWORKS = {"mlp": mlp, "cnn": cnn, "vgg16": vgg16}
TARGETS = {"LanczosNewton hessian, refresh": 40, "LanczosNewton ggn, refresh": 28}
INTERVALS = (1, 10, 100)


class Setting:
    """A network, a batch of labelled samples, and a plain training step."""

    def __init__(self, args):
        torch.manual_seed(0)
        model, inputs, classes = NETWORKS[args.network]()
        self.model = model.to(args.device)
        self.inputs = inputs[: args.batch].to(args.device)
        self.labels = torch.randint(classes, (len(self.inputs),), device=args.device)
        self.cuda = self.inputs.is_cuda

    def gradient(self):
        self.model.zero_grad()
        loss = cross_entropy(self.model(self.inputs), self.labels)
        loss.backward()
        return loss

    def risk(self):
        return ritz.Risk(self.model, cross_entropy, [(self.inputs, self.labels)])

    def timed(self, job):
        def run():
            job()
            if self.cuda:
                torch.cuda.synchronize()

        return run


def jobs(s):
    params = list(s.model.parameters())
    # A learning rate of zero: weights and products are the same in every round.
    sgd = torch.optim.SGD(params, lr=0.0)
    risk = s.risk()

    def plain():
        s.gradient()
        sgd.step()

    yield "SGD step", plain
    for matrix in ("hessian", "ggn", "fisher"):
        newton = LanczosNewton(params, 0.0, delta=1.0, num_steps=20, matrix=matrix)

        def refresh(newton=newton):
            newton.update_curvature(risk.moved())

        def step(newton=newton):
            s.gradient()
            newton.step()

        yield f"LanczosNewton {matrix}, refresh", refresh
        yield f"LanczosNewton {matrix}, step", step
    spectral = SpectralSGD(params, 0.0, num_steps=20)
    yield "SpectralSGD hessian, refresh", lambda: spectral.update_curvature(risk.moved())
    free = HessianFree(params, 0.0, delta=1.0, max_steps=20)

    def solved():
        free.update_curvature(risk.moved())
        s.gradient()
        free.step()

    yield "HessianFree step, at most 20 iterations", solved
    memory = torch.optim.LBFGS(params, lr=1e-9, max_iter=20, max_eval=20, tolerance_change=0.0)

    yield "torch LBFGS step, 20 iterations", lambda: memory.step(s.gradient)


def rows(s, args):
    began = time.perf_counter()
    makers = {name: partial(s.timed, job) for name, job in jobs(s)}
    running = working(makers, limit=args.limit / 2)
    left = args.limit - (time.perf_counter() - began)
    seconds = interleaved(
        running, rounds=args.rounds, warm_up=False, before=args.before, limit=left
    )
    base = seconds["SGD step"]
    for name, times in seconds.items():
        over = [a / b for a, b in zip(times, base, strict=True)]
        row = {"job": name, "ms": 1e3 * median(times), "over SGD": ratio(times, base)}
        row |= {"least": min(over), "most": max(over), "target": TARGETS.get(name, "")}
        parts = name.partition(", refresh")
        steps = seconds.get(f"{parts[0]}, step")
        for interval in INTERVALS:
            both = None
            if parts[1] and steps is not None:
                both = [a / interval + b for a, b in zip(times, steps, strict=True)]
            row[f"every {interval}"] = "" if both is None else round(ratio(both, base), 2)
        yield row


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--network", choices=NETWORKS, default="cnn")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--before", type=int, default=0, help="untimed runs before each timed one")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds of all rounds")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if args.device == "cpu":
        torch.set_num_threads(1)
    # All jobs use TF32, which torch allows by default for convolutions only.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    setting = Setting(args)
    name = "second_order.py" if args.device == "cpu" else "second_order_cuda.py"
    write(name, list(rows(setting, args)))


if __name__ == "__main__":
    main()
