"""A signal during the training of a study ends the study, which must not measure such a network."""

import os
import signal

import pytest
import torch
from torch import nn

from ritz.studies._training import fit_whole


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_training_interrupts_a_study(number, monkeypatch):
    class Signalled(nn.Linear):
        def forward(self, x):
            os.kill(os.getpid(), number)
            return super().forward(x)

    # Whatever handlers this process inherited.
    previous = {
        n: signal.signal(n, signal.default_int_handler) for n in (signal.SIGINT, signal.SIGTERM)
    }
    data = torch.ones(8, 2), torch.zeros(8, dtype=torch.long)
    try:
        with pytest.raises(KeyboardInterrupt):
            fit_whole(Signalled(2, 2), data, num_epochs=3, batch_size=8)
    finally:
        for n, handler in previous.items():
            signal.signal(n, handler)
