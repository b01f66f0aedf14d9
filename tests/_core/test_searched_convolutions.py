"""The search for the fastest convolutions is switched on in a block alone."""

import pytest
import torch

from ritz._core.modes import searched_convolutions


@pytest.mark.parametrize("wanted", [True, False])
def test_the_search_for_convolutions_ends_with_the_block(wanted):
    with searched_convolutions(wanted):
        assert torch.backends.cudnn.benchmark is wanted
    assert not torch.backends.cudnn.benchmark


def test_the_search_for_convolutions_ends_after_an_error():
    with pytest.raises(RuntimeError, match="inside"), searched_convolutions(True):
        raise RuntimeError("inside")
    assert not torch.backends.cudnn.benchmark


def test_a_search_for_convolutions_that_the_user_started_stays_on(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    with searched_convolutions(False):
        assert torch.backends.cudnn.benchmark
    assert torch.backends.cudnn.benchmark


def test_convolutions_are_not_searched_in_deterministic_mode(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    with searched_convolutions(True):
        assert not torch.backends.cudnn.benchmark
