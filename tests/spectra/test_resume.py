"""Interrupted runs are resumed from their state and give the same bits."""

import random
import signal

import pytest
import torch
from matrices import PRECISIONS, seeded
from processes import run_processes, start

import ritz
from ritz._core import journal
from ritz._core.storage import CorruptFileError
from ritz.operators import FunctionOperator
from ritz.spectra import eigenpairs, lanczos, lanczos_block
from ritz.testing import wigner, with_spectrum

RUNS = {
    "full": {"num_steps": 40},
    "partial": {"num_steps": 60, "reorthogonalize": "partial"},
    "none": {"num_steps": 60, "reorthogonalize": "none"},
    "restarted": {"largest": 3, "smallest": 1, "max_vectors": 12, "max_steps": 200},
}


class InterruptedRunError(Exception):
    pass


def whole_or_pairs(op, **settings):
    """Call ``eigenpairs`` if pairs are asked for, else ``lanczos``."""
    return eigenpairs(op, **settings) if "largest" in settings else lanczos(op, **settings)


def failing(op, *, after):
    """The operator, which raises at product number ``after``."""
    calls = []

    def product(block):
        calls.append(1)
        if len(calls) > after:
            raise InterruptedRunError
        return op @ block

    return FunctionOperator(product, n=op.shape[0], dtype=op.dtype)


def interrupted(op, state, *, after, **settings):
    with pytest.raises(InterruptedRunError):
        whole_or_pairs(failing(op, after=after), state=state, save_interval=0.0, **settings)


def assert_same_bits(found, expected):
    for name in ("values", "weights", "residuals", "diagonal", "off_diagonal"):
        left, right = getattr(found, name, None), getattr(expected, name, None)
        assert (left is None and right is None) or torch.equal(left, right), name
    assert found.num_products == expected.num_products
    assert found.status == expected.status


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", RUNS)
def test_a_run_interrupted_twice_ends_with_the_same_bits(rng, tmp_path, kind, dtype):
    op = wigner(150, dtype=dtype, generator=rng)
    expected = whole_or_pairs(op, **RUNS[kind])
    interrupted(op, tmp_path / "state", after=17, **RUNS[kind])
    interrupted(op, tmp_path / "state", after=11, **RUNS[kind])
    calls = []
    counted = FunctionOperator(lambda x: calls.append(1) or op @ x, n=150, dtype=dtype)
    found = whole_or_pairs(counted, state=tmp_path / "state", save_interval=0.0, **RUNS[kind])
    assert_same_bits(found, expected)
    # Each resumed run repeats the last product of the state, to recognise the operator.
    assert len(calls) == expected.num_products - 27 + 1


def blocks(op, **options):
    """Three runs, of which the last ends after two steps."""
    starts = torch.randn(30, 3, generator=seeded(4), dtype=op.dtype)
    starts[:, 2] = 0
    starts[:2, 2] = 1
    return lanczos_block(op, num_steps=9, start=starts, **options)


@pytest.mark.parametrize(
    ("mode", "vectors"), [("full", True), ("full", False), ("partial", True), ("none", False)]
)
def test_runs_side_by_side_interrupted_twice_end_with_the_same_bits(tmp_path, mode, vectors):
    op = ritz.as_operator(torch.diag(torch.linspace(1.0, 2.0, 30, dtype=torch.float64)))
    options = {"reorthogonalize": mode, "vectors": vectors}
    expected = blocks(op, **options)
    assert [run.num_products for run in expected] == [9, 9, 2]
    saving = options | {"state": tmp_path / "state", "save_interval": 0.0}
    for after in (2, 3):
        with pytest.raises(InterruptedRunError):
            blocks(failing(op, after=after), **saving)
    calls = []
    counted = FunctionOperator(lambda x: calls.append(1) or op @ x, n=30, dtype=op.dtype)
    for found, whole in zip(blocks(counted, **saving), expected, strict=True):
        assert_same_bits(found, whole)
        assert not vectors or torch.equal(found.vectors, whole.vectors)
    assert len(calls) == 9 - 4 + 1


def test_a_state_of_another_number_of_probes_is_refused(rng, tmp_path):
    op = wigner(30, generator=rng)
    with pytest.raises(InterruptedRunError):
        blocks(failing(op, after=4), state=tmp_path / "state", save_interval=0.0)
    with pytest.raises(ValueError, match="was made with probes=3, this run has probes=2"):
        lanczos_block(op, num_steps=9, num_probes=2, state=tmp_path / "state")


