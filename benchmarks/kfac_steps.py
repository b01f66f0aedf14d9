"""Steps of K-FAC and EK-FAC over a step of SGD, beside other libraries.

Usage: python benchmarks/kfac_steps.py [--device cuda] [--part steps|eigh|factors] [--rounds N]

``steps`` measures cycles of 100 steps, with factors every 10 and inverses every 100 of them, so
that a cycle has every cost in its share. On the CPU the networks are the MLP and the small CNN,
beside kfac_pytorch, singd and asdl (which is installed as asdfghjkl) where they are installed.
With ``--device cuda`` it is VGG-16 with batches of 128, in TF32 and in float32, over an eager step
and a captured one. ``eigh`` times decompositions of the largest factors of VGG-16, of order 4608,
and ``factors`` ways to compute factors of convolutions. singd 0.0.5 and asdfghjkl 0.1a5 install
with ``pip install --no-deps`` beside the other libraries, kfac_pytorch 0.4.2 from its source.

SGD has momentum everywhere, the loss is cross-entropy, labels are those
of the data (empirical Fisher matrix).
"""

import argparse
import math
import time
import warnings
from functools import partial
from itertools import groupby

import networks
import torch
from timing import interleaved, median, ratio, working, write
from torch import nn
from torch.nn.functional import cross_entropy

from ritz.curvature import _kfac_factors
from ritz.optim import KFAC

CYCLE, EVERY = 100, {"factor_every": 10, "inverse_every": 100}
LONG = 1000  # steps of a cycle with eigenbases that are as old
RATE, DAMPING = 1e-3, 0.1


class Setting:
    """A network and one batch on a device; jobs that train copies of it for a cycle."""

    def __init__(self, make, batch, device):
        torch.manual_seed(0)
        self.make, self.device = make, device
        _, x, classes = make()
        self.x = x[:batch].to(device)
        self.y = torch.randint(classes, (len(self.x),)).to(device)

    def model(self):
        torch.manual_seed(0)
        model = self.make()[0].to(self.device).train()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        return model

    def synchronize(self):
        if self.device == "cuda":
            torch.cuda.synchronize()

    def cycle(self, step, count=CYCLE):
        def job():
            for _ in range(count):
                step()
            self.synchronize()

        return job

    def plain(self, model, optimizer, before=lambda: None, count=CYCLE):
        def step():
            optimizer.zero_grad()
            cross_entropy(model(self.x), self.y).backward()
            before()
            optimizer.step()

        return self.cycle(step, count)

    def sgd(self, model, lr=RATE, **options):
        return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, **options)

    # ------------------------------------------------------------------------------------------
    # The jobs.

    def job_sgd(self):
        model = self.model()
        return self.plain(model, self.sgd(model))

    def job_captured(self):
        """SGD with its fused kernel, replayed from a CUDA graph."""
        model = self.model()
        optimizer = self.sgd(model, fused=True)

        def step():
            optimizer.zero_grad(set_to_none=False)
            cross_entropy(model(self.x), self.y).backward()
            optimizer.step()

        # Memory of the capture must not be in use by the warm-up on the other stream.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        return self.cycle(graph.replay)

    def job_ritz(self, **options):
        model = self.model()
        settings = EVERY | options
        optimizer = KFAC(model, lr=RATE, delta=DAMPING, **settings)
        return self.plain(model, optimizer, count=settings["inverse_every"])

    def job_kfac_pytorch(self, method):
        from kfac.preconditioner import KFACPreconditioner

        model = self.model()
        optimizer = self.sgd(model)
        preconditioner = KFACPreconditioner(
            model, factor_update_steps=10, inv_update_steps=100, damping=DAMPING, lr=RATE,
            kl_clip=1e9, compute_method=method, loglevel=0,
        )  # fmt: skip
        return self.plain(model, optimizer, preconditioner.step)

    def job_singd(self, structure):
        from singd.optim.optimizer import SINGD

        model = self.model()
        structures = (structure, structure)
        return self.plain(
            model, SINGD(model, lr=RATE, damping=DAMPING, T=10, structures=structures)
        )

    def job_asdl(self, kind):
        from asdl import precondition

        if self.device == "cpu":  # it marks ranges for a profiler that builds for the CPU lack
            torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *args: None
        model = self.model()
        # Its EK-FAC leaves the gradients as they are, because it looks for an inverse, unless
        # precondition() is called with use_inv=False. The step then rotates back without a
        # transpose and diverges, so its weights do not move here.
        ekfac = kind == "EkfacGradientMaker"
        optimizer = self.sgd(model, lr=0.0 if ekfac else RATE)
        config = precondition.PreconditioningConfig(
            data_size=len(self.x), damping=DAMPING, ema_decay=0.05, curvature_upd_interval=10,
            preconditioner_upd_interval=100,
        )  # fmt: skip
        maker = getattr(precondition, kind)(model, config, fisher_type="fisher_emp")

        def step():
            optimizer.zero_grad()
            outputs = maker.setup_model_call(model, self.x)
            maker.setup_loss_call(cross_entropy, outputs, self.y)
            maker.forward_and_backward()
            if ekfac:
                maker.precondition(use_inv=False)
            optimizer.step()

        return self.cycle(step)


