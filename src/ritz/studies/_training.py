"""Data, small networks, short trainings and power laws that several studies share.

Trainings here are plain loops at a constant learning rate. Studies of the training loop itself call
:func:`fit_whole`.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, cross_entropy
from torch.optim import SGD, Optimizer

from ritz import data, measures, models, training
from ritz._core.modes import Precision
from ritz._core.progress import Progress, tracking
from ritz.curvature import CurvatureOperator, Risk, hessian
from ritz.spectra import eigenpairs
from ritz.studies._protocol import column, seeded

Samples = tuple[Tensor, Tensor]  # inputs and labels
# Small networks for a CPU.
NARROW: dict[str, dict[str, Any]] = {"mlp": {"hidden": (64,)}, "lenet": {"width": 2}}


def fit_whole(*args: Any, **options: Any) -> training.TrainingResult:
    """Train by :func:`ritz.training.fit`; raise if ctrl-C or SIGTERM ended the training early."""
    result = training.fit(*args, **options)
    if result.status.outcome == "interrupted":  # the study must not measure such a network
        raise KeyboardInterrupt
    return result


def load_pooled(config: Any, device: torch.device | str) -> tuple[Samples, Samples]:
    """Return training and test samples: images averaged over squares of ``config.pool`` pixels."""
    images: Any = data.load(config.dataset, data_dir=config.data, device=device)
    count = min(config.num_samples, len(images.train))
    train = images.train.take(count, generator=seeded(config.seed))
    (inputs, labels), (held, held_labels) = train.tensors(), images.test.tensors()
    pooled = partial(avg_pool2d, kernel_size=config.pool)
    return (pooled(inputs), labels), (pooled(held), held_labels)


def new_network(name: str, images: Any, seed: int, device: Any = None, **options: Any) -> nn.Module:
    """Return a network by name for the images of a data set, with the weights of a seed."""
    shape: Any = {"num_classes": images.num_classes, "input_shape": images.shape}
    return models.create(name, **shape, generator=seeded(seed), device=device, **options)


def largest_eigenvalue(model: nn.Module, samples: Samples, seed: int) -> float:
    """Return the largest eigenvalue of the Hessian of the loss on all samples at once."""
    op = hessian(Risk(model, cross_entropy, samples))
    top = eigenpairs(op, largest=1, rtol=0.01, vectors=False, generator=seeded(seed))
    return float(top.values[-1])


@final
class LargestEigenvalue:
    """Largest eigenvalues of the Hessians of several networks of one architecture.

    The products are traced once, for all networks.

    Args:
        model: A network of the architecture. Its weights are overwritten.
        batch_size: Samples per batch of a product.
        precision: Precision of the products.
        rtol: Residual relative to the norm.
        max_steps: Maximum number of products. The Hessian of a network that has not learned may
            have no separate largest eigenvalue, and the largest Ritz value is then returned.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        batch_size: int,
        precision: Precision,
        rtol: float,
        max_steps: int,
    ) -> None:
        self._model, self._batch_size, self._precision = model, batch_size, precision
        self._limits: Any = {"rtol": rtol, "max_steps": max_steps}
        self._op: CurvatureOperator | None = None

    def __call__(self, model: nn.Module, samples: Samples, seed: int) -> float:
        """Return the largest eigenvalue of the Hessian of the loss of a network."""
        self._model.load_state_dict(model.state_dict())
        batches: Any = {"batch_size": self._batch_size}
        op: CurvatureOperator
        if self._op is None:
            options: Any = batches | {"precision": self._precision}
            op = hessian(Risk(self._model, cross_entropy, samples, **options))
        else:
            op = self._op.at(self._op.risk.moved(samples, **batches))
        top = eigenpairs(op, largest=1, vectors=False, generator=seeded(seed), **self._limits)
        # With an empty cache, so that no memory is taken between two networks.
        self._op = op.at(op.risk)
        return float(top.values[-1])


def initial_network(name: str, config: Any, train: Samples) -> nn.Module:
    """Return a network by name for some samples, with the weights of the seed."""
    return models.create(
        name,
        num_classes=int(train[1].max()) + 1,
        input_shape=tuple(train[0].shape[1:]),
        generator=seeded(config.seed),
        device=train[0].device,
        **NARROW.get(name, {}),
    )