def test_every_vector_of_the_basis_is_written_once(rng, tmp_path, monkeypatch):
    """A save writes only the vectors that are new since the last one."""
    real, written = journal.write_tensors, []

    def count(path, tensors, header):
        written.append(sum(tensor.numel() for tensor in tensors.values() if tensor.ndim == 2))
        real(path, tensors, header)

    monkeypatch.setattr(journal, "write_tensors", count)
    op = wigner(150, generator=rng)
    lanczos(op, num_steps=40, vectors=True, state=tmp_path / "state", save_interval=0.0)
    assert sum(written) == 40 * 150
    assert max(written) == 2 * 150  # the first save has the start vector beside its successor


def test_a_space_that_closes_is_resumed_with_the_same_fresh_vector(tmp_path):
    op = ritz.as_operator(torch.diag(torch.tensor([3.0, 3.0, 2.0, 2.0, 1.0, 1.0]).repeat(5)))
    settings = {"largest": 6, "max_steps": 40}
    expected = whole_or_pairs(op, **settings)
    for after in (3, 2, 4):
        interrupted(op, tmp_path / "state", after=after, **settings)
    assert_same_bits(whole_or_pairs(op, state=tmp_path / "state", **settings), expected)


@pytest.mark.parametrize("damage", ["truncate", "flip"])
def test_a_damaged_state_is_refused_and_the_previous_one_used(rng, tmp_path, damage):
    op = wigner(150, generator=rng)
    expected = lanczos(op, **RUNS["full"])
    state = tmp_path / "state"
    interrupted(op, state, after=20, **RUNS["full"])
    data = bytearray(state.read_bytes())
    data[-5] ^= 1
    state.write_bytes(data[:-40] if damage == "truncate" else data)
    with pytest.warns(
        RuntimeWarning, match=r"state cannot be used, looking for the previous one: .*state"
    ):
        found = lanczos(op, state=state, **RUNS["full"])
    assert_same_bits(found, expected)


def test_a_damaged_part_of_the_basis_is_refused_too(rng, tmp_path):
    op = wigner(150, generator=rng)
    expected = lanczos(op, **RUNS["full"])
    state = tmp_path / "state"
    interrupted(op, state, after=20, **RUNS["full"])
    newest = max(tmp_path.glob("state.0.*-*"), key=lambda part: int(part.name.split("-")[1]))
    data = bytearray(newest.read_bytes())
    data[-100] ^= 1
    newest.write_bytes(data)
    with pytest.warns(RuntimeWarning, match="checksum"):
        found = lanczos(op, state=state, **RUNS["full"])
    assert_same_bits(found, expected)


def test_the_error_without_a_usable_state_of_runs_says_what_to_do(rng, tmp_path):
    op = wigner(150, generator=rng)
    state = tmp_path / "state"
    interrupted(op, state, after=20, **RUNS["full"])
    state.write_bytes(b"nonsense")
    (tmp_path / "state.previous").write_bytes(b"")
    with (
        pytest.warns(RuntimeWarning, match="state cannot be used"),
        pytest.raises(CorruptFileError, match=r"no usable state at .*: delete these files"),
    ):
        lanczos(op, state=state, **RUNS["full"])


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"num_steps": 41}, "num_steps"),
        ({"reorthogonalize": "partial"}, "reorthogonalize"),
        ({"generator": seeded(5)}, "start"),
    ],
)
def test_a_state_of_other_settings_is_refused_by_name(rng, tmp_path, change, name):
    op = wigner(150, generator=rng)
    interrupted(op, tmp_path / "state", after=20, **RUNS["full"])
    with pytest.raises(ValueError, match=rf"was made with {name}="):
        lanczos(op, state=tmp_path / "state", **(RUNS["full"] | change))


def test_restarts_do_not_leave_old_parts_behind(rng, tmp_path):
    op = wigner(150, generator=rng)
    interrupted(op, tmp_path / "state", after=60, **RUNS["restarted"])
    sizes = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert sizes < 3 * 13 * 150 * 8 + 50_000  # two generations of a basis, and headers


