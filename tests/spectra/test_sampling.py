"""What all estimators share: generators, probes, tolerances, extreme matrices, files."""

import pytest
import torch

import ritz
from ritz._core.blocks import CHUNK, column_dots
from ritz._core.results import Estimate, Status, stderr
from ritz._core.sampling import ALIKE, Samples, Sampling, check_samples, doubling, is_settled
from ritz._core.storage import load, save
from ritz.operators import FunctionOperator
from ritz.testing import assert_within_stderr, with_spectrum

PRECISIONS = [torch.float32, torch.float64]
PUBLIC = {
    "lanczos": lambda op, **kw: ritz.lanczos(op, num_steps=min(5, op.shape[0]), **kw),
    "hutchinson": lambda op, **kw: ritz.trace(op, method="hutchinson", **kw),
    "hutch++": lambda op, **kw: ritz.trace(op, method="hutch++", num_probes=8, **kw),
    "xtrace": lambda op, **kw: ritz.trace(op, num_probes=4, **kw),
    "trace_function": lambda op, **kw: ritz.trace_function(
        op, lambda x: x, method="lanczos", num_steps=min(4, op.shape[0]), num_probes=8, **kw
    ),
    "diagonal": lambda op, **kw: ritz.diagonal(op, method="probes", **kw),
    "frobenius_norm": ritz.frobenius_norm,
    "spectral_norm": ritz.spectral_norm,
    "bounds": ritz.bounds,
    "moments": lambda op, **kw: ritz.moments(op, num_moments=6, **kw),
    "density": lambda op, **kw: ritz.density(op, num_steps=min(5, op.shape[0]), **kw),
    "smoothed": lambda op, **kw: ritz.density(
        op, num_steps=min(5, op.shape[0]), num_probes=3, width=0.1, **kw
    ),
    "kpm": lambda op, **kw: ritz.density(op, num_steps=5, method="kpm", **kw),
}
every = pytest.mark.parametrize("function", PUBLIC.values(), ids=PUBLIC.keys())


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def hidden(matrix):
    return FunctionOperator(lambda block: matrix @ block, n=len(matrix), dtype=matrix.dtype)


@pytest.fixture
def op():
    return hidden(with_spectrum(torch.linspace(-1, 2, 40, dtype=torch.float64)).matrix)


def tensors(result):
    """Every tensor and number of a result, by name, through the fields of its dataclass."""
    found = {}
    for name in result.__dataclass_fields__:
        value = getattr(result, name)
        if hasattr(value, "__dataclass_fields__"):
            found |= {f"{name}.{key}": inner for key, inner in tensors(value).items()}
        elif value is not None:
            found[name] = value
    return found


def same(left, right):
    left, right = tensors(left), tensors(right)
    return left.keys() == right.keys() and all(
        torch.equal(left[k], right[k]) if isinstance(left[k], torch.Tensor) else left[k] == right[k]
        for k in left
    )


@every
def test_no_generator_means_seed_zero_and_the_global_one_is_not_touched(function, op):
    before = torch.get_rng_state()
    result = function(op)
    assert torch.equal(torch.get_rng_state(), before)
    assert same(result, function(op, generator=seeded(0)))
    torch.rand(3)  # neither does the global state matter
    assert same(result, function(op))


@every
def test_another_seed_gives_another_result_and_is_recorded(function, op):
    first, second = function(op), function(op, generator=seeded(7))
    assert not same(first, second)
    seeds = [value for key, value in tensors(second).items() if key.endswith("seed")]
    assert seeds in ([7], [])  # bounds draws, but has nothing sampled to repeat


@every
def test_an_object_that_is_not_a_generator_is_refused(function, op):
    with pytest.raises(TypeError, match=r"generator must be a torch.Generator or None, got 3"):
        function(op, generator=3)


@every
def test_a_saved_result_is_restored_bit_for_bit(function, op, tmp_path):
    result = function(op)
    save(result, tmp_path / "result")
    back = load(tmp_path / "result")
    assert type(back) is type(result)
    assert same(back, result)
    assert str(back) == str(result)


