"""The sizes and methods of the study ``adaptive_gap``: networks, lengths, rates and dampings."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ritz._core.training_config import TrainingPrecision
from ritz.data import Augmentation

SizeName = Literal["smoke", "small", "gpu", "paper"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Learning rates and dampings over which an optimiser is run.

    Attributes:
        rates: Learning rates.
        deltas: Dampings.
        settings: Further settings.
    """

    rates: tuple[float, ...]
    deltas: tuple[float, ...]
    settings: Mapping[str, Any]


NAMES = {"damped_adamw": "damped AdamW", "kfac": "K-FAC"}
# By the names of optimisers that ``fit`` knows.
GRIDS = {
    # Fig. 5: dampings from Adam's epsilon up to 0.0075.
    "damped_adamw": Grid(
        rates=(4e-4, 1e-3, 4e-3),
        deltas=(1e-8, 4e-4, 1e-3, 8e-3, 0.1),
        settings={"weight_decay": 0.0},
    ),
    # Fig. 4 and Table 2, right: a constant ratio of damping and rate is a diagonal of the grid.
    # Inverses every 100 steps and momentum as in Spectral Machine Learning, section 5.8.2.
    "kfac": Grid(
        rates=(1e-3, 1e-2, 0.1),
        deltas=(0.01, 0.1, 1.0),
        settings={"momentum": 0.9, "inverse_every": 100},
    ),
}
# For runs of a few epochs: a smaller learning rate as well, because Adam at the larger ones may not
# leave the plateau at the start of a VGG without batch norm, and fewer dampings. Along the diagonal
# of K-FAC, steps in flat directions are those of SGD with a learning rate of 0.05, at which
# Spectral Machine Learning trains a VGG-16 (section 4.6).
GPU_GRIDS = {
    "damped_adamw": replace(
        GRIDS["damped_adamw"], rates=(1e-4, 4e-4, 1e-3, 4e-3), deltas=(1e-8, 1e-3, 8e-3)
    ),
    "kfac": replace(GRIDS["kfac"], deltas=(0.02, 0.2, 2.0)),
}
SGD_RATES = (0.003, 0.01, 0.03)  # 0.01 is the "maximal stable" rate of section 5.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Data, networks and lengths of the runs.

    Attributes:
        data: Data of the convex problem.
        num_train: Its training samples.
        num_vectors: Lanczos steps, ``k``.
        num_steps: Steps of the optimiser.
        interval: Steps between refreshes of the Ritz vectors.
        deltas: Dampings.
        etas: Factors of the sharp directions.
        network: The network of the grid and its options.
        images: Data set of the network, and its number of training samples (0 for all).
        augmentation: Augmentation of these images.
        batch_size: Batch setup.
        num_epochs: Epochs of the grid.
        warmup: Epochs at the start of which the learning rate rises, in every step.
        precision: Precision of training in the grid.
        grids: Learning rates and dampings by optimiser.
        newton_epochs: Epochs of the second-order runs.
        longer: Factor of the epochs of Adam and SGD, so that they take about as much time.
        curvature_samples: Training samples on which the largest eigenvalue is measured.
        least_accuracy: Accuracy in training above which a run counts as one that has learned. The
            Hessian on the plateau at the start says nothing on the damping.
        eigenvalue: Options of ``LargestEigenvalue``. Empty for all samples at once in float32.
    """

    data: str = "mnist"
    num_train: int = 1000
    num_vectors: int = 50
    num_steps: int = 200
    interval: int = 10
    deltas: tuple[float, ...] = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
    etas: tuple[float, ...] = (1.0, 3.0, 10.0)
    network: tuple[str, dict[str, Any]] = ("lenet", {})
    images: tuple[str, int] = ("mnist", 1000)
    augmentation: Augmentation | None = None
    batch_size: int = 50
    num_epochs: int = 30
    warmup: int = 0
    precision: TrainingPrecision = "float32"
    grids: Mapping[str, Grid] = field(default_factory=lambda: GRIDS)
    newton_epochs: int = 4
    longer: int = 8
    curvature_samples: int = 1000
    least_accuracy: float = 0.0
    eigenvalue: Mapping[str, Any] = field(default_factory=dict)


_VGG: dict[str, Any] = {
    "network": ("vgg16", {}),
    "images": ("cifar100", 0),
    "augmentation": Augmentation(),
    "batch_size": 128,
    "least_accuracy": 0.03,
}
SETUPS: dict[SizeName, Setup] = {
    # Seconds, without any files: what the tests run.
    "smoke": Setup(
        data="digits", num_train=60, num_vectors=8, num_steps=6, deltas=(0.1, 1.0),
        etas=(1.0, 10.0), network=("mlp", {"hidden": 8}), images=("digits", 80), num_epochs=2,
        newton_epochs=2, longer=2, curvature_samples=40,
    ),
    # Minutes on two cores.
    "small": Setup(),
    # The grid of a VGG-16 in four minutes on a GPU. The errors of an eigenvalue, 0.1 % by its
    # residual and by TF32, are far below the differences between the runs.
    "gpu": Setup(
        **_VGG, num_steps=2000, interval=1, num_epochs=6, warmup=1, precision="bfloat16",
        grids=GPU_GRIDS, newton_epochs=2, curvature_samples=2000,
        eigenvalue={"batch_size": 500, "precision": "tf32", "rtol": 0.03, "max_steps": 60},
    ),
    # The sizes of the papers, as far as they say; the number of LOPT steps is not published.
    "paper": Setup(
        **_VGG, num_steps=2000, interval=1, num_epochs=300, newton_epochs=100,
        curvature_samples=8192,
    ),
}  # fmt: skip

# Fig. 4.2b: delta = 10 alpha and 20 Lanczos steps; Adam and SGD with several rates.
NEWTON = "lanczos_newton"
_HESSIAN: dict[str, Any] = {"num_steps": 20, "start": "random"}
_GGN = _HESSIAN | {"matrix": "ggn"}
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "SGD 0.01": ("sgd", {"lr": 0.01, "momentum": 0.9}),
    "SGD 0.03": ("sgd", {"lr": 0.03, "momentum": 0.9}),
    "Adam 0.003": ("adam", {"lr": 3e-3}),
    "|H|, rate 1": (NEWTON, _HESSIAN | {"lr": 1.0, "delta": 10.0}),
    "GGN, rate 0.1": (NEWTON, _GGN | {"lr": 0.1, "delta": 1.0}),
    "GGN from g, rate 0.3": (NEWTON, _GGN | {"lr": 0.3, "delta": 0.3, "start": "gradient"}),
    "GGN, rate 0.1, every 10": (NEWTON, _GGN | {"lr": 0.1, "delta": 1.0, "interval": 10}),
}
