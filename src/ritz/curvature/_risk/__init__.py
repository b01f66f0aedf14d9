"""A risk: a model, a loss and data at one point in weight space."""

from ritz.curvature._risk.losses import (
    Adapter,
    Forward,
    KnownLoss,
    check_labels,
    check_reduction,
    is_kept,
    labelled,
    num_correct,
    output_hessian,
    recognised,
    sample_losses,
    term_mass,
)
from ritz.curvature._risk.modes import (
    Context,
    Params,
    Selection,
    differentiable,
    recorded,
    selected,
    without_warnings_of_fallbacks,
    without_warnings_of_torch,
)
from ritz.curvature._risk.risk import Risk

__all__ = [
    "Adapter",
    "Context",
    "Forward",
    "KnownLoss",
    "Params",
    "Risk",
    "Selection",
    "check_labels",
    "check_reduction",
    "differentiable",
    "is_kept",
    "labelled",
    "num_correct",
    "output_hessian",
    "recognised",
    "recorded",
    "sample_losses",
    "selected",
    "term_mass",
    "without_warnings_of_fallbacks",
    "without_warnings_of_torch",
]
