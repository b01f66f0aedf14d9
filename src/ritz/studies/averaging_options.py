"""When, how often and with what to average: Gadam paper, Figures 2, 3, 8-10, Tables 7, 8, 14.

A small convolutional network with batch norm learns part of MNIST. Some of the training labels are
wrong. Every row of the table is one choice: the schedule without averaging, the start of the
average, how often weights enter the average, a start that is found automatically, Lookahead before
the average, the weight decay, or a learning rate that stays high. For each seed, all choices have
the same wrong labels, initial weights and batches, so differences between them are paired. An
ensemble averages the predictions of the networks of all seeds; an iterate average averages the
weights of one network.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ritz import data, optim, plots
from ritz._core.checks import check_range
from ritz._core.progress import Progress
from ritz.plots._shared import style
from ritz.studies._evidence import POINTS, Evidence, all_of, located, signed, spread
from ritz.studies._protocol import (
    StatePath,
    StudyResult,
    check_minimums,
    compute_by_seed,
    record,
    seeded,
)
from ritz.studies._training import fit_whole, small_network, with_wrong_labels

SGD: dict[str, Any] = {"optimizer": "sgd", "lr": 0.05, "weight_decay": 5e-4}
# The best of five pairs of learning rate and decay, by the held-out error of another seed.
ADAMW: dict[str, Any] = {"optimizer": "adamw", "lr": 0.01, "weight_decay": 0.2}
GADAM: dict[str, Any] = {"optimizer": "gadam", "lr": 0.01, "weight_decay": 0.2}
# What is measured in every cell, in this order; the number of predictions follows.
MEASURES = ("last", "average", "training", "norm", "average norm", "effective rate")
PREDICTED = 2000  # test images whose predictions an ensemble averages


def choices(num_epochs: int) -> dict[str, dict[str, Any]]:
    """Return the options of training of every choice, for a number of epochs."""
    # The published start, epoch 161 of 300, is about the half.
    half, flat = num_epochs // 2 + 1, {"schedule": "constant"}
    falling: dict[str, Any] = {"schedule": "linear"}
    steps = {"schedule": "step"}
    rows: dict[str, dict[str, Any]] = {}
    for name, base in (("SGD", SGD), ("AdamW", ADAMW)):
        rows |= {f"{name}, linear": base | falling, f"{name}, step": base | steps}
    rows["SGD, constant"] = SGD | flat
    for name, base in (("SWA", SGD), ("Gadam", GADAM)):
        for share in (0, 0.25, 0.5, 0.75):
            start = 1 + round(share * num_epochs)
            rows[f"{name} from {share:.0%}"] = base | falling | {"average_from": start}
    for name, often in {"step": 1, "10 steps": 10}.items():
        rows[f"Gadam every {name}"] = GADAM | falling | {
            "average_from": half, "average_every": "step", "average_interval": often,
        }  # fmt: skip
    # 10 evaluations of 300 epochs as published would never be reached in a short run.
    patience = {"patience": max(2, num_epochs // 6)}
    rows |= {"SWA-Auto": SGD | flat | patience, "GadamAuto": ADAMW | flat | patience}
    # As published: Lookahead up to the average, and not while it is taken.
    ahead = {"lookahead_until": half}
    rows |= {
        "SGD + Lookahead": SGD | falling | {"optimizer": "lookahead_sgd"},
        "AdamW + Lookahead": ADAMW | falling | {"optimizer": "lookahead_adamw"},
        "Gadam + Lookahead": ADAMW | falling | ahead | {
            "optimizer": "lookahead_adamw", "average_from": half,
        },
    }  # fmt: skip
    # 5e-4, the decay of SGD, is the choice "SWA from 50%".
    for decay in (0.0, 1e-4, 2e-3):
        rows[f"SWA, decay {decay:g}"] = SGD | falling | {
            "average_from": half, "weight_decay": decay,
        }  # fmt: skip
    return rows


@record
class Config:
    """Data and number of the runs.

    Attributes:
        dataset: Data set: ``mnist``, or ``digits`` for a test without files.
        num_train: Training images.
        label_noise: Fraction of the training labels that are wrong.
        batch_size: Batch size.
        num_epochs: Epochs of every run.
        width: Channels of the first of three convolutions; the others have two and four times that.
        num_seeds: Runs of every choice.
        seed: Run ``i`` has the seed ``seed + i``.
        data: Folder of MNIST. Defaults to the environment variable ``RITZ_DATA``.
    """

    dataset: Literal["mnist", "digits"] = "mnist"
    num_train: int = 4000
    label_noise: float = 0.2
    batch_size: int = 100
    num_epochs: int = 30
    width: int = 8
    num_seeds: int = 3
    seed: int = 0
    data: str | None = None

    def __post_init__(self) -> None:
        check_minimums(self, batch_size=2, num_epochs=4, width=1, num_seeds=2, seed=0, num_train=20)
        check_range("label_noise", self.label_noise, low=0.0, high=1.0)


SIZES = {
    "smoke": Config(dataset="digits", num_train=300, num_epochs=4, width=2, num_seeds=2),
    "paper": Config(num_train=45_000, num_epochs=300, batch_size=128, width=64),
}


@record
class Result(StudyResult[Config]):
    """Scores of every choice.

    Attributes:
        names: The choices in their order.
        scores: ``(measures, choices, num_seeds)`` in the order of ``MEASURES``: test error of last
            iterate and average, error on the noisy training labels, norms of the weights of last
            iterate and average, and learning rate over squared norm at the end.
        ensembles: Test error of the averaged predictions of all seeds, ``(choices,)``.
        singles: Mean test error of these predictions alone, ``(choices,)``.
    """

    names: tuple[str, ...]
    scores: Tensor
    ensembles: Tensor
    singles: Tensor

    def measure(self, name: str) -> Tensor:
        """Return a measure by choice and seed."""
        return self.scores[MEASURES.index(name)]

    def best(self) -> Tensor:
        """Return the test error of the average, or of the last iterate where there is none."""
        average = self.measure("average")
        return torch.where(average.isnan(), self.measure("last"), average)

    def difference(self, name: str, other: str) -> Tensor:
        """Return the test error in % of one choice less that of another, by seed."""
        errors = 100 * self.best()
        return errors[self.names.index(name)] - errors[self.names.index(other)]

    def __str__(self) -> str:
        c = self.config
        lines = [
            f"Test error in %, {c.dataset}, {c.num_train:,} images with {c.label_noise:.0%} wrong "
            f"labels, {c.num_epochs} epochs; mean over {c.num_seeds} seeds ± standard error",
            f"{'':22}{'last':>16}{'average':>16}{'training':>16}{'norm':>8}{'of average':>12}"
            f"{'rate/norm^2':>13}{'ensemble gain':>15}",
        ]
        for i, name in enumerate(self.names):
            errors = "".join(f"{spread(100 * self.scores[m, i]):>16}" for m in range(3))
            norm, average, rate = self.scores[3:6, i].mean(1).tolist()
            gain = 100 * float(self.ensembles[i] - self.singles[i])
            lines.append(f"{name:22}{errors}{norm:>8.2f}{average:>12.2f}{rate:>13.2g}{gain:>15.2f}")
        return "\n".join(lines)


def run(config: Config, *, progress: bool | Progress = False, state: StatePath = None) -> Result:
    """Return the scores of all choices for all seeds."""
    # Validation images decide when the automatic averages begin.
    images: Any = data.load(config.dataset, data_dir=config.data, validation=500)
    rows = choices(config.num_epochs)
    # For each seed and choice the measures, followed by predictions.
    table = compute_by_seed(
        lambda name, seed: _train(config, images, rows[name], seed), rows, config=config,
        state=state, progress=progress,
    )  # fmt: skip
    scores, outputs = table[..., : len(MEASURES)], table[..., len(MEASURES) :]
    labels = images.test.targets[:PREDICTED]
    outputs = outputs.unflatten(-1, (len(labels), -1))
    return Result(
        config=config,
        names=tuple(rows),
        scores=scores.permute(2, 1, 0).contiguous(),
        # The error of the mean of the probabilities, and the mean of the errors.
        ensembles=(outputs.mean(0).argmax(-1) != labels).double().mean(-1),
        singles=(outputs.argmax(-1) != labels).double().mean((0, -1)),
    )


def figure(result: Result) -> style.Figure:
    """Draw the test error of last iterate and average of every choice."""
    drawing, (axis,) = plots.panels(1, 1, width=6.4, height=6.4)
    places = range(len(result.names))
    for name, colour, marker in (
        ("last", style.STYLE.grey, "o"),
        ("average", style.STYLE.blue, "D"),
    ):
        errors = 100 * result.measure(name)
        axis.errorbar(
            errors.mean(1), places, xerr=errors.std(1), fmt=marker, color=colour, markersize=5,
            linewidth=1, label=f"{name} iterate" if name == "last" else name,
        )  # fmt: skip
    axis.set_yticks(places, result.names)
    # The first choice is on top.
    axis.invert_yaxis()
    axis.legend(frameon=False)
    noise = f"{result.config.label_noise:.0%} of the labels wrong"
    style.finish(axis, "test error (%)", "", f"{result.config.num_train:,} images, {noise}")
    return drawing


def evidence(result: Result) -> Iterator[Evidence]:
    """Yield each claim of the paper beside the paired difference that tests it."""
    # Each with the published sign of the difference: lower, about equal or higher.
    claims = [
        ("Table 14", "linear against step schedule, SGD", "SGD, linear", "SGD, step", -1),
        ("Table 14", "linear against step schedule, AdamW", "AdamW, linear", "AdamW, step", -1),
        ("Table 2", "SWA against SGD", "SWA from 50%", "SGD, linear", -1),
        ("Table 2", "Gadam against AdamW", "Gadam from 50%", "AdamW, linear", -1),
        ("Figure 9", "Gadam averaged every step against every epoch", "Gadam every step",
         "Gadam from 50%", 0),
        ("Table 8", "GadamAuto against Gadam", "GadamAuto", "Gadam from 50%", 0),
        ("Table 8", "SWA-Auto against SGD", "SWA-Auto", "SGD, linear", 1),
        ("Figure 8", "Lookahead with SGD against SGD", "SGD + Lookahead", "SGD, linear", -1),
        ("Figure 8", "Gadam with Lookahead against Gadam", "Gadam + Lookahead", "Gadam from 50%",
         0),
    ]  # fmt: skip
    words = {-1: "lower", 0: "about equal", 1: "higher"}
    for where, what, name, other, sign in claims:
        # Within one seed: the scatter between seeds cancels.
        gap = result.difference(name, other)
        yield Evidence(
            paper="GADAM",
            where=where,
            what=f"test error in %, {what}",
            published=words[sign],
            measured=spread(gap),
            **signed(gap, sign, margin=POINTS),
        )
    yield from (*_starts(result), *_by_decay(result), _gap(result), _norms(result))


def setting(result: Result) -> str:
    """Return the network and data."""
    c = result.config
    return (
        f"Small CNN, {c.num_train:,} images of {c.dataset} with {c.label_noise:.0%} wrong labels, "
        f"{c.num_epochs} epochs, {c.num_seeds} seeds; weight decays 0, 1e-4, 5e-4, 2e-3."
    )


def _starts(result: Result) -> Iterator[Evidence]:
    """Yield what Gadam gains over AdamW by the start of its average, and the earliest start."""
    gaps = [result.difference(f"Gadam from {share:.0%}", "AdamW, linear")
            for share in (0.25, 0.5, 0.75)]  # fmt: skip
    early = result.difference("Gadam from 0%", "Gadam from 50%")
    for what, published, measured, known in (
        ("Gadam averaged from 25, 50, 75 % on against AdamW", "lower for any reasonable start",
         ", ".join(map(spread, gaps)), all_of(*(signed(gap, -1) for gap in gaps))),
        ("Gadam averaged from the first epoch against from the half", "-", spread(early),
         {"verdict": "extends", "why": "the paper shows curves"}),
    ):  # fmt: skip
        yield Evidence(paper="GADAM", where="Figure 10, Table 7", what=f"test error in %, {what}",
                       published=published, measured=measured, **known)  # fmt: skip


def _by_decay(result: Result) -> Iterator[Evidence]:
    names = ["SWA, decay 0", "SWA, decay 0.0001", "SWA from 50%", "SWA, decay 0.002"]
    places = [result.names.index(name) for name in names]
    # Negative: the error falls.
    gains = 100 * (result.measure("average") - result.measure("last"))[places]
    ensembles = 100 * (result.ensembles - result.singles)[places]
    alone = located(float(ensembles[-1] - ensembles[0]), 0.0, -POINTS, POINTS)
    note = f"tolerance {POINTS:g}; one ensemble, of all seeds"
    for what, published, values, known in (
        ("iterate average", "the gain grows with the decay", gains.mean(1),
         signed(gains[-1] - gains[0], -1)),
        ("ensemble", "the gain hardly depends on the decay", ensembles,
         {"verdict": alone, "why": note}),
    ):  # fmt: skip
        yield Evidence(
            paper="GADAM",
            where="Figures 2b, 3",
            what=f"change of the test error in % by the {what}, by weight decay",
            published=published,
            measured=", ".join(f"{value:.2f}" for value in values),
            **known,
        )


def _gap(result: Result) -> Evidence:
    """Return how far training falls below testing, at a flat and at a falling learning rate."""
    # Training labels are noisy, so the gap is shifted by the noise, equally for both.
    gaps = result.measure("last") - result.measure("training")
    flat, step = (100 * gaps[result.names.index(f"SGD, {kind}")] for kind in ("constant", "step"))
    more = step - flat
    return Evidence(
        paper="GADAM",
        where="Figure 16",
        what="generalisation gap in %, step decay less constant learning rate",
        published="the gap grows as the learning rate falls",
        measured=spread(more),
        **signed(more, 1),
    )


def _norms(result: Result) -> Evidence:
    places = [i for i, name in enumerate(result.names) if name.endswith("from 50%")]
    last, average = (result.measure(name)[places] for name in ("norm", "average norm"))
    pairs = zip(last.mean(1).tolist(), average.mean(1).tolist(), strict=True)
    return Evidence(
        paper="SPECTRA",
        # Theorem 20 compares with the mean norm of the iterates, and holds for any weights.
        where="Figures 7.5, 7.6",
        what="norm of the weights, last iterate and average, of SWA and of Gadam",
        published="the average is smaller",
        measured="; ".join(f"{a:.2f}, {b:.2f}" for a, b in pairs),
        **all_of(*(signed(change, -1) for change in average - last)),
    )


def _train(config: Config, images: Any, options: dict[str, Any], seed: int) -> Tensor:
    """Return the measures of one run and its predictions, as one vector."""
    generator = seeded(seed)
    train = images.train.take(config.num_train)
    targets = with_wrong_labels(train.targets, config.label_noise, images.num_classes, generator)
    train = replace(train, targets=targets)
    model = small_network(images, config.width, generator)
    settings = {key: options[key] for key in ("lr", "weight_decay")}
    norms: list[float] = []  # of the iterates, by epoch: the model ends with the average

    def norm(epoch: int, model: nn.Module, optimizer: Any) -> None:
        norms.append(optim.weight_norms(model).l2)

    others = {key: value for key, value in options.items() if key not in settings}
    if {"average_from", "patience"} & others.keys():
        # The model then ends with the averaged weights, whose norm is measured.
        others["final"] = "average"
    result = fit_whole(
        model, train, validation=images.validation, test=images.test,
        optimizer_settings=settings, num_epochs=config.num_epochs, batch_size=config.batch_size,
        augment=False, seed=seed, drop_last=True, monitors=[norm],
        **others,
    )  # fmt: skip
    metrics = result.metrics
    averaged = "average_test_accuracy" in metrics
    # In the order of MEASURES.
    numbers = [
        1 - metrics["test_accuracy"],
        1 - metrics["average_test_accuracy"] if averaged else math.nan,
        1 - metrics["train_accuracy"],
        norms[-1],
        optim.weight_norms(model).l2 if averaged else math.nan,
        # The effective rate of weights whose scale batch norm leaves free.
        metrics["learning_rate"] / norms[-1] ** 2,
    ]
    inputs, _ = images.test.take(min(PREDICTED, len(images.test))).tensors()
    model.eval()
    with torch.no_grad():
        # Probabilities, which an ensemble averages.
        outputs = model(inputs).softmax(1).double().flatten()
    return torch.cat([torch.tensor(numbers, dtype=torch.float64), outputs])
