"""The quantities of monitors by name: what is measured, and its cost."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ritz import optim
from ritz._core.registry import Registry
from ritz._core.results import Estimate
from ritz.curvature import distance, fisher
from ritz.measures import bulk_edge, curvature_variance, gradient_overlap, rank_degeneracy
from ritz.spectra import diagonal, frobenius_norm, lanczos
from ritz.spectra._shared import negative_values
from ritz.training._log import Record
from ritz.training._sample_statistics import Histogram
from ritz.training._snapshot import TUNING, Settings, Snapshot

Measure = Callable[[Snapshot], Mapping[str, Any]]
Cost = Callable[[Settings], float]

# Measurements that several quantities share, each with its cost in gradients of the watched
# samples. A product with ``k`` vectors counts as ``k`` products.
PARTS: dict[str, Cost] = {
    "gradient": lambda settings: 1.0,
    "samples": lambda settings: TUNING.samples,
    "variance": lambda settings: TUNING.norms,
    "largest": lambda settings: TUNING.product * settings.max_products,
    "smallest": lambda settings: TUNING.product * settings.max_products,
    "preconditioned": lambda settings: TUNING.product * settings.max_products,
    "leading": lambda settings: TUNING.product * TUNING.cold * settings.num_steps,
    "spectra": lambda settings: TUNING.product * settings.num_steps * settings.num_runs,
    # XTrace takes two products per probe. An exact trace costs a backward pass per output instead.
    "trace": lambda settings: TUNING.product * 2 * settings.num_probes,
    # The weights before the last step are copied in every step, not in a measurement.
    "step": lambda settings: 0.0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """Something that a monitor measures.

    Attributes:
        name: Its name.
        text: Description in one line.
        group: Subject: ``curvature``, ``stability``, ``gradients``, ``weights`` or
            ``steps``.
        parts: Measurements that it shares with other quantities; keys of ``PARTS``.
        own_cost: Cost without that of its parts, in gradients of the watched samples.
        separable: Whether the samples of a batch must be independent of each other.
        measure: Takes a :class:`Snapshot` and returns numbers, or lists of numbers, by name.
        check: Takes a :class:`Snapshot` before training, and raises ``ValueError`` if the model or
            its loss does not have the quantity; ``None`` if all have it.
    """

    name: str
    text: str
    group: str
    parts: tuple[str, ...]
    own_cost: Cost
    separable: bool
    measure: Measure
    check: Callable[[Snapshot], object] | None

    def cost(self, settings: Settings) -> float:
        """Return the cost of this quantity alone, in gradients of the watched samples."""
        return self.own_cost(settings) + sum(PARTS[part](settings) for part in self.parts)


QUANTITIES: Registry[Quantity] = Registry("quantity", listing="ritz list quantities")
# Default quantities of a monitor. They cost at most 17 gradients of the watched samples.
USUAL = ("lambda_max", "weight_norms", "gradient_norm", "gradient_variance", "noise_scale")


def register_quantity(
    name: str,
    text: str,
    *,
    group: str = "curvature",
    parts: Iterable[str] = (),
    cost: float | Cost = 0.0,
    separable: bool = False,
    check: Callable[[Snapshot], object] | None = None,
) -> Callable[[Measure], Measure]:
    """Return a decorator that registers a quantity for :class:`CurvatureMonitor`.

    Args:
        name: Name, which must not be registered yet.
        text: Description in one line.
        group: Subject: ``curvature``, ``stability``, ``gradients``, ``weights``,
            ``steps``, or a new word.
        parts: Measurements that it shares with other quantities: ``gradient``, ``samples``
            (gradients of single samples), ``variance`` (of these gradients, in total),
            ``largest``, ``smallest``, ``leading``, ``preconditioned`` (eigenvalues), ``spectra``,
            ``trace``, ``step``.
        cost: Cost without that of its parts, in gradients of the watched samples.
        separable: Whether the samples of a batch must be independent of each other, which they are
            not with batch norm in train mode. The parts ``samples`` and ``variance`` imply this.
        check: Called before training. It raises ``ValueError`` if the model or its loss does not
            have the quantity. Defaults to a check of ``separable``.
    """
    if unknown := sorted(set(parts := tuple(parts)) - PARTS.keys()):
        raise ValueError(f"parts must be among {', '.join(PARTS)}; got {', '.join(unknown)}")
    own_cost = cost if callable(cost) else (lambda settings: cost)
    separable = separable or bool({"samples", "variance"} & set(parts))
    if check is None and separable:
        check = _check_samples

    def add(measure: Measure) -> Measure:
        quantity = Quantity(
            name=name,
            text=text,
            group=group,
            parts=parts,
            own_cost=own_cost,
            separable=separable,
            measure=measure,
            check=check,
        )
        QUANTITIES.register(name)(quantity)
        return measure

    return add


def _check_samples(snapshot: Snapshot) -> None:
    snapshot.memory.check_samples(snapshot.risk)


def quantity_names() -> tuple[str, ...]:
    """Return the names of all quantities of :class:`CurvatureMonitor`."""
    return tuple(QUANTITIES)


def total_cost(settings: Settings) -> float:
    """Return the cost of all quantities of a monitor, in which each shared part counts once."""
    own_costs = sum(QUANTITIES[name].own_cost(settings) for name in settings.names)
    parts = settings.parts
    # A pass over the gradients of single samples also gives their variance.
    parts = parts - {"variance"} if "samples" in parts else parts
    return own_costs + sum(PARTS[part](settings) for part in parts)


def _estimated(name: str, estimate: Estimate) -> Record:
    return {name: float(estimate.mean), f"{name}_stderr": float(estimate.stderr)}


def _mean_over_runs(name: str, estimate: Estimate, snapshot: Snapshot) -> Record:
    # A single run has no standard error.
    record = _estimated(name, estimate)
    return record if len(snapshot.runs) > 1 else {name: record[name]}


# ------------------------------------------------------------------------------------------
# Curvature.


@register_quantity(
    "lambda_max", "largest eigenvalue, and the edge of stability of SGD", parts=["largest"]
)
def _(snapshot: Snapshot) -> Record:
    run = snapshot.largest
    value = float(run.values[-1])
    record = {"lambda_max": value, "lambda_max_residual": float(run.residuals[-1])}
    # The edge of a preconditioned method is not a threshold of this eigenvalue.
    threshold = None if snapshot.edge is None else snapshot.edge.threshold
    if threshold is None:
        return record
    return record | {"threshold": threshold, "sharpness_ratio": value / threshold}


@register_quantity("lambda_min", "smallest eigenvalue", parts=["smallest"])
def _(snapshot: Snapshot) -> Record:
    run = snapshot.smallest
    return {"lambda_min": float(run.values[0]), "lambda_min_residual": float(run.residuals[0])}


@register_quantity("trace", "trace, and the mean eigenvalue", parts=["trace"])
def _(snapshot: Snapshot) -> Record:
    record = _estimated("trace", snapshot.trace)
    # The sum of the P eigenvalues is the trace.
    return record | {"mean_eigenvalue": record["trace"] / snapshot.risk.space.size}


@register_quantity(
    "frobenius_norm",
    "Frobenius norm, and its square per parameter",
    cost=lambda settings: TUNING.product * settings.num_probes,
)
def _(snapshot: Snapshot) -> Record:
    probes = snapshot.settings.num_probes
    estimate = frobenius_norm(snapshot.op, num_probes=probes, generator=snapshot.generator())
    record = _estimated("frobenius_norm", estimate)
    # The sum of the squared eigenvalues is |H|_F^2.
    return record | {"mean_square_eigenvalue": float(estimate) ** 2 / snapshot.risk.space.size}


@register_quantity("spectrum", "Ritz values and weights of a Lanczos run", parts=["spectra"])
def _(snapshot: Snapshot) -> Record:
    run = snapshot.runs[0]
    return {"ritz_values": run.values.tolist(), "ritz_weights": run.weights.tolist()}


@register_quantity("density", "spectral density, smoothed, at 128 points", parts=["spectra"])
def _(snapshot: Snapshot) -> Record:
    smooth = snapshot.density.smoothed()
    x = torch.linspace(*smooth.support, 128, dtype=torch.float64)
    return {"density_x": x.tolist(), "density": smooth.pdf(x).tolist()}


@register_quantity("negative_mass", "fraction of negative eigenvalues", parts=["spectra"])
def _(snapshot: Snapshot) -> Record:
    # The weights of a run sum to one. Those below zero estimate the fraction of negative
    # eigenvalues.
    mass = snapshot.mean_over_runs(
        lambda run: float(run.weights[negative_values(run)[0]].sum()), "mass below zero"
    )
    return _mean_over_runs("negative_mass", mass, snapshot)


@register_quantity("degeneracy", "fraction of eigenvalues near zero", parts=["spectra"])
def _(snapshot: Snapshot) -> Record:
    degeneracy = rank_degeneracy(snapshot.runs, matrix=snapshot.settings.matrix)
    record = _mean_over_runs("degeneracy", degeneracy.mass, snapshot)
    return record | {"degeneracy_truncation": float(degeneracy.mass.truncation)}


@register_quantity(
    "bulk", "edges of the bulk of the spectrum, and the number of outliers", parts=["spectra"]
)
def _(snapshot: Snapshot) -> Record:
    edge = bulk_edge(snapshot.runs)
    outliers = float(len(edge.outliers))
    return {"bulk_lower": edge.lower, "bulk_upper": edge.upper, "num_outliers": outliers}


@register_quantity(
    "variance",
    "variance of the curvature matrices of single samples, P sigma^2",
    separable=True,
    cost=lambda settings: TUNING.grouped * settings.num_probes + TUNING.traced,
)
def _(snapshot: Snapshot) -> Record:
    settings = snapshot.settings
    estimate = curvature_variance(
        snapshot.risk,
        matrix=settings.matrix,
        num_probes=settings.num_probes,
        generator=snapshot.generator(),
    )
    return _estimated("variance", estimate)


@register_quantity(
    "fisher",
    "Frobenius norms of the empirical Fisher matrix and of its diagonal",
    separable=True,
    cost=lambda settings: TUNING.product * settings.num_probes + TUNING.traced + 5,
)
def _(snapshot: Snapshot) -> Record:
    op = fisher(snapshot.risk, kind="empirical")
    options: Any = {"num_probes": snapshot.settings.num_probes}
    whole = frobenius_norm(op, generator=snapshot.generator(), **options)
    part = diagonal(op, generator=snapshot.generator(), **options)
    norm = float(part.mean.double().norm())
    return _estimated("fisher_norm", whole) | {"fisher_diagonal_norm": norm}


# ------------------------------------------------------------------------------------------
# Stability.


@register_quantity(
    "edge",
    "largest eigenvalue, relative to the edge of stability of the optimiser",
    group="stability",
    parts=["preconditioned"],
)
def _(snapshot: Snapshot) -> Record:
    edge = snapshot.edge
    if edge is None:
        return {}
    if edge.threshold is not None:
        value = float(snapshot.largest.values[-1])
        return {"threshold": edge.threshold, "sharpness_ratio": value / edge.threshold}
    run = snapshot.preconditioned
    if run is None:
        return {}
    value = float(run.values[-1])
    return {
        # The eigenvalue of S (H + Gamma) S, whose threshold does not depend on learning rates.
        "preconditioned_lambda_max": value,
        "preconditioned_residual": float(run.residuals[-1]),
        "preconditioned_threshold": edge.limit,
        "sharpness_ratio": value / edge.limit,
    }


@register_quantity(
    "overlap",
    "share of the squared gradient in the leading eigenvectors; curvature along the gradient",
    group="stability",
    parts=["leading", "gradient"],
    cost=TUNING.product,
)
def _(snapshot: Snapshot) -> Record:
    if not bool(snapshot.gradient.any()):
        return {}
    matrix = snapshot.settings.matrix
    overlap = gradient_overlap(
        snapshot.risk, snapshot.leading, matrix=matrix, gradient=snapshot.gradient
    )
    record = {
        "gradient_overlap": float(overlap.share),
        "gradient_curvature": float(overlap.curvature),
    }
    return record | {"overlaps": overlap.overlaps.mean.tolist()}


# ------------------------------------------------------------------------------------------
# Gradients.


@register_quantity(
    "gradient_norm", "norm of the gradient, and the loss", group="gradients", parts=["gradient"]
)
def _(snapshot: Snapshot) -> Record:
    norm = float(snapshot.gradient.double().norm())
    return {"watched_loss": snapshot.loss, "gradient_norm": norm}


SAMPLES: Any = {"group": "gradients", "parts": ["gradient", "samples"]}
# Quantities that need only the norms of these gradients cost far less.
VARIANCE: Any = {"group": "gradients", "parts": ["gradient", "variance"]}


@register_quantity("gradient_variance", "variance of the gradients of single samples", **VARIANCE)
def _(snapshot: Snapshot) -> Record:
    return {"gradient_variance": snapshot.total_variance}


@register_quantity(
    "layer_variance",
    "variance of sample gradients and squared gradient, for each parameter tensor",
    **SAMPLES,
)
def _(snapshot: Snapshot) -> Record:
    samples, space = snapshot.samples, snapshot.risk.space
    # Their sums over the layers are tr Sigma and |g|^2.
    vectors = {"gradient_variance": samples.variance, "gradient_square": samples.gradient.square()}
    return {
        f"{name}.{layer}": float(values.sum())
        for name, vector in vectors.items()
        for layer, values in space.unflatten(vector).items()
    }


@register_quantity("noise_scale", "simple noise scale in samples, tr Sigma / |g|^2", **VARIANCE)
def _(snapshot: Snapshot) -> Record:
    return {"noise_scale": _ratio(snapshot.total_variance, snapshot.square)}


@register_quantity("signal_to_noise", "|g|^2 / (tr Sigma / B) of a training batch", **VARIANCE)
def _(snapshot: Snapshot) -> Record:
    # The gradient of B independent samples has the covariance Sigma / B.
    noise = snapshot.total_variance / snapshot.batch_size
    return {"signal_to_noise": _ratio(snapshot.square, noise)}


@register_quantity(
    "gsnr", "gradient signal-to-noise ratio: mean over parameters of g^2 / Var g", **SAMPLES
)
def _(snapshot: Snapshot) -> Record:
    return {"gsnr": _mean_ratio(snapshot, 1.0)}


@register_quantity(
    "norm_test", "width of the norm test of a batch, sqrt(tr Sigma / (B |g|^2))", **VARIANCE
)
def _(snapshot: Snapshot) -> Record:
    noise = _unbiased(snapshot.total_variance, snapshot) / snapshot.batch_size
    # The smallest theta with E |g_B - g|^2 <= theta^2 |g|^2.
    return {"norm_test": _root(_ratio(noise, snapshot.square))}


@register_quantity(
    "inner_product_test",
    "width of the inner product test of a batch, sqrt(Var(g_i'g) / (B |g|^4))",
    **SAMPLES,
)
def _(snapshot: Snapshot) -> Record:
    samples = snapshot.samples
    # The mean of g_i'g is |g|^2, so these are its squared deviations.
    gaps = (samples.products - snapshot.square).square()
    noise = _unbiased(float(samples.weights @ gaps), snapshot) / snapshot.batch_size
    return {"inner_product_test": _root(_ratio(noise, snapshot.square**2))}


@register_quantity(
    "orthogonality_test",
    "width of the orthogonality test of a batch: norm_test of the part of g_i orthogonal to g",
    **SAMPLES,
)
def _(snapshot: Snapshot) -> Record:
    samples = snapshot.samples
    # |g_i|^2 - (g_i'g)^2 / |g|^2
    along = samples.products.square() * _ratio(1.0, snapshot.square)
    variance = float(samples.weights @ (samples.squares - along))
    noise = _unbiased(variance, snapshot) / snapshot.batch_size
    return {"orthogonality_test": _root(_ratio(noise, snapshot.square))}


@register_quantity(
    "cabs", "batch size of the CABS rule: learning rate times tr Sigma / loss", **VARIANCE
)
def _(snapshot: Snapshot) -> Record:
    rate = snapshot.learning_rate
    # B = alpha tr Sigma / L, which is not defined without a learning rate.
    value = _ratio(rate * snapshot.total_variance, snapshot.loss)
    return {"cabs": value} if rate else {}


@register_quantity(
    "early_stopping",
    "criterion 1 - N mean(g^2 / Var g); above 0 the gradient cannot be told from noise",
    **SAMPLES,
)
def _(snapshot: Snapshot) -> Record:
    return {"early_stopping": 1 - snapshot.count * _mean_ratio(snapshot, _unbiased(1.0, snapshot))}


@register_quantity(
    "tic_trace",
    "Takeuchi criterion tr C / tr H, with C the second moment of sample gradients",
    group="gradients",
    parts=["gradient", "variance", "trace"],
)
def _(snapshot: Snapshot) -> Record:
    # tr C = E |g_i|^2 = tr Sigma + |g|^2.
    moment = snapshot.total_variance + snapshot.square
    return {"tic_trace": _ratio(moment, float(snapshot.trace) + snapshot.settings.epsilon)}


@register_quantity(
    "tic_diagonal",
    "Takeuchi criterion sum of C_pp / H_pp, for models with an exact diagonal",
    group="gradients",
    parts=["gradient", "samples"],
    cost=5,
    check=lambda snapshot: snapshot.diagonal,
)
def _(snapshot: Snapshot) -> Record:
    samples, known = snapshot.samples, snapshot.diagonal
    # C_pp = Var g_p + g_p^2.
    moment = samples.variance + samples.gradient.square()
    below = known + snapshot.settings.epsilon
    # Parameters without gradient and curvature, such as those of dead units, add nothing.
    terms = torch.where((moment == 0) & (below == 0), 0.0, moment / below)
    return {"tic_diagonal": float(terms.sum())}


def _histogram(settings: Settings) -> float:
    return TUNING.histogram


@register_quantity(
    "gradient_histogram", "histogram of the gradients of single samples", cost=_histogram, **SAMPLES
)
def _(snapshot: Snapshot) -> Record:
    histogram: Histogram = snapshot.samples.histograms[1]
    return {"gradient_histogram": histogram.counts.tolist(), "gradient_reach": histogram.reach}


@register_quantity(
    "gradient_weight_histogram",
    "joint histogram of the gradients of single samples and the weights",
    cost=_histogram,
    **SAMPLES,
)
def _(snapshot: Snapshot) -> Record:
    histogram: Histogram = snapshot.samples.histograms[2]
    return {
        "gradient_weight_histogram": histogram.counts.tolist(),
        "gradient_reach": histogram.reach,
        "weight_reach": histogram.weight_reach,
    }


def _unbiased(mean: float, snapshot: Snapshot) -> float:
    """Return a mean of squared deviations over the samples, times ``N / (N - 1)``."""
    # The mean g is estimated from the same N gradients, which costs one degree of freedom.
    n = snapshot.count
    return mean * n / (n - 1) if n > 1 else math.nan


def _ratio(top: float, bottom: float) -> float:
    # The ratio of a zero gradient is not defined: NaN, which is null in the log.
    return top / bottom if bottom else math.nan


def _root(square: float) -> float:
    # Without noise, roundoff can make the square negative.
    return math.sqrt(max(0.0, square)) if square == square else math.nan


def _mean_ratio(snapshot: Snapshot, correction: float) -> float:
    """Return the mean of g^2 / Var g over the parameters that any sample has a gradient in."""
    samples = snapshot.samples
    below = samples.variance * correction + snapshot.settings.epsilon
    square = samples.gradient.square()
    alive = (square != 0) | (below != 0)
    return float((square[alive] / below[alive]).mean()) if bool(alive.any()) else math.nan


# ------------------------------------------------------------------------------------------
# Weights.


@register_quantity("weight_norms", "L2 and Linf norms of the weights", group="weights")
def _(snapshot: Snapshot) -> Record:
    norms = optim.weight_norms(snapshot.risk.params)
    return {"weight_norm": norms.l2, "weight_max": norms.linf}


@register_quantity("layer_norms", "L2 and Linf norms of each parameter tensor", group="weights")
def _(snapshot: Snapshot) -> Record:
    layers = optim.weight_norms(snapshot.risk.params).layers
    record = {f"weight_norm.{name}": l2 for name, (l2, _) in layers.items()}
    return record | {f"weight_max.{name}": linf for name, (_, linf) in layers.items()}


@register_quantity("average_norms", "L2 and Linf norms of the averaged weights", group="weights")
def _(snapshot: Snapshot) -> Record:
    if snapshot.average is None:
        return {}
    norms = optim.weight_norms(snapshot.average)
    return {"average_weight_norm": norms.l2, "average_weight_max": norms.linf}


@register_quantity("distance", "distance of the weights from the initial weights", group="weights")
def _(snapshot: Snapshot) -> Record:
    moved = distance(snapshot.risk, snapshot.initial)
    return {"distance": moved.l2, "distance_max": moved.linf}


def _require_normalisation(snapshot: Snapshot) -> None:
    if not snapshot.memory.invariant_weights(snapshot.risk):
        raise ValueError("no normalisation layer follows a weight of this model")


@register_quantity(
    "effective_rates",
    "learning rate over squared norm, for weights that a normalisation layer follows",
    group="weights",
    check=_require_normalisation,
)
def _(snapshot: Snapshot) -> Record:
    if snapshot.optimizer is None:
        return {}
    names = snapshot.memory.invariant_weights(snapshot.risk)
    rates = optim.effective_rates(snapshot.risk.model, snapshot.optimizer, names)
    if not rates:
        return {}
    mean = sum(rates.values()) / len(rates)
    return {"effective_rate": mean} | {f"effective_rate.{n}": r for n, r in rates.items()}


# ------------------------------------------------------------------------------------------
# Steps.


@register_quantity("update_size", "norm of the last step", group="steps", parts=["step"])
def _(snapshot: Snapshot) -> Record:
    if snapshot.before is None:
        return {}
    return {"update_size": float((snapshot.risk.theta - snapshot.before).double().norm())}


@register_quantity(
    "alpha",
    "end of the last step on the parabola along it: -1 its start, 0 the minimum, 1 the other side",
    group="steps",
    parts=["step"],
    cost=2 * TUNING.product,
)
def _(snapshot: Snapshot) -> Record:
    return {} if snapshot.local_step is None else {"alpha": snapshot.local_step}


@register_quantity(
    "step",
    "gradient, update, weight decay and learning rates (without momentum) of the last step, by "
    "eigenvector",
    group="steps",
    parts=["step"],
    cost=lambda settings: TUNING.product * settings.num_steps,
)
def _(snapshot: Snapshot) -> Record:
    reader, risk = snapshot.memory.reader, snapshot.risk
    run = lanczos(
        snapshot.op, num_steps=snapshot.num_steps, vectors=True, generator=snapshot.generator()
    )
    vectors: Any = run.vectors
    reading = None if reader is None else reader.read(risk, run.values, vectors)
    if reading is None:
        return {}
    names = ("values", "gradient", "update", "decay", "rates")
    record: Record = {f"step_{name}": getattr(reading, name).tolist() for name in names}
    ratios = {"step_flat_rate": reading.flat_rate, "curvature_ratio": reading.curvature_ratio}
    return record | ratios
