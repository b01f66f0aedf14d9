import pytest
import torch
from torch import nn

from ritz.cli._pairs import check_pair
from ritz.training.sources import as_parts

TOKENS = torch.arange(12).reshape(4, 3)
PARTS = as_parts((TOKENS, TOKENS[:, 0]))


class Changing(nn.Module):
    """Changes a parameter and a buffer, and draws, when it is called."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(12, 4, max_norm=0.1)
        self.frozen = nn.Dropout().eval()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        self.calls += 1
        return self.table(x) + torch.rand(1)


def test_trying_changes_nothing():
    model = Changing()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    drawn = torch.random.get_rng_state()
    check_pair(model, PARTS, name="changing")
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, before[name], rtol=0.0, atol=0.0)
    assert torch.equal(torch.random.get_rng_state(), drawn)
    assert model.training
    assert not model.frozen.training


def test_what_cannot_be_tried_passes():
    check_pair(nn.LazyLinear(3), PARTS, name="lazy")
    check_pair(nn.Linear(3, 2).half(), PARTS, name="half")
    check_pair(nn.Linear(3, 2), as_parts(iter([(TOKENS, TOKENS)])), name="once")


def test_labels_by_name_are_given_where_they_are_taken():
    class Named(nn.Module):
        def forward(self, x, labels):
            return x, labels

    class Alone(nn.Module):
        def forward(self, x):
            return x

    parts = as_parts([{"x": TOKENS, "labels": TOKENS}])
    check_pair(Named(), parts, name="named")
    check_pair(Alone(), parts, name="alone")
    wrong = as_parts([{"y": TOKENS, "labels": TOKENS}])
    with pytest.raises(ValueError, match=r"inputs of y shape \(4, 3\), int64 and labels shape"):
        check_pair(Alone(), wrong, name="alone")
