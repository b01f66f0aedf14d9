"""Runs of ``covariance_noise``: small batches, large ones, and large ones with gradient noise."""

import math
import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ritz import data
from ritz._core.batch_norm import batch_norms
from ritz._core.journal import Journal, Parts
from ritz._core.modes import Precision
from ritz.curvature import CurvatureOperator, Risk, fisher, gradient_statistics, noise_sample
from ritz.measures import calibrated_sharpness, excess_risk
from ritz.spectra import diagonal, frobenius_norm
from ritz.studies._protocol import StatePath, column, seeded, timeless
from ritz.studies._training import Samples, fit_whole, new_network

NOISES: tuple[Literal["full", "diagonal"], ...] = ("full", "diagonal")  # of Figure 2


class Runner:
    """Trains the network of a task with every method.

    Args:
        config: A ``Config`` of the study ``covariance_noise``.
        dataset: Name of the data.
        model: Name of the network.
    """

    def __init__(self, config: Any, dataset: str, model: str) -> None:
        self.config, self.name = config, model
        # Measurements have at least the digits of TF32; bfloat16 would have too few.
        self.precision: Precision | None = None if config.precision == "float32" else "tf32"
        # Learning rates are chosen with images of the training set. The test set is not used.
        load: Any = partial(data.load, dataset, data_dir=config.data, device=config.device)
        self.sets = load()
        self.tuning = load(validation=len(self.sets.train) // 12)

    def cell(self, method: str, state: StatePath = None) -> dict[str, Tensor]:
        """Return the fields of a ``Cell``: all runs of a method, with its best learning rate.

        Args:
            method: A method of the study.
            state: Path where finished runs are saved, and read when the study is run again.
        """
        config, parts = self.config, Parts(Journal(state, {"config": timeless(self.config)}))
        rate, runs = self.choose(method, parts), []
        for k in range(config.num_seeds):
            train = partial(self.train, method, rate, config.seed + k, first=not k)
            runs.append(parts.get(f"seed {k}", train))
        return {
            "accuracies": column(each["accuracy"] for each in runs),
            "rates": torch.tensor(rate, dtype=torch.float64),
            "losses": torch.stack([each["losses"] for each in runs]).mean(0),
            "steps": self._steps(method),
            "sharpness": column(each["sharpness"] for each in runs),
            "generalisation": column(each["terms"][0] for each in runs),
            "optimisation": column(each["terms"][1] for each in runs),
            "fisher_norms": runs[0]["norms"],
            "seconds": column(each["seconds"] for each in runs).mean(),
        }

    def choose(self, method: str, parts: Parts) -> float:
        """Return the learning rate whose worst validation accuracy over the tuning seeds is best.

        The smallest one, if every rate diverges for some seed.
        """
        rates: tuple[float, ...] = self.config.rates
        if method == "small" and self.config.small_rates is not None:
            rates = self.config.small_rates
        if len(rates) == 1:
            return rates[0]
        # A run that diverged scores zero, so its rate is never better than this.
        chosen, best = min(rates), 0.0
        for rate in rates:
            worst = math.inf
            for k in range(self.config.tuning_seeds):
                score = partial(self._score, method, rate, self.config.seed + 1000 + k)
                worst = min(worst, parts.get(f"rate {rate} seed {k}", score))
                if worst <= best:  # more seeds cannot make it better
                    break
            else:
                chosen, best = rate, worst
        return chosen

    def _score(self, method: str, rate: float, seed: int, state: StatePath) -> float:
        epochs = self.config.tuning_epochs
        _, result = self._fit(method, rate, seed, self.tuning, epochs=epochs, state=state)
        return float(result.metrics["validation_accuracy"]) if result.status.ok else 0.0

    def train(
        self, method: str, rate: float, seed: int, *, first: bool, state: StatePath = None
    ) -> dict[str, Any]:
        """Return the results of a run; of the ``first`` one also norms of Fisher matrices."""
        norms = torch.full((2, self.config.num_epochs + 1), math.nan, dtype=torch.float64)
        # Figure 5a watches the Fisher matrix along one run with large batches.
        watched = self.sets.train.take(min(1024, len(self.sets.train)), generator=seeded(0))
        monitor = None
        if first and method == "large":
            monitor = FisherNorms(watched.tensors(), self.config.fisher_every, self.precision)
        begin = time.perf_counter()
        model, result = self._fit(method, rate, seed, self.sets, monitor, state=state)
        seconds = time.perf_counter() - begin
        for epoch, pair in ({} if monitor is None else monitor.norms).items():
            norms[:, epoch] = column(pair)
        losses = torch.full((self.config.num_epochs,), math.nan, dtype=torch.float64)
        # A run that diverged has fewer epochs.
        losses[: result.num_epochs] = result.history["train_loss"]
        return {
            "accuracy": result.metrics.get("test_accuracy", math.nan),
            "losses": losses,
            "sharpness": self._sharpness(model),
            "terms": self._terms(model),
            "norms": norms,
            "seconds": seconds,
        }

    def variances(self, rate: float) -> tuple[tuple[str, ...], Tensor]:
        """Return names and mean gradient variances by layer, Figure 2."""
        # A partially trained network, as in Figure 2: one epoch.
        model, _ = self._fit("small", rate, self.config.seed, self.sets, epochs=1)
        count = min(self.config.variance_samples, len(self.sets.train))
        risk = self._risk(model, self.sets.train, count)
        # On a GPU, a few samples at once would take most of the time for the calls of kernels.
        chunk = 32 if risk.theta.is_cuda else None
        statistics = gradient_statistics(risk, chunk_size=chunk)
        names = statistics.names
        counts = column(risk.space.shapes[name].numel() for name in names)
        variance = column(statistics.layers[name][2] for name in names)
        # Samples are drawn with replacement, so the variance of a batch of M is V / M.
        rows = [variance / self.config.small, variance / self.config.large]
        for kind in NOISES:
            # The noise of one sample; a step adds it with the weight 1/M_S - 1/M_L.
            block = noise_sample(risk, kind, num_samples=64)
            squares = risk.space.unflatten(block.double().square().mean(1))
            added = column(float(squares[name].sum()) for name in names)
            rows.append(rows[1] + added * (1 / self.config.small - 1 / self.config.large))
        return names, torch.stack(rows) / counts

    def _fit(
        self, method: str, rate: float, seed: int, sets: Any, monitor: Any = None,
        epochs: int | None = None, state: StatePath = None,
    ) -> tuple[nn.Module, Any]:  # fmt: skip
        model = new_network(self.name, sets, seed)
        count = epochs or self.config.num_epochs
        options = self._options(method, model, count)
        # Appendix E.1: division by 10 after 1/2 and 3/4, and a warm-up over 5 % for large batches.
        warmup = 0 if method == "small" else math.ceil(0.05 * count)
        model.to(self.config.device)
        if monitor is not None:
            monitor(0, model, None)
        # A run of hours can resume. Its files are in a folder beside the state of the study.
        folder = None if state is None else Path(state).with_name(f"training {Path(state).name}")
        result = fit_whole(
            model, sets, optimizer_settings={"lr": rate, "momentum": 0.9, "weight_decay": 5e-4},
            num_epochs=count, schedule="step", warmup=warmup, seed=seed, evaluate_every=count,
            precision=self.config.precision,
            monitors=[] if monitor is None else [monitor], checkpoint=folder,
            **options,
        )  # fmt: skip
        if folder is not None:
            # From here on, the state of the study has the result.
            shutil.rmtree(folder)
        return model, result

    def _options(self, method: str, model: nn.Module, count: int) -> dict[str, Any]:
        """Return the options of training that make a method, for a number of epochs."""
        if method == "small":
            return {"batch_size": self.config.small}
        options: dict[str, Any] = {"batch_size": self.config.large}
        if batch_norms(model):
            options["ghost_batch"] = self.config.small
        if method == "batch change":
            small, large, switch = self.config.small, self.config.large, self._switch(count)
            options["batch_schedule"] = f"0:{small},{switch}:{large}"
        elif method != "large":
            options |= {"noise": method, "noise_until": self.config.noise_until}
            # Multiplicative noise has a fixed scale; the others have the noise of small batches.
            if method != "multiplicative":
                options["noise_batch"] = self.config.small
        return options

    def _switch(self, count: int) -> int:
        """Return the number of epochs with small batches before large ones, of so many."""
        epochs: int = max(1, round(self.config.noise_until * count))
        return epochs

    def _steps(self, method: str) -> Tensor:
        config, switch = self.config, self._switch(self.config.num_epochs)
        sizes = [config.small if method == "small" else config.large] * config.num_epochs
        # ceil(N / B) steps per epoch: the last batch is smaller.
        if method == "batch change":
            sizes[:switch] = [config.small] * min(switch, config.num_epochs)
        return column(math.ceil(len(self.sets.train) / size) for size in sizes).cumsum(0)

    def _risk(self, model: nn.Module, split: Any, count: int) -> Risk:
        # Use the same samples for every network, so that differences are due to the networks.
        part = split.take(count, generator=seeded(0))
        options: Any = {"batch_size": 512, "precision": self.precision}
        return Risk(model.eval(), cross_entropy, part.tensors(), **options)

    def _terms(self, model: nn.Module) -> tuple[float, float]:
        parts = (self.sets.train, self.sets.test)
        count = min(10_000, *map(len, parts))
        try:
            terms = excess_risk(*(self._risk(model, part, count) for part in parts))
        except ValueError:  # the run diverged
            return math.nan, math.nan
        return terms.generalisation, terms.optimisation

    def _sharpness(self, model: nn.Module) -> float:
        train, test = self.sets.train, self.sets.test
        count = min(1024, len(test), len(train))
        # TF32 has about three digits, so a smaller residual might never be reached.
        limits: Any = {} if self.precision is None else {"rtol": 0.01, "max_steps": 200}
        try:
            return float(calibrated_sharpness(
                model,
                lambda m: self._risk(m, train, count),
                lambda m: self._risk(m, test, len(test)),
                **limits,
            ))  # fmt: skip
        except ValueError:  # diverged, or every held-out image is right
            return math.nan


class FisherNorms:
    """Monitor that collects the Frobenius norms of the Fisher matrix and of its diagonal.

    Args:
        samples: Samples of the empirical Fisher matrix.
        every: Epochs between measurements.
        precision: Precision of the products.
    """

    unit = "epoch"

    def __init__(
        self, samples: Samples, every: int = 1, precision: Precision | None = None
    ) -> None:
        self.norms: dict[int, tuple[float, float]] = {}
        self._samples, self._every, self._precision = samples, every, precision
        self._op: CurvatureOperator | None = None

    def __call__(self, count: int, model: nn.Module, optimizer: Any) -> None:
        """Measure both norms."""
        if count % self._every:
            return
        op: CurvatureOperator
        if self._op is None:
            options: Any = {"batch_size": 512, "precision": self._precision}
            op = fisher(Risk(model, cross_entropy, self._samples, **options), kind="empirical")
        else:
            # Nothing is traced again.
            op = self._op.at(self._op.risk.moved())
        # The same probes in all epochs.
        whole = frobenius_norm(op, num_probes=8, generator=seeded(0))
        part = diagonal(op, num_probes=8, generator=seeded(0))
        self.norms[count] = float(whole.mean), float(part.mean.double().norm())
        # With an empty cache, so that no memory is taken between measurements.
        self._op = op.at(op.risk)
