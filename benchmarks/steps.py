"""A Lanczos step, and an exact trace, over one gradient of the same samples.

``step`` is a run of 200 steps on the Hessian of the MLP with full re-orthogonalisation, divided by
200, compared with hessian-eigenthings. ``trace`` is the exact trace of the Gauss-Newton matrix from
the structure of the network.
"""

import argparse
import warnings

import torch
from networks import BATCH
from products import Setting
from timing import interleaved, median, ratio, write

import ritz


def step_jobs(s, num_steps):
    import hessian_eigenthings as he
    from torch.nn.functional import cross_entropy

    op = ritz.hessian(s.risk)
    theirs = he.HessianOperator(s.model, s.batches, he.supervised_loss(cross_entropy))
    return {
        "step, ritz": lambda: ritz.lanczos(op, num_steps=num_steps, start=s.vector),
        "step, hessian-eigenthings": lambda: he.lanczos_tridiagonal(theirs, s.vector, num_steps),
    }


def rows(name, rounds, num_steps):
    s = Setting.of(name, "cpu", BATCH)
    jobs = {"gradient": s.summed(s.gradient)}
    jobs["trace of the GGN, exact"] = lambda: ritz.trace(ritz.ggn(s.risk), method="exact")
    if name == "mlp":
        jobs |= step_jobs(s, num_steps)
    seconds = interleaved(jobs, rounds=rounds)
    for label in jobs:
        each = [t / (num_steps if label.startswith("step") else 1) for t in seconds[label]]
        yield {
            "network": name,
            "what": label,
            "ms": 1e3 * median(each),
            "over gradient": ratio(each, seconds["gradient"]),
        }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    write(__file__, [row for name in ("mlp", "cnn") for row in rows(name, args.rounds, args.steps)])


if __name__ == "__main__":
    main()
