import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from ritz.cli._session import check_pair
from ritz.training._data import as_parts

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


def test_what_fails_is_tried_on_the_device_that_was_chosen():
    class Elsewhere(nn.Linear):
        def forward(self, x):
            if self.weight.device.type == "cpu":
                raise RuntimeError("no such kernel")
            return super().forward(x)

    parts, model = as_parts((torch.ones(4, 3), TOKENS[:, 0])), Elsewhere(3, 2)
    meta = torch.device("meta")
    moved = []
    model.to = lambda place: moved.append(place) or model
    with pytest.raises(ValueError, match="no such kernel"):
        check_pair(model, parts, name="elsewhere", device=meta)
    assert moved == [meta, torch.device("cpu")]
    with pytest.raises(ValueError, match="no such kernel"):
        check_pair(model, parts, name="elsewhere", device=torch.device("cpu"))
    assert len(moved) == 2


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.float32])
def test_labels_that_cross_entropy_takes(dtype):
    shape = (4, 2) if dtype.is_floating_point else (4,)
    targets = torch.zeros(shape, dtype=dtype)
    parts, model = as_parts((torch.ones(4, 3), targets)), nn.Linear(3, 2)
    cross_entropy(model(parts.train[0]), targets)
    check_pair(model, parts, name="linear", loss_fn=cross_entropy)


def test_labels_of_other_types_are_for_other_losses():
    parts = as_parts((torch.ones(4, 3), torch.zeros(4, dtype=torch.int16)))
    check_pair(nn.Linear(3, 2), parts, name="linear", loss_fn=mse_loss)
    with pytest.raises(TypeError, match="must be int64 or uint8 for cross-entropy, got int16"):
        check_pair(nn.Linear(3, 2), parts, name="linear", loss_fn=cross_entropy)


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