def test_a_saved_solution_is_restored_bit_for_bit(tmp_path):
    result = ritz.solve(2 * torch.eye(3), torch.ones(3))
    save(result, tmp_path / "solution")
    assert same(load(tmp_path / "solution"), result)


class Watch:
    def start(self, label, total):
        self.said, self.finished = [label], False

    def update(self, done, note=""):
        self.said.append(done)

    def finish(self):
        self.finished = True


@every
def test_progress_is_reported_from_the_first_step_to_the_last(function, op):
    watch = Watch()
    function(op, progress=watch)
    assert watch.finished
    assert len(watch.said) > 1


TORTURE = {
    "zero": torch.zeros(12),
    "identity": torch.ones(12),
    "one row": torch.tensor([3.0]),
    "rank one": torch.tensor([5.0] + [0.0] * 11),
    "sixty decades": torch.logspace(-30, 30, 12, dtype=torch.float64),
}


@every
@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
@pytest.mark.parametrize("entries", TORTURE.values(), ids=TORTURE.keys())
def test_extreme_matrices_give_finite_numbers(function, entries, dtype):
    matrix = with_spectrum(entries.to(dtype)).matrix
    result = function(hidden(matrix))
    for name, value in tensors(result).items():
        if isinstance(value, torch.Tensor):
            assert value.isfinite().all(), name


@every
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_product_that_is_not_finite_is_an_error_and_never_a_number(function, bad):
    op = FunctionOperator(lambda block: block * bad, n=20)
    with pytest.raises(ValueError, match="op must give finite products"):
        function(op)


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
@pytest.mark.parametrize("name", ["hutchinson", "hutch++", "xtrace", "trace_function"])
@pytest.mark.parametrize("entries", TORTURE.values(), ids=TORTURE.keys())
def test_the_trace_is_right_for_extreme_matrices(name, entries, dtype):
    matrix = torch.diag(entries.to(dtype))
    found, exact = PUBLIC[name](hidden(matrix)), float(matrix.double().trace())
    low, high = found.interval(0.9999)
    slack = 10 * torch.finfo(dtype).eps * abs(exact)
    assert float(low) - slack <= exact <= float(high) + slack


def test_stderr_is_that_of_the_mean_and_unknown_for_one_sample():
    samples = torch.tensor([[1.0, 5.0], [3.0, 5.0]], dtype=torch.float64)
    assert stderr(samples).tolist() == [1.0, 0.0]
    assert stderr(samples[:1]).isnan().all()


def mean_of(samples):
    """What an estimator makes of its samples."""
    return samples.estimate(method="test", num_products=len(samples.values), truncation=0.0, seed=0)


def run(plan, op, measure, finish=mean_of, **more):
    return plan.run(op, measure, finish, generator=seeded(0), progress=False, label="test", **more)


def test_probes_are_drawn_one_after_another_whatever_the_block(op):
    def sample(width):
        widths = []

        def measure(block):
            widths.append(block.shape[1])
            return block[:3].T

        estimate = run(Sampling(7, block_size=width), op, measure)
        assert estimate.status == Status(outcome="completed", message="7 probes")
        return estimate.samples, widths

    narrow, wide = sample(2), sample(100)
    assert torch.equal(narrow[0], wide[0])
    assert (narrow[1], wide[1]) == ([2, 2, 2, 1], [7])


def test_the_least_number_of_probes_is_taken_even_if_fewer_would_do(op):
    plan = Sampling(13, rtol=0.5, max_probes=30, block_size=2)
    estimate = run(plan, op, lambda block: torch.ones(block.shape[1]))
    assert (len(estimate.samples), estimate.status.outcome) == (13, "converged")


def test_probes_are_doubled_until_the_interval_is_narrow_enough(op):
    plan = Sampling(4, rtol=0.2, max_probes=30)
    looks = []

    def finish(samples):
        looks.append(len(samples.values))
        return mean_of(samples)

    # One plus half a random sign: the 95 % interval of 30 samples is 0.19 wide.
    estimate = run(plan, op, lambda block: 1 + 0.5 * block[0], finish)
    assert looks[:3] == [4, 8, 16]
    assert estimate.status.ok == (float(estimate.error()) <= 0.2 * abs(float(estimate)))


