"""Rules for modules with a scale, or a scale and a shift: those that normalise, and PReLU."""

from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from ritz.curvature.capture import Call
from ritz.curvature.points import Params
from ritz.curvature.rules import sample_gradients


@sample_gradients.register
def _(module: _BatchNorm, call: Call, deltas: Tensor) -> Params:
    mean, variance = call.state.get("running_mean"), call.state.get("running_var")
    bare = functional.batch_norm(call.args[0], mean, variance, eps=module.eps)
    return _scale_and_shift(call, deltas, bare)


@sample_gradients.register
def _(module: nn.GroupNorm, call: Call, deltas: Tensor) -> Params:
    bare = functional.group_norm(call.args[0], module.num_groups, eps=module.eps)
    return _scale_and_shift(call, deltas, bare)


@sample_gradients.register
def _(module: nn.LayerNorm, call: Call, deltas: Tensor) -> Params:
    shape = module.normalized_shape
    bare = functional.layer_norm(call.args[0], shape, eps=module.eps)
    # Positions are ahead of what is normalised, not behind.
    return {
        name: part.reshape(*deltas.shape[:2], -1, *shape).sum(2)
        for name, part in _parts(call, deltas, bare).items()
    }


@sample_gradients.register
def _(module: nn.PReLU, call: Call, deltas: Tensor) -> Params:
    return _scale_and_shift(call, deltas, call.args[0].clamp_max(0))


def _scale_and_shift(call: Call, deltas: Tensor, bare: Tensor) -> Params:
    """For parameters by channel, the second axis of a batch; or one for all."""
    return {
        name: part.reshape(*deltas.shape[:2], len(call.state[name]), -1).sum(-1)
        for name, part in _parts(call, deltas, bare).items()
    }


def _parts(call: Call, deltas: Tensor, bare: Tensor) -> Params:
    return {name: deltas * bare if name == "weight" else deltas for name in call.chosen}
