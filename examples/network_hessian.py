"""The Hessian of a small network: its spectrum, its largest eigenpairs and its trace.

Usage: python examples/network_hessian.py [--quick] [--out FOLDER]

Trains an MLP on the 1,280 handwritten digits that come with scikit-learn, then measures the
curvature of the training loss at the weights it has reached. Takes about half a minute on one core.
"""

import argparse
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

import ritz


def main(quick: bool, out: Path) -> None:
    data = ritz.data.load("digits")
    generator = torch.Generator().manual_seed(0)
    model = ritz.models.create(
        "mlp",
        input_shape=data.shape,
        num_classes=data.num_classes,
        hidden=(32,),
        generator=generator,
    )
    training = ritz.training.fit(
        model,
        data,
        num_epochs=3 if quick else 15,
        batch_size=64,
        optimizer_settings={"lr": 0.05},
        progress=True,
    )
    print(training)

    # A risk is the mean loss of a model on fixed data, at the weights the model has now.
    risk = ritz.Risk(model, cross_entropy, data.train.tensors())
    hessian = ritz.hessian(risk)

    # The whole spectrum: one product per step. Most of the Ritz values stand for many eigenvalues.
    spectrum = ritz.lanczos(hessian, num_steps=20 if quick else 80, progress=True)
    print(spectrum)

    # The largest eigenvalues with their eigenvectors, to a relative tolerance.
    pairs = ritz.eigenpairs(hessian, largest=3, rtol=1e-2 if quick else 1e-4)
    print(pairs)

    # The trace, the sum of all eigenvalues, from random probes: an estimate with a standard error.
    # By default ritz uses the structure of this network, whose trace is then exact.
    sampled = ritz.trace(hessian, method="hutchinson", num_probes=8 if quick else 64)
    print(f"trace: {sampled.mean:.3f} ± {sampled.stderr:.3f} from {sampled.num_products} products")
    print(f"trace: {ritz.trace(hessian).mean:.3f} exactly")

    out.mkdir(parents=True, exist_ok=True)
    ritz.save(spectrum, out / "spectrum.safetensors")
    ritz.plots.spectrum(spectrum).figure.savefig(out / "spectrum.png", dpi=150)
    print("written:", *sorted(map(str, out.iterdir())))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few seconds, rough numbers")
    parser.add_argument("--out", type=Path, default=Path("out/network_hessian"))
    arguments = parser.parse_args()
    main(arguments.quick, arguments.out)
