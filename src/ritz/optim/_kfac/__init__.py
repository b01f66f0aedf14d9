"""K-FAC and EK-FAC: the optimiser `KFAC`, and `KFACPreconditioner` around any other optimiser."""

from ritz.optim._kfac.curvature import Curvature, curvature_of
from ritz.optim._kfac.optimizer import KFAC
from ritz.optim._kfac.preconditioner import KFACPreconditioner

__all__ = ["KFAC", "Curvature", "KFACPreconditioner", "curvature_of"]