def test_sampling_stops_at_once_if_the_truncation_exceeds_the_tolerance(op):
    def finish(samples):
        return Estimate.of(
            samples.values, method="test", num_products=len(samples.values), truncation=0.5
        )

    plan, products = Sampling(8, rtol=0.1, max_probes=30), []

    def measure(block):
        products.append(block.shape[1])
        return 1 + 0.01 * block[0]

    estimate = run(plan, op, measure, finish)
    assert sum(products) == 8
    assert estimate.status.outcome == "max_steps"


@pytest.mark.parametrize("probes", [40, 41, 1000])
def test_as_many_probes_as_rows_are_a_whole_basis_and_exact(op, probes):
    blocks = []

    def measure(block):
        blocks.append(block)
        return column_dots(block, op.matmat(block))

    estimate = run(Sampling(probes, block_size=16), op, measure)
    basis = torch.cat(blocks, 1)
    torch.testing.assert_close(basis @ basis.T, 40 * torch.eye(40, dtype=torch.float64))
    assert float(estimate) == pytest.approx(20.0, rel=1e-12)
    assert (float(estimate.stderr), estimate.degrees, estimate.samples) == (0.0, 0, None)
    assert "with a whole basis in place of random probes" in estimate.method


def test_a_tolerance_that_needs_more_probes_than_rows_is_reached_by_a_whole_basis(op):
    plan = Sampling(8, rtol=1e-6, max_probes=100)
    estimate = run(plan, op, lambda block: column_dots(block, op.matmat(block)))
    assert float(estimate) == pytest.approx(20.0, rel=1e-12)
    assert estimate.status.outcome == "converged"


@pytest.mark.parametrize(
    ("first", "limit", "counts"),
    [(4, 4, [4]), (4, 30, [4, 8, 16, 30]), (4, 32, [4, 8, 16, 32]), (8, 5, [5]), (1, 2, [1, 2])],
)
def test_numbers_of_probes_double_up_to_a_limit(first, limit, counts):
    assert doubling(first, limit) == counts


@pytest.mark.parametrize(
    ("probes", "rtol", "limit", "n", "looks"),
    [
        (8, None, 1000, 100, [8]),
        (8, None, 1000, 8, [8]),  # a whole basis
        (9, None, 1000, 8, [8]),
        (8, 0.1, 50, 100, [8, 16, 32, 50]),
        (8, 0.1, 50, 20, [8, 16, 20]),  # the last is a whole basis
        (8, 0.1, 16, 16, [8, 16]),
    ],
)
def test_the_error_is_judged_at_few_numbers_of_probes(probes, rtol, limit, n, looks):
    assert Sampling(probes, rtol, limit).looks(n) == looks


def test_sampling_ends_when_it_converged_or_cannot():
    values = torch.tensor([0.9, 1.1] * 8, dtype=torch.float64)

    def settled(rtol, truncation):
        estimate = Estimate.of(values, method="test", num_products=16, truncation=truncation)
        return is_settled(estimate.with_status(rtol), rtol)

    assert settled(None, 0.0)  # no tolerance
    assert settled(0.1, 0.0)  # converged
    assert not settled(0.01, 0.0)  # more probes help
    assert settled(0.01, 0.02)  # more probes do not
    assert settled(0.01, torch.inf)


@pytest.mark.parametrize("count", range(2, 14))
def test_few_equal_samples_have_an_unknown_error(count):
    estimate = mean_of(Samples(torch.full((count,), 7.0, dtype=torch.float64))).with_status(0.1)
    known = count >= ALIKE
    assert estimate.status.outcome == ("converged" if known else "uncertain")
    assert float(estimate.truncation) == (0.0 if known else torch.inf)


def test_only_the_entries_with_equal_samples_are_unknown():
    values = torch.tensor([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]], dtype=torch.float64)
    assert mean_of(Samples(values)).truncation.tolist() == [torch.inf, 0.0]


