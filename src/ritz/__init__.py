"""Spectra of matrices too large to write down, from products alone, with error bars."""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from ritz import curvature, measures, operators, spectra
from ritz._core.results import Estimate, NotConvergedError
from ritz._core.storage import load, save
from ritz._version import __version__
from ritz.curvature import Risk, fisher, ggn, gradient_covariance, hessian
from ritz.measures import landscape, sharpness
from ritz.operators import LinearOperator, as_operator
from ritz.spectra import (
    Density,
    Eigenpairs,
    Spectrum,
    bounds,
    density,
    diagonal,
    eigenpairs,
    frobenius_norm,
    lanczos,
    logdet,
    maxent,
    moments,
    solve,
    spectral_norm,
    trace,
    trace_function,
)

if TYPE_CHECKING:
    from ritz import data, graphs, models, optim, plots, rmt, studies, testing, training

_ON_FIRST_USE = (
    "data",
    "graphs",
    "models",
    "optim",
    "plots",
    "rmt",
    "studies",
    "testing",
    "training",
)

__all__ = [
    "Density",
    "Eigenpairs",
    "Estimate",
    "LinearOperator",
    "NotConvergedError",
    "Risk",
    "Spectrum",
    "__version__",
    "as_operator",
    "bounds",
    "curvature",
    "data",
    "density",
    "diagonal",
    "eigenpairs",
    "fisher",
    "frobenius_norm",
    "ggn",
    "gradient_covariance",
    "graphs",
    "hessian",
    "lanczos",
    "landscape",
    "load",
    "logdet",
    "maxent",
    "measures",
    "models",
    "moments",
    "operators",
    "optim",
    "plots",
    "rmt",
    "save",
    "sharpness",
    "solve",
    "spectra",
    "spectral_norm",
    "studies",
    "testing",
    "trace",
    "trace_function",
    "training",
]


def __getattr__(name: str) -> ModuleType:
    if name in _ON_FIRST_USE:
        return importlib.import_module(f"ritz.{name}")
    raise AttributeError(f"module 'ritz' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
