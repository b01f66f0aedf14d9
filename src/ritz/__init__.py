"""Spectra of matrices too large to write down, from products alone, with error bars."""

import importlib
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

# The module of each name, imported when the name is first used: `import ritz` imports no torch.
_MODULES = {
    "Density": "ritz.spectra",
    "Eigenpairs": "ritz.spectra",
    "Estimate": "ritz._core.results",
    "LinearOperator": "ritz.operators",
    "NotConvergedError": "ritz._core.results",
    "Risk": "ritz.curvature",
    "Spectrum": "ritz.spectra",
    "as_operator": "ritz.operators",
    "bounds": "ritz.spectra",
    "curvature": "ritz.curvature",
    "data": "ritz.data",
    "density": "ritz.spectra",
    "diagonal": "ritz.spectra",
    "eigenpairs": "ritz.spectra",
    "fisher": "ritz.curvature",
    "frobenius_norm": "ritz.spectra",
    "ggn": "ritz.curvature",
    "gradient_covariance": "ritz.curvature",
    "graphs": "ritz.graphs",
    "hessian": "ritz.curvature",
    "lanczos": "ritz.spectra",
    "landscape": "ritz.measures",
    "load": "ritz._core.storage",
    "logdet": "ritz.spectra",
    "maxent": "ritz.spectra",
    "measures": "ritz.measures",
    "models": "ritz.models",
    "moments": "ritz.spectra",
    "operators": "ritz.operators",
    "optim": "ritz.optim",
    "plots": "ritz.plots",
    "rmt": "ritz.rmt",
    "save": "ritz._core.storage",
    "sharpness": "ritz.measures",
    "solve": "ritz.spectra",
    "spectra": "ritz.spectra",
    "spectral_norm": "ritz.spectra",
    "studies": "ritz.studies",
    "testing": "ritz.testing",
    "trace": "ritz.spectra",
    "trace_function": "ritz.spectra",
    "training": "ritz.training",
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


if not TYPE_CHECKING:  # a type checker would believe that every name exists

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module 'ritz' has no attribute {name!r}")
        module = importlib.import_module(_MODULES[name])
        value = module if module.__name__ == f"ritz.{name}" else getattr(module, name)
        globals()[name] = value  # found without this function from now on
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
