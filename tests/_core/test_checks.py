import pytest
import torch

from ritz._core.checks import (
    check_choice,
    check_count,
    check_device,
    check_finite,
    check_interval,
    check_number,
    check_positive,
    check_range,
    check_real_floating,
    check_tensor,
    check_type,
    is_below,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("value", "low", "high", "match"),
    [
        (0, 1, None, "size must be at least 1, got 0"),
        (3, None, 2, "size must be at most 2, got 3"),
        (3, 1, 2, "size must be between 1 and 2, got 3"),
        (float("nan"), 0, None, "size must be a number that is at least 0, got nan"),
    ],
)
def test_range_error_names_the_argument_the_limits_and_the_value(value, low, high, match):
    with pytest.raises(ValueError, match=match):
        check_range("size", value, low=low, high=high)


def test_range_includes_its_ends():
    check_range("size", 1, low=1, high=1)
    check_range("size", -1e300)


@pytest.mark.parametrize("value", ["1", True, None])
def test_range_rejects_values_that_are_not_numbers(value):
    with pytest.raises(TypeError, match="size must be a number"):
        check_range("size", value, low=0)


@pytest.mark.parametrize("value", [1.0, "1", True])
def test_count_rejects_values_that_are_not_integers(value):
    with pytest.raises(TypeError, match="num_steps must be an integer"):
        check_count("num_steps", value)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_positive_number_is_finite_and_above_zero(value):
    with pytest.raises(ValueError, match=f"rate must be finite and above 0, got {value}"):
        check_positive("rate", value)


def test_zero_is_accepted_only_on_request():
    check_positive("decay", 0.0, zero=True)
    with pytest.raises(ValueError, match=r"decay must be finite and at least 0, got -0\.1"):
        check_positive("decay", -0.1, zero=True)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_number_is_finite(value):
    check_number("mean", -1e300)
    with pytest.raises(ValueError, match=f"mean must be finite, got {value}"):
        check_number("mean", value)


@pytest.mark.parametrize("interval", [3, (1.0,), (1.0, 2.0, 3.0)])
def test_an_interval_is_a_pair(interval):
    check_interval("interval", (0.0, 1.0))
    with pytest.raises(ValueError, match="interval must be a pair of numbers, got"):
        check_interval("interval", interval)


def test_type_error_describes_the_expected_type_and_names_the_actual_one():
    check_type("name", "mlp", str, "a string")
    with pytest.raises(TypeError, match=r"^name must be a string, got int$"):
        check_type("name", 3, str, "a string")


def test_smallest_count_is_one_by_default():
    check_count("num_steps", 1)
    with pytest.raises(ValueError, match="num_steps must be at least 1, got 0"):
        check_count("num_steps", 0)


def test_choice_error_lists_the_choices():
    check_choice("method", "kpm", ("kpm", "lanczos"))
    with pytest.raises(ValueError, match="method must be one of kpm, lanczos; got 'kmp'"):
        check_choice("method", "kmp", ("kpm", "lanczos"))


def test_finite_error_has_the_number_and_the_first_index_of_bad_entries():
    check_finite("block", torch.zeros(3, 2))
    bad = torch.zeros(3, 2)
    bad[1, 1], bad[2, 0] = float("nan"), float("inf")
    with pytest.raises(ValueError, match=r"2 NaN or Inf of 6 entries, the first at index \(1, 1\)"):
        check_finite("block", bad)


@pytest.mark.parametrize(
    ("tensor", "error", "match"),
    [
        ([1.0], TypeError, "block must be a torch.Tensor, got list"),
        (torch.zeros(2), ValueError, r"block must be \(3,\) or \(3, k\), got \(2,\)"),
        (torch.zeros(3, 1, 1), ValueError, r"got \(3, 1, 1\)"),
        (torch.zeros(3, dtype=torch.float64), TypeError, "block must be torch.float32"),
        (torch.zeros(3, device="meta"), ValueError, "block must be on cpu"),
    ],
)
def test_tensor_error_says_which_property_is_wrong(tensor, error, match):
    with pytest.raises(error, match=match):
        check_tensor("block", tensor, dtype=torch.float32, device=CPU, rows=3)


def test_tensor_may_be_a_vector_or_a_block():
    for shape in ((3,), (3, 5), (3, 0)):
        check_tensor("block", torch.zeros(shape), dtype=torch.float32, device=CPU, rows=3)


def test_a_tensor_may_be_required_to_be_a_vector_or_a_block():
    for ndim, shape, expected in ((1, (3, 1), r"\(3,\)"), (2, (3,), r"\(3, k\)")):
        with pytest.raises(ValueError, match=f"block must be {expected}, got"):
            check_tensor(
                "block", torch.zeros(shape), dtype=torch.float32, device=CPU, rows=3, ndim=ndim
            )


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, torch.bool])
def test_integer_complex_and_boolean_dtypes_are_rejected(dtype):
    check_real_floating("an operator", torch.bfloat16)
    with pytest.raises(TypeError, match="real floating-point"):
        check_real_floating("an operator", dtype)


def test_check_device_returns_the_device_with_its_index():
    assert check_device("cpu") == torch.device("cpu")
    assert check_device(torch.device("meta")) == torch.device("meta")


@pytest.mark.parametrize("name", ["gpu", "cuda:x", object()])
def test_check_device_refuses_names_torch_does_not_know(name):
    with pytest.raises(ValueError, match="device must be cpu, cuda or cuda:<number>, got"):
        check_device(name)


def test_check_device_refuses_missing_devices():
    with pytest.raises(ValueError, match="device must be one of this machine, got 'cuda:99'"):
        check_device("cuda:99")


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("wrap", [float, torch.tensor], ids=["float", "tensor"])
@pytest.mark.parametrize(
    ("error", "bound", "below"),
    [
        (1.0, 2.0, True),
        (2.0, 2.0, True),
        (0.0, 0.0, True),
        (2.0, 1.0, False),
        (INF, 1.0, False),
        (1.0, INF, True),
        (NAN, 1.0, False),
        (NAN, INF, False),
        (1.0, NAN, False),
        (NAN, NAN, False),
    ],
)
def test_an_error_is_below_its_bound_unless_either_is_nan(error, bound, below, wrap):
    assert is_below(wrap(error), wrap(bound)) is below
    assert is_below(wrap(error), bound) is below


@pytest.mark.parametrize(
    ("errors", "bound", "below"),
    [
        ([0.0, 1.0], 1.0, True),
        ([0.0, 2.0], 1.0, False),
        ([0.0, NAN], 1.0, False),
        ([INF, 0.0], 1.0, False),
        ([1.0, 2.0], [1.0, 2.0], True),
        ([1.0, 2.0], [2.0, 1.0], False),
        ([1.0, 2.0], [2.0, NAN], False),
        ([], 1.0, True),
    ],
)
def test_every_error_of_an_array_has_to_be_below_its_bound(errors, bound, below):
    bound = torch.tensor(bound) if isinstance(bound, list) else bound
    assert is_below(torch.tensor(errors), bound) is below


def test_choice_error_suggests_a_similar_choice():
    with pytest.raises(ValueError, match=r"got 'lamda_max'; did you mean lambda_max\?$"):
        check_choice("quantity", "lamda_max", ["alpha", "lambda_max"])
