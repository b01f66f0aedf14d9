"""Names that other packages of ritz need and users do not."""

from ritz.graphs._clusters import COUNT_METHODS, sample_density
from ritz.graphs._fit import Model
from ritz.graphs._random import cluster_sizes
from ritz.graphs._similarity import Measure
