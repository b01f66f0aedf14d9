import pytest
import torch

from ritz._core.modes import searched_convolutions


@pytest.mark.parametrize("wanted", [True, False])
def test_convolutions_are_searched_for_the_block_alone(wanted):
    with searched_convolutions(wanted):
        assert torch.backends.cudnn.benchmark is wanted
    assert not torch.backends.cudnn.benchmark


def test_convolutions_are_searched_no_longer_after_an_error():
    with pytest.raises(RuntimeError, match="inside"), searched_convolutions(True):
        raise RuntimeError("inside")
    assert not torch.backends.cudnn.benchmark


def test_a_search_that_was_asked_for_stays_on(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    with searched_convolutions(False):
        assert torch.backends.cudnn.benchmark
    assert torch.backends.cudnn.benchmark


def test_nothing_is_searched_where_determinism_is_asked_for(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    with searched_convolutions(True):
        assert not torch.backends.cudnn.benchmark