TWO_VALUES = torch.eye(60, dtype=torch.float64)
TWO_VALUES[0, 1] = TWO_VALUES[1, 0] = 20.0
FEW = {
    "hutchinson": lambda op, **kw: ritz.trace(op, method="hutchinson", **kw),
    "frobenius_norm": ritz.frobenius_norm,
    "diagonal": lambda op, **kw: ritz.diagonal(op, method="probes", **kw),
    "trace_function": lambda op, **kw: ritz.trace_function(
        op, torch.exp, method="lanczos", num_steps=4, **kw
    ),
}
TRUTHS = {
    "hutchinson": 60.0,
    "frobenius_norm": float(TWO_VALUES.norm()),
    "diagonal": torch.ones(60, dtype=torch.float64),
    "trace_function": float(torch.linalg.eigvalsh(TWO_VALUES).exp().sum()),
}


@pytest.mark.parametrize("num_probes", [2, 3, 4, 5])
@pytest.mark.parametrize("name", FEW)
def test_samples_that_agree_by_chance_are_not_exact(name, num_probes):
    # Random signs give samples of two values, which coincide with probability 2^(1 - num_probes).
    for seed in range(20):
        estimate = FEW[name](hidden(TWO_VALUES), num_probes=num_probes, generator=seeded(seed))
        low, high = estimate.interval(0.95)
        truth = torch.as_tensor(TRUTHS[name])
        known = bool(((low - 1e-9 <= truth) & (truth <= high + 1e-9)).all())
        assert known or float(estimate.stderr.max()) > 1e-9


# z'Az is 57 + (z_1 + z_2 + z_3)^2, and three of four probes agree.
THREE_ONES = torch.eye(60, dtype=torch.float64)
THREE_ONES[:3, :3] = 1.0


@pytest.mark.parametrize("name", ["hutchinson", "trace_function", "frobenius_norm"])
@pytest.mark.parametrize("num_probes", [6, 8, 10, 11])
def test_a_block_of_three_ones_is_not_mistaken_for_a_diagonal_matrix(name, num_probes):
    truths = TRUTHS | {
        "frobenius_norm": float(THREE_ONES.norm()),
        "trace_function": float(torch.linalg.eigvalsh(THREE_ONES).exp().sum()),
    }
    wrong = 0
    for seed in range(60):
        estimate = FEW[name](hidden(THREE_ONES), num_probes=num_probes, generator=seeded(seed))
        spread = float(estimate.stderr) > 1e-9
        wrong += not spread and abs(float(estimate) - truths[name]) > float(estimate.error()) + 1e-9
    assert wrong <= 0.1 * 60


@pytest.mark.parametrize("num_probes", [2, 4])
def test_few_probes_that_agree_by_chance_do_not_end_a_search_for_a_tolerance(num_probes):
    right = 0
    for seed in range(20):
        estimate = ritz.trace(
            hidden(TWO_VALUES),
            method="hutchinson",
            num_probes=num_probes,
            rtol=0.3,
            generator=seeded(seed),
        )
        assert estimate.status.outcome == "converged"
        right += abs(float(estimate) - 60) < 0.3 * 60
    assert right >= 19


def test_samples_that_are_not_finite_name_their_probe():
    check_samples(torch.ones(3, 2), 0)
    with pytest.raises(ValueError, match="the product with probe 12 has"):
        check_samples(torch.tensor([[1.0, 1.0], [1.0, float("inf")]]), 10)


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (5, 0), (CHUNK + 3, 1), (CHUNK // 2, 3)])
def test_column_dots_are_summed_in_double_precision(rows, columns):
    block = torch.full((rows, columns), 0.1)
    expected = torch.full((columns,), rows * float(torch.tensor(0.1)) ** 2, dtype=torch.float64)
    torch.testing.assert_close(column_dots(block, block), expected)


@pytest.mark.parametrize("name", ["hutchinson", "hutch++", "trace_function"])
def test_more_probes_than_rows_are_allowed(name):
    matrix = with_spectrum(torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)).matrix
    assert_within_stderr(PUBLIC[name](hidden(matrix)), 7.0)
