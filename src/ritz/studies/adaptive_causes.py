"""Why small networks differ from published figures on damping: two controlled comparisons.

In the study ``adaptive_gap``, the largest eigenvalue of a LeNet rises with the damping of Adam.
Granziol et al. (2020), *Explaining the Adaptive Generalisation Gap*, Table 2, find that it falls.
Also, Lanczos-Newton steps are slower than Adam, unlike in *Spectral Machine Learning*, Fig. 4.2b.
This study changes one thing at a time:

* ``loss``: the largest eigenvalue at equal training loss instead of after equal epochs, with a
  fixed learning rate and with one that grows with the damping.
* ``momentum``: the running training error of Lanczos-Newton steps, SGD and Adam without momentum,
  and of SGD and Adam with momentum.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ritz import data
from ritz._core.progress import Progress
from ritz.curvature import Risk
from ritz.optim import DampedAdamW
from ritz.studies._evidence import Evidence, signed, spread
from ritz.studies._protocol import StudyResult, check_minimums, column, record, seeded, track
from ritz.studies._training import (
    Samples,
    fit_whole,
    largest_eigenvalue,
    new_network,
    train_epochs,
)

NEWTON: dict[str, Any] = {"num_steps": 20, "start": "random", "matrix": "ggn"}
# Name of the optimiser in ``fit`` and its settings, by method.
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "Lanczos-Newton 0.1": ("lanczos_newton", NEWTON | {"lr": 0.1, "delta": 1.0}),
    "SGD 0.03": ("sgd", {"lr": 0.03, "momentum": 0.0}),
    "SGD 0.1": ("sgd", {"lr": 0.1, "momentum": 0.0}),
    "SGD 0.3": ("sgd", {"lr": 0.3, "momentum": 0.0}),
    "SGD 0.03, momentum": ("sgd", {"lr": 0.03, "momentum": 0.9}),
    "Adam 0.001": ("adam", {"lr": 1e-3, "betas": (0.0, 0.999)}),
    "Adam 0.003": ("adam", {"lr": 3e-3, "betas": (0.0, 0.999)}),
    "Adam 0.003, momentum": ("adam", {"lr": 3e-3}),
}

KINDS = ("SGD", "Adam")  # of first-order methods


@record
class Config:
    """Data, network and lengths of the runs.

    Attributes:
        dataset: Data set.
        network: Network.
        num_samples: Number of training samples.
        batch_size: Batch size.
        rate: Learning rate of damped Adam.
        deltas: Dampings. The second runs multiply the learning rate by ``1 + delta / deltas[1]``.
        loss: Training loss at which the largest eigenvalue is measured.
        max_epochs: Epochs after which a run ends even if it has not reached it.
        num_epochs: Epochs of the runs without momentum.
        num_seeds: Runs of every setting.
        seed: Run ``i`` has the seed ``seed + i``.
        data_dir: Folder of the data sets. Defaults to ``RITZ_DATA``.
    """

    dataset: str = "mnist"
    network: str = "lenet"
    num_samples: int = 1000
    batch_size: int = 50
    rate: float = 0.001
    deltas: tuple[float, ...] = (1e-8, 1e-3, 8e-3)
    loss: float = 0.1
    max_epochs: int = 100
    num_epochs: int = 4
    num_seeds: int = 3
    seed: int = 0
    data_dir: str | None = None

    def __post_init__(self) -> None:
        check_minimums(self, num_samples=1, batch_size=1, max_epochs=1, num_epochs=1, num_seeds=1,
                       seed=0, deltas=0.0, rate=0.0, loss=0.0)  # fmt: skip
        if len(self.deltas) < 2:
            raise ValueError(f"deltas must have at least two entries, got {self.deltas}")


_SMOKE: dict[str, Any] = {"dataset": "digits", "network": "mlp", "num_samples": 80}
SIZES = {"smoke": Config(**_SMOKE, loss=2.0, max_epochs=8, num_epochs=1, num_seeds=2)}


@record
class Result(StudyResult[Config]):
    """What was measured.

    Attributes:
        at_loss: Epochs, training loss and largest eigenvalue at the first epoch whose loss is small
            enough, ``(3, 2, num_seeds, deltas)``: at the learning rate, and at learning rates that
            grow with the damping. NaN if it was not reached.
        errors: By method the running training error after the last epoch, ``(num_seeds,)``.
    """

    at_loss: Tensor
    errors: dict[str, Tensor]

    def __str__(self) -> str:
        config = self.config
        lines = [f"Damped Adam at a training loss of {config.loss:g}: epochs, loss, lambda_1"]
        for i, name in enumerate(
            ("the same learning rate", "learning rate grows with the damping")
        ):
            lines.append(name)
            for j, delta in enumerate(config.deltas):
                epochs, loss, top = (self.at_loss[k, i, :, j].mean() for k in range(3))
                lines.append(f"{delta:>10g}{epochs:>8.1f}{loss:>10.3g}{top:>10.4g}")
        lines.append(f"Running training error in % after {config.num_epochs} epochs")
        lines += [f"{name:24}{100 * self.errors[name].mean():>8.2f}" for name in METHODS]
        return "\n".join(lines)


def run(config: Config, *, progress: bool | Progress = False) -> Result:
    """Return the result of both comparisons."""
    sets: Any = data.load(config.dataset, data_dir=config.data_dir)
    shape = (3, 2, config.num_seeds, len(config.deltas))
    at_loss = torch.full(shape, math.nan, dtype=torch.float64)
    errors = {name: torch.zeros(config.num_seeds, dtype=torch.float64) for name in METHODS}
    for i in track(range(config.num_seeds), "seeds", progress):
        each = replace(config, seed=config.seed + i)
        for j, delta in enumerate(config.deltas):
            for k, rate in enumerate((config.rate, config.rate * (1 + delta / config.deltas[1]))):
                at_loss[:, k, i, j] = _at_loss(each, sets, rate, delta)
        for name, (optimizer, settings) in METHODS.items():
            model, train = _network(each, sets)
            result = fit_whole(model, train, optimizer=optimizer, optimizer_settings=settings,
                               num_epochs=config.num_epochs, batch_size=config.batch_size,
                               seed=each.seed)  # fmt: skip
            done = result.num_epochs == config.num_epochs
            errors[name][i] = 1 - result.history["train_accuracy"][-1] if done else math.nan
    return Result(config=config, at_loss=at_loss, errors=errors)


def _network(config: Config, sets: Any) -> tuple[nn.Module, Any]:
    train = sets.train.take(config.num_samples, generator=seeded(config.seed))
    return new_network(config.network, sets, config.seed), train


def _at_loss(config: Config, sets: Any, rate: float, delta: float) -> Tensor:
    """Return epochs, training loss and largest eigenvalue when the loss is small enough."""
    model, train = _network(config, sets)
    samples: Samples = train.tensors()
    optimizer, order = DampedAdamW(model.parameters(), rate, delta=delta), seeded(config.seed)
    for epoch in range(1, config.max_epochs + 1):
        train_epochs(model, optimizer, samples, config.batch_size, 1, order)
        # All samples, without dropout: the loss of one batch is that of a few samples.
        if (loss := Risk(model, cross_entropy, samples).loss()) <= config.loss:
            return column([epoch, loss, largest_eigenvalue(model, samples, config.seed)])
    return column([math.nan] * 3)


def evidence(result: Result) -> Iterator[Evidence]:
    """Yield both comparisons as rows."""
    config, tops = result.config, result.at_loss[2]
    for i, how in enumerate(
        (f"learning rate {config.rate:g}", "learning rate raised with the damping")
    ):
        # Paired over seeds: the runs of a seed have the same images and initial weights.
        judged = signed(tops[i, :, -1] - tops[i, :, 0], -1)
        epochs = ", ".join(f"{e:.0f}" for e in result.at_loss[0, i].mean(0))
        reached = f"reached after {epochs} epochs"
        yield Evidence(
            paper="GAP",
            where="Table 2",
            what=f"damped Adam, {how}: lambda_1 at loss {config.loss:g}",
            published="falls as the damping rises",
            measured=", ".join(spread(tops[i, :, j]) for j in range(len(config.deltas))),
            verdict=judged["verdict"],
            why="; ".join(filter(None, (reached, judged["why"]))),
        )
    # In percent, as mean over the seeds.
    means = {name: 100 * float(values.mean()) for name, values in result.errors.items()}
    newton, *others = (name for name in METHODS if "momentum" not in name)
    best = {
        kind: min((one for one in others if one.startswith(kind)), key=means.__getitem__)
        for kind in KINDS
    }
    lowest = min(best.values(), key=means.__getitem__)
    yield Evidence(
        paper="SPECTRA",
        where="Figure 4.2b",
        what=f"training error in % after {config.num_epochs} epochs, without momentum",
        published="Lanczos-Newton below Adam and SGD",
        measured=f"{newton}: {means[newton]:.3g}; "
        + "; ".join(f"best {kind}: {means[one]:.3g}" for kind, one in best.items()),
        verdict=signed(result.errors[newton] - result.errors[lowest], -1)["verdict"],
        # What momentum adds is its share of the lead of the published curves.
        why="with momentum: "
        + ", ".join(f"{name} {means[name]:.3g}" for name in METHODS if "momentum" in name),
    )


def setting(result: Result) -> str:
    """Return the network, its data and the dampings."""
    c = result.config
    dampings = ", ".join(f"{delta:g}" for delta in c.deltas)
    return (
        f"{c.network}, {c.num_samples:,} images of {c.dataset}, {c.num_seeds} seeds; "
        f"dampings {dampings}."
    )
