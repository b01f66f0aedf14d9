"""The quantities that a monitor measures, each one registered function with its cost."""

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
from ritz.training._files import Record
from ritz.training._sample_gradients import Histogram
from ritz.training._watched import TUNING, Settings, Watched

Measure = Callable[[Watched], Mapping[str, Any]]
Cost = Callable[[Settings], float]

# What quantities share, with its cost in gradients of the watched samples. A product of ``k``
# vectors counts as ``k`` products.
PARTS: dict[str, Cost] = {
    "gradient": lambda settings: 1.0,
    "samples": lambda settings: TUNING.samples,
    "variance": lambda settings: TUNING.norms,
    "largest": lambda settings: TUNING.product * settings.max_products,
    "smallest": lambda settings: TUNING.product * settings.max_products,
    "preconditioned": lambda settings: TUNING.product * settings.max_products,
    "leading": lambda settings: TUNING.product * TUNING.cold * settings.num_steps,
    "spectra": lambda settings: TUNING.product * settings.num_steps * settings.num_runs,
    # XTrace takes two products per probe. A known trace costs a backward pass per output instead.
    "trace": lambda settings: TUNING.product * 2 * settings.num_probes,
    # A forward derivative at both ends of the step, and the weights before it.
    "step": lambda settings: 0.0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """Something that a monitor measures.

    Attributes:
        name: Its name.
        text: What it is, in one line.
        group: What it is about: ``curvature``, ``stability``, ``gradients``, ``weights`` or
            ``steps``.
        parts: What it shares with other quantities; keys of ``PARTS``.
        own_cost: What it costs without its parts, in gradients of the watched samples.
        separable: Whether the samples of a batch must not depend on each other.
        measure: Takes a :class:`Watched` and returns numbers, or lists of numbers, by name.
        check: Takes a :class:`Watched` before training, and raises ``ValueError`` if the model or
            its loss does not have the quantity; ``None`` if all have it.
    """

    name: str
    text: str
    group: str
    parts: tuple[str, ...]
    own_cost: Cost
    separable: bool
    measure: Measure
    check: Callable[[Watched], object] | None

    def cost(self, settings: Settings) -> float:
        """Return the cost of this quantity alone, in gradients of the watched samples."""
        return self.own_cost(settings) + sum(PARTS[part](settings) for part in self.parts)


QUANTITIES: Registry[Quantity] = Registry("quantity")
# The default of a monitor. It costs at most 17 gradients of the watched samples.
USUAL = ("lambda_max", "weight_norms", "gradient_norm", "gradient_variance", "noise_scale")


def register_quantity(
    name: str,
    text: str,
    *,
    group: str = "curvature",
    parts: Iterable[str] = (),
    cost: float | Cost = 0.0,
    separable: bool = False,
    check: Callable[[Watched], object] | None = None,
) -> Callable[[Measure], Measure]:
    """Return a decorator that registers a quantity for :class:`CurvatureMonitor`.

    Args:
        name: Name, which must not be registered yet.
        text: What it is, in one line.
        group: What it is about: ``curvature``, ``stability``, ``gradients``, ``weights``,
            ``steps``, or a new word.
        parts: What it shares with other quantities: ``gradient``, ``samples`` (gradients of single
            samples), ``variance`` (of these gradients, in total), ``largest``, ``smallest``,
            ``leading``, ``preconditioned`` (eigenvalues), ``spectra``, ``trace``, ``step``.
        cost: What it costs without its parts, in gradients of the watched samples.
        separable: Whether the samples of a batch must not depend on each other, as they do with
            batch norm in train mode. With ``samples`` or ``variance`` they must not.
        check: Called before training. It raises ``ValueError`` if the model or its loss does not
            have the quantity. Defaults to a check that the samples are independent, if they must.
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


def _check_samples(watched: Watched) -> None:
    watched.memory.check_samples(watched.risk)


def quantity_names() -> tuple[str, ...]:
    """Return the names of all quantities of :class:`CurvatureMonitor`."""
    return tuple(QUANTITIES)


def total_cost(settings: Settings) -> float:
    """Return the cost of all quantities of a monitor, in which each shared part counts once."""
    own_costs = sum(QUANTITIES[name].own_cost(settings) for name in settings.names)
    parts = settings.parts
    # A pass over the gradients of samples has their variance as well.
    parts = parts - {"variance"} if "samples" in parts else parts
    return own_costs + sum(PARTS[part](settings) for part in parts)


def quantity_table(settings: Settings) -> str:
    """Return the table of the quantities of this package for ``docs/monitors.md``.

    Args:
        settings: The monitor whose costs are stated.
    """
    lines = ["| quantity | what it is | shares | cost |", "| --- | --- | --- | --- |"]
    for group in ("curvature", "stability", "gradients", "weights", "steps"):
        for each in (QUANTITIES[name] for name in QUANTITIES):
            if each.group == group and each.measure.__module__ == __name__:
                text, shares = each.text.replace("|", "\\|"), ", ".join(each.parts) or "-"
                cost = f"{each.cost(settings):g}"
                lines.append(f"| `{each.name}` | {text} | {shares} | {cost} |")
    return "\n".join(lines)


def _estimated(name: str, estimate: Estimate) -> Record:
    return {name: float(estimate.mean), f"{name}_stderr": float(estimate.stderr)}


def _mean_over_runs(name: str, estimate: Estimate, watched: Watched) -> Record:
    # A single run has no standard error.
    record = _estimated(name, estimate)
    return record if len(watched.runs) > 1 else {name: record[name]}


# ------------------------------------------------------------------------------------------
# Curvature.


@register_quantity(
    "lambda_max", "largest eigenvalue, and the edge of stability of SGD", parts=["largest"]
)
def _(watched: Watched) -> Record:
    run = watched.largest
    value = float(run.values[-1])
    record = {"lambda_max": value, "lambda_max_residual": float(run.residuals[-1])}
    # The edge of a preconditioned method is not a threshold of this eigenvalue.
    threshold = None if watched.edge is None else watched.edge.threshold
    if threshold is None:
        return record
    return record | {"threshold": threshold, "sharpness_ratio": value / threshold}


@register_quantity("lambda_min", "smallest eigenvalue", parts=["smallest"])
def _(watched: Watched) -> Record:
    run = watched.smallest
    return {"lambda_min": float(run.values[0]), "lambda_min_residual": float(run.residuals[0])}


@register_quantity("trace", "trace, and the mean eigenvalue", parts=["trace"])
def _(watched: Watched) -> Record:
    record = _estimated("trace", watched.trace)
    # The sum of the P eigenvalues is the trace.
    return record | {"mean_eigenvalue": record["trace"] / watched.risk.space.size}


@register_quantity(
    "frobenius_norm",
    "Frobenius norm, and its square per parameter",
    cost=lambda settings: TUNING.product * settings.num_probes,
)
def _(watched: Watched) -> Record:
    probes = watched.settings.num_probes
    estimate = frobenius_norm(watched.op, num_probes=probes, generator=watched.generator())
    record = _estimated("frobenius_norm", estimate)
    # The sum of the squared eigenvalues is |H|_F^2.
    return record | {"mean_square_eigenvalue": float(estimate) ** 2 / watched.risk.space.size}


@register_quantity("spectrum", "Ritz values and weights of a Lanczos run", parts=["spectra"])
def _(watched: Watched) -> Record:
    run = watched.runs[0]
    return {"ritz_values": run.values.tolist(), "ritz_weights": run.weights.tolist()}


@register_quantity("density", "spectral density, smoothed, at 128 points", parts=["spectra"])
def _(watched: Watched) -> Record:
    smooth = watched.density.smoothed()
    x = torch.linspace(*smooth.support, 128, dtype=torch.float64)
    return {"density_x": x.tolist(), "density": smooth.pdf(x).tolist()}


@register_quantity("negative_mass", "fraction of negative eigenvalues", parts=["spectra"])
def _(watched: Watched) -> Record:
    # The weights of a run sum to one. Those below zero estimate the fraction of negative
    # eigenvalues.
    mass = watched.mean_over_runs(
        lambda run: float(run.weights[negative_values(run)[0]].sum()), "mass below zero"
    )
    return _mean_over_runs("negative_mass", mass, watched)


@register_quantity("degeneracy", "fraction of eigenvalues near zero", parts=["spectra"])
def _(watched: Watched) -> Record:
    found = rank_degeneracy(watched.runs, matrix=watched.settings.matrix)
    record = _mean_over_runs("degeneracy", found.mass, watched)
    return record | {"degeneracy_truncation": float(found.mass.truncation)}


@register_quantity("bulk", "edges of the bulk, and the number of outliers", parts=["spectra"])
def _(watched: Watched) -> Record:
    found = bulk_edge(watched.runs)
    outliers = float(len(found.outliers))
    return {"bulk_lower": found.lower, "bulk_upper": found.upper, "num_outliers": outliers}


@register_quantity(
    "variance",
    "P sigma^2, the variance of the matrices of single samples",
    separable=True,
    cost=lambda settings: TUNING.grouped * settings.num_probes + TUNING.traced,
)
def _(watched: Watched) -> Record:
    settings = watched.settings
    estimate = curvature_variance(
        watched.risk,
        matrix=settings.matrix,
        num_probes=settings.num_probes,
        generator=watched.generator(),
    )
    return _estimated("variance", estimate)


@register_quantity(
    "fisher",
    "Frobenius norms of the empirical Fisher matrix and of its diagonal",
    separable=True,
    cost=lambda settings: TUNING.product * settings.num_probes + TUNING.traced + 5,
)
def _(watched: Watched) -> Record:
    op = fisher(watched.risk, kind="empirical")
    options: Any = {"num_probes": watched.settings.num_probes}
    whole = frobenius_norm(op, generator=watched.generator(), **options)
    part = diagonal(op, generator=watched.generator(), **options)
    norm = float(part.mean.double().norm())
    return _estimated("fisher_norm", whole) | {"fisher_diagonal_norm": norm}


# ------------------------------------------------------------------------------------------
# Stability.


@register_quantity(
    "edge",
    "curvature over the edge of stability of the optimiser",
    group="stability",
    parts=["preconditioned"],
)
def _(watched: Watched) -> Record:
    edge = watched.edge
    if edge is None:
        return {}
    if edge.threshold is not None:
        value = float(watched.largest.values[-1])
        return {"threshold": edge.threshold, "sharpness_ratio": value / edge.threshold}
    run = watched.preconditioned
    if run is None:
        return {}
    value = float(run.values[-1])
    return {
        # Of S (H + Gamma) S, whose threshold does not depend on the learning rates.
        "preconditioned_lambda_max": value,
        "preconditioned_residual": float(run.residuals[-1]),
        "preconditioned_threshold": edge.limit,
        "sharpness_ratio": value / edge.limit,
    }


@register_quantity(
    "overlap",
    "part of the gradient in the leading eigenvectors, and the curvature along it",
    group="stability",
    parts=["leading", "gradient"],
    cost=TUNING.product,
)
def _(watched: Watched) -> Record:
    if not bool(watched.gradient.any()):
        return {}
    matrix = watched.settings.matrix
    found = gradient_overlap(
        watched.risk, watched.leading, matrix=matrix, gradient=watched.gradient
    )
    record = {"gradient_overlap": float(found.share), "gradient_curvature": float(found.curvature)}
    return record | {"overlaps": found.overlaps.mean.tolist()}


# ------------------------------------------------------------------------------------------
# Gradients.


@register_quantity(
    "gradient_norm", "norm of the gradient, and the loss", group="gradients", parts=["gradient"]
)
def _(watched: Watched) -> Record:
    norm = float(watched.gradient.double().norm())
    return {"watched_loss": watched.loss, "gradient_norm": norm}


SAMPLES: Any = {"group": "gradients", "parts": ["gradient", "samples"]}
# What needs the norms of these gradients alone costs far less.
VARIANCE: Any = {"group": "gradients", "parts": ["gradient", "variance"]}


@register_quantity("gradient_variance", "variance of the gradients of single samples", **VARIANCE)
def _(watched: Watched) -> Record:
    return {"gradient_variance": watched.total_variance}


@register_quantity(
    "layer_variance",
    "gradient_variance of each parameter tensor, and its squared gradient",
    **SAMPLES,
)
def _(watched: Watched) -> Record:
    samples, space = watched.samples, watched.risk.space
    # Their sums over the layers are tr Sigma and |g|^2.
    vectors = {"gradient_variance": samples.variance, "gradient_square": samples.gradient.square()}
    return {
        f"{name}.{layer}": float(values.sum())
        for name, vector in vectors.items()
        for layer, values in space.unflatten(vector).items()
    }


@register_quantity("noise_scale", "simple noise scale in samples, tr Sigma / |g|^2", **VARIANCE)
def _(watched: Watched) -> Record:
    return {"noise_scale": _ratio(watched.total_variance, watched.square)}


@register_quantity("signal_to_noise", "|g|^2 / (tr Sigma / B) of a training batch", **VARIANCE)
def _(watched: Watched) -> Record:
    # The gradient of B independent samples has the covariance Sigma / B.
    noise = watched.total_variance / watched.batch_size
    return {"signal_to_noise": _ratio(watched.square, noise)}


@register_quantity(
    "gsnr", "gradient signal-to-noise ratio: mean over parameters of g^2 / Var g", **SAMPLES
)
def _(watched: Watched) -> Record:
    return {"gsnr": _mean_ratio(watched, 1.0)}


@register_quantity(
    "norm_test", "width of the norm test of a batch, sqrt(tr Sigma / (B |g|^2))", **VARIANCE
)
def _(watched: Watched) -> Record:
    noise = _unbiased(watched.total_variance, watched) / watched.batch_size
    # The smallest theta with E |g_B - g|^2 <= theta^2 |g|^2.
    return {"norm_test": _root(_ratio(noise, watched.square))}


@register_quantity(
    "inner_product_test",
    "width of the inner product test of a batch, sqrt(Var(g_i'g) / (B |g|^4))",
    **SAMPLES,
)
def _(watched: Watched) -> Record:
    samples = watched.samples
    # The mean of g_i'g is |g|^2, so these are its squared deviations.
    gaps = (samples.products - watched.square).square()
    noise = _unbiased(float(samples.weights @ gaps), watched) / watched.batch_size
    return {"inner_product_test": _root(_ratio(noise, watched.square**2))}


@register_quantity(
    "orthogonality_test",
    "width of the orthogonality test of a batch: norm_test of the part of g_i orthogonal to g",
    **SAMPLES,
)
def _(watched: Watched) -> Record:
    samples = watched.samples
    # |g_i|^2 - (g_i'g)^2 / |g|^2
    along = samples.products.square() * _ratio(1.0, watched.square)
    variance = float(samples.weights @ (samples.squares - along))
    noise = _unbiased(variance, watched) / watched.batch_size
    return {"orthogonality_test": _root(_ratio(noise, watched.square))}


@register_quantity("cabs", "batch size of CABS, learning rate times tr Sigma / loss", **VARIANCE)
def _(watched: Watched) -> Record:
    rate = watched.learning_rate
    # Without a learning rate there is no batch size that goes with it.
    # B = alpha tr Sigma / L.
    value = _ratio(rate * watched.total_variance, watched.loss)
    return {"cabs": value} if rate else {}


@register_quantity(
    "early_stopping", "1 - N mean(g^2 / Var g); above 0 the gradient is noise only", **SAMPLES
)
def _(watched: Watched) -> Record:
    return {"early_stopping": 1 - watched.count * _mean_ratio(watched, _unbiased(1.0, watched))}


@register_quantity(
    "tic_trace",
    "Takeuchi criterion tr C / tr H, with C the second moment of sample gradients",
    group="gradients",
    parts=["gradient", "variance", "trace"],
)
def _(watched: Watched) -> Record:
    # tr C = E |g_i|^2 = tr Sigma + |g|^2.
    moment = watched.total_variance + watched.square
    return {"tic_trace": _ratio(moment, float(watched.trace) + watched.settings.epsilon)}


@register_quantity(
    "tic_diagonal",
    "Takeuchi criterion sum of C_pp / H_pp, for models with an exact diagonal",
    group="gradients",
    parts=["gradient", "samples"],
    cost=5,
    check=lambda watched: watched.diagonal,
)
def _(watched: Watched) -> Record:
    samples, known = watched.samples, watched.diagonal
    # C_pp = Var g_p + g_p^2.
    moment = samples.variance + samples.gradient.square()
    below = known + watched.settings.epsilon
    # Parameters without gradient and curvature, such as those of dead units, add nothing.
    terms = torch.where((moment == 0) & (below == 0), 0.0, moment / below)
    return {"tic_diagonal": float(terms.sum())}


def _histogram(settings: Settings) -> float:
    return TUNING.histogram


@register_quantity(
    "gradient_histogram", "histogram of the gradients of samples", cost=_histogram, **SAMPLES
)
def _(watched: Watched) -> Record:
    found: Histogram = watched.samples.histograms[1]
    return {"gradient_histogram": found.counts.tolist(), "gradient_reach": found.reach}


@register_quantity(
    "gradient_weight_histogram",
    "histogram of the gradients of samples by weight",
    cost=_histogram,
    **SAMPLES,
)
def _(watched: Watched) -> Record:
    found: Histogram = watched.samples.histograms[2]
    return {
        "gradient_weight_histogram": found.counts.tolist(),
        "gradient_reach": found.reach,
        "weight_reach": found.weight_reach,
    }


def _unbiased(mean: float, watched: Watched) -> float:
    """Return a mean of squared deviations over the samples, times ``N / (N - 1)``."""
    # g is the mean of the same N gradients, which takes one degree of freedom.
    n = watched.count
    return mean * n / (n - 1) if n > 1 else math.nan


def _ratio(top: float, bottom: float) -> float:
    # A gradient of zero has no noise scale: null in the log.
    return top / bottom if bottom else math.nan


def _root(square: float) -> float:
    # Roundoff of a gradient without noise.
    return math.sqrt(max(0.0, square)) if square == square else math.nan


def _mean_ratio(watched: Watched, correction: float) -> float:
    """Return the mean of g^2 / Var g over the parameters that any sample has a gradient in."""
    samples = watched.samples
    below = samples.variance * correction + watched.settings.epsilon
    square = samples.gradient.square()
    alive = (square != 0) | (below != 0)
    return float((square[alive] / below[alive]).mean()) if bool(alive.any()) else math.nan


# ------------------------------------------------------------------------------------------
# Weights.


@register_quantity("weight_norms", "L2 and Linf norms of the weights", group="weights")
def _(watched: Watched) -> Record:
    norms = optim.weight_norms(watched.risk.params)
    return {"weight_norm": norms.l2, "weight_max": norms.linf}


@register_quantity("layer_norms", "L2 and Linf norms of each parameter tensor", group="weights")
def _(watched: Watched) -> Record:
    layers = optim.weight_norms(watched.risk.params).layers
    record = {f"weight_norm.{name}": l2 for name, (l2, _) in layers.items()}
    return record | {f"weight_max.{name}": linf for name, (_, linf) in layers.items()}


@register_quantity(
    "average_norms", "L2 and Linf norms of the average of the iterates", group="weights"
)
def _(watched: Watched) -> Record:
    if watched.average is None:
        return {}
    norms = optim.weight_norms(watched.average)
    return {"average_weight_norm": norms.l2, "average_weight_max": norms.linf}


@register_quantity("distance", "distance of the weights from their initial ones", group="weights")
def _(watched: Watched) -> Record:
    found = distance(watched.risk, watched.initial)
    return {"distance": found.l2, "distance_max": found.linf}


@register_quantity(
    "effective_rates",
    "learning rate over the squared norm, of weights before a normalisation",
    group="weights",
    check=lambda watched: watched.memory.invariant_weights(watched.risk),
)
def _(watched: Watched) -> Record:
    if watched.optimizer is None:
        return {}
    names = watched.memory.invariant_weights(watched.risk)
    rates = optim.effective_rates(watched.risk.model, watched.optimizer, names)
    if not rates:
        return {}
    mean = sum(rates.values()) / len(rates)
    return {"effective_rate": mean} | {f"effective_rate.{n}": r for n, r in rates.items()}


# ------------------------------------------------------------------------------------------
# Steps.


@register_quantity("update_size", "norm of the last step", group="steps", parts=["step"])
def _(watched: Watched) -> Record:
    if watched.before is None:
        return {}
    return {"update_size": float((watched.risk.theta - watched.before).double().norm())}


@register_quantity(
    "alpha",
    "where the last step landed: -1 at its start, 0 at the minimum along it, 1 beyond it",
    group="steps",
    parts=["step"],
    cost=2 * TUNING.product,
)
def _(watched: Watched) -> Record:
    return {} if watched.local_step is None else {"alpha": watched.local_step}


@register_quantity(
    "step",
    "gradient, update, decay and effective rates of the last step, by eigenvector",
    group="steps",
    parts=["step"],
    cost=lambda settings: TUNING.product * settings.num_steps,
)
def _(watched: Watched) -> Record:
    reader, risk = watched.memory.reader, watched.risk
    run = lanczos(
        watched.op, num_steps=watched.num_steps, vectors=True, generator=watched.generator()
    )
    vectors: Any = run.vectors
    reading = None if reader is None else reader.read(risk, run.values, vectors)
    if reading is None:
        return {}
    names = ("values", "gradient", "update", "decay", "rates")
    record: Record = {f"step_{name}": getattr(reading, name).tolist() for name in names}
    ratios = {"step_flat_rate": reading.flat_rate, "curvature_ratio": reading.curvature_ratio}
    return record | ratios
