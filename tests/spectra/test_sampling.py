"""What all estimators share: generators, probes, accuracy, torture, files."""

import pytest
import torch

import ritz
from ritz._core.results import Status, stderr
from ritz._core.sampling import CHUNK, Sampling, accuracy, check_samples, column_dots
from ritz._core.storage import load, save
from ritz.operators import FunctionOperator
from ritz.testing import assert_within_stderr, with_spectrum

PRECISIONS = [torch.float32, torch.float64]
PUBLIC = {
    "lanczos": lambda op, **kw: ritz.lanczos(op, num_steps=min(5, op.shape[0]), **kw),
    "hutchinson": lambda op, **kw: ritz.trace(op, method="hutchinson", **kw),
    "hutch++": lambda op, **kw: ritz.trace(op, method="hutch++", num_probes=4, **kw),
    "xtrace": lambda op, **kw: ritz.trace(op, num_probes=4, **kw),
    "trace_function": lambda op, **kw: ritz.trace_function(
        op, lambda x: x, num_steps=min(4, op.shape[0]), **kw
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
    return hidden(with_spectrum(torch.linspace(-1, 2, 20, dtype=torch.float64)).matrix)


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
def test_something_that_is_no_generator_is_refused(function, op):
    with pytest.raises(TypeError, match=r"generator must be a torch.Generator or None, got 3"):
        function(op, generator=3)


@every
def test_a_result_comes_back_from_its_file_bit_for_bit(function, op, tmp_path):
    result = function(op)
    save(result, tmp_path / "result")
    back = load(tmp_path / "result")
    assert type(back) is type(result)
    assert same(back, result)
    assert str(back) == str(result)


def test_a_solution_comes_back_from_its_file_bit_for_bit(tmp_path):
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
def test_progress_is_told_from_the_first_step_to_the_last(function, op):
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
    slack = 4 * float(found.stderr) + 10 * torch.finfo(dtype).eps * abs(exact)
    assert abs(float(found) - exact) <= slack + float(found.truncation or 0.0)


def test_stderr_is_that_of_the_mean_and_unknown_for_one_sample():
    samples = torch.tensor([[1.0, 5.0], [3.0, 5.0]], dtype=torch.float64)
    assert stderr(samples).tolist() == [1.0, 0.0]
    assert stderr(samples[:1]).isnan().all()


@pytest.mark.parametrize(
    ("mean", "error", "rtol", "outcome"),
    [(2.0, 0.1, 0.1, "converged"), (2.0, 0.3, 0.1, "max_steps"), (0.0, 0.0, 0.1, "converged")],
)
def test_accuracy_is_relative_to_the_mean(mean, error, rtol, outcome):
    assert accuracy(mean, error, rtol).outcome == outcome
    assert accuracy(-mean, error, rtol).outcome == outcome


def test_the_advice_is_the_square_of_what_is_missing():
    status = accuracy(1.0, 0.3, 0.1)
    assert status.advice == "use about 9 times as many probes"
    assert accuracy(0.0, 0.3, 0.1).message == "relative error inf, above rtol 0.1"


def test_probes_are_drawn_one_after_another_whatever_the_block(op):
    def run(width):
        plan = Sampling(7, block_size=width)
        widths = []

        def measure(block):
            widths.append(block.shape[1])
            return block[:3].T

        samples, status = plan.run(op, measure, generator=seeded(0), progress=False, label="test")
        assert status == Status(outcome="completed", message="7 probes")
        return samples, widths

    narrow, wide = run(2), run(100)
    assert torch.equal(narrow[0], wide[0])
    assert (narrow[1], wide[1]) == ([2, 2, 2, 1], [7])


def test_the_least_number_of_probes_is_taken_even_if_fewer_would_do(op):
    plan = Sampling(5, rtol=0.5, max_probes=50, block_size=2)
    samples, status = plan.run(
        op, lambda b: torch.ones(b.shape[1]), generator=seeded(0), progress=False, label="test"
    )
    assert (len(samples), status.outcome) == (5, "converged")


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
