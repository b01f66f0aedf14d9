"""A risk: a model, a loss and data at one point in weight space."""

from ritz.curvature._risk.adapter import Adapter, Forward, labelled, num_correct
from ritz.curvature._risk.batches import differentiable, is_rows, recorded, rows
from ritz.curvature._risk.losses import (
    KnownLoss,
    check_labels,
    check_reduction,
    is_kept,
    output_hessian,
    recognised,
    sample_losses,
    term_mass,
)
from ritz.curvature._risk.modes import (
    Context,
    Params,
    Selection,
    arithmetic,
    searched_convolutions,
    selected,
    without_deprecations_of_torch,
    without_warnings_of_fallbacks,
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
    "arithmetic",
    "check_labels",
    "check_reduction",
    "differentiable",
    "is_kept",
    "is_rows",
    "labelled",
    "num_correct",
    "output_hessian",
    "recognised",
    "recorded",
    "rows",
    "sample_losses",
    "searched_convolutions",
    "selected",
    "term_mass",
    "without_deprecations_of_torch",
    "without_warnings_of_fallbacks",
]
