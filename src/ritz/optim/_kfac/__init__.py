"""K-FAC and EK-FAC: an optimiser, and a preconditioner around any other."""

from ritz.optim._kfac.optimizer import KFAC, KFACPreconditioner
from ritz.optim._kfac.preconditioner import Curvature, curvature_of

__all__ = ["KFAC", "Curvature", "KFACPreconditioner", "curvature_of"]
