"""Names that other packages of ritz need and users do not."""

from ritz.measures._groups import check_groups as check_groups
from ritz.measures._learning_rates import OptimizerName as OptimizerName
from ritz.measures._preconditioned import divisors as divisors
from ritz.measures._preconditioned import preconditioned_curvature as preconditioned_curvature
from ritz.measures._preconditioned import scaled_operator as scaled_operator
