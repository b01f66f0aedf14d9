"""Gaussian processes on real data: hyper-parameters learned from products with the kernel matrix.

Usage: python examples/gaussian_process.py [--quick] [--peers] [--size N] [--out FOLDER]

Two sets ship inside scikit-learn: 442 diabetes patients (ten measurements each, and how the illness
went on), and a photograph, of which a few thousand pixels are seen and the rest is to be guessed.
Output scale, noise and one length scale for each dimension maximise the marginal likelihood. Its
value, from block Krylov and conjugate gradients, and its gradient, from inverse roots, both have
error bars; the Cholesky factor of the dense matrix, which is the better choice where it fits, says
beside them what is true, and learns as well. Two minutes on one core. ``--peers`` does the same
with gpytorch, where it is installed.
"""

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from sklearn.datasets import load_diabetes, load_sample_image
from torch import Tensor

import ritz
from ritz.operators import KernelOperator
from ritz.spectra import backward_gradient, log_likelihood
from ritz.spectra._gradients import LowRankPreconditioner

RATE = 0.1


@dataclass
class Problem:
    """Points, what was measured there, and the same again to be tested on."""

    name: str
    kernel: str
    points: Tensor
    y: Tensor
    test_points: Tensor
    test_y: Tensor

    def operator(self, logs: dict[str, Tensor]) -> KernelOperator:
        given = {name: value.exp() for name, value in logs.items()}
        return KernelOperator(self.points, kernel=self.kernel, **given)


def diabetes() -> Problem:
    points, y = map(torch.tensor, load_diabetes(return_X_y=True))
    points, y = points / points.std(0), (y - y.mean()) / y.std()
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    first, rest = order[:342], order[342:]
    return Problem(
        "diabetes", "squared_exponential", points[first], y[first], points[rest], y[rest]
    )


def photograph(size: int) -> Problem:
    grey = torch.tensor(load_sample_image("china.jpg").copy(), dtype=torch.float64).mean(2)
    grey = grey[:400:4, :600:4]
    grid = torch.cartesian_prod(*(torch.arange(float(n), dtype=torch.float64) for n in grey.shape))
    points, y = grid / 100, ((grey - grey.mean()) / grey.std()).reshape(-1)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    first, rest = order[:size], order[-1000:]
    return Problem("photograph", "matern32", points[first], y[first], points[rest], y[rest])


def learn(
    problem: Problem, num_steps: int, method: str
) -> tuple[dict[str, Tensor], list[dict[str, float]]]:
    """Adam on the logarithms of all parameters, with the same random vectors in every step."""
    scales = torch.full((problem.points.shape[1],), 1.0, dtype=torch.float64)
    start = {"lengthscale": scales, "outputscale": torch.tensor(1.0), "noise": torch.tensor(0.3)}
    logs = {name: value.double().log().requires_grad_() for name, value in start.items()}
    optimizer = torch.optim.Adam(logs.values(), lr=RATE)
    history = []
    for step in range(num_steps):
        begin = time.perf_counter()
        optimizer.zero_grad()
        op = problem.operator(logs)
        found = log_likelihood(op, problem.y, method=method, num_products=300)
        (-found.mean).backward()
        history.append(row(problem, op, found) | {"step": step})
        optimizer.step()
        history[-1]["seconds"] = time.perf_counter() - begin - history[-1].pop("judging")
    return {name: value.detach() for name, value in logs.items()}, history


def row(problem: Problem, op: KernelOperator, found: ritz.Estimate) -> dict[str, float]:
    """What was found, beside what is true, and how long that took."""
    begin = time.perf_counter()
    with torch.no_grad():
        exact = log_likelihood(op, problem.y, method="cholesky")
    slopes = backward_gradient(found)["lengthscale"]
    truncation = 0.0 if found.truncation is None else found.truncation.item()
    return {
        "ours": found.mean.item(),
        "bar": math.hypot(found.stderr.item(), truncation),
        "exact": exact.mean.item(),
        "noise": op.noise,
        "gradient bar": (slopes.stderr.norm() / slopes.mean.norm()).item(),
        "judging": time.perf_counter() - begin,
    }


