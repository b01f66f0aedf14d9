"""VGG on CIFAR-100 by six optimisers: Gadam paper, Tables 2, 9, 15; flatness paper, section 5.

By default the network is small: six layers of an eighth of the width, and a fifth of the images.
``--size paper`` is VGG-16 with batch norm for 300 epochs, on a GPU.

Every run has a folder ``METHOD-SEED`` below ``runs``, with its log and its checkpoint. A finished
run is read from its files, and an interrupted run resumes. The others are trained, unless ``train``
is false. The runs can therefore be computed one by one and on several machines.

The Hessian of the training loss is measured at the end of a run, for the last and for the averaged
weights, and at some epochs before, in both modes of batch norm. A Lanczos run gives the largest
eigenvalue and the mass at zero. The numbers of a run are stored in its ``curvature.json``.

The settings of ``METHODS`` are those of the paper. The paper does not state the weight decays of
Padam and GadamX. With 2.5e-3, the decay times their learning rate of 0.1 equals the decay of SGD
(5e-4) with its learning rate and momentum.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ritz import data, measures, optim, plots, training
from ritz._core.checks import check_count
from ritz._core.progress import Progress
from ritz._core.storage import to_json, write_text
from ritz._core.training_config import TrainingPrecision
from ritz.curvature import Risk, hessian
from ritz.plots._shared import style
from ritz.spectra import frobenius_norm, lanczos, trace
from ritz.studies._evidence import Evidence, all_of, judge, near, points, signed, spread
from ritz.studies._protocol import (
    StudyResult,
    check_entries,
    check_minimums,
    record,
    seeded,
    track,
    versions,
)
from ritz.studies._training import fit_whole, new_network

# Settings of Table 2 and appendix B.2; averaged methods average from epoch 161 of 300.
METHODS: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": "sgd", "lr": 0.1, "weight_decay": 5e-4},
    "swa": {"optimizer": "sgd", "lr": 0.1, "weight_decay": 5e-4, "averaged": True},
    "adamw": {"optimizer": "adamw", "lr": 5e-4, "weight_decay": 0.25},
    "padamw": {"optimizer": "padamw", "lr": 0.1, "weight_decay": 2.5e-3},
    "gadam": {"optimizer": "gadam", "lr": 5e-4, "weight_decay": 0.25, "averaged": True},
    "gadamx": {"optimizer": "gadamx", "lr": 0.1, "weight_decay": 2.5e-3, "averaged": True},
}
# Test accuracy of VGG-16 on CIFAR-100 in %, Table 2.
PAPER = {
    "sgd": 74.15, "swa": 74.57, "adamw": 73.26, "padamw": 74.56, "gadam": 75.73, "gadamx": 76.85,
}  # fmt: skip
# Averaged methods and the same optimiser without an average.
BASES = {"swa": "sgd", "gadam": "adamw", "gadamx": "padamw"}
PARTNERS = BASES | {base: name for name, base in BASES.items()}
# Largest eigenvalue of the average over that of the last iterate, Tables 15 and 9, without batch
# norm: for the small and the large learning rate at the end.
SHARPNESS = {
    "swa": ("Table 15", (1.85 / 14.6, 1.35 / 12.0)),
    "gadam": ("Table 9", (120 / 2500, 43 / 280)),
}
MODES: tuple[Literal["train", "eval"], ...] = ("train", "eval")
CURVATURE = ("lambda_max", "Frobenius norm", "trace", "mass at zero")


@record
class Config:
    """Runs and where they are.

    Attributes:
        methods: Methods, of ``METHODS``.
        num_seeds: Runs of each method.
        num_epochs: Epochs of every run.
        model: Name of the network.
        width: Width of its layers; ``None`` is its usual one.
        dataset: Name of the data set.
        num_train: Training images; ``None`` is all.
        adaptive_rate: Factor on the learning rates of AdamW and Gadam, which are too small for
            short runs.
        augment: Whether training images are cropped and flipped at random.
        precision: Precision of training.
        measured: Training images from which the Hessian is computed; 0 to leave it out.
        num_steps: Lanczos steps.
        epochs: Epochs before the end at which the Hessian is measured too.
        train: Whether missing runs are trained. If not, they are missing in the table.
        runs: Folder of the runs.
        seed: Run ``i`` has the seed ``seed + i``.
        data: Folder of the data set. Defaults to the environment variable ``RITZ_DATA``.
    """

    methods: tuple[str, ...] = ("sgd", "swa", "adamw", "gadam")
    num_seeds: int = 3
    num_epochs: int = 15
    model: str = "vgg6_bn"
    width: int | None = 8
    dataset: str = "cifar100"
    num_train: int | None = 10_000
    adaptive_rate: float = 4.0
    # Short runs on few images do not fit them, even without.
    augment: bool = False
    precision: TrainingPrecision = "float32"
    measured: int = 150
    num_steps: int = 20
    epochs: tuple[int, ...] = (5,)
    train: bool = True
    runs: str = "out/vgg16/runs"
    seed: int = 0
    data: str | None = None

    def __post_init__(self) -> None:
        check_minimums(
            self, num_seeds=1, num_epochs=2, measured=0, num_steps=5, seed=0, adaptive_rate=0.0
        )
        check_entries(self, methods=METHODS)
        for epoch in self.epochs:
            check_count("epochs", epoch, high=self.num_epochs - 1)

    @property
    def start(self) -> int:
        """First epoch whose weights enter an average: 161 of 300."""
        return 1 + round(160 / 300 * self.num_epochs)

    @property
    def points(self) -> dict[str, str]:
        """Names of the measured weights, and their files in the folder of a run."""
        kept = {f"epoch {epoch}": f"epoch-{epoch:04d}" for epoch in self.epochs}
        return kept | {"last": "weights", "average": "average"}


SIZES = {
    "smoke": Config(
        methods=("sgd", "gadam"), num_seeds=1, num_epochs=2, model="mlp", dataset="digits",
        width=None, num_train=None, measured=100, epochs=(1,),
    ),
    "paper": Config(
        methods=tuple(METHODS), num_epochs=300, model="vgg16_bn", width=None, num_train=None,
        adaptive_rate=1.0, augment=True, precision="bfloat16", measured=2000, num_steps=100,
        epochs=(25, 100, 200),
    ),
}  # fmt: skip


@record
class Result(StudyResult[Config]):
    """Accuracies and curvature of every run, NaN where there is none.

    Attributes:
        last: Test accuracy of the last iterate, ``(methods, num_seeds)``.
        average: Test accuracy of the average, same shape.
        training: Training accuracy in the last epoch, same shape.
        norms: Norm of the measured weights, ``(points, methods, num_seeds)`` with the points of
            the configuration.
        top5: Top-5 test accuracy of the last iterate and of the average,
            ``(2, methods, num_seeds)``.
        curvature: By ``CURVATURE``, point, mode of batch norm (train, eval), method and seed,
            ``(4, points, 2, methods, num_seeds)``.
    """

    last: Tensor
    average: Tensor
    training: Tensor
    norms: Tensor
    top5: Tensor
    curvature: Tensor

    def best(self) -> Tensor:
        """Return the accuracy of the average, or of the last iterate of methods without one."""
        # By the method, not by what was logged: a run without its average is then missing.
        averaged = [[METHODS[name].get("averaged", False)] for name in self.config.methods]
        return torch.where(torch.tensor(averaged), self.average, self.last)

    def of(self, quantity: str, name: str, point: str, mode: Literal["train", "eval"]) -> Tensor:
        """Return a quantity of ``CURVATURE`` of a method by seed."""
        c = self.config
        where = (CURVATURE.index(quantity), list(c.points).index(point), MODES.index(mode))
        return self.curvature[where][c.methods.index(name)]

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
            published = f"{PAPER[name]:.2f}" if _is_published(c) else "-"
            lines.append(f"{name:10}{count:>5}" + "".join(cells) + f"{published:>11}")
        for name, scores in zip(c.methods, self.top5.unbind(1), strict=True):
            both = [spread(100 * values) for values in scores]
            lines.append(f"{f'{name}, top 5':24}{both[0]:>9}{both[1]:>18}")
        lines.append(
            f"{'Hessian of the training loss':34}" + "".join(f"{n:>17}" for n in CURVATURE)
        )
        for name in c.methods:
            for point in c.points:
                for mode in MODES:
                    values = [self.of(quantity, name, point, mode) for quantity in CURVATURE]
                    if bool(torch.stack(values).isfinite().any()):
                        numbers = "".join(f"{spread(value):>20}" for value in values)
                        lines.append(f"{f'{name}, {point}, {mode} mode':34}{numbers}")
        return "\n".join(lines)


def run(config: Config, *, progress: bool | Progress = False) -> Result:
    """Return accuracies and curvature of all runs; train those that are missing."""
    shape = (len(config.methods), config.num_seeds)
    # NaN stands for what is missing.
    accuracies = torch.full((5, *shape), math.nan, dtype=torch.float64)
    norms = torch.full((len(config.points), *shape), math.nan, dtype=torch.float64)
    curvature = torch.full(
        (len(CURVATURE), len(config.points), 2, *shape), math.nan, dtype=torch.float64
    )
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
        points = _measured(folder)
        for place, point in enumerate(config.points):
            if point in points:
                norms[place, i, j] = points[point]["norm"]
                numbers = [[points[point][mode][name] for mode in MODES] for name in CURVATURE]
                curvature[:, place, :, i, j] = torch.tensor(numbers, dtype=torch.float64)
    last, average, training_accuracy, *top5 = accuracies
    # The machine that reads logs is not the one that trained.
    origin = {} if config.train else {"machine": "read from the logs of the runs"}
    return Result(
        versions=versions() | origin,
        config=config, last=last, average=average, training=training_accuracy, norms=norms,
        top5=torch.stack(top5), curvature=curvature,
    )  # fmt: skip


def figure(result: Result) -> style.Figure:
    """Draw the accuracy of every run, and the largest eigenvalue over training."""
    c = result.config
    measured = bool(result.curvature.isfinite().any())
    drawing, axes = plots.panels(1, 3 if measured else 1, width=4.4, height=3.2)
    # Without a label: among the points, the marker of a legend would look like a further run.
    for i, values in enumerate(100 * result.best()):
        axes[0].scatter([i] * len(values), values, color=style.STYLE.blue, s=18)
    if _is_published(c):
        axes[0].scatter(range(len(c.methods)), [PAPER[name] for name in c.methods], marker="_",
                        s=300, color=style.STYLE.grey, label="published mean")  # fmt: skip
    axes[0].set_xticks(range(len(c.methods)), c.methods)
    style.finish(axes[0], "", "test accuracy (%)", f"{c.model}, {c.dataset}, all runs")
    for axis, mode in zip(axes[1:], MODES, strict=False):
        for name, colour in zip(c.methods, style.STYLE.palette, strict=False):
            values = [result.of("lambda_max", name, point, mode).nanmean() for point in c.points]
            *curve, average = values
            axis.plot([*c.epochs, c.num_epochs], curve, "o-", color=colour, markersize=4,
                      label=name)  # fmt: skip
            axis.plot([c.num_epochs], [average], "*", color=colour, markersize=10)
        style.log_scale(axis)
        title = f"batch norm in {mode} mode (star: average)"
        style.finish(axis, "epoch", "largest eigenvalue of the Hessian", title)
    return drawing


def evidence(result: Result) -> Iterator[Evidence]:
    """Yield the rows of Table 2 that have a run, and the comparisons of sharpness."""
    c = result.config
    accuracies = dict(zip(c.methods, 100 * result.best(), strict=True))
    for name, values in accuracies.items():
        base = BASES.get(name)
        if _is_published(c):
            if len(_present(values)):
                yield _accuracy(name, values)
        elif base in accuracies and len(gain := _present(values - accuracies[base])):
            effect = PAPER[name] - PAPER[base]
            yield Evidence(
                paper="GADAM",
                where="Table 2",
                what=f"test accuracy in %, {name} less {base}",
                published=f"{effect:+.2f}",
                measured=spread(gain),
                **signed(gain, 1, size=effect),
            )
    yield from (*_sharper(result), *_averages(result), *_degenerate(result))


def _is_published(config: Config) -> bool:
    return (config.model, config.dataset, config.num_epochs) == ("vgg16_bn", "cifar100", 300)


def setting(result: Result) -> str:
    """Return the network and data."""
    c = result.config
    images = "all images" if c.num_train is None else f"{c.num_train:,} images"
    return f"{c.model} on {images} of {c.dataset}, {c.num_epochs} epochs, {c.num_seeds} seeds."


def _accuracy(name: str, values: Tensor) -> Evidence:
    scores = _present(values)
    return Evidence(
        paper="GADAM",
        where="Table 2",
        what=f"test accuracy in %, {name}, {len(scores)} seed{'s'[: len(scores) > 1]}",
        published=f"{PAPER[name]:.2f}",
        measured=spread(values),
        **near(scores, PAPER[name], points(PAPER[name] - PAPER[PARTNERS[name]])),
    )


def _sharper(result: Result) -> Iterator[Evidence]:
    """Yield whether Gadam is better than SGD, and how much sharper."""
    c = result.config
    if not {"sgd", "gadam"} <= set(c.methods):
        return
    sgd, gadam = (100 * result.best()[c.methods.index(name)] for name in ("sgd", "gadam"))
    gain = _present(gadam - sgd)
    if len(gain):
        yield Evidence(
            paper="FLAT",
            where="Section 5, Figure 8",
            what="test accuracy in %, Gadam less SGD",
            published="higher",
            measured=spread(gain),
            **signed(gain, 1),
        )
    for mode in MODES:
        # As published: the last weights of SGD, and the average of Gadam.
        plain = result.of("lambda_max", "sgd", "last", mode)
        ratio = _present(result.of("lambda_max", "gadam", "average", mode) / plain)
        if len(ratio):
            yield Evidence(
                paper="FLAT",
                where="Section 5, Figure 8" if mode == "train" else "Section 5, Figure 10",
                what=f"largest eigenvalue, Gadam over SGD, batch norm in {mode} mode",
                published=f"larger: {'about 40' if mode == 'train' else '35'} times",
                measured=spread(ratio),
                # On a logarithmic scale, so that the two can be exchanged.
                **signed(ratio.log(), 1),
            )


def _present(values: Tensor) -> Tensor:
    """Return the values of the seeds that were run."""
    return values[values.isfinite()]


def _averages(result: Result) -> Iterator[Evidence]:
    """Yield how much flatter an average is than the last iterate of the same run."""
    for name, (where, published) in SHARPNESS.items():
        if name in result.config.methods:
            last, average = (result.of("lambda_max", name, p, "eval") for p in ("last", "average"))
            ratio = _present(average / last)
            ratios = ", ".join(f"{one:.2f}" for one in published)
            if len(ratio):
                yield Evidence(
                    paper="GADAM",
                    where=where,
                    what=f"largest eigenvalue, average over last iterate, {name}",
                    published=f"below 1: {ratios}, without batch norm",
                    measured=spread(ratio),
                    **signed(ratio.log(), -1),
                )


def _degenerate(result: Result) -> Iterator[Evidence]:
    """Yield the mass at zero over training, of SGD."""
    c = result.config
    if "sgd" not in c.methods:
        return
    points = [point for point in c.points if point != "average"]
    for mode in MODES:
        masses = [_present(result.of("mass at zero", "sgd", p, mode)) for p in points]
        if all(map(len, masses)):
            epochs = ", ".join(map(str, (*c.epochs, c.num_epochs)))
            yield Evidence(
                paper="FLAT",
                where="Figures 11, 12",
                what=f"mass at zero after epochs {epochs}, SGD, batch norm in {mode} mode",
                published="extremely high throughout",
                measured=", ".join(f"{float(mass.mean()):.3f}" for mass in masses),
                **all_of(*(judge(mass, low=0.9, cause="below 0.9") for mass in masses)),
            )


# ------------------------------------------------------------------------------------------
# One run and its files.


def _train(config: Config, name: str, seed: int, folder: Path) -> None:
    """Train a run unless it is finished, and measure it unless that is done."""
    # An interrupted call may have trained the run and not measured it.
    trained = bool(_metrics(folder, config.num_epochs))
    missing = {
        point: folder / f"{file}.safetensors"
        for point, file in config.points.items()
        if config.measured and point not in _measured(folder)
    }
    if trained and not any(path.exists() for path in missing.values()):
        return
    # Loaded here and not by the caller: a study of finished runs needs no images.
    device = "cuda" if torch.cuda.is_available() else "cpu"
    images: Any = data.load(config.dataset, data_dir=config.data, device=device)
    train = images.train if config.num_train is None else images.train.take(config.num_train)
    width: Any = {} if config.width is None else {"width": config.width}
    model = new_network(config.model, images, seed, device, **width)
    if not trained:
        fit_whole(
            model, replace(images, train=train), num_epochs=config.num_epochs, batch_size=128,
            augment=config.augment, schedule="linear", precision=config.precision, seed=seed,
            evaluate_every=25, checkpoint=folder, log=folder / "log.jsonl", progress=True, top_k=5,
            keep=config.epochs, **_options(config, name),
        )  # fmt: skip
    for point, path in missing.items():
        if path.exists():
            training.load_weights(model, path)
            # Each point when it is done, so that an interrupted call continues with the next.
            points = _measured(folder) | {point: _measure(config, model, train, seed)}
            write_text(folder / "curvature.json", to_json(points, indent=1))


def _options(config: Config, name: str) -> dict[str, Any]:
    """Return the options of ``fit`` of a method."""
    options = dict(METHODS[name])
    options["average_from"] = config.start if options.pop("averaged", False) else None
    # The optimiser takes these two; the others are options of fit.
    settings = {key: options.pop(key) for key in ("lr", "weight_decay")}
    if name in ("adamw", "gadam"):
        # On few images adaptive methods need another learning rate than the published one.
        settings["lr"] *= config.adaptive_rate
    return options | {"optimizer_settings": settings}


def _measure(config: Config, model: nn.Module, train: data.Split, seed: int) -> dict[str, Any]:
    """Return norm of the weights, and curvature of the training loss in both batch-norm modes."""
    values: dict[str, Any] = {"norm": optim.weight_norms(model).l2}
    for mode in MODES:
        samples = train.take(min(config.measured, len(train))).tensors()
        # The Hessian of the loss without the weight decay.
        op = hessian(Risk(model, cross_entropy, samples, batch_norm=mode, batch_size=128))
        spectrum = lanczos(op, num_steps=config.num_steps, generator=seeded(seed))
        degeneracy = measures.rank_degeneracy(spectrum, matrix="hessian")
        # Four probes: the compared networks differ by factors.
        probes: Any = {"num_probes": 4, "generator": seeded(seed)}
        norm, sum_ = frobenius_norm(op, **probes), trace(op, method="hutchinson", **probes)
        numbers = map(float, (spectrum.values[-1], norm.mean, sum_.mean, degeneracy.mass.mean))
        values[mode] = dict(zip(CURVATURE, numbers, strict=True))
    return values


def _metrics(folder: Path, num_epochs: int) -> Mapping[str, float]:
    """Return the last line of the log of a finished run; nothing if it is not finished."""
    path = folder / "log.jsonl"
    # The last line is that of the last evaluation.
    lines = path.read_text().splitlines() if path.exists() else []
    last: dict[str, float] = json.loads(lines[-1]) if lines else {}
    return last if last.get("epoch") == num_epochs and "test_accuracy" in last else {}


def _measured(folder: Path) -> dict[str, Any]:
    """Return the measurements of a run by point."""
    path = folder / "curvature.json"
    points: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return points
