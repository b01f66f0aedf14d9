"""Long runs go on from where they were, bit for bit."""

import random
import signal
import subprocess
import sys
import textwrap

import pytest
import torch

import ritz
from ritz._core.storage import CorruptFileError
from ritz.operators import FunctionOperator
from ritz.spectra import lanczos
from ritz.testing import wigner

RUNS = {
    "full": {"num_steps": 40},
    "partial": {"num_steps": 60, "reorthogonalize": "partial"},
    "none": {"num_steps": 60, "reorthogonalize": "none"},
    "restarted": {"largest": 3, "smallest": 1, "max_vectors": 12, "num_steps": 200},
}


class InterruptedRunError(Exception):
    pass


def failing(op, *, after):
    """The operator, until its product number ``after``."""
    calls = []

    def product(block):
        calls.append(1)
        if len(calls) > after:
            raise InterruptedRunError
        return op @ block

    return FunctionOperator(product, n=op.shape[0], dtype=op.dtype)


def interrupted(op, state, *, after, **settings):
    with pytest.raises(InterruptedRunError):
        lanczos(failing(op, after=after), state=state, save_interval=0.0, **settings)


def assert_same_bits(found, expected):
    for name in ("values", "weights", "residuals", "diagonal", "off_diagonal"):
        left, right = getattr(found, name), getattr(expected, name)
        assert (left is None and right is None) or torch.equal(left, right), name
    assert found.num_products == expected.num_products
    assert found.status == expected.status


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", RUNS)
def test_a_run_interrupted_twice_ends_with_the_same_bits(rng, tmp_path, kind, dtype):
    op = wigner(150, dtype=dtype, generator=rng)
    expected = lanczos(op, **RUNS[kind])
    interrupted(op, tmp_path / "state", after=17, **RUNS[kind])
    interrupted(op, tmp_path / "state", after=11, **RUNS[kind])
    calls = []
    counted = FunctionOperator(lambda x: calls.append(1) or op @ x, n=150, dtype=dtype)
    found = lanczos(counted, state=tmp_path / "state", save_interval=0.0, **RUNS[kind])
    assert_same_bits(found, expected)
    assert len(calls) == expected.num_products - 28


def test_a_space_that_closes_is_resumed_with_the_same_fresh_vector(tmp_path):
    op = ritz.as_operator(torch.diag(torch.tensor([3.0, 3.0, 2.0, 2.0, 1.0, 1.0]).repeat(5)))
    settings = {"largest": 6, "num_steps": 40}
    expected = lanczos(op, **settings)
    for after in (3, 2, 4):
        interrupted(op, tmp_path / "state", after=after, **settings)
    assert_same_bits(lanczos(op, state=tmp_path / "state", **settings), expected)


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
        RuntimeWarning, match=r"state refused, looking for the previous one: .*state"
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


def test_where_no_state_is_usable_the_error_says_what_to_do(rng, tmp_path):
    op = wigner(150, generator=rng)
    state = tmp_path / "state"
    interrupted(op, state, after=20, **RUNS["full"])
    state.write_bytes(b"nonsense")
    (tmp_path / "state.previous").write_bytes(b"")
    with (
        pytest.warns(RuntimeWarning, match="state refused"),
        pytest.raises(CorruptFileError, match=r"no usable state at .*delete state\*"),
    ):
        lanczos(op, state=state, **RUNS["full"])


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"num_steps": 41}, "num_steps"),
        ({"reorthogonalize": "partial"}, "reorthogonalize"),
        ({"generator": torch.Generator().manual_seed(5)}, "start"),
    ],
)
def test_a_state_of_other_settings_is_refused_by_name(rng, tmp_path, change, name):
    op = wigner(150, generator=rng)
    interrupted(op, tmp_path / "state", after=20, **RUNS["full"])
    with pytest.raises(ValueError, match=rf"was made with {name}="):
        lanczos(op, state=tmp_path / "state", **(RUNS["full"] | change))


def test_a_state_of_another_operator_is_noticed(rng, tmp_path):
    interrupted(wigner(150, generator=rng), tmp_path / "state", after=20, **RUNS["full"])
    with pytest.raises(ValueError, match="op must be symmetric"):
        lanczos(wigner(150, generator=rng), state=tmp_path / "state", **RUNS["full"])


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
    import sys, time, torch, ritz
    from ritz.operators import FunctionOperator
    torch.set_num_threads(1)
    op = ritz.testing.wigner(400, generator=torch.Generator().manual_seed(3))
    def slow(block):
        time.sleep(0.002)
        return op @ block
    slowed = FunctionOperator(slow, n=400, dtype=torch.float64)
    print("ready", flush=True)
    found = ritz.lanczos(
        slowed, largest=4, smallest=2, max_vectors=16, num_steps=400, rtol=1e-10,
        state=sys.argv[1], save_interval=0.0,
    )
    ritz.save(found, sys.argv[2])
"""


@pytest.mark.timeout(300)
def test_ten_kills_at_random_moments_change_no_bit_of_the_result(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(textwrap.dedent(WORKER))

    def start(name):
        arguments = [
            sys.executable,
            str(script),
            str(tmp_path / name),
            str(tmp_path / f"{name}.out"),
        ]
        return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)

    undisturbed = start("calm")
    assert undisturbed.wait() == 0
    moments = random.Random(7)
    for _ in range(10):
        process = start("killed")
        assert process.stdout.readline() == "ready\n"
        try:
            process.wait(timeout=moments.uniform(0.02, 0.25))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        process.stdout.close()
    undisturbed.stdout.close()
    last = start("killed")
    assert last.wait() == 0
    last.stdout.close()
    assert (tmp_path / "killed.out").read_bytes() == (tmp_path / "calm.out").read_bytes()
