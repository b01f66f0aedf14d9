"""Names that other packages of ritz need and users do not."""

from ritz.graphs._clusters import sample_density
from ritz.graphs._density import chebyshev_means
from ritz.graphs._fit_models import Model
from ritz.graphs._random import cluster_sizes
