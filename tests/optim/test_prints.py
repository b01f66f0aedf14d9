"""What wraps an optimiser prints the settings that the optimiser does not have."""

import pytest
from optim.walks import network
from torch.nn.functional import mse_loss
from torch.optim import SGD

from ritz import optim

EXPECTED = {
    "CovarianceNoise(SGD, kind='full', small=4, until=None: 0 steps)": lambda model, sgd: (
        optim.CovarianceNoise(sgd, model, mse_loss, kind="full", small=4)
    ),
    "Damping(KFAC, rule='ratio': delta 0.2)": lambda model, sgd: optim.Damping(
        optim.KFAC(model, delta=0.2), "ratio"
    ),
    "GroupSchedule(momentum 0.5 after 0 steps)": lambda model, sgd: optim.GroupSchedule(
        sgd, optim.linear_decay(9), key="momentum"
    ),
    "KFACPreconditioner(SGD, kind='ekfac': 2 layers)": lambda model, sgd: optim.KFACPreconditioner(
        sgd, model, kind="ekfac"
    ),
    "Gadam, 300 epochs, averaged from epoch 161: lr=0.0005, weight_decay=0.25": lambda *_: (
        optim.preset("gadam/vgg16/cifar100")
    ),
}


@pytest.mark.parametrize("text", EXPECTED)
def test_settings_are_printed(text):
    model = network()
    wrapper = EXPECTED[text](model, SGD(model.parameters(), lr=0.1, momentum=0.5))

    assert repr(wrapper).startswith(text)
