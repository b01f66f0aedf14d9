"""Whole spectra of large networks: seconds per Lanczos step, peak memory, and the spectra.

``vgg16``: Hessian and Gauss-Newton matrix of a VGG-16 (15,291,300 parameters) over the first 45,000
images of CIFAR-100, after some training steps on them. ``gpt``: a decoder with 124 million
parameters and default attention, after some training steps on WikiText-2, over 32 segments of 1024
words. Needs a CUDA device. The spectra are stored for ``docs/pictures.py``.
"""

import argparse
import gzip
import time
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from timing import write
from torch import nn
from torch.nn.functional import cross_entropy

import ritz

KEYS = ("network", "matrix", "precision", "steps", "s a step", "peak GiB", "setup s", "plan")


def images(path, num_samples):
    """Return CIFAR-100 from ``images`` (n, 32, 32, 3) and ``labels`` in an npz file, normalised."""
    with np.load(path) as file:
        x = torch.from_numpy(file["images"][:num_samples]).permute(0, 3, 1, 2)
        y = torch.from_numpy(file["labels"][:num_samples]).long()
    x = x.float().div_(255)
    return (x - x.mean((0, 2, 3), keepdim=True)) / x.std((0, 2, 3), keepdim=True), y


def words(path, length=1024, pieces=32, vocabulary=50257):
    """Return segments of a gzipped text as word numbers by frequency, and the next words."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        text = file.read().replace("\n", " <eos> ").split()
    known = {word: i for i, (word, _) in enumerate(Counter(text).most_common(vocabulary))}
    ids = torch.tensor([known[word] for word in text])
    ids = ids[: len(ids) // (length + 1) * (length + 1)].view(-1, length + 1)
    return ids[:, :-1], ids[:, 1:], pieces


def train(model, x, y, optimizer, *, steps, batch):
    generator = torch.Generator().manual_seed(0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=optimizer.param_groups[0]["lr"], total_steps=steps
    )
    model.train()
    for step in range(steps):
        pick = torch.randint(len(x), (batch,), generator=generator).to(x.device)
        loss = cross_entropy(model(x[pick]), y[pick])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % max(1, steps // 5) == 0 or step == steps - 1:
            print(f"  step {step}: loss {float(loss.detach()):.3f}", flush=True)
    return model.eval()


def measured(name, risk, kind, *, steps, precision, out, compile):
    """Run Lanczos; time the first product, with tracing and compilation, separately."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    op = getattr(ritz, kind)(risk, compile=compile)
    begin = time.perf_counter()
    op @ torch.ones(op.shape[0], dtype=op.dtype, device=op.device)
    torch.cuda.synchronize()
    setup = time.perf_counter() - begin
    begin = time.perf_counter()
    generator = torch.Generator().manual_seed(0)
    spectrum = ritz.lanczos(op, num_steps=steps, generator=generator)
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - begin) / steps
    if out and steps >= 20:
        ritz.save(spectrum, out / f"{name}_{kind}.ritz")
    peak = torch.cuda.max_memory_allocated() / 2**30
    plan = op.products.plan
    row = (name, kind, precision, steps, seconds, peak, setup, plan)
    print(row, flush=True)
    print(spectrum, flush=True)
    return dict(zip(KEYS, row, strict=True))


def vgg16(args):
    x, y = images(args.data, args.samples)
    x, y = x.to(args.device), y.to(args.device)
    torch.manual_seed(0)
    model = ritz.models.create("vgg16", device=args.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    train(model, x, y, optimizer, steps=args.training, batch=256)
    batches = list(zip(x.split(args.batch), y.split(args.batch), strict=True))
    for precision in args.precisions:
        steps = args.steps if precision == "tf32" else 5
        risk = ritz.Risk(model, cross_entropy, batches, precision=precision)
        print(f"{risk!r}: loss {risk.loss():.4f}", flush=True)
        for kind in args.matrices:
            if time.monotonic() > args.deadline:
                print(f"no time left for {precision} {kind}", flush=True)
                continue
            compile = args.compile and precision == "tf32"
            yield measured("vgg16", risk, kind, steps=steps, precision=precision, out=args.out,
                           compile=compile)  # fmt: skip


def gpt(args):
    x, y, pieces = words(args.data)
    x, y = x.to(args.device), y.to(args.device)
    torch.manual_seed(0)
    model = ritz.models.create("gpt2", device=args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, weight_decay=0.1)
    train(model, x, y, optimizer, steps=args.training, batch=8)
    optimizer.zero_grad()
    batches = list(zip(x[:pieces].split(args.batch), y[:pieces].split(args.batch), strict=True))
    risk = ritz.Risk(model, cross_entropy, batches, precision="tf32")
    print(f"{risk!r}: loss {risk.loss():.4f}", flush=True)
    for kind in args.matrices:
        yield measured("gpt", risk, kind, steps=args.steps, precision="tf32", out=args.out,
                       compile=args.compile)  # fmt: skip


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("network", nargs="?", choices=("vgg16", "gpt"))
    parser.add_argument("--data", type=Path, help="npz file of images, or gzipped text")
    parser.add_argument("--samples", type=int, default=45_000)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--training", type=int, default=3000, help="training steps")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--precisions", nargs="+", default=["tf32", "float32", "float64"])
    parser.add_argument("--matrices", nargs="+", default=["hessian", "ggn"])
    parser.add_argument("--name", help="name of the file of results")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="start no further run after this many seconds"
    )
    parser.add_argument("--out", type=Path, help="folder for the spectra")
    args = parser.parse_args()
    if args.network is None or not torch.cuda.is_available():
        print("nothing measured: it takes a network, data and a CUDA device; see --help")
        return
    args.device = "cuda"
    args.deadline = time.monotonic() + args.seconds
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    rows = []
    for row in {"vgg16": vgg16, "gpt": gpt}[args.network](args):
        rows.append(row)
        write(args.name or f"spectra_{args.network}", rows)


if __name__ == "__main__":
    main()
