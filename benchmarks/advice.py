"""Advice on problems with known answers: coverage of its intervals, its cost and its time.

``python benchmarks/advice.py`` writes ``benchmarks/results/advice.json``.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from timing import RESULTS
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

from ritz import advise, data, models
from ritz.curvature import Risk, hessian
from ritz.measures import Advice, curvature_ratio, least_damping, stable_rate

SIZES = (4, 16, 64)
LEVELS = (0.95, 0.999)
# Batches drawn for the true means, with a control variate; spreads have an error of 1 %.
DRAWS = 10_000


class Quadratic(nn.Module):
    """Losses ``w'H_i w / 2 + b_i'w`` with matrices and slopes of every sample as inputs."""

    def __init__(self, start: Tensor) -> None:
        super().__init__()
        self.w = nn.Parameter(start)

    def forward(self, matrices: Tensor, slopes: Tensor) -> Tensor:
        """Return the losses."""
        return 0.5 * torch.einsum("nij,i,j->n", matrices, self.w, self.w) + slopes @ self.w


def problem(seed: int, count: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return matrices ``(N, P, P)``, slopes ``(N, P)`` and a point, with outliers and noise."""
    rng = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=rng, dtype=torch.float64)  # noqa: E731
    values = torch.cat([torch.tensor([6.0, 3.0, 2.0]), torch.linspace(0.0, 0.5, size - 3)])
    basis = torch.linalg.qr(normal(size, size))[0]
    mean = (basis * values.double()) @ basis.T
    # Noise of rank one along the outliers, as networks have it, and homogeneous noise.
    spikes = normal(count, 3) @ basis[:, :3].T + 0.3 * normal(count, size)
    rough = normal(count, size, size)
    noise = torch.einsum("ni,nj->nij", spikes, spikes) + 0.05 * (rough + rough.mT)
    noise -= noise.mean(0)
    return mean + noise, normal(count, size), 0.3 * normal(size)


def truth(matrices: Tensor, slopes: Tensor, point: Tensor, seed: int) -> dict[str, Tensor]:
    """Return the figures of an advice by brute force."""
    count, size = matrices.shape[:2]
    whole = matrices.mean(0)
    values, vectors = torch.linalg.eigh(whole)
    top, first = values[-1], vectors[:, -1]
    moved = matrices @ first - whole @ first
    along = moved.square().sum(1).mean()
    variance = (matrices - whole).square().sum((1, 2)).mean() / size
    rng = torch.Generator().manual_seed(10_000 + seed)
    means, spreads, overlaps = [], [], []
    for batch in SIZES:
        weights = torch.zeros(DRAWS, count, dtype=torch.float64)
        rows = torch.rand(DRAWS, count, generator=rng).argsort(1)[:, :batch]
        weights.scatter_(1, rows, 1 / batch)
        batches = torch.einsum("dn,nij->dij", weights, matrices)
        tops, vs = torch.linalg.eigh(batches)
        # phi'H_b phi varies alike, and its mean is lambda_1: the difference has a small error.
        fixed = torch.einsum("dij,i,j->d", batches, first, first)
        means.append(top + (tops[:, -1] - fixed).mean())
        spreads.append(tops[:, -1].std())
        overlaps.append((vs[:, :, -1] @ first).square().mean())
    mean, spread = torch.stack(means), torch.stack(spreads)
    sizes = torch.tensor(SIZES, dtype=torch.float64)
    share = (1 / sizes - 1 / count) * count / (count - 1)
    gradients = matrices @ point + slopes
    g = gradients.mean(0)
    covariance = (gradients - g).T @ (gradients - g) / count
    damping = 0.5 * torch.minimum(top.expand(3), along * share / top)
    papers = [least_damping(values[values > 0], variance=variance * x) for x in share]
    b = torch.stack([along, variance]) / top**2
    y = along / top**2 / sizes * count / (count - 1)
    return {
        "lambda_max": top,
        "variance": variance,
        "along": along,
        "value": mean,
        "spread": spread,
        "overlap": torch.stack(overlaps),
        "edge": stable_rate(mean),
        "rate": stable_rate(mean + 2 * spread),
        "damping": damping,
        "damping_papers": torch.stack(papers),
        # From each size to the next by the true means, and at the last one by the model.
        "exponent": torch.cat(
            [
                stable_rate(mean).log().diff() / sizes.log().diff(),
                (y / (1 + along / top**2 * share))[-1:],
            ]
        ),
        "changes": count * b / (count - 1 + b),
        "gradient variance": covariance.trace(),
        "along the gradient": g @ whole @ g / (g @ g),
        "simple": covariance.trace() / (g @ g),
        "curved": (whole @ covariance).trace() / (g @ whole @ g),
        "sharpness": g @ whole @ g / (g @ g),
        "ratio": curvature_ratio(top, damping),
    }


