"""``Advice``: the result of ``advise``, with its sentences, warnings and tables."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import Any

import torch

from ritz._core.batch_norm import batch_norms
from ritz._core.checks import is_below
from ritz._core.results import Estimate, format_uncertain
from ritz._core.storage import storable
from ritz.curvature import Risk
from ritz.measures._batch_prediction import BatchPrediction, format_prediction, homogeneity
from ritz.measures._bulk_edge import BulkEdge
from ritz.measures._gradients import GradientNoise
from ritz.measures._learning_rates import ADAPTIVE, stable_rate


@dataclass(frozen=True, slots=True)
class Tuning:
    """Thresholds of the sentences and warnings."""

    # Share of noise in lambda'_1. Below the first, curvature sets the limit; above the second,
    # noise does.
    shares: tuple[float, float] = (1 / 3, 2 / 3)
    # Usual range of the trials, in units of the edge. From trained weights, three networks on MNIST
    # trained at up to 0.5 to 4.2 times the edge.
    usual: tuple[float, float] = (1.0, 5.0)
    # All learning rates of a trial failed if its result is below this many edges. A trial halves
    # its learning rate up to 12 times, and the lowest limit of networks on MNIST was 0.05 edges.
    failed: float = 0.02
    # Warn if one step along the gradient would reduce a quadratic loss by more than this fraction.
    gain: float = 0.1
    # Warn if curvature along the gradient and critical sharpness differ by more than this factor.
    # They are equal on a quadratic.
    agreement: float = 2.0
    # Note that the additive model fails if V(phi_1) / P sigma^2 is above this. Homogeneous noise
    # has 1.
    homogeneous: float = 3.0
    # Do not advise a learning rate if |smallest eigenvalue| / largest eigenvalue is above this. In
    # its first 32 steps, where this ratio fell from 1.1 to 0.1, a LeNet on MNIST trained at up to
    # 0.05 to 1.4 times the edge, and later at up to 0.93 times or more. An MLP with a ratio of 0.36
    # trained at up to 1.3 times the edge or more.
    negative: float = 0.1


TUNING = Tuning()
NAMES = {
    "sgd": "SGD",
    "momentum": "SGD with momentum",
    "nesterov": "SGD with Nesterov momentum",
    "adam": "Adam",
    "kfac": "K-FAC",
}


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    r"""Predicted curvature, learning rates and damping for each batch size, made by :func:`advise`.

    Arrays have one entry per batch size, ``(S,)``. Learning rates are for the optimiser as torch
    implements it. Numbers are of type :class:`Estimate`. An unknown number is NaN, and its status
    says why it is unknown.

    Attributes:
        batch_sizes: Batch sizes :math:`B`; batches are drawn without replacement.
        optimizer: ``sgd``, ``momentum``, ``nesterov``, ``adam`` or ``kfac``.
        momentum: Momentum of the optimiser; :math:`\beta_1` for Adam.
        prediction: Predicted curvature of batches: :math:`\lambda'_1(B)`, spread and overlap.
        bulk: Edges of the bulk of the spectrum, and the outliers.
        smallest: Smallest eigenvalue.
        noise: Noise scales of the gradient; ``noise.curved`` is the critical batch size.
        sharpness: Critical sharpness along the gradient, from losses alone.
        edge: Edge of local stability; for SGD :math:`2 / \lambda'_1(B)`. See :func:`stable_rate`.
        rate: Recommended learning rate: the edge for a batch whose :math:`\lambda'_1` is two
            standard deviations above the mean. For Adam without ``state``, the square-root rule.
            The printed table omits this column if the sentences advise no learning rate.
        damping: Least damping per unit of learning rate. For Adam and K-FAC it is one over the edge
            of heavy-ball momentum; otherwise it follows from the noise along the leading
            eigenvector.
        damping_papers: Least damping by the formula of the papers: homogeneous noise along all
            outliers.
        ratio: Ratio :math:`R` of learning rates along flat and sharp directions at this damping.
        exponent: Exponent :math:`e` of the growth :math:`B^e` of the predicted edge, from each
            batch size to the next. For the last batch size it is the local exponent of
            :math:`\lambda_1 + V(\varphi_1) / (b \lambda_1)`.
        exponent_additive: Local exponent of the additive model with homogeneous noise.
        exponent_multiplicative: Local exponent of the multiplicative model.
        changes_at: Batch size at which the scaling rule changes, in the directional, the additive
            and the multiplicative model, ``(3,)``.
        trainable: Largest learning rate at which short trainings do not diverge; ``None`` without
            ``verify``.
        known: Batch size and learning rate of an earlier training, or ``None``.
        sentences: Advice in words, one text per batch size.
        warnings: Reasons to doubt the assumptions of the predictions.
        cost: Cost in gradients of all data, counted from products, gradients and losses.
        loss: The loss of all data.
        seed: Seed of all random numbers.
    """

    batch_sizes: tuple[int, ...]
    optimizer: str
    momentum: float
    prediction: BatchPrediction
    bulk: BulkEdge
    smallest: Estimate
    noise: GradientNoise
    sharpness: Estimate
    edge: Estimate
    rate: Estimate
    damping: Estimate
    damping_papers: Estimate
    ratio: Estimate
    exponent: Estimate
    exponent_additive: Estimate
    exponent_multiplicative: Estimate
    changes_at: Estimate
    trainable: Estimate | None
    known: tuple[int, float] | None
    sentences: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    cost: float
    loss: float
    seed: int

    def __str__(self) -> str:
        title, *details = _head(self)
        return "\n".join([title, "", *_rate_table(self), "", *_sentence_lines(self), "",
                          "Details", *details, "", *_curvature_table(self), "",
                          *_notes(self)])  # fmt: skip


# ------------------------------------------------------------------------------------------
# The advice in words.


def _regime(advice: Advice, index: int) -> str:
    """Return whether noise or curvature sets the limit, by how much noise lowers the edge."""
    top = float(advice.prediction.lambda_max)
    value = float(advice.prediction.best.value.mean[index])
    if not (top > 0 and value > 0):
        return "not known"
    # The share is the fraction by which noise lowers the edge of all data. For SGD, with
    # lambda' = lambda (1 + x), this is x / (1 + x), the exponent of the scaling rule.
    update: Any = {"optimizer": advice.optimizer, "momentum": advice.momentum}
    left = stable_rate(value, full=top, **update) / stable_rate(top, **update)
    share, (low, high) = 1 - float(left), TUNING.shares
    return "noise" if share > high else "curvature" if share < low else "both"


def advice_warnings(risk: Risk, advice: Advice) -> Iterator[str]:
    """Yield the reasons to doubt the quadratic model with noise."""
    top, least = float(advice.prediction.lambda_max), float(advice.smallest)
    if not top > 0:
        yield (
            f"not near a minimum: the largest eigenvalue is {top:.3g}, not positive, so to second "
            "order no learning rate is unstable"
        )
        return
    if _is_indefinite(advice):
        yield (
            f"not near a minimum: the smallest eigenvalue is {least:.3g}, {-least / top:.0%} of "
            "the largest in magnitude. Training leaves these weights along negative curvature and "
            "may diverge below the edge. Train for some epochs first"
            + (", or run trials (verify)" if advice.trainable is None else "")
        )
    yield from _gradient_warnings(advice)
    if batch_norms(risk.model):
        yield (
            f"batch norm: the curvature was measured in {risk.batch_norm} mode, but training "
            "normalises with each batch, which changes the curvature. "
            + (
                "Run trials (verify)"
                if advice.trainable is None
                else "Only the trials include this"
            )
        )


def _is_indefinite(advice: Advice) -> bool:
    """Return whether negative curvature is a large fraction of the largest eigenvalue."""
    return -float(advice.smallest) > TUNING.negative * float(advice.prediction.lambda_max)


def _gradient_warnings(advice: Advice) -> Iterator[str]:
    """Yield signs along the gradient that the loss is not a quadratic near its minimum."""
    along, square = float(advice.noise.along), float(advice.noise.gradient_square)
    if not along > 0:
        yield f"not near a minimum: the curvature along the gradient is {along:.3g}"
        return
    # On a quadratic, a step with the learning rate 1/along reduces the loss by |g|^2 / (2 along).
    gain = square / (2 * along)
    if gain > TUNING.gain * abs(advice.loss):
        yield (
            f"not near a minimum: one step along the gradient would reduce the loss of "
            f"{advice.loss:.2g} by {gain:.2g}, so the curvature will change soon"
        )
    measured = float(advice.sharpness)
    if measured > 0 and max(measured / along, along / measured) > TUNING.agreement:
        yield (
            f"not quadratic: along the gradient, the curvature is {along:.3g}, but the critical "
            f"sharpness is {measured:.3g} (they are equal on a quadratic)"
        )


def advice_sentence(advice: Advice, index: int) -> str:
    """Return the advice for a batch size: a sentence, and others that qualify it."""
    size, advised = advice.batch_sizes[index], _limit(advice, index)
    edge = float(advice.edge.mean[index])
    if math.isfinite(edge) and advice.trainable is None and _is_indefinite(advice):
        advised = f"the edge is {edge:.2g}, but no learning rate is advised at these weights"
    elif math.isfinite(edge) and _all_failed(advice, index):
        advised = f"the edge is {edge:.2g}, but no learning rate is advised"
    elif math.isfinite(edge):
        advised = f"{_recommendation(advice, index)}: {advised}"
    sentences = [advised[0].upper() + advised[1:]]
    critical = float(advice.noise.curved)
    if size > 2 * critical:
        sentences.append(
            f"The batch is {size / critical:.2g} times the critical batch size: a smaller batch "
            "learns more per sample"
        )
    return " ".join(f"{text}." for text in [*sentences, *_comparisons(advice, index)])


def _all_failed(advice: Advice, index: int) -> bool:
    """Return whether all learning rates failed in at least one trial."""
    trials = advice.trainable
    if trials is None or trials.samples is None or math.isfinite(float(trials.truncation[index])):
        return False
    return float(trials.samples[:, index].min()) < TUNING.failed * float(advice.edge.mean[index])


def _recommendation(advice: Advice, index: int) -> str:
    rate = float(advice.rate.mean[index])
    if advice.trainable is None or is_below(rate, float(advice.trainable.mean[index])):
        return f"use a learning rate of at most {rate:.2g}"
    # Trials count more than the prediction.
    limit = float(advice.trainable.mean[index])
    return f"use a learning rate of at most {limit:.2g}, the limit of the trials"


def _limit(advice: Advice, index: int) -> str:
    exponent = float(advice.exponent.mean[index])
    gain = f"doubling the batch multiplies the edge by {2**exponent:.2g}"
    return {
        "noise": f"the noise of batches sets the limit, so {gain}",
        "both": f"noise and curvature set the limit together, and {gain}",
        "curvature": "curvature sets the limit, so a larger batch gains little",
        "not known": "without positive curvature there is no limit",
    }[_regime(advice, index)]


def _comparisons(advice: Advice, index: int) -> Iterator[str]:
    """Yield comparisons of the edge with an earlier training and with trials."""
    size, edge = advice.batch_sizes[index], float(advice.edge.mean[index])
    if not math.isfinite(edge):
        return
    if advice.known is not None and advice.known[0] == size:
        share = advice.known[1] / edge
        beyond = ", so these weights are not stable" if share > 1 else ""
        yield f"Your learning rate of {advice.known[1]:g} is {share:.2g} times the edge{beyond}"
    if advice.trainable is None:
        return
    times = float(advice.trainable.mean[index]) / edge
    low, high = TUNING.usual
    if not math.isfinite(float(advice.trainable.truncation[index])):
        if _all_failed(advice, index):
            yield "In at least one trial, all learning rates failed, even those far below the edge"
        else:
            yield "The trials found no limit: even learning rates far above the edge were stable"
        return
    stable = f"up to {times:.2g} times the edge"
    if times < low:
        yield (
            f"The trials were stable only {stable}; the edge does not include the noise of "
            "gradients"
        )
    elif times > high:
        yield f"The trials were stable {stable}, which is further than usual"
    else:
        yield f"The trials were stable {stable}"


def _head(advice: Advice) -> list[str]:
    p, bulk = advice.prediction, advice.bulk
    found = f"{len(bulk.outliers)} outliers beyond a bulk of [{bulk.lower:.2g}, {bulk.upper:.2g}]"
    if math.isnan(bulk.lower):
        found = "all Ritz values are single eigenvalues, without a bulk"
    name = NAMES[advice.optimizer]
    with_momentum = f" ({advice.momentum:g})" if advice.momentum else ""
    return [
        f"Advice for {name}{with_momentum}: {p.matrix} of {p.num_parameters:,} parameters, "
        f"{p.num_samples:,} samples, loss {advice.loss:.4g}",
        f"  lambda_1 = {_format(p.lambda_max)}, {found}",
        f"  noise of the {p.matrix}: P sigma^2 = {_format(p.variance)} in a random direction, "
        f"V(phi_1) = {_format(p.along)} along phi_1",
        f"  gradient: noise scale {_format(advice.noise.simple)}, critical batch size "
        f"{_format(advice.noise.curved)}",
        f"  along the gradient: curvature {_format(advice.noise.along)}, critical sharpness "
        f"{_format(advice.sharpness)}",
    ]


def _format(estimate: Estimate, index: int | None = None) -> str:
    """Return a number with its 95 % interval or its error bound."""
    mean, error = estimate.mean, estimate.error()
    if index is not None:
        mean, error = mean[index], error[index]
    if not math.isfinite(float(mean)):
        return "not known"
    if not math.isfinite(float(error)):
        return f"{float(mean):.2g} ± ?"
    # Do not print an error that is only roundoff.
    tiny = is_below(float(error), 1e-4 * abs(float(mean)))
    return f"{float(mean):.4g}" if tiny else format_uncertain(float(mean), float(error))


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    return [
        "  " + "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
        for row in (titles, *rows)
    ]


def _curvature_table(advice: Advice) -> list[str]:
    p = advice.prediction
    rows = [
        [
            f"{size:,}",
            _format(p.best.spread, i),
            _format(p.best.overlap, i),
            p.best.source[i],
            _format(advice.exponent, i),
            *([_format(advice.ratio, i)] if advice.optimizer in ADAPTIVE else []),
            *(_format_model(p, name, i) for name in ("directional", "additive", "multiplicative")),
        ]
        for i, size in enumerate(p.batch_sizes)
    ]
    titles = ["batch", "spread", "overlap", "from", "exponent"]
    titles += ["R"] if advice.optimizer in ADAPTIVE else []
    return _table([*titles, "directional", "additive", "multipl."], rows)


def _format_model(prediction: BatchPrediction, name: str, place: int) -> str:
    """Return the prediction of a model; in brackets, without an interval, if it is not trusted."""
    if prediction.trusted[name][place]:
        return _format(getattr(prediction, name).value, place)
    return format_prediction(prediction, name, place)


def _rate_table(advice: Advice) -> list[str]:
    unit = "rate" if advice.optimizer != "adam" or advice.known else "rate, relative"
    unit = "rate" if bool(torch.isfinite(advice.edge.mean).all()) else unit
    columns: dict[str, Any] = {
        "lambda_1": advice.prediction.best.value,
        "edge": advice.edge,
    }
    if advice.trainable is not None or not _is_indefinite(advice):
        columns[unit] = advice.rate
    if advice.trainable is not None:
        columns["trains to"] = advice.trainable
    if advice.optimizer in ADAPTIVE:
        columns |= {
            "least damping/rate": advice.damping,
            "papers": advice.damping_papers,
        }
    rows = [
        [
            f"{size:,}",
            *(_format(column, i) for column in columns.values()),
            _regime(advice, i),
        ]
        for i, size in enumerate(advice.batch_sizes)
    ]
    return _table(("batch", *columns, "limited by"), rows)


def _sentence_lines(advice: Advice) -> list[str]:
    """Return the advice for each batch size, then the warnings."""
    width = max(len(f"{size:,}") for size in advice.batch_sizes)
    lines = []
    for size, sentence in zip(advice.batch_sizes, advice.sentences, strict=True):
        lines += _wrap(f"{size:>{width},}: ", sentence)
    for warning in advice.warnings:
        lines += _wrap("Warning: ", f"{warning}.")
    return lines


def _notes(advice: Advice) -> list[str]:
    scaling = (
        "The edge is local and depends on the curvature alone. In experiments near a minimum, "
        "small networks trained at up to 0.5 to 4.2 times the edge. Intervals (±) are 95 %."
    )
    changes = [_format(advice.changes_at, i) for i in range(3)]
    if math.isfinite(float(advice.changes_at.mean[0])):
        scaling = (
            f"At a batch size of {changes[0]}, the noise along the leading eigenvector halves the "
            "edge. Below this size, the edge grows with the batch; above it, hardly. The papers' "
            f"models predict this change at {changes[1]} (additive) and {changes[2]} "
            f"(multiplicative). {scaling}"
        )
    lines = _wrap("", scaling)
    brackets = (
        "The last three columns are lambda_1 from other models. Do not trust numbers in brackets. "
        "Use lambda_1 of the first table."
    )
    if not all(itertools.chain(*advice.prediction.trusted.values())):
        lines += _wrap("", brackets)
    ratio = homogeneity(advice.prediction)
    if not is_below(ratio, TUNING.homogeneous):
        note = f"V(phi_1) is {ratio:.2g} times P sigma^2, but the additive model assumes 1."
        lines += _wrap("", note)
    return [*lines, f"  Cost: {advice.cost:.0f} gradients of all data."]


def _wrap(title: str, text: str) -> list[str]:
    indent = "  " + " " * len(title)
    return wrap(text, 98, initial_indent=f"  {title}", subsequent_indent=indent)
