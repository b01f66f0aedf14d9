"""What all estimators share: generators, probes, tolerances, extreme matrices, files."""

import pytest
import torch
from matrices import PRECISIONS, hidden, seeded

import ritz
from ritz._core.storage import load, save
from ritz.testing import assert_within_stderr, with_spectrum

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
    torch.rand(3)  # change the state of the global generator
    assert same(result, function(op))


@every
def test_another_seed_gives_another_result_and_is_recorded(function, op):
    first, second = function(op), function(op, generator=seeded(7))
    assert not same(first, second)
    seeds = [value for key, value in tensors(second).items() if key.endswith("seed")]
    assert seeds in ([7], [])  # bounds record no seed, since they hold for any start


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


BLOCKS = {
    "density": lambda op, **kw: ritz.density(op, num_probes=5, num_steps=15, **kw).nodes,
    "diagonal": lambda op, **kw: ritz.diagonal(op, num_probes=21, **kw).mean,
    **{
        f"moments, {basis}": lambda op, basis=basis, **kw: (
            ritz.moments(op, num_moments=7, basis=basis, **kw).samples
        )
        for basis in ("chebyshev", "legendre", "power")
    },
    **{
        f"trace_function, {mode}": lambda op, mode=mode, **kw: (
            ritz.trace_function(
                op,
                torch.exp,
                method="lanczos",
                num_probes=7,
                num_steps=12,
                reorthogonalize=mode,
                **kw,
            ).samples
        )
        for mode in ("none", "partial", "full")
    },
}


@pytest.mark.parametrize("name", BLOCKS)
def test_the_block_size_does_not_matter(name, op):
    narrow, *others = (BLOCKS[name](op, block_size=width) for width in (1, 3, 7, 100))
    for other in others:
        torch.testing.assert_close(other, narrow)


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


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
@pytest.mark.parametrize("name", ["hutchinson", "hutch++", "xtrace", "trace_function"])
@pytest.mark.parametrize("entries", TORTURE.values(), ids=TORTURE.keys())
def test_the_trace_is_right_for_extreme_matrices(name, entries, dtype):
    matrix = torch.diag(entries.to(dtype))
    found, exact = PUBLIC[name](hidden(matrix)), float(matrix.double().trace())
    low, high = found.interval(0.9999)
    slack = 10 * torch.finfo(dtype).eps * abs(exact)
    assert float(low) - slack <= exact <= float(high) + slack


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


@pytest.mark.parametrize("name", ["hutchinson", "hutch++", "trace_function"])
def test_more_probes_than_rows_are_allowed(name):
    matrix = with_spectrum(torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)).matrix
    assert_within_stderr(PUBLIC[name](hidden(matrix)), 7.0)