def test_a_missing_folder_is_an_error_that_names_it(rng, tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        lanczos(
            wigner(20, generator=rng),
            num_steps=5,
            state=tmp_path / "nowhere" / "s",
            save_interval=0.0,
        )


WORKER = """
import os, signal, sys, threading, time, torch, ritz
from ritz.operators import FunctionOperator
state, out, kind, last, moment = sys.argv[1:]
if float(moment):  # kill -9 after that many seconds
    threading.Timer(float(moment), os.kill, (os.getpid(), signal.SIGKILL)).start()
op = ritz.testing.wigner(400, generator=torch.Generator().manual_seed(3))
def slow(block):
    time.sleep(0.01 if float(moment) else 0)
    return op @ block
slowed = FunctionOperator(slow, n=400, dtype=torch.float64)
renamed, rename = [], os.replace
def deadly(*paths):  # kill -9 before that many files have their names
    renamed.append(paths)
    if len(renamed) == int(last):
        os.kill(os.getpid(), signal.SIGKILL)
    rename(*paths)
os.replace = deadly
runs = {
    "restarted": {"largest": 4, "smallest": 2, "max_vectors": 16, "max_steps": 400,
                  "rtol": 1e-5},
    "vectors": {"num_steps": 150, "vectors": True},
}
run = ritz.eigenpairs if kind == "restarted" else ritz.lanczos
found = run(slowed, state=state, save_interval=0.0, **runs[kind])
ritz.save(found, out)
"""


@pytest.fixture
def run(tmp_path):
    """Run in another process, which writes files of the given name; return its exit code."""

    def finished(name, kind, *, last=0, moment=0.0):
        paths = [tmp_path / name, tmp_path / f"{name}.out"]
        process = start(WORKER, *paths, kind, last, moment, errors=tmp_path / "errors")
        process.join()
        assert (tmp_path / "errors").read_text() == ""
        return process.exitcode

    return finished


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["restarted", "vectors"])
def test_ten_kills_at_random_times_change_no_bit_of_the_result(tmp_path, run, kind):
    assert run("calm", kind) == 0
    moments = random.Random(7)
    for _ in range(10):
        assert run("killed", kind, moment=moments.uniform(0.02, 0.25)) == -signal.SIGKILL
    assert run("killed", kind) == 0
    assert (tmp_path / "killed.out").read_bytes() == (tmp_path / "calm.out").read_bytes()


@pytest.mark.timeout(300)
def test_a_kill_between_the_two_files_of_a_save_changes_no_bit(tmp_path, run):
    assert run("calm", "vectors") == 0
    # A save renames a part, a head, the older head and the head again: each is the last once.
    for last in range(1, 10):
        assert run("killed", "vectors", last=last) == -signal.SIGKILL
    assert run("killed", "vectors") == 0
    assert (tmp_path / "killed.out").read_bytes() == (tmp_path / "calm.out").read_bytes()


def test_other_files_beside_a_state_are_kept(rng, tmp_path):
    op = ritz.as_operator(wigner(60, generator=rng))
    others = [
        "model.fold1.train-acc.csv",
        "model.v1.0-final",
        "model.hessian.0.0-5",
        "model.0.1-2.txt",
    ]
    for name in others:
        (tmp_path / name).write_text("mine")
    lanczos(op, num_steps=20, state=tmp_path / "model", save_interval=0)
    assert all((tmp_path / name).read_text() == "mine" for name in others)


def test_a_file_that_is_not_a_state_is_refused_and_not_changed(rng, tmp_path):
    op, path = ritz.as_operator(wigner(30, generator=rng)), tmp_path / "spectrum.safetensors"
    ritz.save(lanczos(op, num_steps=5), path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"state at .*spectrum\.safetensors is a saved Spectrum"):
        lanczos(op, num_steps=5, state=path, save_interval=0)
    assert path.read_bytes() == before


# ------------------------------------------------------------------------------------------
# A run is not resumed with another operator.


REFUSED = (
    r"state at .*state was made with another operator, of other weights .*; delete these files"
)


def spiked(dtype, generator):
    """A small bulk far below a few outliers, as Hessians are."""
    values = torch.linspace(-0.05, 0.1, 150, dtype=torch.float64)
    values[-3:] = torch.tensor([2.0, 5.0, 8.0])
    return with_spectrum(values.to(dtype), generator=generator)


MATRICES = {"wigner": lambda dtype, rng: wigner(150, dtype=dtype, generator=rng), "spiked": spiked}


@pytest.mark.parametrize("dtype", PRECISIONS)
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


@pytest.mark.parametrize("dtype", PRECISIONS)
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
@pytest.mark.parametrize("dtype", PRECISIONS)
def test_other_data_of_the_same_norms_are_refused(rng, tmp_path, mode, dtype):
    """The product is reflected at the vector: its norm and quadratic form stay the same."""
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
@pytest.mark.parametrize("dtype", PRECISIONS)
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