def figures(advice: Advice) -> dict[str, Any]:
    """Return the printed figures of an advice by the names of :func:`truth`."""
    p, noise, best = advice.prediction, advice.noise, advice.prediction.best
    return {
        "lambda_max": p.lambda_max,
        "variance": p.variance,
        "along": p.along,
        "value": best.value,
        "spread": best.spread,
        "overlap": best.overlap,
        "edge": advice.edge,
        "rate": advice.rate,
        "damping": advice.damping,
        "damping_papers": advice.damping_papers,
        "exponent": advice.exponent,
        "changes": advice.changes_at,
        "gradient variance": noise.variance,
        "along the gradient": noise.along,
        "simple": noise.simple,
        "curved": noise.curved,
        "sharpness": advice.sharpness,
    }


def coverage(num_seeds: int, count: int, size: int) -> dict[str, Any]:
    """Return the shares of figures inside of their intervals, by figure and in all."""
    inside: dict[str, list[list[bool]]] = {}
    for seed in range(num_seeds):
        matrices, slopes, point = problem(seed, count, size)
        exact = truth(matrices, slopes, point, seed)
        model = Quadratic(point)
        risk = Risk(
            model,
            lambda outputs, target: outputs.mean(),
            [(matrices, slopes, slopes)],
            freeze=True,
        )
        advice = advise(risk, batch_sizes=SIZES, generator=torch.Generator().manual_seed(seed))
        for name, estimate in figures(advice).items():
            true = exact[name]
            for level in LEVELS:
                # 1e-9: roundoff of the brute force
                error = estimate.error(level) + 1e-9 * true.abs().max()
                mean = estimate.mean[: len(true)] if true.ndim else estimate.mean
                error = error[: len(true)] if true.ndim else error
                hits = ((mean - true).abs() <= error).reshape(-1)
                rows = inside.setdefault(name, [[] for _ in LEVELS])
                rows[LEVELS.index(level)] += hits.tolist()
        print(f"seed {seed}", flush=True)
    shares = {name: [sum(hits) / len(hits) for hits in rows] for name, rows in inside.items()}
    total = [
        sum(sum(rows[k]) for rows in inside.values())
        / sum(len(rows[k]) for rows in inside.values())
        for k in range(len(LEVELS))
    ]
    return {"levels": LEVELS, "figures": shares, "all": total, "seeds": num_seeds,
            "samples": count, "parameters": size}  # fmt: skip


def networks() -> dict[str, Risk]:
    """Return an MLP, a CNN and a transformer with data."""
    images: Any = data.load("digits")
    train = images.train.tensors()
    rng = torch.Generator().manual_seed(0)
    tokens = torch.randint(65, (64, 33), generator=rng)
    torch.manual_seed(0)
    return {
        "mlp": Risk(
            models.create("mlp", input_shape=(1, 8, 8), hidden=(64,)), cross_entropy, train
        ),
        "cnn": Risk(_cnn(), cross_entropy, train),
        "transformer": Risk(
            _Transformer(), lambda out, target: cross_entropy(out.flatten(0, 1), target.flatten()),
            (tokens[:, :-1], tokens[:, 1:]),
        ),
    }  # fmt: skip


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


class _Transformer(nn.Module):
    """One decoder layer of width 32 on 65 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(65, 32)
        self.layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(32, 65)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        hidden: Tensor = self.layer(self.tokens(tokens), src_mask=mask, is_causal=True)
        logits: Tensor = self.head(hidden)
        return logits


def cost(risk: Risk, repeats: int) -> dict[str, float]:
    """Return the cost of an advice with four batch sizes, in gradients, and its time."""
    op, vector = hessian(risk), torch.ones(risk.space.size, 1)
    op.matmat(vector)  # traces the product
    gradient, product = operations(risk.gradient), operations(lambda: op.matmat(vector))
    count = risk.num_samples
    sizes = [max(1, count // 64), count // 16, count // 4, count]
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        advice = advise(risk, batch_sizes=sizes)
        seconds.append(time.process_time() - start)
    products = 40 + advice.prediction.cost + advice.noise.num_products
    return {
        "products": products,
        "operations of a product in those of a gradient": product / gradient,
        # A loss is a third of a gradient; critical sharpness and checks take twelve.
        "gradients": products * product / gradient + advice.noise.num_gradients + 12 / 3,
        "as printed": advice.cost,
        "CPU seconds": median(seconds),
        "parameters": risk.space.size,
        "samples": count,
    }


def operations(call: Callable[[], Any]) -> int:
    """Return the floating-point operations of a call."""
    with FlopCounterMode(display=False) as counter:
        call()
    return int(counter.get_total_flops())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=30)
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--size", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS / "advice.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    result = {
        "cost": {name: cost(risk, options.repeats) for name, risk in networks().items()},
        "coverage": coverage(options.seeds, options.samples, options.size),
        "torch": torch.__version__,
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
