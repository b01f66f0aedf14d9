"""Laws and spiked models of `ritz.rmt` against sampled matrices.

Four tables: distances between laws and the eigenvalues of one matrix, fluctuations of the largest
eigenvalue against Tracy-Widom, spikes over a grid through their threshold, and noise that is not
homogeneous. `--tables` and `--sizes` choose parts, which replace those of the stored results.
"""

import argparse
import json
import math

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator, eigsh
from timing import RESULTS, machine, table

from ritz import rmt
from ritz.testing import wigner, wishart

# Spikes over their threshold, and draws by order: the error of a mean falls as 1 / (n draws)^(1/2).
STRENGTHS = (0.5, 0.8, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0)
DRAWS = {500: 40, 1000: 20, 2000: 8, 4000: 12}  # and 40 of any other order
RATIO = 0.5


def seeded(seed):
    """Return a generator of a seed."""
    return torch.Generator().manual_seed(seed)


def distance(law, values):
    """Return the largest difference between the distribution functions of a law and of values."""
    levels = torch.arange(len(values) + 1, dtype=torch.float64) / len(values)
    cdf = law.cdf(values.sort().values)
    # Steps of the values before and after each; at an atom only the latter.
    before, after = (cdf - levels[:-1]).abs(), (cdf - levels[1:]).abs()
    atom = torch.isclose(values.sort().values, torch.zeros(1).double(), atol=1e-9)
    return float(torch.where(atom, 0.0, torch.maximum(before, after)).max())


def law_rows(sizes):
    """Return distances of laws from the spectra of sampled matrices."""
    kinds = {
        "semicircle": rmt.Semicircle(),
        "Marchenko-Pastur, q = 1/2": rmt.MarchenkoPastur(ratio=0.5),
        "Marchenko-Pastur, q = 2": rmt.MarchenkoPastur(ratio=2.0),
        "semicircle + normal": rmt.free_sum(rmt.Semicircle(), rmt.Normal()),
        "product of two Marchenko-Pastur": rmt.free_product(
            rmt.MarchenkoPastur(ratio=0.5), rmt.MarchenkoPastur(ratio=0.25)
        ),
        "covariances of three variances": rmt.generalized_marchenko_pastur(
            torch.tensor([1.0, 3.0, 10.0]), ratio=0.1
        ),
    }
    rows = []
    for n in sizes:
        for i, (name, law) in enumerate(kinds.items()):
            values = torch.linalg.eigvalsh(drawn(name, n, seeded(100 + i)))
            far = distance(law, values)
            rows.append({"law": name, "n": n, "distance": far, "times n": far * n})
            print(".", end="", flush=True)
    return rows