def small_network(
    images: Any, width: int, generator: torch.Generator, *, batch_norm: bool = True
) -> nn.Sequential:
    """Return three convolutions, each of which halves the image, with or without batch norm."""
    channels, layers = [images.shape[0], width, 2 * width, 4 * width], list[nn.Module]()
    for before, after in pairwise(channels):
        layers.append(nn.Conv2d(before, after, 3, stride=2, padding=1, bias=not batch_norm))
        layers += [nn.BatchNorm2d(after), nn.ReLU()] if batch_norm else [nn.ReLU()]
    head = nn.Linear(channels[-1], images.num_classes)
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)
    for layer in model:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            # Not from the global generator; variance 2 / fan-in keeps the scale of ReLU layers.
            nn.init.kaiming_normal_(layer.weight, generator=generator)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return model


def trained_network(name: str, config: Any, train: Samples) -> nn.Module:
    """Return a network after ``config.num_epochs`` of SGD with momentum, in batches of 64."""
    model = initial_network(name, config, train)
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    train_epochs(model, optimizer, train, 64, config.num_epochs, seeded(config.seed))
    return model


def train_epochs(
    model: nn.Module,
    optimizer: Optimizer,
    train: Samples,
    batch_size: int,
    num_epochs: int,
    generator: torch.Generator,
    *,
    label: str = "training",
    progress: bool | Progress = False,
) -> None:
    """Train for some epochs of whole batches, at a constant learning rate."""
    inputs, labels = train
    model.train()
    # Only whole batches: all steps have gradients of the same noise, and a last batch of one
    # sample would have no batch norm.
    steps = len(inputs) // batch_size
    with tracking(progress, label, num_epochs * steps) as bar:
        for epoch in range(num_epochs):
            order = torch.randperm(len(inputs), generator=generator).to(inputs.device)
            total = 0.0
            for step, rows in enumerate(order.split(batch_size)[:steps], start=1):
                optimizer.zero_grad()
                loss = cross_entropy(model(inputs[rows]), labels[rows])
                loss.backward()
                optimizer.step()
                total += float(loss.detach())
                bar.update(epoch * steps + step, f"mean loss {total / step:.3f}")


def with_wrong_labels(
    labels: Tensor, share: float, classes: int, generator: torch.Generator
) -> Tensor:
    """Return labels, a fraction of which is replaced by one of the other classes at random."""
    # Drawn without replacement: the share is exact for every seed.
    wrong = torch.randperm(len(labels), generator=generator)[: round(share * len(labels))]
    labels = labels.clone()
    # A shift by 1 to C - 1 modulo C reaches every other class with the same probability.
    labels[wrong] += torch.randint(1, classes, wrong.shape, generator=generator)
    return labels % classes


def largest_rates(
    risk: Risk,
    make: Callable[[Any, float], Optimizer],
    config: Any,
    starts: Tensor,
    *,
    limit: float = 2.0,
) -> tuple[Tensor, Tensor]:
    """Return the largest learning rates of short trainings, and half their 95 % intervals.

    Both have the shape ``(S,)``, with one entry for each of ``config.batch_sizes``.

    Args:
        risk: The loss at the weights from which the trainings start.
        make: Returns the optimiser for parameters, or a model, and a learning rate.
        config: The configuration, with batch sizes and the cost of the trainings.
        starts: First learning rates that are tried, ``(S,)``.
        limit: Multiple of the first loss above which a training fails.
    """
    limits = [
        measures.trainable_rate(
            risk,
            make,
            batch_size=size,
            start=float(start),
            num_steps=config.num_steps,
            num_trials=config.num_trials,
            limit=limit,
            generator=seeded(config.seed),
        )
        for size, start in zip(config.batch_sizes, starts, strict=True)
    ]
    return column(map(float, limits)), column(float(one.error()) for one in limits)


def exponent(sizes: Sequence[float], values: Tensor) -> float:
    """Return the exponent of a power law through values ``(S,)`` over batch sizes, without NaN."""
    # log y = b log x + c: the exponent b is the slope of the least-squares line.
    x, y = torch.tensor(sizes, dtype=torch.float64).log(), values.log()
    x, y = x[y.isfinite()], y[y.isfinite()]
    if len(x) < 2:
        return math.nan
    # The slope is sum (x - mean) y / sum (x - mean)^2.
    x = x - x.mean()
    return float(x @ y / (x @ x))


def exponents(sizes: Sequence[float], values: Tensor) -> Tensor:
    """Return the exponents of values ``(..., S)`` over the first of the batch sizes, ``(...)``."""
    rows = values[..., : len(sizes)].flatten(0, -2)
    return column(exponent(sizes, one) for one in rows).view(values.shape[:-1])
