r"""Weight decay, accuracy and sharpness: Flatness is a False Friend, sections 2 and 4.

Logistic regression, a multi-layer perceptron and a convolutional network are trained with SGD and
several weight decays, by default on 45,000 images of MNIST; 5,000 are held out. For each network,
the study measures the accuracy, and the largest eigenvalue, the trace and the Frobenius norm of the
Hessian of the training loss without the weight decay.

The toy of section 2 is the loss :math:`L = \exp(-w_1 w_2 w_3)` of a deep linear network with one
input. On the line :math:`w_1 = w_2 = w_3 = w`, the loss falls and the weights grow with :math:`w`.
The Hessian has rank one only if its off-diagonal terms :math:`w_k L` vanish, so the study computes
the whole matrix.
"""

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from ritz import data, plots, training
from ritz._core.checks import check_count, check_range
from ritz._core.progress import Progress
from ritz.curvature import Risk, hessian
from ritz.plots._shared import style
from ritz.spectra import eigenpairs, frobenius_norm, trace
from ritz.studies._evidence import Evidence, signed, spread
from ritz.studies._protocol import (
    StatePath,
    StudyResult,
    check_minimums,
    compute_cells,
    record,
    seeded,
)
from ritz.studies._training import fit_whole, new_network

Network = Literal["logistic", "mlp", "lenet"]
# (10, 100) hidden units: the 9,960 parameters of the paper.
SETTINGS: dict[str, dict[str, Any]] = {"logistic": {}, "mlp": {"hidden": (10, 100)}, "lenet": {}}
TITLES = {"logistic": "logistic regression", "mlp": "MLP", "lenet": "LeNet"}
FIGURES = {"logistic": "Figure 2", "mlp": "Figure 3", "lenet": "Figure 4"}
# Validation accuracy in %, and measures of sharpness by weight decay, as section 4 has them: of 0,
# 1e-4 and 5e-4 for logistic regression, of the first and the last for the others. Empty if it says
# only that a measure grows; absent if it does not have the measure. The trace is the number of
# parameters, 7,850, times its mean eigenvalue. The unit of its Frobenius norms is not stated.
PAPER: dict[str, dict[str, tuple[float, ...]]] = {
    "logistic": {
        "accuracy": (93.48, 94.0, 94.08),
        "lambda_max": (12.26, 14.17, 15.84),
        "trace": (103.6, 120.1, 134.2),
    },
    "mlp": {"accuracy": (94.4, 96.7), "lambda_max": (), "Frobenius norm": (0.12, 0.16)},
    "lenet": {"accuracy": (), "lambda_max": (), "Frobenius norm": (0.01, 0.02)},
}
ELSEWHERE = {"lenet": "the paper has 9 layers on CIFAR-100 and 300 epochs"}
# What is measured of each network, in the order of the rows of a table.
MEASURES = (
    "accuracy",
    "test accuracy",
    "training accuracy",
    "training loss",
    "lambda_max",
    "lambda_max error",
    "trace",
    "trace error",
    "Frobenius norm",
    "Frobenius error",
    "weight norm",
)
TOY = (0.5, 1.0, 1.5, 2.0, 2.5)  # values of w, where the loss is 0.88 to 1.6e-7


@record
class Config:
    """Networks, data and training.

    Attributes:
        networks: Networks.
        decays: Weight decays of SGD.
        num_epochs: Epochs of each network.
        dataset: Data set; ``digits`` is for a test without files.
        num_train: Training images.
        num_validation: Images that are held out.
        measured: Training images from which the Hessian is computed.
        lr: Learning rate at the start of the linear schedule.
        batch_size: Batch size.
        num_seeds: Runs of each network and weight decay.
        seed: Run ``i`` has the seed ``seed + i``.
        data: Folder of the data set. Defaults to the environment variable ``RITZ_DATA``.
    """

    networks: tuple[Network, ...] = ("logistic", "mlp", "lenet")
    decays: tuple[float, ...] = (0.0, 1e-4, 5e-4)
    num_epochs: tuple[int, ...] = (200, 50, 20)
    dataset: Literal["mnist", "cifar100", "digits"] = "mnist"
    num_train: int = 45_000
    num_validation: int = 5_000
    measured: int = 10_000
    lr: float = 0.03
    batch_size: int = 128
    num_seeds: int = 5
    seed: int = 0
    data: str | None = None

    def __post_init__(self) -> None:
        check_minimums(
            self, num_epochs=1, num_validation=10, measured=10, num_seeds=1, seed=0, lr=0.0
        )
        check_count("num_train", self.num_train, low=10)
        check_count("measured", self.measured, high=self.num_train)
        for decay in self.decays:
            check_range("decays", decay, low=0.0)
        if len(self.num_epochs) != len(self.networks):
            raise ValueError(
                f"num_epochs must have one number for each of {len(self.networks)} networks, got "
                f"{len(self.num_epochs)}"
            )