OURS = {
    "ritz kfac": {},
    "ritz kfac, exact damping": {"damping": "exact"},
    "ritz kfac, orders up to 1024": {"max_order": 1024},
    "ritz kfac, diagonal": {"max_order": 0},
    "ritz ekfac": {"kind": "ekfac"},
    "ritz ekfac, orders up to 1024": {"kind": "ekfac", "max_order": 1024},
    "ritz ekfac, qr": {"kind": "ekfac", "basis": "qr"},
}
# On CUDA also with the interval that eigh of the largest factors asks for.
LONG_OURS = {f"ritz ekfac, bases every {LONG}": {"kind": "ekfac", "inverse_every": LONG}}
PEERS = {
    "kfac_pytorch, inverse": (Setting.job_kfac_pytorch, "inverse"),
    "kfac_pytorch, eigen": (Setting.job_kfac_pytorch, "eigen"),
    "singd, dense": (Setting.job_singd, "dense"),
    "singd, diagonal": (Setting.job_singd, "diagonal"),
    "asdl kfac": (Setting.job_asdl, "KfacGradientMaker"),
    "asdl ekfac": (Setting.job_asdl, "EkfacGradientMaker"),
}


def makers(setting, **more):
    """What makes each job, the most wanted first."""
    found = {"sgd": setting.job_sgd}
    ours = OURS
    if setting.device == "cuda":
        found["sgd, captured"], ours = setting.job_captured, OURS | LONG_OURS
    found |= {label: partial(setting.job_ritz, **more, **given) for label, given in ours.items()}
    return found | {name: partial(make, setting, given) for name, (make, given) in PEERS.items()}


def measured(name, setting, rounds, chosen, limit=math.inf, **more):
    # Processor time, where that is the time of the work: other programs share the CPU.
    clock = time.perf_counter if setting.device == "cuda" else time.process_time
    began = time.perf_counter()
    every = makers(setting, **more)
    kept = {label: make for label, make in every.items() if label in ("sgd", *(chosen or every))}
    jobs = working(kept, limit=limit / 2)
    left = limit - (time.perf_counter() - began)
    seconds = interleaved(jobs, rounds=rounds, warm_up=False, clock=clock, limit=left)
    for label, each in seconds.items():
        steps = LONG if label in LONG_OURS else CYCLE
        each = [CYCLE / steps * spent for spent in each]
        ratios = sorted(a / b for a, b in zip(each, seconds["sgd"], strict=True))
        yield {"network": name, "batch": len(setting.x), **more, "what": label} | {
            "ms per step": 1e3 * median(each) / CYCLE,
            "over sgd": ratio(each, seconds["sgd"]),
            "least": ratios[0],
            "largest": ratios[-1],
        }


def steps_cpu(rounds, names, batch, chosen):
    for name in names:
        yield from measured(name, Setting(getattr(networks, name), batch, "cpu"), rounds, chosen)


