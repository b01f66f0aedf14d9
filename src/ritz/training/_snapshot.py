"""``Snapshot``: a model at one time of its training, and the measurements that quantities share."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from ritz import optim
from ritz._core.batches import split_labels
from ritz._core.results import Estimate
from ritz.curvature import CurvatureOperator, Risk, fisher
from ritz.curvature._shared import CurvatureMatrix
from ritz.operators import LinearOperator, exact
from ritz.optim import StepReader
from ritz.optim._shared import Edge, attached_to, edge, learning_rate
from ritz.spectra import DiscreteDensity, Eigenpairs, Spectrum, eigenpairs, lanczos, lanczos_block
from ritz.spectra import diagonal as diagonal_of
from ritz.spectra import trace as trace_of
from ritz.training._sample_statistics import (
    SampleGradients,
    local_step,
    sample_gradients,
    sample_lines,
)


@dataclass(frozen=True, slots=True)
class Tuning:
    """Constants of the shared measurements, and their costs."""

    # Costs in gradients of the watched samples, rounded up, of 1,024 samples of a perceptron on
    # one core (benchmarks/monitors.py). This is the most expensive case: its gradient is one dense
    # product, and all other work is limited by memory. A product took 1.0, a pass over the
    # gradients of samples 19 to 32, and a histogram 40 to 58. Norms of these gradients alone took
    # 2, and up to 3.4 for LeNet.
    product: float = 2.0
    samples: float = 35.0
    norms: float = 4.0
    histogram: float = 60.0
    # A product with 128 groups of samples took 10, and tracing the products of another matrix 35.
    grouped: float = 12.0
    traced: float = 40.0
    # Length of the random part of the start vector of a warm run. A run that starts exactly at an
    # eigenvector would never find another one whose eigenvalue has become larger.
    fresh: float = 0.1
    # Maximum number of steps of a search from a random vector, over num_steps.
    cold: int = 10
    # Least variance, relative to E |g_i|^2, that is computed as the difference from |g|^2. The sums
    # of squares are in float32, with relative errors near 1e-6, so three digits are left.
    cancelled: float = 1e-3


TUNING = Tuning()


class Settings(Protocol):
    """Settings of a monitor that quantities read; see :class:`CurvatureMonitor`."""

    names: tuple[str, ...]
    matrix: CurvatureMatrix
    train_batch_size: int | None
    rtol: float
    max_products: int
    num_steps: int
    num_runs: int
    num_probes: int
    num_vectors: int
    num_bins: int
    epsilon: float
    seed: int

    @property
    def parts(self) -> frozenset[str]:
        """Names of the measurements that the quantities share."""


@final
class Memory:
    """What a monitor remembers from one measurement to the next.

    Attributes:
        vectors: Eigenvectors from which the next search starts, by name, ``(P,)`` each.
        reader: Notes the weights before each step; ``None`` if nothing needs them.
    """

    def __init__(self) -> None:
        self.vectors: dict[str, Tensor] = {}
        self.reader: StepReader | None = None
        self._initial: dict[Tensor, Tensor] = {}
        self._invariant: tuple[str, ...] | None = None
        self._checked = False

    def note_initial(self, params: Iterable[Tensor]) -> None:
        """Store a copy of the weights as the initial weights."""
        self._initial = {p: p.detach().clone() for p in params}

    def initial_weights(self, risk: Risk) -> Tensor:
        """Return the initial weights ``(P,)``; if none were noted, those of the first call."""
        weights = dict(risk.model.named_parameters())
        chosen = {name: weights[name] for name in risk.space.shapes}
        if not self._initial:
            self.note_initial(chosen.values())
        # A parameter that the optimiser does not train has not moved.
        start = {name: self._initial.get(p, p.detach()) for name, p in chosen.items()}
        return risk.space.flatten(start).to(risk.theta)

    def invariant_weights(self, risk: Risk) -> tuple[str, ...]:
        """Return the names of the scale-invariant weights, which are determined once."""
        if self._invariant is None:
            _, context, _ = next(iter(risk.contexts()))
            inputs, named, _ = split_labels(context.batch)
            if named:
                raise ValueError(
                    "effective_rates needs batches (*inputs, target), got a dictionary: leave it "
                    "out of the quantities"
                )
            self._invariant = optim.scale_invariant_weights(risk.model, *inputs)
        return self._invariant

    def check_samples(self, risk: Risk) -> None:
        """Raise unless the loss is a mean over samples that can be separated; checked once."""
        if not self._checked:
            risk.require_separable("a quantity of single samples")
            risk.require_sample_mean(alone=True)
            self._checked = True

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Return the tensors to save, by their order in the optimiser where they belong to it."""
        state = {"vectors": dict(self.vectors), "initial": _numbered(self._initial)}
        return state | ({"before": _numbered(self.reader.before)} if self.reader else {})

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Continue from the tensors of :meth:`state_dict`, of the same model and optimiser."""
        self.vectors = dict(state.get("vectors", {}))
        _restore(self._initial, state.get("initial", {}))
        if self.reader is not None:
            self.reader.note()
            _restore(self.reader.before, state.get("before", {}))


def _numbered(tensors: Mapping[Tensor, Tensor]) -> dict[str, Tensor]:
    return {str(number): value for number, value in enumerate(tensors.values())}


def _restore(tensors: dict[Tensor, Tensor], saved: Mapping[str, Tensor]) -> None:
    if not saved:
        tensors.clear()
    for (p, _), value in zip(list(tensors.items()), saved.values(), strict=False):
        tensors[p] = value.to(p)


@final
class Snapshot:
    """A model at one time of its training, and its measurements so far.

    A measurement that several quantities share is made when the first of them needs it.

    Args:
        settings: The monitor.
        memory: What the monitor remembers from earlier measurements.
        risk: The loss on the watched samples, at the current weights.
        op: Its curvature.
        optimizer: The optimiser that trains the model, or ``None``.
    """

    def __init__(
        self,
        settings: Settings,
        memory: Memory,
        risk: Risk,
        op: CurvatureOperator,
        optimizer: Optimizer | None,
    ) -> None:
        self.settings, self.memory = settings, memory
        self.risk, self.op, self.optimizer = risk, op, optimizer

    def generator(self) -> torch.Generator:
        """Return a new generator with the seed of the monitor, for every quantity the same."""
        return torch.Generator().manual_seed(self.settings.seed)

    # Gradients

    @cached_property
    def _loss_and_gradient(self) -> tuple[float, Tensor, int]:
        """Loss, gradient and number of samples."""
        # F(w) = sum_b c_b L_b(w) + mu/2 |w|^2, with the gradient sum_b c_b grad L_b + mu w.
        risk, total, count = self.risk, torch.zeros_like(self.risk.theta), 0
        loss = torch.zeros((), dtype=torch.float64, device=total.device)
        with risk.settings():
            for _, context, weight in risk.contexts():
                gradient, value = risk.batch_gradient(context)
                total.add_(gradient, alpha=weight)
                loss += weight * value.double()
                count += context.size
        penalty = 0.5 * risk.l2 * float(risk.theta.double().square().sum())
        return float(loss) + penalty, total.add_(risk.theta, alpha=risk.l2), count

    @property
    def loss(self) -> float:
        """The loss on the watched samples."""
        return self._loss_and_gradient[0]

    @property
    def gradient(self) -> Tensor:
        """The gradient on the watched samples, ``(P,)``."""
        return self._loss_and_gradient[1]

    @cached_property
    def samples(self) -> SampleGradients:
        """Sums over the gradients of single samples, from one pass."""
        self.memory.check_samples(self.risk)
        sizes = {"gradient_histogram": 1, "gradient_weight_histogram": 2}
        return sample_gradients(
            self.risk,
            self.gradient,
            num_bins=self.settings.num_bins,
            histograms=[size for name, size in sizes.items() if name in self.settings.names],
        )

    @cached_property
    def square(self) -> float:
        """The squared norm of the gradient."""
        return float(self.gradient.double().square().sum())

    @cached_property
    def total_variance(self) -> float:
        r""":math:`\operatorname{tr} \Sigma`, the variance of the gradients of single samples."""
        # If another quantity needs all sample gradients, the variance is free: use the pass.
        known = None if "samples" in self.settings.parts else self._mean_square()
        if known is None:
            return self.samples.total_variance
        # tr Sigma = E |g_i|^2 - |g|^2. The L2 term shifts all gradients alike, so the variance does
        # not depend on it.
        plain = self.gradient.double() - self.risk.l2 * self.risk.theta.double()
        variance = known - float(plain.square().sum())
        return variance if variance > TUNING.cancelled * known else self.samples.total_variance

    def _mean_square(self) -> float | None:
        """Return E |g_i|^2 without the L2 term, or ``None`` if it has no closed form.

        Norms of gradients follow from the inputs of the layers and the derivatives in their outputs
        (Goodfellow, 2015).
        """
        self.memory.check_samples(self.risk)
        if self.risk.loss_fn is None:
            return None
        # The trace of the empirical Fisher matrix E g_i g_i'. No gradient of a sample is formed.
        value = exact(fisher(self.risk, kind="empirical"), "trace").value
        return None if value is None else float(value)

    @property
    def count(self) -> int:
        """The number of watched samples; of a text, of its segments."""
        return self._loss_and_gradient[2]

    @property
    def batch_size(self) -> int:
        """The batch size of training, if the monitor knows it; otherwise the watched samples."""
        return self.settings.train_batch_size or self.count

    @property
    def learning_rate(self) -> float:
        """The learning rate of the first group of parameters, 0 without an optimiser."""
        return 0.0 if self.optimizer is None else learning_rate(self.optimizer.param_groups[0])

    # Eigenvalues

    def _extreme_pair(self, name: str, op: LinearOperator, **end: Any) -> Eigenpairs:
        """Return an extreme pair; the search starts at the vector of the previous measurement."""
        settings, memory = self.settings, self.memory.vectors
        limits: dict[str, Any] = {"max_steps": TUNING.cold * settings.num_steps}
        start, generator = memory.get(name), self.generator()
        if start is not None and len(start) == op.shape[0]:
            # The vector has length one, so the random part is `fresh` times as long.
            noise = torch.randn(len(start), generator=generator).to(start)
            start = start.to(op.device) + (TUNING.fresh / noise.double().norm()).to(start) * noise
            limits = {"max_steps": settings.max_products, "start": start, "certify": "none"}
        run = eigenpairs(op, rtol=settings.rtol, generator=generator, **end, **limits)
        if run.vectors is not None:
            memory[name] = run.vectors[:, 0].clone()
        return run

    @cached_property
    def largest(self) -> Eigenpairs:
        """The pair of the largest eigenvalue."""
        return self._extreme_pair("largest", self.op, largest=1)

    @cached_property
    def smallest(self) -> Eigenpairs:
        """The pair of the smallest eigenvalue."""
        return self._extreme_pair("smallest", self.op, smallest=1)

    @cached_property
    def edge(self) -> Edge | None:
        """The edge of stability of the optimiser, if there is one."""
        if self.optimizer is None or not self.learning_rate:
            return None
        return edge(self.optimizer, self.risk)

    @cached_property
    def preconditioned(self) -> Eigenpairs | None:
        """The largest eigenvalue of the matrix as an adaptive optimiser scales it."""
        if self.edge is None:
            return None
        # S (H + Gamma) S, for which one threshold holds although learning rates differ.
        return self._extreme_pair("preconditioned", self.edge.operator(self.op), largest=1)

    @cached_property
    def leading(self) -> Eigenpairs:
        """The pairs of several largest eigenvalues."""
        count = min(self.settings.num_vectors, self.op.shape[0])
        steps = max(TUNING.cold * self.settings.num_steps, count)
        limits: dict[str, Any] = {"rtol": self.settings.rtol, "max_steps": steps}
        return eigenpairs(self.op, largest=count, generator=self.generator(), **limits)

    # Spectra

    @property
    def num_steps(self) -> int:
        """Lanczos steps of a spectrum: a Krylov space is never larger than the matrix."""
        return min(self.settings.num_steps, self.op.shape[0])

    @cached_property
    def runs(self) -> tuple[Spectrum, ...]:
        """Spectra of several start vectors."""
        runs, steps = self.settings.num_runs, self.num_steps
        if runs == 1:
            return (lanczos(self.op, num_steps=steps, generator=self.generator()),)
        return lanczos_block(self.op, num_steps=steps, num_probes=runs, generator=self.generator())

    @cached_property
    def density(self) -> DiscreteDensity:
        """The density of the spectra."""
        first, longest = self.runs[0], max(len(run.values) for run in self.runs)

        def padded(name: str) -> Tensor:
            # A run that found an invariant space is shorter: repeat its last value with weight 0.
            rows = []
            for run in self.runs:
                row = getattr(run, name)
                rest = row[-1:] if name == "values" else torch.zeros_like(row[-1:])
                rows.append(torch.cat([row, rest.expand(longest - len(row))]))
            return torch.stack(rows)

        return DiscreteDensity(
            nodes=padded("values"),
            weights=padded("weights"),
            roundoff=first.roundoff,
            dimension=first.dimension,
            num_products=sum(run.num_products for run in self.runs),
            seed=self.settings.seed,
            matrix=first.matrix,
            batch_norm=first.batch_norm,
        )

    def mean_over_runs(self, function: Callable[[Spectrum], float], method: str) -> Estimate:
        """Return the mean of a function over the spectra, with its standard error."""
        samples = torch.tensor([function(run) for run in self.runs], dtype=torch.float64)
        return Estimate.of(samples, method=method, num_products=0)

    @cached_property
    def trace(self) -> Estimate:
        """The trace."""
        return trace_of(self.op, num_probes=self.settings.num_probes, generator=self.generator())

    @cached_property
    def diagonal(self) -> Tensor:
        """The exact diagonal, ``(P,)``, float64; raises if it is not known."""
        self.memory.check_samples(self.risk)
        return diagonal_of(self.op, method="exact").mean.double()

    # Weights and steps

    @cached_property
    def before(self) -> Tensor | None:
        """The weights before the last step, ``(P,)``, if it is known."""
        reader = self.memory.reader
        return None if reader is None else reader.weights_before(self.risk)

    @property
    def initial(self) -> Tensor:
        """The weights at the beginning of training, ``(P,)``."""
        return self.memory.initial_weights(self.risk)

    @cached_property
    def average(self) -> dict[str, Tensor] | None:
        """The average of the weights by name, once it has begun."""
        average = None if self.optimizer is None else attached_to(self.optimizer)
        return average.weights(self.risk.model) if average is not None and average.count else None

    @cached_property
    def local_step(self) -> float | None:
        """Where the last step landed on the parabola along it; see :func:`local_step`."""
        if self.before is None:
            return None
        # The whole step, so that the parabola has its ends at t = 0 and t = 1.
        direction = self.risk.theta - self.before
        if not bool(direction.any()):
            return -1.0
        ends = [sample_lines(risk, direction) for risk in (self.risk.at(self.before), self.risk)]
        if None in ends:
            return self._plain_local_step(direction)
        (losses, slopes), (losses_after, slopes_after) = ends  # type: ignore[misc]
        means = [each.mean() for each in (losses, losses_after, slopes, slopes_after)]
        if len(losses) < 2:
            # One sample has no variance, so all four values count the same.
            variances = [1.0] * 4
        else:
            variances = [float(x.var()) for x in (losses, losses_after, slopes, slopes_after)]
        return local_step((means[0], means[1]), (means[2], means[3]), variances)

    def _plain_local_step(self, direction: Tensor) -> float:
        """Return ``local_step`` with equal weights, if losses of single samples are not known."""
        start = self.risk.at(self.risk.theta - direction)
        before = Snapshot(self.settings, self.memory, start, self.op, None)
        ends = (before, self)
        losses = [torch.tensor(end.loss, dtype=torch.float64) for end in ends]
        slopes = [(end.gradient.double() @ direction.double()).cpu() for end in ends]
        return local_step((losses[0], losses[1]), (slopes[0], slopes[1]), [1.0] * 4)
