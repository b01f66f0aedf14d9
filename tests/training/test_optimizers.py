"""Which way of stepping an optimiser by name is given."""

from functools import partial
from types import SimpleNamespace

import pytest
from torch.optim import SGD

from ritz.training import _optimizers

CUDA, CPU = SimpleNamespace(is_cuda=True), SimpleNamespace(is_cuda=False)


@pytest.fixture
def chosen(monkeypatch):
    """The keywords that SGD would be made with, on parameters that are said to be on a device."""

    def make(inner, params, **settings):
        return settings

    monkeypatch.setattr(_optimizers, "_OPTIMIZERS", {"recorded": partial(make, SGD)})
    return lambda params, **settings: _optimizers.create_optimizer("recorded", params, **settings)


def test_sgd_is_fused_if_all_parameters_are_on_cuda(chosen):
    assert chosen([CUDA, CUDA]) == {"fused": True}
    assert chosen([CUDA, CPU]) == {}
    assert chosen([]) == {}


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize(
    "way", [{"foreach": True}, {"foreach": False}, {"fused": False}, {"differentiable": True}]
)
def test_a_requested_implementation_of_the_step_is_used(chosen, way, capturable):
    assert chosen([CUDA], capturable=capturable, lr=0.1, **way) == {"lr": 0.1, **way}
