"""VGG-16 on CIFAR-100 by six optimisers: Gadam paper, Tables 2, 9 and 15; Flatness, section 5.

Every run is a folder ``METHOD-SEED`` below ``runs``, with its log and its checkpoint. A run that is
finished is read from its log, and one that was interrupted resumes. The others are trained, unless
``train`` is false. So the runs can be computed one by one and on several machines. At the end of a
run the Hessian of the training loss is measured, at the last and at the averaged weights, in both
modes of batch norm.

The settings are those of the paper. It does not print the weight decays of Padam and GadamX: 2.5e-3
times their learning rate of 0.1 equals the decay 5e-4 of SGD with its learning rate and momentum.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ritz import data, models, optim, plots, training
from ritz._core.checks import check_choice
from ritz._core.progress import Progress
from ritz._core.storage import to_json, write_text
from ritz._core.training_config import TrainingPrecision
from ritz.curvature import Risk, hessian
from ritz.plots._shared import style
from ritz.spectra import eigenpairs, frobenius_norm, trace
from ritz.studies._evidence import Evidence, spread
from ritz.studies._protocol import StudyResult, check_minimums, record, seeded, track, versions

# Settings of Table 2 and appendix B.2; averaged methods average from epoch 161 of 300.
METHODS: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": "sgd", "lr": 0.1, "weight_decay": 5e-4},
    "swa": {"optimizer": "sgd", "lr": 0.1, "weight_decay": 5e-4, "averaged": True},
    "adamw": {"optimizer": "adamw", "lr": 1e-3, "weight_decay": 0.25},
    "padamw": {"optimizer": "padamw", "lr": 0.1, "weight_decay": 2.5e-3},
    "gadam": {"optimizer": "gadam", "lr": 5e-4, "weight_decay": 0.25, "averaged": True},
    "gadamx": {"optimizer": "gadamx", "lr": 0.1, "weight_decay": 2.5e-3, "averaged": True},
}
# Test accuracy of VGG-16 on CIFAR-100 in %, Table 2.
PAPER = {
    "sgd": 74.15, "swa": 74.57, "adamw": 73.26, "padamw": 74.56, "gadam": 75.73, "gadamx": 76.85,
}  # fmt: skip
MODES: tuple[Literal["train", "eval"], ...] = ("train", "eval")
CURVATURE = ("lambda_max", "Frobenius norm", "trace")


@record
class Config:
    """Runs and where they are.

    Attributes:
        methods: Methods, of ``METHODS``.
        num_seeds: Runs of each method.
        num_epochs: Epochs of every run.
        model: Name of the network.
        dataset: Name of the data set.
        precision: Precision of training.
        measured: Training images from which the Hessian is computed; 0 to leave it out.
        train: Whether missing runs are trained. If not, they are missing in the table.
        runs: Folder of the runs.
        seed: Run ``i`` has the seed ``seed + i``.
        data: Folder of the data set. Defaults to the environment variable ``RITZ_DATA``.
    """

    methods: tuple[str, ...] = tuple(METHODS)
    num_seeds: int = 3
    num_epochs: int = 300
    model: str = "vgg16_bn"
    dataset: str = "cifar100"
    precision: TrainingPrecision = "bfloat16"
    measured: int = 2000
    train: bool = True
    runs: str = "out/vgg16/runs"
    seed: int = 0
    data: str | None = None

    def __post_init__(self) -> None:
        check_minimums(self, num_seeds=1, num_epochs=2, measured=0, seed=0)
        for name in self.methods:
            check_choice("methods", name, METHODS)

    @property
    def start(self) -> int:
        """First epoch whose weights enter an average: 161 of 300."""
        return 1 + round(160 / 300 * self.num_epochs)


SIZES = {
    "smoke": Config(
        methods=("sgd", "gadam"), num_seeds=1, num_epochs=2, model="mlp", dataset="digits",
        precision="float32", measured=100,
    ),
    "paper": Config(),
}  # fmt: skip


@record
class Result(StudyResult[Config]):
    """Accuracies and curvature of every run, NaN where there is none.

    Attributes:
        last: Test accuracy of the last iterate, ``(methods, num_seeds)``.
        average: Test accuracy of the average, same shape.
        training: Training accuracy in the last epoch, same shape.
        norms: Norm of the weights at the end, of the last iterate and of the average,
            ``(2, methods, num_seeds)``.
        top5: Top-5 test accuracy of the last iterate and of the average, same shape; ``None`` in
            results from before it was logged.
        curvature: By ``CURVATURE``, last iterate or average, mode of batch norm (train, eval),
            method and seed, ``(3, 2, 2, methods, num_seeds)``.
    """

    last: Tensor
    average: Tensor
    training: Tensor
    norms: Tensor
    curvature: Tensor
    top5: Tensor | None = None

    def best(self) -> Tensor:
        """Return the accuracy of the average, or of the last iterate of methods without one."""
        # By the method, not by what was logged: a run without its average is then missing.
        averaged = [[METHODS[name].get("averaged", False)] for name in self.config.methods]
        return torch.where(torch.tensor(averaged), self.average, self.last)

    def __str__(self) -> str:
        c = self.config
        lines = [
            f"{c.model} on {c.dataset}, {c.num_epochs} epochs: accuracy in %, mean ± standard "
            "error over the runs",
            f"{'':10}{'runs':>5}{'last':>18}{'average':>18}{'training':>18}{'published':>11}",
        ]
        for i, name in enumerate(c.methods):
            cells = [
                f"{spread(100 * table[i]):>18}"
                for table in (self.last, self.average, self.training)
            ]
            count = int(self.last[i].isfinite().sum())
            lines.append(f"{name:10}{count:>5}" + "".join(cells) + f"{PAPER[name]:>11.2f}")
        top5 = [] if self.top5 is None else self.top5.unbind(1)
        for name, scores in zip(c.methods, top5, strict=False):
            both = [spread(100 * values) for values in scores]
            lines.append(f"{f'{name}, top 5':24}{both[0]:>9}{both[1]:>18}")
        lines.append(f"{'Hessian at the end':34}" + "".join(f"{name:>17}" for name in CURVATURE))
        for i, name in enumerate(c.methods):
            for j, weights in enumerate(("last", "average")):
                for k, mode in enumerate(MODES):
                    values = self.curvature[:, j, k, i]
                    if bool(values.isfinite().any()):
                        cells = [f"{spread(value):>17}" for value in values]
                        lines.append(f"{f'{name}, {weights}, {mode} mode':34}" + "".join(cells))
        return "\n".join(lines)


def run(config: Config, *, progress: bool | Progress = False) -> Result:
    """Return accuracies and curvature of all runs; train those that are missing."""
    shape = (len(config.methods), config.num_seeds)
    # NaN stands for a run that is missing.
    accuracies = torch.full((5, *shape), math.nan, dtype=torch.float64)
    norms = torch.full((2, *shape), math.nan, dtype=torch.float64)
    curvature = torch.full((3, 2, 2, *shape), math.nan, dtype=torch.float64)
    cells = [(i, j) for j in range(shape[1]) for i in range(shape[0])]
    # All methods of one seed first, so that an unfinished table compares methods.
    for i, j in track(cells, "runs", progress):
        folder = Path(config.runs) / f"{config.methods[i]}-{config.seed + j}"
        if config.train:
            _train(config, config.methods[i], config.seed + j, folder)
        metrics = _metrics(folder, config.num_epochs)
        names = ("test_accuracy", "average_test_accuracy", "train_accuracy",
                 "test_top5_accuracy", "average_test_top5_accuracy")  # fmt: skip
        accuracies[:, i, j] = torch.tensor([metrics.get(name, math.nan) for name in names])
        # Place 0 is the last iterate, place 1 the average.
        for place, values in enumerate(_measured(folder)):
            norms[place, i, j] = values["norm"]
            numbers = [[values[mode][name] for mode in MODES] for name in CURVATURE]
            curvature[:, place, :, i, j] = torch.tensor(numbers, dtype=torch.float64)
    last, average, training_accuracy, *top5 = accuracies
    # The machine that reads logs is not the one that trained.
    origin = {} if config.train else {"machine": "read from the logs of the runs"}
    return Result(
        versions=versions() | origin,
        config=config, last=last, average=average, training=training_accuracy, norms=norms,
        curvature=curvature, top5=torch.stack(top5),
    )  # fmt: skip


def figure(result: Result) -> style.Figure:
    """Draw the accuracy of every run beside the published one."""
    drawing, (axis,) = plots.panels(1, 1, width=6.0, height=3.2)
    methods = result.config.methods
    for i, values in enumerate(100 * result.best()):
        axis.scatter([i] * len(values), values, color=style.STYLE.blue, s=18,
                     label=None if i else "measured, one point per run")  # fmt: skip
    published = [PAPER[name] for name in methods]
    axis.scatter(range(len(methods)), published, marker="_", s=300, color=style.STYLE.grey,
                 label="published mean")  # fmt: skip
    axis.set_xticks(range(len(methods)), methods)
    axis.legend(frameon=False)
    style.finish(axis, "", "test accuracy (%)", f"{result.config.model}, {result.config.dataset}")
    return drawing


def evidence(result: Result) -> list[Evidence]:
    """Return the rows of Table 2 that have a run, and the comparison of sharpness."""
    c, rows = result.config, []
    for name, values in zip(c.methods, 100 * result.best(), strict=True):
        found = values[values.isfinite()]
        if len(found):
            gap = float(found.mean()) - PAPER[name]
            # The paper's standard deviation between runs is about 0.3.
            near = abs(gap) < 0.6
            rows.append(
                Evidence(
                    paper="GADAM",
                    where="Table 2",
                    what=f"{c.model}, {c.dataset}, {name}: test accuracy in %, {len(found)} "
                    + ("seed" if len(found) == 1 else "seeds"),
                    published=f"{PAPER[name]:.2f}",
                    measured=spread(values),
                    verdict="agrees" if near else "differs",
                    why="" if near else f"{gap:+.2f}",
                )
            )
    # Only these two were published.
    if {"sgd", "gadam"} <= set(c.methods):
        rows += _sharpness(result, c.methods.index("sgd"), c.methods.index("gadam"))
    return rows


def _sharpness(result: Result, sgd: int, gadam: int) -> list[Evidence]:
    rows = []
    for k, mode in enumerate(MODES):
        # As published: SGD at its last weights and Gadam at its average.
        plain = result.curvature[0, 0, k, sgd].nanmean()
        averaged = result.curvature[0, 1, k, gadam].nanmean()
        if bool(torch.isfinite(plain + averaged)):
            ratio = float(averaged / plain)
            rows.append(
                Evidence(
                    paper="FLAT",
                    where="Section 5, Figures 8, 10",
                    what=f"largest eigenvalue of Gadam over that of SGD, batch norm in {mode} mode",
                    published="about 40" if mode == "train" else "larger",
                    measured=f"{ratio:.3g}",
                    verdict="agrees" if ratio > 1 else "differs",
                )
            )
    return rows


# ------------------------------------------------------------------------------------------
# One run and its files.


def _train(config: Config, name: str, seed: int, folder: Path) -> None:
    """Train a run unless it is finished, and measure it unless that is done."""
    # An interrupted call may have trained the run and not measured it.
    trained = bool(_metrics(folder, config.num_epochs))
    if trained and (not config.measured or _measured(folder)):
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    images: Any = data.load(config.dataset, data_dir=config.data, device=device)
    model = models.create(
        config.model, num_classes=images.num_classes, input_shape=images.shape,
        generator=seeded(seed), device=device,
    )  # fmt: skip
    # Augmented by crops and flips, as fit does for this data set by default.
    options = dict(METHODS[name])
    options["average_from"] = config.start if options.pop("averaged", False) else None
    # The optimiser takes these two; the others are options of fit.
    settings = {key: options.pop(key) for key in ("lr", "weight_decay")}
    if not trained:
        training.fit(
            model, images, num_epochs=config.num_epochs, batch_size=128, schedule="linear",
            precision=config.precision, seed=seed, evaluate_every=25, optimizer_settings=settings,
            checkpoint=folder, log=folder / "log.jsonl", progress=True, top_k=5, **options,
        )  # fmt: skip
    if config.measured:
        measured = []
        for file in ("weights", "average"):
            if (folder / f"{file}.safetensors").exists():
                training.load_weights(model, folder / f"{file}.safetensors")
                measured.append(_measure(model, images.train.take(config.measured), seed))
        write_text(folder / "curvature.json", to_json(measured, indent=1))


def _measure(model: nn.Module, images: data.Split, seed: int) -> dict[str, Any]:
    """Return norm of the weights, and curvature of the training loss in both batch-norm modes."""
    values: dict[str, Any] = {"norm": optim.weight_norms(model).l2}
    for mode in MODES:
        risk = Risk(model, cross_entropy, images.tensors(), batch_norm=mode, batch_size=128)
        op = hessian(risk)  # of the loss without the weight decay
        top = eigenpairs(op, largest=1, rtol=0.01, vectors=False, certify="none",
                         generator=seeded(seed))  # fmt: skip
        # Two dozen probes: the compared networks differ by factors.
        probes: Any = {"num_probes": 24, "generator": seeded(seed)}
        numbers = [top.values[-1], frobenius_norm(op, **probes).mean, trace(op, **probes).mean]
        values[mode] = dict(zip(CURVATURE, torch.stack(numbers).tolist(), strict=True))
    return values


def _metrics(folder: Path, num_epochs: int) -> Mapping[str, float]:
    """Return the last line of the log of a finished run; nothing if it is not finished."""
    path = folder / "log.jsonl"
    # The last line is that of the last evaluation.
    lines = path.read_text().splitlines() if path.exists() else []
    last: dict[str, float] = json.loads(lines[-1]) if lines else {}
    return last if last.get("epoch") == num_epochs and "test_accuracy" in last else {}


def _measured(folder: Path) -> list[dict[str, Any]]:
    path = folder / "curvature.json"
    found: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    return found
