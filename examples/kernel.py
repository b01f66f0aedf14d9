"""A kernel matrix that is never stored: log determinant, likelihood and learned hyper-parameters.

Usage: python examples/kernel.py [--quick] [--out FOLDER]

The data are the 442 diabetes patients that come with scikit-learn: ten measurements each, and how
the illness progressed a year later. A Gaussian process explains the second by the first. Its matrix
is small enough to be factored, so that every estimate can be compared with the exact value; the
same calls work where it is not. Takes about half a minute on one core.
"""

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_diabetes
from torch import Tensor

import ritz
from ritz.operators import KernelOperator
from ritz.spectra import log_likelihood


def diabetes() -> tuple[Tensor, Tensor]:
    points, y = map(torch.tensor, load_diabetes(return_X_y=True))
    return points / points.std(0), (y - y.mean()) / y.std()


def learn(points: Tensor, y: Tensor, num_steps: int) -> list[tuple[float, float, float]]:
    """Maximise the likelihood over one length scale per measurement, output scale and noise."""
    start = {"lengthscale": torch.full((10,), 3.0), "outputscale": torch.tensor(1.0)}
    start |= {"noise": torch.tensor(0.3)}
    logs = {name: value.double().log().requires_grad_() for name, value in start.items()}
    optimizer = torch.optim.Adam(logs.values(), lr=0.1)
    history = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        op = KernelOperator(points, **{name: value.exp() for name, value in logs.items()})
        # The mean of the estimate has a gradient with respect to the parameters of the kernel.
        estimate = log_likelihood(op, y, method="krylov", num_products=200)
        (-estimate.mean).backward()
        optimizer.step()
        with torch.no_grad():
            exact = log_likelihood(op, y, method="cholesky").mean
        history.append((estimate.mean.item(), float(estimate.error()), exact.item()))
    scales = ", ".join(f"{value:.1f}" for value in logs["lengthscale"].exp().tolist())
    print(f"length scales after {num_steps} steps: {scales}; noise {logs['noise'].exp():.3f}")
    return history


def main(quick: bool, out: Path) -> None:
    points, y = diabetes()
    op = KernelOperator(points, lengthscale=3.0, noise=0.3)

    # The exact value from the whole matrix, then four methods that use products alone.
    print(f"{'exact':9} {ritz.logdet(op.dense())}")
    for method in ("krylov", "lanczos", "maxent", "chebyshev"):
        estimate = ritz.logdet(op, method=method, num_products=300)
        print(f"{method:9} {estimate}")

    history = learn(points, y, 3 if quick else 30)
    for step in sorted({0, len(history) // 2, len(history) - 1}):
        mean, error, exact = history[step]
        print(f"step {step:2}: log likelihood {mean:.2f} ± {error:.2f}, exactly {exact:.2f}")

    out.mkdir(parents=True, exist_ok=True)
    ritz.save(ritz.logdet(op, method="krylov", num_products=300), out / "logdet.safetensors")
    figure, (ax,) = ritz.plots.panels()
    means, errors, exact = zip(*history, strict=True)
    ax.plot(exact, color="black", label="exact")
    ax.errorbar(range(len(means)), means, yerr=errors, fmt=".", label="estimate")
    ax.set(xlabel="step", ylabel="log likelihood")
    ax.legend(frameon=False)
    figure.savefig(out / "likelihood.png", dpi=150)
    print("written:", *sorted(map(str, out.iterdir())))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="three steps of learning")
    parser.add_argument("--out", type=Path, default=Path("out/kernel"))
    arguments = parser.parse_args()
    main(arguments.quick, arguments.out)
