import pytest
import torch

from ritz._core.params import ParamSpace

LIKE = {"b": torch.arange(6.0).view(2, 3), "a": torch.tensor(7.0), "none": torch.zeros(0, 4)}


def test_flatten_uses_the_order_of_the_first_dictionary():
    space = ParamSpace(LIKE)
    assert space.size == 7
    assert space.flatten(LIKE).tolist() == [0, 1, 2, 3, 4, 5, 7]
    shuffled = {name: LIKE[name] for name in ("none", "a", "b")}
    assert torch.equal(space.flatten(shuffled), space.flatten(LIKE))


def test_unflatten_is_the_inverse_and_returns_views():
    space = ParamSpace(LIKE)
    vector = space.flatten(LIKE)
    named = space.unflatten(vector)
    assert list(named) == ["b", "a", "none"]
    torch.testing.assert_close(named, LIKE)
    named["a"].fill_(9)
    assert vector[-1] == 9


@pytest.mark.parametrize(
    ("like", "match"),
    [
        ({}, "at least one tensor"),
        ({"a": torch.zeros(1), "b": torch.zeros(1).double()}, "one dtype and device"),
    ],
)
def test_a_space_needs_tensors_of_one_dtype_and_device(like, match):
    with pytest.raises(ValueError, match=match):
        ParamSpace(like)


@pytest.mark.parametrize(
    ("tensors", "match"),
    [
        (
            {"b": torch.zeros(2, 3), "none": torch.zeros(0, 4)},
            r"a must have shape \(\), got nothing",
        ),
        (LIKE | {"b": torch.zeros(3, 2)}, r"b must have shape \(2, 3\), got \(3, 2\)"),
        (LIKE | {"c": torch.zeros(1)}, r"got also \['c'\]"),
    ],
)
def test_flatten_error_names_the_tensor(tensors, match):
    with pytest.raises(ValueError, match=match):
        ParamSpace(LIKE).flatten(tensors)


def test_unflatten_rejects_a_vector_of_another_size():
    with pytest.raises(ValueError, match=r"vector must be \(7,\), got \(6,\)"):
        ParamSpace(LIKE).unflatten(torch.zeros(6))