SIZES = {
    "smoke": Config(
        dataset="digits",
        networks=("logistic", "mlp"), decays=(0.0, 5e-4), num_epochs=(2, 2), num_train=500,
        num_validation=100, measured=200, num_seeds=2,
    ),
    "paper": Config(num_epochs=(1000, 50, 50), measured=45_000),
}  # fmt: skip


@record
class Result(StudyResult[Config]):
    """Accuracy and curvature of every network.

    Attributes:
        tables: By network, ``(measures, decays, num_seeds)`` in the order of ``MEASURES``.
        sizes: Number of parameters by network.
        toy: Loss, gradient norm, largest eigenvalue, trace and smallest eigenvalue of the toy,
            ``(5, weights)``.
    """

    tables: dict[str, Tensor]
    sizes: dict[str, int]
    toy: Tensor

    def row(self, network: str, measure: str) -> Tensor:
        """Return a measure ``(decays, num_seeds)`` of a network."""
        return self.tables[network][MEASURES.index(measure)]

    def __str__(self) -> str:
        c = self.config
        lines = [
            f"{c.dataset}, {c.num_train:,} training images, SGD with learning rate {c.lr} and "
            f"momentum 0.9; mean over {c.num_seeds} seeds ± standard error"
        ]
        for network, epochs in zip(c.networks, c.num_epochs, strict=True):
            title = f"{TITLES[network]}, {self.sizes[network]:,} parameters, {epochs} epochs"
            lines.append(f"{title:44}" + "".join(f"{decay:>20g}" for decay in c.decays))
            for measure in MEASURES:
                if not measure.endswith("error"):
                    cells = [f"{spread(values):>20}" for values in self.row(network, measure)]
                    lines.append(f"  {measure:42}" + "".join(cells))
        lines.append(f"{'toy exp(-w^3)':30}" + "".join(f"{f'w = {w}':>12}" for w in TOY))
        names = ("loss", "gradient norm", "largest eigenvalue", "trace", "smallest eigenvalue")
        for name, values in zip(names, self.toy, strict=True):
            lines.append(f"  {name:28}" + "".join(f"{value:>12.3g}" for value in values))
        return "\n".join(lines)


def run(config: Config, *, progress: bool | Progress = False, state: StatePath = None) -> Result:
    """Return accuracy and curvature of every network, weight decay and seed."""
    images: Any = data.load(config.dataset, data_dir=config.data, validation=config.num_validation)
    # A cell has what _train takes after the images.
    cells = {
        f"{network} {decay:g} {seed}": (network, epochs, decay, seed)
        for network, epochs in zip(config.networks, config.num_epochs, strict=True)
        for seed in range(config.seed, config.seed + config.num_seeds)
        for decay in config.decays
    }
    scores = compute_cells(
        lambda cell: _train(config, images, *cell),
        cells,
        "networks",
        config=config,
        state=state,
        progress=progress,
    )
    columns = list(scores.values())
    # One column per network, seed and decay, in this order.
    shape = (len(config.networks), config.num_seeds, len(config.decays), len(MEASURES))
    tables = torch.stack(columns).view(shape).permute(0, 3, 2, 1).contiguous()
    return Result(
        config=config,
        tables=dict(zip(config.networks, tables, strict=True)),
        sizes={name: _size(_network(name, images, config.seed)) for name in config.networks},
        toy=torch.stack([_toy(w) for w in TOY], 1),
    )


def figure(result: Result) -> style.Figure:
    """Draw accuracy over the largest eigenvalue, one point per run, one panel per network."""
    networks = result.config.networks
    drawing, axes = plots.panels(1, len(networks), width=3.4, height=3.0)
    for axis, network in zip(axes, networks, strict=True):
        sharpness, accuracy = result.row(network, "lambda_max"), result.row(network, "accuracy")
        # One point per run, one colour per decay.
        for decay, x, y in zip(result.config.decays, sharpness, accuracy, strict=True):
            axis.scatter(x, 100 * y, s=18, label=f"weight decay {decay:g}")
        label = "largest eigenvalue of the Hessian"
        style.finish(axis, label, "validation accuracy (%)", TITLES[network])
    style.share_legend(drawing)
    return drawing


