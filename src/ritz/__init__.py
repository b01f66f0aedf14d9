"""Spectra of matrices that are too large to store, from matrix-vector products, with error bars."""

import importlib
import os
import sys
from typing import TYPE_CHECKING

from ritz._version import __version__

if TYPE_CHECKING:
    from ritz import (
        curvature,
        data,
        graphs,
        measures,
        models,
        operators,
        optim,
        plots,
        rmt,
        spectra,
        studies,
        testing,
        training,
    )
    from ritz._core.results import Estimate, NotConvergedError
    from ritz._core.storage import load, save
    from ritz.curvature import Risk, fisher, ggn, gradient_covariance, hessian
    from ritz.measures import advise, landscape, sharpness
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

# Modules of the public names, imported when a name is first used: `import ritz` imports no torch.
# Names that are not listed are packages, such as `ritz.plots`, or belong to `ritz.spectra`.
_MODULES = {
    "Estimate": "ritz._core.results",
    "LinearOperator": "ritz.operators",
    "NotConvergedError": "ritz._core.results",
    "Risk": "ritz.curvature",
    "advise": "ritz.measures",
    "as_operator": "ritz.operators",
    "fisher": "ritz.curvature",
    "ggn": "ritz.curvature",
    "gradient_covariance": "ritz.curvature",
    "hessian": "ritz.curvature",
    "landscape": "ritz.measures",
    "load": "ritz._core.storage",
    "save": "ritz._core.storage",
    "sharpness": "ritz.measures",
}

__all__ = [
    "Density",
    "Eigenpairs",
    "Estimate",
    "LinearOperator",
    "NotConvergedError",
    "Risk",
    "Spectrum",
    "__version__",
    "advise",
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


# A type checker would take every name to exist because of __getattr__.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in __all__:
            # With name and module, Python's traceback suggests a similar name.
            message = f"module 'ritz' has no attribute {name!r}"
            raise AttributeError(message, name=name, obj=sys.modules[__name__])
        if os.path.isdir(os.path.join(__path__[0], name)):
            return importlib.import_module(f"ritz.{name}")
        value = getattr(importlib.import_module(_MODULES.get(name, "ritz.spectra")), name)
        globals()[name] = value  # the next use does not call this function
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
