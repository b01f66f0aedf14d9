"""A model that fails on its data is named, with the data and what they hold."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from ritz.cli._factories import explain_mismatch
from ritz.training._data import as_parts

INPUTS, LABELS = torch.ones(4, 3), torch.zeros(4, dtype=torch.int64)


def explained(model, data, loss_fn=cross_entropy, error=RuntimeError):
    """What is raised for a failure of a model on some data."""
    with (
        pytest.raises(Exception) as caught,  # noqa: PT011 - the caller looks at it
        explain_mismatch(model, as_parts(data), name="net", loss_fn=loss_fn),
    ):
        raise error("first step")
    return caught.value


def test_inputs_on_which_the_model_fails_are_described():
    error = explained(nn.Linear(5, 2), (INPUTS, LABELS))
    assert isinstance(error, ValueError)
    assert "model net failed on data" in str(error)
    assert "inputs of shape (2, 3), float32: RuntimeError: mat1 and mat2" in str(error)


def test_an_error_with_another_cause_is_not_changed():
    assert str(explained(nn.Linear(3, 2), (INPUTS, LABELS))) == "first step"
    assert str(explained(nn.Linear(5, 2), (INPUTS, LABELS), error=ValueError)) == "first step"


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.float32])
def test_labels_of_cross_entropy_are_accepted(dtype):
    labels = torch.zeros((4, 2) if dtype.is_floating_point else (4,), dtype=dtype)
    assert str(explained(nn.Linear(3, 2), (INPUTS, labels))) == "first step"


def test_labels_of_another_type_are_refused_for_cross_entropy():
    data = (INPUTS, torch.zeros(4, dtype=torch.int16))
    error = explained(nn.Linear(3, 2), data)
    assert isinstance(error, TypeError)
    assert "must be int64 or uint8 for cross-entropy, got int16" in str(error)
    assert str(explained(nn.Linear(3, 2), data, mse_loss)) == "first step"


def test_an_iterator_is_refused_because_it_can_be_read_once_only():
    with pytest.raises(TypeError, match="can be read once only"):
        as_parts(iter([(INPUTS, LABELS)]))