def evidence(result: Result) -> Iterator[Evidence]:
    """Yield the published figures beside ours."""
    for network in result.config.networks:
        for measure in ("accuracy", "lambda_max", "Frobenius norm", "trace"):
            values = result.row(network, measure)
            scale = 100 if measure == "accuracy" else 1
            known, note = measure in PAPER[network], ELSEWHERE.get(network, "")
            numbers = ", ".join(map(str, PAPER[network].get(measure, ())))
            published = f"grows: {numbers}" if numbers else "grows"
            # Paired: each seed has the same split and initial weights.
            judged = signed(values[-1] - values[0], 1, note=note)
            yield Evidence(
                paper="FLAT",
                where=f"Section 4, {FIGURES[network]}",
                what=f"{TITLES[network]}: {measure} by weight decay",
                published=published if known else "-",
                measured=", ".join(spread(scale * cell) for cell in values),
                **(judged if known else {"verdict": "extends", "why": note}),
            )
    loss, gradient, largest, trace, _ = result.toy
    # Polynomial times exponential: from w = 1.5 on, the third of TOY, the exponential wins.
    falls = all(bool((x.diff()[2:] < 0).all()) for x in (loss, gradient, largest, trace))
    yield Evidence(
        paper="FLAT",
        where="Section 2, equations 1-3",
        what="deep linear network: gradient, lambda_max and trace fall with the loss",
        published="yes, once the weights are large",
        measured="yes" if falls else "no",
        verdict="agrees" if falls else "differs",
        why="equation 2 lacks the off-diagonal terms; the whole Hessian is used here",
    )


def setting(result: Result) -> str:
    """Return data, weight decays and runs."""
    c = result.config
    decays = ", ".join(f"{decay:g}" for decay in c.decays)
    return (
        f"{c.num_train:,} images of {c.dataset}, weight decays {decays}, epochs of the networks "
        f"{', '.join(map(str, c.num_epochs))}, {c.num_seeds} seeds."
    )


def _train(
    config: Config, images: Any, network: str, epochs: int, decay: float, seed: int
) -> Tensor:
    """Return the measures of one network, ``(measures,)``."""
    train = images.train.take(config.num_train)
    # The seed sets the initial weights and the order of the batches, for every weight decay alike.
    model = _network(network, images, seed)
    fit_whole(
        model, train, num_epochs=epochs, batch_size=config.batch_size, augment=False, seed=seed,
        schedule="linear", schedule_unit="step",
        optimizer_settings={"lr": config.lr, "momentum": 0.9, "weight_decay": decay},
    )  # fmt: skip
    parts = (images.validation, images.test, train)
    scores = [training.evaluate(model, part.batches(1000)) for part in parts]
    risk = Risk(model, torch.nn.functional.cross_entropy, train.take(config.measured).tensors())
    op = hessian(risk)
    # One pair without a search for multiplicities: only its value is compared.
    top = eigenpairs(op, largest=1, rtol=1e-3, vectors=False, certify="none")
    # The order of MEASURES.
    numbers = [score["accuracy"] for score in scores] + [scores[-1]["loss"]]
    numbers += [float(top.values[-1]), float(top.residuals[-1])]
    # tr H is positive for logistic regression, which is convex; |H|_F is a measure for all.
    for estimate in (
        trace(op, rtol=0.05, generator=seeded(seed)),
        frobenius_norm(op, num_probes=32, generator=seeded(seed)),
    ):
        numbers += [float(estimate), float(estimate.error())]
    return torch.tensor([*numbers, float(risk.theta.norm())], dtype=torch.float64)


def _toy(w: float) -> Tensor:
    """Return loss, gradient norm, largest eigenvalue, trace and smallest eigenvalue of the toy."""
    # L = exp(-w1 w2 w3); dL/dwi = -(w1 w2 w3 / wi) L;
    # d2L/dwi dwj = (w1 w2 w3)^2 / (wi wj) L, less w_k L where i != j and k is the third index.
    point = torch.full((3,), w, dtype=torch.float64)
    loss = torch.exp(-point.prod())
    gradient = -point.prod() / point * loss
    hessian = torch.outer(gradient, gradient) / loss
    for i, j, k in ((0, 1, 2), (0, 2, 1), (1, 2, 0)):
        hessian[i, j] -= point[k] * loss
        hessian[j, i] -= point[k] * loss
    values = torch.linalg.eigvalsh(hessian)
    return torch.stack([loss, gradient.norm(), values[-1], values.sum(), values[0]])


def _network(name: str, images: Any, seed: int) -> torch.nn.Module:
    return new_network(name, images, seed, **SETTINGS[name])


def _size(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
