"""Names that other packages of ritz need and users do not."""

from ritz.operators._base import SumOperator
from ritz.operators._exact import Quantity, gershgorin, lower_bound, row_excess
from ritz.operators._interop import MATRIX_FILES
from ritz.operators._laplacian import GraphMatrix, NetworkXGraph, is_networkx
from ritz.operators._sparse import CompressedRows
