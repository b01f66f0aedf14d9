"""A run does not go on with another operator."""

import pytest
import torch
from processes import run_processes
from spectra.test_resume import (
    RUNS,
    InterruptedRunError,
    assert_same_bits,
    failing,
    interrupted,
    whole_or_pairs,
)

import ritz
from ritz.operators import FunctionOperator
from ritz.spectra import lanczos, lanczos_block
from ritz.testing import wigner, with_spectrum

DTYPES = [torch.float32, torch.float64]
REFUSED = (
    r"state at .*state was made with another operator, of other weights .*; delete these files"
)


def spiked(dtype, generator):
    """A small bulk far below a few outliers, as Hessians are."""
    values = torch.linspace(-0.05, 0.1, 150, dtype=torch.float64)
    values[-3:] = torch.tensor([2.0, 5.0, 8.0])
    return with_spectrum(values.to(dtype), generator=generator)


MATRICES = {"wigner": lambda dtype, rng: wigner(150, dtype=dtype, generator=rng), "spiked": spiked}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize("kind", RUNS)
@pytest.mark.parametrize("after", [1, 12, 13])  # 12: just after a restart
def test_another_operator_is_refused_and_the_same_is_not(rng, tmp_path, kind, name, dtype, after):
    op = MATRICES[name](dtype, rng)
    state = tmp_path / "state"
    interrupted(op, state, after=after, **RUNS[kind])
    others = [ritz.as_operator(factor * op.matrix) for factor in (1.001, 0.999, 3.0, -1.0)]
    for other in (*others, MATRICES[name](dtype, rng)):
        with pytest.raises(ValueError, match=REFUSED):
            whole_or_pairs(other, state=state, **RUNS[kind])
    assert_same_bits(
        whole_or_pairs(op, state=state, **RUNS[kind]), whole_or_pairs(op, **RUNS[kind])
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", RUNS)
def test_roundoff_of_another_order_of_sums_is_no_difference(rng, tmp_path, kind, dtype):
    op, calls = spiked(dtype, rng), []
    noise = 20 * torch.finfo(dtype).eps * 8  # per unit vector, in units of the norm

    def noisy(block):
        calls.append(1)
        off = torch.randn(150, block.shape[1], generator=rng, dtype=dtype)
        return op @ block + noise * off / off.norm(dim=0)

    interrupted(op, tmp_path / "state", after=13, **RUNS[kind])
    loud = FunctionOperator(noisy, n=150, dtype=dtype)
    whole_or_pairs(loud, state=tmp_path / "state", **RUNS[kind])
    assert calls


@pytest.mark.parametrize("mode", ["full", "partial", "none"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_data_of_the_same_norms_are_noticed_by_the_vector(rng, tmp_path, mode, dtype):
    """Rotated in the complement of the vector: norm and quadratic form are as they were."""
    op, settings = wigner(150, dtype=dtype, generator=rng), {"num_steps": 40}
    settings["reorthogonalize"] = mode
    interrupted(op, tmp_path / "state", after=9, **settings)

    def rotated(block):
        product = op @ block
        along = block * (block * product).sum(0) / block.square().sum(0)
        return 2 * along - product

    other = FunctionOperator(rotated, n=150, dtype=dtype)
    with pytest.raises(ValueError, match=REFUSED.replace(".*;", ".* is another vector;")):
        whole_or_pairs(other, state=tmp_path / "state", **settings)


@pytest.mark.parametrize("mode", ["full", "partial", "none"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_runs_side_by_side_refuse_another_operator(tmp_path, mode, dtype):
    op = ritz.as_operator(torch.diag(torch.linspace(1.0, 2.0, 30, dtype=dtype)))
    starts = torch.zeros(30, 3, dtype=dtype)
    starts[0, 0] = starts[:2, 1] = starts[:, 2] = 1  # the first closes at once, the last goes on
    options = {"start": starts, "num_steps": 9, "reorthogonalize": mode}
    options |= {"state": tmp_path / "state", "save_interval": 0.0}
    with pytest.raises(InterruptedRunError):
        lanczos_block(failing(op, after=4), **options)
    for factor in (1.001, 3.0):
        with pytest.raises(ValueError, match=REFUSED):
            lanczos_block(ritz.as_operator(factor * op.matrix), **options)
    assert [run.num_products for run in lanczos_block(op, **options)] == [1, 2, 9]


@pytest.mark.parametrize("mode", ["full", "partial", "none"])
def test_runs_that_have_all_ended_are_compared_too(tmp_path, mode):
    op = ritz.as_operator(torch.diag(torch.linspace(1.0, 2.0, 30, dtype=torch.float64)))
    starts = torch.zeros(30, 2, dtype=torch.float64)
    starts[0, 0] = starts[:2, 1] = 1
    options = {"start": starts, "num_steps": 9, "reorthogonalize": mode}
    options |= {"state": tmp_path / "state", "save_interval": 0.0}
    first = lanczos_block(op, **options)
    with pytest.raises(ValueError, match=REFUSED):
        lanczos_block(ritz.as_operator(1.001 * op.matrix), **options)
    for found, expected in zip(lanczos_block(op, **options), first, strict=True):
        assert_same_bits(found, expected)


def test_a_product_that_is_not_finite_is_a_difference(rng, tmp_path):
    op = wigner(150, generator=rng)
    interrupted(op, tmp_path / "state", after=9, **RUNS["full"])
    broken = FunctionOperator(lambda block: block * torch.nan, n=150, dtype=torch.float64)
    with pytest.raises(ValueError, match="now has nan; delete"):
        lanczos(broken, state=tmp_path / "state", **RUNS["full"])


ONE_PROCESS = """
    from ritz.operators import FunctionOperator
    op = ritz.testing.wigner(60, generator=torch.Generator().manual_seed(3))
    calls = []
    def product(block):
        calls.append(1)
        if len(calls) == 8:
            raise KeyError("stopped")
        return op @ block
    options = {"num_steps": 20, "state": f"{folder}/state", "save_interval": 0.0}
    try:
        ritz.lanczos(FunctionOperator(product, n=60, dtype=torch.float64), **options)
    except KeyError:
        pass
    try:  # the data of one of them have changed
        ritz.lanczos(ritz.as_operator(op.matrix * (1 + rank)), **options)
    except ValueError as error:
        expected = "now has" if rank else "another process found a difference"
        assert expected in str(error), error
    else:
        raise RuntimeError("went on")
    dist.destroy_process_group()
"""


@pytest.mark.distributed
def test_all_processes_raise_if_one_of_them_finds_another_operator(tmp_path):
    for code, error in run_processes(ONE_PROCESS, 2, tmp_path):
        assert code == 0, error