def drawn(name, n, generator):
    """Return one matrix of order ``n`` that follows a law."""
    if name == "semicircle":
        return wigner(n, generator=generator).matrix
    if name.startswith("Marchenko"):
        return wishart(n, n * 2 if name.endswith("1/2") else n // 2, generator=generator).matrix
    if name == "semicircle + normal":
        # Quantiles instead of draws: draws would differ from the law by n^(-1/2).
        levels = (torch.arange(n, dtype=torch.float64) + 0.5) / n
        return wigner(n, generator=generator).matrix + torch.diag(rmt.Normal().ppf(levels))
    if name.startswith("product"):
        factor = torch.linalg.cholesky(wishart(n, 4 * n, generator=generator).matrix)
        return factor.T @ wishart(n, 2 * n, generator=generator).matrix @ factor
    samples = torch.randn(n, 10 * n, generator=generator, dtype=torch.float64)
    variances = torch.tensor([1.0, 3.0, 10.0], dtype=torch.float64).repeat(n // 3 + 1)[:n]
    samples *= variances.sqrt()[:, None]
    return samples @ samples.T / (10 * n)


def edge_rows(sizes, draws):
    """Return distances of centred largest eigenvalues from Tracy-Widom, both of its kinds."""
    rows = []
    for n in sizes:
        for beta in (1, 2):
            generator, tops = seeded(beta), []
            for _ in range(draws):
                matrix = wigner(n, generator=generator).matrix
                if beta == 2:
                    # Hermitian with entries of variance 1/n
                    skew = torch.randn(n, n, generator=generator, dtype=torch.float64)
                    matrix = matrix / 2**0.5 + 1j * (skew - skew.T) / (4 * n) ** 0.5
                tops.append(torch.linalg.eigvalsh(matrix)[-1])
            # Johnstone and Ma (2012) centre real matrices so that the error falls as n^(-2/3).
            centre, scale = (
                (2, n) if beta == 2 else (2 * (1 - 0.5 / n) ** 0.5, n * (1 - 1 / n) ** 0.25)
            )
            scores = scale ** (2 / 3) * (torch.stack(tops) - centre)
            far = distance(rmt.TracyWidom(beta=beta), scores)
            rows.append(
                {"beta": beta, "n": n, "draws": draws, "distance": far,
                 "noise (99 %)": 1.63 / draws**0.5, "mean": float(scores.mean()),
                 "mean of the law": rmt.TracyWidom(beta=beta).moment(1)}
            )  # fmt: skip
            print(".", end="", flush=True)
    return rows


def largest(matrix, start):
    """Return the largest eigenvalue of a matrix or operator, and the square of its first entry."""
    values, vectors = eigsh(matrix, k=1, which="LA", v0=start, tol=1e-9)
    return float(values[0]), float(vectors[0, 0] ** 2)


def spike_rows(sizes):
    """Return spikes of both models: predictions, and means and deviations of draws."""
    rows = []
    for n in sizes:
        for model in ("additive", "multiplicative"):
            samples = {strength: [] for strength in STRENGTHS}
            for seed in range(DRAWS.get(n, 40)):
                for strength, sample in spiked(model, n, seed):
                    samples[strength].append(sample)
            for strength, pairs in samples.items():
                rows.append(summary(model, n, strength, np.array(pairs)))
                print(".", end="", flush=True)
    return rows


def spiked(model, n, seed):
    """Yield the strength of a spike, and its eigenvalue and overlap in one draw of noise."""
    start = np.random.default_rng(seed).standard_normal(n)
    if model == "additive":
        noise = wigner(n, generator=seeded(seed)).matrix.numpy()
        corner = noise[0, 0]
        for strength in STRENGTHS:
            noise[0, 0] = corner + strength
            yield strength, largest(noise, start)
        return
    samples = torch.randn(n, int(n / RATIO), generator=seeded(seed), dtype=torch.float64)
    matrix = (samples @ samples.T * (RATIO / n)).numpy()
    for strength in STRENGTHS:
        # Scaling the first variable scales the first row and column of the covariance.
        scale = math.sqrt(1 + strength * math.sqrt(RATIO))

        def product(x, scale=scale):
            x = x.copy().reshape(-1)
            x[0] *= scale
            x = matrix @ x
            x[0] *= scale
            return x

        yield strength, largest(LinearOperator((n, n), matvec=product, dtype=np.float64), start)


def summary(model, n, strength, pairs):
    """Return the prediction for a spike beside the mean and deviation of draws."""
    if model == "additive":
        told = rmt.additive_spikes(strength, variance=1.0, size=n)
    else:
        value = 1 + strength * math.sqrt(RATIO)
        told = rmt.multiplicative_spikes(value, ratio=RATIO, size=n)
    mean, stddev = pairs.mean(0), pairs.std(0, ddof=1)
    error = stddev[0] / len(pairs) ** 0.5
    return {
        "model": model, "n": n, "spike over threshold": strength, "draws": len(pairs),
        "value": float(told.value), "mean": mean[0], "error of the mean": error,
        "stddev": float(told.stddev), "measured stddev": stddev[0],
        "overlap": float(told.overlap), "mean overlap": mean[1],
    }  # fmt: skip


def inhomogeneous_row(n, draws):
    """Return V(phi) against its mean over directions, for a sample covariance with one spike."""
    spike, q = 6.0, 0.1
    T, values, strengths, means = int(n / q), [], [], []
    for seed in range(draws):
        samples = torch.randn(n, T, generator=seeded(seed), dtype=torch.float64)
        samples[0] *= math.sqrt(spike)
        values.append(largest((samples @ samples.T / T).numpy(), np.ones(n))[0])
        # V(v) = mean |x|^2 (x'v)^2 - |C v|^2 of one sample, over T for the mean of T
        squares = samples.square().sum(0)
        strengths.append(float((squares * samples[0].square()).mean() - spike**2) / T)
        total = float(squares.square().mean()) - (spike**2 + n - 1)
        means.append(total / n / T)
    along, mean = np.mean(strengths), np.mean(means)
    told = rmt.additive_spikes(spike, variance=mean, along=along, centre=1.0)
    plain = rmt.additive_spikes(spike, variance=mean)
    return {
        "n": n, "draws": draws, "spike": spike, "V(phi)": along, "mean of V": mean,
        "by V(phi)": float(told.value), "by the mean": float(plain.value),
        "measured": float(np.mean(values)), "error": np.std(values, ddof=1) / draws**0.5,
        "overlap by V(phi)": float(told.overlap), "overlap by the mean": float(plain.overlap),
    }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    names = ["inhomogeneous", "edges", "laws", "spikes"]
    parser.add_argument("--tables", nargs="+", choices=names, default=names)
    parser.add_argument("--sizes", nargs="+", type=int, default=list(DRAWS), help="Orders.")
    parser.add_argument("--dry", action="store_true", help="Print, and write nothing.")
    options = parser.parse_args()
    tables = {
        "inhomogeneous": lambda: [inhomogeneous_row(400, 100)],
        "edges": lambda: edge_rows([100, 300], 800),
        "laws": lambda: law_rows(options.sizes),
        "spikes": lambda: spike_rows(options.sizes),
    }
    for name in options.tables:
        rows = tables[name]()
        print("\n" + table(rows), flush=True)
        if not options.dry:
            merge(name, rows)


def merge(name, rows):
    """Write the rows of a table, in place of those of the same orders."""
    path = RESULTS / "random_matrices.json"
    results = json.loads(path.read_text())["results"] if path.exists() else {}
    sizes = {row["n"] for row in rows}
    kept = [row for row in results.get(name, []) if row["n"] not in sizes]
    results[name] = sorted(kept + rows, key=lambda row: row["n"])
    text = json.dumps({"machine": machine(), "results": results}, indent=1)
    path.write_text(text + "\n")


if __name__ == "__main__":
    main()