def predict(op: KernelOperator, y: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of what would be measured at points, by conjugate gradients."""
    with torch.no_grad():
        cross = op.cross(points)
        inverse = LowRankPreconditioner(op, rank=200).inverse
        found = ritz.solve(op, torch.cat([y[:, None], cross], 1), rtol=1e-5, preconditioner=inverse)
    found.raise_if_failed()
    variance = op.outputscale + op.noise - (cross * found.x[:, 1:]).sum(0)
    return cross.T @ found.x[:, 0], variance


def report(problem: Problem, logs: dict[str, Tensor], history: list[dict[str, float]]) -> None:
    op = problem.operator(logs)
    print(f"\n{problem.name}: {op}")
    print(" step   log likelihood        exact   off by   gradient's bar    noise      s")
    for row in [*history[: -1 : max(1, len(history) // 6)], history[-1]]:
        off = (row["ours"] - row["exact"]) / row["bar"]
        print(
            f"{row['step']:5d} {row['ours']:10.2f} ± {row['bar']:5.2f} {row['exact']:10.2f} "
            f"{off:+5.1f} bars {row['gradient bar']:13.2%} {row['noise']:10.3f} "
            f"{row['seconds']:6.2f}"
        )
    assess("products", problem, op, total(history))


def total(history: list[dict[str, float]]) -> float:
    return sum(row["seconds"] for row in history)


def assess(name: str, problem: Problem, op: KernelOperator, seconds: float) -> None:
    mean, variance = predict(op, problem.y, problem.test_points)
    squares = (mean - problem.test_y).square()
    density = -0.5 * (squares / variance + torch.log(2 * math.pi * variance)).mean()
    likelihood = log_likelihood(op, problem.y, method="cholesky").mean
    scales = " ".join(f"{scale:.2f}" for scale in op.lengthscale.tolist())
    print(
        f"{name:>15}: log likelihood {likelihood:.2f}, test error {squares.mean().sqrt():.4f}, "
        f"test log density {density:+.4f}, {seconds:.1f} s of learning\n"
        f"{'':17}output scale {op.outputscale:.3f}, noise {op.noise:.4f}, length scales {scales}"
    )


def peer(problem: Problem, num_steps: int, max_cholesky: int) -> None:
    """The same model, start, optimiser and number of steps in gpytorch, with its defaults.

    Up to ``max_cholesky`` points it factors the matrix; by default 800.
    """
    import gpytorch

    class Model(gpytorch.models.ExactGP):
        def __init__(self, likelihood) -> None:
            super().__init__(problem.points, problem.y, likelihood)
            axes = problem.points.shape[1]
            inner = gpytorch.kernels.RBFKernel(ard_num_dims=axes)
            if problem.kernel == "matern32":
                inner = gpytorch.kernels.MaternKernel(nu=1.5, ard_num_dims=axes)
            inner.lengthscale = 1.0
            self.mean_module = gpytorch.means.ZeroMean()
            self.covar_module = gpytorch.kernels.ScaleKernel(inner)
            self.covar_module.outputscale = 1.0

        def forward(self, x):
            return gpytorch.distributions.MultivariateNormal(
                self.mean_module(x), self.covar_module(x)
            )

    torch.manual_seed(0)
    likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
    likelihood.noise = 0.3
    model = Model(likelihood).double().train()
    objective = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    begin = time.perf_counter()
    for _ in range(num_steps):
        optimizer.zero_grad()
        with gpytorch.settings.max_cholesky_size(max_cholesky):
            (-objective(model(problem.points), problem.y)).backward()
        optimizer.step()
    seconds = time.perf_counter() - begin
    op = KernelOperator(
        problem.points,
        kernel=problem.kernel,
        lengthscale=model.covar_module.base_kernel.lengthscale.detach()[0],
        outputscale=model.covar_module.outputscale.item(),
        noise=likelihood.noise.item(),
    )
    name = "gpytorch" + ("" if max_cholesky < len(problem.y) else ", dense")
    assess(name, problem, op, seconds)


def draw(histories: dict[str, list[dict[str, float]]], out: Path) -> None:
    figure, axes = ritz.plots.panels(1, len(histories), width=4.8, height=3.0)
    for ax, (name, history) in zip(axes, histories.items(), strict=True):
        steps = [row["step"] for row in history]
        bars = [4 * row["bar"] for row in history]
        ax.plot(steps, [row["exact"] for row in history], color="black", label="exact")
        ax.errorbar(
            steps,
            [row["ours"] for row in history],
            yerr=bars,
            fmt=".",
            label="sampled, four error bars",
        )
        ax.set_xlabel("step")
        ax.set_ylabel("log likelihood")
        ax.set_title(name, loc="left", fontsize="medium")
        ax.legend(frameon=False, loc="lower right")
    figure.savefig(out / "likelihood.png", dpi=120)


def main(num_steps: int, problems: list[Callable[[], Problem]], peers: bool, out: Path) -> None:
    torch.set_num_threads(1)
    out.mkdir(parents=True, exist_ok=True)
    histories = {}
    for make in problems:
        problem = make()
        logs, histories[problem.name] = learn(problem, num_steps, "krylov")
        report(problem, logs, histories[problem.name])
        dense, history = learn(problem, num_steps, "cholesky")
        assess("dense", problem, problem.operator(dense), total(history))
        for max_cholesky in (800, len(problem.y)) if peers else ():
            peer(problem, num_steps, max_cholesky)
        found = log_likelihood(problem.operator(logs), problem.y, method="krylov")
        ritz.save(replace(found, mean=found.mean.detach()), out / f"{problem.name}.safetensors")
    draw(histories, out)
    print("\nwritten:", *sorted(map(str, out.iterdir())))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--size", type=int, default=2000, help="pixels of the photograph seen")
    parser.add_argument("--out", type=Path, default=Path("out/gaussian_process"))
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.size = 300
    main(
        3 if arguments.quick else 40,
        [diabetes, lambda: photograph(arguments.size)],
        arguments.peers,
        arguments.out,
    )
