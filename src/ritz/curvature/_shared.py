"""Names that other packages of ritz need and users do not."""

from ritz.curvature._adapter import Adapter, Forward
from ritz.curvature._batches import draw_samples
from ritz.curvature._cuda_graph import Replayed, Values, may_replay
from ritz.curvature._exact import Rows
from ritz.curvature._kfac import KFACKind
from ritz.curvature._kfac_factors import (
    affine_gradients,
    input_columns,
    input_moment,
    is_affine,
    is_layer,
    is_table,
    join_calls,
    moment,
    output_moment,
    projected_squares,
    reduced_moments,
    token_counts,
    token_deltas,
)
from ritz.curvature._losses import (
    KnownLoss,
    as_likelihood,
    check_labels,
    check_reduction,
    check_scores,
    check_shape,
    is_kept,
    known_loss,
    losses_alone,
    num_correct,
    outputs_and_labels,
    term_mass,
)
from ritz.curvature._matrices import MATRICES, CurvatureMatrix, batch_products
from ritz.curvature._module_gradients import CONVOLUTIONS, Call, squared_gradients
from ritz.curvature._noise_kinds import NOISE_KINDS, OF_STEP, NoiseKind, scale_of_step
from ritz.curvature._noise_step import Draw, StepNoise
from ritz.curvature._products import ENGINES, EngineName
from ritz.curvature._risk import check_risk, require_outputs
from ritz.curvature._sample_gradients import sample_gradient_parts
from ritz.curvature._statistics import Summary, gradient_roundoff, layer_table
