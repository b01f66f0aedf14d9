"""A basis spread over processes."""

import pytest
import torch
from matrices import seeded
from processes import run_processes

import ritz
from ritz.testing import wigner

pytestmark = pytest.mark.distributed
RUNS = {
    "plain": {"num_steps": 40, "vectors": True},
    "partial": {"num_steps": 40, "reorthogonalize": "partial", "vectors": True},
    "restarted": {"largest": 3, "smallest": 1, "max_vectors": 12, "vectors": True},
}
SCRIPT = f"""
    from ritz.operators import ShardedOperator
    from ritz.spectra._lanczos.recurrence import Basis
    op = ritz.testing.wigner(101, generator=torch.Generator().manual_seed(3))
    part = ShardedOperator(ritz.as_operator(op.matrix * (1 + rank) / (size * (size + 1) / 2)))
    made = []
    original = Basis.__init__
    def recorded(self, *args, **kwargs):
        original(self, *args, **kwargs)
        made.append(self.rows.shape[1])
    Basis.__init__ = recorded
    for kind, settings in {RUNS}.items():
        run = ritz.eigenpairs if kind == "restarted" else ritz.lanczos
        found = run(part, placement="spread", **settings)
        ritz.save(found, f"{{folder}}/{{kind}}{{rank}}")
    assert set(made) == {{101 * (rank + 1) // size - 101 * rank // size}}, made
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("count", [2, 3])
def test_a_spread_basis_gives_the_numbers_of_one_process(count, tmp_path):
    for code, error in run_processes(SCRIPT, count, tmp_path):
        assert code == 0, error
    op = wigner(101, generator=seeded(3))
    for kind, settings in RUNS.items():
        expected = (ritz.eigenpairs if kind == "restarted" else ritz.lanczos)(op, **settings)
        found = [ritz.load(tmp_path / f"{kind}{rank}") for rank in range(count)]
        for part in found:
            torch.testing.assert_close(part.values, expected.values, rtol=0, atol=1e-8)
            assert torch.equal(part.values, found[0].values)
            assert part.num_products == expected.num_products
        vectors = torch.cat([part.vectors for part in found])
        assert vectors.shape == expected.vectors.shape
        residuals = (op.matrix @ vectors - vectors * found[0].values).norm(dim=0)
        assert bool((residuals <= 2 * found[0].residuals).all())


def test_several_processes_resume_together_from_a_step_that_all_have(tmp_path):
    script = """
        from ritz.operators import FunctionOperator, ShardedOperator
        op = ritz.testing.wigner(101, generator=torch.Generator().manual_seed(3))
        calls = []
        def product(block):
            calls.append(1)
            if len(calls) > limit:
                dist.destroy_process_group()
                sys.exit(3)
            return op @ block / size
        limit = LIMIT
        sharded = ShardedOperator(FunctionOperator(product, n=101, dtype=torch.float64))
        found = ritz.lanczos(sharded, num_steps=30, placement="spread", state=f"{folder}/state",
                             save_interval=0.0)
        assert len(calls) == LIMIT, len(calls)
        ritz.save(found, f"{folder}/{rank}.safetensors")
        dist.destroy_process_group()
    """
    calm = tmp_path / "calm"
    calm.mkdir()
    for code, error in run_processes(script.replace("LIMIT", "30"), 2, calm):
        assert code == 0, error
    for code, error in run_processes(script.replace("LIMIT", "12"), 2, tmp_path):
        assert code == 3, error
    # One process lost its newest state: both go back to the one before.
    (tmp_path / "state.rank1.previous").replace(tmp_path / "state.rank1")
    for code, error in run_processes(script.replace("LIMIT", "20"), 2, tmp_path):
        assert code == 0, error
    for rank in range(2):
        name = f"{rank}.safetensors"
        assert (tmp_path / name).read_bytes() == (calm / name).read_bytes()