def steps_cuda(rounds, batch, precisions, chosen, limit):
    for precision in precisions:
        allowed = precision == "tf32"
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed
        torch.backends.cudnn.benchmark = True
        setting = Setting(lambda: networks.vgg16(batch), batch, "cuda")
        share = limit / len(precisions)
        yield from measured("vgg16", setting, rounds, chosen, share, precision=precision)


# ------------------------------------------------------------------------------------------
# Decompositions and factors alone.


def decompositions(device, rounds, order):
    x = torch.randn(2 * order, order, device=device)
    factor = x.T @ x / len(x)
    basis = torch.linalg.eigh(factor).eigenvectors

    def timed(call):
        def job():
            call()
            if device == "cuda":
                torch.cuda.synchronize()

        return job

    jobs = {
        "product": timed(lambda: factor @ factor),
        "inverse by Cholesky": timed(
            lambda: torch.cholesky_inverse(torch.linalg.cholesky_ex(factor).L)
        ),
        "eigh": timed(lambda: torch.linalg.eigh(factor)),
        "one step of QR": timed(lambda: torch.linalg.qr(factor @ basis)),
    }
    seconds = interleaved(jobs, rounds=rounds)
    for label, each in seconds.items():
        yield {"order": order, "what": label, "ms": 1e3 * median(each)} | {
            "over a product": ratio(each, seconds["product"])
        }


def factors(device, rounds, batch):
    sizes = ((8, 32), (12, 32), (16, 32), (64, 32), (128, 16), (256, 8), (512, 4), (512, 2))
    for channels, size in sizes:
        layer = nn.Conv2d(channels, channels, 3, padding=1).to(device)
        x = torch.randn(batch, channels, size, size, device=device)
        matrix = torch.randn(9 * channels, 512, device=device)

        def timed(call):
            def job():
                with torch.no_grad():
                    call()
                if device == "cuda":
                    torch.cuda.synchronize()

            return job

        jobs = {
            "forward": timed(lambda layer=layer, x=x: layer(x)),
            "patches": timed(lambda layer=layer, x=x: _kfac_factors._from_patches(layer, x)),
            "shifts": timed(lambda layer=layer, x=x: _kfac_factors._correlations(layer, x)),
            "product": timed(lambda matrix=matrix: matrix @ matrix.T),
            "symmetric": timed(lambda matrix=matrix: _kfac_factors.gram(matrix)),
        }
        clock = time.perf_counter if device == "cuda" else time.process_time
        seconds = interleaved(jobs, rounds=rounds, clock=clock)
        yield {"channels": channels, "image": size, "batch": batch} | {
            "patches over shifts": ratio(seconds["patches"], seconds["shifts"]),
            "shifts over forward": ratio(seconds["shifts"], seconds["forward"]),
            "product over symmetric": ratio(seconds["product"], seconds["symmetric"]),
        }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--part", default="steps", choices=("steps", "eigh", "factors"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=None)
    parser.add_argument("--networks", nargs="+", default=("cnn", "mlp"), choices=("cnn", "mlp"))
    parser.add_argument("--precisions", nargs="+", default=("tf32", "float32"), help="on CUDA")
    parser.add_argument("--jobs", nargs="+", help="steps to measure, beside sgd; all by default")
    parser.add_argument("--order", type=int, default=4608)
    parser.add_argument("--limit", type=float, default=180.0, help="seconds on a CUDA device")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if args.part == "eigh":
        rows = decompositions(args.device, args.rounds, args.order)
    elif args.part == "factors":
        rows = factors(args.device, args.rounds, args.batch or 32)
    elif args.device == "cuda":
        rows = steps_cuda(args.rounds, args.batch or 128, args.precisions, args.jobs, args.limit)
    else:
        rows = steps_cpu(args.rounds, args.networks, args.batch or 32, args.jobs)
    suffix = "" if args.part == "steps" else f"_{args.part}"
    name = f"kfac_steps{suffix}{'_cuda' if args.device == 'cuda' else ''}.py"
    found = []
    # Written as they come: a run that is stopped has those of its finished parts.
    for _, group in groupby(rows, key=lambda row: (row.get("network"), row.get("precision"))):
        found += group
        write(name, found)


if __name__ == "__main__":
    main()
